"""Fuzzing: valid files are altered and then used, within limits of time and memory.

`python -m tests.fuzz --seconds 600` prints its seed, and writes every input that leads to anything
but a result or one line of refusal to `tests/corpus`, which the tests use again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import gzip
import hashlib
import io
import json
import linecache
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

import poecaps
from poecaps import ModelError, TrainingError, card, models
from poecaps.cli.info import _describe_run
from poecaps.cli.main import main as main_of_the_command_line
from poecaps.cli.train import _describe_selections
from poecaps.code_density import DOMAINS
from poecaps.data import DataError, ImageSet, load
from poecaps.options import DensityOptions
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import Config, record, resume, train
from poecaps.training.config import DensityStage
from poecaps.training.metrics import METRICS
from poecaps.training.run import resume_training
from poecaps.views import ViewOptions
from tests.faults import config, images

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).parent / "corpus"
PACKAGE = str(Path(poecaps.__file__).parent)
SECONDS = 20  # for an input
MEMORY = 2 * 2**30  # bytes of address space beyond those of the program
GROWTH = 2**30  # bytes that the process may keep after all inputs
TIME = "2026-01-01T00:00:00+00:00"  # in the files of a run
IMAGES = "bars.npy"
# Commands that read what a stranger has written.
COMMANDS = (
    ["train", "--quiet", "--resume"],
    ["info"],
    ["cluster", "--data", IMAGES],
    ["sample", "--chains", "2", "--steps", "3", "--device", "cpu"],
    ["traverse", "--device", "cpu"],
)
MAX_STEPS = 20  # of a resumed training
REFUSALS = (ModelError, TrainingError, DataError, OSError, MemoryError)


class Hang(BaseException):
    """An input took too long."""


class Enough(Exception):  # noqa: N818
    """A resumed training has taken enough steps."""


# Valid inputs, and their use. An input is a folder.


def options() -> Config:
    """All stages; the encoder is one of two, and a density learns from tempered chains."""
    small = config(Path("bars"))
    density = DensityOptions(experts=(2, 2), linear_dims=1, base_components=2)
    return replace(
        small,
        model=replace(small.model, density=density),
        encoder=replace(small.encoder, restarts=2),
        density=DensityStage(
            epochs=2,
            chains=4,
            levels=2,
            lifetime=0,
            leapfrog_steps=1,
            partition_chains=2,
            partition_steps=2,
        ),
    )


def make_model(root: Path) -> None:
    """Write a trained model, with its record, its metrics and its evaluation."""
    train(options(), root, data=ImageSet(images(), source="bars"))
    for file in root.glob("checkpoint*"):
        file.unlink()
    make_repeatable(root)
    shutil.copy(models.find("mnist") / card.MEASURED, root)


def use_model(root: Path) -> None:
    """Load, describe, encode, reconstruct, generate; resume the run, which is finished."""
    list(_describe_run(str(root)))
    result = resume_training(root, device="cpu")
    list(_describe_selections(result))
    network = result.network
    card.write(root, network, draw=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        network.reconstruct(torch.rand(2, *network.architecture.image_shape))
        for domain in DOMAINS:
            network.generate(2, domain, generator=generator)
    if network.density is not None:
        network.sample_density(2, steps=2, generator=generator)


def make_run(root: Path) -> None:
    """Write a run that was stopped while its density learned from chains."""
    make_stopped_run(root, options(), "density", 1)


def make_halved(root: Path) -> None:
    """Write a run that was stopped when half of its encoders had been dropped."""
    encoder = replace(options().encoder, epochs=4, restarts=4, halvings=1)
    make_stopped_run(root, replace(options(), encoder=encoder), "encoder 1", 4)


def make_recombined(root: Path) -> None:
    """Write a run that was stopped when its encoders had been recombined."""
    encoder = replace(options().encoder, epochs=4, restarts=2, recombinations=2, winners=1)
    encoder = replace(encoder, views=ViewOptions(count=2))
    make_stopped_run(root, replace(options(), encoder=encoder), "encoder 1", 4)


def make_stopped_run(root: Path, config: Config, stage: str, step: int) -> None:
    """Write a run that was stopped after a step of a stage."""

    def stop(progress: Any) -> None:
        if (progress.stage, progress.step) == (stage, step):
            raise Enough

    with contextlib.suppress(Enough):
        train(config, root, data=ImageSet(images(), source="bars"), report=stop)
    make_repeatable(root)


def make_repeatable(root: Path) -> None:
    """Replace times in the files of a run, so that a seed leads to the same inputs again."""
    about = record.without_machine(record.read(root))
    for start in about["starts"]:
        start["time"] = TIME
    record.write(root, about | ({"finished": TIME} if about["finished"] else {}))
    lines = (root / METRICS).read_text().splitlines()
    entries = [json.loads(line) | {"images_per_second": 1.0} for line in lines]
    (root / METRICS).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    for file in root.glob("*.safetensors"):
        write_repeatable(file, *read_tensors(file))


def write_repeatable(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Write tensors until the two entries of the header, whose order is random, are in order."""
    write_tensors(path, tensors, about)
    while not path.read_bytes()[8:].startswith(b'{"__metadata__":{"about":'):
        write_tensors(path, tensors, about)


