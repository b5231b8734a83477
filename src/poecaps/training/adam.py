"""Adam for a GPU."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch

from poecaps.kernels.flash import installed
from poecaps.kernels.launch import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


EPSILON = 1e-8

# Numbers that one program moves.
BLOCK = 512

# Numbers from which on a parameter has a launch of its own.
LARGE = 2**16


class FusedAdam:
    """What `torch.optim.Adam` with ``fused=True`` does, with counts of steps and the rate on the device.

    The first optimiser of torch in a process imports a compiler, which takes seconds: as long as a stage of training.
    Large parameters are moved by a Triton kernel (`poecaps.kernels.adam`), where there is one.

    Parameters
    ----------
    parameters
        What learns, on one device.
    rate
        Learning rate.
    betas
        Decays of the two moments.
    l2
        Weight of the ℓ2 penalty.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        l2: float = 0.0,
    ) -> None:
        device = parameters[0].device
        self.parameters, self.betas, self.l2 = list(parameters), betas, l2
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
        self._logs = torch.tensor(logs, dtype=torch.float64, device=device)
        self.param_groups: list[dict[str, Any]] = [{"lr": torch.tensor(rate, device=device)}]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            each: {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.zeros_like(each),
            }
            for each in parameters
        }

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the gradients."""
        moved = {each: _laid(each.grad, each) for each in self.parameters if each.grad is not None}
        if not moved:
            return
        torch._foreach_add_([self.state[each]["step"] for each in moved], 1)
        large = {each: gradient for each, gradient in moved.items() if _is_large(each)}
        for parameter, gradient in large.items():
            self._move(parameter, gradient)
        others = {each: gradient for each, gradient in moved.items() if each not in large}
        if others:
            self._move_together(others)

    def _move(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        state, count = self.state[parameter], parameter.numel()
        run(
            "adam_step",
            (-(-count // BLOCK),),
            (
                parameter,
                gradient,
                state["exp_avg"],
                state["exp_avg_sq"],
                state["step"],
                self.param_groups[0]["lr"],
                self._logs,
                count,
            ),
            {
                "BETA_1": self.betas[0],
                "BETA_2": self.betas[1],
                "L2": self.l2,
                "EPS": EPSILON,
                "BN": BLOCK,
            },
        )

    def _move_together(self, moved: dict[nn.Parameter, Tensor]) -> None:
        states = [self.state[each] for each in moved]
        torch._fused_adam_(
            list[torch.Tensor](moved),
            list(moved.values()),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=self.param_groups[0]["lr"],
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.l2,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


def _laid(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Lay a gradient out as its parameter is."""
    return (
        gradient
        if gradient.stride() == parameter.stride()
        else torch.empty_like(parameter).copy_(gradient)
    )


def _is_large(parameter: nn.Parameter) -> bool:
    """Tell whether a launch of its own pays: a few for small parameters cost more than one for all."""
    here = parameter.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    whole = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    fits = LARGE <= parameter.numel() < 2**31  # offsets have 32 bits
    return fits and parameter.dtype == torch.float32 and whole and here and installed()
