# mypy: ignore-errors
# The functions below are a language of their own, compiled by Triton: their arguments are pointers and blocks.
"""Triton kernels for filters that slide over an image: convolutions as products whose patches are never written.

Images (B, C, H+S−1, W+S−1) are seen by F filters of S×S with stride 1, which gives the fine grid (B, H, W, F), and that
by F filters of S×S with stride 2, which gives the coarse grid (B, P, Q, F). Grids have their channels last in memory,
and so have the filters: (F, S, S, C) and (F, S, S, F). Grids are bfloat16, sums are float32.

    up:     out[b, p, q, o] = Σ x[b, 2p+r, 2q+s, c] w[o, r, s, c]        over r, s, c
    down:   out[b, y, x, c] = Σ f[b, p, q, o] w[o, y−2p, x−2q, c]        over p, q, o
    slope:  out[o, r, s, c] = Σ f[b, p, q, o] x[b, 2p+r, 2q+s, c]        over b, p, q

`down` is the transposed of `up`, so that each is the gradient of the other in what it sees, and `slope` is the gradient
of both in the filters. The kernels `few_…` are the same for the first filters, with stride 1 and few channels.
This module imports Triton; nothing imports it before the first call that needs it.
"""

import os

import triton
import triton.language as tl

from poecaps.kernels.tiles import kernel

# Triton's interpreter does not know the products of bfloat16.
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _product(a, b, total):
    """Add a product of bfloat16 blocks to a total."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def _shaped(
    value, at, mask, n, bias, seen,
    BIAS: tl.constexpr, LEAK: tl.constexpr, GATE: tl.constexpr, SLOPE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Add the bias (BIAS), leak (LEAK), or multiply by the derivative of the leak that gave `seen` (GATE)."""
    if BIAS:
        value += tl.load(bias + n, mask=n < F, other=0.0).to(tl.float32)[None, :]
    if LEAK:
        value = tl.where(value > 0, value, SLOPE * value)
    if GATE:
        value = tl.where(tl.load(seen + at, mask=mask, other=0.0).to(tl.float32) > 0, value, SLOPE * value)
    return value


