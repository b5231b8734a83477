"""Linear probe: the accuracy of a logistic regression from codes to labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import _checks as checks

if TYPE_CHECKING:
    from torch import Tensor

L2 = 1e-4
MAX_STEPS = 1000
# L-BFGS stops when no entry of the gradient is larger than this. Float32 does not always get there.
STOP_TOLERANCE = 3e-5
# Largest gradient entry of a fit that counts as converged; the default of scikit-learn.
CONVERGED_TOLERANCE = 1e-4


@dataclass(frozen=True)
class LinearProbe:
    """Result of `linear_probe`."""

    train_accuracy: float
    test_accuracy: float
    loss: float
    """Mean cross-entropy on the training codes, without the penalty."""
    steps: int
    """L-BFGS steps taken."""
    converged: bool
    """Whether no entry of the final gradient is larger than 1e-4."""


def linear_probe(
    train_codes: Tensor,
    train_labels: Tensor,
    test_codes: Tensor,
    test_labels: Tensor,
    *,
    l2: float = L2,
) -> LinearProbe:
    """Fit a multinomial logistic regression to training codes and score it on test codes.

    Each feature of the code is standardised to mean 0 and standard deviation 1 over the training
    codes; features that are constant over the training codes are ignored. L-BFGS on the full batch
    of N codes then minimises, over weights W and biases b::

        mean_n −log softmax(W x_n + b)[label_n]  +  l2/2 · ‖W‖²

    This is the objective of scikit-learn's ``LogisticRegression(C=1/(l2 · N))``.

    Parameters
    ----------
    train_codes, test_codes : (N, S), (M, S)
        Processed in their own precision, but at least in float32.
    train_labels, test_labels : (N,), (M,)
        Integers. A test label that does not occur among the training labels counts as an error.
    l2
        Weight of the penalty. Use the same value for all models that are compared.
    """
    checks.require_nonnegative("l2", l2)
    check_rows("train_codes", train_codes, "train_labels", train_labels)
    check_rows("test_codes", test_codes, "test_labels", test_labels)
    if train_codes.shape[1] != test_codes.shape[1]:
        raise ValueError(
            f"test_codes must have {train_codes.shape[1]} numbers each, like train_codes, "
            f"but has {test_codes.shape[1]}; encode both with the same model"
        )
    # One column per code: a matrix product with few rows is several times faster on a CPU.
    dtype = torch.promote_types(train_codes.dtype, torch.float32)
    x, x_test = (codes.to(dtype).T.contiguous() for codes in (train_codes, test_codes))
    _standardise(x, x_test)
    classes, targets = train_labels.to(x.device).unique(return_inverse=True)
    weight = x.new_zeros(len(classes), len(x), requires_grad=True)
    bias = x.new_zeros(len(classes), 1, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MAX_STEPS,
        max_eval=2 * MAX_STEPS,
        history_size=20,
        tolerance_grad=STOP_TOLERANCE,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        value = (
            nn.functional.cross_entropy((weight @ x + bias).T, targets)
            + l2 / 2 * weight.square().sum()
        )
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(objective)
        objective()
    largest_gradient = max(
        parameter.grad.abs().max().item()
        for parameter in (weight, bias)
        if parameter.grad is not None
    )
    with torch.no_grad():
        logits, logits_test = (weight @ x + bias).T, (weight @ x_test + bias).T
        return LinearProbe(
            train_accuracy=_mean(logits.argmax(1) == targets),
            test_accuracy=_mean(classes[logits_test.argmax(1)] == test_labels.to(x.device)),
            loss=nn.functional.cross_entropy(logits, targets).item(),
            steps=int(optimizer.state[weight]["n_iter"]),
            converged=largest_gradient <= CONVERGED_TOLERANCE,
        )


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _standardise(x: Tensor, x_test: Tensor) -> None:
    """Standardise codes (S, N) in place, and test codes (S, M) with the same mean and scale."""
    mean = x.mean(1, keepdim=True, dtype=torch.float64).to(x.dtype)
    x -= mean
    x_test -= mean
    std = torch.linalg.vector_norm(x, dim=1, keepdim=True) / x.shape[1] ** 0.5
    constant = std <= 1e-6 * mean.abs()  # a constant feature has this much rounding error
    scale = torch.where(constant, 0, 1 / std)
    x *= scale
    x_test *= scale


def check_rows(name: str, codes: Tensor, labels_name: str, labels: Tensor) -> None:
    """Raise ValueError unless codes are a finite matrix with one integer label per row."""
    checks.require_floating(name, codes)
    checks.require_shape(name, codes, "NS", (None, None), "flatten each code into one row")
    if len(codes) == 0:
        raise ValueError(f"{name} must have at least one row, but is empty")
    checks.require_tensor(labels_name, labels)
    if labels.dim() != 1 or len(labels) != len(codes) or labels.dtype.is_floating_point:
        raise ValueError(
            f"{labels_name} must be one integer for each of the {len(codes)} rows of {name}, "
            f"but has shape {tuple(labels.shape)} and dtype {labels.dtype}"
        )
    if not bool(codes.isfinite().all()):
        raise ValueError(
            f"{name} must be finite, but contains NaN or infinity; the model may have diverged"
        )
