"""Learning steps that repeat recorded launches give the same results.

On a GPU, or else in Triton's interpreter, which `test_triton_facts` starts. The interpreter then
stands in for compiled kernels, which are given addresses in place of tensors.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import functional as F
from poecaps import squash
from poecaps.kernels.triton import launch, learning, plan, routing_forward
from poecaps.kernels.triton.plan import Plan
from tests.kernels.problems import problem

if TYPE_CHECKING:
    from collections.abc import Callable

IS_INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def at_address(address: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor at an address, of which only the address is used."""
    return torch.frombuffer((ctypes.c_byte * 8).from_address(address), dtype=dtype)


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter look like a GPU with compiled kernels."""
    monkeypatch.setattr(learning, "_plans", {})
    monkeypatch.setattr(learning, "PLAN_STEPS", True)
    monkeypatch.setattr(learning, "REPLAY_STEPS", False)
    if not IS_INTERPRETED:
        return
    by_triton = launch._launch_by_triton

    def launch_by_triton(kernel: Any, grid: Any, arguments: Any, *others: Any) -> Any:
        by_triton(kernel, grid, arguments, *others)
        dtypes = [each.dtype for each in arguments if isinstance(each, Tensor)]

        def run(x: int, y: int, z: int, *values: Any) -> None:
            pointers, rest = values[6 : 6 + len(dtypes)], values[6 + len(dtypes) :]
            tensors = map(at_address, pointers, dtypes)
            kernel[(x, y, z)](*tensors, *rest)

        return SimpleNamespace(run=run, function=None, packed_metadata=None)

    monkeypatch.setattr(launch, "_launch_by_triton", launch_by_triton)
    monkeypatch.setattr(launch, "_check_numbers", lambda *_: None)
    monkeypatch.setattr(launch, "_can_reuse", lambda: True)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for every repetition whether it was possible."""
    noted: list[bool] = []
    repeat = Plan.repeat

    def note(plan: Plan, *arguments: Tensor) -> Tensor | None:
        part = repeat(plan, *arguments)
        noted.append(part is not None)
        return part

    monkeypatch.setattr(Plan, "repeat", note)
    return noted


