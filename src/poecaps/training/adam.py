"""Adam for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


class FusedAdam:
    """What `torch.optim.Adam` with ``fused=True`` does, with counts of steps and the rate on the device.

    The first optimiser of torch in a process imports a compiler, which takes seconds: as long as a stage of training.

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
        moved = {each: each.grad for each in self.parameters if each.grad is not None}
        if not moved:
            return
        states = [self.state[each] for each in moved]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            list[torch.Tensor](moved),
            list(moved.values()),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=self.param_groups[0]["lr"],
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.l2,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
