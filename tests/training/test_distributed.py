"""Training in several processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from poecaps.data import ImageSet
from poecaps.serialization import read_tensors
from poecaps.training import resume, train
from poecaps.training.checkpoint import CHECKPOINT
from poecaps.training.distributed import Distributed, RandomNumbers
from poecaps.training.interrupts import Interrupts
from poecaps.training.trainer import Trainer
from tests import worker
from tests.systems import needs_proc
from tests.training.runs import OPTIONS, assert_same_weights, config_for, metrics, weights
from tests.training.test_density import density_config
from tests.training.test_views import config_with

if TYPE_CHECKING:
    from tests.processes import Commands, Process

EXACT = ["--precision", "float32"]  # because bfloat16 rounds each share by itself
# torchrun starts `python -m poecaps`, or forks, which saves the import of PyTorch.
EXECUTED = ["-m", "poecaps"]
FORKED = ["--start-method", "fork", "--run-path", worker.__file__]


def torchrun(
    commands: Commands,
    data: Path,
    folder: Path,
    *options: str,
    program: list[str] = FORKED,
    restarts: int = 0,
    resume: bool = False,
    size: int = 2,
) -> Process:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    launcher = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", str(restarts)]
    start = ["--data", str(data), "--out", str(folder), *OPTIONS]
    return commands.start(
        *(*launcher, "--local-addr", "127.0.0.1", *program, "train"),
        *(["--resume", str(folder)] if resume else start),
        *(*options, "--no-figures"),
        module="tests.torchrun",
        GLOO_SOCKET_IFNAME=loopback,
        OMP_NUM_THREADS="1",
    )


def finish(process: Process) -> str:
    try:
        _, err = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        for each in (*children(process), process.pid):
            os.kill(each, signal.SIGKILL)
        raise
    assert process.returncode == 0, err
    return err


@pytest.fixture(scope="module")
def pair(commands: Commands, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that each see 8 of the 16 images of a batch."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    err = finish(torchrun(commands, data, folder, *EXACT, program=EXECUTED))
    assert err.count("epoch 3.0/3") == 4  # only the first process prints progress
    return folder


@pytest.fixture(scope="module")
def single(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("single") / "run"
    train(config_for(data, precision="float32"), folder)
    return folder


def assert_similar_weights(first: Path, second: Path) -> None:
    """The weights are equal, except for the order of summation."""
    ours, theirs = weights(first), weights(second)
    for name in theirs:
        if not name.startswith("code_density."):  # clusters may be numbered otherwise
            assert (ours[name] - theirs[name]).norm() <= 1e-3 * theirs[name].norm() + 1e-6, name


def test_two_processes_learn_what_one_learns(pair: Path, single: Path) -> None:
    """With dropout, Bernoulli mixing and competition: numbers are those of the whole batch."""
    assert_similar_weights(pair, single)
    ours, theirs = metrics(pair), metrics(single)
    assert [line["stage"] for line in ours] == [line["stage"] for line in theirs]
    assert json.loads((pair / "run.json").read_text())["starts"][0]["processes"] == 2


@pytest.mark.parametrize(
    "chains",
    [{"levels": 0, "lifetime": 6}, {"levels": 4, "lifetime": 0}],
    ids=["annealed", "tempered"],
)
def test_two_processes_share_chains_and_views(
    chains: dict[str, int], commands: Commands, data: Path, tmp_path: Path
) -> None:
    """Chains, images, views and random numbers are divided; the decoders have no steps."""
    arguments = f"""
        {" ".join(f"--density.{name} {value}" for name, value in chains.items())}
        --autoencoder.epochs 1 --encoder.epochs 2 --decoder.epochs 0 --pixel-decoder.epochs 0
        --model.density.experts 3 4 --model.density.linear-dims 2 --model.density.strength 2
        --model.density.base-components 4 --density.epochs 2 --density.chains 16
        --density.leapfrog-steps 2 --density.partition-chains 4
        --density.partition-steps 3 --encoder.winners 1 --encoder.target-firing 0.5
        --encoder.views.count 3 --encoder.views.rotation 30 --encoder.views.mirror"""
    finish(torchrun(commands, data, tmp_path / "two", *EXACT, *arguments.split()))
    encoder = config_with(data).encoder
    config = density_config(data, stage=chains)
    train(replace(config, encoder=encoder, precision="float32"), tmp_path / "one")
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    parts = ("density.", "whitening.", "encoders.")
    names = [name for name in theirs if name.startswith(parts)]
    assert {"density.weight", "density.partition", "whitening.matrix"} < set(names)
    assert {"encoders.0.weight", "encoders.1.weight"} < set(names)
    for name in names:
        error = (ours[name] - theirs[name]).norm()
        assert error <= 1e-3 * theirs[name].norm() + 1e-4, (name, error)
    last, expected = (
        [line for line in metrics(tmp_path / name) if line["stage"] == "density"][-1]
        for name in ("two", "one")
    )
    assert last["held_out_free_energy"] == pytest.approx(expected["held_out_free_energy"], rel=1e-3)
    assert last["acceptance"] == pytest.approx(expected["acceptance"], abs=1e-6)


def test_the_logged_loss_is_that_of_the_whole_batch(pair: Path, single: Path) -> None:
    ours, theirs = (torch.tensor([each["loss"] for each in metrics(run)]) for run in (pair, single))
    assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()
    assert len(theirs) > 10


def children(process: Process) -> list[int]:
    return [
        int(each)
        for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


def until_stage(process: Process, folder: Path, stage: int) -> dict[str, Any]:
    """Wait until a run is in a stage, such as 1, the first encoder; return its checkpoint."""
    before: dict[str, Any] = {}
    while before.get("stage", 0) < stage:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
        if (folder / CHECKPOINT).exists():
            _, before = read_tensors(folder / CHECKPOINT)
    return before


def kill_all(process: Process) -> None:
    for each in children(process):
        os.kill(each, signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode != 0


@needs_proc
def test_killed_workers_cost_at_most_the_steps_since_the_last_checkpoint(
    commands: Commands, data: Path, pair: Path, tmp_path: Path
) -> None:
    """First the one that writes the checkpoints is killed, then the other one."""
    folder = tmp_path / "run"
    process = torchrun(commands, data, folder, *EXACT, restarts=2)
    before: list[dict[str, Any]] = []
    for victim, stage in enumerate((1, 3)):  # the first encoder, the first decoder
        before.append(until_stage(process, folder, stage))
        os.kill(children(process)[victim], signal.SIGKILL)
    finish(process)
    first, *others = json.loads((folder / "run.json").read_text())["starts"]
    assert first["stage"] == "autoencoder"
    stages = list(dict.fromkeys(line["stage"] for line in metrics(pair)))
    for about, start in zip(before, others, strict=True):
        last_checkpoint = (about["stage"], about["step"])
        assert (stages.index(start["stage"]), start["step"]) >= last_checkpoint
    assert_same_weights(folder, pair)
    assert metrics(folder) == metrics(pair)


@needs_proc
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_worker_ends_the_attempt_and_the_next_one_goes_on(
    victim: int, commands: Commands, data: Path, pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    timeout = ["--process-timeout", "5"]
    process = torchrun(commands, data, folder, *EXACT, *timeout, restarts=3)  # for a slow machine
    before = until_stage(process, folder, 1)
    os.kill(children(process)[victim], signal.SIGSTOP)
    err = finish(process)
    assert "poecaps: another process did not answer for 5 seconds" in err
    assert "Traceback" not in err.split("poecaps: another process")[0]
    _, second, *others = json.loads((folder / "run.json").read_text())["starts"]
    # One line of the process that waited, for each attempt that failed.
    assert len(re.findall("^poecaps: ", err, re.MULTILINE)) == 1 + len(others)
    assert (second["stage"], second["step"]) >= ("encoder 1", before["step"])
    assert_same_weights(folder, pair)
    assert metrics(folder) == metrics(pair)


@needs_proc
def test_a_run_goes_on_with_fewer_or_more_processes(
    commands: Commands, data: Path, single: Path, tmp_path: Path
) -> None:
    """Begun by two, continued by four, then by one; all are killed each time."""
    folder = tmp_path / "run"
    process = torchrun(commands, data, folder, *EXACT)
    until_stage(process, folder, 1)
    kill_all(process)
    process = torchrun(commands, data, folder, "--process-timeout", "100", resume=True, size=4)
    while read_tensors(folder / CHECKPOINT)[1]["stage"] < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    kill_all(process)
    resume(folder)
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [each["processes"] for each in starts] == [2, 4, 1]
    assert_similar_weights(folder, single)


def test_an_interrupt_of_one_process_stops_all_between_two_steps(
    commands: Commands, data: Path, pair: Path, tmp_path: Path
) -> None:
    """The process that is not interrupted saves, and what it saved is a whole step of both."""
    folder = tmp_path / "run"
    process = torchrun(
        commands, data, folder, *EXACT, "--checkpoint-every", "100000", "--autoencoder.epochs", "60"
    )
    while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.kill(children(process)[1], signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert f"poecaps train --resume {folder}" in err
    assert "[rank" not in err  # how a traceback of a process begins
    _, about = read_tensors(folder / CHECKPOINT)
    assert about["step"] > 0
    assert about["step"] % 10 == 0  # where they ask each other


def test_a_restart_does_not_go_on_with_the_run_of_another(
    commands: Commands, data: Path, pair: Path, tmp_path: Path
) -> None:
    shutil.copytree(pair, tmp_path / "other")
    before = {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()}
    process = torchrun(commands, data, tmp_path / "other", *EXACT, restarts=1)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    message = "is not empty; choose a new folder, or resume its run with"
    assert err.count(message) == 4  # two processes, twice
    assert {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()} == before


@pytest.mark.parametrize("stage", ["autoencoder", "decoder 1"])
def test_a_batch_that_cannot_be_divided_is_an_error(stage: str, data: Path, tmp_path: Path) -> None:
    config = config_for(data, batch_size=15)
    if stage == "decoder 1":
        config = config_for(data, decoder=replace(config.decoder, batch_size=15))
    with pytest.raises(
        ValueError,
        match=f"batch_size must be a multiple of .* processes, 2, but is 15 for {stage}",
    ):
        Trainer(
            config,
            ImageSet(np.load(data)),
            tmp_path,
            device=torch.device("cpu"),
            distributed=Distributed(0, 2),
            interrupts=Interrupts(),
        )


def test_the_shards_of_all_processes_are_the_whole_batch(generator: torch.Generator) -> None:
    batch = torch.arange(12)
    assert torch.equal(torch.cat([Distributed(rank, 3).shard(batch) for rank in range(3)]), batch)
    whole = RandomNumbers(generator.manual_seed(1), Distributed()).uniform(12, 5)
    parts = [
        RandomNumbers(generator.manual_seed(1), Distributed(rank, 3)).uniform(4, 5)
        for rank in range(3)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert ((whole >= 0) & (whole < 1)).all()


def test_random_numbers_of_several_rounds_are_those_of_one_round_after_the_other(
    generator: torch.Generator,
) -> None:
    """The batch need not be the first axis: k rounds of numbers for each image and expert."""
    generator.manual_seed(1)
    rounds = torch.stack([torch.rand(12, 5, generator=generator) for _ in range(3)])
    parts = [
        RandomNumbers(generator.manual_seed(1), Distributed(rank, 2)).uniform(3, 6, 5, dim=1)
        for rank in range(2)
    ]
    assert torch.equal(torch.cat(parts, 1), rounds)
