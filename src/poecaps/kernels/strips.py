# mypy: ignore-errors
# The functions below are a language of their own, compiled by Triton: their arguments are pointers and blocks.
"""Triton kernels for strips: a block of images × a row of input capsules × one expert at a time.

Where the logits of all pairs (i, j) are kept, B·I·J numbers, what follows the routing needs no votes at all: with W_j
the maps to expert j as one (I·K, D) matrix,

    z_j = (c_·j ⊙ x) W_j        x̃_i = squash(Σ_j c_ij (W_j y_j)_i)        ΔW_j = (c_·j ⊙ x)ᵀ p_j

Kept logits lie with the images last, (J, I, P): both the tiles that write them, one input and some experts, and the
strips that read them, some inputs and one expert, then touch memory along images. For ΔW capsules and experts are
turned so as well, for it sums over images. Constants of a strip: BB images, IB inputs, C = IB·KP columns, DP and KP the
sizes D and K padded to powers of two. Everything else is as in `poecaps.kernels.tiles`.
"""

import triton
import triton.language as tl

from poecaps.kernels.tiles import _pitch, _product, _squash_factor, kernel


@triton.jit
def _row(x, b, i0, B, I, K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr):
    """Load x_i of IB inputs from i0 on, side by side: (BB, C)."""
    n = tl.arange(0, C)
    i = i0 + n // KP
    k = n % KP
    at = (b.to(tl.int64) * I)[:, None] * K + (i * K + k)[None, :]
    return tl.load(x + at, mask=(b < B)[:, None] & ((i < I) & (k < K))[None, :], other=0.0).to(tl.float32)


