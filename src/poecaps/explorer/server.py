"""The explorer's HTTP interface, and the page that uses it."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar

import torch
import uvicorn
from fastapi import Body, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError

from poecaps import __version__
from poecaps.explorer import pictures
from poecaps.explorer.guard import LOCAL_HOSTS, Guard
from poecaps.explorer.render import STRIDE
from poecaps.explorer.schema import Code, Error, Model, Picture, Python
from poecaps.network import Domain  # noqa: TC001 (FastAPI reads the annotations)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from poecaps.explorer.render import ExplorerModel, Setting

P = ParamSpec("P")
R = TypeVar("R")

STATIC = FilePath(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
WORKERS = (
    2  # images computed side by side, each on one core: a long answer does not hold up a short one
)
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 (an address to be told from others)
LARGEST_SCALE = 20
LARGEST_INT = 2**31 - 1
LARGEST_SEED = 2**53 - 1  # what a page's numbers hold exactly
KINDS = ("image/png", "image/jpeg", "image/webp")

Name = Annotated[str, Path(description="Name of a model.")]
Number = Annotated[int, Path(ge=0, le=LARGEST_INT, description="Counted from 0.")]
Format = Annotated[
    Literal["png", "pixels"],
    Query(alias="as", description="A PNG, or the plain H·W·C bytes of the pixels, row by row."),
]
Scale = Annotated[
    int,
    Query(ge=1, le=LARGEST_SCALE, description="Side of the square that a PNG has for each pixel."),
]
Sent = Annotated[Picture, Body(description="The code to draw.")]

PNG: dict[str, Any] = {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
TAKES = {
    "requestBody": {
        "required": True,
        "content": dict.fromkeys(KINDS, BYTES["application/octet-stream"]),
    }
}
PIXELS: dict[str, Any] = {"content": {**PNG["content"], **BYTES}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meanings = {
        400: "The body is not text, as JSON must be.",
        403: "A request of another site.",
        404: "No such model, expert, parameter or image.",
        408: "The request took too long to arrive.",
        413: "The request is too large.",
        415: "The body is not sent as a picture.",
        422: "The request is not valid.",
        429: "Too many requests at once; try again in a second.",
    }
    return {
        status: {"model": Error, "description": meanings[status]}
        for status in (400, 403, 404, 408, 413, 422, 429, *statuses)
    }


class Library:
    """The models by their names, and the threads that ask them."""

    def __init__(self, models: Sequence[ExplorerModel]) -> None:
        self.models = {each.name: each for each in models}
        if not models or len(self.models) != len(models):
            raise ValueError(
                f"models must be one or more of different names, but are {[each.name for each in models]}"
            )
        self.threads = ThreadPoolExecutor(WORKERS, "explorer")

    def find(self, name: str) -> ExplorerModel:
        """Find a model by its name."""
        if name not in self.models:
            raise HTTPException(
                404, f"there is no model of this name, but {', '.join(self.models)}"
            )
        return self.models[name]

    async def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute in a thread of our own, one of few."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: function(*args, **kwargs))


def create_app(models: Sequence[ExplorerModel], **bounds: Any) -> FastAPI:
    """Make the web application that shows some models; `bounds` are options of `Guard`."""
    library = Library(models)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        library.threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="poecaps explorer",
        version=__version__,
        description="What each expert of a product of expert capsules has learned. "
        'Bodies and answers are JSON, but for images; whatever is wrong is answered with {"error": why}.',
        docs_url=None,  # its page would load scripts from outside
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    app.add_middleware(Guard, **bounds)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteError, _refused)
    _add_models(app, library)
    _add_pictures(app, library)
    _add_page(app)
    return app


# ---------------------------------------------------------------------------------------------------------
# Endpoints


def _add_models(app: FastAPI, library: Library) -> None:
    @app.get("/api/models", responses=_errors())
    async def models() -> list[str]:
        """Names of the models, the first of which the page opens with."""
        return list(library.models)

    @app.get("/api/models/{model}", responses=_errors())
    async def model(model: Name) -> Model:
        """Sizes of a model, and where the sliders of its experts are 0 and 1."""
        found = library.find(model)
        return Model(
            name=found.name,
            image_shape=list(found.network.architecture.image_shape),
            experts=found.experts,
            parameters=found.parameters,
            grid=list(found.grid),
            field=found.field,
            stride=STRIDE,
            test_images=0 if found.images is None else len(found.images),
            mean=found.mean.tolist(),
            deviation=found.unit.tolist(),
        )

    @app.get(
        "/api/models/{model}/experts/{expert}/typical",
        response_class=Response,
        responses={**_errors(), 200: PIXELS},
    )
    async def typical(
        model: Name, expert: Number, as_: Format = "png", scale: Scale = 1
    ) -> Response:
        """Draw an expert alone, at the mean of its codes."""
        found = library.find(model)
        _require_expert(found, expert)
        shelf = await library.ask(lambda: found.shelf)
        return _picture(shelf[expert], as_, scale)

    @app.get(
        "/api/models/{model}/images/{index}",
        response_class=Response,
        responses={**_errors(), 200: PIXELS},
    )
    async def image(model: Name, index: Number, as_: Format = "png", scale: Scale = 1) -> Response:
        """Take a test image."""
        found = library.find(model)
        if found.images is None or index >= len(found.images):
            raise HTTPException(
                404, f"there are {0 if found.images is None else len(found.images):,} test images"
            )
        pixels = (
            (found.images.batch([index])[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        )
        return _picture(pixels, as_, scale)


def _add_pictures(app: FastAPI, library: Library) -> None:
    @app.get("/api/models/{model}/draw", responses=_errors())
    async def draw(
        model: Name,
        domain: Annotated[Domain, Query(description="Where the code is drawn.")] = "learned",
        expert: Annotated[
            int | None,
            Query(
                ge=0,
                le=LARGEST_INT,
                description="Which expert; by default one drawn at random. "
                "Not looked at in the domain joint, where all are drawn together.",
            ),
        ] = None,
        seed: Annotated[
            int, Query(ge=0, le=LARGEST_SEED, description="The same seed gives the same code.")
        ] = 0,
    ) -> Picture:
        """Draw a new code, which `decode` turns into an image."""
        found = library.find(model)
        if expert is not None:
            _require_expert(found, expert)
        return Picture.of(await library.ask(found.draw, domain, expert, seed))

    @app.post(
        "/api/models/{model}/decode", response_class=Response, responses={**_errors(), 200: PIXELS}
    )
    async def decode(model: Name, picture: Sent, as_: Format = "png", scale: Scale = 1) -> Response:
        """Draw the image of a code."""
        found, settings = _checked(library, model, picture)
        return _picture(await library.ask(found.decode, settings), as_, scale)

    @app.post("/api/models/{model}/python", responses=_errors())
    async def python(model: Name, picture: Sent) -> Python:
        """Write the three lines of Python that make the image of a code again."""
        found, settings = _checked(library, model, picture)
        return Python(lines=found.python(settings))

    @app.post(
        "/api/models/{model}/experts/{expert}/traversal",
        response_class=Response,
        responses={**_errors(), 200: PIXELS},
    )
    async def traversal(
        model: Name,
        expert: Number,
        picture: Sent,
        as_: Format = "png",
        scale: Annotated[int, Query(ge=1, le=4)] = 1,
    ) -> Response:
        """Draw what each parameter of an expert does to a picture: a row for each, a column for each of -3, …, 3.

        As pixels, the D·7 images come one after the other.
        """
        found, settings = _checked(library, model, picture)
        _require_expert(found, expert)
        sheet = await library.ask(found.traverse, settings, expert)
        if as_ == "pixels":
            return _picture(sheet, as_, scale)
        return Response(
            await library.ask(pictures.sheet, sheet, scale), media_type="image/png", headers=_FRESH
        )

    @app.post(
        "/api/models/{model}/encode",
        response_model=Code,
        responses=_errors(415),
        openapi_extra=TAKES,
    )
    async def encode(
        model: Name,
        request: Request,
        centre: Annotated[
            bool, Query(description="Whether to centre and scale what is bright, as MNIST was.")
        ] = False,
        invert: Annotated[
            bool, Query(description="Whether dark is to be bright: for ink on paper.")
        ] = False,
    ) -> JSONResponse:
        """See what a model makes of an image: a PNG, JPEG or WebP of any size, as the body of the request."""
        found = library.find(model)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() not in KINDS:
            raise HTTPException(415, "send a picture, as image/png, image/jpeg or image/webp")
        return await library.ask(_encoded, found, await request.body(), centre, invert)


def _encoded(model: ExplorerModel, data: bytes, centre: bool, invert: bool) -> JSONResponse:
    try:
        pixels = pictures.read(
            data, model.network.architecture.image_shape, centre=centre, invert=invert
        )
    except pictures.PictureError as error:
        raise HTTPException(422, str(error)) from error
    seen = model.encode(pixels)
    answer = {
        "firing": seen.firing,
        "free_energy": seen.free_energy,
        "picture": Picture.of(seen.settings).model_dump(),
        "image": seen.image.tolist(),
        "reconstruction": seen.reconstruction.tolist(),
        "routing": seen.routing.tolist(),
    }
    return JSONResponse(answer, headers=_FRESH)


_FRESH = {"cache-control": "no-store"}


def _picture(pixels: Any, as_: str, scale: int) -> Response:
    if as_ == "pixels":
        return Response(pixels.tobytes(), media_type="application/octet-stream", headers=_FRESH)
    return Response(pictures.write(pixels, scale), media_type="image/png", headers=_FRESH)


def _checked(library: Library, name: str, picture: Picture) -> tuple[ExplorerModel, tuple[Setting, ...]]:
    """Find a model, and see that it has the experts and parameters of a picture."""
    model = library.find(name)
    for each in picture.experts:
        _require_expert(model, each.expert)
        if len(each.offsets) > model.parameters:
            raise HTTPException(
                404,
                f"an expert of {name} has {model.parameters} parameters, not {len(each.offsets)}",
            )
    return model, picture.settings()


def _require_expert(model: ExplorerModel, expert: int) -> None:
    if expert >= model.experts:
        raise HTTPException(
            404, f"there is no expert {expert}; {model.name} has {model.experts}, counted from 0"
        )


# ---------------------------------------------------------------------------------------------------------
# Errors


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 (it is registered for these)
    problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3]]
    return JSONResponse({"error": "; ".join(problems)}, 422)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteError)  # noqa: S101 (it is registered for these)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


# ---------------------------------------------------------------------------------------------------------
# The page, and the server


def _add_page(app: FastAPI) -> None:
    """Serve the files of the page from memory: no address reaches a disk."""
    for file in sorted(STATIC.iterdir()):
        if file.suffix not in TYPES:
            continue
        address = "/" if file.name == "index.html" else f"/{file.name}"
        app.get(address, include_in_schema=False)(_serving(file.read_bytes(), TYPES[file.suffix]))


def _serving(content: bytes, kind: str) -> Callable[[], Any]:
    async def serve_file() -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return serve_file


def serve(
    models: Sequence[ExplorerModel],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None],
) -> None:
    """Serve the explorer until Ctrl-C; port 0 takes a free one, and `ready` is given the address."""
    torch.set_num_threads(1)  # the threads of the library share the cores
    beyond = host not in LOCAL_HOSTS
    app = create_app(
        models, hosts=(*LOCAL_HOSTS, host, socket.gethostname()) if beyond else LOCAL_HOSTS, any_address=beyond
    )
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    with listen(host, port) as listener:
        shown = "127.0.0.1" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        ready(
            f"http://{shown}:{listener.getsockname()[1]}/"
        )  # the listener keeps who comes now waiting
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # how it is meant to end
            return


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a socket that clients can connect to; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except socket.gaierror as error:
        raise ValueError(f"--host must be an address of this machine, but is {host!r}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(
            f"cannot listen at port {port} of {host} ({why}); leave out --port for a free one"
        ) from error
    # Without it an answer's body waits for the receipt of its head: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
