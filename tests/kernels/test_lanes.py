"""The compiled version gives what the reference gives, to 1e-5 of float64, and gives way where it cannot run."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from poecaps import CapsuleExperts, kernels
from poecaps import functional as F
from poecaps.kernels import fanout, lanes, votefree
from poecaps.kernels.common import Options
from tests.kernels.problems import OPTIONS, problem, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

needs_lanes = pytest.mark.skipif(lanes.obstacle() is not None, reason=f"nothing can be compiled: {lanes.obstacle()}")

# B, I, K, J, D: none, one or several of the lanes, tiles, pieces and pairs of experts are full.
SIZES = [
    (1, 1, 1, 1, 1),
    (5, 13, 5, 3, 17),
    (16, 16, 8, 4, 16),
    (37, 101, 8, 5, 16),
    (17, 9, 16, 30, 5),
    (18, 23, 17, 2, 1),
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        lanes._library.cache_clear()
        yield
    lanes._library.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what was compiled and loaded, before and after."""
    lanes._library.cache_clear()
    yield
    lanes._library.cache_clear()
    lanes._stuck.clear()


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    lanes._pool().shutdown()
    lanes._pool.cache_clear()


def sharp(iterations: int, normalize: F.Axis, agreement: F.Agreement) -> Options:
    # Inner products are unbounded: sharper, and eight iterations would magnify rounding beyond any fixed bound.
    return Options(iterations, 5.0 if agreement == "cosine" else 1.0, normalize, agreement)


def routed(version: Any, x: Tensor, weight: Tensor, options: Options) -> F.Routing:
    routing: F.Routing = version.routing_by_agreement(
        x,
        weight,
        iterations=options.iterations,
        sharpness=options.sharpness,
        normalize=options.normalize,
        agreement=options.agreement,
    )
    return routing


def assert_routed(x: Tensor, weight: Tensor, options: Options, bound: float = 1e-5) -> None:
    exact = routed(F, x.double(), weight.double(), options)
    ours = routed(lanes, x, weight, options)
    assert relative_error(ours.coefficients, exact.coefficients) < bound
    assert relative_error(ours.preactivation, exact.preactivation) < bound


def every_other(z: Tensor) -> Tensor:
    """Let experts fire that do not depend on rounding, differently for each image and expert."""
    image, expert = torch.arange(len(z)).unsqueeze(1), torch.arange(z.shape[1])
    return (image + expert) % 3 != 0


