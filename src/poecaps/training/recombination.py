"""New encoders, made of the experts of several ones that have learned from the same images."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poecaps.metrics import stability

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from poecaps.layer import CapsuleExperts

# Share of their images that two experts of a new encoder may have in common: experts that divide
# the same classes in another way share about half of them. With too few experts, it is raised.
MAX_OVERLAP, OVERLAP_STEP = 0.4, 0.1

# Rate at which the balance of a new encoder moves, slower than that of a start (1). Held at 0, some
# experts win most images of Fashion-MNIST; at 1, all kinds are forced to be equally frequent.
BALANCE_RATE = 0.05


@dataclass(frozen=True)
class Recombination:
    """The origin of an encoder that is made of the experts of others."""

    number: int
    """Number of the encoder, counted from 1 after all starts."""
    starts: list[int]
    """Numbers of the encoders whose experts were compared."""
    experts: list[tuple[int, int]]
    """The start from which each expert was taken, and its index there, counted from 0."""
    stability: list[float]
    """Stability of each of these experts, see `poecaps.metrics.stability`."""


def choose_experts(log_odds: Mapping[int, Tensor], count: int) -> list[tuple[int, int, float]]:
    """Choose the most stable experts that share few of their images.

    The images of an expert are those whose views together choose it: it has the largest sum of
    log-odds over the views. The experts of all encoders are visited in the order of their
    stability, and one is taken if it has at most `MAX_OVERLAP` of its images in common with each
    that was taken before, see `overlap`. If these are too few, the limit is raised.

    Parameters
    ----------
    log_odds
        Of each encoder, by its number: the logits (N, T, J) of the firing probabilities of the same
        T views of N images.
    count
        Number of experts to choose, at most those of all encoders together.

    Returns
    -------
    list
        Number of the encoder, index of the expert and its stability, the most stable first.
    """
    owners = [(number, j) for number, each in log_odds.items() for j in range(each.shape[-1])]
    stable = torch.cat([stability(each) for each in log_odds.values()]).tolist()
    images = [each.mean(1).argmax(-1) for each in log_odds.values()]
    members = torch.cat(
        [
            chosen == torch.arange(each.shape[-1], device=chosen.device).unsqueeze(1)
            for chosen, each in zip(images, log_odds.values(), strict=True)
        ]
    )
    shared = overlap(members).tolist()
    ranked = sorted(range(len(owners)), key=stable.__getitem__, reverse=True)
    limit, taken = MAX_OVERLAP, list[int]()
    while len(taken) < count:
        taken = []
        for each in ranked:
            if len(taken) < count and all(shared[each][other] <= limit for other in taken):
                taken.append(each)
        limit += OVERLAP_STEP
    return [(*owners[each], stable[each]) for each in taken]


def overlap(members: Tensor) -> Tensor:
    """Compute the share of images that two experts have in common: |A ∩ B| / min(|A|, |B|).

    Parameters
    ----------
    members : (M, N)
        Whether an image is one of an expert.

    Returns
    -------
    (M, M)
        From 0 to 1; 1 if one of both experts has no images.
    """
    members = members.float()  # numbers of images are exact in it
    size = members.sum(1)
    smaller = torch.minimum(size.unsqueeze(0), size.unsqueeze(1))
    return torch.where(smaller > 0, members @ members.T / smaller.clamp(min=1), 1)


@torch.no_grad()
def recombined(
    encoders: Mapping[int, CapsuleExperts], experts: Sequence[tuple[int, int]]
) -> CapsuleExperts:
    """Make an encoder from experts of others.

    Their balance is folded into the weights, and moves by `BALANCE_RATE` from then on. It has let
    the experts of each encoder win equally often. Those of the new one are different already, and
    the kinds of images that they stand for need not be equally frequent.

    Parameters
    ----------
    encoders
        Encoders of equal sizes and options, by their numbers, with ``agreement="cosine"``.
    experts
        Number of an encoder and index of an expert, for each expert of the new one.
    """
    folded = {number: copy.deepcopy(encoders[number]) for number, _ in experts}
    for each in folded.values():
        each.fold_balance()
    made = copy.deepcopy(next(iter(folded.values())))
    made.weight.copy_(torch.stack([folded[number].weight[:, j] for number, j in experts], dim=1))
    made.balance_rate = BALANCE_RATE
    return made
