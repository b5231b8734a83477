# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Gradients of the weight with held coefficients, Σ_b c_ij ∂L/∂z_j x_iᵀ.

Where the logits are kept in memory, or all coefficients are equal, and the inputs are many, a
program computes several inputs and one expert: with W_j the maps to expert j as one matrix,
∂L/∂W_j = (c_·j ⊙ x)ᵀ ∂L/∂z_j. This sums over the images, so capsules and gradients are transposed
first, with the images last, as the logits have them.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.blocks import (
    dot,
    load_capsules,
    load_experts,
    load_maps,
    padded_batch,
)
from poecaps.kernels.triton.coefficients import (
    Coefficients,
    expert_coefficients,
    input_coefficients,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig, cdiv, launch
from poecaps.kernels.triton.tiling import (
    TileConfig,
    expert_tiling,
    input_tiling,
    padded_batch_size,
)

# The best of a sweep on an H200, with votes and with kept logits (or equal coefficients).
WEIGHT_GRADIENT_CONFIG = TileConfig(launch=LaunchConfig(num_warps=4, num_stages=1))
BY_INPUTS_CONFIG = TileConfig(
    block_b=32, block_n=32, launch=LaunchConfig(num_warps=2, num_stages=2)
)

# Side of the squares that one program transposes: rows of 256 bytes of float32.
TRANSPOSE_BLOCK = 64


# --------------------------------------------------------------------------------------------------
# Kernels


@kernel
def _weight_gradient_kernel(
    x_ptr, v_ptr, grad_z_ptr, grad_z_v_ptr, w_ptr, h_ptr, lse_ptr, logits_ptr, out_ptr,
    beta, uniform, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr,
    TWO_TERMS: tl.constexpr, ACCUMULATE: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum c_ij grad_z_v_j v_iᵀ over the batch, with the coefficients of x: → out (I, J, D, K).

    TWO_TERMS: add c_ij grad_z_j x_iᵀ. ACCUMULATE: add both to `out`.
    """
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    # Programs of the same input are neighbours, so that they share its capsules in the cache.
    EXPERT_BLOCKS: tl.constexpr = (J + BLOCK_J - 1) // BLOCK_J
    i = tl.program_id(0) // EXPERT_BLOCKS
    j0 = tl.program_id(0) % EXPERT_BLOCKS * BLOCK_J
    maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for b0 in range(0, B, BLOCK_B):
        offs_b = b0 + tl.arange(0, BLOCK_B)
        x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
        c = expert_coefficients(
            x, maps, h_ptr, lse_ptr, logits_ptr, beta, offs_b, i, j0, B, uniform, I, J, D,
            SOURCE, NORMALIZE_INPUTS, COSINE, TF32X3, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        grad_z = load_experts(grad_z_v_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        grad_u = tl.reshape(c[:, :, None] * grad_z, [BLOCK_B, BLOCK_N])
        v = load_capsules(v_ptr, offs_b, i, B, I, K, BLOCK_K)
        acc += dot(tl.trans(grad_u), v, TF32X3)
        if TWO_TERMS:
            grad_z = load_experts(grad_z_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
            grad_u = tl.reshape(c[:, :, None] * grad_z, [BLOCK_B, BLOCK_N])
            acc += dot(tl.trans(grad_u), x, TF32X3)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_j = j0 + offs_n // BLOCK_D
    offs_d = offs_n % BLOCK_D
    offsets = ((i * J + offs_j).to(tl.int64) * D + offs_d)[:, None] * K + offs_k[None, :]
    mask = ((offs_j < J) & (offs_d < D))[:, None] & (offs_k < K)[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, acc, mask=mask)


@kernel
def _weight_gradient_by_inputs_kernel(
    x_ptr, v_ptr, grad_z_ptr, grad_z_v_ptr, lse_ptr, logits_ptr, out_ptr, uniform, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr,
    TWO_TERMS: tl.constexpr, ACCUMULATE: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the same as `_weight_gradient_kernel`: capsules (I·K, P), gradients (J·D, P)."""
    BLOCK_I: tl.constexpr = BLOCK_N // BLOCK_K
    P = padded_batch(B)
    # Programs of the same inputs are neighbours, so that they share their capsules in the cache.
    i0 = tl.program_id(0) // J * BLOCK_I
    j = tl.program_id(0) % J
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_i = i0 + offs_n // BLOCK_K
    offs_k = offs_n % BLOCK_K
    is_input = (offs_i < I) & (offs_k < K)
    is_expert = offs_d < D
    input_row = offs_i * K + offs_k
    expert_row = j * D + offs_d
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for b0 in range(0, B, BLOCK_B):
        offs_b = b0 + tl.arange(0, BLOCK_B)
        c = input_coefficients(
            logits_ptr, lse_ptr, uniform, offs_b, i0, j, B, I, BLOCK_I, SOURCE, NORMALIZE_INPUTS
        )
        c = c[:, None, :]
        v = _load_batch_last(v_ptr, input_row, is_input, offs_b, P)
        cv = tl.reshape(c * tl.reshape(v, [BLOCK_I, BLOCK_K, BLOCK_B]), [BLOCK_N, BLOCK_B])
        grad_z = _load_batch_last(grad_z_v_ptr, expert_row, is_expert, offs_b, P)
        acc += dot(cv, tl.trans(grad_z), TF32X3)
        if TWO_TERMS:
            x = _load_batch_last(x_ptr, input_row, is_input, offs_b, P)
            cx = tl.reshape(c * tl.reshape(x, [BLOCK_I, BLOCK_K, BLOCK_B]), [BLOCK_N, BLOCK_B])
            grad_z = _load_batch_last(grad_z_ptr, expert_row, is_expert, offs_b, P)
            acc += dot(cx, tl.trans(grad_z), TF32X3)
    offsets = ((offs_i * J + j).to(tl.int64) * (D * K) + offs_k)[:, None] + (offs_d * K)[None, :]
    mask = is_input[:, None] & is_expert[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, acc, mask=mask)


@triton.jit
def _load_batch_last(x_ptr, row, is_row, offs_b, P):
    """Load rows of a tensor (rows, P): (BLOCK_N, BLOCK_B)."""
    mask = is_row[:, None] & (offs_b < P)[None, :]
    return tl.load(x_ptr + row[:, None] * P + offs_b[None, :], mask=mask, other=0.0).to(tl.float32)


@kernel
def _transpose_kernel(
    x_ptr, grad_z_ptr, x_out_ptr, grad_z_out_ptr, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Transpose x (B, I, K) → (I·K, P) and grad_z (B, J, D) → (J·D, P), with 0 for the padding."""
    if tl.program_id(2) == 0:
        _transpose(x_ptr, x_out_ptr, B, I, K, BLOCK_B, BLOCK_N)
    else:
        _transpose(grad_z_ptr, grad_z_out_ptr, B, J, D, BLOCK_B, BLOCK_N)


@triton.jit
def _transpose(x_ptr, out_ptr, B, I, K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    P = padded_batch(B)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_i = offs_n // K
    offsets = (offs_b.to(tl.int64)[:, None] * I + offs_i[None, :]) * K + (offs_n % K)[None, :]
    x = tl.load(x_ptr + offsets, mask=(offs_b < B)[:, None] & (offs_i < I)[None, :], other=0.0)
    mask = (offs_i < I)[:, None] & (offs_b < P)[None, :]
    tl.store(out_ptr + offs_n[:, None] * P + offs_b[None, :], tl.trans(x), mask=mask)


# --------------------------------------------------------------------------------------------------
# Launchers


@dataclass(frozen=True)
class GradientTerm:
    """One term c_ij ∂L/∂z_j x_iᵀ of a weight gradient, in the layout that its kernel reads.

    Attributes
    ----------
    grad_z : (B, J, D), or (J·D, P) for `Coefficients.by_inputs`
    x : (B, I, K), or (I·K, P) likewise
    batch : B
    """

    grad_z: Tensor
    x: Tensor
    batch: int


def gradient_term(grad_z: Tensor, x: Tensor, weight: Tensor, c: Coefficients) -> GradientTerm:
    """Prepare a term for `weight_gradient`; the arguments may be freed afterwards.

    Parameters
    ----------
    grad_z : (B, J, D)
    x : (B, I, K)
    weight : (I, J, D, K)
    c
        Coefficients of the term.
    """
    grad_z, x = grad_z.contiguous(), x.contiguous()
    if not c.by_inputs(weight):
        return GradientTerm(grad_z, x, len(x))
    batch, inputs, in_dim = x.shape
    _, outputs, out_dim = grad_z.shape
    row = padded_batch_size(batch)
    grad_z_out = grad_z.new_empty(outputs * out_dim, row)
    x_out = x.new_empty(inputs * in_dim, row)
    rows = max(len(grad_z_out), len(x_out))
    launch(
        _transpose_kernel,
        (cdiv(rows, TRANSPOSE_BLOCK), cdiv(row, TRANSPOSE_BLOCK), 2),
        (x, grad_z, x_out, grad_z_out, batch, inputs),
        {
            "J": outputs,
            "D": out_dim,
            "K": in_dim,
            "BLOCK_B": TRANSPOSE_BLOCK,
            "BLOCK_N": TRANSPOSE_BLOCK,
        },
    )
    return GradientTerm(grad_z_out, x_out, batch)


def weight_gradient(
    weight: Tensor,
    c: Coefficients,
    term: GradientTerm,
    routed_term: GradientTerm | None = None,
    *,
    out: Tensor,
    accumulate: bool = False,
) -> None:
    """Write or add Σ_b c_ij ∂L/∂z_j v_iᵀ to `out`, for one or two terms with the same coefficients.

    Parameters
    ----------
    weight : (I, J, D, K)
        Contiguous.
    c
        Coefficients.
    term
        Term of any capsules v.
    routed_term
        Second term, of the capsules that were routed to give the coefficients.
    out : (I, J, D, K)
        Contiguous, of any floating-point dtype.
    accumulate
        Whether to add to `out` instead of overwriting it.
    """
    other = term if routed_term is None else routed_term
    flags = {"TWO_TERMS": routed_term is not None, "ACCUMULATE": accumulate}
    if c.by_inputs(weight):
        inputs = input_tiling(weight, BY_INPUTS_CONFIG)
        pointers = (other.x, term.x, other.grad_z, term.grad_z, c.lse, c.logits_or_any, out)
        inputs.launch(
            _weight_gradient_by_inputs_kernel,
            term.batch,
            (inputs.input_blocks * inputs.outputs,),
            (*pointers, c.uniform(weight), term.batch),
            {**flags, **c.input_flags},
        )
        return
    tiling = expert_tiling(weight, WEIGHT_GRADIENT_CONFIG)
    x = c.x if routed_term is None else routed_term.x
    capsules = (x, term.x, other.grad_z, term.grad_z)
    tiling.launch(
        _weight_gradient_kernel,
        term.batch,
        (tiling.inputs * tiling.expert_blocks,),
        (
            *capsules,
            weight,
            c.h,
            c.lse,
            c.logits_or_any,
            out,
            c.traits.beta,
            c.uniform(weight),
            term.batch,
        ),
        {**c.flags, **flags},
    )
