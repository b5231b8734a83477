"""The HTTP interface of the explorer, and the page that uses it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from fastapi import Body, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError

from poecaps._version import __version__
from poecaps.code_density import Domain  # noqa: TC001 (FastAPI reads the annotations)
from poecaps.explorer import chains, effects, maps, pictures
from poecaps.explorer.connections import BACKLOG, LimitedServer, bounded_log
from poecaps.explorer.render import ExplorerModel, as_pixels
from poecaps.explorer.schema import (
    MAX_SEED,
    Chain,
    ChainStart,
    ChainSteps,
    Code,
    CodeMap,
    Encoding,
    Ends,
    Error,
    Interpolation,
    ModelInfo,
    ParameterEffect,
    PythonCode,
    Training,
    TrainingSource,
    TrainingStart,
    Walk,
)
from poecaps.explorer.security import (
    LOCAL_HOSTS,
    SecurityMiddleware,
    is_loopback,
    new_token,
    require_token,
)
from poecaps.explorer.training import LiveTraining, TrainingError, UnknownSourceError, sweep
from poecaps.network import CapsuleNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from poecaps.explorer.render import Setting

P = ParamSpec("P")
R = TypeVar("R")

STATIC = FilePath(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
TRAINED = "trained-here"  # name of a model that was trained in the explorer
MAX_RESULTS = 64  # of a model that are kept; a map has at most 3 MB
THREADS = 2  # each computes on one core, so that a long request does not delay a short one
ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 (recognized, not used as a default)
MAX_SCALE = 20
MAX_INT = 2**31 - 1
NO_STORE = {"cache-control": "no-store"}
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")

Name = Annotated[str, Path(description="Name of a model.")]
Number = Annotated[int, Path(ge=0, le=MAX_INT, description="Counted from 0.")]
MapOf = Annotated[
    int | None,
    Query(ge=0, le=MAX_INT, description="The expert; by default all of them together."),
]
Format = Annotated[
    Literal["png", "pixels"],
    Query(alias="as", description="PNG, or the H·W·C bytes of the pixels, row by row."),
]
Scale = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_SCALE,
        description="Each pixel of the image is a square of this side in the PNG.",
    ),
]
CodeBody = Annotated[Code, Body(description="The code.")]

PNG_RESPONSE: dict[str, Any] = {
    "content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}
}
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": dict.fromkeys(IMAGE_TYPES, BYTES["application/octet-stream"]),
    }
}
IMAGE_RESPONSE: dict[str, Any] = {"content": {**PNG_RESPONSE["content"], **BYTES}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meanings = {
        400: "The body is not JSON text.",
        401: "The token is missing or wrong.",
        403: "The request comes from another site.",
        404: "There is no such model, expert, parameter, image or density.",
        408: "The request took too long to arrive.",
        409: "The chain or its image does not belong to the model, or the chain has ended; or a "
        "model is being trained already.",
        413: "The request is too large.",
        415: "The content type of the body is not that of a picture.",
        422: "The request is not valid.",
        429: "Too many requests are in progress; try again in a second.",
    }
    return {
        status: {"model": Error, "description": meanings[status]}
        for status in (400, 401, 403, 404, 408, 413, 422, 429, *statuses)
    }


class ModelRegistry:
    """The models by name, and the threads in which they compute."""

    def __init__(self, models: Sequence[ExplorerModel]) -> None:
        self.models = {each.name: each for each in models}
        if not models or len(self.models) != len(models):
            raise ValueError(
                "models must be one or more models with different names, but are "
                f"{[each.name for each in models]}"
            )
        self.threads = ThreadPoolExecutor(THREADS, "explorer")
        self.slow_thread = ThreadPoolExecutor(1, "explorer-slow")
        # Of `compute_once`, by model; a model that is replaced takes its results along.
        self.results: WeakKeyDictionary[ExplorerModel, dict[Any, Any]] = WeakKeyDictionary()
        self.trained: str | None = None  # name of the model that was trained here
        self.training = LiveTraining(models, self.add_trained)

    def find(self, name: str) -> ExplorerModel:
        """Return the model with this name, or raise a 404 error."""
        if name not in self.models:
            raise HTTPException(
                404, f"there is no model with this name; there are {', '.join(self.models)}"
            )
        return self.models[name]

    async def compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function in one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: function(*args, **kwargs))

    async def compute_once(
        self,
        function: Callable[Concatenate[ExplorerModel, P], R],
        model: ExplorerModel,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a function that takes seconds once for each of its arguments, in a thread for it.

        Of the results of a model, those that were used last are kept.
        """

        def result() -> R:
            known = self.results.setdefault(model, {})
            key = (function, *args, *kwargs.items())
            if key not in known:
                known[key] = function(model, *args, **kwargs)
            found: R = known[key]
            known[key] = known.pop(key)  # the last one was used last
            while len(known) > MAX_RESULTS:
                del known[next(iter(known))]
            return found

        return await asyncio.get_running_loop().run_in_executor(self.slow_thread, result)

    def add_trained(self, folder: FilePath) -> str:
        """Add a model that was trained in the explorer in place of the previous one."""
        names = (TRAINED + (f"-{count}" if count > 1 else "") for count in itertools.count(1))
        name = self.trained or next(each for each in names if each not in self.models)
        self.models[name] = ExplorerModel(name, str(folder), CapsuleNetwork.load(folder))
        self.trained = name
        return name

    def close(self) -> None:
        """Stop the threads and a training."""
        self.training.close()
        for each in (self.threads, self.slow_thread):
            each.shutdown(wait=False, cancel_futures=True)


