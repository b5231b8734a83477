"""The compiled backend gives the reference's results, and says why where it cannot run."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from poecaps import functional as F
from poecaps.kernels import cpu, torch_routing
from poecaps.kernels.cpu import build, routing
from poecaps.kernels.torch_routing import many_to_few
from tests.kernels.problems import (
    OPTIONS,
    PARTLY_FULL_SIZES,
    assert_learned,
    assert_routed,
    gradient,
    learned,
    needs_simd,
    options,
    problem,
    relative_error,
    routed,
)
from tests.systems import needs_fork, needs_timer, needs_unix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = [*PARTLY_FULL_SIZES, (18, 23, 17, 2, 1)]
COMPILERS = ("gcc", "clang")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        build._library.cache_clear()
        yield
    build._library.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Unload all libraries, before and after."""
    build._library.cache_clear()
    yield
    build._library.cache_clear()
    build._timeouts.clear()


@pytest.fixture
def unoptimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile quickly what is not run."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    routing._pool().shutdown()
    routing._pool.cache_clear()


def competition(weight: Tensor) -> dict[str, Any]:
    """Let about two thirds of the experts win."""
    experts = weight.shape[1]
    return {"winners": max(1, 2 * experts // 3), "balance": torch.linspace(0, 1, experts)}


# ------------------------------------------------------------------------------------------------
# Results


@needs_simd
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
    assert_routed(cpu, *problem(sizes, generator), options(iterations, normalize, agreement))


@needs_simd
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
@pytest.mark.parametrize("competing", [False, True])
def test_learning(
    sizes: tuple[int, ...],
    iterations: int,
    k: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    competing: bool,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    given = competition(weight) if competing else {}
    assert_learned(cpu, x, weight, options(iterations, normalize, agreement), k=k, **given)


@needs_simd
@pytest.mark.parametrize(("dim", "out_dim"), [(64, 64), (1, 16), (5, 64), (17, 5)])
@pytest.mark.parametrize("normalize", F.AXES)
def test_short_and_long_capsules(
    dim: int, out_dim: int, normalize: F.Axis, generator: torch.Generator
) -> None:
    x, weight = problem((19, 21, dim, 3, out_dim), generator)
    assert_routed(cpu, x, weight, options(3, normalize, "cosine"))
    assert_learned(cpu, x, weight, options(3, normalize, "cosine"), **competition(weight))


@needs_simd
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_several_blocks(
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The winners of each block are those that the plain version finds."""
    monkeypatch.setattr(routing, "BLOCK", 32)
    monkeypatch.setattr(many_to_few, "BLOCK", 32)
    x, weight = problem((32 + 32 + 5, 19, 8, 5, 16), generator)
    given = options(3, normalize, agreement)
    assert_routed(cpu, x, weight, given)
    assert_learned(cpu, x, weight, given, k=2, **competition(weight))
    ours, theirs = (
        learned(backend, x, weight, given, **competition(weight)).on
        for backend in (cpu, torch_routing)
    )
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)


@needs_simd
@pytest.mark.parametrize("block", [16, 48, 128])
def test_the_block_size_changes_no_bit(
    block: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = problem((70, 19, 8, 5, 16), generator)
    whole = learned(cpu, x, weight, options(3, "inputs", "cosine"), **competition(weight))
    monkeypatch.setattr(routing, "BLOCK", block)
    split = learned(cpu, x, weight, options(3, "inputs", "cosine"), **competition(weight))
    assert torch.equal(gradient(split), gradient(whole))


@needs_simd
def test_many_coefficients_are_computed_for_fewer_images_at_once(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "COEFFICIENT_BYTES", 1)
    x, weight = problem((40, 9, 8, 5, 16), generator)
    assert_routed(cpu, x, weight, options(3, "inputs", "cosine"))
    assert_learned(cpu, x, weight, options(3, "inputs", "cosine"))


@needs_simd
@pytest.mark.parametrize(
    ("sharpness", "agreement"), [(5.0, "cosine"), (200.0, "cosine"), (1.0, "inner")]
)
def test_votes_that_are_not_cached(
    sharpness: float,
    agreement: F.Agreement,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "THREAD_VOTE_BYTES", 0)
    x, weight = problem((18, 37, 8, 3, 16), generator)
    given = F.RoutingOptions(3, sharpness, "inputs", agreement)
    assert_routed(cpu, x, weight, given, 1e-4 if sharpness > 100 else 1e-5)


@needs_simd
@pytest.mark.parametrize("normalize", F.AXES)
@pytest.mark.parametrize("agreement", F.AGREEMENTS)
def test_sharp_routing_does_not_overflow(
    normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    """Logits of a thousand amplify rounding errors: the plain version sets the bound."""
    x, weight = problem((18, 30, 8, 5, 16), generator)
    given = F.RoutingOptions(3, 500.0, normalize, agreement)
    exact = routed(F, x.double(), weight.double(), given)
    theirs, ours = routed(torch_routing, x, weight, given), routed(cpu, x, weight, given)
    assert ours.preactivation.isfinite().all()
    total = ours.coefficients.sum(1 if normalize == "inputs" else 2)
    torch.testing.assert_close(total, torch.ones_like(total))
    bound = 1e-4 + 3 * relative_error(theirs.coefficients, exact.coefficients)
    assert relative_error(ours.coefficients, exact.coefficients) < bound


@needs_simd
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(
    normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem((5, 13, 8, 3, 16), generator)
    x[:, 2] = 0
    x[1] = 0
    weight[:, 1] = 0
    assert_routed(cpu, x, weight, options(3, normalize, agreement))
    given = competition(weight)
    assert_learned(cpu, x, weight, options(3, normalize, agreement), k=2, **given)


@needs_simd
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e-12, 1e12, 1e18, 1e25])
@pytest.mark.parametrize("sharpness", [5.0, 29.0])
@pytest.mark.parametrize("normalize", F.AXES)
def test_extreme_votes(
    size: float, sharpness: float, normalize: F.Axis, generator: torch.Generator
) -> None:
    """Votes too short or too long to be squared are routed no worse than by the plain version."""
    x, weight = problem((5, 40, 8, 3, 16), generator)
    given = F.RoutingOptions(2, sharpness, normalize, "cosine")
    exact = routed(F, x.double(), weight.double() * size, given)
    theirs, ours = (routed(backend, x, weight * size, given) for backend in (torch_routing, cpu))
    for our, their, true in (
        (ours.coefficients, theirs.coefficients, exact.coefficients),
        (ours.preactivation, theirs.preactivation, exact.preactivation),
    ):
        assert relative_error(our, true) < max(1e-5, 1.01 * relative_error(their, true))
    step, plain = (learned(backend, x, weight * size, given) for backend in (cpu, torch_routing))
    assert step.loss.isfinite() or not plain.loss.isfinite()
    assert gradient(step).isfinite().all() or not gradient(plain).isfinite().all()


@needs_simd
@pytest.mark.parametrize("normalize", F.AXES)
def test_votes_that_almost_cancel(normalize: F.Axis, generator: torch.Generator) -> None:
    """A mixture too short to be squared, of votes that barely can be, has a direction."""
    x, weight = problem((5, 2, 8, 3, 16), generator)
    x[:, 1], weight[1] = x[:, 0], -weight[0] * (1 - 2**-10)
    assert_routed(cpu, x, weight * 1e-17, F.RoutingOptions(3, 5.0, normalize, "cosine"), 1e-3)


@needs_simd
@pytest.mark.parametrize("normalize", F.AXES)
def test_the_workspace_of_another_call_does_not_matter(
    normalize: F.Axis, generator: torch.Generator
) -> None:
    x, weight = problem((21, 13, 5, 3, 17), generator)
    given = options(3, normalize, "cosine")
    first = learned(cpu, x, weight, given, k=2, **competition(weight))
    (workspace,) = routing._spare_workspaces
    workspace.fill_(torch.nan)
    again = learned(cpu, x, weight, given, k=2, **competition(weight))
    assert torch.equal(first.loss, again.loss)
    assert torch.equal(gradient(first), gradient(again))


@needs_simd
def test_a_large_workspace_is_not_kept(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = problem((21, 13, 5, 3, 17), generator)
    given = options(3, "inputs", "cosine")
    learned(cpu, x, weight, given)
    assert len(routing._spare_workspaces) == 1
    cpu.release_workspace()
    assert routing._spare_workspaces == []
    monkeypatch.setattr(routing, "SPARE_BYTES", 1000)
    learned(cpu, x, weight, given)
    assert routing._spare_workspaces == []


@needs_simd
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_nan_is_not_hidden(
    where: str, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem((5, 13, 8, 3, 16), generator)
    with_payload = torch.tensor(0x7FC01234, dtype=torch.int32).view(torch.float32)
    (x if where == "x" else weight)[1, 1, ...] = with_payload
    for iterations in (1, 3):
        given = options(iterations, normalize, agreement)
        exact, ours = (routed(backend, x, weight, given) for backend in (F, cpu))
        assert torch.equal(ours.preactivation.isnan(), exact.preactivation.isnan())
        step = learned(cpu, x, weight, given)
        assert step.loss.isnan()
        assert gradient(step).isnan().any()


@needs_simd
def test_tensors_with_other_strides(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = problem((18, 13, 8, 3, 16), generator)
    strided_x = x.transpose(0, 2).contiguous().transpose(0, 2)[:, ::2]
    strided_weight = weight.transpose(1, 3).contiguous().transpose(1, 3)[::2]
    assert not strided_x.is_contiguous()
    assert not strided_weight.is_contiguous()
    assert_routed(cpu, strided_x, strided_weight, options(3, "inputs", "cosine"))
    given = competition(weight)
    assert_learned(cpu, strided_x, strided_weight, options(3, "outputs", "cosine"), **given)
    image, expert = torch.arange(18).unsqueeze(1), torch.arange(3)
    mask = ((image + expert) % 3 != 0).T.contiguous().T.float()
    monkeypatch.setattr(F, "winning_experts", lambda *_, **__: mask)
    assert_learned(cpu, x, weight, options(3, "inputs", "cosine"), winners=2)


# ------------------------------------------------------------------------------------------------
# Threads and processes


@needs_simd
@pytest.mark.parametrize("normalize", F.AXES)
@pytest.mark.usefixtures("three_threads")
def test_threads_change_no_bit(normalize: F.Axis, generator: torch.Generator) -> None:
    x, weight = problem((70, 101, 8, 5, 16), generator)

    def learn() -> F.LearningStep:
        given = options(3, normalize, "cosine")
        return learned(cpu, x, weight, given, k=2, **competition(weight))

    parallel = [learn() for _ in range(5)]
    torch.set_num_threads(1)
    sequential = learn()
    for each in parallel:
        assert torch.equal(each.loss, sequential.loss)
        assert torch.equal(gradient(each), gradient(sequential))


@needs_simd
@pytest.mark.usefixtures("three_threads")
def test_concurrent_calls(generator: torch.Generator) -> None:
    problems = [problem((20 + n, 50, 8, 5, 16), generator) for n in range(4)]

    def learn(x: Tensor, weight: Tensor) -> F.LearningStep:
        given = options(3, "inputs", "cosine")
        return learned(cpu, x, weight, given, **competition(weight))

    expected = [learn(*each) for each in problems]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda n: learn(*problems[n % 4]), range(40)))
    for n, each in enumerate(found):
        assert torch.equal(each.loss, expected[n % 4].loss)
        assert torch.equal(gradient(each), gradient(expected[n % 4]))


@needs_simd
@pytest.mark.usefixtures("three_threads")
def test_an_exception_in_a_thread_is_raised(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    x, weight = problem((20, 50, 8, 5, 16), generator)

    class Pool(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            def fail() -> None:
                raise MemoryError("no more")

            future = super().submit(fail)
            future.exception()  # it has started, and cannot be cancelled
            return future

    pool = Pool(1)
    monkeypatch.setattr(routing, "_pool", lambda: pool)
    with pytest.raises(MemoryError, match="no more"):
        routed(cpu, x, weight, options(3, "inputs", "cosine"))
    pool.shutdown()
    monkeypatch.undo()
    assert_routed(cpu, x, weight, options(3, "inputs", "cosine"))


@needs_simd
@pytest.mark.usefixtures("three_threads")
def test_a_pool_that_is_shut_down(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """As when the interpreter exits."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(routing, "_pool", lambda: pool)
    assert_routed(cpu, *problem((20, 50, 8, 5, 16), generator), options(3, "inputs", "cosine"))
    monkeypatch.undo()


@needs_simd
@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
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
    monkeypatch.setattr(routing, "_pool", lambda: pool)
    x, weight = problem((20, 50, 8, 5, 16), generator)
    given = options(3, "inputs", "cosine")
    assert_learned(cpu, x, weight, given, k=2, **competition(weight))
    assert len(submitted) == 4
    pool.shutdown()


@needs_simd
@pytest.mark.usefixtures("three_threads")
def test_an_interrupt_while_other_threads_work(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Their memory is held until they are done, and not given to the next call."""
    held: list[weakref.ref[torch.Tensor]] = []
    begin, others = threading.Event(), ThreadPoolExecutor(1)

    class Pool:
        def submit(self, work: Any, number: int) -> Any:
            def later() -> None:
                begin.wait()
                work(number)

            futures.append(others.submit(later))
            raise KeyboardInterrupt

    class Batch(routing._Batch):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            held.append(weakref.ref(self.workspace))

    futures: list[Any] = []
    x, weight = problem((20, 50, 8, 5, 16), generator)
    given = options(3, "inputs", "cosine")
    cpu.release_workspace()
    with monkeypatch.context() as patch:
        patch.setattr(routing, "_pool", Pool)
        patch.setattr(routing, "_Batch", Batch)
        with pytest.raises(KeyboardInterrupt):
            learned(cpu, x, weight, given)
    gc.collect()
    assert held[0]() is not None
    assert routing._spare_workspaces == []
    begin.set()
    futures[0].result()
    others.shutdown()
    assert_learned(cpu, x, weight, given, **competition(weight))


def route_at_length(x: Tensor, weight: Tensor) -> None:
    routing.route(x, weight, options(LONG, "outputs", "cosine"))


def learn_at_length(x: Tensor, weight: Tensor) -> None:
    learned(cpu, x, weight, options(1, "outputs", "cosine"), k=LONG)


def go_back_at_length(x: Tensor, weight: Tensor) -> None:
    z = torch.ones(LONG, len(x), *weight.shape[1:3])
    go_back(x, weight, z, z[0], options(LONG, "outputs", "cosine"))


def go_back(
    x: Tensor, weight: Tensor, z: Tensor, grad_z: Tensor, given: F.RoutingOptions
) -> list[Tensor]:
    """Return the gradients in x and in the weight."""
    needed = {"needs_grad_x": True, "needs_grad_weight": True}
    found = routing.routing_backward(x, weight, z, grad_z, None, given, **needed)
    return [each for each in found if each is not None]


LONG = 30_000  # passes that take some milliseconds each


@needs_simd
@needs_timer
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("compute", [route_at_length, learn_at_length, go_back_at_length])
def test_an_interrupt_ends_one_long_call(
    compute: Callable[[Tensor, Tensor], None], threads: int, generator: torch.Generator
) -> None:
    """All threads stop; the whole call would take minutes."""
    torch.set_num_threads(threads)
    x, weight = problem((1, 100_000, 4, 2, 4), generator)
    assert cpu.why_not(x, weight) is None  # it is compiled
    is_late = threading.Event()
    watch = threading.Timer(30, is_late.set)  # far more than the moment until the interrupt
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    watch.start()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            compute(x, weight)
        routing._pool().shutdown()  # waits for the threads
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watch.cancel()
    assert not is_late.is_set()


@needs_simd
@pytest.mark.usefixtures("fresh", "three_threads")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("normalize", F.AXES)
def test_calls_that_return_after_every_task_change_no_bit(
    normalize: F.Axis, threads: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    x, weight = problem((70, 60, 8, 5, 16), generator)
    given, grad_z = options(3, normalize, "cosine"), torch.randn(70, 5, 16, generator=generator)

    def results() -> list[Tensor]:
        step = learned(cpu, x, weight, given, k=2, **competition(weight))
        routed = routing.route(x, weight, given)
        back = go_back(x, weight, routed.preactivations, grad_z, given)
        return [step.loss, gradient(step), routed.coefficients, routed.preactivations, *back]

    expected = results()
    torch.set_num_threads(threads)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMAX_SECONDS=0"))
    build._library.cache_clear()
    for found, each in zip(results(), expected, strict=True):
        assert torch.equal(found, each)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = dict(os.environ) | environment
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=found, capture_output=True, text=True, timeout=120)


@needs_simd
@needs_fork
def test_a_forked_child_learns_too() -> None:
    done = run("""
        import os, threading, torch
        from poecaps.functional import RoutingOptions
        from poecaps.kernels import cpu
        torch.set_num_threads(2)
        x, weight = torch.rand(40, 30, 8) / 8, torch.rand(30, 5, 16, 8, requires_grad=True)
        options = dict(k=1, mixing="deterministic", uniform=None, chain=None)
        options |= dict(winners=None, balance=None, views=1)
        routing = RoutingOptions(3, 5.0)
        learn = lambda: cpu.contrastive_divergence(x, weight, routing, **options).loss.item()
        before = learn()
        child = os.fork()
        if not child:
            same = learn() == before
            helped = any(each.name.startswith("poecaps-simd") for each in threading.enumerate())
            os._exit(0 if same and helped else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert learn() == before
    """)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------
# Calls that it can serve


@needs_simd
def test_tensors_that_are_not_plain_memory(generator: torch.Generator) -> None:
    class Subclass(torch.Tensor):
        pass

    def why_not(x: Tensor) -> str | None:
        return cpu.why_not(x, weight)

    x, weight = problem((64, 50, 8, 5, 16), generator)
    assert why_not(x) is None
    assert "plain tensors" in str(why_not(x.as_subclass(Subclass)))
    assert "plain tensors" in str(why_not(torch._neg_view(x)))
    with FlopCounterMode(display=False):
        assert "plain tensors" in str(why_not(x))
    assert "must agree in I and K" in str(why_not(x[:, :49]))
    assert "must agree in I and K" in str(why_not(x[:, :, :7]))
    with torch.device("meta"):
        result = routed(cpu, x, weight, options(3, "inputs", "cosine"))
    assert result.preactivation.isfinite().all()


@needs_simd
def test_calls_that_it_cannot_serve() -> None:
    def why_not(x: Tensor, weight: Tensor) -> str:
        return str(cpu.why_not(x, weight))

    x, weight = torch.zeros(4, 6, 8), torch.zeros(6, 3, 16, 8)
    assert cpu.why_not(x, weight) is None
    assert "float32 on a CPU" in why_not(x.double(), weight.double())
    assert "dimension 64" in why_not(torch.zeros(99, 6, 65), torch.zeros(6, 3, 16, 65))
    assert "dimension 64" in why_not(torch.zeros(99, 6, 8), torch.zeros(6, 3, 65, 8))
    assert why_not(x.double(), weight.double()).endswith("use backend='torch'")


def test_small_calls_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(4, 6, 8), torch.zeros(6, 3, 16, 8)
    assert not cpu.pays(x, weight)
    monkeypatch.setattr(routing, "MIN_MULTIPLICATIONS", x.shape[0] * weight.numel())
    assert cpu.pays(x, weight)
    assert not cpu.pays(x[:3], weight)


# ------------------------------------------------------------------------------------------------
# Compiling


def compiler(folder: Path, script: str) -> str:
    path = folder / "some-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def assert_unavailable(reason: str) -> None:
    assert cpu.why_not_compiled() == reason
    assert cpu.compiler_version() is None
    x, weight = torch.zeros(4, 6, 8), torch.zeros(6, 3, 16, 8)
    assert cpu.why_not(x, weight) == f"{reason}; use backend='torch'"


@needs_unix
@pytest.mark.usefixtures("fresh")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_unavailable("no C compiler is found")
    with pytest.raises(RuntimeError, match="no C compiler is found"):
        build.library(16, 8)


@needs_unix
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("command", "reason"),
    [("no-such-compiler -x", "which is not found"), ('cc "', "which is not a valid command")],
)
def test_no_such_compiler(command: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", command)
    assert_unavailable(f"$CC is {command!r}, {reason}")


@needs_unix
@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_hangs_is_called_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(build, "TIMEOUT", 0.2)
    monkeypatch.setenv("CC", compiler(tmp_path, f"echo called >> {tmp_path}/calls; exec sleep 5"))
    for sizes in ((16, 8), (3, 2)):
        assert cpu.why_not_compiled(*sizes) == "the C compiler took longer than 0 s"
    assert (tmp_path / "calls").read_text().split() == ["called"]


@needs_unix
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo strange; test $1 = --version && exit; echo x.c: error: no luck >&2; exit 1",
            "failed: x.c: error: no luck",
        ),
        ("exit 3", "failed: exit status 3"),
        ("test $1 = --version && exit; exit 0", "the C source cannot be compiled"),
        ('test $1 = --version && exit; exec c++ "$@" -O0', "lacks the functions of routing.c"),
    ],
)
def test_a_broken_compiler(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    message = cpu.why_not_compiled()
    assert message is not None
    assert reason in message
    assert "\n" not in message
    assert_unavailable(message)


@needs_simd
@pytest.mark.usefixtures("fresh", "unoptimized")
def test_libraries_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cpu.compiler_version()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._library.cache_clear()
    assert cpu.why_not_compiled(3, 2) is None
    (cached,) = (tmp_path / "poecaps" / "simd").iterdir()
    assert cached.name.startswith("simd-3-2-")
    assert stat.S_IMODE(cached.parent.stat().st_mode) == 0o700
    build._library.cache_clear()

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", refuse)
        assert cpu.why_not_compiled(3, 2) is None


@needs_simd
@pytest.mark.usefixtures("fresh", "unoptimized")
def test_a_damaged_library_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Loading a truncated library would end the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.why_not_compiled(3, 2) is None
    (cached,) = (tmp_path / "poecaps" / "simd").iterdir()
    whole = cached.read_bytes()
    for share in (0.9, 0.01):
        cached.unlink()  # this process has mapped it
        cached.write_bytes(whole[: int(share * len(whole))])
        build._library.cache_clear()
        assert cpu.why_not_compiled(3, 2) is None
        assert cached.read_bytes() == whole


@needs_simd
@pytest.mark.usefixtures("fresh", "unoptimized")
@pytest.mark.parametrize("kind", ["a file", "writable by others", "full"])
def test_a_cache_that_cannot_be_used(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "poecaps" / "simd"
    if kind == "a file":
        folder.parent.write_text("")
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777 if kind == "writable by others" else 0o700)
    if kind == "full":
        make = tempfile.mkstemp

        def refuse(**options: Any) -> tuple[int, str]:
            if options["dir"] == folder:
                raise OSError("no space left")
            return make(**options)

        monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert cpu.why_not_compiled(2, 3) is None
    assert not folder.is_dir() or not list(folder.iterdir())


@needs_simd
def test_processes_that_compile_the_same(tmp_path: Path) -> None:
    script = "from poecaps.kernels import cpu; assert cpu.why_not_compiled(2, 2) is None"
    with ThreadPoolExecutor(2) as starters:
        done = list(starters.map(lambda _: run(script, XDG_CACHE_HOME=str(tmp_path)), range(2)))
    assert [each.returncode for each in done] == [0, 0], done
    assert len(list((tmp_path / "poecaps" / "simd").iterdir())) == 1


@needs_simd
@pytest.mark.parametrize("compiler", ["$CC", *COMPILERS])
@pytest.mark.parametrize("target", [pytest.param(each, id=each.name) for each in build.targets()])
def test_the_source_gives_no_warning(compiler: str, target: build.Target, tmp_path: Path) -> None:
    found = build._compiler() if compiler == "$CC" else [compiler]
    path = shutil.which(found[0])
    if path is None:
        pytest.skip(f"{compiler} is not installed")
    others = [shutil.which(each) for each in COMPILERS]
    if compiler == "$CC" and any(each and Path(each).samefile(path) for each in others):
        pytest.skip("it is one of the others")
    output = [str(build.SOURCE), "-o", "routing.so", "-lm"]
    command = [*found, *build.options(17, 5, target), "-Wall", "-Wextra", "-Werror", *output]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
