"""On random problems, layers agree with the reference in float64, by every backend for CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poecaps import CapsuleExperts
from poecaps import functional as F
from tests.kernels.problems import needs_simd

if TYPE_CHECKING:
    from poecaps.kernels.dispatch import Backend

# Of the votes and of the rounded result; sharp routing amplifies both.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def strided(tensor: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another layout of the memory."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":  # every second number, from the second one
        wide = torch.stack((torch.full_like(tensor, torch.nan), tensor), dim=-1)
        return wide.flatten(-2)[..., 1::2]
    return tensor


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    counts = [draw(st.integers(low, 20)) for low in (0, 1, 1)]
    # The C is compiled for every pair of dimensions.
    dims = [draw(st.sampled_from(each)) for each in ((1, 3, 8), (1, 5, 17))]
    return {
        "sizes": (*counts, *dims),
        "seed": draw(st.integers(0, 999)),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "layouts": draw(st.tuples(*2 * (st.sampled_from(["plain", "transposed", "sliced"]),))),
        "routing": {
            "iterations": draw(st.integers(1, 4)),
            "sharpness": draw(st.sampled_from([0.0, 0.5, 1.0])),
            "normalize": draw(st.sampled_from(F.AXES)),
            "agreement": draw(st.sampled_from(F.AGREEMENTS)),
        },
    }


@pytest.mark.parametrize("backend", [None, "torch", pytest.param("simd", marks=needs_simd)])
@settings(max_examples=30)
@given(problem=problems())
def test_layers_agree_on_random_problems(backend: Backend | None, problem: dict[str, Any]) -> None:
    """Codes, energies and their gradients, reconstructions, and learning if there are images."""
    dtype = problem["dtype"]
    if backend == "simd" and dtype == torch.float64:
        return
    generator = torch.Generator().manual_seed(problem["seed"])
    batch, inputs, experts, dim, out_dim = problem["sizes"]
    # In float32, the gradient of a cosine in x has an error of about 1e-7/‖x‖: no capsule is short.
    norm = 0.1 + 0.8 * torch.rand(batch, inputs, 1, generator=generator)
    capsules = norm * F.direction(torch.randn(batch, inputs, dim, generator=generator))
    weight = torch.randn(inputs, experts, out_dim, dim, generator=generator)
    grad_y = torch.randn(batch, experts, out_dim, generator=generator)
    # Both layers have the rounded numbers.
    capsules, weight = capsules.to(dtype).double(), weight.to(dtype).double()
    results = []
    versions: list[tuple[Backend | None, torch.dtype]] = [
        (backend, dtype),
        ("reference", torch.float64),
    ]
    for name, kind in versions:
        layer = CapsuleExperts(
            inputs, dim, experts, out_dim, backend=name, dtype=kind, **problem["routing"]
        )
        layer.weight = torch.nn.Parameter(strided(weight.to(kind), problem["layouts"][1]))
        x = strided(capsules.to(kind), problem["layouts"][0]).detach().requires_grad_()
        code = layer(x)
        assert code.dtype == kind
        (code * grad_y.to(kind)).sum().backward()
        found = [code, x.grad, layer.weight.grad]
        with torch.no_grad():
            found += [layer.free_energy(x), layer.reconstruct(x)]
        if batch:
            layer.zero_grad()
            layer.contrastive_divergence(x).backward()
            found.append(layer.weight.grad)
        results.append(found)
    # Small entries are compared with the largest one: their digits cancel.
    for ours, exact in zip(*results, strict=True):
        assert ours is not None
        assert exact is not None
        assert ours.shape == exact.shape
        if exact.numel():
            scale = exact.abs().amax().clamp(min=1e-2)
            assert ((ours.double() - exact).abs() / scale).amax().item() < TOLERANCE[dtype]
