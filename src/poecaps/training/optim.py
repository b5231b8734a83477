"""Optimizers of the training stages, and their state in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps._files import ModelError
from poecaps.training.adam import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from poecaps.training.config import Stage

    Optimizer = torch.optim.Optimizer | FusedAdam

BETA2 = 0.999  # decay rate of Adam's second moment, the default of `torch.optim.Adam`


def make_optimizer(stage: Stage, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return the optimizer of a stage for its parameters, which are all on one device."""
    betas = (stage.momentum, BETA2)
    if stage.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=stage.learning_rate,
            momentum=stage.momentum,
            weight_decay=stage.weight_decay,
        )
    if parameters[0].device.type == "cuda":
        return FusedAdam(parameters, stage.learning_rate, betas, stage.weight_decay)
    return torch.optim.Adam(
        parameters, lr=stage.learning_rate, betas=betas, weight_decay=stage.weight_decay
    )


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate, in place if it is a tensor: a CUDA graph has captured its address."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    """Return the state NAME of parameter number N as a tensor named ``optimizer.N.NAME``."""
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
    """Restore the result of `optimizer_state`; an empty one leaves the optimizer as it is.

    Raises
    ------
    ModelError
        If the state, read from the file `source`, does not belong to this optimizer.
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
    for number, parameter in enumerate(parameters):
        for name in names:
            value = state[f"optimizer.{number}.{name}"]
            if name == "step":  # `torch.optim.Adam` counts its steps on the CPU
                device = parameter.device if isinstance(optimizer, FusedAdam) else "cpu"
                optimizer.state[parameter][name] = value.to(device, torch.float32)
            else:  # in the memory layout of the parameter
                optimizer.state[parameter][name] = torch.empty_like(parameter).copy_(value)