def use_commands(root: Path) -> None:
    """Give the folder to a command, which the contents of its files determine."""
    np.save(root.parent / IMAGES, images())
    digest = hashlib.sha256()
    for file in sorted(root.iterdir()):
        digest.update(file.read_bytes())
    command, *rest = COMMANDS[digest.digest()[0] % len(COMMANDS)]
    said, before = io.StringIO(), Path.cwd()
    os.chdir(root.parent)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            status = main_of_the_command_line([command, *rest, root.name])
    except Exception as error:
        raise AssertionError(f"poecaps {command}: an error escapes") from error
    finally:
        os.chdir(before)
    ends = [line for line in said.getvalue().splitlines() if line.startswith("poecaps: ")]
    last = said.getvalue().splitlines()[-1:]
    if status not in (0, 1, 2) or (status > 0 and ends[-1:] != last):
        raise AssertionError(f"poecaps {command} ends with {status}: {said.getvalue()[-1000:]}")


def make_model_of_a_file(root: Path) -> None:
    """Write a trained model whose record names its images by a path."""
    make_model(root)
    about = record.read(root)
    about["config"]["data"] = about["data"]["source"] = IMAGES
    record.write(root, about)


def use_run(root: Path) -> None:
    """Describe and resume it."""
    steps = 0

    def stop(progress: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise Enough

    list(_describe_run(str(root)))
    with contextlib.suppress(Enough):
        resume(root, data=ImageSet(images(), source="bars"), device="cpu", report=stop)


def make_npz(root: Path) -> None:
    """Write images and labels as NumPy does, with and without compression."""
    labels = np.arange(24) % 3
    np.savez(root / "plain.npz", images=images(), labels=labels)
    np.savez_compressed(root / "packed.npz", images=images(), labels=labels)
    np.save(root / "single.npy", images())


def make_idx(root: Path) -> None:
    """Write images and labels as MNIST has them, plain and gzipped."""
    pictures = b"\0\0\x08\x03" + np.array([24, 12, 12], ">u4").tobytes() + images().tobytes()
    labels = b"\0\0\x08\x01" + np.array([24], ">u4").tobytes() + bytes(i % 3 for i in range(24))
    (root / "train-images-idx3-ubyte").write_bytes(pictures)
    (root / "train-labels-idx1-ubyte").write_bytes(labels)
    (root / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(pictures, mtime=0))
    (root / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels, mtime=0))


def use_arrays(root: Path) -> None:
    """Load all files of a folder."""
    for path in sorted(root.iterdir()):
        if path.suffix == ".gz" and "labels" in path.name:
            continue
        data = load(path)
        data.batch(slice(None))
        data.describe()
        record.describe_data(data)


def make_pictures(root: Path) -> None:
    """Write pictures in all formats and several modes."""
    for number, array in enumerate(images()[:3]):
        grey = Image.fromarray(array)
        grey.save(root / f"{number}.png")
        grey.convert("RGB").save(root / f"{number}.jpg")
        grey.convert("RGBA").save(root / f"{number}.webp")
        grey.convert("P").save(root / f"{number}p.png")


