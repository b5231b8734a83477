"""The part of the gradient that held coefficients drop."""

from __future__ import annotations

import pytest
import torch

from benchmarks.held_gradient import PARTS, dropped, measure, table
from poecaps import CapsuleExperts, squash


def test_nothing_is_dropped_if_the_coefficients_are_constant(generator: torch.Generator) -> None:
    x = squash(torch.randn(6, 4, 3, generator=generator))
    weight = torch.randn(4, 3, 2, 3, generator=generator)
    constant = {"sharpness": 1.0, "normalize": "outputs", "agreement": "cosine"}
    assert dropped(x, weight, iterations=1, **constant) == 0
    # A single expert gets all of every vote, whatever its weights are.
    assert dropped(x, weight[:, :1], iterations=3, **constant) == pytest.approx(0, abs=1e-6)
    assert dropped(x, weight, iterations=3, **constant) > 0.01


def test_the_routing_of_the_layer_is_marked(generator: torch.Generator) -> None:
    layer = CapsuleExperts(4, 3, 3, 2, iterations=3, sharpness=1.0, normalize="outputs")
    rows = measure(layer, squash(torch.randn(10, 4, 3, generator=generator)))
    (own,) = (row for row in rows if row["own"])
    assert (own["normalize"], own["sharpness"]) == ("outputs", 1.0)
    assert len(own["dropped"]) == PARTS
    assert table({"a": rows}).count("(that of the models)") == 1