def create_app(models: Sequence[ExplorerModel], *, token: str | None, **options: Any) -> FastAPI:
    """Create the web application; `token` and `options` are those of `SecurityMiddleware`."""
    registry = ModelRegistry(models)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        registry.close()

    app = FastAPI(
        title="poecaps explorer",
        version=__version__,
        description="Explore the experts of a product of expert capsules. Requests and responses "
        'are JSON, except for images; an error is {"error": "reason"}. Every request needs the '
        "token of the explorer, for example as the header Authorization: Bearer TOKEN.",
        docs_url=None,  # its page would load scripts from other sites
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    app.add_middleware(SecurityMiddleware, token=token, **options)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(StarletteError, _http_error)
    _add_models(app, registry)
    _add_codes(app, registry)
    _add_maps(app, registry)
    _add_chains(app, registry)
    _add_training(app, registry)
    _add_page(app)
    return app


# --------------------------------------------------------------------------------------------------
# Endpoints


def _add_models(app: FastAPI, registry: ModelRegistry) -> None:
    @app.get("/api/models", responses=_errors())
    async def models() -> list[str]:
        """Return the names of the models; the page opens the first."""
        return list(registry.models)

    @app.get("/api/models/{model}", responses=_errors())
    async def model(model: Name) -> ModelInfo:
        """Return the sizes of a model, and the mean and deviation of the codes of its experts."""
        found = registry.find(model)
        return ModelInfo(
            name=found.name,
            image_shape=list(found.network.architecture.image_shape),
            experts=found.experts,
            parameters=found.parameters,
            grid=list(found.grid),
            field=found.receptive_field,
            stride=found.stride,
            first_pixel=found.first_pixel,
            images=0 if found.images is None else len(found.images),
            part=found.part,
            note=found.note,
            background=found.background,
            chains=chains.max_chains(found),
            mean=found.mean.tolist(),
            deviation=found.deviation.tolist(),
        )

    @app.get(
        "/api/models/{model}/experts/{expert}/typical",
        response_class=Response,
        responses={**_errors(), 200: IMAGE_RESPONSE},
    )
    async def typical(
        model: Name, expert: Number, as_: Format = "png", scale: Scale = 1
    ) -> Response:
        """Return the image of a single expert at the mean of its codes."""
        found = registry.find(model)
        _require_expert(found, expert)
        images = await registry.compute(lambda: found.typical_images)
        return _image_response(images[expert], as_, scale)

    @app.get(
        "/api/models/{model}/images/{index}",
        response_class=Response,
        responses={**_errors(), 200: IMAGE_RESPONSE},
    )
    async def image(model: Name, index: Number, as_: Format = "png", scale: Scale = 1) -> Response:
        """Return an image of the model's data."""
        found = registry.find(model)
        if found.images is None or index >= len(found.images):
            count = 0 if found.images is None else len(found.images)
            raise HTTPException(404, f"there are {count:,} images")
        return _image_response(as_pixels(found.images.batch([index]))[0], as_, scale)


def _add_codes(app: FastAPI, registry: ModelRegistry) -> None:
    @app.get("/api/models/{model}/draw", responses=_errors())
    async def draw(
        model: Name,
        domain: Annotated[Domain, Query(description="Distribution of the code.")] = "learned",
        expert: Annotated[
            int | None,
            Query(
                ge=0,
                le=MAX_INT,
                description="The expert; by default a random one. "
                "Ignored in the domain joint, where all experts are drawn together.",
            ),
        ] = None,
        seed: Annotated[
            int, Query(ge=0, le=MAX_SEED, description="The same seed gives the same code.")
        ] = 0,
    ) -> Code:
        """Draw a code at random; `decode` returns its image."""
        found = registry.find(model)
        if expert is not None:
            _require_expert(found, expert)
        return Code.from_settings(await registry.compute(found.draw, domain, expert, seed))

    @app.post(
        "/api/models/{model}/decode",
        response_class=Response,
        responses={**_errors(), 200: IMAGE_RESPONSE},
    )
    async def decode(
        model: Name, code: CodeBody, as_: Format = "png", scale: Scale = 1
    ) -> Response:
        """Return the image of a code."""
        found, settings = _find_and_check(registry, model, code)
        return _image_response(await registry.compute(found.decode, settings), as_, scale)

    @app.post("/api/models/{model}/python", responses=_errors())
    async def python(model: Name, code: CodeBody) -> PythonCode:
        """Return three lines of Python that reproduce the image of a code."""
        found, settings = _find_and_check(registry, model, code)
        return PythonCode(lines=found.python(settings))

    @app.post(
        "/api/models/{model}/experts/{expert}/traversal",
        response_class=Response,
        responses={**_errors(), 200: IMAGE_RESPONSE},
    )
    async def traversal(
        model: Name,
        expert: Number,
        code: CodeBody,
        as_: Format = "png",
        scale: Annotated[int, Query(ge=1, le=4)] = 1,
    ) -> Response:
        """Vary each parameter of an expert: one row per parameter, one column per offset -3, …, 3.

        As pixels, the D·7 images follow one after the other.
        """
        found, settings = _find_and_check(registry, model, code)
        _require_expert(found, expert)
        images = await registry.compute(found.traverse, settings, expert)
        if as_ == "pixels":
            return _image_response(images, as_, scale)
        return Response(
            await registry.compute(pictures.write_grid, images, scale),
            media_type="image/png",
            headers=NO_STORE,
        )

    @app.post(
        "/api/models/{model}/encode",
        response_model=Encoding,
        responses=_errors(415),
        openapi_extra=IMAGE_BODY,
    )
    async def encode(
        model: Name,
        request: Request,
        centre: Annotated[
            bool,
            Query(
                description="Whether to centre and scale the bright part as in MNIST; the dark "
                "part, if the images of the model have a light background."
            ),
        ] = False,
        invert: Annotated[
            Literal["true", "false", "auto"],
            Query(
                description="Whether to invert the brightness, such as that of ink on paper; auto: "
                "if the background is the opposite of that of the model's images."
            ),
        ] = "false",
    ) -> JSONResponse:
        """Encode an image: a PNG, JPEG or WebP of any size, as the body of the request."""
        found = registry.find(model)
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            not in IMAGE_TYPES
        ):
            raise HTTPException(
                415, "send a picture with content type image/png, image/jpeg or image/webp"
            )
        inverts = {"true": True, "false": False, "auto": None}[invert]
        return await registry.compute(_encode, found, await request.body(), centre, inverts)


