"""The cache of compiled code: whose files are loaded, and what happens without room for it."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from poecaps.kernels.cpu import build
from tests.kernels.problems import needs_simd
from tests.systems import needs_unix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; no library is loaded before or after. Nothing compiled is run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    build._library.cache_clear()
    yield tmp_path / "poecaps" / "simd"
    build._library.cache_clear()
    build._timeouts.clear()


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def writable_by_others(path: Path) -> None:
    path.chmod(0o775)


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@needs_simd
@pytest.mark.parametrize("alter", [of_another_user, writable_by_others, a_link])
def test_only_own_files_are_loaded(
    alter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest in the name of a file proves that it is whole, but not who wrote it."""
    assert build.why_not(3, 2) is None
    (library,) = cache.glob("*.so")
    compiled: list[str] = []
    compile_again = build._compile

    def count(command: list[str], folder: Path, name: str) -> Path:
        compiled.append(name)
        return compile_again(command, folder, name)

    monkeypatch.setattr(build, "_compile", count)
    build._library.cache_clear()
    assert build.why_not(3, 2) is None
    assert not compiled
    alter(library)
    build._library.cache_clear()
    assert build.why_not(3, 2) is None
    assert len(compiled) == 1


@needs_simd
def test_a_full_cache_disk_leaves_the_backend_usable(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler cannot write into the cache, but into the folder of temporary files."""
    run = build._run

    def full(command: list[str]) -> str:
        if any(word.startswith(str(cache)) for word in command):
            raise subprocess.CalledProcessError(
                1, command, "", "ld: error: No space left on device"
            )
        return run(command)

    monkeypatch.setattr(build, "_run", full)
    assert build.why_not(3, 2) is None
    assert not list(cache.iterdir())


@needs_unix
def test_a_compiler_that_hangs_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(build, "TIMEOUT", 0.5)
    assert build.why_not(3, 2) == "the C compiler took longer than 0 s"
    child = int((tmp_path / "child").read_text())
    for _ in range(500):  # until the system has removed it
        if not is_running(child):
            return
        time.sleep(0.01)
    raise AssertionError("the child of the compiler still runs")


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