def learned(
    version: Any, x: Tensor, weight: Tensor, k: int, options: Options, may_fire: Callable[[Tensor], Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return loss, gradient, and who might fire."""
    weight = weight.detach().clone().requires_grad_()
    loss, on = version.contrastive_divergence(x, weight, k, options, may_fire)
    (3 * loss).backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad, on


def assert_learned(
    x: Tensor, weight: Tensor, k: int, options: Options, may_fire: Callable[[Tensor], Tensor | None]
) -> None:
    exact_loss, exact_slope, exact_on = learned(votefree, x.double(), weight.double(), k, options, may_fire)
    loss, slope, on = learned(lanes, x, weight, k, options, may_fire)
    assert loss.dtype == torch.float32
    # The loss is a difference of free energies, and is as exact as they are.
    size = F.free_energy(routed(F, x.double(), weight.double(), options).preactivation).abs().mean()
    assert (loss - exact_loss).abs() < 1e-5 * size
    assert relative_error(slope, exact_slope) < 1e-5
    if exact_on is None:
        assert on is None
    else:
        assert on is not None
        assert torch.equal(on, exact_on)


# ---------------------------------------------------------------------------------------------------------
# The numbers


@needs_lanes
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 8])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_routing(
    sizes: tuple[int, ...],
    iterations: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    assert_routed(*problem(sizes, generator), sharp(iterations, normalize, agreement))


@needs_lanes
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
@pytest.mark.parametrize("may_fire", [every_other, lambda z: None])
def test_learning(
    sizes: tuple[int, ...],
    iterations: int,
    k: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    may_fire: Callable[[Tensor], Tensor | None],
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    assert_learned(x, weight, k, sharp(iterations, normalize, agreement), may_fire)


@needs_lanes
@pytest.mark.parametrize(("dim", "out_dim"), [(64, 64), (1, 16), (5, 64), (17, 5)])
@pytest.mark.parametrize("normalize", F.AXES)
def test_short_and_long_capsules(dim: int, out_dim: int, normalize: F.Axis, generator: torch.Generator) -> None:
    x, weight = problem((19, 21, dim, 3, out_dim), generator)
    assert_routed(x, weight, sharp(3, normalize, "cosine"))
    assert_learned(x, weight, 1, sharp(3, normalize, "cosine"), every_other)


@needs_lanes
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_several_blocks(
    normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may fire is asked as often, and of the same images, as by the plain version."""
    for version in (lanes, votefree):
        monkeypatch.setattr(version, "BLOCK", 32)
    x, weight = problem((32 + 32 + 5, 19, 8, 5, 16), generator)
    options = sharp(3, normalize, agreement)
    assert_routed(x, weight, options)
    assert_learned(x, weight, 2, options, every_other)

    def asked(version: Any) -> tuple[list[Tensor], Tensor | None]:
        seen: list[Tensor] = []
        source = torch.Generator().manual_seed(3)

        def toss(z: Tensor) -> Tensor:
            seen.append(z.double())
            return torch.rand(z.shape[:2], generator=source) < 0.5

        return seen, learned(version, x, weight, 1, options, toss)[2]

    (ours, on), (theirs, same) = asked(lanes), asked(votefree)
    assert [len(each) for each in ours] == [32, 32, 5] == [len(each) for each in theirs]
    torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-4, atol=1e-5)
    assert on is not None
    assert same is not None
    assert torch.equal(on, same)


@needs_lanes
def test_many_coefficients_are_made_of_fewer_images_at_once(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "ROOM", 1)
    x, weight = problem((40, 9, 8, 5, 16), generator)
    assert_routed(x, weight, sharp(3, "inputs", "cosine"))
    assert_learned(x, weight, 1, sharp(3, "inputs", "cosine"), lambda z: None)


@needs_lanes
@pytest.mark.parametrize(("sharpness", "agreement"), [(5.0, "cosine"), (200.0, "cosine"), (1.0, "inner")])
def test_votes_that_are_not_kept(
    sharpness: float, agreement: F.Agreement, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "KEPT", 0)
    x, weight = problem((18, 37, 8, 3, 16), generator)
    assert_routed(x, weight, Options(3, sharpness, "inputs", agreement), 1e-4 if sharpness > 100 else 1e-5)


@needs_lanes
@pytest.mark.parametrize("normalize", F.AXES)
@pytest.mark.parametrize("agreement", F.AGREEMENTS)
def test_sharp_routing_does_not_overflow(normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator) -> None:
    """Logits of a thousand. What rounding does to them is magnified: the plain version sets the bound."""
    x, weight = problem((18, 30, 8, 5, 16), generator)
    options = Options(3, 500.0, normalize, agreement)
    exact = routed(F, x.double(), weight.double(), options)
    theirs, ours = routed(votefree, x, weight, options), routed(lanes, x, weight, options)
    assert ours.preactivation.isfinite().all()
    shared = ours.coefficients.sum(1 if normalize == "inputs" else 2)
    torch.testing.assert_close(shared, torch.ones_like(shared))
    bound = 1e-4 + 3 * relative_error(theirs.coefficients, exact.coefficients)
    assert relative_error(ours.coefficients, exact.coefficients) < bound


@needs_lanes
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator) -> None:
    x, weight = problem((5, 13, 8, 3, 16), generator)
    x[:, 2] = 0
    x[1] = 0
    weight[:, 1] = 0
    assert_routed(x, weight, sharp(3, normalize, agreement))
    assert_learned(x, weight, 2, sharp(3, normalize, agreement), every_other)


@needs_lanes
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e-12, 1e12, 1e18, 1e25])
@pytest.mark.parametrize("sharpness", [5.0, 29.0])
@pytest.mark.parametrize("normalize", F.AXES)
def test_extreme_votes(size: float, sharpness: float, normalize: F.Axis, generator: torch.Generator) -> None:
    """What is too small or too large to square is routed no worse than by the plain version."""
    x, weight = problem((5, 40, 8, 3, 16), generator)
    options = Options(2, sharpness, normalize, "cosine")
    exact = routed(F, x.double(), weight.double() * size, options)
    theirs, ours = (routed(version, x, weight * size, options) for version in (votefree, lanes))
    for name in ("coefficients", "preactivation"):
        bound = max(1e-5, 1.01 * relative_error(getattr(theirs, name), getattr(exact, name)))
        assert relative_error(getattr(ours, name), getattr(exact, name)) < bound
    loss, slope, _ = learned(lanes, x, weight * size, 1, options, lambda z: None)
    plain_loss, plain_slope, _ = learned(votefree, x, weight * size, 1, options, lambda z: None)
    assert loss.isfinite() or not plain_loss.isfinite()
    assert slope.isfinite().all() or not plain_slope.isfinite().all()