def _encode(model: ExplorerModel, data: bytes, centre: bool, invert: bool | None) -> JSONResponse:
    try:
        picture = pictures.read(
            data,
            model.network.architecture.image_shape,
            centre=centre,
            invert=invert,
            background=model.background,
        )
    except pictures.PictureError as error:
        raise HTTPException(422, str(error)) from error
    encoded = model.encode(picture.pixels)
    content = {
        "inverted": picture.inverted,
        "firing": encoded.firing,
        "free_energy": encoded.free_energy,
        "picture": Code.from_settings(encoded.settings).model_dump(),
        "image": encoded.image.tolist(),
        "reconstruction": encoded.reconstruction.tolist(),
        "routing": encoded.routing.tolist(),
    }
    return JSONResponse(content, headers=NO_STORE)


def _add_maps(app: FastAPI, registry: ModelRegistry) -> None:
    @app.get("/api/models/{model}/experts/{expert}/effects", responses=_errors())
    async def parameter_effects(model: Name, expert: Number) -> list[ParameterEffect]:
        """Measure what each parameter of an expert changes, one after the other."""
        found = registry.find(model)
        _require_expert(found, expert)
        measured = await registry.compute_once(effects.effects, found, expert)
        return [ParameterEffect(**asdict(each)) for each in measured]

    @app.get("/api/models/{model}/map", responses=_errors())
    async def map_(model: Name, expert: MapOf = None) -> CodeMap:
        """Return a map of the codes of an expert, or of all experts."""
        found = await _find_map(model, expert)
        return CodeMap(
            explained=None if found.explained is None else list(found.explained),
            columns=found.columns,
            filled=found.filled.tolist(),
            images=_base64(found.images),
        )

    @app.get("/api/models/{model}/map/code", responses=_errors())
    async def map_code(
        model: Name,
        x: Annotated[float, Query(ge=0, le=1, description="From left to right.")],
        y: Annotated[float, Query(ge=0, le=1, description="From top to bottom.")],
        expert: MapOf = None,
    ) -> Code:
        """Return the code at a position of a map."""
        found = await _find_map(model, expert)
        return Code.from_settings(registry.find(model).settings(found.at(x, y)))

    async def _find_map(model: str, expert: int | None) -> maps.CodeMap:
        found = registry.find(model)
        if expert is not None:
            _require_expert(found, expert)
        return await registry.compute_once(maps.make_map, found, expert)

    @app.post("/api/models/{model}/interpolation", responses=_errors())
    async def interpolate(
        model: Name, ends: Annotated[Ends, Body(description="The codes at both ends.")]
    ) -> Interpolation:
        """Interpolate linearly between two codes, before squashing."""
        found, start = _find_and_check(registry, model, ends.start)
        _, end = _find_and_check(registry, model, ends.end)
        codes, images = await registry.compute(found.interpolate, start, end, ends.steps)
        return Interpolation(
            codes=[Code.from_settings(each) for each in codes], images=_base64(images)
        )