@triton.jit
def _thinned(value, m, n, mask, drawn, F: tl.constexpr, AREA: tl.constexpr, SHARE: tl.constexpr):
    """Drop a share of features and enlarge the others; numbers are drawn as (B, F, P, Q)."""
    at = (m // AREA * (F * AREA) + m % AREA)[:, None] + (n * AREA)[None, :]
    kept = tl.load(drawn + at, mask=mask, other=0.0) >= SHARE
    return tl.where(kept, value * (1 / (1 - SHARE)), 0.0)


# ---------------------------------------------------------------------------------------------------------
# Many channels, stride 2


@kernel
def window_up(
    x, w, part, B, each,
    H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, S: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum `each` steps of BK channels of a tap: → part (splits, B·P·Q, F)."""
    STEPS: tl.constexpr = F // BK
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    k = tl.arange(0, BK)
    rows = B * (P * Q)
    inside = tl.minimum(m, rows - 1)
    corner = ((inside // (P * Q) * H + inside // Q % P * 2) * W + inside % Q * 2) * F
    xs = x + corner[:, None] + k[None, :]
    ws = w + (tl.minimum(n, F - 1) * (S * S * F))[:, None] + k[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for s in range(split * each, tl.minimum(split * each + each, S * S * STEPS)):
        tap = s // STEPS
        pixels = tl.load(xs + ((tap // S * W + tap % S) * F + s % STEPS * BK))
        filters = tl.load(ws + s * BK)
        total = _product(pixels, tl.trans(filters), total)
    at = (split * rows + m).to(tl.int64)[:, None] * F + n[None, :]
    tl.store(part + at, total, mask=(m < rows)[:, None] & (n < F)[None, :])


@kernel
def window_join(
    part, bias, seen, drawn, out, sums, rows, splits,
    F: tl.constexpr, AREA: tl.constexpr, BIAS: tl.constexpr, LEAK: tl.constexpr, GATE: tl.constexpr,
    DROP: tl.constexpr, SUMS: tl.constexpr, SLOPE: tl.constexpr, SHARE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Join parts (splits, rows, F), shape and drop them: → out (rows, F), its column sums (programs, F) with SUMS."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (m < rows)[:, None] & (n < F)[None, :]
    at = m[:, None] * F + n[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for split in range(splits):
        total += tl.load(part + rows.to(tl.int64) * (split * F) + at, mask=mask, other=0.0).to(tl.float32)
    total = _shaped(total, at, mask, n, bias, seen, BIAS, LEAK, GATE, SLOPE, F)
    if DROP:
        total = _thinned(total, m, n, mask, drawn, F, AREA, SHARE)
    tl.store(out + at, total, mask=mask)
    if SUMS:
        tl.store(sums + tl.program_id(0) * F + n, tl.sum(tl.where(mask, total, 0.0), 0), mask=n < F)


@kernel
def window_down(
    f, w, jobs, bias, seen, out, part, B, blocks,
    H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, S: tl.constexpr, F: tl.constexpr,
    BIAS: tl.constexpr, LEAK: tl.constexpr, GATE: tl.constexpr, SLOPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Do one job (place, first tap, taps, pair) for BM images: → out (B, H, W, F).

    A place is a position of the fine grid, and its taps are the features that reach it, so nothing is multiplied in
    vain. Where two jobs share a place, each leaves its part for `window_pairs`: → part (pairs, 2, B, F).
    """
    STEPS: tl.constexpr = F // BK
    job = jobs + tl.program_id(0) // blocks * 4
    block = tl.program_id(0) % blocks
    place = tl.load(job)
    first = tl.load(job + 1)
    taps = tl.load(job + 2)
    pair = tl.load(job + 3)
    y = place // W
    x = place % W
    low = tl.maximum(x - S + 2, 0) // 2  # the first and last column of features that reach it
    across = tl.minimum(x // 2, Q - 1) - low + 1
    top = tl.maximum(y - S + 2, 0) // 2
    b = block * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    fs = f + (tl.minimum(b, B - 1) * (P * Q * F))[:, None] + k[None, :]
    ws = w + (k * (S * S * F))[:, None] + tl.max_contiguous(tl.multiple_of(c % F, 8), 8)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for s in range(first * STEPS, (first + taps) * STEPS):
        tap = s // STEPS
        p = top + tap // across
        q = low + tap % across
        features = tl.load(fs + ((p * Q + q) * F + s % STEPS * BK))
        filters = tl.load(ws + ((y - 2 * p) * S + x - 2 * q) * F + s % STEPS * BK * (S * S * F))
        total = _product(features, filters, total)
    at = ((b * H + y) * W + x)[:, None] * F + c[None, :]
    mask = (b < B)[:, None] & (c < F)[None, :]
    if pair >= 0:
        half = (pair * 2 + tl.where(first > 0, 1, 0)) * B + b
        tl.store(part + half[:, None] * F + c[None, :], total, mask=mask)
    else:
        tl.store(out + at, _shaped(total, at, mask, c, bias, seen, BIAS, LEAK, GATE, SLOPE, F), mask=mask)


@kernel
def window_pairs(
    part, places, bias, seen, out, B,
    H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
    BIAS: tl.constexpr, LEAK: tl.constexpr, GATE: tl.constexpr, SLOPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Join the two parts (2, B, F) of each pair of jobs of `window_down`, at its place: → out (B, H, W, F)."""
    pair = tl.program_id(0)
    b = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    place = tl.load(places + pair)
    here = (pair * 2 * B + b)[:, None] * F + n[None, :]
    at = (b * (H * W) + place)[:, None] * F + n[None, :]
    mask = (b < B)[:, None] & (n < F)[None, :]
    total = tl.load(part + here, mask=mask, other=0.0) + tl.load(part + here + B * F, mask=mask, other=0.0)
    tl.store(out + at, _shaped(total, at, mask, n, bias, seen, BIAS, LEAK, GATE, SLOPE, F), mask=mask)


@kernel
def window_slope(
    f, x, g, y, part, B, each, splits,
    H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, S: tl.constexpr, F: tl.constexpr,
    SOURCES: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum over `each` steps, BK images at one place, for a tap: → part (SOURCES·splits, F, S, S, F).

    Features are f and what they saw x; of two SOURCES the other are g and y. B is a multiple of BK (EVEN) or not.
    """
    CHANNELS: tl.constexpr = (F + BN - 1) // BN
    split = tl.program_id(2)
    if SOURCES == 2:
        low = split % splits * each
        if split >= splits:
            f = g
            x = y
    else:
        low = split * each
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    tap = tl.program_id(0) // CHANNELS
    c = tl.program_id(0) % CHANNELS * BN + tl.arange(0, BN)
    row = tl.arange(0, BK)
    fs = f + (row * (P * Q * F))[:, None] + tl.max_contiguous(tl.multiple_of(o % F, 8), 8)[None, :]
    column = tl.max_contiguous(tl.multiple_of(c % F, 8), 8)
    xs = x + (tap // S * W + tap % S) * F + (row * (H * W * F))[:, None] + column[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    steps = (B + BK - 1) // BK * (P * Q)
    for s in range(low, tl.minimum(low + each, steps)):
        block = s // (P * Q) * BK
        p = s // Q % P
        q = s % Q
        if EVEN:
            features = tl.load(fs + (block * (P * Q) + p * Q + q) * F)
            pixels = tl.load(xs + ((block * H + 2 * p) * W + 2 * q) * F)
        else:
            inside = (block + row < B)[:, None]
            features = tl.load(fs + (block * (P * Q) + p * Q + q) * F, mask=inside & (o >= 0)[None, :], other=0.0)
            pixels = tl.load(xs + ((block * H + 2 * p) * W + 2 * q) * F, mask=inside & (c >= 0)[None, :], other=0.0)
        total = _product(tl.trans(features), pixels, total)
    at = (split * F + o).to(tl.int64)[:, None] * (S * S * F) + (tap * F + c)[None, :]
    tl.store(part + at, total, mask=(o < F)[:, None] & (c < F)[None, :])


@kernel
def window_sum(part, out, rows, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Sum parts (splits, rows), BM of them at once: → out (rows,)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for low in range(0, splits, BM):
        split = low + tl.arange(0, BM)
        at = split.to(tl.int64)[:, None] * rows + n[None, :]
        total += tl.load(part + at, mask=(split < splits)[:, None] & (n < rows)[None, :], other=0.0)
    tl.store(out + n, tl.sum(total, 0), mask=n < rows)


# ---------------------------------------------------------------------------------------------------------
# Few channels, stride 1


@triton.jit
def _patches(
    images, m, k, rows,
    H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, C: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Load what filters see at places m, numbers k of S·S·C, then a one (ONES): (BM, BK), bfloat16."""
    WIDE: tl.constexpr = W + S - 1
    PIXELS: tl.constexpr = (H + S - 1) * WIDE
    corner = m // (H * W) * (C * PIXELS) + m // W % H * WIDE + m % W
    within = k % C * PIXELS + k // (S * C) * WIDE + k // C % S
    mask = (m < rows)[:, None] & (k < S * S * C)[None, :]
    patch = tl.load(images + corner[:, None] + within[None, :], mask=mask, other=0.0)
    if ONES:
        patch = tl.where((m < rows)[:, None] & (k == S * S * C)[None, :], 1.0, patch)
    return patch.to(tl.bfloat16)


@kernel
def window_few_up(
    images, w, bias, seen, out, sums, B,
    H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    BIAS: tl.constexpr, LEAK: tl.constexpr, GATE: tl.constexpr, SUMS: tl.constexpr, SLOPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Convolve images (B, C, H+S−1, W+S−1) with w (F, S, S, C): → out (B, H, W, F), column sums (programs, F)."""
    K: tl.constexpr = S * S * C
    rows = B * (H * W)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for low in tl.static_range(0, K, BK):
        k = low + tl.arange(0, BK)
        filters = tl.load(w + (n * K)[:, None] + k[None, :], mask=(n < F)[:, None] & (k < K)[None, :], other=0.0)
        total = _product(_patches(images, m, k, rows, H, W, S, C, False), tl.trans(filters.to(tl.bfloat16)), total)
    mask = (m < rows)[:, None] & (n < F)[None, :]
    at = m[:, None] * F + n[None, :]
    total = _shaped(total, at, mask, n, bias, seen, BIAS, LEAK, GATE, SLOPE, F)
    tl.store(out + at, total, mask=mask)
    if SUMS:
        tl.store(sums + tl.program_id(0) * F + n, tl.sum(tl.where(mask, total, 0.0), 0), mask=n < F)


@kernel
def window_few_slope(
    images, g, part, B, each,
    H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, C: tl.constexpr, F: tl.constexpr, ONES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum g (B, H, W, F) times what filters saw, and a one or zero, over `each` steps: → part (splits, F, S·S·C+1)."""
    K: tl.constexpr = S * S * C
    rows = B * (H * W)
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    total = tl.zeros([BM, BN], tl.float32)
    for s in range(split * each, tl.minimum(split * each + each, (rows + BK - 1) // BK)):
        m = s * BK + tl.arange(0, BK)
        slopes = tl.load(g + m[:, None] * F + o[None, :], mask=(m < rows)[:, None] & (o < F)[None, :], other=0.0)
        total = _product(tl.trans(slopes), _patches(images, m, k, rows, H, W, S, C, ONES), total)
    at = (split * F + o)[:, None] * (K + 1) + k[None, :]
    tl.store(part + at, total, mask=(o < F)[:, None] & (k <= K)[None, :])


@kernel
def window_few_join(
    part, out, bias, splits, F: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Sum parts (splits, F, K+1): → out (F, K), and the last column → bias (F,)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for low in range(0, splits, BM):
        split = low + tl.arange(0, BM)
        mask = (split < splits)[:, None] & (n < F * (K + 1))[None, :]
        total += tl.load(part + split[:, None] * (F * (K + 1)) + n[None, :], mask=mask, other=0.0)
    value = tl.sum(total, 0)
    f = n // (K + 1)
    k = n % (K + 1)
    tl.store(out + f * K + k, value, mask=(f < F) & (k < K))
    if BIAS:
        tl.store(bias + f, value, mask=(f < F) & (k == K))


@kernel
def window_few_columns(
    x, w, out, B,
    H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weigh the filters w (F, S, S, C) by x (B, H, W, F): → out (B, S·S·C, H·W)."""
    K: tl.constexpr = S * S * C
    rows = B * (H * W)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN, BM], tl.float32)
    for low in tl.static_range(0, F, BK):
        o = low + tl.arange(0, BK)
        filters = tl.load(w + (o * K)[:, None] + k[None, :], mask=(o < F)[:, None] & (k < K)[None, :], other=0.0)
        seen = tl.load(x + m[:, None] * F + o[None, :], mask=(m < rows)[:, None] & (o < F)[None, :], other=0.0)
        total = _product(tl.trans(filters.to(tl.bfloat16)), tl.trans(seen), total)
    at = (m // (H * W) * (K * H * W) + m % (H * W))[None, :] + (k * (H * W))[:, None]
    tl.store(out + at, total, mask=(k < K)[:, None] & (m < rows)[None, :])


@kernel
def window_few_fold(
    columns, bias, out,
    H: tl.constexpr, W: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add filters weighed (B, S·S·C, H·W) where they lie, and the bias: → out (B, C, H+S−1, W+S−1)."""
    WIDE: tl.constexpr = W + S - 1
    PIXELS: tl.constexpr = (H + S - 1) * WIDE
    b = tl.program_id(0) // C
    c = tl.program_id(0) % C
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    y = n // WIDE
    x = n % WIDE
    here = columns + (b * (S * S * C) + c) * (H * W) + y * W + x
    total = tl.zeros([BN], tl.float32)
    for r in range(S):
        for s in tl.static_range(S):
            inside = (y >= r) & (y < r + H) & (x >= s) & (x < s + W)
            total += tl.load(here + (r * S + s) * (C * H * W) - r * W - s, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + c).to(tl.float32)
    tl.store(out + tl.program_id(0) * PIXELS + n, total, mask=n < PIXELS)
