"""The learning rule of the capsule decoder."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from poecaps import squash
from poecaps.layer import CapsuleDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from poecaps.kernels.dispatch import Backend


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_gradient_of_the_loss_is_the_rule_written_with_loops(
    backend: Backend, generator: torch.Generator
) -> None:
    experts, d, inputs, k = 3, 4, 5, 2
    decoder = CapsuleDecoder(
        experts, d, inputs, k, sharpness=2.0, backend=backend, dtype=torch.float64
    )
    decoder.reset_parameters(std=1.0, generator=generator)
    y = squash(torch.randn(6, experts, d, dtype=torch.float64, generator=generator))
    x = squash(torch.randn(6, inputs, k, dtype=torch.float64, generator=generator))
    (2 * decoder.contrastive_divergence(y, x)).backward()

    with torch.no_grad():
        u, e = decoder.weight.detach(), decoder.route(y).coefficients
    torch.testing.assert_close(e.sum(1), torch.ones(6, inputs, dtype=torch.float64))

    def squash_one(z: Tensor) -> Tensor:
        return z * z.norm() / (1 + z @ z)

    def sum_of(terms: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(terms)).sum(0)

    def g(z: Tensor) -> Tensor:
        return z / (1 + z @ z)

    delta = torch.zeros_like(u)
    for n in range(6):
        z_model = [
            sum_of(e[n, j, i] * u[j, i] @ y[n, j] for j in range(experts)) for i in range(inputs)
        ]
        x_model = [squash_one(z) for z in z_model]
        y_model = [
            squash_one(sum_of(e[n, j, i] * u[j, i].T @ x_model[i] for i in range(inputs)))
            for j in range(experts)
        ]
        for j, i in itertools.product(range(experts), range(inputs)):
            z = x[n, i] / x[n, i].norm() * (x[n, i].norm() / (1 - x[n, i].norm())).sqrt()
            step = torch.outer(g(z), y[n, j]) - torch.outer(g(z_model[i]), y_model[j])
            delta[j, i] += 2 * e[n, j, i] * step / 6
    torch.testing.assert_close(decoder.weight.grad, -2 * delta, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:1], r"x must have shape \(B=6, I=5, K=2\)"),
        (lambda x: x.float(), "x must have the dtype|x is torch.float32|dtype"),
        (lambda x: x * torch.nan, "x must be finite"),
        (lambda x: x * 100, "norm"),
    ],
)
def test_capsules_that_do_not_fit_raise_an_error(
    change: Callable[[Tensor], Tensor], message: str, generator: torch.Generator
) -> None:
    decoder = CapsuleDecoder(3, 4, 5, 2, dtype=torch.float64)
    y = squash(torch.randn(6, 3, 4, dtype=torch.float64, generator=generator))
    x = squash(torch.randn(6, 5, 2, dtype=torch.float64, generator=generator))
    with pytest.raises((ValueError, TypeError), match=message):
        decoder.contrastive_divergence(y, change(x))


def test_the_held_preactivation_has_a_gradient_in_the_weight_alone(
    generator: torch.Generator,
) -> None:
    decoder = CapsuleDecoder(3, 4, 5, 2, sharpness=2.0, dtype=torch.float64)
    decoder.reset_parameters(std=1.0, generator=generator)
    y = squash(torch.randn(6, 3, 4, dtype=torch.float64, generator=generator)).requires_grad_()
    grad_z = torch.randn(6, 5, 2, dtype=torch.float64, generator=generator)
    z = decoder.held_preactivation(y)
    torch.testing.assert_close(squash(z), decoder(y))
    (z * grad_z).sum().backward()
    assert y.grad is None
    e = decoder.route(y.detach()).coefficients
    expected = torch.einsum("nji,nik,njd->jikd", e, grad_z, y.detach())
    torch.testing.assert_close(decoder.weight.grad, expected)
