"""What holds on a GPU; skipped where there is none."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from poecaps import CapsuleExperts, check_capsules, squash
from poecaps import functional as F
from poecaps.layer import MIXINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every wait of the host for the GPU an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layer_and_capsules(dtype: torch.dtype, **options: object) -> tuple[CapsuleExperts, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = CapsuleExperts(40, 8, 6, 16, sharpness=3.0, dtype=torch.float64, **options)  # type: ignore[arg-type]
    layer.reset_parameters(std=1.0, generator=generator)
    x = squash(torch.randn(32, 40, 8, generator=generator, dtype=torch.float64))
    return layer.to("cuda", dtype), x.to("cuda", dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)],
    ids=str,
)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_gpu_agrees_with_float64_on_the_cpu(
    normalize: F.Axis, agreement: F.Agreement, dtype: torch.dtype, tolerance: float
) -> None:
    layer, x = layer_and_capsules(dtype, normalize=normalize, agreement=agreement)
    exact = CapsuleExperts(40, 8, 6, 16, sharpness=3.0, normalize=normalize, agreement=agreement, dtype=torch.float64)
    exact.load_state_dict({name: value.cpu().double() for name, value in layer.state_dict().items()})
    layer.contrastive_divergence(x).backward()
    exact.contrastive_divergence(x.cpu().double()).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    for ours, reference in ((layer(x), exact(x.cpu().double())), (layer.weight.grad, exact.weight.grad)):
        error = (ours.cpu().double() - reference).norm() / reference.norm()
        assert error.item() < tolerance * (3 if ours is layer.weight.grad else 1)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("winners", [None, 2])
def test_a_training_step_never_waits(winners: int | None) -> None:
    layer, x = layer_and_capsules(torch.float32, winners=winners)
    chain, generator = x.clone(), torch.Generator("cuda").manual_seed(0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for mixing in MIXINGS:
        with no_waiting():
            optimizer.zero_grad()
            layer.contrastive_divergence(x, 2, mixing=mixing, chain=chain, generator=generator).backward()
            optimizer.step()
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        check_capsules(x)


def test_check_capsules_looks_at_values_on_the_gpu() -> None:
    _, x = layer_and_capsules(torch.float32)
    check_capsules(x)
    with pytest.raises(ValueError, match="has norm"):
        check_capsules(x * 9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    layer, x = layer_and_capsules(torch.float32)
    exact = layer(x)
    with torch.autocast("cuda", dtype=dtype):
        code, loss = layer(x), layer.contrastive_divergence(x)
    assert code.dtype == dtype
    assert loss.dtype == torch.float32
    assert ((code.float() - exact).norm() / exact.norm()).item() < 0.05
    loss.backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings differ from release to release
def test_compile() -> None:
    layer, x = layer_and_capsules(torch.float32, winners=3)
    layer.eval()
    compiled = torch.compile(layer.contrastive_divergence, fullgraph=True)
    gradients = []
    for loss in (layer.contrastive_divergence, compiled):
        layer.zero_grad()
        loss(x).backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)
