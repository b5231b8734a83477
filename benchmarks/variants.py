"""Variants of a preset, trained and measured one after the other or several at a time.

Shared by the studies `benchmarks.study`, `benchmarks.density` and `benchmarks.transformations`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from benchmarks.internals import command_for
from poecaps.data import load
from poecaps.training import PRESETS, Config, Progress, TrainingError, train

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poecaps import CapsuleNetwork
    from poecaps.data import ImageSet

Row = dict[str, Any]
Columns = Mapping[str, tuple[str, str]]
"""Heading of a column: path of the number in a row, and its format."""


@dataclass(frozen=True)
class Variant:
    """A preset and the options that differ from it, by their names on the command line."""

    preset: str = "default"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **common: Any) -> Config:
        """Return the options of a run."""
        config = PRESETS[self.preset]()
        for name, value in self.changes.items():
            config = _replaced(config, name, value)
        return replace(config, **common)


def _replaced(options: Any, name: str, value: Any) -> Any:
    """Return options with one of them changed, by a name such as ``"model.density.base"``."""
    first, _, rest = name.partition(".")
    changed = _replaced(getattr(options, first), rest, value) if rest else value
    return replace(options, **{first: changed})


def preset_with(preset: str, **changes: Any) -> Variant:
    """Change options of a preset; a double underscore stands for the dot."""
    return Variant(preset, {name.replace("__", "."): value for name, value in changes.items()})


# --------------------------------------------------------------------------------------------------
# What makes experts into classes: parts of the names of variants, and their options

_EXPERTS: dict[str, dict[str, Any]] = {
    "10 experts of 32": {"model__experts": ((10, 32),)},
    "20 experts of 16": {},  # those of the preset `default`
}
_VIEWS: dict[str, dict[str, Any]] = {
    "4 views": {"encoder__views__count": 4},  # for digits
    "4 small views": {  # for clothes
        "encoder__views__count": 4,
        "encoder__views__rotation": 8.0,
        "encoder__views__shift": 0.05,
        "encoder__views__scale": 0.08,
    },
}
WITHOUT: dict[str, dict[str, Any]] = {
    "no routing": {"model__iterations": 1},
    "no equalized components": {"model__equalized_components": 0},
    "no competition": {"encoder__winners": None},
}


def class_variants(
    make: Callable[..., Variant], parts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Variant]:
    """Return variants with ten and with twenty experts, by their names.

    They have no views, large or small views, and with these each of some changes.

    Parameters
    ----------
    make
        Makes a variant from its options.
    parts
        Name and options of each change.
    """
    found = {}
    for size, experts in _EXPERTS.items():
        found[size] = make(**experts)
        for kind, views in _VIEWS.items():
            found[f"{size}, {kind}"] = make(**experts, **views)
            for part, change in parts.items():
                found[f"{size}, {kind}, {part}"] = make(**experts, **views, **change)
    return found


@dataclass(frozen=True)
class Job:
    """One network to train and measure."""

    name: str
    seed: int
    options: argparse.Namespace

    def config(self, study: Mapping[str, Variant]) -> Config:
        """Return the options of the run."""
        o = self.options
        return study[self.name].config(
            data=o.data, data_path=o.path, seed=self.seed, device=o.device
        )

    def row(self, config: Config) -> Row:
        """Return the beginning of the row of this job."""
        return {"variant": self.name, "seed": self.seed, "command": command_for(config)}

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Return the folder of the run, which is deleted afterwards without ``--keep``."""
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(self.options.keep or scratch) / self.file_name

    @property
    def file_name(self) -> str:
        """Name of the variant and its seed, for files."""
        return f"{re.sub('[,:]', '', self.name).replace(' ', '-')}-{self.seed}"


