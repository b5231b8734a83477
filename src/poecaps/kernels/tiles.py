# mypy: ignore-errors
# The functions below are a language of their own, compiled by Triton: their arguments are pointers and blocks.
"""Triton kernels for routing in tiles: a block of images × one input capsule × a few experts at a time.

No kernel writes a vote. A tile of votes u_ij = W_ij x_i is made in registers from x_i and W_i, used, and forgotten.
The logits after any number of iterations follow from one vector per image and expert, because agreement is linear in
what the expert sent: with h_j = Σ_s speak(z_j^(s)), where speak is `direction` or `squash`,

    b_ij = β ⟨u_ij, h_j⟩, divided by ‖u_ij‖ for the cosine,        c_ij = exp(b_ij − level)

where level is the logarithm of the softmax's sum: one number per (j, b) if the inputs share, per (i, b) otherwise.
Logits and levels are kept times log₂ e, for the chip takes powers of 2.

Shapes: capsules (B, I, K), weight (I, J, D, K), anything of the experts (B, J, D), coefficients (B, I, J); what has
the images last, kept logits and levels, has rows of P numbers, B padded to a multiple of 16.
Constants of a tile: BB images, JB experts, N = JB·DP columns, with DP and KP the sizes D and K padded to powers of two.
This module imports Triton; nothing imports it before the first call that needs it.
"""

import inspect

import triton
import triton.language as tl

# Counts that may change from call to call: a kernel compiled for one value would be compiled again for the next.
_COUNTS = ("B", "I", "each", "rows", "rows_model", "splits", "blocks", "R")


def kernel(function):
    """Compile a function that the host launches."""
    counts = [name for name in inspect.signature(function).parameters if name in _COUNTS]
    return triton.jit(function, do_not_specialize=counts)


LOG2E = tl.constexpr(1.4426950408889634)

# Where a kernel takes the coefficients from.
UNIFORM = tl.constexpr(0)  # all equal
GIVEN = tl.constexpr(1)  # a tensor of coefficients
LOGITS = tl.constexpr(2)  # a tensor of logits, and the level
HISTORY = tl.constexpr(3)  # x, h and the level
ONLINE = tl.constexpr(4)  # x and h; the softmax over the inputs is taken while they pass by


# ---------------------------------------------------------------------------------------------------------
# Pieces of a tile


