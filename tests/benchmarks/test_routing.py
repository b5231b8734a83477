"""Einsum computes the same step as poecaps, and the benchmark runs."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import machine, routing
from benchmarks.internals import simd_available
from benchmarks.routing import (
    DECODER_ORDERS,
    ORDERS,
    PLAIN_TORCH,
    Sizes,
    Version,
    einsum_step,
    main,
    poecaps_name,
)
from poecaps import CapsuleExperts, squash
from poecaps import functional as F

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
SMALL = Sizes(batch=6, inputs=9, in_dim=3, experts=4, out_dim=5)
TIMES = {"median_s", "min_s", "max_s", "rounds", "times_poecaps", "extra_bytes", "order"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("normalize", F.AXES)
def test_einsum_computes_the_step_of_the_layer(
    normalize: F.Axis, order: str, generator: torch.Generator
) -> None:
    layer = CapsuleExperts(
        9, 3, 4, 5, sharpness=5.0, normalize=normalize, dtype=torch.float64, backend="reference"
    )
    layer.reset_parameters(std=1.0, generator=generator)
    x = squash(torch.randn(6, 9, 3, dtype=torch.float64, generator=generator))
    x[1, 2] = 0  # votes of a zero capsule have no direction
    layer.contrastive_divergence(x).backward()
    sizes = replace(SMALL, normalize=normalize)
    torch.testing.assert_close(
        einsum_step(x, layer.weight.detach(), sizes, order), layer.weight.grad
    )


def test_all_versions_return_the_same_gradient() -> None:
    fastest, plain, exact = (
        Version(kind).make(SMALL, CPU)() for kind in ("poecaps", "plain", "reference")
    )
    torch.testing.assert_close(fastest, exact)
    torch.testing.assert_close(plain, exact)
    down, exact_down = (
        Version(kind).make(SMALL, CPU)() for kind in ("decoder", "decoder reference")
    )
    torch.testing.assert_close(down, exact_down)
    for order in DECODER_ORDERS:
        torch.testing.assert_close(Version("decoder einsum", order).make(SMALL, CPU)(), exact_down)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "GROWTH", {"batch": (4, 8), "inputs": (5, 10)})
    monkeypatch.setattr(routing, "Sizes", functools.partial(Sizes, inputs=10, experts=3))
    monkeypatch.setattr(machine, "ceilings", functools.partial(machine.ceilings, large=False))


@pytest.mark.usefixtures("small")
def test_the_benchmark_measures_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, plot = tmp_path / "results" / "found.json", tmp_path / "images" / "growth.png"
    main(
        [
            "--batch",
            "4",
            "6",
            "--rounds",
            "1",
            "--no-compile",
            "--json",
            str(json_file),
            "--plot",
            str(plot),
        ]
    )
    found = json.loads(json_file.read_text())
    assert (
        found["command"] == "python -m benchmarks --device cpu --batch 4 6 --rounds 1 --no-compile"
    )
    assert found["machine"].keys() >= {"device", "python", "torch", "poecaps", "backend"}
    assert found["ceilings"].keys() == {
        "copy_bytes_per_s",
        "float32_flop_per_s",
        "bfloat16_flop_per_s",
    }
    assert found["steps"].keys() == {"4", "6"}
    assert found["decoder"]["4"].keys() == {"poecaps", "einsum, eager", "reference"}
    assert found["decoder"]["4"]["einsum, eager"]["order"] in DECODER_ORDERS
    fastest = poecaps_name(CPU)
    plain = {PLAIN_TORCH} if simd_available() else set()
    assert found["steps"]["4"].keys() == {fastest, "einsum, eager", "reference"} | plain
    for batch in ("4", "6"):
        tried = found["orders"][batch]["eager"]
        assert tried.keys() == {fastest, *ORDERS}
        fastest_order = min(ORDERS, key=lambda order: tried[order]["median_s"])
        assert found["steps"][batch]["einsum, eager"]["order"] == fastest_order
    assert found["growth"]["inputs"].keys() == {"5", "10"}
    for each in found["steps"]["4"].values():
        assert each.keys() >= TIMES
        assert each["min_s"] <= each["median_s"] <= each["max_s"]
    assert found["steps"]["4"][fastest]["times_poecaps"] == 1
    assert plot.stat().st_size > 1000
    assert "einsum, eager" in capsys.readouterr().out
    monkeypatch.setattr(routing, "measure", None)
    main(["--read", str(json_file), "--plot", str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes() == plot.read_bytes()


def test_a_failed_version_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(machine, "captured", fail)
    versions = {
        "poecaps": Version("poecaps"),
        "poecaps, CUDA graph": Version("poecaps", graph=True),
    }
    found = routing.compare(SMALL, CPU, 1, versions)
    assert found["poecaps, CUDA graph"] == {
        "order": None,
        "failed": "operation not permitted when stream is capturing",
    }
    assert "not permitted" in routing.table(SMALL, found, {})


def test_slow_steps_skip_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    lasts = {"quick": 1e-3, "slow": 1.5, "slower": 7.0}
    taken: list[str] = []

    def seconds(step: Any, repeats: int, _: torch.device) -> float:
        taken.extend([step()] * repeats)
        return lasts[step()]

    monkeypatch.setattr(machine, "seconds", seconds)
    found = machine.time_in_turns({name: lambda name=name: name for name in lasts}, 9, CPU)  # type: ignore[misc]
    assert {name: each["rounds"] for name, each in found.items()} == {
        "quick": 9,
        "slow": 5,
        "slower": 3,
    }
    assert found["slow"]["median_s"] == 1.5


@pytest.mark.skipif(not machine.can_measure_memory(), reason="the system does not report memory")
def test_eager_einsum_takes_more_memory_than_poecaps() -> None:
    sizes = Sizes(batch=64, inputs=600)
    torch.ones(2**28)  # memory that the process used earlier must not count
    extra = {}
    for version in (
        Version("poecaps"),
        *(Version("einsum", order) for order in ("votes once", "as written")),
    ):
        step = version.make(sizes, CPU)
        step()
        extra[version.order] = machine.extra_memory(step, CPU)
    votes = 4 * 64 * 600 * 20 * 16
    assert all(each is not None for each in extra.values())
    poecaps, once, written = (each or 0 for each in extra.values())
    assert votes < min(once, written)
    assert poecaps < once / 2
