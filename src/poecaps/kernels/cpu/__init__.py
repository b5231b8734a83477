"""Routing and learning in compiled C: the backend ``"simd"``, for float32 on a CPU with AVX-512.

`routing.c` has the equations, for sixteen images at a time. `build` compiles it for the D and K of
a layer when they first occur. `routing` has the functions of the backend.
"""

from poecaps.kernels.cpu.build import compiler_version
from poecaps.kernels.cpu.build import why_not as why_not_compiled
from poecaps.kernels.cpu.routing import (
    contrastive_divergence,
    decoder_contrastive_divergence,
    encode,
    held_preactivation,
    pays,
    reconstruct,
    release_workspace,
    routing_by_agreement,
    why_not,
)

__all__ = [
    "compiler_version",
    "contrastive_divergence",
    "decoder_contrastive_divergence",
    "encode",
    "held_preactivation",
    "pays",
    "reconstruct",
    "release_workspace",
    "routing_by_agreement",
    "why_not",
    "why_not_compiled",
]
