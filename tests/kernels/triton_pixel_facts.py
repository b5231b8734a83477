"""The kernels of the pixel decoder's step compute the same as PyTorch.

On a GPU, or else in Triton's interpreter, which `test_triton_facts` starts.
"""

from __future__ import annotations

import pytest
import torch

from poecaps.kernels import pixels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 1, 17, 23), (2, 3, 5, 4)])
def test_the_loss_and_its_gradient(
    shape: tuple[int, ...], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of logits that are far from 0, of equal numbers, and in another layout."""
    logits = 3 * torch.randn(shape, generator=generator)
    images = torch.rand(shape, generator=generator)
    logits[0, 0, 0, :4] = torch.tensor([200.0, -200.0, 0.0, 1e-7])
    images[0, 0, 0, :4] = torch.tensor([0.0, 1.0, 0.5, 1.0])
    found = []
    for fuse in (True, False):
        monkeypatch.setattr(pixels, "FUSE", fuse)
        leaf = logits.to(DEVICE).to(memory_format=torch.channels_last).requires_grad_()
        loss = pixels.pixel_loss(leaf, images.to(DEVICE), 0.1)
        (2 * loss).backward()
        found.append((loss.detach(), leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


# On a GPU, the threads of a warp share the sum of squares of an expert if D is small.
@pytest.mark.parametrize("sizes", [(5, 3, 4), (4, 1, 1), (30, 20, 2), (30, 20, 7), (9, 20, 16)])
def test_the_mask(
    sizes: tuple[int, ...], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = torch.randn(sizes, generator=generator)
    y[0] = 0  # all are equally strong
    uniform = torch.linspace(0, 1, sizes[0])[:, None, None]
    found = []
    for fuse in (True, False):
        monkeypatch.setattr(pixels, "FUSE", fuse)
        found.append(pixels.mask_to_strongest(y.to(DEVICE), uniform.to(DEVICE), 0.6))
    assert found[0].equal(found[1])
    assert found[0].count_nonzero() > 0


def test_a_mask_does_not_hide_a_code_that_is_not_a_number() -> None:
    y = torch.ones(2, 3, 4)
    y[:, 1, 2] = torch.nan
    masked = pixels.mask_to_strongest(
        y.to(DEVICE), torch.tensor([[[0.0]], [[1.0]]]).to(DEVICE), 0.5
    )
    assert masked[:, 1].isnan().any(1).all()
