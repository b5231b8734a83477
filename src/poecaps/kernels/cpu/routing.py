"""Routing and learning by `routing.c`, whose votes stay in registers and caches.

Routing, its gradient, and deterministic contrastive divergence without a chain run in C from start
to end. The other functions route in C and continue in `torch_routing`.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from poecaps import functional as F
from poecaps.kernels import torch_routing
from poecaps.kernels.cpu import build
from poecaps.kernels.cpu.job import Job
from poecaps.kernels.torch_routing import RecordedRouting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from poecaps.kernels.cpu.job import Function

BLOCK = 128  # images in a block, a multiple of all lanes; J×I×BLOCK coefficients stay in the cache
MAX_DIM = 64  # largest D and K: a vote and its direction are arrays on the stack
MIN_MULTIPLICATIONS = 2**20  # B·I·J·D·K of one pass below which compiling does not pay
USUAL_BATCH = 64  # images of a call whose size is not known
MIN_CHUNK, MAX_CHUNKS = 48, 16  # inputs mixed by one task, at least; number of such tasks, at most
MIN_TILES = 16  # tasks of the backward pass, at least, if there are as many inputs
TILE_VECTORS = 2**13  # vectors of one such task, at most: half a MiB stays in the cache
COEFFICIENT_BYTES = 64 * 2**20  # bytes of the coefficients of a block, at most
# Bytes of the votes for one expert that a thread, and that all threads may keep: the votes of a
# thread should stay in its cache.
THREAD_VOTE_BYTES, VOTE_BYTES = 2**23, 2**27
SPARE_BYTES = 2**27  # largest workspace that is kept for the next call
# Logits up to this need no maximum subtracted: a vote whose square is finite is below 2⁶⁴ ≈ 10¹⁹,
# and e³⁰ ≈ 10¹³ times as much does not overflow when it is mixed.
SAFE_LOGIT = 30.0


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Return why this backend cannot serve a call, None if it can.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    reason = torch_routing.why_not(x, weight)
    if reason is not None:
        return reason
    remedy = "use backend='torch'"
    if x.device.type != "cpu" or torch.float64 in (x.dtype, weight.dtype):
        return f"it needs float32 on a CPU, but x is {x.dtype} on {x.device.type!r}; {remedy}"
    if x.shape[1:] != (weight.shape[0], weight.shape[3]):
        shapes = f"have shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        return f"x (B, I, K) and weight (I, J, D, K) must agree in I and K, but {shapes}"
    if max(weight.shape[2:]) > MAX_DIM:
        sizes = "D = {} and K = {}".format(*weight.shape[2:])
        return f"it is limited to capsules of dimension {MAX_DIM}, but {sizes}; {remedy}"
    if not (_is_plain_memory(x) and _is_plain_memory(weight)):
        return f"it reads plain tensors in memory only, not subclasses or traced tensors; {remedy}"
    reason = build.why_not(*weight.shape[2:])
    return None if reason is None else f"{reason}; {remedy}"


def pays(x: Tensor, weight: Tensor, elements: int = 1) -> bool:
    """Return whether a call has enough work, B·I·J·D·K multiplications, to be worth compiling.

    B counts the images of all elements, over which `torch.func.vmap` maps.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    return elements * len(x) * weight.numel() >= MIN_MULTIPLICATIONS


def may_pay(weight: Tensor) -> bool:
    """Return whether a batch of usual size has enough work; weight : (I, J, D, K).

    For programs that are exported for batches of any size.
    """
    return USUAL_BATCH * weight.numel() >= MIN_MULTIPLICATIONS


def _is_plain_memory(tensor: Tensor) -> bool:
    """Return whether the memory at a tensor's address has its values, and may be read now."""
    is_intercepted = torch._C._len_torch_dispatch_stack() > 0
    is_traced = torch._C._get_tracing_state() is not None
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg()
    return is_plain and not is_intercepted and not is_traced


# ------------------------------------------------------------------------------------------------
# The functions of a backend


