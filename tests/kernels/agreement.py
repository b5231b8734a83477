"""Random problems, on which the layers of every backend agree with the reference in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from poecaps import CapsuleExperts
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

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
def problems(
    draw: st.DrawFn,
    *,
    most: int = 20,
    dims: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCE),
) -> dict[str, Any]:
    """Draw sizes up to `most`, dimensions K and D, dtypes, layouts and options."""
    counts = [draw(st.integers(low, most)) for low in (0, 1, 1)]
    return {
        "sizes": (*counts, *draw(st.sampled_from(dims))),
        "seed": draw(st.integers(0, 999)),
        "dtype": draw(st.sampled_from(dtypes)),
        "layouts": draw(st.tuples(*2 * (st.sampled_from(["plain", "transposed", "sliced"]),))),
        "routing": {
            "iterations": draw(st.integers(1, 4)),
            "sharpness": draw(st.sampled_from([0.0, 0.5, 1.0])),
            "normalize": draw(st.sampled_from(F.AXES)),
            "agreement": draw(st.sampled_from(F.AGREEMENTS)),
        },
    }


def assert_agrees(backend: Backend | None, problem: dict[str, Any], device: str = "cpu") -> None:
    """Compare codes, energies, reconstructions, gradients, and learning if there are images."""
    dtype = problem["dtype"]
    generator = torch.Generator().manual_seed(problem["seed"])
    batch, inputs, experts, dim, out_dim = problem["sizes"]
    # In float32, the gradient of a cosine in x has an error of about 1e-7/‖x‖: no capsule is short.
    norm = 0.1 + 0.8 * torch.rand(batch, inputs, 1, generator=generator)
    capsules = norm * F.direction(torch.randn(batch, inputs, dim, generator=generator))
    weight = torch.randn(inputs, experts, out_dim, dim, generator=generator)
    grad_y = torch.randn(batch, experts, out_dim, generator=generator)
    # Both layers have the rounded numbers.
    capsules, weight, grad_y = (
        each.to(device, torch.float64) for each in (capsules.to(dtype), weight.to(dtype), grad_y)
    )
    results = []
    versions: list[tuple[Backend | None, torch.dtype]] = [
        (backend, dtype),
        ("reference", torch.float64),
    ]
    for name, kind in versions:
        layer = CapsuleExperts(
            inputs,
            dim,
            experts,
            out_dim,
            backend=name,
            dtype=kind,
            device=device,
            **problem["routing"],
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
