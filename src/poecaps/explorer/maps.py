"""Two-dimensional maps of codes to walk in.

The map of an expert is the plane through its mean along the two directions in which its codes vary
most, so that every point of it is a code. The map of all experts places similar codes of images
near each other, by t-SNE (van der Maaten and Hinton 2008); a point between them is a mixture of the
nearest codes. Both maps are the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import functional as F
from poecaps.applications import encode
from poecaps.preprocessing import leading_directions

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.explorer.render import ExplorerModel

    Array = np.ndarray[Any, Any]

COLUMNS = 12  # thumbnails in a row, and in a column
DRAWS = 1000  # codes of an expert from which its directions are computed
IMAGES = 600  # images whose codes are on the map of all experts
FEWEST_IMAGES = 20  # with fewer, there are random codes on it
REACH = 2.5  # ends of the map of an expert, in standard deviations
MARGIN = 0.01  # share of the codes that are beyond each side of the map of all experts
NEIGHBOURS = 20.0  # perplexity of t-SNE: codes that should be near a code
ITERATIONS, EXAGGERATED = 500, 120  # of t-SNE; in the first ones, similar codes attract more
EXAGGERATION = 8.0
NEAREST = 3  # codes that are mixed between the codes of images
MAX_BYTES = 3_000_000  # of all thumbnails; larger images have fewer of them


@dataclass(frozen=True, eq=False)
class CodeMap:
    """A map of codes; positions are from (0, 0), the upper left corner, to (1, 1).

    Attributes
    ----------
    explained
        Shares of the variance of the codes along both axes; None for the map of all experts.
    columns
        Thumbnails in a row, and in a column.
    images : (columns², H, W, C)
        Thumbnails, row by row; uint8.
    filled : (columns²,)
        Whether there are codes near a thumbnail; the page leaves the others empty.
    """

    explained: tuple[float, float] | None
    columns: int
    images: Array
    filled: Array
    _origin: Tensor  # (J, D), the code at the centre
    _axes: Tensor  # (2, J, D), what it changes by from the centre to an end
    _codes: Tensor | None  # (N, J, D), of images
    _places: Tensor | None  # (N, 2)

    def at(self, x: float, y: float) -> Tensor:
        """Return the code at a position, before squashing: (J, D)."""
        if self._codes is None or self._places is None:
            place = torch.tensor([2 * x - 1, 1 - 2 * y]).to(self._axes)
            return self._origin + torch.einsum("a,ajd->jd", place, self._axes)
        distance = (self._places - torch.tensor([x, y]).to(self._places)).square().sum(1)
        near = distance.topk(min(NEAREST, len(distance)), largest=False)
        weight = 1 / (near.values + 1e-9).square()
        return torch.einsum("n,njd->jd", weight / weight.sum(), self._codes[near.indices])

    def plane(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the code (D,) at the centre of the map of an expert, and both axes (2, D)."""
        return self._origin[expert], self._axes[:, expert]

    def codes(self) -> tuple[Tensor, Tensor]:
        """Return the codes (N, J, D) on the map of all experts, and their places (N, 2)."""
        assert self._codes is not None  # noqa: S101 (callers know which map it is)
        assert self._places is not None  # noqa: S101
        return self._codes, self._places


@torch.no_grad()
def make_map(model: ExplorerModel, expert: int | None) -> CodeMap:
    """Make the map of an expert, or of all experts together."""
    size = int(np.prod(model.network.architecture.image_shape))
    columns = max(2, min(COLUMNS, int((MAX_BYTES / size) ** 0.5)))
    return _of_all(model, columns) if expert is None else _of_expert(model, expert, columns)


def _of_expert(model: ExplorerModel, expert: int, columns: int) -> CodeMap:
    generator = torch.Generator().manual_seed(0)
    codes = model.network.code_density.sample(DRAWS, "learned", expert, generator)[:, expert]
    mean, deviations, directions, explained = _principal(codes)
    axes = torch.zeros(2, model.experts, model.parameters)
    axes[:, expert] = REACH * (deviations * directions).T
    origin = torch.zeros(model.experts, model.parameters)
    origin[expert] = mean
    filled = np.ones(columns**2, bool)
    empty = CodeMap(explained, columns, np.zeros(0), filled, origin, axes, None, None)
    z = torch.stack([empty.at(x, y) for x, y in _centres(columns)])
    return CodeMap(explained, columns, model.decode_many(z), filled, origin, axes, None, None)


