from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

# Set before torch is imported: the tests compute too little for several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests.processes import Commands
from tests.systems import HAS_FORK, WITHOUT_FORK

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# The key of the user, which marks the data of a run, is one of the tests.
STATE = tempfile.TemporaryDirectory(prefix="poecaps-state-")
os.environ["XDG_STATE_HOME"] = STATE.name

hypothesis.settings.register_profile(
    "poecaps",
    deadline=None,  # no test depends on time
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("poecaps")

# Files that take long, the longest first. They come before all others, so that the processes of
# `make test` end together.
LONG = (
    "test_browser.py",
    "test_documentation.py",
    "test_distributed.py",
    "test_triton_facts.py",
    "test_simd.py",
    "test_tabs.py",
    "test_sklearn.py",
    "test_layer.py",
    "test_sampling.py",
    "test_checkpoint.py",
    "test_train.py",
    "test_faults.py",
    "test_density.py",
    "test_operators.py",
    "test_server.py",
    "test_restarts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


MONOTONIC = time.monotonic


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """No test may replace the clock of the whole process.

    The event loop of a server in another thread would compute with it how long it can sleep, which
    may be hours, and would not see in time that it is to stop. Replace the name `time` in the
    module that is tested instead.
    """
    yield
    assert time.monotonic is MONOTONIC, "the test replaces time.monotonic for all modules"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260215)


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Commands in processes of their own; the process that starts them is started for the first."""
    if not HAS_FORK:
        pytest.skip(WITHOUT_FORK)
    with Commands() as started:
        yield started
