"""Calls of all operators, for the tests of their registration on a CPU and on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poecaps import squash
from tests.kernels.problems import problem

if TYPE_CHECKING:
    from torch import Tensor

# B, I, K, J, D: more inputs than experts, and fewer.
SIZES = [(5, 13, 8, 3, 16), (5, 3, 8, 9, 16)]


def operator_calls(
    sizes: tuple[int, ...],
    normalize: str,
    agreement: str,
    generator: torch.Generator,
    device: str = "cpu",
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return operators with arguments: with and without gradients, chains and competition."""
    operators = torch.ops.poecaps  # of `poecaps.kernels.operators`, which registers them
    batch, inputs, dim, experts, out_dim = sizes

    def capsules(*shape: int) -> Tensor:
        return squash(torch.randn(*shape, generator=generator)).to(device)

    x, weight = (each.to(device) for each in problem(sizes, generator))
    y, chain = capsules(batch, experts, out_dim), capsules(batch + 2, inputs, dim)
    uniform = torch.rand(2, batch + 2, experts, generator=generator).to(device)
    balance = torch.randn(experts, generator=generator).to(device)
    options, once = (3, 2.0, normalize, agreement), (1, 2.0, normalize, agreement)
    leaf_x, leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    mixed = (2, "bernoulli", uniform, chain, 2, balance, 1)
    plain = (1, "deterministic", None, None, None, None, 1)
    z, c, h, lse = operators.route(x, weight, *options, True)
    grad_z, grad_c, grad_x = (
        torch.randn(each.shape, generator=generator).to(device) for each in (z[-1], c, x)
    )
    return [
        (operators.route_backward, (x, weight, z, h, lse, grad_z, grad_c, *options, True, True)),
        (operators.route_backward, (x, weight, z, h, lse, grad_z, None, *options, True, False)),
        (operators.reconstruct, (leaf_x, leaf, *options, 2, balance)),
        (operators.reconstruct_backward, (x, weight, grad_x, *options, 2, balance, True, True)),
        (operators.reconstruct_backward, (x, weight, grad_x, *options, None, None, False, True)),
        (operators.route, (leaf_x, leaf, *options, True)),
        (operators.route, (leaf_x, weight, *once, False)),
        (operators.reconstruct, (x, weight, *options, 2, balance)),
        (operators.reconstruct, (x, weight, *options, None, None)),
        (operators.contrastive_divergence, (x, leaf, *options, *mixed, True)),
        (operators.contrastive_divergence, (x, leaf, *options, *plain, True)),
        (operators.contrastive_divergence, (x, weight, *once, *plain, False)),
        (operators.decoder_contrastive_divergence, (x, y, leaf, *options, True)),
        (operators.decoder_contrastive_divergence, (x, y, weight, *once, False)),
    ]
