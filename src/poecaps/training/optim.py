"""Optimizers of the training stages, and their state in checkpoints."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, cast

import torch

from poecaps._files import ModelError
from poecaps.kernels.triton.support import installed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from poecaps.training.config import Stage

# Decay of Adam's second moment, and the number added to its denominator: the defaults of
# `torch.optim.Adam`.
BETA2, EPSILON = 0.999, 1e-8

# Numbers from which on a parameter is updated by its own launch of the Triton kernel: several
# launches for small parameters cost more than one of PyTorch's for all.
LARGE = 2**16


class FusedAdam:
    """`torch.optim.Adam` with ``fused=True`` and ``capturable=True``.

    The number of steps and the learning rate are tensors on the device, so a step can be captured
    in a CUDA graph. It differs from `torch.optim.Adam` in two ways. Large parameters are updated by
    a Triton kernel (`poecaps.kernels.triton.adam`), if Triton is installed. And the first optimizer
    of `torch.optim` in a process imports a compiler, which takes seconds: as long as a stage of
    training.

    Parameters
    ----------
    groups
        Parameter groups: dictionaries with the list ``params``, all on one device, and anything
        else, which is kept in `param_groups`.
    lr
        Learning rate of all groups.
    betas
        Decays of the two moments.
    weight_decay
        Factor of the ℓ2 penalty.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, BETA2),
        weight_decay: float = 0.0,
    ) -> None:
        parameters: list[nn.Parameter] = [each for group in groups for each in group["params"]]
        self.betas, self.weight_decay = betas, weight_decay
        device = parameters[0].device
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
        self._log_betas = torch.tensor(logs, dtype=torch.float64, device=device)
        self.param_groups: list[dict[str, Any]] = [
            {**group, "lr": torch.tensor(lr, device=device)} for group in groups
        ]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in parameters
        }

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self.state:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            self._step_of(group)

    def _step_of(self, group: dict[str, Any]) -> None:
        gradients = {
            parameter: _with_strides_of(parameter, parameter.grad)
            for parameter in group["params"]
            if parameter.grad is not None
        }
        if not gradients:
            return
        torch._foreach_add_([self.state[parameter]["step"] for parameter in gradients], 1)
        small: dict[nn.Parameter, Tensor] = {}
        for parameter, gradient in gradients.items():
            if _uses_triton(parameter):
                self._step_by_triton(parameter, gradient, group["lr"])
            else:
                small[parameter] = gradient
        if small:
            self._step_by_torch(small, group["lr"])

    def _step_by_triton(self, parameter: nn.Parameter, gradient: Tensor, lr: Tensor) -> None:
        from poecaps.kernels.triton.adam import adam_step

        state = self.state[parameter]
        adam_step(
            parameter,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=state["step"],
            lr=lr,
            log_betas=self._log_betas,
            betas=self.betas,
            weight_decay=self.weight_decay,
            eps=EPSILON,
        )

    def _step_by_torch(self, gradients: dict[nn.Parameter, Tensor], lr: Tensor) -> None:
        states = [self.state[parameter] for parameter in gradients]
        torch._fused_adam_(
            list[torch.Tensor](gradients),
            list(gradients.values()),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


Optimizer = torch.optim.Optimizer | FusedAdam


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in the memory layout of its parameter."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _uses_triton(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is updated by the Triton kernel."""
    has_device = parameter.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    fits = LARGE <= parameter.numel() < 2**31  # 32-bit offsets
    return fits and parameter.dtype == torch.float32 and dense and has_device and installed()


# --------------------------------------------------------------------------------------------------
# Functions of the training loop


def make_optimizer(
    stage: Stage, parameters: Sequence[nn.Parameter], factors: Sequence[float] | None = None
) -> Optimizer:
    """Return the optimizer of a stage.

    Parameters
    ----------
    stage
        Options of the stage: optimizer, learning rate, momentum and weight decay.
    parameters
        Parameters that the stage trains, all on one device.
    factors
        Factor of the learning rate of each parameter; None: all are 1.
    """
    groups = _groups(parameters, factors or [1.0] * len(parameters))
    momentum, weight_decay = float(stage.momentum), float(stage.weight_decay)  # torch refuses ints
    betas = (momentum, BETA2)
    if stage.optimizer == "sgd":
        return torch.optim.SGD(
            groups,
            lr=stage.learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
        )
    if parameters[0].device.type == "cuda":
        return FusedAdam(groups, stage.learning_rate, betas, weight_decay)
    return torch.optim.Adam(groups, lr=stage.learning_rate, betas=betas, weight_decay=weight_decay)


def _groups(parameters: Sequence[nn.Parameter], factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return a parameter group for each factor of the learning rate."""
    members: dict[float, list[nn.Parameter]] = {}
    for parameter, factor in zip(parameters, factors, strict=True):
        members.setdefault(factor, []).append(parameter)
    return [{"params": params, "factor": factor} for factor, params in members.items()]


def renew_optimizer(
    optimizer: Optimizer,
    stage: Stage,
    parameters: Sequence[nn.Parameter],
    factors: Sequence[float] | None = None,
) -> Optimizer:
    """Return an optimizer that goes on with the state of the parameters that another one has.

    Parameters that are new to it start without a state. For the others, see `make_optimizer`.
    """
    renewed = make_optimizer(stage, parameters, factors)
    before = cast("dict[nn.Parameter, Any]", optimizer.state)
    for parameter in parameters:
        if parameter in before:
            renewed.state[parameter] = before[parameter]
    return renewed


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate, in place if it is a tensor: a CUDA graph has captured its address."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate * group["factor"])
        else:
            group["lr"] = rate * group["factor"]


def optimizer_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    """Return the state of an optimizer as named tensors, which `load_optimizer_state` takes.

    Parameters
    ----------
    optimizer
        Optimizer of `parameters`.
    parameters
        Parameters in the order of `make_optimizer`.

    Returns
    -------
    dict
        ``optimizer.N.NAME`` for the state NAME of parameter number N.
    """
    return {
        f"optimizer.{number}.{name}": torch.as_tensor(value)
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state[parameter].items()
    }


def load_optimizer_state(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    state: Mapping[str, Tensor],
    source: Path,
) -> None:
    """Restore the state of an optimizer.

    Parameters
    ----------
    optimizer
        New optimizer of `parameters`.
    parameters
        Parameters in the order of `make_optimizer`.
    state
        State from `optimizer_state`; if empty, the optimizer is unchanged.
    source
        File that the state comes from, for error messages.

    Raises
    ------
    ModelError
        If the state does not belong to this optimizer, or holds a number that it cannot have.
    """
    if not state:
        return
    if not isinstance(optimizer, torch.optim.SGD):
        names = {"step", "exp_avg", "exp_avg_sq"}
    else:
        names = {"momentum_buffer"} if optimizer.defaults["momentum"] else set()
    expected = {
        f"optimizer.{number}.{name}": () if name == "step" else tuple(parameter.shape)
        for number, parameter in enumerate(parameters)
        for name in names
    }
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ModelError(f"{source} is damaged: {name} is not a state of this optimizer")
    for name, value in state.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise ModelError(f"{source} is damaged: {name} must hold finite floating-point numbers")
        if name.endswith((".step", ".exp_avg_sq")) and (value < 0).any():
            raise ModelError(f"{source} is damaged: {name} must not hold negative numbers")
    for number, parameter in enumerate(parameters):
        for name in names:
            value = state[f"optimizer.{number}.{name}"]
            if name == "step":  # `torch.optim.Adam` counts its steps on the CPU
                device = parameter.device if isinstance(optimizer, FusedAdam) else "cpu"
                optimizer.state[parameter][name] = value.to(device, torch.float32)
            else:  # in the memory layout of the parameter
                optimizer.state[parameter][name] = torch.empty_like(parameter).copy_(value)
