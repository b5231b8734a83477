"""A pytest plugin that runs every n-th test only, so that several processes can share a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

VARIABLE = "POECAPS_TEST_SHARD"  # such as 0/2, the first of two shards


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shard, count = map(int, os.environ[VARIABLE].split("/"))
    items[:] = items[shard::count]
