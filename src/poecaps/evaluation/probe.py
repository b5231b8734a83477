"""How much of the labels a linear map reads off a code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import _checks as checks

if TYPE_CHECKING:
    from torch import Tensor

L2 = 1e-4
MOST_STEPS = 1000
STOP = 3e-5  # the largest entry of the gradient at which the search stops; float32 does not always get there
FLAT = 1e-4  # that at which a fit counts as done, which is scikit-learn's


@dataclass(frozen=True)
class LinearProbe:
    """Result of `linear_probe`."""

    train_accuracy: float
    test_accuracy: float
    loss: float
    """Mean cross-entropy of the training codes, without the penalty."""
    steps: int
    """L-BFGS steps taken."""
    converged: bool
    """Whether no entry of the gradient was larger than 1e-4 at the end."""


def linear_probe(
    train_codes: Tensor,
    train_labels: Tensor,
    test_codes: Tensor,
    test_labels: Tensor,
    *,
    l2: float = L2,
) -> LinearProbe:
    """Fit a multinomial logistic regression to training codes and measure its accuracy on test codes.

    Each number of the code is brought to mean 0 and standard deviation 1 over the training codes; one that is constant
    there is left out. Then, over weights W and biases b::

        mean_n −log softmax(W x_n + b)[label_n]  +  l2/2 · ‖W‖²

    is minimised by L-BFGS over all N codes at once. It is what scikit-learn's
    ``LogisticRegression(C=1/(l2 · N))`` minimises.

    Parameters
    ----------
    train_codes, test_codes : (N, S), (M, S)
        Worked on in their own precision, but not below float32.
    train_labels, test_labels : (N,), (M,)
        Whole numbers; a test label that no training code has counts as missed.
    l2
        Weight of the penalty, the same for whatever is compared.
    """
    checks.require_nonnegative("l2", l2)
    check_rows("train_codes", train_codes, "train_labels", train_labels)
    check_rows("test_codes", test_codes, "test_labels", test_labels)
    if train_codes.shape[1] != test_codes.shape[1]:
        raise ValueError(
            f"test_codes must have {train_codes.shape[1]} numbers each, as train_codes have, "
            f"but have {test_codes.shape[1]}; encode both with the same model"
        )
    # One column for each code: a product with few rows is then several times faster on a CPU.
    dtype = torch.promote_types(train_codes.dtype, torch.float32)
    x, x_test = (codes.to(dtype).T.contiguous() for codes in (train_codes, test_codes))
    _standardise(x, x_test)
    classes, targets = train_labels.to(x.device).unique(return_inverse=True)
    weight = x.new_zeros(len(classes), len(x), requires_grad=True)
    bias = x.new_zeros(len(classes), 1, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MOST_STEPS,
        max_eval=2 * MOST_STEPS,
        history_size=20,
        tolerance_grad=STOP,
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
    steepest = max(each.grad.abs().max().item() for each in (weight, bias) if each.grad is not None)
    with torch.no_grad():
        logits, logits_test = (weight @ x + bias).T, (weight @ x_test + bias).T
        return LinearProbe(
            train_accuracy=_mean(logits.argmax(1) == targets),
            test_accuracy=_mean(classes[logits_test.argmax(1)] == test_labels.to(x.device)),
            loss=nn.functional.cross_entropy(logits, targets).item(),
            steps=int(optimizer.state[weight]["n_iter"]),
            converged=steepest <= FLAT,
        )


def _mean(truth: Tensor) -> float:
    return truth.double().mean().item()


def _standardise(x: Tensor, x_test: Tensor) -> None:
    """Bring codes (S, N) in place to mean 0 and standard deviation 1, and test codes (S, M) along with them."""
    mean = x.mean(1, keepdim=True, dtype=torch.float64).to(x.dtype)
    x -= mean
    x_test -= mean
    std = torch.linalg.vector_norm(x, dim=1, keepdim=True) / x.shape[1] ** 0.5
    constant = std <= 1e-6 * mean.abs()  # what rounding leaves of a constant
    scale = torch.where(constant, 0, 1 / std)
    x *= scale
    x_test *= scale


def check_rows(name: str, codes: Tensor, labels_name: str, labels: Tensor) -> None:
    """Refuse codes that are no finite matrix, and labels that are not one whole number for each of its rows."""
    checks.require_floating(name, codes)
    checks.require_shape(name, codes, "NS", (None, None), "flatten each code into one row")
    if len(codes) == 0:
        raise ValueError(f"{name} must hold at least one row, but is empty")
    checks.require_tensor(labels_name, labels)
    if labels.dim() != 1 or len(labels) != len(codes) or labels.dtype.is_floating_point:
        raise ValueError(
            f"{labels_name} must be one whole number for each of the {len(codes)} rows of {name}, "
            f"but has shape {tuple(labels.shape)} and dtype {labels.dtype}"
        )
    if not bool(codes.isfinite().all()):
        raise ValueError(
            f"{name} must be finite, but holds NaN or infinity; look for a diverged model"
        )