@needs_lanes
@pytest.mark.parametrize("normalize", F.AXES)
def test_votes_that_all_but_cancel(normalize: F.Axis, generator: torch.Generator) -> None:
    """What is mixed of votes that can be squared, barely, cannot be, and has a direction all the same."""
    x, weight = problem((5, 2, 8, 3, 16), generator)
    x[:, 1], weight[1] = x[:, 0], -weight[0] * (1 - 2**-10)
    assert_routed(x, weight * 1e-17, Options(3, 5.0, normalize, "cosine"), 1e-3)


@needs_lanes
@pytest.mark.parametrize("normalize", F.AXES)
def test_nothing_is_left_of_another_call(normalize: F.Axis, generator: torch.Generator) -> None:
    x, weight = problem((21, 13, 5, 3, 17), generator)
    options = sharp(3, normalize, "cosine")
    first = learned(lanes, x, weight, 2, options, every_other)
    (room,) = lanes._spare
    room.fill_(torch.nan)
    again = learned(lanes, x, weight, 2, options, every_other)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@needs_lanes
def test_much_memory_is_not_kept(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = problem((21, 13, 5, 3, 17), generator)
    options = sharp(3, "inputs", "cosine")
    learned(lanes, x, weight, 1, options, every_other)
    assert len(lanes._spare) == 1
    lanes.forget()
    assert lanes._spare == []
    monkeypatch.setattr(lanes, "SPARE", 1000)
    learned(lanes, x, weight, 1, options, every_other)
    assert lanes._spare == []


@needs_lanes
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_nan_is_not_hidden(where: str, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator) -> None:
    x, weight = problem((5, 13, 8, 3, 16), generator)
    odd = torch.tensor(0x7FC01234, dtype=torch.int32).view(torch.float32)  # with a payload
    (x if where == "x" else weight)[1, 1, ...] = odd
    for iterations in (1, 3):
        options = sharp(iterations, normalize, agreement)
        exact, ours = (routed(version, x, weight, options) for version in (F, lanes))
        assert torch.equal(ours.preactivation.isnan(), exact.preactivation.isnan())
        loss, slope, _ = learned(lanes, x, weight, 1, options, lambda z: None)
        assert loss.isnan()
        assert slope.isnan().any()


@needs_lanes
def test_tensors_that_lie_otherwise(generator: torch.Generator) -> None:
    x, weight = problem((18, 13, 8, 3, 16), generator)
    across = x.transpose(0, 2).contiguous().transpose(0, 2)[:, ::2]
    maps = weight.transpose(1, 3).contiguous().transpose(1, 3)[::2]
    assert not across.is_contiguous()
    assert not maps.is_contiguous()
    assert_routed(across, maps, sharp(3, "inputs", "cosine"))
    assert_learned(across, maps, 1, sharp(3, "outputs", "cosine"), every_other)
    mask = every_other(torch.empty(18, 3, 1)).T.contiguous().T.float()
    assert_learned(x, weight, 1, sharp(3, "inputs", "cosine"), lambda z: mask)


@needs_lanes
def test_what_asks_for_no_gradient_gets_none(generator: torch.Generator) -> None:
    x, weight = problem((5, 13, 8, 3, 16), generator)
    options = sharp(3, "inputs", "cosine")
    held, _ = lanes.contrastive_divergence(x, weight, 1, options, lambda z: None)
    weight.requires_grad_()
    with torch.no_grad():
        silent, _ = lanes.contrastive_divergence(x, weight, 1, options, lambda z: None)
    asked, _ = lanes.contrastive_divergence(x, weight, 1, options, lambda z: None)
    assert not held.requires_grad
    assert not silent.requires_grad
    assert asked.requires_grad
    assert held == silent == asked
    assert not routed(lanes, x, weight, options).preactivation.requires_grad


# ---------------------------------------------------------------------------------------------------------
# Threads and processes


@needs_lanes
@pytest.mark.parametrize("normalize", F.AXES)
@pytest.mark.usefixtures("three_threads")
def test_threads_change_no_bit(normalize: F.Axis, generator: torch.Generator) -> None:
    x, weight = problem((70, 101, 8, 5, 16), generator)
    options = sharp(3, normalize, "cosine")
    together = [learned(lanes, x, weight, 2, options, every_other)[:2] for _ in range(5)]
    torch.set_num_threads(1)
    alone = learned(lanes, x, weight, 2, options, every_other)[:2]
    for each in together:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(each, alone, strict=True))