def _base64(pixels: Any) -> str:
    return base64.b64encode(pixels.tobytes()).decode()


def _add_chains(app: FastAPI, registry: ModelRegistry) -> None:
    @app.post("/api/models/{model}/chains", response_model=Walk, responses=_errors(409))
    async def start_chains(
        model: Name, start: Annotated[ChainStart, Body(description="Where the chains start.")]
    ) -> JSONResponse:
        """Start Markov chains on the density of a model, from noise or at an image."""
        found = _find_with_density(registry, model)
        return await registry.compute(_start_chains, found, start)

    @app.post("/api/models/{model}/chains/steps", response_model=Walk, responses=_errors(409))
    async def step_chains(
        model: Name, steps: Annotated[ChainSteps, Body(description="The chains, and their steps.")]
    ) -> JSONResponse:
        """Make steps of Hamiltonian Monte Carlo with the chains of an earlier response."""
        found = _find_with_density(registry, model)
        return await registry.compute(_step_chains, found, steps)


def _start_chains(model: ExplorerModel, start: ChainStart) -> JSONResponse:
    try:
        walk = chains.start(
            model, start.chains, start.seed, anneal=start.anneal, image=start.pixels()
        )
    except chains.ChainError as error:
        raise HTTPException(409, str(error)) from error
    return _walk_response(walk)


def _step_chains(model: ExplorerModel, steps: ChainSteps) -> JSONResponse:
    try:
        walk = chains.advance(model, steps.chain.state(), steps.steps, steps.temperature)
    except chains.ChainError as error:
        raise HTTPException(409, str(error)) from error
    return _walk_response(walk)


def _walk_response(walk: chains.Walk) -> JSONResponse:
    content = {
        "chain": Chain.from_state(walk.state).model_dump(),
        "images": walk.images.tolist(),
        "free_energy": walk.free_energy.tolist(),
        "accepted": walk.accepted.tolist(),
        "inverse_temperature": walk.inverse_temperature,
    }
    return JSONResponse(content, headers=NO_STORE)


def _find_with_density(registry: ModelRegistry, name: str) -> ExplorerModel:
    model = registry.find(name)
    if model.network.density is None:
        raise HTTPException(
            404, f"{name} has no density to run chains on; train a model with the preset energy"
        )
    return model