def routing_by_agreement(
    x: Tensor,
    weight: Tensor,
    *,
    iterations: int,
    sharpness: float,
    normalize: F.Axis,
    agreement: F.Agreement,
) -> F.Routing:
    """Compute `functional.routing_by_agreement`.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    routing = F.RoutingOptions(iterations, sharpness, normalize, agreement)
    return torch_routing.differentiable(route, routing_backward, x, weight, routing)


def held_preactivation(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> Tensor:
    """Compute `functional.held_preactivation`: (B, I, K), (I, J, D, K) → (B, J, D)."""
    return torch_routing.held_preactivation_from(x, weight, route(x, weight, routing))


def encode(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None,
    balance: Tensor | None,
) -> Tensor:
    """Compute `functional.encode`: (B, I, K), (I, J, D, K) → (B, J, D)."""
    z = routing_by_agreement(x, weight, **asdict(routing)).preactivation
    return F.expert_states(z, F.winning_experts(z, winners, balance))


def reconstruct(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    winners: int | None,
    balance: Tensor | None,
) -> Tensor:
    """Compute `functional.reconstruct`: (B, I, K), (I, J, D, K) → (B, I, K)."""
    routed = routing_by_agreement(x, weight, **asdict(routing))
    return torch_routing.reconstruct_from(routed, weight, winners=winners, balance=balance)


def contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    k: int,
    mixing: F.Mixing,
    uniform: Tensor | None,
    chain: Tensor | None,
    winners: int | None,
    balance: Tensor | None,
    views: int,
) -> F.LearningStep:
    """Compute `functional.contrastive_divergence`, with a gradient if the weight requires one.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    uniform : (k, N, J), optional
    chain : (N, I, K), optional
    balance : (J,), optional
    """
    if chain is None and mixing == "deterministic":
        return _deterministic(
            x, weight, routing, k=k, winners=winners, balance=balance, views=views
        )
    return torch_routing.contrastive_divergence_from(
        x,
        route(x, weight, routing),
        chain,
        None if chain is None else route(chain, weight, routing),
        weight,
        k=k,
        mixing=mixing,
        uniform=uniform,
        winners=winners,
        balance=balance,
        views=views,
    )


def decoder_contrastive_divergence(
    y: Tensor, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> F.LearningStep:
    """Compute `functional.decoder_contrastive_divergence`, with a gradient if one is required.

    Parameters
    ----------
    y : (B, J, D)
    x : (B, I, K)
    weight : (J, I, K, D)
    """
    routed = route(y, weight, routing)
    return torch_routing.decoder_contrastive_divergence_from(y, routed, x, weight)


@torch.no_grad()
def route(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> RecordedRouting:
    """Route without a gradient: (B, I, K), (I, J, D, K) → c and z of all iterations."""
    z, c = record(x, weight, routing, needs_c=True)
    assert c is not None  # noqa: S101 (it was asked for)
    return RecordedRouting(c, z)


@torch.no_grad()
def record(
    x: Tensor, weight: Tensor, routing: F.RoutingOptions, *, needs_c: bool
) -> tuple[Tensor, Tensor | None]:
    """Route: (B, I, K), (I, J, D, K) → z of all iterations (R, B, J, D), and c if it is needed."""
    batch = _Batch(x, weight, routing)
    c = new_coefficients(x, weight, batch.library.lanes) if needs_c else None
    z = x.new_empty(routing.iterations, len(x), *weight.shape[1:3])
    for block in batch.blocks():
        batch.route(block, z[:, block], None if c is None else c[block])
    batch.release()
    return z, c


def new_coefficients(x: Tensor, weight: Tensor, lanes: int) -> Tensor:
    """Allocate coefficients (B, I, J) in the layout in which `torch_routing` continues with them.

    There is space for whole vectors of images behind the last one.
    """
    inputs, experts, _, _ = weight.shape
    if experts > inputs:
        return x.new_empty(inputs, len(x), experts).transpose(0, 1)
    padded = -(-len(x) // lanes) * lanes
    return x.new_empty(experts, inputs, padded).permute(2, 1, 0)[: len(x)]


def routing_backward(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    grad_z: Tensor | None,
    grad_c: Tensor | None,
    routing: F.RoutingOptions,
    *,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `torch_routing.backward.routing_backward`.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    z : (R, B, J, D)
    grad_z : (B, J, D), optional
    grad_c : (B, I, J), optional
    """
    grad_x = x.new_empty(x.shape) if needs_grad_x else None
    grad_weight = weight.new_empty(weight.shape) if needs_grad_weight else None
    if grad_weight is not None and not len(x):
        grad_weight.zero_()  # no block writes to it
    z = z.contiguous()
    grad_z = torch.zeros_like(z[-1]) if grad_z is None else grad_z.contiguous()
    batch = _Batch(x, weight, routing, grad_weight, is_backward=True)
    for block in batch.blocks():
        batch.backward(
            block,
            z[:, block],
            grad_z[block],
            None if grad_c is None else grad_c[block],
            None if grad_x is None else grad_x[block],
        )
    batch.release()
    return grad_x, grad_weight