@needs_lanes
@pytest.mark.usefixtures("three_threads")
def test_calls_at_once(generator: torch.Generator) -> None:
    options = sharp(3, "inputs", "cosine")
    problems = [problem((20 + n, 50, 8, 5, 16), generator) for n in range(4)]

    def one(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return learned(lanes, x, weight, 1, options, every_other)

    expected = [one(*each) for each in problems]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda n: one(*problems[n % 4]), range(40)))
    for n, each in enumerate(found):
        assert torch.equal(each[0], expected[n % 4][0])
        assert torch.equal(each[1], expected[n % 4][1])


@needs_lanes
@pytest.mark.usefixtures("three_threads")
def test_what_goes_wrong_in_a_thread_is_heard(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    x, weight = problem((20, 50, 8, 5, 16), generator)

    class Pool(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            def fail() -> None:
                raise MemoryError("no more")

            future = super().submit(fail)
            future.exception()  # it has begun, and cannot be called back
            return future

    pool = Pool(1)
    monkeypatch.setattr(lanes, "_pool", lambda: pool)
    with pytest.raises(MemoryError, match="no more"):
        routed(lanes, x, weight, sharp(3, "inputs", "cosine"))
    pool.shutdown()
    monkeypatch.undo()
    assert_routed(x, weight, sharp(3, "inputs", "cosine"))


@needs_lanes
@pytest.mark.usefixtures("three_threads")
def test_a_pool_that_takes_no_more_is_done_without(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """As when the interpreter ends."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(lanes, "_pool", lambda: pool)
    assert_routed(*problem((20, 50, 8, 5, 16), generator), sharp(3, "inputs", "cosine"))
    monkeypatch.undo()


@needs_lanes
@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """The executor has queued the work before it fails to start a thread for it."""

    class Pool(ThreadPoolExecutor):
        def submit(self, *given: Any, **_: Any) -> Any:
            future = super().submit(*given)
            submitted.append(future)
            if len(submitted) % 2 == 0:
                raise RuntimeError("can't start new thread")
            return future

    submitted: list[Any] = []
    pool = Pool(1)
    monkeypatch.setattr(lanes, "_pool", lambda: pool)
    x, weight = problem((20, 50, 8, 5, 16), generator)
    options = sharp(3, "inputs", "cosine")
    assert_learned(x, weight, 2, options, every_other)
    assert len(submitted) == 4
    pool.shutdown()


@needs_lanes
@pytest.mark.usefixtures("three_threads")
def test_an_interrupt_while_others_work(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """What they work on is held until they are done, and not given to the next call."""
    held: list[weakref.ref[torch.Tensor]] = []
    begin, others = threading.Event(), ThreadPoolExecutor(1)

    class Pool:
        def submit(self, work: Any) -> Any:
            def later() -> None:
                begin.wait()
                work()

            futures.append(others.submit(later))
            raise KeyboardInterrupt

    class Step(lanes._Step):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            held.append(weakref.ref(self.room))

    futures: list[Any] = []
    x, weight = problem((20, 50, 8, 5, 16), generator)
    options = sharp(3, "inputs", "cosine")
    lanes.forget()
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_pool", Pool)
        patch.setattr(lanes, "_Step", Step)
        with pytest.raises(KeyboardInterrupt):
            learned(lanes, x, weight, 1, options, every_other)
    gc.collect()
    assert held[0]() is not None
    assert lanes._spare == []
    begin.set()
    futures[0].result()
    others.shutdown()
    assert_learned(x, weight, 1, options, every_other)


@needs_lanes
def test_tensors_that_are_not_memory_are_left_to_the_plain_version(generator: torch.Generator) -> None:
    class Mine(torch.Tensor):
        pass

    x, weight = problem((64, 50, 8, 5, 16), generator)
    large, wide = x.repeat(8, 1, 1), weight.detach()
    assert lanes.covers(large, weight)
    assert not lanes.covers(large.as_subclass(Mine), weight)
    assert not lanes.covers(torch._neg_view(large), weight)
    assert not lanes.covers(large[:, :49], weight)
    assert not lanes.covers(large[:, :, :7], weight)
    with FlopCounterMode(display=False) as counted:
        assert not lanes.covers(large, weight)
        routed(kernels, large, wide, sharp(3, "inputs", "cosine"))
    assert counted.get_total_flops() > 0
    with torch.device("meta"):
        here = routed(lanes, large, wide, sharp(3, "inputs", "cosine"))
    assert here.preactivation.isfinite().all()


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = dict(os.environ) | environment
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=found, capture_output=True, text=True, timeout=120)


@needs_lanes
def test_a_forked_child_learns_too() -> None:
    done = run("""
        import os, threading, torch
        from poecaps.kernels import lanes
        from poecaps.kernels.common import Options
        torch.set_num_threads(2)
        x, weight = torch.rand(40, 30, 8) / 8, torch.rand(30, 5, 16, 8, requires_grad=True)
        learn = lambda: lanes.contrastive_divergence(x, weight, 1, Options(3, 5.0), lambda z: None)[0].item()
        before = learn()
        child = os.fork()
        if not child:
            same = learn() == before
            helped = any(each.name.startswith("poecaps-lanes") for each in threading.enumerate())
            os._exit(0 if same and helped else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert learn() == before
    """)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------
# Who takes a call


@needs_lanes
@pytest.mark.parametrize("outputs", [5, 30])
def test_layers_learn_and_encode_by_it(
    outputs: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there are fewer experts than inputs or more."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("another version was asked")

    layer = CapsuleExperts(13, 8, outputs, 16, winners=2, sharpness=5.0, generator=generator)
    layer.reset_parameters(std=1.0, generator=generator)
    exact = CapsuleExperts(13, 8, outputs, 16, winners=2, sharpness=5.0, backend="reference", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x, _ = problem((18, 13, 8, 1, 1), generator)
    monkeypatch.setattr(lanes, "SMALLEST", 0)
    for version in (votefree, fanout):
        monkeypatch.setattr(version, "routing_by_agreement", refuse)
    monkeypatch.setattr(votefree, "contrastive_divergence", refuse)
    layer.contrastive_divergence(x, 2).backward()
    exact.contrastive_divergence(x.double(), 2).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    assert relative_error(layer.weight.grad, exact.weight.grad) < 1e-5
    with torch.no_grad():
        layer.winners = exact.winners = None
        assert relative_error(layer(x), exact(x.double())) < 1e-5
        assert relative_error(layer.reconstruct(x), exact.reconstruct(x.double())) < 1e-5


@needs_lanes
def test_what_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(4, 6, 8), torch.zeros(6, 3, 16, 8)
    assert not lanes.covers(x, weight)  # too little work
    monkeypatch.setattr(lanes, "SMALLEST", x.shape[0] * weight.numel())
    assert lanes.covers(x, weight)
    assert not lanes.covers(x.double(), weight.double())
    assert not lanes.covers(x[:3], weight)
    assert not lanes.covers(torch.zeros(99, 6, 65), torch.zeros(6, 3, 16, 65))
    assert not lanes.covers(torch.zeros(99, 6, 8), torch.zeros(6, 3, 65, 8))


@needs_lanes
def test_no_images_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SMALLEST", 0)
    layer = CapsuleExperts(7, 8, 5, 16)
    with torch.no_grad():
        assert layer(torch.zeros(0, 7, 8)).shape == (0, 5, 16)


# ---------------------------------------------------------------------------------------------------------
# Compiling


def compiler(folder: Path, script: str) -> str:
    path = folder / "some-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def assert_plain(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning goes on by the plain version, and one line says why."""
    assert kernels.describe("cpu") == f"cpu: plain PyTorch without votes, because {reason}"
    monkeypatch.setattr(lanes, "SMALLEST", 0)
    x, weight = problem((5, 13, 8, 3, 16), torch.Generator().manual_seed(0))
    options = sharp(3, "inputs", "cosine")
    ours = kernels.contrastive_divergence(x, weight, 1, options, lambda z: None)
    assert ours is not None
    assert ours[0] == votefree.contrastive_divergence(x, weight, 1, options, lambda z: None)[0]


@pytest.mark.usefixtures("fresh")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_plain("there is no C compiler", monkeypatch)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("told", "reason"), [("no-such-compiler -x", "which is not there"), ('cc "', "which is no command")]
)
def test_no_such_compiler(told: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", told)
    assert_plain(f"$CC is {told!r}, {reason}", monkeypatch)


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_hangs_is_called_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(lanes, "PATIENCE", 0.2)
    monkeypatch.setenv("CC", compiler(tmp_path, f"echo called >> {tmp_path}/calls; exec sleep 5"))
    for sizes in ((16, 8), (3, 2)):
        assert lanes.obstacle(*sizes) == "the C compiler took longer than 0 s"
    assert (tmp_path / "calls").read_text().split() == ["called"]


@pytest.mark.usefixtures("fresh")
def test_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert_plain("the CPU has no AVX-512, or PyTorch was told not to use it", monkeypatch)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo strange; test $1 = --version && exit; echo x.c: error: no luck >&2; exit 1",
            "failed: x.c: error: no luck",
        ),
        ("exit 3", "failed: it ended with status 3"),
        ("test $1 = --version && exit; exit 0", "nothing could be compiled"),
        ('test $1 = --version && exit; exec c++ "$@"', "what was made is not compiled C"),
    ],
)
def test_a_broken_compiler(script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = kernels.describe("cpu")
    assert said.startswith("cpu: plain PyTorch without votes, because ")
    assert reason in said
    assert "\n" not in said
    assert_plain(said.partition("because ")[2], monkeypatch)


@needs_lanes
@pytest.mark.usefixtures("fresh")
def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernels.describe("cpu").startswith("cpu: C for AVX-512 without votes, by ")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lanes._library.cache_clear()
    assert lanes.obstacle(3, 2) is None
    (kept,) = (tmp_path / "poecaps" / "lanes").iterdir()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    lanes._library.cache_clear()

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_compile", refuse)
        assert lanes.obstacle(3, 2) is None


@needs_lanes
def test_what_is_damaged_is_compiled_again(tmp_path: Path) -> None:
    """A library that was cut off would end the process that opens it."""
    for share in (0.9, 0.5, 0.01):
        done = run(
            "from poecaps.kernels import lanes; assert lanes.obstacle(3, 2) is None", XDG_CACHE_HOME=str(tmp_path)
        )
        assert done.returncode == 0, done.stderr
        (kept,) = (tmp_path / "poecaps" / "lanes").iterdir()
        assert kept.stat().st_size > 1000
        kept.write_bytes(kept.read_bytes()[: int(share * kept.stat().st_size)])


@needs_lanes
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", ["a file", "not ours alone", "full"])
def test_a_cache_that_cannot_be_written(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "poecaps" / "lanes"
    if kind == "a file":
        folder.parent.write_text("")
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777 if kind == "not ours alone" else 0o700)
    if kind == "full":
        make = tempfile.mkstemp

        def refuse(**options: Any) -> tuple[int, str]:
            if options["dir"] == folder:
                raise OSError("no space left")
            return make(**options)

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert lanes.obstacle(2, 3) is None
    assert not folder.is_dir() or not list(folder.iterdir())


@needs_lanes
def test_processes_that_compile_the_same(tmp_path: Path) -> None:
    script = "from poecaps.kernels import lanes; assert lanes.obstacle(2, 2) is None, lanes.obstacle(2, 2)"
    with ThreadPoolExecutor(3) as starters:
        done = list(starters.map(lambda _: run(script, XDG_CACHE_HOME=str(tmp_path)), range(3)))
    assert [each.returncode for each in done] == [0, 0, 0], done
    assert len(list((tmp_path / "poecaps" / "lanes").iterdir())) == 1


@needs_lanes
def test_the_source_gives_no_warning(tmp_path: Path) -> None:
    found = lanes._compiler()
    assert found is not None
    sizes = ["-DD=17", "-DK=5", f"-DTILE={lanes.TILE}"]
    command = [*found, *lanes.FLAGS, "-Wall", "-Wextra", "-Werror", *sizes, str(lanes.SOURCE), "-o", "lanes.so", "-lm"]
    if "clang" in found[0]:
        command.append("-Wno-unknown-pragmas")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
