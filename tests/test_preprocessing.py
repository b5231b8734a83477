"""The preprocessing of the input capsules: each option, the inverse, and streamed PCA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from poecaps import squash, unsquash
from poecaps.preprocessing import Preprocessing, leading_directions


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_every_combination_of_options_is_applied_and_inverted(
    centre: bool, whiten: bool, scale: float | None, generator: torch.Generator
) -> None:
    rotations = torch.linalg.qr(torch.randn(3, 4, 4, generator=generator)).Q
    std = torch.tensor([1.0, 0.7, 0.5, 0.3])
    a = torch.einsum("bik,ikl->bil", torch.randn(600, 3, 4, generator=generator) * std, rotations)
    a = a + torch.tensor([2.0, -1.0, 0.5, 0.0])
    preprocessing = Preprocessing(3, 4, centre=centre, scale=scale, whiten=whiten)
    preprocessing.fit(a.split(100))
    x = preprocessing.to_capsules(a)
    torch.testing.assert_close(preprocessing.from_capsules(x), a, rtol=1e-3, atol=1e-3)
    z = unsquash(x)
    torch.testing.assert_close(z, preprocessing.transform(a), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(preprocessing.inverse_transform(z), a, rtol=1e-3, atol=1e-3)
    if centre:
        assert z.mean(0).abs().max() < 1e-3
    if scale is not None:
        assert z.norm(dim=-1).mean().item() == pytest.approx(scale, rel=1e-3)
    if whiten:
        for i in range(3):
            covariance = torch.cov(z[:, i].T, correction=0)
            torch.testing.assert_close(
                covariance / covariance.diagonal().mean(), torch.eye(4), rtol=0.02, atol=0.02
            )
    if not centre and not whiten and scale is None:
        torch.testing.assert_close(x, squash(a))


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("whiten", [True, False])
def test_equalization_makes_the_leading_directions_equally_strong(
    centre: bool, whiten: bool, generator: torch.Generator
) -> None:
    """By LAPACK's eigenvalues: the first three are reduced to the third, the others stay."""
    shared = torch.randn(4000, 3, generator=generator) * torch.tensor([9.0, 6.0, 4.0])
    # Which of the 5 capsules each of the three shared directions reaches.
    reach = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]).repeat_interleave(
        4, 1
    )
    a = (
        1.5
        + shared @ (reach * torch.randn(3, 20, generator=generator))
        + torch.randn(4000, 20, generator=generator)
    )
    a = a.view(-1, 5, 4)
    equalized = Preprocessing(5, 4, centre=centre, scale=0.3, whiten=whiten, equalized_components=3)
    plain = Preprocessing(5, 4, centre=centre, scale=0.3, whiten=whiten)
    for each in (equalized, plain):
        each.fit(a.split(900))
    before, after = (
        _spectrum(unsquash(each.to_capsules(a)).flatten(1)) for each in (plain, equalized)
    )
    assert before[0] > 1.5 * before[2]
    assert after[:3].std() < 0.02 * after[0]
    torch.testing.assert_close(after[3:] / after[2], before[3:] / before[2], rtol=0.05, atol=1e-3)
    x = equalized.to_capsules(a)
    assert unsquash(x).norm(dim=-1).mean().item() == pytest.approx(0.3, rel=1e-3)
    torch.testing.assert_close(equalized.from_capsules(x), a, rtol=1e-3, atol=1e-3)
    v = equalized.components
    assert v is not None
    torch.testing.assert_close(v.T @ v, torch.eye(3), rtol=1e-4, atol=1e-5)


def _spectrum(points: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(points.double().T.cov()).flip(0)


def test_equalization_is_inverted_if_fewer_directions_have_variance_than_are_equalized(
    generator: torch.Generator,
) -> None:
    a = torch.randn(200, 1, generator=generator) * torch.randn(20, generator=generator)  # a line
    a = a.view(-1, 5, 4)
    preprocessing = Preprocessing(
        5, 4, centre=True, scale=0.3, whiten=False, equalized_components=3
    )
    preprocessing.fit([a])
    assert preprocessing.factors is not None
    assert preprocessing.factors[0].item() == pytest.approx(0.01, rel=0.01)  # the strongest allowed
    back = preprocessing.from_capsules(preprocessing.to_capsules(a))
    torch.testing.assert_close(back, a, rtol=1e-3, atol=1e-3)


def test_more_equalized_components_than_features_raise_an_error() -> None:
    with pytest.raises(ValueError, match=r"equalized_components must be at most 20.*but is 21"):
        Preprocessing(5, 4, centre=True, scale=None, whiten=False, equalized_components=21)


def test_streamed_principal_directions_are_those_of_the_covariance(
    generator: torch.Generator,
) -> None:
    rotation = torch.linalg.qr(torch.randn(30, 30, generator=generator)).Q
    points = torch.randn(1000, 30, generator=generator) * torch.linspace(5, 0.1, 30) @ rotation
    points = points - points.mean(0)
    variances, directions = leading_directions(points.split(300), 30, 4)
    values, vectors = torch.linalg.eigh(points.double().T @ points.double() / 1000)
    torch.testing.assert_close(variances, values.flip(0)[:4], rtol=1e-4, atol=1e-6)
    cosines = (directions.double() * vectors.flip(1)[:, :4]).sum(0).abs()
    torch.testing.assert_close(cosines, torch.ones(4, dtype=torch.float64), rtol=1e-3, atol=1e-3)