def use_pictures(root: Path) -> None:
    """Load the folder."""
    data = load(root, size=12)
    data.batch(slice(None))
    data.describe()


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "model": (make_model, use_model),
    "commands": (make_model_of_a_file, use_commands),
    "run": (make_run, use_run),
    "halved": (make_halved, use_run),
    "recombined": (make_recombined, use_run),
    "npz": (make_npz, use_arrays),
    "idx": (make_idx, use_arrays),
    "pictures": (make_pictures, use_pictures),
}


# Alterations

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 255, 2**14, 2**31, 2**63, 10**30, -(10**30)),
    *(0.5, 1e-45, -0.0, 1e38, 1e308, float("nan"), float("inf"), -float("inf")),
)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, False, "", "x" * 999, "\x1b[2J", [], {}, [[[]]])


def alter_bytes(content: bytes, dice: random.Random) -> bytes:
    """Flip, overwrite, cut, remove, repeat or insert bytes."""
    data = bytearray(content or b"\0")
    for _ in range(dice.choice((1, 1, 2, 8))):
        start, length = dice.randrange(len(data)), dice.choice((1, 2, 4, 8, 64))
        how = dice.randrange(7)
        if how == 0:
            data[start] ^= 1 << dice.randrange(8)
        elif how == 1:
            data[start : start + length] = dice.randbytes(length)
        elif how == 2:
            data[start : start + length] = bytes([dice.choice((0, 0x7F, 0xFF))]) * length
        elif how == 3:
            del data[start:]
        elif how == 4:
            del data[start : start + length]
        elif how == 5:
            data[start:start] = data[start : start + length]
        else:
            data[start:start] = dice.randbytes(length)
        data = data or bytearray(b"\0")
    return bytes(data)


def alter_json(value: Any, dice: random.Random) -> Any:
    """Replace, remove or add one entry, anywhere."""
    if isinstance(value, (dict, list)) and value and dice.random() < 0.9:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, how = dice.choice(keys), dice.random()
        if how < 0.1:
            del value[key]
        elif how < 0.15 and isinstance(value, dict):
            value["unknown"] = dice.choice(VALUES)
        elif how < 0.2 and isinstance(value, list):
            value += value * dice.choice((1, 300))
        else:
            value[key] = alter_json(value[key], dice)
        return value
    return dice.choice(VALUES)


def alter_tensors(tensors: dict[str, torch.Tensor], dice: random.Random) -> None:
    """Change the numbers, the type, the shape or the name of a tensor."""
    name = dice.choice(sorted(tensors))
    tensor, number = tensors[name].clone(), float(dice.choice(NUMBERS))
    how = dice.randrange(7)
    if how <= 1:
        tensors[name] = torch.full_like(tensor, number)
    elif how == 2 and tensor.numel():
        tensor.view(-1)[dice.randrange(tensor.numel())] = number
        tensors[name] = tensor
    elif how == 3:
        tensors[name] = -tensor * dice.choice((1, 1e6, 1e30))
    elif how == 4:
        kinds = (torch.float16, torch.float64, torch.int32, torch.bool)
        tensors[name] = tensor.to(dice.choice(kinds))
    elif how == 5:
        tensors[name] = dice.choice((tensor.flatten(), tensor.flatten()[:0], tensor.unsqueeze(0)))
    else:
        tensors[dice.choice((f"{name}.x", "x", name))] = tensors.pop(name)


def alter(root: Path, dice: random.Random) -> None:
    """Alter one or two files of an input; files with a checksum often get a valid one."""
    for _ in range(dice.choice((1, 1, 2))):
        path = dice.choice(sorted(root.iterdir()))
        try:
            if path.suffix == ".safetensors" and dice.random() < 0.8:
                tensors, about = read_tensors(path)
                if dice.random() < 0.5:
                    alter_tensors(tensors, dice)
                else:
                    about = alter_json(about, dice)
                write_repeatable(path, tensors, about if isinstance(about, dict) else {"x": about})
                continue
            if path.suffix == ".json" and dice.random() < 0.8:
                about = alter_json(json.loads(path.read_bytes()), dice)
                if isinstance(about, dict) and dice.random() < 0.9:
                    about.pop("checksum", None)
                path.write_text(json.dumps(about))
                continue
            if path.suffix == ".jsonl" and dice.random() < 0.8:
                lines = path.read_bytes().splitlines()
                number = dice.randrange(len(lines))
                lines[number] = json.dumps(alter_json(json.loads(lines[number]), dice)).encode()
                path.write_bytes(b"\n".join([*lines, b""]))
                continue
        except (ModelError, ValueError, RuntimeError):  # altered already
            pass
        path.write_bytes(alter_bytes(path.read_bytes(), dice))


