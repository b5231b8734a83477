"""Einsum computes the same passes as poecaps, and the benchmark runs."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import machine, passes
from benchmarks.internals import instruction_set, instruction_sets
from benchmarks.passes import CPU, PASSES, ROUTES, _einsum, _ours, main
from benchmarks.routing import PLAIN_TORCH, Sizes, make_problem
from poecaps.kernels import cpu
from tests.kernels.problems import needs_simd

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchmarks.machine import Step

SMALL_SIZES: dict[str, Any] = {"inputs": 9, "in_dim": 3, "experts": 4, "out_dim": 5}
SMALL = Sizes(batch=6, **SMALL_SIZES)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)


@pytest.mark.parametrize("name", ["forward", *PASSES, "learning step"])
def test_all_versions_compute_the_same(name: str) -> None:
    einsum = _einsum(name, SMALL, is_compiled=False)
    ours = _ours(name, SMALL, is_compiling=False)
    half = {version for version in ours if "float" in version}
    expected = ours.pop(PLAIN_TORCH)()
    for version, step in (ours | einsum).items():
        for found, exact in zip(_tensors(step()), _tensors(expected), strict=False):
            error = (found.float() - exact).norm() / exact.norm()
            # Most of it is the rounding of capsules and weights to half precision.
            assert error.item() < (0.15 if version in half else 1e-5), version


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


def test_the_orders_have_names() -> None:
    assert list(_einsum("forward", SMALL, is_compiled=False)) == list(ROUTES)


def test_steps_are_replayed_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for the GPU, and every fifth capture fails."""
    captured: list[object] = []

    def capture(step: Step) -> Step:
        captured.append(step)
        if len(captured) % 5 == 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return step

    monkeypatch.setattr(passes, "Sizes", functools.partial(Sizes, **SMALL_SIZES))
    monkeypatch.setattr(passes, "backend_name", lambda _: "Triton")
    monkeypatch.setattr(
        passes, "make_problem", lambda sizes, _: make_problem(replace(sizes, **SMALL_SIZES))
    )
    monkeypatch.setattr(passes, "_autocast", lambda step, _: step)
    monkeypatch.setattr(machine, "describe", lambda _: {})
    monkeypatch.setattr(machine, "captured", capture)
    seconds = machine.seconds
    monkeypatch.setattr(machine, "seconds", lambda step, count, _: seconds(step, count, CPU))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    file = tmp_path / "passes.json"
    arguments = ["--device", "cuda", "--batch", "6", "--rounds", "1", "--no-compile"]
    main([*arguments, "--json", str(file)])
    (results,) = json.loads(file.read_text(encoding="utf-8"))["threads"].values()
    assert list(results) == ["forward", *PASSES, *(f"{name}, R 1" for name in ("forward", *PASSES))]
    versions = results["forward and backward"]
    assert versions["poecaps, Triton, CUDA graph"]["times_poecaps"] == 1
    assert versions["einsum, eager, CUDA graph"]["order"] == versions["einsum, eager"]["order"]
    reason = "RuntimeError: operation not permitted when stream is capturing"
    failed = {name: each["failed"] for name, each in versions.items() if "failed" in each}
    assert failed == {"einsum, eager, votes, CUDA graph": reason}
    assert reason in capsys.readouterr().out


@needs_simd
def test_the_instruction_set_is_that_of_the_environment() -> None:
    before = cpu.target().name
    for name in instruction_sets():
        with instruction_set(name):
            assert cpu.target().name == name
    assert cpu.target().name == before


def test_the_benchmark_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "Sizes", functools.partial(Sizes, **SMALL_SIZES))
    file = tmp_path / "results" / "passes.json"
    arguments = ["--batch", "6", "--rounds", "1", "--threads", "1", "--no-compile"]
    main([*arguments, "--json", str(file)])
    report = json.loads(file.read_text(encoding="utf-8"))
    assert list(report["threads"]) == ["1"]
    assert list(report["threads"]["1"]) == ["forward", *PASSES, "learning step"]
    for versions in report["threads"]["1"].values():
        assert next(iter(versions.values()))["times_poecaps"] == 1
        assert versions["einsum, eager"]["order"]
    assert "gradient in the inputs, 1 thread " in capsys.readouterr().out
