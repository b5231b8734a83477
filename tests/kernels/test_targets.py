"""The C code gives the reference's results on every instruction set that this CPU has."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pytest
import torch

from poecaps.kernels import cpu
from poecaps.kernels.cpu import build
from tests.kernels.problems import (
    OPTIONS,
    assert_gradients,
    assert_learned,
    assert_routed,
    needs_simd,
    options,
    problem,
)
from tests.systems import needs_unix

if TYPE_CHECKING:
    from poecaps import functional as F

TARGETS = [pytest.param(each, id=each.name) for each in build.targets()]

# B, I, K, J, D: none, one or several of the vectors, tiles, chunks and pairs of experts are full.
SIZES = [(5, 13, 5, 3, 17), (37, 101, 8, 5, 16), (17, 9, 16, 30, 5)]


@needs_simd
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_every_instruction_set(
    target: build.Target,
    sizes: tuple[int, ...],
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(build.VARIABLE, target.name)
    x, weight = problem(sizes, generator)
    routing = options(3, normalize, agreement)
    assert build.library(*weight.shape[2:]).lanes == target.lanes
    assert_routed(cpu, x, weight, routing)
    winners = {"winners": max(1, sizes[3] // 2), "balance": torch.linspace(0, 1, sizes[3])}
    assert_learned(cpu, x, weight, routing, k=2, **winners)
    assert_gradients(cpu, x, weight, routing, generator)


@needs_simd
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [0, 1e-30, 1e-18, 1e18, 1e25])
def test_votes_that_cannot_be_squared(
    target: build.Target,
    size: float,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The estimate of an inverse square root is 0 or infinite there."""
    monkeypatch.setenv(build.VARIABLE, target.name)
    x, weight = problem((5, 40, 8, 3, 16), generator)
    routed = cpu.routing_by_agreement(
        x, weight * size, iterations=2, sharpness=5.0, normalize="inputs", agreement="cosine"
    )
    assert routed.preactivation.isfinite().all()
    total = routed.coefficients.sum(1)
    torch.testing.assert_close(total, torch.ones_like(total))


@needs_unix
def test_the_environment_variable_names_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv(build.VARIABLE, "")
    assert build.target() is build.AVX2
    for name, expected in (("sse2", build.SSE2), ("AVX2", build.AVX2)):
        monkeypatch.setenv(build.VARIABLE, name)
        assert build.target() is expected
    monkeypatch.setenv(build.VARIABLE, "avx512")
    message = "$POECAPS_SIMD is 'avx512', but this CPU supports AVX2, SSE2"
    with pytest.raises(LookupError) as raised:
        build.target()
    assert raised.value.args == (message,)
    assert build.why_not() == message
    with pytest.raises(RuntimeError, match="this CPU supports AVX2, SSE2"):
        build.library(16, 8)


@pytest.mark.parametrize(
    ("machine", "capability", "best"),
    [
        ("x86_64", "AVX512", "AVX-512"),
        ("AMD64", "AVX2", "AVX2"),
        ("x86_64", "DEFAULT", "SSE2"),
        ("aarch64", "DEFAULT", "NEON"),
        ("arm64", "SVE256", "NEON"),
    ],
)
def test_the_best_target_of_a_cpu(
    machine: str, capability: str, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(build.VARIABLE, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert build.target().name == best


@needs_unix
def test_another_kind_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert build.why_not() == "it is not written for CPUs of the kind 'riscv64'"