def load_images(options: argparse.Namespace) -> tuple[ImageSet, ImageSet]:
    """Return the images to train on and those to measure on, by the options of `add_protocol`.

    With ``--held-out N``, the last N training images (at most half of them) are left out of the
    training and measured on: options are chosen there, and not on test images. With ``--on test``
    as well, the test images are measured on: once, with the options that were chosen.
    """
    training = load(options.data, path=options.path)
    held_out = min(options.held_out, len(training) // 2)
    learned = _part(training, slice(None, len(training) - held_out))
    if measured_part(options) == "test":
        return learned, load(options.data, split="test", path=options.path)
    return learned, _part(training, slice(len(training) - held_out, None))


def held_out_images(options: argparse.Namespace) -> ImageSet | None:
    """Return the images that are left out of the training, if others are measured on."""
    if not options.held_out or measured_part(options) == "held-out":
        return None
    return load_images(argparse.Namespace(**{**vars(options), "on": "held-out"}))[1]


def measured_part(options: argparse.Namespace) -> str:
    """Return which images are measured on: ``"held-out"`` or ``"test"``."""
    return options.on or ("held-out" if options.held_out else "test")


def protocol_of(options: argparse.Namespace) -> Row:
    """Return the number of held-out images and which images are measured on, for a row."""
    return {"held_out": options.held_out, "on": measured_part(options)}


def _part(data: ImageSet, part: slice) -> ImageSet:
    labels = None if data.labels is None else data.labels[part]
    return replace(data, images=data.images[part], labels=labels)


def add_protocol(parser: argparse.ArgumentParser, default: int = 0) -> None:
    """Add the options of `load_images`."""
    parser.add_argument(
        "--held-out",
        type=int,
        default=default,
        help=f"last training images, which are not learned from; 0: none (default: {default})",
    )
    parser.add_argument(
        "--on",
        choices=("held-out", "test"),
        help="images to measure on (default: the held-out ones if there are any, else test)",
    )


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the option of `with_filters`."""
    parser.add_argument(
        "--filters", type=int, help="of each convolution (default: those of the preset)"
    )


def with_filters(config: Config, options: argparse.Namespace) -> Config:
    """Return the options of a run with another number of filters, if it is given."""
    if options.filters is None:
        return config
    return replace(config, model=replace(config.model, features=options.filters))


def check_protocol(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with an error if there are no images to measure on."""
    if options.held_out < 0 or (options.on == "held-out" and not options.held_out):
        parser.error("--on held-out needs a number of images above 0 in --held-out")


def row_command(module: str, job: Job) -> str:
    """Return the command that makes the row of a job again."""
    o = job.options
    words = ["python", "-m", f"benchmarks.{module}", "--data", o.data, "--only", job.name]
    words += ["--seeds", str(job.seed), "--held-out", str(o.held_out), "--on", measured_part(o)]
    words += ["--samples", str(o.samples)]
    for name in ("epochs", "filters", "limit", "steps"):  # those that the study has
        if getattr(o, name, None) is not None:
            words += [f"--{name}", str(getattr(o, name))]
    return shlex.join(words)


def train_and_time(
    config: Config, folder: Path, data: ImageSet | None = None
) -> tuple[CapsuleNetwork | None, Row]:
    """Train a network; return it with the seconds of its stages.

    Diverged training is a result: there is no network then, and the row says why. Any other error
    is raised.
    """
    ends: dict[str, float] = {}

    def report(progress: Progress) -> None:
        ends[progress.stage] = time.perf_counter()

    start = time.perf_counter()
    try:
        network = train(config, folder, data=data, report=report)
    except TrainingError as error:
        if " diverged at step " not in str(error):
            raise
        return None, {"failed": str(error).split(";")[0]}
    starts = [start, *ends.values()]
    seconds = {
        stage: round(stage_end - stage_start, 2)
        for (stage, stage_end), stage_start in zip(ends.items(), starts, strict=False)
    }
    total = round(time.perf_counter() - start, 2)
    return network, {"seconds": seconds, "training_seconds": total}


def read_selections(folder: Path) -> Row:
    """Return which of several encoders the run in a folder has kept, by the names of the stages."""
    found: Row = json.loads((folder / "run.json").read_text()).get("selection", {})
    return found


# --------------------------------------------------------------------------------------------------
# Tables


def table(
    rows: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    columns: Columns,
    heading: str = "variant",
) -> str:
    """Format rows as a Markdown table with one line per variant.

    A cell is the mean over the seeds and, for several seeds, the standard deviation.

    Parameters
    ----------
    rows
        Of all variants and seeds.
    names
        Names of the variants, in order, each with that of its line.
    columns
        Columns of the table.
    heading
        Heading of the names.
    """
    lines = [
        f"| {heading} | seeds | {' | '.join(columns)} |",
        f"| --- | --- |{' ---: |' * len(columns)}",
    ]
    for name, label in names.items():
        same = [row for row in rows if row["variant"] == name]
        measured = [row for row in same if "failed" not in row]
        if measured:
            cells = [
                cell([lookup(row, path) for row in measured], form)
                for path, form in columns.values()
            ]
            lines.append(f"| {label} | {len(measured)} | {' | '.join(cells)} |")
        elif same:
            empty = " |" * (len(columns) - 1)
            lines.append(f"| {label} | {len(same)} | {same[0]['failed']} |{empty}")
    return "\n".join(lines)


def lookup(row: Any, path: str) -> float | None:
    """Return a number of a row by its path, such as evaluation.probe.test_accuracy."""
    for key in path.split("."):
        row = None if row is None else row.get(key)
    return None if row is None else float(row)


def cell(values: Sequence[float | None], form: str) -> str:
    """Format the mean of values and, for several values, their standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = format(statistics.mean(known), form)
    if len(known) > 1:
        text += f" ± {format(statistics.stdev(known), form)}"
    return text.replace("%", " %")


# --------------------------------------------------------------------------------------------------
# Command line


def make_parser(description: str | None, *, samples: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that all studies have.

    Parameters
    ----------
    description
        Text of the help.
    samples
        Default number of samples; None: there is no such option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        default="mnist",
        help="a dataset with a classifier: mnist, fashion-mnist (default: mnist)",
    )
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--only", help="variants, separated by semicolons (default: all)")
    parser.add_argument("--seeds", default="0", help="seeds, comma-separated (default: 0)")
    parser.add_argument("--device", default="auto", help="(default: a GPU if available)")
    if samples is not None:
        parser.add_argument(
            "--samples", type=int, default=samples, help=f"samples (default: {samples})"
        )
    parser.add_argument(
        "--jobs", type=int, default=1, help="networks trained at the same time (default: 1)"
    )
    parser.add_argument("--json", type=Path, help="file to add the rows to")
    parser.add_argument("--keep", help="folder to keep the runs in")
    parser.add_argument("--table", type=Path, help="only print this file as a table")
    return parser


def run_study(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    study: Collection[str],
    run: Callable[[Job], Row],
    to_table: Callable[[Sequence[Row]], str],
) -> None:
    """Train and measure the requested variants, or print a file as a table.

    Parameters
    ----------
    parser
        From `make_parser`.
    arguments
        Of the command line.
    study
        Names of all variants, in order.
    run
        Trains and measures a variant, and returns its row; in a process of its own.
    to_table
        Formats rows.
    """
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(to_table(json.loads(options.table.read_text())))
        return
    names = options.only.split(";") if options.only else list(study)
    if unknown := [name for name in names if name not in study]:
        parser.error(
            f"--only must be a list of {'; '.join(study)}; but contains {'; '.join(unknown)}"
        )
    if hasattr(options, "held_out"):
        check_protocol(parser, options)
    rows: list[Row] = []
    if options.json is not None and options.json.is_file():
        rows = json.loads(options.json.read_text())
    done = {(row["variant"], row["seed"]) for row in rows}
    jobs = [
        Job(name, seed, options)
        for seed in map(int, options.seeds.split(","))
        for name in names
        if (name, seed) not in done
    ]
    threads = max(1, machine.usable_cores() // options.jobs)
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    with ProcessPoolExecutor(
        options.jobs, context, initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            rows.append(future.result())
            print(to_table(rows[-1:]).splitlines()[-1], flush=True)
            # After each row, so that an interrupted run keeps its results.
            machine.write(rows, options.json)
    print(f"\n{to_table(rows)}")
