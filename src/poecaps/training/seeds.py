"""Seeds: every random number of a run is a function of the seed and the position in the run.

So a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """Independent streams of random numbers; each is further divided by a position."""

    NETWORK = 0
    """Initial weights of the network."""
    CODE_DENSITY = 1
    """Initial clusters of the code density."""
    STEP = 2
    """Dropout and sampling in a step; position: stage, step."""
    ORDER = 3
    """Order of the images; position: stage, epoch."""
    STAGE = 4
    """Initial weights of a stage; position: stage."""
    DENSITY_IMAGES = 5
    """Images to which the code density is fitted."""
    PARTITION = 6
    """Chains that estimate the partition function of the density."""
    SCORED_VIEWS = 7
    """Views by which an encoder is chosen; position: layer, first image of the batch."""
    IMAGES = 8
    """Images of a run that uses a part of its data."""
    RECOMBINATION = 9
    """Halves of the encoders whose experts are recombined; position: layer, pair of halves."""


def derive_seed(seed: int, stream: Stream, *position: int) -> int:
    """Return the seed of a stream at a position."""
    state = np.random.SeedSequence([seed, int(stream), *position]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def make_generator(seed: int, stream: Stream, *position: int) -> torch.Generator:
    """Return a CPU generator of a stream at a position."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, *position))
