"""The operators of Triton are registered as PyTorch expects, and compile without a graph break.

On a GPU, or else in Triton's interpreter, which `test_triton_facts` starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels import operators
from poecaps.layer import CapsuleDecoder
from tests.kernels.operator_calls import operator_calls

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# B, I, K, J, D, and options; tests/test_cuda.py has all of them, but the interpreter is slow.
CALLS = [((1, 2, 2, 2, 2), "inputs", "cosine"), ((1, 1, 2, 2, 2), "outputs", "inner")]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operators run Triton's interpreter on a CPU."""
    monkeypatch.setitem(operators.KERNELS, DEVICE, operators.TritonKernels())
    torch.compiler.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(function, backend="aot_eager", fullgraph=True)
    return found


def make(generator: torch.Generator, **given: Any) -> tuple[CapsuleExperts, Tensor]:
    layer = CapsuleExperts(3, 2, 2, 3, sharpness=2.0, backend="triton", **given)
    layer.reset_parameters(std=1.0, generator=generator)
    return layer.to(DEVICE), squash(torch.randn(2, 3, 2, generator=generator)).to(DEVICE)


def test_opcheck(generator: torch.Generator) -> None:
    """Each operator with both sizes, since it is called several times."""
    calls = [operator_calls(*each, generator, DEVICE) for each in CALLS]
    for n, pair in enumerate(zip(*calls, strict=True)):
        torch.library.opcheck(*pair[n % 2])


@pytest.mark.parametrize(
    ("method", "winners"), [("forward", 1), ("free_energy", None), ("reconstruct", 1)]
)
def test_compiled_layers(method: str, winners: int | None, generator: torch.Generator) -> None:
    """Values and gradients; those through the coefficients, too."""
    layer, x = make(generator, winners=winners)
    found: list[tuple[Tensor | None, ...]] = []
    for function in (getattr(layer, method), compiled(getattr(layer, method))):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        value = function(leaf)
        value.square().sum().backward()
        found.append((value.detach(), leaf.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer.reconstruct)(x), layer.reconstruct(x))


@pytest.mark.parametrize(("chained", "mixing"), [(False, "deterministic"), (True, "bernoulli")])
def test_compiled_learning(chained: bool, mixing: F.Mixing, generator: torch.Generator) -> None:
    layer, x = make(generator, winners=1)
    start = squash(torch.randn(3, 3, 2, generator=generator)).to(DEVICE)
    uniform = torch.rand(1, 3 if chained else 2, 2, generator=generator).to(DEVICE)
    found = []

    def loss(x: Tensor, chain: Tensor | None) -> Tensor:
        return layer.contrastive_divergence(x, mixing=mixing, chain=chain, uniform=uniform)

    for function in (loss, compiled(loss)):
        layer.zero_grad()
        layer.balance.zero_()
        chain = start.clone() if chained else None
        value = function(x, chain)
        (3 * value).backward()
        found.append((value.detach(), layer.weight.grad, layer.balance.clone(), chain))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)


def test_compiled_decoders(generator: torch.Generator) -> None:
    decoder = CapsuleDecoder(2, 3, 3, 2, backend="triton", device=DEVICE)
    decoder.reset_parameters(std=1.0)
    y, x = (squash(torch.randn(2, *each, generator=generator)) for each in ((2, 3), (3, 2)))
    found = []
    for function in (decoder.contrastive_divergence, compiled(decoder.contrastive_divergence)):
        decoder.zero_grad()
        value = function(y.to(DEVICE), x.to(DEVICE))
        value.backward()
        found.append((value.detach(), decoder.weight.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)


def test_half_precision(generator: torch.Generator) -> None:
    """Gradients have the dtype of the tensors."""
    dtype = torch.bfloat16
    layer, x = make(generator)
    layer, x = layer.to(dtype), x.to(dtype)
    found = []
    for function in (layer.forward, compiled(layer.forward)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        code = function(leaf)
        code.sum().backward()
        assert code.dtype == dtype
        found.append((code.detach(), leaf.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=5e-2, atol=1e-2)
