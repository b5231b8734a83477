"""The compiled version gives what the reference gives, to 1e-5 of float64, and gives way where it cannot run."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from poecaps import CapsuleExperts, kernels
from poecaps import functional as F
from poecaps.kernels import fanout, lanes, votefree
from poecaps.kernels.common import Options
from tests.kernels.problems import problem, relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_lanes = pytest.mark.skipif(lanes.obstacle() is not None, reason=f"nothing can be compiled: {lanes.obstacle()}")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        lanes._library.cache_clear()
        yield
    lanes._library.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what was compiled and loaded, before and after."""
    lanes._library.cache_clear()
    yield
    lanes._library.cache_clear()
    lanes._stuck.clear()


def sharp(iterations: int, normalize: F.Axis, agreement: F.Agreement) -> Options:
    # Inner products are unbounded: sharper, and eight iterations would magnify rounding beyond any fixed bound.
    return Options(iterations, 5.0 if agreement == "cosine" else 1.0, normalize, agreement)


def routed(version: Any, x: Tensor, weight: Tensor, options: Options) -> F.Routing:
    routing: F.Routing = version.routing_by_agreement(
        x,
        weight,
        iterations=options.iterations,
        sharpness=options.sharpness,
        normalize=options.normalize,
        agreement=options.agreement,
    )
    return routing


@needs_lanes
def test_tensors_that_are_not_memory_are_left_to_the_plain_version(generator: torch.Generator) -> None:
    class Mine(torch.Tensor):
        pass

    x, weight = problem((64, 50, 8, 5, 16), generator)
    large, wide = x.repeat(8, 1, 1), weight.detach()
    assert lanes.covers(large, weight)
    assert not lanes.covers(large.as_subclass(Mine), weight)
    assert not lanes.covers(torch._neg_view(large), weight)
    assert not lanes.covers(large[:, :49], weight)
    assert not lanes.covers(large[:, :, :7], weight)
    with FlopCounterMode(display=False) as counted:
        assert not lanes.covers(large, weight)
        routed(kernels, large, wide, sharp(3, "inputs", "cosine"))
    assert counted.get_total_flops() > 0
    with torch.device("meta"):
        here = routed(lanes, large, wide, sharp(3, "inputs", "cosine"))
    assert here.preactivation.isfinite().all()


@needs_lanes
@pytest.mark.parametrize("outputs", [5, 30])
def test_layers_learn_and_encode_by_it(
    outputs: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there are fewer experts than inputs or more."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("another version was asked")

    layer = CapsuleExperts(13, 8, outputs, 16, winners=2, sharpness=5.0, generator=generator)
    layer.reset_parameters(std=1.0, generator=generator)
    exact = CapsuleExperts(13, 8, outputs, 16, winners=2, sharpness=5.0, backend="reference", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x, _ = problem((18, 13, 8, 1, 1), generator)
    monkeypatch.setattr(lanes, "SMALLEST", 0)
    for version in (votefree, fanout):
        monkeypatch.setattr(version, "routing_by_agreement", refuse)
    monkeypatch.setattr(votefree, "contrastive_divergence", refuse)
    layer.contrastive_divergence(x, 2).backward()
    exact.contrastive_divergence(x.double(), 2).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    assert relative_error(layer.weight.grad, exact.weight.grad) < 1e-5
    with torch.no_grad():
        layer.winners = exact.winners = None
        assert relative_error(layer(x), exact(x.double())) < 1e-5
        assert relative_error(layer.reconstruct(x), exact.reconstruct(x.double())) < 1e-5


@needs_lanes
def test_no_images_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SMALLEST", 0)
    layer = CapsuleExperts(7, 8, 5, 16)
    with torch.no_grad():
        assert layer(torch.zeros(0, 7, 8)).shape == (0, 5, 16)


# ---------------------------------------------------------------------------------------------------------
# Compiling


def compiler(folder: Path, script: str) -> str:
    path = folder / "some-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def assert_plain(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning goes on by the plain version, and one line says why."""
    assert kernels.describe("cpu") == f"cpu: plain PyTorch without votes, because {reason}"
    monkeypatch.setattr(lanes, "SMALLEST", 0)
    x, weight = problem((5, 13, 8, 3, 16), torch.Generator().manual_seed(0))
    options = sharp(3, "inputs", "cosine")
    ours = kernels.contrastive_divergence(x, weight, 1, options, lambda z: None)
    assert ours is not None
    assert ours[0] == votefree.contrastive_divergence(x, weight, 1, options, lambda z: None)[0]


@pytest.mark.usefixtures("fresh")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_plain("there is no C compiler", monkeypatch)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("told", "reason"), [("no-such-compiler -x", "which is not there"), ('cc "', "which is no command")]
)
def test_no_such_compiler(told: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", told)
    assert_plain(f"$CC is {told!r}, {reason}", monkeypatch)


@pytest.mark.usefixtures("fresh")
def test_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert_plain("the CPU has no AVX-512, or PyTorch was told not to use it", monkeypatch)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo strange; test $1 = --version && exit; echo x.c: error: no luck >&2; exit 1",
            "failed: x.c: error: no luck",
        ),
        ("exit 3", "failed: it ended with status 3"),
        ("test $1 = --version && exit; exit 0", "nothing could be compiled"),
        ('test $1 = --version && exit; exec c++ "$@"', "what was made is not compiled C"),
    ],
)
def test_a_broken_compiler(script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = kernels.describe("cpu")
    assert said.startswith("cpu: plain PyTorch without votes, because ")
    assert reason in said
    assert "\n" not in said
    assert_plain(said.partition("because ")[2], monkeypatch)


@needs_lanes
@pytest.mark.usefixtures("fresh")
def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernels.describe("cpu").startswith("cpu: C for AVX-512 without votes, by ")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lanes._library.cache_clear()
    assert lanes.obstacle(3, 2) is None
    (kept,) = (tmp_path / "poecaps" / "lanes").iterdir()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    lanes._library.cache_clear()

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_compile", refuse)
        assert lanes.obstacle(3, 2) is None