# The verdict


def verdict(kind: str, root: Path) -> str | None:
    """Use an input; return None for a result or a refusal, or else what went wrong."""
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind][1](root)
    except Hang:
        return f"took longer than {SECONDS} s"
    except Exception as error:
        if not _is_refusal(error):
            return "".join(traceback.format_exception(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return None


def _is_refusal(error: Exception) -> bool:
    """Return whether an error is one that a command reports on one line, raised on purpose."""
    if "\n" in str(error).rstrip("\n"):
        return "can't allocate memory" in str(error)
    if isinstance(error, REFUSALS):
        return True
    if isinstance(error, RuntimeError):
        return "can't allocate memory" in str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return (
        isinstance(error, (ValueError, TypeError))
        and last.filename.startswith(PACKAGE)
        and (line.startswith("raise ") or "raise " in _statement(last))
    )


def _statement(frame: traceback.FrameSummary) -> str:
    """Return the first line of a statement of several lines."""
    lines = range(max(1, (frame.lineno or 1) - 6), (frame.lineno or 1) + 1)
    return " ".join(linecache.getline(frame.filename, line).strip() for line in lines)


def limit() -> None:
    """Bound the time of an input and the memory of this process."""

    def hang(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    used = memory_in_use()[0]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def replay() -> list[str]:
    """Use all inputs of the corpus; return what goes wrong."""
    wrong = []
    for folder in sorted(CORPUS.glob("*-*")):
        with tempfile.TemporaryDirectory() as root:
            shutil.copytree(folder, Path(root) / "input")
            found = verdict(folder.name.partition("-")[0], Path(root) / "input")
        if found:
            wrong.append(f"{folder.name}: {found}")
    return wrong


def memory_in_use() -> tuple[int, int]:
    """Return the bytes of address space and of resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def main() -> None:
    """Fuzz for some time, or with so many inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--inputs", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)  # noqa: T201
    torch.set_num_threads(1)
    started, dice, count = time.monotonic(), random.Random(options.seed), Counter[str]()
    wrong: list[str] = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        root = Path(folder)
        for kind in KINDS:
            (root / kind).mkdir()
            KINDS[kind][0](root / kind)
            assert (found := verdict_of_copy(kind, root)) is None, found
        limit()
        wrong += replay()
        before = memory_in_use()[1]
        while count.total() < options.inputs and time.monotonic() - started < options.seconds:
            kind = dice.choice(options.kinds)
            count[kind] += 1
            found = verdict_of_copy(kind, root, dice)
            if found:
                name = f"{kind}-{hashlib.sha256(found.encode()).hexdigest()[:8]}"
                shutil.copytree(root / "input", CORPUS / name, dirs_exist_ok=True)
                wrong.append(f"{name}: {found}")
        gc.collect()
        with contextlib.suppress(AttributeError):  # another library than glibc
            ctypes.CDLL(None).malloc_trim(0)  # `train` keeps freed memory for the next step
        growth = memory_in_use()[1] - before
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in count.items())
    print(f"{count.total():,} inputs ({kinds}); kept {growth / 2**20:.0f} MiB")  # noqa: T201
    for each in wrong:
        print(each)  # noqa: T201
    print(f"wrong: {len(wrong)}")  # noqa: T201
    sys.exit(bool(wrong) or growth > GROWTH)


def verdict_of_copy(kind: str, root: Path, dice: random.Random | None = None) -> str | None:
    """Return the verdict about a copy of a valid input, which is altered."""
    shutil.rmtree(root / "input", ignore_errors=True)
    shutil.copytree(root / kind, root / "input")
    if dice is not None:
        alter(root / "input", dice)
        copy = root / "altered"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root / "input", copy)
        return verdict(kind, copy)
    return verdict(kind, root / "input")


if __name__ == "__main__":
    main()
