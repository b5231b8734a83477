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
FLAT = 1e-5  # the largest gradient at which a fit counts as done


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
    """Whether no entry of the gradient was larger than 1e-5 at the end."""


def linear_probe(
    train_codes: Tensor, train_labels: Tensor, test_codes: Tensor, test_labels: Tensor, *, l2: float = L2
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
    mean, scale = _standard(train_codes)
    x, x_test = ((codes.to(mean.dtype) - mean).mul_(scale) for codes in (train_codes, test_codes))
    classes, targets = train_labels.to(x.device).unique(return_inverse=True)
    weight = x.new_zeros(x.shape[1], len(classes), requires_grad=True)
    bias = x.new_zeros(len(classes), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MOST_STEPS,
        max_eval=2 * MOST_STEPS,
        history_size=20,
        tolerance_grad=FLAT,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(x @ weight + bias, targets) + l2 / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(objective)
        objective()
    assert weight.grad is not None and bias.grad is not None  # noqa: PT018, S101 (objective filled both)
    flat = max(weight.grad.abs().max().item(), bias.grad.abs().max().item())
    with torch.no_grad():
        logits = x @ weight + bias
        return LinearProbe(
            train_accuracy=(logits.argmax(1) == targets).double().mean().item(),
            test_accuracy=(classes[(x_test @ weight + bias).argmax(1)] == test_labels.to(x.device))
            .double()
            .mean()
            .item(),
            loss=nn.functional.cross_entropy(logits, targets).item(),
            steps=int(optimizer.state[weight]["n_iter"]),
            converged=flat <= FLAT,
        )


def _standard(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1/standard deviation (0 where there is none) of codes (N, S), in at least float32: (S,), (S,)."""
    mean = codes.mean(0, dtype=torch.float64)
    # A large constant plus small variations must not lose the variations: differences first, then squares.
    parts = [(part.double() - mean).square().sum(0) for part in codes.split(4096)]
    std = (torch.stack(parts).sum(0) / len(codes)).sqrt()
    noise = 1e-7 * mean.abs() + 1e-30  # what is left of a constant after rounding
    dtype = torch.promote_types(codes.dtype, torch.float32)
    return mean.to(dtype), torch.where(std > noise, 1 / std, 0).to(dtype)


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
        raise ValueError(f"{name} must be finite, but holds NaN or infinity; look for a diverged model")
