"""Probes with few labels: the same subsets for every code, and a table with intervals."""

from __future__ import annotations

import torch

from benchmarks.few_labels import measure
from benchmarks.report import few_label_table


def test_a_code_that_states_the_label_needs_few_labels(generator: torch.Generator) -> None:
    labels = torch.arange(200) % 2
    clear = labels.float().unsqueeze(1) + 0.01 * torch.randn(200, 1, generator=generator)
    noise = torch.randn(200, 3, generator=generator)
    codes = {"clear": (clear, clear), "again": (clear, clear), "noise": (noise, noise)}
    found = measure(codes, (labels, labels), (20, 100, 1000), subsets=3)
    assert list(found) == ["20", "100"]  # there are no 1,000 images
    assert found["20"]["clear"] == [1, 1, 1]
    assert found["20"]["again"] == found["20"]["clear"]
    assert max(found["20"]["noise"]) < 0.8
    lines = few_label_table(found).splitlines()
    assert lines[0] == "| labels | clear | again | noise |"
    assert lines[2].startswith("| 20 | 1.000 ± 0.000 |")
