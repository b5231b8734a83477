"""Einsum computes the same passes as poecaps, and the benchmark runs."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import passes
from benchmarks.internals import instruction_set, instruction_sets
from benchmarks.passes import PASSES, ROUTES, _einsum, _ours, main
from benchmarks.routing import PLAIN_TORCH, Sizes
from poecaps.kernels import cpu
from tests.kernels.problems import needs_simd

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Sizes(batch=6, inputs=9, in_dim=3, experts=4, out_dim=5)


@pytest.mark.parametrize("name", ["forward", *PASSES, "learning step"])
def test_all_versions_compute_the_same(name: str) -> None:
    einsum = _einsum(name, SMALL, is_compiled=False)
    ours = _ours(name, SMALL, is_compiling=False)
    half = {version for version in ours if "float" in version}
    expected = ours.pop(PLAIN_TORCH)()
    for version, step in (ours | einsum).items():
        found = step()
        exact = expected
        if isinstance(found, torch.Tensor):
            exact = expected if isinstance(expected, torch.Tensor) else expected[0]
            found = found.float()
        bound = 0.02 if version in half else 1e-5
        torch.testing.assert_close(found, exact, rtol=bound, atol=bound)


def test_the_orders_have_names() -> None:
    assert list(_einsum("forward", SMALL, is_compiled=False)) == list(ROUTES)


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
    small = functools.partial(Sizes, inputs=9, in_dim=3, experts=4, out_dim=5)
    monkeypatch.setattr(passes, "Sizes", small)
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