def _add_training(app: FastAPI, registry: ModelRegistry) -> None:
    training = registry.training

    def state(since: int = 0) -> JSONResponse:
        return JSONResponse(training.snapshot(since), headers=NO_STORE)

    @app.get("/api/training/sources", responses=_errors())
    async def sources() -> list[TrainingSource]:
        """Return the names of images that a model can learn from."""
        return [TrainingSource(name=n, label=label) for n, label in training.sources().items()]

    @app.get("/api/training", response_model=Training, responses=_errors())
    async def show(
        since: Annotated[
            int, Query(ge=0, le=MAX_INT, description="Number of the first point of the curves.")
        ] = 0,
    ) -> JSONResponse:
        """Return what there is to see of the training."""
        return state(since)

    @app.post("/api/training/start", response_model=Training, responses=_errors(409))
    async def start(
        options: Annotated[TrainingStart, Body(description="What to learn from.")],
    ) -> JSONResponse:
        """Train a small model, in a process of its own; one at a time."""
        try:
            await registry.compute(training.start, **options.model_dump())
        except UnknownSourceError as error:
            raise HTTPException(404, str(error)) from error
        except TrainingError as error:
            raise HTTPException(409, str(error)) from error
        return state()

    @app.post("/api/training/stop", response_model=Training, responses=_errors())
    async def stop() -> JSONResponse:
        """Stop the training, if one is running."""
        training.stop()
        return state()


def _image_response(pixels: Any, as_: str, scale: int) -> Response:
    if as_ == "pixels":
        return Response(pixels.tobytes(), media_type="application/octet-stream", headers=NO_STORE)
    return Response(pictures.write(pixels, scale), media_type="image/png", headers=NO_STORE)


def _find_and_check(
    registry: ModelRegistry, name: str, code: Code
) -> tuple[ExplorerModel, tuple[Setting, ...]]:
    """Return a model and the settings of a code, once the model has its experts and parameters."""
    model = registry.find(name)
    for each in code.experts:
        _require_expert(model, each.expert)
        if len(each.offsets) > model.parameters:
            raise HTTPException(
                404,
                f"an expert of {name} has {model.parameters} parameters, not {len(each.offsets)}",
            )
    return model, code.settings()


def _require_expert(model: ExplorerModel, expert: int) -> None:
    if expert >= model.experts:
        raise HTTPException(
            404, f"there is no expert {expert}; {model.name} has {model.experts}, counted from 0"
        )


# --------------------------------------------------------------------------------------------------
# Errors


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 (it is registered for this class)
    problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3]]
    return JSONResponse({"error": "; ".join(problems)}, 422)


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteError)  # noqa: S101 (it is registered for this class)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


# --------------------------------------------------------------------------------------------------
# The page, and the server


def _add_page(app: FastAPI) -> None:
    """Serve the files of the page from memory, so that no URL reaches the disk."""
    for file in sorted(STATIC.iterdir()):
        if file.suffix not in MEDIA_TYPES:
            continue
        url = "/" if file.name == "index.html" else f"/{file.name}"
        app.get(url, include_in_schema=False)(_serving(file.read_bytes(), MEDIA_TYPES[file.suffix]))


def _serving(content: bytes, kind: str) -> Callable[[], Any]:
    async def serve_file() -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return serve_file


def serve(
    models: Sequence[ExplorerModel],
    *,
    token: str | None,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str, str], None],
) -> None:
    """Serve the explorer until Ctrl-C.

    Parameters
    ----------
    models
        The models.
    token
        The token that requests must have; None is only allowed if others cannot connect.
    host, port
        Where to listen; port 0 selects a free port.
    ready
        Called once the server accepts connections, with the URL, which contains the token, and with
        that for a browser that is started now, which opens the page once.

    Raises
    ------
    ValueError
        If the token is invalid, or None at a host where others can connect.
    """
    require_token(token, host)
    sweep()
    torch.set_num_threads(1)  # the threads of the registry share the cores
    is_public = not is_loopback(host)
    names = [*LOCAL_HOSTS, host, *([socket.gethostname()] if is_public else [])]
    ticket = None if token is None else new_token()
    app = create_app(models, token=token, ticket=ticket, hosts=names, any_address=is_public)
    with listen(host, port) as listener:
        shown = "127.0.0.1" if host in ALL_ADDRESSES else f"[{host}]" if ":" in host else host
        page = f"http://{shown}:{listener.getsockname()[1]}/"
        urls = [page if each is None else f"{page}?token={each}" for each in (token, ticket)]
        # Connections are queued from now on, even before the server runs.
        ready(*urls)
        try:
            with bounded_log():
                LimitedServer(app).run(sockets=[listener])
        except KeyboardInterrupt:  # the regular way to stop it
            return


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a socket that accepts connections; port 0 selects a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ValueError(f"host must be an address of this machine, but is {host!r}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on port {port} of {host} ({reason}); choose another port, or 0 for a "
            "free one"
        ) from error
    # Otherwise Nagle's algorithm delays the body of a response by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
