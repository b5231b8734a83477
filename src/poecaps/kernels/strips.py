# mypy: ignore-errors
# The functions below are a language of their own, compiled by Triton: their arguments are pointers and blocks.
"""Triton kernels for routing in strips: a block of images × a row of input capsules × one expert at a time.

Where one number per pair (i, j) and image may be kept, B·I·J of them, even a tile of votes is not needed: with
W_j the maps to expert j as one (I·K, D) matrix,

    ⟨u_ij, h_j⟩ = Σ_k x_ik (W_j h_j)_ik        z_j = (c_·j ⊙ x) W_j        x̃_i = squash(Σ_j c_ij (W_j y_j)_i)

Kept are first the norms 1/‖u_ij‖, which the first pass finds, and in their place after the last the logits: (B, J, I),
so that a row of inputs is contiguous. Constants of a strip: BB images, IB inputs, C = IB·KP columns, DP and KP padded.
Everything else is as in `poecaps.kernels.tiles`.
"""

import triton
import triton.language as tl

from poecaps.kernels.tiles import _squash_factor, kernel


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
def _kept(kept, level, b, i0, j, B, I, J: tl.constexpr, IB: tl.constexpr, INPUTS: tl.constexpr):
    """Load c_ij = exp(logit − level) of IB inputs: (BB, IB)."""
    i = i0 + tl.arange(0, IB)
    mask = (b < B)[:, None] & (i < I)[None, :]
    at = ((b.to(tl.int64) * J + j) * I)[:, None] + i[None, :]
    logit = tl.load(kept + at, mask=mask, other=float("-inf"))
    if INPUTS:
        shared = tl.load(level + b.to(tl.int64) * J + j, mask=b < B, other=0.0)[:, None]
    else:
        shared = tl.load(level + (b.to(tl.int64) * I)[:, None] + i[None, :], mask=mask, other=0.0)
    return tl.exp(logit - shared)


@kernel
def strip_up(
    v, w, h, level, kept, part, part_max, part_sum, beta, B, each, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, ONLINE: tl.constexpr, INPUTS: tl.constexpr,
    COSINE: tl.constexpr, STORE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ij v_i over `each` inputs: → part (splits, B, J, D).

    ONLINE: v was routed, `kept` has the inverse norms, and the softmax over the inputs is taken on the way, as in
    `tiles.up`; STORE puts the logits in their place. Otherwise `kept` has the logits.
    """
    IB: tl.constexpr = C // KP
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    j = tl.program_id(1)
    split = tl.program_id(2)
    low = split * each
    high = tl.minimum(low + each, I)
    total = tl.zeros([BB, DP], tl.float32)
    weight = tl.zeros([BB], tl.float32)
    largest = tl.full([BB], float("-inf"), tl.float32)
    if ONLINE:
        sent = _expert(h, b, j, B, J, D, DP) * beta
    for i0 in range(low, high, IB):
        capsules = tl.reshape(_row(v, b, i0, B, I, K, C, KP), [BB, IB, KP])
        maps = _row_maps(w, i0, j, I, J, D, K, C, DP, KP)
        if ONLINE:
            i = i0 + tl.arange(0, IB)
            inside = (b < B)[:, None] & (i < high)[None, :]
            at = ((b.to(tl.int64) * J + j) * I)[:, None] + i[None, :]
            back = tl.dot(sent, maps, input_precision=PRECISION)
            logit = tl.sum(tl.reshape(back, [BB, IB, KP]) * capsules, 2)
            if COSINE:
                logit = logit * tl.load(kept + at, mask=inside, other=0.0)
            if STORE:
                tl.store(kept + at, logit, mask=inside)
            logit = tl.where((i < high)[None, :], logit, float("-inf"))
            if BOUNDED:
                share = tl.exp(logit)
                weight += tl.sum(share, 1)
            else:
                higher = tl.maximum(largest, tl.max(logit, 1))
                old = tl.exp(largest - higher)
                share = tl.exp(logit - higher[:, None])
                weight = weight * old + tl.sum(share, 1)
                total = total * old[:, None]
                largest = higher
        else:
            share = _kept(kept, level, b, i0, j, B, I, J, IB, INPUTS)
            share = tl.where((i0 + tl.arange(0, IB) < high)[None, :], share, 0.0)
        routed = tl.reshape(share[:, :, None] * capsules, [BB, C])
        total = tl.dot(routed, tl.trans(maps), total, input_precision=PRECISION)
    d = tl.arange(0, DP)
    row = (split * B + b).to(tl.int64) * J + j
    tl.store(part + row[:, None] * D + d[None, :], total, mask=(b < B)[:, None] & (d < D)[None, :])
    if ONLINE:
        tl.store(part_sum + row, weight, mask=b < B)
        if not BOUNDED:
            tl.store(part_max + row, largest, mask=b < B)


@kernel
def strip_down(
    y, w, level, kept, out, B, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, LARGEST: tl.constexpr,
    PRECISION: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Squash Σ_j c_ij W_ijᵀ y_j: → out (B, I, K)."""
    IB: tl.constexpr = C // KP
    i0 = tl.program_id(0) * IB
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    total = tl.zeros([BB, IB, KP], tl.float32)
    for j in range(J):
        maps = _row_maps(w, i0, j, I, J, D, K, C, DP, KP)
        back = tl.dot(_expert(y, b, j, B, J, D, DP), maps, input_precision=PRECISION)
        share = _kept(kept, level, b, i0, j, B, I, J, IB, INPUTS)
        total += share[:, :, None] * tl.reshape(back, [BB, IB, KP])
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
def strip_learn(
    x, v, p, q, level, kept, scale, out, B, I,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, PAIR: tl.constexpr, ADD: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij (q_j v_iᵀ + p_j x_iᵀ) over the batch, the last term if PAIR: → out (I, J, D, K)."""
    IB: tl.constexpr = C // KP
    i0 = tl.program_id(0) * IB
    j = tl.program_id(1)
    total = tl.zeros([C, DP], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        share = _kept(kept, level, b, i0, j, B, I, J, IB, INPUTS)[:, :, None]
        routed = tl.reshape(share * tl.reshape(_row(v, b, i0, B, I, K, C, KP), [BB, IB, KP]), [BB, C])
        total = tl.dot(tl.trans(routed), _expert(q, b, j, B, J, D, DP), total, input_precision=PRECISION)
        if PAIR:
            routed = tl.reshape(share * tl.reshape(_row(x, b, i0, B, I, K, C, KP), [BB, IB, KP]), [BB, C])
            total = tl.dot(tl.trans(routed), _expert(p, b, j, B, J, D, DP), total, input_precision=PRECISION)
    if SCALED:
        total = total * tl.load(scale)
    n = tl.arange(0, C)
    d = tl.arange(0, DP)
    i = i0 + n // KP
    k = n % KP
    at = ((i * J + j).to(tl.int64) * (D * K) + k)[:, None] + (d * K)[None, :]
    mask = ((i < I) & (k < K))[:, None] & (d < D)[None, :]
    if ADD:
        total += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, total, mask=mask)
