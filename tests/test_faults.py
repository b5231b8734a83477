"""Crashes, full disks and flipped bits, systematically: nothing is lost, nothing changes silently.

`make faults` does the same with more calls and bits.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork, ModelError, _files, card, plotting, serialization
from poecaps.cli import info
from poecaps.cli import train as cli_train
from poecaps.training import TrainingError, record, resume, resume_training, train
from poecaps.training.checkpoint import CHECKPOINT, PREVIOUS, CheckpointWarning
from poecaps.training.metrics import METRICS
from tests.faults import FAULTS, READ_FAULTS, Faults, config, images
from tests.networks import TINY
from tests.systems import needs_flock, needs_fork, needs_links, needs_timer, needs_unix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SAMPLE = 300  # random bits of a file


@needs_fork  # also of a folder that is flushed, which Windows has not
@pytest.mark.parametrize(
    ("faults", "every"), [(["killed"], 1), ([name for name in FAULTS if name != "killed"], 7)]
)
def test_a_training_that_fails_at_any_call_ends_as_if_nothing_had_happened(
    faults: list[str], every: int
) -> None:
    """In another process, which is forked to be killed."""
    calls = ["write", "ftruncate", "fsync", "replace", "link", "mkdir"]
    command = [sys.executable, "-m", "tests.faults", "--every", str(every), "--fault", *faults]
    command += ["--calls", *calls]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    # A disk that cannot read, and memory that is missing, are faults of a resumed run as well.
    expected = [name for name in faults for _ in range(1 + (name in READ_FAULTS))]
    assert [line.partition(" at ")[0] for line in lines] == expected
    assert all(line.endswith("; lost: 0") for line in lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps."""
    root = tmp_path_factory.mktemp("faults")
    np.save(root / "bars.npy", images())
    train(config(root / "bars.npy"), root / "run")
    return root / "run"


def old_and_new(generator: torch.Generator) -> tuple[CapsuleNetwork, CapsuleNetwork]:
    """Two networks of different architectures."""
    new = CapsuleNetwork(replace(TINY, iterations=2), generator=generator)
    return CapsuleNetwork(TINY, generator=generator), new


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "killed"])
def test_saving_that_fails_at_any_call_leaves_the_old_model_or_the_new(
    fault: str, generator: torch.Generator, tmp_path: Path
) -> None:
    old, new = old_and_new(generator)
    with Faults(None, FAULTS[fault]).installed() as faults:
        old.save(tmp_path)
    assert len(faults.names) > 10
    assert not faults.dirty  # contents and names are on disk
    for at, name in enumerate(faults.names):
        old.save(tmp_path)
        try:
            with Faults(at, FAULTS[fault]).installed():
                new.save(tmp_path)
        except (OSError, MemoryError):
            assert name != "unlink" or fault == "no memory"
        files = {file.name for file in tmp_path.iterdir()}
        assert {"config.json", "model.safetensors"} <= files
        assert len(files) == 2 or name == "unlink"
        try:
            found = CapsuleNetwork.load(tmp_path)
        except ModelError as error:  # the weights are new, but not config.json
            assert "delete config.json" in str(error)  # noqa: PT017
            (tmp_path / "config.json").unlink()
            found = CapsuleNetwork.load(tmp_path)
        expected = old if found.architecture == TINY else new
        state = expected.state_dict()
        assert all(torch.equal(each, state[name]) for name, each in found.state_dict().items())
        _files.sweep(tmp_path)
        assert len(list(tmp_path.iterdir())) <= 2


@pytest.mark.parametrize("saves", [False, True])
def test_the_names_of_new_folders_are_on_disk(
    saves: bool, generator: torch.Generator, tmp_path: Path
) -> None:
    """After a power cut, a folder whose parent was not flushed is missing with all in it."""
    np.save(tmp_path / "bars.npy", images())
    folder = tmp_path / "runs" / "deep" / "run"
    with Faults(None, FAULTS["killed"]).installed() as faults:
        if saves:
            CapsuleNetwork(TINY, generator=generator).save(folder)
        else:
            train(config(tmp_path / "bars.npy"), folder)
    assert faults.names.count("mkdir") == 3
    assert not faults.dirty


