"""The HTTP interface: its responses and its errors."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks.explorer_load import load
from poecaps.explorer import chains, security, server
from poecaps.explorer.render import ExplorerModel, Setting
from poecaps.explorer.security import SecurityMiddleware, is_loopback, new_token, require_token
from poecaps.explorer.server import STATIC, create_app, serve
from tests.explorer.conftest import BEARER, TOKEN, serving
from tests.explorer.test_pictures import broken, png

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

PICTURE = {
    "experts": [
        {"expert": 1, "offsets": [0.5, -1.25], "magnitude": 1.5, "negative": True},
        {"expert": 2},
    ]
}
SETTINGS = (Setting(1, (0.5, -1.25), 1.5, negative=True), Setting(2))
PNG = {"content-type": "image/png"}


def image_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/png"
    return np.asarray(Image.open(io.BytesIO(response.content)))


def error_of(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert list(answer) == ["error"]
    return str(answer["error"])


def in_new_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread of its own: Playwright's loop may run in that of the test."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


# --------------------------------------------------------------------------------------------------
# Responses


def test_models_and_their_sizes(client: httpx.Client, digits: ExplorerModel) -> None:
    assert client.get("/api/models").json() == ["digits", "colours", "walks"]
    about = client.get("/api/models/digits").json()
    assert (about["experts"], about["parameters"], about["grid"], about["images"]) == (
        4,
        5,
        [6, 6],
        30,
    )
    assert (about["field"], about["stride"]) == (17, 2)
    np.testing.assert_allclose(about["mean"], digits.network.code_density.mean)
    assert client.get("/api/models/colours").json()["image_shape"] == [3, 20, 23]


def test_decode_draws_the_code(client: httpx.Client, digits: ExplorerModel) -> None:
    wanted = digits.decode(SETTINGS)
    assert np.array_equal(
        image_of(client.post("/api/models/digits/decode", json=PICTURE)), wanted[..., 0]
    )
    raw = client.post("/api/models/digits/decode?as=pixels", json=PICTURE).content
    assert np.array_equal(np.frombuffer(raw, np.uint8).reshape(28, 28, 1), wanted)
    large = image_of(client.post("/api/models/digits/decode?scale=3", json=PICTURE))
    assert np.array_equal(large[::3, ::3], wanted[..., 0])


def test_a_draw_can_be_decoded_and_repeated(client: httpx.Client) -> None:
    query = {"domain": "complete", "expert": "2", "seed": "5"}
    first, again = (client.get("/api/models/digits/draw", params=query).json() for _ in range(2))
    other = client.get("/api/models/digits/draw", params=query | {"seed": "6"}).json()
    assert first == again != other
    assert [each["expert"] for each in first["experts"]] == [2]
    assert image_of(client.post("/api/models/digits/decode", json=first)).shape == (28, 28)
    joint = client.get("/api/models/digits/draw", params=query | {"domain": "joint"}).json()
    assert [each["expert"] for each in joint["experts"]] == [0, 1, 2, 3]


def test_the_shelf_and_the_sheet(client: httpx.Client, digits: ExplorerModel) -> None:
    assert np.array_equal(
        image_of(client.get("/api/models/digits/experts/3/typical")),
        digits.typical_images[3, ..., 0],
    )
    address = "/api/models/digits/experts/1/traversal"
    assert image_of(client.post(address, json=PICTURE)).shape == (5 * 29 - 1, 7 * 29 - 1)
    raw = np.frombuffer(client.post(f"{address}?as=pixels", json=PICTURE).content, np.uint8)
    assert np.array_equal(raw.reshape(5, 7, 28, 28, 1), digits.traverse(SETTINGS, 1))


def test_a_test_image_goes_all_the_way(client: httpx.Client, digits: ExplorerModel) -> None:
    file = client.get("/api/models/digits/images/7")
    assert digits.images is not None
    assert np.array_equal(image_of(file), digits.images.images[7, ..., 0])
    seen = client.post("/api/models/digits/encode", content=file.content, headers=PNG).json()
    wanted = digits.encode(np.asarray(digits.images.images[7]))
    assert np.array_equal(seen["reconstruction"], wanted.reconstruction)
    np.testing.assert_allclose(seen["firing"], wanted.firing, rtol=1e-6)
    np.testing.assert_allclose(seen["routing"], wanted.routing, rtol=1e-6)
    assert seen["free_energy"] == pytest.approx(wanted.free_energy)
    again = image_of(client.post("/api/models/digits/decode", json=seen["picture"])).astype(int)
    assert np.abs(again - np.array(seen["reconstruction"])[..., 0]).mean() < 3


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_pictures_in_colour_of_any_size_are_seen(client: httpx.Client, kind: str) -> None:
    file = io.BytesIO()
    Image.effect_mandelbrot((300, 200), (-3, -2.5, 2, 2.5), 50).convert("RGB").save(file, kind)
    answer = client.post(
        "/api/models/colours/encode?invert=true",
        content=file.getvalue(),
        headers={"content-type": f"image/{kind}"},
    )
    assert np.array(answer.json()["image"]).shape == (20, 23, 3)


def test_maps_that_were_used_last_are_kept(
    digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_RESULTS", 2)
    computed: list[int] = []

    def slow(_: ExplorerModel, expert: int) -> int:
        computed.append(expert)
        return expert

    async def ask(*experts: int) -> list[int]:
        return [await registry.compute_once(slow, digits, expert) for expert in experts]

    registry = server.ModelRegistry([digits])
    assert in_new_loop(ask(0, 1, 0, 2, 0, 1)) == [0, 1, 0, 2, 0, 1]
    assert computed == [0, 1, 2, 1]
    registry.close()


def test_lines_of_python_are_the_models(client: httpx.Client, digits: ExplorerModel) -> None:
    assert client.post("/api/models/digits/python", json=PICTURE).json() == {
        "lines": digits.python(SETTINGS)
    }


def test_chains_walk_from_noise_in_requests_of_their_own(
    client: httpx.Client, walks: ExplorerModel
) -> None:
    body: dict[str, Any] = {"chains": 3, "seed": 5, "anneal": 6}
    begin = client.post("/api/models/walks/chains", json=body).json()
    wanted = chains.start(walks, 3, 5, anneal=6)
    assert np.array_equal(begin["images"], wanted.images)
    np.testing.assert_allclose(begin["free_energy"], wanted.free_energy, rtol=1e-5)
    body = {"chain": begin["chain"], "steps": 4, "temperature": 2.5}
    answer = client.post("/api/models/walks/chains/steps", json=body)
    assert answer.headers["cache-control"] == "no-store"
    after, wanted = answer.json(), chains.advance(walks, wanted.state, 4, 2.5)
    assert np.array_equal(after["images"], wanted.images)
    assert np.array_equal(after["accepted"], wanted.accepted)
    np.testing.assert_allclose(after["free_energy"], wanted.free_energy, rtol=1e-5)
    np.testing.assert_allclose(after["inverse_temperature"], [t / 15 for t in range(1, 5)])
    assert (after["chain"]["step"], after["chain"]["temperature"]) == (4, 2.5)
    assert client.post("/api/models/walks/chains/steps", json=body).json() == after  # stateless
    further = client.post("/api/models/walks/chains/steps", json={"chain": after["chain"]}).json()
    assert further["chain"]["step"] == 5


def test_chains_walk_from_an_encoded_image(client: httpx.Client, walks: ExplorerModel) -> None:
    file = client.get("/api/models/walks/images/7").content
    seen = client.post("/api/models/walks/encode", content=file, headers=PNG).json()
    pixels = np.array(seen["image"], np.uint8)
    body = {"chains": 2, "image": base64.b64encode(pixels.tobytes()).decode()}
    begin = client.post("/api/models/walks/chains", json=body).json()
    assert walks.images is not None
    wanted = chains.start(walks, 2, 0, image=np.asarray(walks.images.images[7]))
    assert np.array_equal(begin["images"], wanted.images)
    assert begin["chain"]["anneal"] == 0


def test_a_model_says_how_many_chains_it_runs(client: httpx.Client) -> None:
    said = {
        name: client.get(f"/api/models/{name}").json()["chains"]
        for name in ("digits", "colours", "walks")
    }
    assert said == {"digits": 0, "colours": 0, "walks": chains.MAX_CHAINS}


# --------------------------------------------------------------------------------------------------
# Errors


def test_a_model_without_a_density_has_no_chains(client: httpx.Client) -> None:
    chain = client.post("/api/models/walks/chains", json={}).json()["chain"]
    for path, body in (("chains", {}), ("chains/steps", {"chain": chain})):
        answer = client.post(f"/api/models/digits/{path}", json=body)
        assert answer.status_code == 404
        assert error_of(answer) == (
            "digits has no density to run chains on; train a model with the preset energy"
        )
        assert client.post(f"/api/models/nothing/{path}", json=body).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"chains": 0}, 422),
        ({"chains": 9}, 422),
        ({"chains": 1.5}, 422),
        ({"seed": -1}, 422),
        ({"seed": 2**53}, 422),
        ({"anneal": 10_001}, 422),
        ({"image": [[[0]]]}, 422),
        ({"image": "not base64"}, 422),
        ({"other": 1}, 422),
        ([], 422),
        ({"image": ""}, 409),
        ({"image": "AAAA"}, 409),
    ],
)
def test_chains_that_cannot_start_are_refused(client: httpx.Client, body: Any, status: int) -> None:
    answer = client.post("/api/models/walks/chains", json=body)
    assert answer.status_code == status
    assert error_of(answer)


def _encoded(numbers: Any) -> str:
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"steps": 0}, 422),
        ({"steps": 11}, 422),
        ({"temperature": 0.99}, 422),
        ({"temperature": 101}, 422),
        ({"temperature": "1"}, 422),
        ({"chain": {"step_size": 0}}, 422),
        ({"chain": {"step_size": 11}}, 422),
        ({"chain": {"step": -1}}, 422),
        ({"chain": {"step": 1_000_001}}, 422),
        ({"chain": {"settled": 51}}, 422),
        ({"chain": {"temperature": 0}}, 422),
        ({"chain": {"position": "not base64"}}, 422),
        ({"chain": {"position": "AAA"}}, 422),
        ({"chain": {"position": 3}}, 422),
        ({"chain": {"position": "A" * 6_000_000}}, 422),
        ({"chain": {"position": ""}}, 409),
        ({"chain": {"position": "AAAA"}}, 409),
        ({"chain": {"position": _encoded([0.0])}}, 409),
        ({"chain": {"position": _encoded([0.0] * 9 * 288)}}, 409),
        ({"chain": {"position": _encoded([np.nan] * 288)}}, 409),
        ({"chain": {"position": _encoded([1e30] * 288)}}, 409),
        ({"chain": {"step": 1_000_000}}, 409),
    ],
)
def test_steps_that_cannot_be_are_refused_in_one_line(
    client: httpx.Client, changed: dict[str, Any], status: int
) -> None:
    chain = client.post("/api/models/walks/chains", json={}).json()["chain"]
    body = {"steps": 1, **changed, "chain": chain | changed.get("chain", {})}
    answer = client.post("/api/models/walks/chains/steps", json=body)
    assert answer.status_code == status
    assert 0 < len(error_of(answer)) < 200
    assert "\n" not in error_of(answer)


def test_a_chain_without_a_part_of_its_state_is_refused(client: httpx.Client) -> None:
    chain = client.post("/api/models/walks/chains", json={}).json()["chain"]
    for name in chain:
        part = {key: value for key, value in chain.items() if key != name}
        answer = client.post("/api/models/walks/chains/steps", json={"chain": part})
        assert answer.status_code == 422
        assert name in error_of(answer)


@pytest.mark.parametrize(
    ("picture", "status"),
    [
        ({"experts": [{"expert": 4}]}, 404),
        ({"experts": [{"expert": 0, "offsets": [0] * 6}]}, 404),
        ({"experts": [{"expert": -1}]}, 422),
        ({"experts": [{"expert": 0, "offsets": [1e9]}]}, 422),
        ({"experts": [{"expert": 0, "offsets": ["1"]}]}, 422),
        ({"experts": [{"expert": 0, "magnitude": -1}]}, 422),
        ({"experts": [{"expert": 0, "other": 1}]}, 422),
        ({"experts": [{"expert": 0}] * 2000}, 422),
        ({}, 422),
        ([], 422),
    ],
)
def test_a_code_that_cannot_be_is_refused(client: httpx.Client, picture: Any, status: int) -> None:
    for action in ("decode", "python", "experts/0/traversal"):
        answer = client.post(f"/api/models/digits/{action}", json=picture)
        assert answer.status_code == status
        assert error_of(answer)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1e999]", b'{"experts": [{"expert": 0, "offsets": [NaN]}]}', b"\xff\xfe"]
)
def test_a_body_that_is_no_json_is_refused(client: httpx.Client, body: bytes) -> None:
    answer = client.post(
        "/api/models/digits/decode", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 422)
    assert error_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/models/nothing", 404),
        ("GET", "/api/models/digits/images/30", 404),
        ("GET", "/api/models/colours/images/0", 404),
        ("GET", "/api/models/digits/experts/4/typical", 404),
        ("GET", "/api/models/digits/draw?expert=9", 404),
        ("GET", "/api/models/digits/draw?domain=elsewhere", 422),
        ("GET", "/api/models/digits/draw?seed=-1", 422),
        ("GET", "/api/models/digits/experts/0/typical?scale=1000", 422),
        ("GET", "/api/models/digits/decode", 405),
        ("DELETE", "/api/models", 405),
        ("GET", "/docs", 404),
        ("GET", "/..%2f..%2f..%2fetc/passwd", 404),
        ("GET", "/server.py", 404),
        ("GET", "/static/app.js", 404),
    ],
)
def test_what_is_not_there_is_a_json_error(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)


@pytest.mark.parametrize("name", broken())
def test_a_broken_picture_is_a_json_error(client: httpx.Client, name: str) -> None:
    answer = client.post("/api/models/digits/encode", content=broken()[name], headers=PNG)
    assert answer.status_code == 422
    assert "picture" in error_of(answer) or "empty" in error_of(answer)


def test_a_body_that_is_not_sent_as_a_picture_is_refused(client: httpx.Client) -> None:
    answer = client.post("/api/models/digits/encode", content=png(np.zeros((9, 9), np.uint8)))
    assert answer.status_code == 415
    assert "image/png" in error_of(answer)


def test_a_fault_is_a_json_error_that_tells_nothing(colours: ExplorerModel) -> None:
    broken_model = ExplorerModel("broken", "nowhere", colours.network)
    object.__setattr__(broken_model, "decode", lambda _: 1 / 0)
    with (
        serving(create_app([broken_model], token=None)) as address,
        httpx.Client(base_url=address, trust_env=False) as client,
    ):
        answer = client.post("/api/models/broken/decode", json={"experts": []})
        assert answer.status_code == 500
        assert "ZeroDivision" not in error_of(answer)
        assert "content-security-policy" in answer.headers


# --------------------------------------------------------------------------------------------------
# Security


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:80"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost@evil.example"},
        {"host": "192.168.0.7"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/models", "/api/openapi.json"])
def test_other_sites_are_refused(client: httpx.Client, headers: dict[str, str], path: str) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == 403
    assert "does not accept" in error_of(answer)


def test_a_page_of_our_own_may_ask(client: httpx.Client, address: str) -> None:
    port = urlsplit(address).port
    for name in ("127.0.0.1", "localhost", "[::1]"):
        ours = {
            "host": f"{name}:{port}",
            "origin": f"http://{name}:{port}",
            "sec-fetch-site": "same-origin",
        }
        assert client.get("/api/models", headers=ours).status_code == 200
    from_a_link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=from_a_link).status_code == 200


def test_a_server_for_others_answers_to_addresses_but_not_to_names(digits: ExplorerModel) -> None:
    app = create_app([digits], token=None, hosts=("127.0.0.1", "lab"), any_address=True)
    with serving(app) as address, httpx.Client(base_url=address, trust_env=False) as client:
        for host, status in {
            "192.168.0.7:81": 200,
            "[fe80::1]": 200,
            "lab": 200,
            "evil.example": 403,
        }.items():
            assert client.get("/api/models", headers={"host": host}).status_code == status


EVERYTHING = ["/", "/app.js", "/api/models", "/api/models/digits", "/api/openapi.json", "/nothing"]


@pytest.mark.parametrize("path", EVERYTHING)
def test_without_the_token_nothing_is_answered(address: str, path: str) -> None:
    port = urlsplit(address).port
    wrong = "not-the-token-of-the-tests"
    with httpx.Client(base_url=address, timeout=30, trust_env=False) as stranger:
        for options in (
            {},
            {"params": {"token": wrong}},
            {"params": {"token": ""}},
            {"params": {"token": TOKEN[:-1]}},
            {"headers": {"authorization": f"Bearer {wrong}"}},
            {"headers": {"authorization": "Bearer"}},
            {"headers": {"authorization": b"Bearer \xff"}},
            {"headers": {"cookie": f"poecaps-explorer-{port}={wrong}"}},
            {"headers": {"cookie": f"poecaps-explorer-1={TOKEN}"}},
            {"headers": {"cookie": f"poecaps-explorer-{port}"}},
        ):
            answer = stranger.get(path, **options)
            assert answer.status_code == 401
            assert "the address that poecaps explore has printed" in error_of(answer)
            assert "set-cookie" not in answer.headers
        assert stranger.post("/api/models/digits/decode", json=PICTURE).status_code == 401


def test_the_first_visit_leaves_a_cookie_and_hides_the_token(address: str) -> None:
    with httpx.Client(base_url=address, timeout=30, trust_env=False) as browser:
        answer = browser.get("/", params={"token": TOKEN})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        for path in ("/", "/app.js", "/api/models", "/api/openapi.json"):
            assert browser.get(path).status_code == 200
        assert browser.post("/api/models/digits/decode", json=PICTURE).status_code == 200
        foreign = {"origin": "http://127.0.0.1:1"}
        assert browser.get("/api/models", headers=foreign).status_code == 403  # cookie or not


def test_a_ticket_opens_the_page_once_and_not_for_long(
    digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app([digits], token=TOKEN, ticket="ticket-of-the-tests")
    params: dict[str, Any] = {"params": {"token": "ticket-of-the-tests"}, "trust_env": False}
    with serving(app) as address:
        with httpx.Client(base_url=address, trust_env=False) as browser:
            # It opens the page alone: nothing else, which would leave it valid for others.
            assert httpx.get(f"{address}/api/models", **params).status_code == 401
            assert browser.get("/", params=params["params"]).status_code == 303
            assert browser.get("/api/models").status_code == 200  # by its cookie
        assert httpx.get(f"{address}/", **params).status_code == 401
    monkeypatch.setattr(security, "TICKET_SECONDS", -1.0)
    late = create_app([digits], token=TOKEN, ticket="ticket-of-the-tests")
    with serving(late) as address:
        assert httpx.get(f"{address}/", **params).status_code == 401
        with_token = httpx.get(f"{address}/", params={"token": TOKEN}, trust_env=False)
        assert with_token.status_code == 303


def test_a_program_may_send_the_token_in_the_url_or_in_a_header(address: str) -> None:
    for options in ({"params": {"token": TOKEN}}, {"headers": BEARER}):
        answer = httpx.get(f"{address}/api/models", trust_env=False, timeout=30, **options)  # type: ignore[arg-type]
        assert answer.status_code == 200


def test_a_public_server_needs_a_token(digits: ExplorerModel) -> None:
    def never(*_: str) -> None:
        pytest.fail("the server has started")

    for host in ("0.0.0.0", "::", "192.168.0.7", "lab"):
        with pytest.raises(ValueError, match="a token is required at host"):
            serve([digits], token=None, host=host, ready=never)
    with pytest.raises(ValueError, match="token must have 16 to 128 letters"):
        serve([digits], token="short", ready=never)
    assert is_loopback("127.0.0.2")
    assert not is_loopback("127.0.0.1.evil.example")
    assert len({new_token() for _ in range(100)}) == 100
    require_token(new_token(), "0.0.0.0")


@pytest.mark.parametrize(
    "path", ["/", "/app.js", "/style.css", "/api/models", "/api/models/digits", "/nothing"]
)
def test_every_answer_has_the_strict_policy(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert "style" not in values
        assert not any(name.startswith("on") for name in values)
        assert tag != "script" or values.get("src")
        self.links += [
            value
            for name in ("src", "href")
            if (value := values.get(name)) and not value.startswith("#")
        ]


def test_the_page_needs_nothing_from_outside(client: httpx.Client) -> None:
    page = Links()
    page.feed(client.get("/").text)
    assert page.links
    assert not any(link.startswith("/") or ":" in link for link in page.links)
    for file in STATIC.iterdir():
        answer = client.get("/" if file.name == "index.html" else f"/{file.name}")
        assert answer.content == file.read_bytes()
        assert "https:" not in answer.text
        assert "http:" not in answer.text.replace('xmlns="http://www.w3.org/2000/svg"', "")


@pytest.fixture(scope="module")
def narrow(digits: ExplorerModel) -> Iterator[httpx.Client]:
    app = create_app([digits], token=None, max_body_bytes=10_000, body_timeout=0.5)
    with (
        serving(app) as address,
        httpx.Client(base_url=address, timeout=30, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(narrow: httpx.Client, chunked: bool) -> None:
    body = bytes(1_000_000)
    parts = (body[at : at + 1000] for at in range(0, len(body), 1000))
    answer = narrow.post(
        "/api/models/digits/encode", content=parts if chunked else body, headers=PNG
    )
    assert answer.status_code == 413
    assert "10,000" in error_of(answer)
    assert narrow.get("/api/models").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(narrow: httpx.Client) -> None:
    where = urlsplit(str(narrow.base_url))
    with socket.create_connection((str(where.hostname), where.port or 0), timeout=30) as connection:
        lines = ("POST /api/models/digits/decode HTTP/1.1", f"Host: {where.netloc}")
        head = "\r\n".join([*lines, "Content-Length: 100", "", ""])
        connection.sendall(head.encode() + b"{")
        assert b"408" in connection.recv(1000).split(b"\r\n")[0]


def test_a_request_is_cancelled_even_if_a_part_of_its_body_arrives_then() -> None:
    async def nothing(*_: Any) -> None:
        pytest.fail("the body is not complete")

    async def cancelled() -> bool:
        parts = 0

        async def receive() -> dict[str, Any]:
            nonlocal parts
            parts += 1
            if parts == 1:
                request.cancel()
            else:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"{", "more_body": True}

        async def send(_: Any) -> None:
            pass

        headers = [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b""}
        scope |= {"scheme": "http", "server": ("127.0.0.1", 80), "headers": headers}
        app = SecurityMiddleware(nothing, token=None, body_timeout=1)
        request = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.wait([request])
        return request.cancelled()

    assert in_new_loop(cancelled())


def test_chains_run_off_the_event_loop(
    walks: ExplorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps are made, the server answers everything else."""
    begun, go_on = threading.Event(), threading.Event()
    advance = chains.advance

    def waiting(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return advance(*args)

    monkeypatch.setattr(chains, "advance", waiting)
    with (
        serving(create_app([walks], token=None)) as address,
        httpx.Client(base_url=address, timeout=30, trust_env=False) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        chain = client.post("/api/models/walks/chains", json={}).json()["chain"]
        body = {"chain": chain}
        steps = threads.submit(
            httpx.post, f"{address}/api/models/walks/chains/steps", json=body, trust_env=False
        )
        assert begun.wait(30)
        assert client.get("/api/models").status_code == 200
        assert client.post("/api/models/walks/decode", json=PICTURE).status_code == 200
        assert not steps.done()
        go_on.set()
        assert steps.result().status_code == 200


def test_a_crowd_gets_an_honest_429_and_the_server_goes_on(colours: ExplorerModel) -> None:
    slow, go_on = ExplorerModel("slow", "nowhere", colours.network), threading.Event()
    decode = slow.decode

    def waiting(settings: Any) -> Any:
        assert go_on.wait(30)
        return decode(settings)

    object.__setattr__(slow, "decode", waiting)
    app = create_app([slow], token=None, max_concurrent_requests=3)
    with serving(app) as address, ThreadPoolExecutor(8) as threads:

        def ask(_: int) -> httpx.Response:
            with httpx.Client(base_url=address, timeout=30, trust_env=False) as client:
                return client.post("/api/models/slow/decode", json={"experts": []})

        answers = [threads.submit(ask, number) for number in range(8)]
        refused: list[httpx.Response] = []
        while len(refused) < 5:  # all but the three that wait
            refused = [each.result() for each in answers if each.done()]
        go_on.set()
        assert {each.status_code for each in refused} == {429}
        assert all(
            each.headers["retry-after"] == "1" and "in progress" in error_of(each)
            for each in refused
        )
        assert sorted(each.result().status_code for each in answers) == [200] * 3 + [429] * 5
        assert ask(0).status_code == 200


def test_fifty_clients_at_once_get_answers_or_an_honest_429(
    address: str, client: httpx.Client
) -> None:
    seen = load(f"{address}/?token={TOKEN}", 50, requests=8)
    assert seen.faults == []
    assert set(seen.statuses) <= {200, 429}
    assert seen.statuses[200] > 0
    assert sum(seen.statuses.values()) == 50 * 8
    assert client.post("/api/models/digits/decode", json=PICTURE).status_code == 200


# --------------------------------------------------------------------------------------------------
# The OpenAPI description


def test_schemathesis_finds_nothing(address: str, tmp_path: Path) -> None:
    """All of its checks, on valid and invalid requests made up from the OpenAPI description."""
    examples = os.environ.get("POECAPS_API_EXAMPLES", "8")  # `make test-api` has more
    options = f"--max-examples {examples} --generation-deterministic --no-color"
    options += " --suppress-health-check all"
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    program = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "run", f"{address}/api/openapi.json"),
            *("--header", f"Authorization: {BEARER['authorization']}", *options.split()),
        ],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "SCHEMATHESIS_HOOKS": "tests.explorer.hooks",
            "NO_PROXY": "127.0.0.1",
        },
        cwd=tmp_path,  # it leaves files behind
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