def _deterministic(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    k: int,
    winners: int | None,
    balance: Tensor | None,
    views: int,
) -> F.LearningStep:
    """Compute all steps for one block of images before the next block."""
    needs_gradient = torch.is_grad_enabled() and weight.requires_grad
    gaps: list[Tensor] = []
    winning: list[Tensor] = []
    with torch.no_grad():
        gradient: Tensor | None = None
        if needs_gradient:
            gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        batch = _Batch(x, weight, routing, gradient, views=views)
        for block in batch.blocks():
            z = x.new_empty(routing.iterations, len(x[block]), *weight.shape[1:3])
            batch.route(block, z)
            on = F.winning_experts(z[-1], winners, balance, views=views)
            gaps.append(batch.learn(k, on))
            winning += [] if on is None else [on]
        batch.release()
        loss = torch.cat(gaps).mean().to(weight.dtype)
    return F.LearningStep(loss, gradient, torch.cat(winning) if winning else None)


# ------------------------------------------------------------------------------------------------
# Calling C


class _Batch:
    """One call: its sizes, its workspace, and the block of images that is being processed.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    grad_weight : (I, J, D, K), optional
        Contiguous tensor that `learn` or `backward` writes the gradient to after the last block.
    views
        Number of consecutive rows of `x` that must be in the same block.
    is_backward
        Whether `backward` is called, and not `route` and `learn`.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        routing: F.RoutingOptions,
        grad_weight: Tensor | None = None,
        *,
        views: int = 1,
        is_backward: bool = False,
    ) -> None:
        inputs, experts, out_dim, dim = weight.shape
        self.library = build.library(out_dim, dim)
        lanes = self.library.lanes
        self.x, self.weight = x.detach().contiguous(), weight.detach().contiguous()
        self.grad_weight = grad_weight
        normalize_inputs, cosine = routing.normalize == "inputs", routing.agreement == "cosine"

        groups_within_limit = max(1, COEFFICIENT_BYTES // (4 * lanes * inputs * experts))
        # All views of an image are in the same block.
        images = math.lcm(lanes, views)
        block = min(BLOCK, groups_within_limit * lanes)
        self.block = min(max(images, block - block % images), max(1, len(x)))
        groups = -(-self.block // lanes)
        chunks = min(MAX_CHUNKS, max(1, inputs // MIN_CHUNK))
        self.threads = min(torch.get_num_threads(), groups * max(chunks, experts))
        vote_bytes = 4 * lanes * inputs * out_dim
        votes_fit = vote_bytes <= min(THREAD_VOTE_BYTES, VOTE_BYTES // self.threads)
        cache_votes = normalize_inputs and routing.iterations > 1 and votes_fit
        has_several_blocks = len(x) > self.block

        # Sizes in vectors of `lanes` floats; routing.c documents shapes and scratch memory.
        wide = -(-out_dim // lanes)
        sizes = {
            "x": groups * inputs * dim,
            "y": groups * experts * out_dim,
            "partial_z": chunks * groups * experts * out_dim,
        }
        cached_votes = inputs * out_dim if cache_votes else 0
        again = routing.iterations - 1
        of_pair = out_dim + 2 + 2 * max(1, again)  # vectors for an input and an expert
        tile = min(
            build.TILE, max(1, inputs // MIN_TILES), max(1, TILE_VECTORS // (experts * of_pair))
        )
        if is_backward:
            scratch = max(
                3 * inputs + max(cached_votes, build.TILE * out_dim),
                tile * (dim + experts * of_pair),
            )
            record = routing.iterations * groups * experts
            sizes |= {
                "h": record * out_dim,
                "grad_z_record": record * out_dim,
                "maximum": record,
                "sum": record,
                "mean_g": record,
                "grad_sum": 0 if grad_weight is None else inputs * experts * dim * wide,
            }
        else:
            scratch = inputs + cached_votes
            scratch += build.TILE * (out_dim + 1) * (1 if normalize_inputs else experts)
            needs_sum = grad_weight is not None and has_several_blocks
            sizes |= {
                "x_model": groups * inputs * dim,
                "e": groups * experts * inputs,
                "denominator": groups * experts,
                "z": groups * experts * out_dim,
                "grad_z": experts * groups * lanes * wide,
                "grad_z_model": experts * groups * lanes * wide,
                "grad_sum": inputs * experts * dim * wide if needs_sum else 0,
            }
        sizes["scratch"] = self.threads * scratch
        self.workspace = _take_workspace(lanes * sum(sizes.values()))
        addresses = {}
        address = self.workspace.data_ptr()
        for name, size in sizes.items():
            addresses[name] = address
            address += 4 * lanes * size
        self.job = Job(
            inputs=inputs,
            experts=experts,
            chunks=chunks,
            iterations=routing.iterations,
            normalize_outputs=not normalize_inputs,
            cosine=cosine,
            skip_max=cosine and routing.sharpness * (routing.iterations - 1) <= SAFE_LOGIT,
            cache_votes=cache_votes,
            sharpness=routing.sharpness,
            inverse_batch=1 / max(1, len(x)),
            weight=self.weight.data_ptr(),
            grad_weight=None if grad_weight is None else grad_weight.data_ptr(),
            scratch_size=scratch,
            tile=tile,
            **addresses,
        )

    def blocks(self) -> Iterator[slice]:
        """Split the images into blocks."""
        for start in range(0, len(self.x), self.block):
            yield slice(start, min(start + self.block, len(self.x)))

    def route(self, block: slice, z: Tensor, c: Tensor | None = None) -> None:
        """Route a block of b images, and write z (R, b, J, D) and, unless None, c (b, I, J)."""
        self._select(block, z)
        job = self.job
        if c is not None:
            self.tensors.append(c)
            job.c = c.data_ptr()
            job.c_image, job.c_input, job.c_expert = c.stride()
        self._run(self.library.route)

    def backward(
        self,
        block: slice,
        z: Tensor,
        grad_z: Tensor,
        grad_c: Tensor | None,
        grad_x: Tensor | None,
    ) -> None:
        """Go back through the routing of a block of b images, and add its part of the gradient.

        Parameters
        ----------
        z : (R, b, J, D)
        grad_z : (b, J, D)
        grad_c : (b, I, J), optional
        grad_x : (b, I, K), optional
            Output.
        """
        self._select(block, z)
        job = self.job
        job.grad_z_batch_first = grad_z.data_ptr()
        self.tensors.append(grad_z)
        if grad_c is not None:
            rows = self._batch_last(grad_c.transpose(1, 2).flatten(1))
            job.grad_c = rows.data_ptr()
            self.tensors.append(rows)
        if grad_x is not None:
            job.grad_x_batch_first = grad_x.data_ptr()
            self.tensors.append(grad_x)
        self._run(self.library.backward)

    def _select(self, block: slice, z: Tensor) -> None:
        """Continue with a block of b images, whose preactivations are z (R, b, J, D)."""
        job = self.job
        job.images = block.stop - block.start
        job.groups = self.padded(job.images) // self.library.lanes
        job.first_block, job.last_block = block.start == 0, block.stop == len(self.x)
        job.x_batch_first = self.x[block].data_ptr()
        job.z_batch_first, job.z_iteration = z.data_ptr(), z.stride(0)
        self.tensors = [z]

    def learn(self, k: int, on: Tensor | None) -> Tensor:
        """Mix the block k times and add its part of the gradient.

        Parameters
        ----------
        k
            Number of mixing steps.
        on : (b, J), optional
            Experts that may fire.

        Returns
        -------
        (b,)
            F(x) − F(x̃) of each image, in float64.
        """
        job = self.job
        job.mixing_steps = k
        mask = None if on is None else self._batch_last(on)
        job.on = None if mask is None else mask.data_ptr()
        gap = self.workspace.new_empty(job.groups, job.experts, self.library.lanes)
        job.free_energy_gap = gap.data_ptr()
        self.tensors += [gap] if mask is None else [gap, mask]
        self._run(self.library.learn)
        return gap.sum(1, dtype=torch.float64).flatten()[: job.images]

    def padded(self, images: int) -> int:
        """Return the number of images rounded up to whole vectors."""
        return -(-images // self.library.lanes) * self.library.lanes

    def _batch_last(self, rows: Tensor) -> Tensor:
        """(b, N) → (groups, N, lanes)."""
        groups, lanes = self.job.groups, self.library.lanes
        padded = pad(rows.to(torch.float32), (0, 0, 0, groups * lanes - self.job.images))
        return padded.view(groups, lanes, -1).transpose(1, 2).contiguous()

    def _run(self, function: Function) -> None:
        """Run all tasks on this thread and, as far as they start in time, on others.

        There are as many threads as PyTorch uses. The function returns now and then, so that an
        interrupt is noticed, and then no thread calls it again. The interrupt may arrive at any
        time, while other threads still work. So each run has its own copy of the job, and the
        function that the threads run refers to all memory that the job points to.
        """
        job = Job.from_buffer_copy(self.job)
        memory = (self, *self.tensors)
        is_given_up = False

        def work(number: int, _: object = memory) -> None:
            while not is_given_up and function(job, number):
                pass

        others: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # no thread can be started, or the interpreter shuts down
                for number in range(1, self.threads):
                    # Appended one by one, so that an exception does not lose the futures before it.
                    others.append(_pool().submit(work, number))  # noqa: PERF401
            work(0)
            for future in others:
                if not future.cancel():
                    future.result()
        except BaseException:
            is_given_up = True
            raise

    def release(self) -> None:
        """Leave the workspace to the next call."""
        _keep_workspace(self.workspace)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, os.cpu_count() or 1), "poecaps-simd")


if hasattr(os, "register_at_fork"):
    # The threads of a pool do not exist in a forked child.
    os.register_at_fork(after_in_child=_pool.cache_clear)


_spare_workspaces: list[Tensor] = []  # that of the last call, if it is over: allocation is slow


def release_workspace() -> None:
    """Free the memory that is kept from one call to the next."""
    _spare_workspaces.clear()


def _take_workspace(size: int) -> Tensor:
    """Return a float32 tensor of at least `size` numbers: the spare one, or a new one.

    The spare one is taken if at most about half of it would stay unused.
    """
    with suppress(IndexError):
        workspace = _spare_workspaces.pop()
        if size <= workspace.numel() <= 2 * size + 2**20:
            return workspace
    return torch.empty(size, dtype=torch.float32, device="cpu")


def _keep_workspace(workspace: Tensor) -> None:
    if not _spare_workspaces and 4 * workspace.numel() <= SPARE_BYTES:
        _spare_workspaces.append(workspace)
