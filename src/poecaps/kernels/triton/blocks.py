# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that the routing kernels share: loads, stores, products, squash.

Letters are those of `poecaps.functional`: capsules x (B, I, K), weight w (I, J, D, K), vectors of
the experts (B, J, D), coefficients (B, I, J). Numbers without a vector axis have the images last,
so that neighbouring threads read neighbouring images: logits (J, I, P), and statistics of the
softmax (J, P) if it runs over the inputs or (I, P) if it runs over the outputs, where P is B padded
to a multiple of 16.

Sizes of a block: BLOCK_B images; BLOCK_D and BLOCK_K are D and K padded to powers of two.
A block of experts has one input and BLOCK_N = BLOCK_J·BLOCK_D columns, the experts from j0 on.
A block of inputs has one expert and BLOCK_N = BLOCK_I·BLOCK_K columns, the inputs from i0 on.
Numbers outside of the tensors are loaded as 0. All loads return float32.
"""

import triton
import triton.language as tl

# Logits and log-sum-exps are multiplied by log₂ e, because the hardware computes powers of 2.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def padded_batch(B):
    """P, the length of a row with a number for each image: B padded to a multiple of 16."""
    return (B + 15).to(tl.int64) // 16 * 16


# --------------------------------------------------------------------------------------------------
# Blocks of experts: one input capsule, experts from j0 on


@triton.jit
def load_capsules(x_ptr, offs_b, i, B, I, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load x_i of a block of images: (BLOCK_B, BLOCK_K)."""
    offs_k = tl.arange(0, BLOCK_K)
    offsets = (offs_b.to(tl.int64) * I + i)[:, None] * K + offs_k[None, :]
    mask = (offs_b < B)[:, None] & (offs_k < K)[None, :]
    return tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_maps(
    w_ptr, i, j0, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load W_ij of BLOCK_J experts, stacked: (BLOCK_N, BLOCK_K)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_j = j0 + offs_n // BLOCK_D
    offs_d = offs_n % BLOCK_D
    row = (i * J + offs_j).to(tl.int64) * D + offs_d
    mask = ((offs_j < J) & (offs_d < D))[:, None] & (offs_k < K)[None, :]
    pointers = w_ptr + row[:, None] * K + offs_k[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_experts(
    z_ptr, offs_b, j0, B, J: tl.constexpr, D: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load z_j of BLOCK_J experts: (BLOCK_B, BLOCK_J, BLOCK_D)."""
    offs_j = j0 + tl.arange(0, BLOCK_J)
    offs_d = tl.arange(0, BLOCK_D)
    row = (offs_b.to(tl.int64) * J)[:, None, None] + offs_j[None, :, None]
    offsets = row * D + offs_d[None, None, :]
    mask = (offs_b < B)[:, None, None] & (offs_j < J)[None, :, None] & (offs_d < D)[None, None, :]
    return tl.load(z_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_experts(
    z_ptr, value, offs_b, j0, B, J: tl.constexpr, D: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store z_j of BLOCK_J experts (BLOCK_B, BLOCK_J, BLOCK_D)."""
    offs_j = j0 + tl.arange(0, BLOCK_J)
    offs_d = tl.arange(0, BLOCK_D)
    row = (offs_b.to(tl.int64) * J)[:, None, None] + offs_j[None, :, None]
    offsets = row * D + offs_d[None, None, :]
    mask = (offs_b < B)[:, None, None] & (offs_j < J)[None, :, None] & (offs_d < D)[None, None, :]
    tl.store(z_ptr + offsets, value, mask=mask)


@triton.jit
def load_scaled_h(
    h_ptr, beta, offs_b, j0, B, J: tl.constexpr, D: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load β log₂ e · h_j, whose agreement with u_ij is b_ij: (BLOCK_B, BLOCK_J, BLOCK_D)."""
    return load_experts(h_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D) * (beta * LOG2E)


@triton.jit
def load_logits(logits_ptr, offs_b, i, j0, B, I, J: tl.constexpr, BLOCK_J: tl.constexpr):
    """Load b_ij of BLOCK_J experts from (J, I, P): (BLOCK_B, BLOCK_J)."""
    offs_j = j0 + tl.arange(0, BLOCK_J)
    offsets = ((offs_j * I + i) * padded_batch(B))[None, :] + offs_b[:, None]
    mask = (offs_b < B)[:, None] & (offs_j < J)[None, :]
    return tl.load(logits_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_logits(logits_ptr, value, offs_b, i, j0, B, I, J: tl.constexpr, BLOCK_J: tl.constexpr):
    """Store b_ij of BLOCK_J experts (BLOCK_B, BLOCK_J) to (J, I, P), the padding included."""
    offs_j = j0 + tl.arange(0, BLOCK_J)
    P = padded_batch(B)
    offsets = ((offs_j * I + i) * P)[None, :] + offs_b[:, None]
    tl.store(logits_ptr + offsets, value, mask=(offs_b < P)[:, None] & (offs_j < J)[None, :])


@triton.jit
def load_softmax_statistic(
    lse_ptr, offs_b, i, j0, B, J: tl.constexpr,
    BLOCK_J: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Load a statistic of each softmax, such as its log-sum-exp: (BLOCK_B, BLOCK_J).

    The tensor is (J, P) for a softmax over the inputs, and (I, P) for one over the outputs.
    """
    offs_j = j0 + tl.arange(0, BLOCK_J)
    row = offs_j if NORMALIZE_INPUTS else i + 0 * offs_j
    offsets = (row * padded_batch(B))[None, :] + offs_b[:, None]
    return tl.load(lse_ptr + offsets, mask=(offs_b < B)[:, None] & (offs_j < J)[None, :], other=0.0)


@triton.jit
def statistic_offsets(row, rows, J: tl.constexpr):
    """Offsets in (J, P) of the experts at the flat indices `row` of (B, J), where rows = B·J."""
    return row % J * padded_batch(rows // J) + row // J


# --------------------------------------------------------------------------------------------------
# Blocks of inputs: one expert, input capsules from i0 on


@triton.jit
def load_input_capsules(
    x_ptr, offs_b, i0, B, I, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Load x_i of BLOCK_I inputs, side by side: (BLOCK_B, BLOCK_N)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = i0 + offs_n // BLOCK_K
    offs_k = offs_n % BLOCK_K
    offsets = (offs_b.to(tl.int64) * I)[:, None] * K + (offs_i * K + offs_k)[None, :]
    mask = (offs_b < B)[:, None] & ((offs_i < I) & (offs_k < K))[None, :]
    return tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_input_maps(
    w_ptr, i0, j, I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load W_ij of BLOCK_I inputs, side by side: (BLOCK_D, BLOCK_N)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_i = i0 + offs_n // BLOCK_K
    offs_k = offs_n % BLOCK_K
    column = (offs_i * J + j).to(tl.int64) * (D * K) + offs_k
    mask = (offs_d < D)[:, None] & ((offs_i < I) & (offs_k < K))[None, :]
    pointers = w_ptr + column[None, :] + (offs_d * K)[:, None]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_expert(z_ptr, offs_b, j, B, J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load z_j of one expert: (BLOCK_B, BLOCK_D)."""
    offs_d = tl.arange(0, BLOCK_D)
    offsets = (offs_b.to(tl.int64) * J + j)[:, None] * D + offs_d[None, :]
    mask = (offs_b < B)[:, None] & (offs_d < D)[None, :]
    return tl.load(z_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


# --------------------------------------------------------------------------------------------------
# Products


@triton.jit
def to_tf32(v, ROUND: tl.constexpr):
    """Truncate or round float32 to the 10 bits of mantissa that the matrix units use."""
    bits = v.to(tl.uint32, bitcast=True)
    if ROUND:
        bits += 0x1000
    return (bits & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, TF32X3: tl.constexpr):
    """Multiply matrices on the matrix units, which read TF32.

    TF32X3 adds the two products with the remainders a − tf32(a) and b − tf32(b), which makes the
    result about as exact as float32. The product of both remainders is left out. It has either
    sign, because b is rounded; to round a as well would take longer. The matrix units truncate sums
    instead of rounding them, so long sums of products are accumulated outside, by ``acc +=
    dot(…)``.
    """
    if TF32X3:
        a_high = to_tf32(a, False)
        b_high = to_tf32(b, True)
        product = tl.dot(a - a_high, b_high, input_precision="tf32")
        product = tl.dot(a_high, b - b_high, product, input_precision="tf32")
        product = tl.dot(a_high, b_high, product, input_precision="tf32")
    else:
        product = tl.dot(a, b, input_precision="tf32")
    return product


@triton.jit
def votes(x, maps, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, TF32X3: tl.constexpr):
    """u_ij = W_ij x_i: (BLOCK_B, BLOCK_K), (BLOCK_N, BLOCK_K) → (BLOCK_B, BLOCK_J, BLOCK_D)."""
    u = dot(x, tl.trans(maps), TF32X3)
    return tl.reshape(u, [x.shape[0], BLOCK_J, BLOCK_D])


@triton.jit
def inverse_norm(u):
    """1/‖u‖ over the last axis; 1 for a zero vector, so that its direction is 0."""
    square = tl.sum(u * u, 2)
    return tl.rsqrt(tl.where(square > 0, square, 1.0))


@triton.jit
def agreement(u, h, COSINE: tl.constexpr):
    """⟨u, h⟩ of (BLOCK_B, BLOCK_J, BLOCK_D), divided by ‖u‖ for the cosine: (BLOCK_B, BLOCK_J)."""
    inner = tl.sum(u * h, 2)
    if COSINE:
        inner = inner * inverse_norm(u)
    return inner


# --------------------------------------------------------------------------------------------------
# Squash


@triton.jit
def polar(v):
    """Norm (rows, 1) and direction (rows, BLOCK_D) of rows; the direction of 0 is 0.

    Dividing by the largest component first avoids under- and overflow.
    """
    scale = tl.max(tl.abs(v), 1)
    scale = tl.where(scale > 0, scale, 1.0)[:, None]
    v = v / scale
    norm = tl.sqrt(tl.sum(v * v, 1))[:, None]
    return scale * norm, v / tl.where(norm > 0, norm, 1.0)


@triton.jit
def squash_rows(v, MAX_NORM: tl.constexpr):
    """squash(v) of rows (rows, BLOCK_D), with a norm of at most MAX_NORM."""
    norm, unit = polar(v)
    return squashed_norm(norm, MAX_NORM) * unit


@triton.jit
def squashed_norm(norm, MAX_NORM: tl.constexpr):
    """n²/(1+n²), written as 1/(1+n⁻²) above 1 so that n² cannot overflow; at most MAX_NORM."""
    small = tl.minimum(norm, 1.0)
    inverse = 1.0 / tl.maximum(norm, 1.0)
    above = 1.0 / (1.0 + inverse * inverse)
    below = small * small / (1.0 + small * small)
    return tl.minimum(tl.where(norm > 1, above, below), MAX_NORM)