@triton.jit
def _capsules(x, b, i, B, I, K: tl.constexpr, KP: tl.constexpr):
    """Load x_i of a block of images: (BB, KP)."""
    k = tl.arange(0, KP)
    at = (b.to(tl.int64) * I + i)[:, None] * K + k[None, :]
    return tl.load(x + at, mask=(b < B)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _maps(
    w, i, j0, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr
):
    """Load W_ij for JB experts from j0 on, one under the other: (N, KP)."""
    n = tl.arange(0, N)
    k = tl.arange(0, KP)
    j = j0 + n // DP
    d = n % DP
    row = (i * J + j).to(tl.int64) * D + d
    mask = ((j < J) & (d < D))[:, None] & (k < K)[None, :]
    return tl.load(w + row[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _experts(z, b, j0, B, J: tl.constexpr, D: tl.constexpr, JB: tl.constexpr, DP: tl.constexpr):
    """Load z_j of JB experts from j0 on: (BB, JB, DP)."""
    j = j0 + tl.arange(0, JB)
    d = tl.arange(0, DP)
    at = ((b.to(tl.int64) * J)[:, None, None] + j[None, :, None]) * D + d[None, None, :]
    mask = (b < B)[:, None, None] & (j < J)[None, :, None] & (d < D)[None, None, :]
    return tl.load(z + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sent(h, beta, b, j0, B, J: tl.constexpr, D: tl.constexpr, JB: tl.constexpr, DP: tl.constexpr):
    """Load h_j of JB experts from j0 on, times what makes agreement with it a logit: (BB, JB, DP)."""
    return _experts(h, b, j0, B, J, D, JB, DP) * (beta * LOG2E)


@triton.jit
def _store_experts(z, value, b, j0, B, J: tl.constexpr, D: tl.constexpr, JB: tl.constexpr, DP: tl.constexpr):
    j = j0 + tl.arange(0, JB)
    d = tl.arange(0, DP)
    at = ((b.to(tl.int64) * J)[:, None, None] + j[None, :, None]) * D + d[None, None, :]
    mask = (b < B)[:, None, None] & (j < J)[None, :, None] & (d < D)[None, None, :]
    tl.store(z + at, value, mask=mask)


@triton.jit
def _pitch(B):
    """Length of a row that has a number for each image: B, so padded that rows begin at multiples of 16 numbers."""
    return (B + 15).to(tl.int64) // 16 * 16


@triton.jit
def _pairs_at(b, i, j, B, I, J: tl.constexpr, TURNED: tl.constexpr):
    """Where the numbers of pairs lie: (B, I, J), or (J, I, P) for what is kept (TURNED)."""
    if TURNED:
        at = ((j * I + i) * _pitch(B))[None, :] + b[:, None]
    else:
        at = (b.to(tl.int64) * I + i)[:, None] * J + j[None, :]
    return at


@triton.jit
def _pairs(c, b, i, j0, B, I, J: tl.constexpr, JB: tl.constexpr, TURNED: tl.constexpr):
    """Load c_ij of JB experts from j0 on: (BB, JB)."""
    j = j0 + tl.arange(0, JB)
    mask = (b < B)[:, None] & (j < J)[None, :]
    return tl.load(c + _pairs_at(b, i, j, B, I, J, TURNED), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_pairs(c, value, b, i, j0, B, I, J: tl.constexpr, JB: tl.constexpr, TURNED: tl.constexpr):
    j = j0 + tl.arange(0, JB)
    images = _pitch(B) if TURNED else B
    tl.store(c + _pairs_at(b, i, j, B, I, J, TURNED), value, mask=(b < images)[:, None] & (j < J)[None, :])


@triton.jit
def _shared(level, b, i, j0, B, J: tl.constexpr, JB: tl.constexpr, INPUTS: tl.constexpr):
    """Load a number per (j, b), or per (i, b) where the outputs share: (BB, JB)."""
    j = j0 + tl.arange(0, JB)
    row = j if INPUTS else i + 0 * j
    at = (row * _pitch(B))[None, :] + b[:, None]
    return tl.load(level + at, mask=(b < B)[:, None] & (j < J)[None, :], other=0.0)


@triton.jit
def _high(v, ROUND: tl.constexpr):
    """Cut or round float32 to the bits that the matrix units take of it."""
    bits = v.to(tl.uint32, bitcast=True)
    if ROUND:
        bits += 0x1000
    return (bits & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    """Multiply by the matrix units, which take tf32; EXACT: with what that leaves out of a and of b, but not of both.

    What is left out of both has either sign, for b is rounded; rounding a as well would take longer. The units cut sums
    instead of rounding them. A sum of many such products is therefore not for them to make.
    """
    if EXACT:
        a_high = _high(a, False)
        b_high = _high(b, True)
        product = tl.dot(a - a_high, b_high, input_precision="tf32")
        product = tl.dot(a_high, b - b_high, product, input_precision="tf32")
        product = tl.dot(a_high, b_high, product, input_precision="tf32")
    else:
        product = tl.dot(a, b, input_precision="tf32")
    return product


@triton.jit
def _votes(x, maps, JB: tl.constexpr, DP: tl.constexpr, EXACT: tl.constexpr):
    """u_ij = W_ij x_i: (BB, KP), (N, KP) → (BB, JB, DP)."""
    u = _product(x, tl.trans(maps), EXACT)
    return tl.reshape(u, [x.shape[0], JB, DP])


@triton.jit
def _inverse_norm(u):
    """1/‖u‖ over the last axis, and 1 for a zero vector, whose direction is then 0 all the same."""
    square = tl.sum(u * u, 2)
    return tl.rsqrt(tl.where(square > 0, square, 1.0))


@triton.jit
def _agreement(u, h, COSINE: tl.constexpr):
    """⟨u, h⟩, or ⟨u, h⟩/‖u‖: (BB, JB, DP), (BB, JB, DP) → (BB, JB)."""
    inner = tl.sum(u * h, 2)
    if COSINE:
        inner = inner * _inverse_norm(u)
    return inner


@triton.jit
def _polar(v):
    """Norm (R, 1) and direction (R, DP) of rows; dividing by the largest component first avoids under- and overflow."""
    scale = tl.max(tl.abs(v), 1)
    scale = tl.where(scale > 0, scale, 1.0)[:, None]
    v = v / scale
    norm = tl.sqrt(tl.sum(v * v, 1))[:, None]
    return scale * norm, v / tl.where(norm > 0, norm, 1.0)


@triton.jit
def _squashed(v, LARGEST: tl.constexpr):
    """Squash of rows (R, DP), its norm at most LARGEST."""
    norm, unit = _polar(v)
    return _squash_factor(norm, LARGEST) * unit


@triton.jit
def _squash_factor(norm, LARGEST: tl.constexpr):
    """n²/(1+n²), written as 1/(1+n⁻²) above 1 so that n² cannot overflow, and at most LARGEST."""
    small = tl.minimum(norm, 1.0)
    inverse = 1.0 / tl.maximum(norm, 1.0)
    firing = tl.where(norm > 1, 1.0 / (1.0 + inverse * inverse), small * small / (1.0 + small * small))
    return tl.minimum(firing, LARGEST)


# ---------------------------------------------------------------------------------------------------------
# Routing


@kernel
def up(
    x, v, w, h, level, c, part, part_max, part_sum, beta, B, each,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, INPUTS: tl.constexpr, COSINE: tl.constexpr, SAME: tl.constexpr, STORE: tl.constexpr,
    BOUNDED: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ij v_i over `each` inputs, the coefficients being those of x: → part (splits, B, J, D).

    ONLINE: unnormalised, with the largest logit and the sum of the softmax in part_max and part_sum (splits, B, J), or,
    BOUNDED, with the sum alone where no logit can overflow; STORE also writes the logits to c. SAME: v is x.
    """
    JB: tl.constexpr = N // DP
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    j0 = tl.program_id(1) * JB
    split = tl.program_id(2)
    j = j0 + tl.arange(0, JB)
    low = split * each
    high = tl.minimum(low + each, I)
    total = tl.zeros([BB, JB, DP], tl.float32)
    if SOURCE == ONLINE:
        sent = _sent(h, beta, b, j0, B, J, D, JB, DP)
        largest = tl.full([BB, JB], float("-inf"), tl.float32)
        weight = tl.zeros([BB, JB], tl.float32)
        for i in range(low, high):
            u = _votes(_capsules(x, b, i, B, I, K, KP), _maps(w, i, j0, J, D, K, N, DP, KP), JB, DP, EXACT)
            logit = _agreement(u, sent, COSINE)
            if STORE:
                _store_pairs(c, logit, b, i, j0, B, I, J, JB, True)
            if BOUNDED:
                share = tl.exp2(logit)
                weight += share
                total += share[:, :, None] * u
            else:
                higher = tl.maximum(largest, logit)
                old = tl.exp2(largest - higher)
                share = tl.exp2(logit - higher)
                weight = weight * old + share
                total = total * old[:, :, None] + share[:, :, None] * u
                largest = higher
        at = ((split * B + b).to(tl.int64) * J)[:, None] + j[None, :]
        mask = (b < B)[:, None] & (j < J)[None, :]
        tl.store(part_sum + at, weight, mask=mask)
        if not BOUNDED:
            tl.store(part_max + at, largest, mask=mask)
    else:
        if SOURCE == HISTORY:
            sent = _sent(h, beta, b, j0, B, J, D, JB, DP)
        for i in range(low, high):
            maps = _maps(w, i, j0, J, D, K, N, DP, KP)
            moved = _votes(_capsules(v, b, i, B, I, K, KP), maps, JB, DP, EXACT)
            if SOURCE == GIVEN:
                share = _pairs(c, b, i, j0, B, I, J, JB, False)
            elif SOURCE == LOGITS:
                share = tl.exp2(_pairs(c, b, i, j0, B, I, J, JB, True) - _shared(level, b, i, j0, B, J, JB, INPUTS))
            else:
                u = moved if SAME else _votes(_capsules(x, b, i, B, I, K, KP), maps, JB, DP, EXACT)
                share = tl.exp2(_agreement(u, sent, COSINE) - _shared(level, b, i, j0, B, J, JB, INPUTS))
            total += share[:, :, None] * moved
    _store_experts(part + split.to(tl.int64) * B * J * D, total, b, j0, B, J, D, JB, DP)


@kernel
def even(
    v, w, part, B, each,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum W_ij v_i over `each` inputs, the coefficients being equal: → part (splits, B, J, D), without their factor.

    The components of all inputs are one axis here, KP of them at a time, so that none is padding.
    """
    JB: tl.constexpr = N // DP
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    split = tl.program_id(2)
    n = tl.arange(0, N)
    j = tl.program_id(1) * JB + n // DP
    d = n % DP
    high = tl.minimum((split + 1) * each, I) * K
    total = tl.zeros([BB, N], tl.float32)
    for first in range(split * each * K, high, KP):
        component = first + tl.arange(0, KP)
        i = component // K
        k = component % K
        known = (component < high)[None, :]
        capsules = tl.load(
            v + (b.to(tl.int64)[:, None] * I + i[None, :]) * K + k[None, :], mask=(b < B)[:, None] & known, other=0.0
        ).to(tl.float32)
        maps = tl.load(
            w + ((i.to(tl.int64) * J)[None, :] + j[:, None]) * (D * K) + (d * K)[:, None] + k[None, :],
            mask=((j < J) & (d < D))[:, None] & known,
            other=0.0,
        ).to(tl.float32)
        total += _product(capsules, tl.trans(maps), EXACT)
    at = ((split * B + b).to(tl.int64) * J)[:, None] * D + (j * D + d)[None, :]
    tl.store(part + at, total, mask=(b < B)[:, None] & ((j < J) & (d < D))[None, :])


@triton.jit
def _experts_at(row, rows, J: tl.constexpr):
    """Where the number of an expert lies whose place in (B, J) is `row`: in (J, P)."""
    return row % J * _pitch(rows // J) + row // J


@kernel
def gather(
    part, part_max, part_sum, z, level, h, h_next, rows, splits, factor,
    J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    SOFTMAX: tl.constexpr, BOUNDED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, COSINE: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Join the parts of z (rows = B·J), and add what the experts send to h, except after the last iteration."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    total = tl.zeros([ROWS, DP], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(splits):
        offset = rows.to(tl.int64) * split
        piece = tl.load(part + offset * D + at, mask=mask, other=0.0)
        if SOFTMAX:
            piece_weight = tl.load(part_sum + offset + row, mask=inside, other=1.0)
            if BOUNDED:
                weight += piece_weight
                total += piece
            else:
                piece_largest = tl.load(part_max + offset + row, mask=inside, other=0.0)
                higher = tl.maximum(largest, piece_largest)
                old = tl.exp2(largest - higher)
                new = tl.exp2(piece_largest - higher)
                weight = weight * old + piece_weight * new
                total = total * old[:, None] + piece * new[:, None]
                largest = higher
        else:
            total += piece
    if SOFTMAX:
        total = total / weight[:, None]
        height = tl.log2(weight) if BOUNDED else largest + tl.log2(weight)
        tl.store(level + _experts_at(row, rows, J), height, mask=inside)
    else:
        total = total * factor
    tl.store(z + at, total, mask=mask)
    if not LAST:
        sent = _polar(total)[1] if COSINE else _squashed(total, LARGEST)
        if not FIRST:
            sent += tl.load(h + at, mask=mask, other=0.0)
        tl.store(h_next + at, sent, mask=mask)


@kernel
def agree(
    x, w, h, c, beta, B, each,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, COSINE: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Write the logits of `each` inputs: → c (J, I, P)."""
    JB: tl.constexpr = N // DP
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    j0 = tl.program_id(1) * JB
    low = tl.program_id(2) * each
    sent = _sent(h, beta, b, j0, B, J, D, JB, DP)
    for i in range(low, tl.minimum(low + each, I)):
        u = _votes(_capsules(x, b, i, B, I, K, KP), _maps(w, i, j0, J, D, K, N, DP, KP), JB, DP, EXACT)
        _store_pairs(c, _agreement(u, sent, COSINE), b, i, j0, B, I, J, JB, True)


@kernel
def levels(
    x, w, h, level, beta, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, COSINE: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Take log Σ_j exp b_ij for every image and input, for the softmax over the outputs: → level (I, P)."""
    JB: tl.constexpr = N // DP
    i = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    capsules = _capsules(x, b, i, B, I, K, KP)
    largest = tl.full([BB], float("-inf"), tl.float32)
    weight = tl.zeros([BB], tl.float32)
    for j0 in range(0, J, JB):
        u = _votes(capsules, _maps(w, i, j0, J, D, K, N, DP, KP), JB, DP, EXACT)
        logit = _agreement(u, _sent(h, beta, b, j0, B, J, D, JB, DP), COSINE)
        logit = tl.where((j0 + tl.arange(0, JB) < J)[None, :], logit, float("-inf"))
        higher = tl.maximum(largest, tl.max(logit, 1))
        weight = weight * tl.exp2(largest - higher) + tl.sum(tl.exp2(logit - higher[:, None]), 1)
        largest = higher
    tl.store(level + i * _pitch(B) + b, largest + tl.log2(weight), mask=b < _pitch(B))


@triton.jit
def _share(
    x, maps, h, level, c, beta, b, i, j0, B, factor,
    I, J: tl.constexpr, D: tl.constexpr, SOURCE: tl.constexpr, INPUTS: tl.constexpr,
    COSINE: tl.constexpr, EXACT: tl.constexpr, JB: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """c_ij of a tile, wherever it comes from; x is the block (BB, KP), `factor` the uniform coefficient: (BB, JB)."""
    if SOURCE == UNIFORM:
        share = tl.zeros([b.shape[0], JB], tl.float32) + factor
    elif SOURCE == GIVEN:
        share = _pairs(c, b, i, j0, B, I, J, JB, False)
    elif SOURCE == LOGITS:
        share = tl.exp2(_pairs(c, b, i, j0, B, I, J, JB, True) - _shared(level, b, i, j0, B, J, JB, INPUTS))
    else:
        u = _votes(x, maps, JB, DP, EXACT)
        logit = _agreement(u, _sent(h, beta, b, j0, B, J, D, JB, DP), COSINE)
        share = tl.exp2(logit - _shared(level, b, i, j0, B, J, JB, INPUTS))
    return share


@kernel
def coefficients(
    x, w, h, level, c, out, beta, factor, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SOURCE: tl.constexpr, INPUTS: tl.constexpr,
    COSINE: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Write the coefficients after all: → out (B, I, J)."""
    JB: tl.constexpr = N // DP
    i = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    capsules = _capsules(x, b, i, B, I, K, KP)
    for j0 in range(0, J, JB):
        maps = _maps(w, i, j0, J, D, K, N, DP, KP)
        share = _share(
            capsules, maps, h, level, c, beta, b, i, j0, B, factor, I, J, D, SOURCE, INPUTS, COSINE, EXACT, JB, DP
        )
        _store_pairs(out, share, b, i, j0, B, I, J, JB, False)


@kernel
def down(
    x, y, w, h, level, c, out, beta, factor, B, each,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SOURCE: tl.constexpr, INPUTS: tl.constexpr,
    COSINE: tl.constexpr, WHOLE: tl.constexpr, LARGEST: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ijᵀ y_j over `each` experts, squashed where that is all (WHOLE): → out (splits, B, I, K)."""
    JB: tl.constexpr = N // DP
    i = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    split = tl.program_id(2)
    low = split * each
    high = tl.minimum(low + each, J)
    capsules = _capsules(x, b, i, B, I, K, KP)
    total = tl.zeros([BB, KP], tl.float32)
    for j0 in range(low, high, JB):
        maps = _maps(w, i, j0, J, D, K, N, DP, KP)
        share = _share(
            capsules, maps, h, level, c, beta, b, i, j0, B, factor, I, J, D, SOURCE, INPUTS, COSINE, EXACT, JB, DP
        )
        sent = tl.reshape(share[:, :, None] * _experts(y, b, j0, B, J, D, JB, DP), [BB, N])
        total += _product(sent, maps, EXACT)
    if WHOLE:
        total = _squashed(total, LARGEST)
    k = tl.arange(0, KP)
    at = ((split * B + b).to(tl.int64) * I + i)[:, None] * K + k[None, :]
    tl.store(out + at, total, mask=(b < B)[:, None] & (k < K)[None, :])


@kernel
def speak(
    part, on, out, rows, splits,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_ON: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Join parts (splits, rows, D) and squash them, to 0 where `on` (rows) is False: → out (rows, D)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    total = tl.zeros([ROWS, DP], tl.float32)
    for split in range(splits):
        total += tl.load(part + rows.to(tl.int64) * split * D + at, mask=mask, other=0.0).to(tl.float32)
    total = _squashed(total, LARGEST)
    if HAS_ON:
        total = tl.where((tl.load(on + row, mask=inside, other=0) != 0)[:, None], total, 0.0)
    tl.store(out + at, total, mask=mask)


# ---------------------------------------------------------------------------------------------------------
# Learning


@kernel
def free_energy_gap(
    z, z_model, on, on_model, pull, pull_model, part, rows, rows_model, scale, scale_model,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_ON: tl.constexpr, HAS_ON_MODEL: tl.constexpr,
):  # fmt: skip
    """Sum −scale·log(1+‖z_j‖²) of data and model by blocks of rows, and write its derivative.

    z, pull (rows, D), on (rows), the same of the model → part (2, blocks).
    """
    if tl.program_id(1) == 0:
        term = _free_energy(z, on, pull, rows, scale, D, DP, ROWS, HAS_ON)
    else:
        term = _free_energy(z_model, on_model, pull_model, rows_model, scale_model, D, DP, ROWS, HAS_ON_MODEL)
    tl.store(part + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), term)


@triton.jit
def _free_energy(z, on, pull, rows, scale, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, HAS_ON: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    value = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
    square = tl.sum(value * value, 1)
    # log1p: what rounding loses of 1 + s is put back in first order.
    one = 1.0 + square
    term = tl.log(one) + (square - (one - 1.0)) / one
    gradient = -2.0 * scale * value / one[:, None]
    if HAS_ON:
        active = tl.load(on + row, mask=inside, other=0) != 0
        term = tl.where(active, term, 0.0)
        gradient = tl.where(active[:, None], gradient, 0.0)
    tl.store(pull + at, gradient, mask=mask)
    return -scale * tl.sum(tl.where(inside, term, 0.0), 0)


@kernel
def weight_gradient(
    x, v, p, q, w, h, level, c, scale, out, beta, factor, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SOURCE: tl.constexpr, INPUTS: tl.constexpr,
    COSINE: tl.constexpr, PAIR: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr,
    BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum c_ij (q_j v_iᵀ + p_j x_iᵀ) over the batch, coefficients of x, the last term if PAIR: → out (I, J, D, K)."""
    JB: tl.constexpr = N // DP
    # Experts side by side, so that they share the capsules in the cache.
    blocks: tl.constexpr = (J + JB - 1) // JB
    i = tl.program_id(0) // blocks
    j0 = tl.program_id(0) % blocks * JB
    maps = _maps(w, i, j0, J, D, K, N, DP, KP)
    total = tl.zeros([N, KP], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        capsules = _capsules(x, b, i, B, I, K, KP)
        share = _share(
            capsules, maps, h, level, c, beta, b, i, j0, B, factor, I, J, D, SOURCE, INPUTS, COSINE, EXACT, JB, DP
        )
        sent = tl.reshape(share[:, :, None] * _experts(q, b, j0, B, J, D, JB, DP), [BB, N])
        other = _capsules(v, b, i, B, I, K, KP)
        total += _product(tl.trans(sent), other, EXACT)
        if PAIR:
            sent = tl.reshape(share[:, :, None] * _experts(p, b, j0, B, J, D, JB, DP), [BB, N])
            total += _product(tl.trans(sent), capsules, EXACT)
    if SCALED:
        total = total * tl.load(scale)
    n = tl.arange(0, N)
    k = tl.arange(0, KP)
    j = j0 + n // DP
    d = n % DP
    at = ((i * J + j).to(tl.int64) * D + d)[:, None] * K + k[None, :]
    mask = ((j < J) & (d < D))[:, None] & (k < K)[None, :]
    if ADD:
        total += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, total, mask=mask)


# ---------------------------------------------------------------------------------------------------------
# The gradient through the iterations of routing
#
# With r the iteration, g its ∂L/∂z and a = Σ c⟨g, u⟩ over the axis of the softmax (for the inputs that is ⟨g_j, z_j⟩):
#   ∂L/∂b_ij = c_ij (⟨g_j, u_ij⟩ − a),   ∂L/∂h_j = β Σ_i ∂L/∂b_ij û_ij,   û = u/‖u‖ for the cosine, else u,
#   ∂L/∂u_ij = Σ_r c_ij g_j + β ∂L/∂b_ij ∂⟨û_ij, h_j⟩/∂u_ij.


@kernel
def averages(
    x, w, h, level, g, out, beta, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, COSINE: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Take a = Σ_j c_ij ⟨g_j, u_ij⟩ for the softmax over the outputs: → out (I, P)."""
    JB: tl.constexpr = N // DP
    i = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    capsules = _capsules(x, b, i, B, I, K, KP)
    total = tl.zeros([BB], tl.float32)
    for j0 in range(0, J, JB):
        u = _votes(capsules, _maps(w, i, j0, J, D, K, N, DP, KP), JB, DP, EXACT)
        logit = _agreement(u, _sent(h, beta, b, j0, B, J, D, JB, DP), COSINE)
        share = tl.exp2(logit - _shared(level, b, i, j0, B, J, JB, False))
        total += tl.sum(share * tl.sum(u * _experts(g, b, j0, B, J, D, JB, DP), 2), 1)
    tl.store(out + i * _pitch(B) + b, total, mask=b < _pitch(B))


@kernel
def up_gradient(
    x, w, h, level, g, a, part, beta, B, each,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, COSINE: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum ∂L/∂h_j = β ∂L/∂b_ij û_ij over `each` inputs: → part (splits, B, J, D)."""
    JB: tl.constexpr = N // DP
    b = tl.program_id(0) * BB + tl.arange(0, BB)
    j0 = tl.program_id(1) * JB
    split = tl.program_id(2)
    low = split * each
    high = tl.minimum(low + each, I)
    sent = _sent(h, beta, b, j0, B, J, D, JB, DP)
    pull = _experts(g, b, j0, B, J, D, JB, DP)
    total = tl.zeros([BB, JB, DP], tl.float32)
    for i in range(low, high):
        u = _votes(_capsules(x, b, i, B, I, K, KP), _maps(w, i, j0, J, D, K, N, DP, KP), JB, DP, EXACT)
        share = tl.exp2(_agreement(u, sent, COSINE) - _shared(level, b, i, j0, B, J, JB, INPUTS))
        slope = share * (tl.sum(u * pull, 2) - _shared(a, b, i, j0, B, J, JB, INPUTS)) * beta
        if COSINE:
            slope = slope * _inverse_norm(u)
        total += slope[:, :, None] * u
    _store_experts(part + split.to(tl.int64) * B * J * D, total, b, j0, B, J, D, JB, DP)


@kernel
def speak_gradient(
    part, z, history, g, a, rows, splits,
    J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """Add the parts of ∂L/∂h to the running sum `history`, and go back through speak: → g, a = ⟨g, z⟩."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    total = tl.zeros([ROWS, DP], tl.float32)
    if ADD:
        total = tl.load(history + at, mask=mask, other=0.0)
    for split in range(splits):
        total += tl.load(part + rows.to(tl.int64) * split * D + at, mask=mask, other=0.0)
    tl.store(history + at, total, mask=mask)
    value = tl.load(z + at, mask=mask, other=0.0)
    norm, unit = _polar(value)
    along = tl.sum(total * unit, 1)[:, None] * unit
    if COSINE:
        gradient = (total - along) / tl.where(norm > 0, norm, 1.0)
    else:
        # squash(z) = p(n) e with p = n²/(1+n²): p/n across, dp/dn along; in 1/n above 1, so that n² cannot overflow.
        small = tl.minimum(norm, 1.0)
        inverse = 1.0 / tl.maximum(norm, 1.0)
        low = 1.0 / (1.0 + small * small)
        high = 1.0 / (1.0 + inverse * inverse)
        across = tl.where(norm > 1, inverse * high, small * low)
        slope = tl.where(norm > 1, 2.0 * inverse * inverse * inverse * high * high, 2.0 * small * low * low)
        gradient = across * (total - along) + slope * along
    tl.store(g + at, gradient, mask=mask)
    tl.store(a + _experts_at(row, rows, J), tl.sum(gradient * value, 1), mask=inside)


@triton.jit
def _vote_gradient(
    u, h, level, g, a, beta, factor, b, i, j0, B, R,
    I, J: tl.constexpr, D: tl.constexpr, INPUTS: tl.constexpr, COSINE: tl.constexpr,
    JB: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """∂L/∂u_ij of a tile, over all R iterations; h, g (R, B, J, D); level, a (R, J, P) or (R, I, P): (BB, JB, DP)."""
    total = factor * _experts(g, b, j0, B, J, D, JB, DP)
    inverse = _inverse_norm(u)
    for r in range(1, R):
        deep = r * B.to(tl.int64)
        sent = _experts(h + deep * J * D, b, j0, B, J, D, JB, DP)
        pull = _experts(g + deep * J * D, b, j0, B, J, D, JB, DP)
        shared = r * (J if INPUTS else I) * _pitch(B)
        agree = tl.sum(u * sent, 2)
        if COSINE:
            agree = agree * inverse
        share = tl.exp2(agree * (beta * LOG2E) - _shared(level + shared, b, i, j0, B, J, JB, INPUTS))
        average = _shared(a + shared, b, i, j0, B, J, JB, INPUTS)
        slope = share * (tl.sum(u * pull, 2) - average) * beta
        if COSINE:
            slope = slope * inverse
            sent -= (agree * inverse)[:, :, None] * u
        total += share[:, :, None] * pull + slope[:, :, None] * sent
    return total


@kernel
def route_weight_gradient(
    x, w, h, level, g, a, out, beta, factor, B, R,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, COSINE: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum ∂L/∂u_ij x_iᵀ over the batch: → out (I, J, D, K)."""
    JB: tl.constexpr = N // DP
    # Experts side by side, so that they share the capsules in the cache.
    blocks: tl.constexpr = (J + JB - 1) // JB
    i = tl.program_id(0) // blocks
    j0 = tl.program_id(0) % blocks * JB
    maps = _maps(w, i, j0, J, D, K, N, DP, KP)
    total = tl.zeros([N, KP], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        capsules = _capsules(x, b, i, B, I, K, KP)
        u = _votes(capsules, maps, JB, DP, EXACT)
        slope = _vote_gradient(u, h, level, g, a, beta, factor, b, i, j0, B, R, I, J, D, INPUTS, COSINE, JB, DP)
        total += _product(tl.trans(tl.reshape(slope, [BB, N])), capsules, EXACT)
    n = tl.arange(0, N)
    k = tl.arange(0, KP)
    j = j0 + n // DP
    d = n % DP
    at = ((i * J + j).to(tl.int64) * D + d)[:, None] * K + k[None, :]
    tl.store(out + at, total, mask=((j < J) & (d < D))[:, None] & (k < K)[None, :])


@kernel
def route_input_gradient(
    x, w, h, level, g, a, out, beta, factor, B, R,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, COSINE: tl.constexpr,
    EXACT: tl.constexpr, BB: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Sum W_ijᵀ ∂L/∂u_ij over the experts: → out (B, I, K)."""
    JB: tl.constexpr = N // DP
    i = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    capsules = _capsules(x, b, i, B, I, K, KP)
    total = tl.zeros([BB, KP], tl.float32)
    for j0 in range(0, J, JB):
        maps = _maps(w, i, j0, J, D, K, N, DP, KP)
        u = _votes(capsules, maps, JB, DP, EXACT)
        slope = _vote_gradient(u, h, level, g, a, beta, factor, b, i, j0, B, R, I, J, D, INPUTS, COSINE, JB, DP)
        total += _product(tl.reshape(slope, [BB, N]), maps, EXACT)
    k = tl.arange(0, KP)
    at = (b.to(tl.int64) * I + i)[:, None] * K + k[None, :]
    tl.store(out + at, total, mask=(b < B)[:, None] & (k < K)[None, :])
