"""Codes of the same capsules: what each of them keeps, and the intervals of differences."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest
import torch

from benchmarks import capsule_codes
from benchmarks.capsule_codes import (
    CODES,
    EXPERTS,
    CapsuleCodes,
    difference,
    measure,
    nmi_error,
    table,
)
from poecaps import CapsuleExperts, squash
from poecaps.evaluation.measures import specialisation

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture
def found(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Measure the codes of capsules, each of which shows the label of its image."""
    monkeypatch.setattr(capsule_codes, "LABELS", 30)
    labels = torch.arange(120) % 3
    means = torch.randn(3, 40, generator=generator)
    capsules = means[labels] + 0.05 * torch.randn(120, 40, generator=generator)
    capsules = squash(capsules.unflatten(1, (10, 4))).flatten(1)
    layer = CapsuleExperts(10, 4, 5, 3)
    codes: dict[str, Any] = {}
    measure(CapsuleCodes(layer, (capsules, capsules)), (labels, labels), codes)
    return {"test_images": 120, "codes": codes}


def test_every_code_of_clear_capsules_shows_the_label(found: Mapping[str, Any]) -> None:
    assert tuple(found["codes"]) == CODES
    for code in found["codes"].values():
        assert min(code["probe"]) > 0.95
        assert len(code["few"]) == 5
    assert found["codes"]["k-means, residual"]["nmi"] != found["codes"]["k-subspaces"]["nmi"]
    assert "nmi" not in found["codes"]["principal components"]


def test_codes_that_were_measured_are_skipped(found: Mapping[str, Any]) -> None:
    def fail(name: str, seed: int) -> NoReturn:
        pytest.fail(f"{name} was measured again")

    labels = torch.arange(120) % 3
    before = json.dumps(found)
    measure(cast("CapsuleCodes", fail), (labels, labels), found["codes"])
    assert json.dumps(found) == before


def test_the_table_has_a_difference_for_every_other_code(found: Mapping[str, Any]) -> None:
    _, _, ours, *others = table(found).splitlines()
    assert ours.count("–") == 3
    assert len(others) == len(CODES) - 1
    assert json.loads(json.dumps(found)) == found


def test_a_difference_has_the_error_of_seeds_and_of_test_images() -> None:
    def codes(ours: list[float], other: list[float]) -> dict[str, Any]:
        return {
            "test_images": 10_000,
            "codes": {EXPERTS: {"probe": ours}, "other": {"probe": other}},
        }

    single = difference(codes([0.9], [0.8]), "other", "probe")
    assert single.value == pytest.approx(0.1)
    assert single.half_width == pytest.approx(1.96 * (0.09 + 0.16) ** 0.5 / 100, rel=1e-3)
    several = difference(codes([0.9], [0.75, 0.8, 0.85]), "other", "probe")
    assert several.value == pytest.approx(0.1)
    assert several.half_width > 0.05 * 4.3 / 3**0.5  # Student's t with 2 degrees of freedom


def test_the_error_of_the_nmi_is_its_spread_over_sets_of_images(
    generator: torch.Generator,
) -> None:
    """Sets of 500 images with the same joint distribution, drawn anew."""
    spread, errors = [], []
    for seed in range(40):
        labels = torch.randint(4, (500,), generator=generator)
        noise = torch.rand(500, generator=generator) < 0.3
        clusters = torch.where(noise, torch.randint(4, (500,), generator=generator), labels)
        active = torch.nn.functional.one_hot(clusters, 4).float()
        spread.append(specialisation(active, labels).normalised)
        errors.append(nmi_error(active, labels, seed))
    assert sum(errors) / 40 == pytest.approx(torch.tensor(spread).std().item(), rel=0.3)