def _of_all(model: ExplorerModel, columns: int) -> CodeMap:
    if model.images is None or len(model.images) < FEWEST_IMAGES:
        generator = torch.Generator().manual_seed(0)
        codes = model.network.code_density.sample(IMAGES, "joint", None, generator)
    else:
        count = min(IMAGES, len(model.images))
        chosen = np.linspace(0, len(model.images) - 1, count).astype(int)
        codes = F.unsquash(encode(model.network, model.images.batch(chosen)))
    places = embed(F.squash(codes).flatten(1))
    low, high = (places.quantile(q, dim=0) for q in (MARGIN, 1 - MARGIN))
    places = (places - low) / (high - low).clamp(min=1e-9)
    centres = torch.tensor(_centres(columns))
    nearest = torch.cdist(centres, places).argmin(1)
    inside = (places[nearest] - centres).abs().amax(1) <= 0.5 / columns
    images = model.decode_many(codes[nearest])
    images[~inside.numpy()] = 0
    origin, axes = codes.mean(0), torch.zeros(2, model.experts, model.parameters)
    return CodeMap(None, columns, images, inside.numpy(), origin, axes, codes, places)


def embed(points: Tensor) -> Tensor:
    """Place points (N, S) in the plane by t-SNE, starting from their principal components: (N, 2).

    With p_ij how near two points are, and q_ij ∝ 1/(1 + ‖y_i − y_j‖²) the same for their places,
    gradient descent minimizes Σ_ij p_ij log(p_ij/q_ij).
    """
    count = len(points)
    mean, _, directions, _ = _principal(points)
    y = (points - mean) @ directions
    y = 1e-2 * y / y[:, 0].std(correction=0).clamp(min=1e-12)
    p = _similarities(points)
    velocity, gain = torch.zeros_like(y), torch.ones_like(y)
    rate = max(count / EXAGGERATION / 4, 10.0)
    for step in range(ITERATIONS):
        early = step < EXAGGERATED
        kernel = 1 / (1 + torch.cdist(y, y).square())
        kernel.fill_diagonal_(0)
        force = (EXAGGERATION * p if early else p) - kernel / kernel.sum()
        weights = force * kernel
        gradient = 4 * (weights.sum(1, keepdim=True) * y - weights @ y)
        gain = torch.where(gradient * velocity > 0, gain * 0.8, gain + 0.2).clamp(min=0.01)
        velocity = (0.5 if early else 0.8) * velocity - rate * gain * gradient
        y = y + velocity
        y = y - y.mean(0)
    return y


def _similarities(points: Tensor) -> Tensor:
    """Compute p_ij of t-SNE (N, N): Gaussians with so many neighbours, made symmetric."""
    distance = torch.cdist(points, points).square()
    distance.fill_diagonal_(torch.inf)
    wanted = float(np.log(min(NEIGHBOURS, max(2.0, len(points) / 4))))
    low = torch.zeros(len(points), 1)
    high = torch.full_like(low, torch.inf)
    precision = 1 / distance.topk(2, largest=False).values[:, 1:].clamp(min=1e-9)
    for _ in range(50):  # bisection for the entropy of every row
        p = torch.softmax(-precision * distance, dim=1)
        entropy = torch.special.entr(p).sum(1, keepdim=True)
        low = torch.where(entropy > wanted, precision, low)
        high = torch.where(entropy > wanted, high, precision)
        precision = torch.where(high.isinf(), 2 * precision, (low + high) / 2)
    p = torch.softmax(-precision * distance, dim=1)
    return (p + p.T) / (2 * len(points))


def _principal(points: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[float, float]]:
    """Return the mean (S,) of points (N, S), and deviations (2,) and directions (S, 2) of most.

    The signs are such that the sum of a direction is not negative, and the shares of the variance
    come last. The second direction of points with S = 1 is 0.
    """
    size, mean = points.shape[1], points.mean(0)
    centred = torch.nn.functional.pad(points - mean, (0, max(0, 2 - size)))
    variances, directions = leading_directions([centred], centred.shape[1], 2)
    variances, directions = variances.clamp(min=0), directions[:size]
    directions = directions * torch.where(directions.sum(0) < 0, -1.0, 1.0)
    total = float(centred.square().sum(1).mean().clamp(min=1e-12))
    shares = (variances / total).tolist()
    return mean, variances.sqrt().to(mean), directions, (shares[0], shares[1])


def _centres(columns: int) -> list[tuple[float, float]]:
    """Return the positions of the centres of the thumbnails, row by row."""
    at = [(i + 0.5) / columns for i in range(columns)]
    return [(x, y) for y in at for x in at]