@triton.jit
def _row_maps(
    w, i0, j, I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr
):
    """Load the maps of IB inputs to expert j: (DP, C)."""
    n = tl.arange(0, C)
    d = tl.arange(0, DP)
    i = i0 + n // KP
    k = n % KP
    column = (i * J + j).to(tl.int64) * (D * K) + k
    mask = (d < D)[:, None] & ((i < I) & (k < K))[None, :]
    return tl.load(w + column[None, :] + (d * K)[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _expert(z, b, j, B, J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load z_j: (BB, DP)."""
    d = tl.arange(0, DP)
    at = (b.to(tl.int64) * J + j)[:, None] * D + d[None, :]
    return tl.load(z + at, mask=(b < B)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _kept(kept, level, b, i0, j, B, I, IB: tl.constexpr, INPUTS: tl.constexpr):
    """Load c_ij = exp(logit − level) of IB inputs: (IB, BB)."""
    P = _pitch(B)
    i = i0 + tl.arange(0, IB)
    mask = (i < I)[:, None] & (b < P)[None, :]
    logit = tl.load(kept + ((j * I + i) * P)[:, None] + b[None, :], mask=mask, other=float("-inf"))
    if INPUTS:
        shared = tl.load(level + j * P + b, mask=b < P, other=0.0)[None, :]
    else:
        shared = tl.load(level + (i * P)[:, None] + b[None, :], mask=mask, other=0.0)
    return tl.exp2(logit - shared)


@kernel
def strip_levels(kept, level, B, I, J: tl.constexpr, BB: tl.constexpr, IB: tl.constexpr):
    """Take log Σ_j exp b_ij of kept logits, for the softmax over the outputs: → level (I, P)."""
    P = _pitch(B)
    i = tl.program_id(0) * IB + tl.arange(0, IB)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    mask = (i < I)[:, None] & (b < P)[None, :]
    at = (i * P)[:, None] + b[None, :]
    largest = tl.full([IB, BB], float("-inf"), tl.float32)
    weight = tl.zeros([IB, BB], tl.float32)
    for j in range(J):
        logit = tl.load(kept + j * I * P + at, mask=mask, other=0.0)
        higher = tl.maximum(largest, logit)
        weight = weight * tl.exp2(largest - higher) + tl.exp2(logit - higher)
        largest = higher
    tl.store(level + at, largest + tl.log2(weight), mask=mask)


@kernel
def strip_up(
    v, w, level, kept, part, B, each, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ij v_i over `each` inputs, a multiple of IB: → part (splits, B, J, D)."""
    IB: tl.constexpr = C // KP
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    j = tl.program_id(1)
    split = tl.program_id(2)
    low = split * each
    total = tl.zeros([BB, DP], tl.float32)
    for i0 in range(low, tl.minimum(low + each, I), IB):
        share = tl.trans(_kept(kept, level, b, i0, j, B, I, IB, INPUTS))[:, :, None]
        routed = tl.reshape(share * tl.reshape(_row(v, b, i0, B, I, K, C, KP), [BB, IB, KP]), [BB, C])
        total += _product(routed, tl.trans(_row_maps(w, i0, j, I, J, D, K, C, DP, KP)), EXACT)
    d = tl.arange(0, DP)
    row = (split * B + b).to(tl.int64) * J + j
    tl.store(part + row[:, None] * D + d[None, :], total, mask=(b < B)[:, None] & (d < D)[None, :])


@kernel
def strip_down(
    y, w, level, kept, out, B, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, LARGEST: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Squash Σ_j c_ij W_ijᵀ y_j: → out (B, I, K)."""
    IB: tl.constexpr = C // KP
    i0 = tl.program_id(0) * IB
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    total = tl.zeros([BB, IB, KP], tl.float32)
    coming = _kept(kept, level, b, i0, 0, B, I, IB, INPUTS)
    for j in range(J):
        # What the next expert needs is under way while this one is computed.
        share = coming
        coming = _kept(kept, level, b, i0, tl.minimum(j + 1, J - 1), B, I, IB, INPUTS)
        back = _product(_expert(y, b, j, B, J, D, DP), _row_maps(w, i0, j, I, J, D, K, C, DP, KP), EXACT)
        total += tl.trans(share)[:, :, None] * tl.reshape(back, [BB, IB, KP])
    scale = tl.max(tl.abs(total), 2)
    scale = tl.where(scale > 0, scale, 1.0)[:, :, None]
    unit = total / scale
    norm = tl.sqrt(tl.sum(unit * unit, 2))[:, :, None]
    unit = unit / tl.where(norm > 0, norm, 1.0)
    total = tl.reshape(_squash_factor(scale * norm, LARGEST) * unit, [BB, C])
    n = tl.arange(0, C)
    i = i0 + n // KP
    k = n % KP
    at = (b.to(tl.int64) * I)[:, None] * K + (i * K + k)[None, :]
    tl.store(out + at, total, mask=(b < B)[:, None] & ((i < I) & (k < K))[None, :])


@kernel
def strip_turn(
    v, p, v_out, p_out, B, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BB: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Turn capsules v (B, I, K) → (I·K, P) and experts p (B, J, D) → (J·D, P): images last, 0 beyond them."""
    if tl.program_id(2) == 0:
        _turn(v, v_out, B, I, K, BB, C)
    else:
        _turn(p, p_out, B, J, D, BB, C)


@triton.jit
def _turn(x, out, B, I, K: tl.constexpr, BB: tl.constexpr, C: tl.constexpr):
    P = _pitch(B)
    n = tl.program_id(0) * C + tl.arange(0, C)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    i = n // K
    source = (b.to(tl.int64)[:, None] * I + i[None, :]) * K + (n % K)[None, :]
    value = tl.load(x + source, mask=(b < B)[:, None] & (i < I)[None, :], other=0.0)
    tl.store(out + n[:, None] * P + b[None, :], tl.trans(value), mask=(i < I)[:, None] & (b < P)[None, :])


@triton.jit
def _turned(x, row, known, b, P):
    """Load rows of what was turned: (rows, BB)."""
    mask = known[:, None] & (b < P)[None, :]
    return tl.load(x + row[:, None] * P + b[None, :], mask=mask, other=0.0).to(tl.float32)


@kernel
def strip_learn(
    x, v, p, q, level, kept, scale, out, B, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, PAIR: tl.constexpr, ADD: tl.constexpr,
    SCALED: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij (q_j v_iᵀ + p_j x_iᵀ) over the batch, the last term if PAIR, of what was turned: → out (I, J, D, K)."""
    IB: tl.constexpr = C // KP
    P = _pitch(B)
    # Experts side by side, so that they share the capsules in the cache.
    i0 = tl.program_id(0) // J * IB
    j = tl.program_id(0) % J
    n = tl.arange(0, C)
    d = tl.arange(0, DP)
    i = i0 + n // KP
    k = n % KP
    inside = (i < I) & (k < K)
    total = tl.zeros([C, DP], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        share = _kept(kept, level, b, i0, j, B, I, IB, INPUTS)[:, None, :]
        routed = share * tl.reshape(_turned(v, i * K + k, inside, b, P), [IB, KP, BB])
        total += _product(tl.reshape(routed, [C, BB]), tl.trans(_turned(q, j * D + d, d < D, b, P)), EXACT)
        if PAIR:
            routed = share * tl.reshape(_turned(x, i * K + k, inside, b, P), [IB, KP, BB])
            total += _product(tl.reshape(routed, [C, BB]), tl.trans(_turned(p, j * D + d, d < D, b, P)), EXACT)
    if SCALED:
        total = total * tl.load(scale)
    at = ((i * J + j).to(tl.int64) * (D * K) + k)[:, None] + (d * K)[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    if ADD:
        total += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, total, mask=mask)