def assert_learned(x: Tensor, weight: Tensor, routing: F.RoutingOptions, **given: Any) -> None:
    ours = learning.contrastive_divergence(x, weight.requires_grad_(), routing, **given)
    with torch.no_grad():
        exact = F.contrastive_divergence(x.double(), weight.double(), routing, **given)
    assert ours.grad_weight is not None
    assert exact.grad_weight is not None
    # With a sharpness of 100, the rounding of an agreement, up to 6e-8, changes its coefficient by
    # 6e-6 of its value, in each iteration.
    bound = 1e-5 * max(1.0, routing.sharpness / 20)
    assert ((ours.grad_weight - exact.grad_weight).norm() / exact.grad_weight.norm()).item() < bound
    torch.testing.assert_close(ours.loss.double(), exact.loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "options", "k", "keep"),
    [
        ((16, 3, 2, 2, 3), {}, 1, True),
        ((16, 3, 2, 2, 3), {"normalize": "outputs", "agreement": "inner"}, 2, True),
        ((16, 2, 3, 3, 2), {"iterations": 2}, 1, True),  # more experts than inputs
        ((16, 3, 2, 2, 3), {"sharpness": 100.0}, 1, False),  # with the maximum of the logits
        ((16, 2, 2, 2, 2), {"iterations": 1}, 1, True),
    ],
)
def test_repeated_steps_are_those_of_the_reference(
    sizes: tuple[int, ...],
    options: dict[str, Any],
    k: int,
    keep: bool,
    repeats: list[bool],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of other data and weights than those that were recorded."""
    if not keep:
        monkeypatch.setattr(routing_forward, "KEEP_LOGITS_BYTES", 0)
    routing = F.RoutingOptions(**options)
    for _ in range(4):
        x, weight = (each.to(DEVICE) for each in problem(sizes, generator))
        assert_learned(x, weight, routing, k=k)
    assert repeats == [True, True]


def test_only_steps_of_the_same_kind_are_repeated(
    repeats: list[bool], generator: torch.Generator
) -> None:
    x, weight = (each.to(DEVICE) for each in problem((32, 2, 2, 2, 2), generator))
    routing = F.RoutingOptions()
    steps: list[Callable[[], None]] = [
        lambda: assert_learned(x[16:], weight, routing),
        lambda: assert_learned(x, weight, routing),
        lambda: assert_learned(x[16:], weight, F.RoutingOptions(sharpness=2.0)),
        lambda: assert_learned(x[16:], weight, routing, k=2),
        lambda: assert_learned(x[16:], weight, routing, winners=1),  # never repeated
        lambda: assert_learned(x[:15], weight, routing),  # never repeated
    ]
    for step in steps[:4]:
        step()
        step()
    assert repeats == []
    for step in steps:
        step()
    assert repeats == [True] * 4
    repeats.clear()
    weight.requires_grad_(False)
    losses = [learning.contrastive_divergence(x[16:], weight, routing).loss for _ in range(3)]
    assert repeats == [True]
    assert losses[2].equal(losses[0])


def test_blocks_of_a_large_batch_are_repeated(
    repeats: list[bool], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block writes the gradient, and the others add to it."""
    monkeypatch.setattr(learning, "MIN_BLOCK_IMAGES", 16)
    monkeypatch.setattr(learning, "BLOCK_LOGITS_BYTES", 16 * 4 * 2 * 2)
    for _ in range(3):
        x, weight = (each.to(DEVICE) for each in problem((48, 2, 2, 2, 2), generator))
        assert_learned(x, weight, F.RoutingOptions())
    assert repeats == [True] * 5  # two blocks of the second step, three of the third


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Allow one graph, after one repetition, and note which graph is replayed."""
    monkeypatch.setattr(learning, "REPLAY_STEPS", True)
    monkeypatch.setattr(learning, "REPLAY_AFTER", 1)
    monkeypatch.setattr(learning, "MAX_REPLAYS", 1)
    monkeypatch.setattr(learning, "_replays", {})
    monkeypatch.setattr(learning, "_repetitions", {})
    noted: list[int] = []
    numbers: list[int] = []
    capture = _interpreted_capture if IS_INTERPRETED else plan.captured

    def captured(function: Callable[[], Tensor], device: torch.device) -> Any:
        result, replay = capture(function, device)
        number = len(numbers)
        numbers.append(number)

        def note() -> None:
            noted.append(number)
            replay()

        return result, note

    monkeypatch.setattr(plan, "captured", captured)
    if IS_INTERPRETED:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return noted


def _interpreted_capture(function: Callable[[], Tensor], _: torch.device) -> Any:
    """Call the function again in a replay, and write to the memory of its first result."""
    result = function()

    def replay() -> None:
        result.copy_(function())

    return result, replay


def test_replayed_steps_are_those_of_the_reference(
    replays: list[int], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other data, and of a weight that changes in place; earlier results stay as they are.

    Another weight and another thread have no part in the graph, and a large step has none.
    """
    sizes, routing = (16, 2, 2, 2, 2), F.RoutingOptions(iterations=1)
    weight = problem(sizes, generator)[1].to(DEVICE).requires_grad_()
    found = []
    for _ in range(5):
        x = problem(sizes, generator)[0].to(DEVICE)
        with torch.no_grad():
            weight.mul_(1.1)
            exact = F.contrastive_divergence(x.double(), weight.double(), routing)
        found.append((learning.contrastive_divergence(x, weight, routing), exact))
    assert replays == [0, 0]  # after two steps that record the plan, and a repetition
    for ours, exact in found:
        assert ours.grad_weight is not None
        torch.testing.assert_close(
            ours.grad_weight.double(), exact.grad_weight, rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(ours.loss.double(), exact.loss, rtol=1e-4, atol=1e-6)

    other = weight.detach().clone()
    for _ in range(2):
        assert_learned(x, other, routing)  # there is one graph already
    thread = threading.Thread(target=assert_learned, args=(x, weight, routing))
    thread.start()
    thread.join()
    assert replays == [0, 0]
    monkeypatch.setattr(learning, "REPLAY_LIFE", -1)
    assert_learned(x, other, routing)  # takes the place of the first one
    monkeypatch.setattr(learning, "MAX_REPLAY_BYTES", 0)
    assert_learned(x, other, routing)
    assert replays == [0, 0, 1]


def test_addresses_that_kernels_were_not_compiled_for(
    repeats: list[bool], generator: torch.Generator
) -> None:
    """A step with them is launched as if there were no plan."""
    x, weight = (each.to(DEVICE) for each in problem((16, 2, 2, 2, 2), generator))
    for _ in range(3):
        assert_learned(x, weight, F.RoutingOptions())
    shifted = squash(torch.randn(65, generator=generator)).to(DEVICE)[1:].view(16, 2, 2)
    assert shifted.data_ptr() % 16 != 0
    assert_learned(shifted, weight, F.RoutingOptions())
    assert repeats == [True, False]
