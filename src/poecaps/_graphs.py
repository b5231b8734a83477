"""Functions of tensors that are captured once as a CUDA graph and then replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

T = TypeVar("T")

# Calls before the capture, in which libraries initialize and optimizers allocate their state.
WARMUP_CALLS = 3

# Replays for which a capture pays off.
MIN_REPLAYS = 50


class Graphed(Generic[T]):
    """A function that is captured once as a CUDA graph and then replayed.

    The host needs more time to launch many small kernels than the GPU needs to run them. A replay
    is a single launch, with the same results.

    Parameters
    ----------
    function
        Function of tensors on one GPU, of the same shapes in every call. It must not read a value
        of a tensor on the host.
    device
        The GPU.
    generator
        Source of the random numbers of the function, on the GPU; it may be seeded before each call.
        None: the function has none, or those of the default generator.
    """

    def __init__(
        self,
        function: Callable[..., T],
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> None:
        self.function, self.device, self.generator = function, device, generator
        self.stream = torch.cuda.Stream(device)
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._result: T | None = None

    def __call__(self, *inputs: Tensor) -> T:
        """Call the function; the next call overwrites the tensors that are returned."""
        if self._calls == WARMUP_CALLS:
            self._capture(*inputs)
        self._calls += 1
        if self._graph is None or self._result is None:
            return self._warm_up(*inputs)
        self._check_shapes(inputs)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result

    def _check_shapes(self, inputs: tuple[Tensor, ...]) -> None:
        captured = [tuple(each.shape) for each in self._inputs]
        given = [tuple(each.shape) for each in inputs]
        if given != captured:
            raise ValueError(
                f"the step was captured for inputs of shapes {captured}, but is given {given}; "
                "use batches of one size, for example a DataLoader with drop_last=True"
            )

    def _warm_up(self, *inputs: Tensor) -> T:
        """Call the function on the stream of the capture."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.function(*inputs)
        current.wait_stream(self.stream)
        return result

    def _capture(self, *inputs: Tensor) -> None:
        self._inputs = [each.clone() for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            self._graph.register_generator_state(self.generator)
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._result = self.function(*self._inputs)


def graphed(
    step: Callable[..., T],
    device: torch.device | str,
    *,
    generator: torch.Generator | None = None,
) -> Callable[..., T]:
    """Return a function that replays `step`, for example one step of training, as a CUDA graph.

    The host needs more time to launch the kernels of a small step than the GPU needs to run them. A
    CUDA graph launches all of them at once. The first three calls run `step` as it is, the fourth
    captures it, and all calls give the results of `step`.

    On a device other than a GPU, `step` itself is returned, so that one program runs on both: a CPU
    has no launches to save.

    Parameters
    ----------
    step
        Function of tensors, given by position, that have the same shapes in every call. Other
        values, such as a learning rate in a float, stay as they are in the capture. It must not
        read a value of a tensor on the host (``loss.item()``, ``if loss > 0``), and its optimizer
        needs ``capturable=True`` (Adam) or no state on the host (SGD).
    device
        The device of its tensors.
    generator
        Source of the random numbers of the step, on the GPU; None for the default generator.

    Returns
    -------
    Callable
        Has the parameters and results of `step`. The next call overwrites the tensors that it
        returns; read them, or clone them, before.

    Raises
    ------
    ValueError
        If the shapes of a call differ from those of the capture.

    Examples
    --------
    >>> step = poecaps.graphed(step, device)  # doctest: +SKIP
    >>> for x in batches:  # doctest: +SKIP
    ...     loss = step(x)
    """
    device = torch.device(device)
    return Graphed(step, device, generator) if device.type == "cuda" else step


def pays_off(calls: int, device: torch.device) -> bool:
    """Return whether a function that is called so many times on a device should be captured."""
    return device.type == "cuda" and calls >= WARMUP_CALLS + MIN_REPLAYS
