# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The gradient of a loss L through all iterations of routing by agreement.

With r the iteration, ∂L/∂z of each iteration and delta = Σ c⟨∂L/∂z_j, u_ij⟩ over the axis of the
softmax (as in flash attention; over the inputs it is ⟨∂L/∂z_j, z_j⟩):

    ∂L/∂b_ij = c_ij (⟨∂L/∂z_j, u_ij⟩ − delta)
    ∂L/∂h_j  = β Σ_i ∂L/∂b_ij û_ij                      û = u/‖u‖ for the cosine, u otherwise
    ∂L/∂u_ij = Σ_r c_ij ∂L/∂z_j + β ∂L/∂b_ij ∂⟨û_ij, h_j⟩/∂u_ij

Because h of an iteration is the sum of the agreement vectors before it, the gradient of an
agreement vector is the sum of ∂L/∂h over all later iterations. Votes and coefficients are
recomputed from x, h and lse of each iteration, so the memory between the passes is that of the
experts, per iteration.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.blocks import (
    LOG2E,
    agreement,
    dot,
    inverse_norm,
    load_capsules,
    load_experts,
    load_maps,
    load_scaled_h,
    load_softmax_statistic,
    padded_batch,
    polar,
    statistic_offsets,
    store_experts,
    votes,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.routing_forward import ForwardPass
from poecaps.kernels.triton.tiling import (
    TileConfig,
    expert_tiling,
    launch_rows,
    padded_batch_size,
)

# The best of a sweep on an H200.
BACKWARD_CONFIG = TileConfig()


# --------------------------------------------------------------------------------------------------
# Kernels: back through one iteration


@triton.jit
def _load_grad_c(
    grad_c_ptr, offs_b, i, j0, B, I, J: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """∂L/∂c_ij of one input and BLOCK_J experts, from grad_c (B, I, J): (BLOCK_B, BLOCK_J)."""
    offs_j = j0 + tl.arange(0, BLOCK_J)
    offsets = ((offs_b.to(tl.int64) * I + i) * J)[:, None] + offs_j[None, :]
    mask = (offs_b < B)[:, None] & (offs_j < J)[None, :]
    return tl.load(grad_c_ptr + offsets, mask=mask, other=0.0)


@kernel
def _output_delta_kernel(
    x_ptr, w_ptr, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, beta, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    COSINE: tl.constexpr, HAS_GRAD_C: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute Σ_j c_ij ∂L/∂c_ij for a softmax over the outputs: → delta (I, P).

    ∂L/∂c_ij is ⟨∂L/∂z_j, u_ij⟩, and HAS_GRAD_C adds grad_c (B, I, J) to it.
    """
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    i = tl.program_id(0)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
    acc = tl.zeros([BLOCK_B], tl.float32)
    for j0 in range(0, J, BLOCK_J):
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
        h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        logit = agreement(u, h, COSINE)
        lse = load_softmax_statistic(lse_ptr, offs_b, i, j0, B, J, BLOCK_J, False)
        c = tl.exp2(logit - lse)
        grad_z = load_experts(grad_z_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        inner = tl.sum(u * grad_z, 2)
        if HAS_GRAD_C:
            inner += _load_grad_c(grad_c_ptr, offs_b, i, j0, B, I, J, BLOCK_J)
        acc += tl.sum(c * inner, 1)
    P = padded_batch(B)
    tl.store(delta_ptr + i * P + offs_b, acc, mask=offs_b < P)


@kernel
def _grad_h_kernel(
    x_ptr, w_ptr, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, part_ptr,
    beta, B, inputs_per_split,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr, HAS_GRAD_C: tl.constexpr,
    TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum ∂L/∂h_j = β ∂L/∂b_ij û_ij over the inputs of a split: → part (S, B, J, D)."""
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    j0 = tl.program_id(1) * BLOCK_J
    split = tl.program_id(2)
    low = split * inputs_per_split
    high = tl.minimum(low + inputs_per_split, I)
    h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
    grad_z = load_experts(grad_z_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
    acc = tl.zeros([BLOCK_B, BLOCK_J, BLOCK_D], tl.float32)
    for i in range(low, high):
        x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
        logit = agreement(u, h, COSINE)
        lse = load_softmax_statistic(lse_ptr, offs_b, i, j0, B, J, BLOCK_J, NORMALIZE_INPUTS)
        c = tl.exp2(logit - lse)
        inner = tl.sum(u * grad_z, 2)
        if HAS_GRAD_C:
            inner += _load_grad_c(grad_c_ptr, offs_b, i, j0, B, I, J, BLOCK_J)
        delta = load_softmax_statistic(delta_ptr, offs_b, i, j0, B, J, BLOCK_J, NORMALIZE_INPUTS)
        grad_b = c * (inner - delta) * beta
        if COSINE:
            grad_b = grad_b * inverse_norm(u)
        acc += grad_b[:, :, None] * u
    part_ptr += split.to(tl.int64) * B * J * D
    store_experts(part_ptr, acc, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)


@kernel
def _agreement_vector_backward_kernel(
    part_ptr, z_ptr, grad_a_ptr, grad_z_ptr, delta_ptr, rows, splits,
    J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """Go back through the agreement vector a(z), direction or squash: → ∂L/∂z, delta = ⟨∂L/∂z, z⟩.

    ∂L/∂a is the sum of ∂L/∂h over all later iterations. The parts of ∂L/∂h (splits, rows, D) are
    added to it (ACCUMULATE) or start it.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = row < rows
    offsets = row.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = is_row[:, None] & (offs_d < D)[None, :]
    grad_a = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    if ACCUMULATE:
        grad_a = tl.load(grad_a_ptr + offsets, mask=mask, other=0.0)
    for split in range(splits):
        start = rows.to(tl.int64) * split * D
        grad_a += tl.load(part_ptr + start + offsets, mask=mask, other=0.0)
    tl.store(grad_a_ptr + offsets, grad_a, mask=mask)
    z = tl.load(z_ptr + offsets, mask=mask, other=0.0)
    norm, unit = polar(z)
    radial = tl.sum(grad_a * unit, 1)[:, None] * unit
    if COSINE:
        grad_z = (grad_a - radial) / tl.where(norm > 0, norm, 1.0)
    else:
        # squash(z) = p(n) z/n with p(n) = n²/(1+n²) has the derivatives p/n across z and dp/dn
        # along z. Above 1 they are written in 1/n, so that n² cannot overflow.
        small = tl.minimum(norm, 1.0)
        inverse = 1.0 / tl.maximum(norm, 1.0)
        low = 1.0 / (1.0 + small * small)
        high = 1.0 / (1.0 + inverse * inverse)
        across = tl.where(norm > 1, inverse * high, small * low)
        along_high = 2.0 * inverse * inverse * inverse * high * high
        along = tl.where(norm > 1, along_high, 2.0 * small * low * low)
        grad_z = across * (grad_a - radial) + along * radial
    tl.store(grad_z_ptr + offsets, grad_z, mask=mask)
    tl.store(delta_ptr + statistic_offsets(row, rows, J), tl.sum(grad_z * z, 1), mask=is_row)


# --------------------------------------------------------------------------------------------------
# Kernels: gradients of the weight and of the capsules, through the votes of all iterations


@triton.jit
def _grad_votes(
    u, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, beta, uniform, offs_b, i, j0, B, R,
    I, J: tl.constexpr, D: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr,
    HAS_GRAD_C: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """∂L/∂u_ij of a block over all R iterations: (BLOCK_B, BLOCK_J, BLOCK_D).

    h and grad_z are (R, B, J, D), lse and delta (R, J, P) or (R, I, P). HAS_GRAD_C: the loss also
    depends on the coefficients of the last iteration, by grad_c (B, I, J).
    """
    acc = uniform * load_experts(grad_z_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
    inverse = inverse_norm(u)
    if HAS_GRAD_C:
        grad_c = _load_grad_c(grad_c_ptr, offs_b, i, j0, B, I, J, BLOCK_J)
    for r in range(1, R):
        vectors = r * B.to(tl.int64) * J * D
        h = load_experts(h_ptr + vectors, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        grad_z = load_experts(grad_z_ptr + vectors, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        statistics = r * (J if NORMALIZE_INPUTS else I) * padded_batch(B)
        agree = tl.sum(u * h, 2)
        if COSINE:
            agree = agree * inverse
        logit = agree * (beta * LOG2E)
        lse = load_softmax_statistic(
            lse_ptr + statistics, offs_b, i, j0, B, J, BLOCK_J, NORMALIZE_INPUTS
        )
        c = tl.exp2(logit - lse)
        delta = load_softmax_statistic(
            delta_ptr + statistics, offs_b, i, j0, B, J, BLOCK_J, NORMALIZE_INPUTS
        )
        inner = tl.sum(u * grad_z, 2)
        if HAS_GRAD_C:
            inner += tl.where(r == R - 1, grad_c, 0.0)
        grad_b = c * (inner - delta) * beta
        if COSINE:
            grad_b = grad_b * inverse
            h -= (agree * inverse)[:, :, None] * u
        acc += c[:, :, None] * grad_z + grad_b[:, :, None] * h
    return acc


@kernel
def _grad_weight_kernel(
    x_ptr, w_ptr, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, out_ptr, beta, uniform, B, R,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr, HAS_GRAD_C: tl.constexpr,
    TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum ∂L/∂u_ij x_iᵀ over the batch: → out (I, J, D, K)."""
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
        u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
        grad_u = _grad_votes(
            u, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, beta, uniform, offs_b, i, j0,
            B, R, I, J, D, NORMALIZE_INPUTS, COSINE, HAS_GRAD_C, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        acc += dot(tl.trans(tl.reshape(grad_u, [BLOCK_B, BLOCK_N])), x, TF32X3)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_j = j0 + offs_n // BLOCK_D
    offs_d = offs_n % BLOCK_D
    offsets = ((i * J + offs_j).to(tl.int64) * D + offs_d)[:, None] * K + offs_k[None, :]
    mask = ((offs_j < J) & (offs_d < D))[:, None] & (offs_k < K)[None, :]
    tl.store(out_ptr + offsets, acc, mask=mask)


@kernel
def _grad_x_kernel(
    x_ptr, w_ptr, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, out_ptr, beta, uniform, B, R,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr, HAS_GRAD_C: tl.constexpr,
    TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum W_ijᵀ ∂L/∂u_ij over the experts: → out (B, I, K)."""
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    i = tl.program_id(0)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
    acc = tl.zeros([BLOCK_B, BLOCK_K], tl.float32)
    for j0 in range(0, J, BLOCK_J):
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
        grad_u = _grad_votes(
            u, h_ptr, lse_ptr, grad_z_ptr, delta_ptr, grad_c_ptr, beta, uniform, offs_b, i, j0,
            B, R, I, J, D, NORMALIZE_INPUTS, COSINE, HAS_GRAD_C, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        acc += dot(tl.reshape(grad_u, [BLOCK_B, BLOCK_N]), maps, TF32X3)
    offs_k = tl.arange(0, BLOCK_K)
    offsets = (offs_b.to(tl.int64) * I + i)[:, None] * K + offs_k[None, :]
    tl.store(out_ptr + offsets, acc, mask=(offs_b < B)[:, None] & (offs_k < K)[None, :])


# --------------------------------------------------------------------------------------------------
# Launchers


@dataclass(frozen=True)
class BackwardPass:
    """Gradients of every iteration, from which those of the weight and the capsules follow.

    Attributes
    ----------
    forward
        The recorded forward pass.
    grad_z : (R, B, J, D)
        ∂L/∂z of each iteration, float32.
    delta : (R, J, P) or (R, I, P)
        Σ c⟨∂L/∂z, u⟩ of each iteration, over the axis of the softmax; of the last one with grad_c.
    grad_c : (B, I, J), optional
        ∂L/∂c of the last iteration, beyond that through z; float32.
    """

    forward: ForwardPass
    grad_z: Tensor
    delta: Tensor
    grad_c: Tensor | None

    def grad_x(self, weight: Tensor) -> Tensor:
        """Compute ∂L/∂x: weight (I, J, D, K) → (B, I, K)."""
        tiling, batch = expert_tiling(weight, BACKWARD_CONFIG), len(self.forward.x)
        out = torch.empty_like(self.forward.x)
        grid = (tiling.inputs, tiling.image_blocks(batch))
        tiling.launch(_grad_x_kernel, batch, grid, self._arguments(weight, out), self._flags)
        return out

    def grad_weight(self, weight: Tensor) -> Tensor:
        """Compute ∂L/∂W: weight (I, J, D, K) → (I, J, D, K)."""
        tiling, batch = expert_tiling(weight, BACKWARD_CONFIG), len(self.forward.x)
        out = torch.empty_like(weight)
        grid = (tiling.inputs * tiling.expert_blocks,)
        tiling.launch(_grad_weight_kernel, batch, grid, self._arguments(weight, out), self._flags)
        return out

    def _arguments(self, weight: Tensor, out: Tensor) -> tuple[Tensor | float, ...]:
        forward, c = self.forward, self.forward.coefficients
        grad_c = self.grad_z if self.grad_c is None else self.grad_c
        pointers = (forward.x, weight, forward.h, forward.lse, self.grad_z, self.delta, grad_c, out)
        numbers = (c.traits.beta, c.uniform(weight), len(forward.x), forward.routing.iterations)
        return pointers + numbers

    @property
    def _flags(self) -> dict[str, bool]:
        c = self.forward.coefficients
        return {
            "NORMALIZE_INPUTS": c.traits.normalize_inputs,
            "COSINE": c.traits.cosine,
            "HAS_GRAD_C": self.grad_c is not None,
        }


def backward_through_iterations(
    forward: ForwardPass, weight: Tensor, gradient: Tensor | None, grad_c: Tensor | None = None
) -> BackwardPass:
    """Compute ∂L/∂z of every iteration from that of the last.

    Parameters
    ----------
    forward
        Result of `route` with ``record=True``.
    weight : (I, J, D, K)
        Contiguous.
    gradient : (B, J, D), optional
        ∂L/∂z of the last iteration; 0 if None.
    grad_c : (B, I, J), optional
        ∂L/∂c of the last iteration, beyond that through z; 0 if None.
    """
    x, z, h, lse = forward.x, forward.z, forward.h, forward.lse
    c = forward.coefficients
    tiling, batch, last = (
        expert_tiling(weight, BACKWARD_CONFIG),
        len(x),
        forward.routing.iterations - 1,
    )
    blocks = tiling.image_blocks(batch)
    grad_z = torch.empty_like(z)
    grad_z[last] = 0 if gradient is None else gradient
    if grad_c is not None:
        grad_c = grad_c.detach().float().contiguous()
    delta = torch.empty_like(lse)
    if c.traits.normalize_inputs:
        # Σ_i c_ij ⟨∂L/∂z_j, u_ij⟩ = ⟨∂L/∂z_j, z_j⟩
        mean = (grad_z[last] * z[last]).sum(-1)
        if grad_c is not None:
            mean += (c.tensor(weight) * grad_c).sum(1)
        delta[last, :, :batch] = mean.T
        spare = delta[0]
    else:
        # ⟨∂L/∂z, z⟩ is computed, but not used.
        spare = grad_z.new_empty(tiling.outputs, padded_batch_size(batch))
    splits, inputs_per_split = tiling.split(blocks * tiling.expert_blocks, tiling.inputs, x.device)
    part = grad_z.new_empty(splits, *grad_z.shape[1:])
    grad_a = torch.empty_like(grad_z[0])
    for r in range(last, 0, -1):
        has_grad_c = grad_c is not None and r == last
        given = grad_c if grad_c is not None and has_grad_c else grad_z
        pointers = (x, weight, h[r], lse[r], grad_z[r], delta[r], given)
        flags = {"COSINE": c.traits.cosine, "HAS_GRAD_C": has_grad_c}
        if not c.traits.normalize_inputs:
            tiling.launch(
                _output_delta_kernel,
                batch,
                (tiling.inputs, blocks),
                (*pointers, c.traits.beta, batch),
                flags,
            )
        tiling.launch(
            _grad_h_kernel,
            batch,
            (blocks, tiling.expert_blocks, splits),
            (*pointers, part, c.traits.beta, batch, inputs_per_split),
            {"NORMALIZE_INPUTS": c.traits.normalize_inputs, **flags},
        )
        delta_before = delta[r - 1] if c.traits.normalize_inputs else spare
        launch_rows(
            _agreement_vector_backward_kernel,
            (part, z[r - 1], grad_a, grad_z[r - 1], delta_before),
            (batch * tiling.outputs, splits),
            tiling.out_dim,
            {"COSINE": c.traits.cosine, "J": tiling.outputs, "ACCUMULATE": r < last},
        )
    return BackwardPass(forward, grad_z, delta, grad_c)
