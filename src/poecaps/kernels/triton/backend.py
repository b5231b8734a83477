"""The functions of the Triton backend, with the signatures of those in `poecaps.functional`.

Importing this module imports Triton; `poecaps.kernels.triton.support` says whether that is
possible.
"""

from __future__ import annotations

from poecaps.kernels.triton.learning import contrastive_divergence, decoder_contrastive_divergence
from poecaps.kernels.triton.routing import (
    encode,
    held_preactivation,
    reconstruct,
    routing_by_agreement,
)
from poecaps.kernels.triton.support import why_not

__all__ = [
    "contrastive_divergence",
    "decoder_contrastive_divergence",
    "encode",
    "held_preactivation",
    "reconstruct",
    "routing_by_agreement",
    "why_not",
]
