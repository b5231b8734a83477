"""Routing and learning in compiled C: the backend ``"simd"``, for float32 on a CPU.

`routing.c` has the equations, `backward.h` those of the gradient, both for as many images at a time
as a vector register holds: 16 (AVX-512), 8 (AVX2) or 4 (NEON, SSE2; `lanes.h`). `build` compiles
them for the D and K of a layer when they first occur. `routing` has the functions of the backend.
"""

from poecaps.kernels.cpu.build import compiler_version, target
from poecaps.kernels.cpu.build import why_not as why_not_compiled
from poecaps.kernels.cpu.routing import (
    contrastive_divergence,
    decoder_contrastive_divergence,
    encode,
    held_preactivation,
    may_pay,
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
    "may_pay",
    "pays",
    "reconstruct",
    "release_workspace",
    "routing_by_agreement",
    "target",
    "why_not",
    "why_not_compiled",
]