def test_folders_that_were_created_in_vain_are_deleted(tmp_path: Path) -> None:
    np.save(tmp_path / "bars.npy", images())
    folder = tmp_path / "runs" / "deep" / "run"
    full = OSError(errno.ENOSPC, "No space left on device")

    def fault(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name == "mkdir" and arguments[0] == folder:
            raise full
        return function(*arguments)

    faults = Faults(None, fault)
    faults.call = lambda *call: fault(*call)  # type: ignore[method-assign]
    with faults.installed(), pytest.raises(TrainingError, match="No space left on device"):
        train(config(tmp_path / "bars.npy"), folder)
    assert not (tmp_path / "runs").exists()


def test_short_writes_are_completed(
    generator: torch.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write less than it was asked to, at every call."""

    class Little(FileIO):
        def write(self, content: Any) -> int:
            return super().write(bytes(content[:7]))

    network = CapsuleNetwork(TINY, generator=generator)
    with monkeypatch.context() as patched:
        patched.setattr(_files, "FileIO", Little)
        network.save(tmp_path)
    state = CapsuleNetwork.load(tmp_path).state_dict()
    assert all(torch.equal(state[name], each) for name, each in network.state_dict().items())


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """A signal every tenth of a millisecond, which interrupts calls to the system."""
    arrived: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: arrived.append(number))
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    yield arrived
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@needs_timer
def test_interrupted_calls_are_repeated(
    signals: list[int], generator: torch.Generator, tmp_path: Path
) -> None:
    network = CapsuleNetwork(TINY, generator=generator)
    for _ in range(10):
        network.save(tmp_path)
        state = CapsuleNetwork.load(tmp_path).state_dict()
        assert all(torch.equal(state[name], each) for name, each in network.state_dict().items())
    assert len(signals) > 10


# --------------------------------------------------------------------------------------------------
# Temporary files


@needs_flock
@pytest.mark.parametrize(
    "moment", ["before it is locked", "while it is written", "at its renaming"]
)
def test_the_temporary_file_of_a_living_process_is_not_swept(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a killed one is, at the same moment."""
    killed = tmp_path / ".model.safetensors-0123456789abcdef.part"
    times = 0

    def sweep() -> None:
        nonlocal times
        times += 1
        killed.touch()
        _files.sweep(tmp_path)
        assert not killed.exists()

    def sweep_first(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as undone:
            undone.setattr(module, name, function)
            if not times:
                sweep()
        function(*arguments, **options)

    module, name = (os, "replace") if "renaming" in moment else (_files, "_lock_temporary")
    function = getattr(module, name)
    if "written" not in moment:
        monkeypatch.setattr(module, name, sweep_first)
    with _files.atomic_write(tmp_path / "codes.npz") as file:
        file.write(b"codes")
        file.flush()
        if "written" in moment:
            sweep()
    assert times == 1
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("codes.npz", b"codes")
    ]


@needs_timer
def test_a_temporary_file_that_another_process_has_locked_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can read a file can lock it, and need never unlock it."""
    lock_temporary, held = _files._lock_temporary, list[int]()

    def lock_late(handle: int) -> None:
        if not held:
            (temporary,) = tmp_path.iterdir()
            held.append(os.open(temporary, os.O_RDONLY))
            lock_temporary(held[0])
        lock_temporary(handle)

    monkeypatch.setattr(_files, "_lock_temporary", lock_late)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(10)
    with _files.atomic_write(tmp_path / "codes.npz") as file:
        file.write(b"codes")
    signal.alarm(0)
    os.close(held[0])
    assert [each.name for each in tmp_path.iterdir()] == ["codes.npz"]


@needs_links
def test_nothing_is_swept_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for folder in (elsewhere, tmp_path / "run" / "figures"):
        folder.mkdir(parents=True)
        (folder / ".a-0123456789abcdef.part").touch()
    (tmp_path / "run" / "link").symlink_to(elsewhere)
    _files.sweep(tmp_path / "run")
    assert list(elsewhere.iterdir())
    assert not list((tmp_path / "run" / "figures").iterdir())


# --------------------------------------------------------------------------------------------------
# Machines that may be taken away


@needs_unix
@pytest.mark.parametrize(
    ("files", "command"),
    [
        ([], "train --out runs/digits"),
        ([".lock"], "train --out runs/digits"),
        ([CHECKPOINT, PREVIOUS, "run.json"], "train --resume runs/digits"),
        ([PREVIOUS], "train --resume runs/digits"),
    ],
)
def test_the_lines_for_such_machines_call_one_command_even_if_it_is_interrupted(
    files: list[str], command: str, tmp_path: Path
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "reliability.md").read_text()
    lines = re.search(r"```sh\n(if ls .*?)```", page, re.DOTALL)
    assert lines is not None
    program = tmp_path / "poecaps"
    program.write_text('#!/bin/sh\necho "$@" >> calls\nexit 130\n')
    program.chmod(0o755)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    for name in files:
        (tmp_path / "runs" / "digits" / name).touch()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", lines[1]], cwd=tmp_path, env=os.environ | {"PATH": path}, check=False
    )
    assert done.returncode == 130
    assert (tmp_path / "calls").read_text() == f"{command}\n"


# --------------------------------------------------------------------------------------------------
# Bits


def flipped(content: bytes, bit: int) -> bytes:
    altered = bytearray(content)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


def accepted(path: Path, bits: Iterable[int], read: Callable[[], Any]) -> list[Any]:
    """Flip bits of a file, one at a time; return all that is read in spite of it.

    Every refusal must be one line.
    """
    content, found = path.read_bytes(), []
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        try:
            found.append(read())
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017
    path.write_bytes(content)
    return found


@pytest.fixture
def copy(run: Path) -> Iterator[Path]:
    """A copy of the run in memory, where files are written quickly."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        shutil.copytree(run, Path(root) / "run")
        yield Path(root) / "run"


@pytest.mark.parametrize("name", ["model.safetensors", CHECKPOINT])
def test_no_bit_of_a_header_can_change(name: str, copy: Path) -> None:
    """All of them: the length, the metadata, and the names, shapes and places of the tensors."""
    path = copy / name
    bits = range(8 * (8 + int.from_bytes(path.read_bytes()[:8], "little")))
    assert len(bits) > 10_000
    assert not accepted(path, bits, lambda: serialization.read_tensors(path))


def test_no_bit_of_a_record_changes_what_it_says(copy: Path) -> None:
    expected, path = record.read(copy), copy / record.RECORD
    bits = range(8 * path.stat().st_size)
    found = accepted(path, bits, lambda: record.read(copy))
    assert len(found) < 0.01 * len(bits)  # another name of the checksum, or 1E-07 for 1e-07
    for each in found:
        assert {name: each[name] for name in expected} == expected


def test_no_bit_of_a_config_changes_the_model(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = serialization.read_tensors(copy / "model.safetensors")
    monkeypatch.setattr(serialization, "read_tensors", lambda *_, **__: weights)
    expected, path = serialization.read_model(copy)[0], copy / "config.json"
    bits = range(8 * path.stat().st_size)
    found = accepted(path, bits, lambda: serialization.read_model(copy)[0])
    assert len(found) < 0.01 * len(bits)
    assert all(each == expected for each in found)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_random_bits_of_a_model_are_refused_or_change_nothing(name: str, copy: Path) -> None:
    expected = CapsuleNetwork.load(copy).state_dict()
    size = 8 * (copy / name).stat().st_size
    bits = np.random.default_rng(0).choice(size, SAMPLE, replace=False).tolist()
    for found in accepted(copy / name, bits, lambda: CapsuleNetwork.load(copy)):
        assert all(torch.equal(each, expected[name]) for name, each in found.state_dict().items())


def test_random_bits_of_checkpoints_are_refused_or_change_nothing(copy: Path, run: Path) -> None:
    """A damaged checkpoint is refused, and the one before it leads to the same end."""
    expected = CapsuleNetwork.load(run).state_dict()
    size = 8 * (copy / CHECKPOINT).stat().st_size
    (copy / "model.safetensors").unlink()
    for bit in np.random.default_rng(0).choice(size, 20, replace=False).tolist():
        (copy / CHECKPOINT).write_bytes(flipped((copy / CHECKPOINT).read_bytes(), bit))
        with pytest.warns(CheckpointWarning):
            network = resume(copy)
        state = network.state_dict()
        assert all(torch.equal(each, expected[name]) for name, each in state.items())
        (copy / "model.safetensors").unlink()
        shutil.copy(run / PREVIOUS, copy)


def one_line_or_a_result(
    path: Path, bits: Iterable[int], use: Callable[[], Any], error: type[ValueError]
) -> int:
    """Flip bits of a file, one at a time; return how often it was refused, by one line."""
    content, refused = path.read_bytes(), 0
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        try:
            use()
        except error as found:
            assert "\n" not in str(found)  # noqa: PT017
            refused += 1
    path.write_bytes(content)
    return refused


@pytest.fixture
def loaded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> CapsuleNetwork:
    """The network of the run, which is not loaded again."""
    network = CapsuleNetwork.load(copy)
    monkeypatch.setattr(CapsuleNetwork, "load", lambda *_: network)
    return network


@pytest.mark.usefixtures("loaded")
def test_any_bit_of_the_metrics_is_one_line_or_a_result(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have no checksum: a finished run is resumed and described in spite of them."""
    path = copy / METRICS
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    stages = (
        {line["stage"]: line for line in lines}[name] for name in ("autoencoder", "decoder 1")
    )
    kept = ("stage", "epoch", "reconstruction_error")
    few = [json.dumps({name: line[name] for name in kept}) for line in stages]
    path.write_text("\n".join([*few, ""]), "utf-8")

    def use() -> None:
        cli_train._warn_of_failure(resume_training(copy))
        list(info._describe_run(str(copy)))

    bits = range(8 * path.stat().st_size)
    assert 0 < one_line_or_a_result(path, bits, use, ValueError) < len(bits)
    capsys.readouterr()


def test_any_bit_of_an_evaluation_is_one_line_or_a_result(
    copy: Path, loaded: CapsuleNetwork
) -> None:
    measured = {"data": "mnist (test)", "test_images": 5, "samples": 5, "seed": 0}
    measured |= {"probe": {"test_accuracy": 0.5}, "domains": {"joint": {"frechet": None}}}
    path = copy / card.MEASURED
    path.write_text(json.dumps(measured), "utf-8")

    def use() -> None:
        list(info._describe_run(str(copy)))
        card.write(copy, loaded, draw=False)

    bits = range(8 * path.stat().st_size)
    assert 0 < one_line_or_a_result(path, bits, use, ModelError) < len(bits)


def test_curves_of_altered_metrics_are_drawn_or_refused_by_one_line(copy: Path) -> None:
    """Random bits, since a figure takes long, and stages of one curve only."""
    path = copy / METRICS
    size = 8 * path.stat().st_size
    bits = np.random.default_rng(0).choice(size, 10, replace=False).tolist()
    draw = partial(plotting.training_curves, path, copy / "curves.png")
    one_line_or_a_result(path, bits, draw, ValueError)
    for name in ("loss", "reconstruction_error", "held_out_error"):
        path.write_text(json.dumps({"stage": "autoencoder", "epoch": 1, name: 0.5}) + "\n")
        draw()
