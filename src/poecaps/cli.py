"""The command line: `poecaps train`, `generate`, `reconstruct`, `evaluate` and others, which `main` lists.

Results (paths and numbers) go to standard output, progress and errors to standard error. The exit status is 0 for
success, 1 for a failure, 2 for a command that cannot be meant, 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import sys
import time
import webbrowser
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import numpy as np
import torch
import tyro
from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps import __version__, card, evaluation, kernels, models, plotting
from poecaps import _checks as checks
from poecaps import data as datasets
from poecaps._devices import find_device
from poecaps._files import ModelError, write_json
from poecaps._json import dataclass_from_json
from poecaps.autoencoder import least_side
from poecaps.data.folder import without_warning
from poecaps.data.idx import Split, find_images
from poecaps.kernels import filters
from poecaps.network import DOMAINS, REACH, STEPS, CapsuleNetwork, Domain
from poecaps.training import PRESETS, Config, Progress, TrainingError, record, resume
from poecaps.training import train as train_network
from poecaps.training.checkpoint import CHECKPOINT
from poecaps.training.config import changed_options, nearest_preset, stage_options
from poecaps.training.distributed import Distributed
from poecaps.training.metrics import METRICS
from poecaps.training.progress import TensorBoard, display
from poecaps.training.run import is_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poecaps.data import ImageSet
    from poecaps.explorer.render import Explored

FIGURES = "figures"
SPLITS: tuple[Split, Split] = ("train", "test")
ROWS = 4  # draws of each expert, as in the paper's Figure 2
COLUMNS = 20  # of a grid without experts
SHOWN = "mnist"  # by the explorer, where no run is named
BATCH = 250  # images that go through the network together
ELSE_FILES = {  # what else a word may be: the folder of a run, the file to write
    "bash": "complete -o default -F _tyro_poecaps poecaps",
    "zsh": "(( compstate[nmatches] )) || _files",
    "fish": "complete --command poecaps --force-files --condition 'not __fish_use_subcommand'",
}
OPTIONS = {  # how the library speaks of what it is given, and what that is on the command line
    "give a size=(height, width)": "give --size H W",
    "with path=…": "with --data-path FOLDER",
    "path is for": "--data-path is for",
    "size and channels are for": "--size and --channels are for",
    "continue its run with resume": "continue its run: poecaps train --resume RUN",
}
FAILURES = (
    ModelError,
    TrainingError,
    datasets.DataError,
    OSError,
    torch.OutOfMemoryError,
    MemoryError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"poecaps {__version__}")
        return 0
    try:
        _call(given or ["--help"])
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except FAILURES as error:
        return _complain(str(error) or type(error).__name__, 1)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what torch says on a CPU
            raise
        return _complain(f"there is not enough memory ({str(error).splitlines()[0]})", 1)
    except (ValueError, TypeError) as error:
        return _complain(str(error), 2)
    return 0


def _call(arguments: Sequence[str]) -> None:
    """Call the command that the arguments name."""
    tyro.extras.subcommand_cli_from_dict(
        {
            "train": _train_with(_preset(arguments)),
            "generate": generate,
            "reconstruct": reconstruct,
            "traverse": traverse,
            "encode": encode,
            "evaluate": evaluate,
            "explore": explore,
            "info": info,
            "completion": completion,
        },
        prog="poecaps",
        description="Products of expert capsules: learn images without labels, and draw new ones.\n\n"
        f"Version {__version__}. Begin with: poecaps train",
        args=arguments,
    )


def run() -> NoReturn:
    """Run the command line as a program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where the encoding has no ×
    status = main()
    if (
        Distributed.from_environment().size > 1
    ):  # threads that processes talk through may abort at Python's own end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _complain(message: str, status: int) -> int:
    for spoken, option in OPTIONS.items():
        message = message.replace(spoken, option)
    print(f"poecaps: {message}", file=sys.stderr)
    return status


# ---------------------------------------------------------------------------------------------------------
# Training


def _preset(arguments: Sequence[str]) -> str:
    """Look for the preset among the arguments: its values are the defaults of all other options."""
    for before, argument in reversed(
        list(zip(["", *arguments], arguments, strict=False))
    ):  # the last counts
        name = argument if before == "--preset" else argument.removeprefix("--preset=")
        if (before == "--preset" or name != argument) and name in PRESETS:
            return name
    return "default"


def _train_with(preset_given: str) -> Callable[..., None]:
    """Make the command `train`, whose options have the values of a preset."""

    def train(
        config: Annotated[Config, tyro.conf.arg(name="")] = PRESETS[preset_given](),  # noqa: B008
        *,
        preset: Literal["default", "paper"] = "default",  # noqa: ARG001 (its values are in config already)
        out: Path | None = None,
        resume: Path | None = None,
        quiet: bool = False,
        tensorboard: bool = False,
        figures: bool = True,
    ) -> None:
        """Train a model on images, in stages, and draw what it has learned.

        Without options: 10,000 handwritten digits that come with poecaps.

        Parameters
        ----------
        preset
            The recipe that all other options change: default (what works best) or paper (as published).
        out
            New folder for the results; by default the first of runs/DATA, runs/DATA-2, … that is free.
        resume
            Go on with the run in this folder, from its last checkpoint, with its own options.
        quiet
            Print nothing but errors.
        tensorboard
            Write curves for TensorBoard, too, into the folder tensorboard of the run.
        figures
            Draw pictures when training is done.
        """
        if resume is not None and (
            out is not None or replace(config, device="auto") != PRESETS["default"]()
        ):
            raise ValueError(
                "--resume goes on with the options of the run; leave out all but --device and the display"
            )
        folder = (resume or out or _free_folder(config.data)).expanduser()
        config.validate()
        first = Distributed.from_environment().is_main
        shown: list[Any] = [] if quiet or not first else [display()]
        shown += [TensorBoard(folder)] if tensorboard and first else []

        said = silent = quiet or not first

        def found(images: ImageSet) -> None:
            if not silent:
                print(f"found {images.describe()}", file=sys.stderr, flush=True)

        def report(progress: Progress) -> None:
            nonlocal said
            if not said:  # not before there is something to learn from
                print(
                    f"{'goes on with' if resume else 'trains in'} {folder}",
                    file=sys.stderr,
                    flush=True,
                )
                said = True
            for each in shown:
                each(progress)

        done = resume is not None and is_finished(folder)
        began = time.perf_counter()
        try:
            try:
                network = _train(config, folder, resume is not None, report, found)
            finally:
                for each in shown:
                    each.close()
        except KeyboardInterrupt:
            if first and (folder / CHECKPOINT).is_file():
                print(
                    f"saved; go on with: poecaps train --resume {shlex.quote(str(folder))}",
                    file=sys.stderr,
                )
            raise
        if not first:
            return
        if not quiet:
            how = "finished already" if done else f"trained in {time.perf_counter() - began:.0f} s"
            print(f"{how}; the model is in {folder}", flush=True)
            _warn_of_failure(folder)
        try:
            for line in _draw_all(network, folder) if figures else ():
                if not quiet:
                    print(line, flush=True)
            _write_card(network, folder, draw=figures)
        except OSError as error:
            raise TrainingError(
                f"the model in {folder} is whole, but a figure or the card is not ({error})"
            ) from error

    return train


def _write_card(network: CapsuleNetwork, folder: Path, *, draw: bool) -> None:
    if not card.write(folder, network, draw=draw):
        print(f"{folder / card.CARD} was edited, so it is left as it is", file=sys.stderr)


def _warn_of_failure(folder: Path) -> None:
    """Say which stage has learned nothing, as one does that has taken a handful of steps."""
    for stage, numbers in _last_numbers(folder / METRICS).items():
        error = numbers.get("reconstruction_error", 0.0)
        if error >= 1 and not stage.startswith("encoder"):
            config = dataclass_from_json(Config, record.read(folder)["config"])
            option = stage_options(config)[stage].replace("_", "-")
            remedy = f"it needs more images or more --{option}.epochs"
            message = f"warning: the {stage} does no better than the mean image (error {error:.2g}); {remedy}"
            print(message, file=sys.stderr, flush=True)


def _train(
    config: Config,
    folder: Path,
    go_on: bool,
    report: Callable[[Progress], None],
    found: Callable[[ImageSet], None],
) -> CapsuleNetwork:
    if go_on:
        device = None if config.device == "auto" else config.device
        return resume(folder, device=device, report=report, found=found)
    return train_network(config, folder, report=report, found=found)


def command_for(config: Config) -> str:
    """Return the command that trains with these options."""
    preset = nearest_preset(config)
    words = ["poecaps", "train", *([] if preset == "default" else ["--preset", preset])]
    for name, value in changed_options(config, preset).items():
        stage, dot, last = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{stage}{dot}{'' if value else 'no-'}{last}")
        else:
            words += [f"--{stage}{dot}{last}", *_words(value)]
    return shlex.join(words)


def _words(value: Any) -> list[str]:
    return (
        [word for each in value for word in _words(each)]
        if isinstance(value, tuple)
        else [str(value)]
    )


def _free_folder(source: str) -> Path:
    if Distributed.from_environment().size > 1:
        raise ValueError("several processes must agree on a folder; name it with --out")
    name = Path(source).stem or "images"
    names = (
        Path("runs") / (name if count == 1 else f"{name}-{count}") for count in range(1, 10**6)
    )
    return next(folder for folder in names if not folder.exists())


def _draw_all(network: CapsuleNetwork, run: Path) -> Iterator[str]:
    """Draw the pictures of a finished run, and say where they are."""
    images = _load_images(network, run, None, None, None, tell=False)  # which training has told
    path = run / FIGURES / "reconstructions.png"
    yield f"originals above reconstructions: {_draw_reconstructions(network, images, path, 40)}"
    for domain in DOMAINS:
        what = "all experts together" if domain == "joint" else "one expert at a time"
        path = run / FIGURES / f"{domain}.png"
        yield f"draws, domain {domain} ({what}): {_draw_domain(network, domain, None, ROWS, 0, path)}"
    if not (run / METRICS).is_file():  # no stage had an epoch
        return
    try:
        yield f"training curves: {plotting.training_curves(run / METRICS, run / FIGURES / 'curves.png')}"
    except ModuleNotFoundError as error:
        yield f"training curves: not drawn, because {error.name} is missing; pip install 'poecaps[plots]'"


# ---------------------------------------------------------------------------------------------------------
# What a trained model can do

MODEL = (
    "Folder of a trained model, or the name of one that comes with poecaps, such as mnist (poecaps info lists them); "
    "its results go into the current folder, as mnist-joint.png for example. For a folder of that name write ./mnist."
)
Run = Annotated[str, tyro.conf.arg(metavar="RUN", help=MODEL)]


def generate(
    run: Positional[Run],
    *,
    domain: Domain | Literal["all"] = "joint",
    expert: int | None = None,
    rows: int = ROWS,
    seed: int = 0,
    out: Path | None = None,
    device: str = "auto",
) -> None:
    """Draw new images from a model.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    domain
        Where codes are drawn. One expert at a time, a column for each: complete (a standard Gaussian), restricted (its
        half that training images visit) or learned (as training codes are spread). All experts together: joint.
    expert
        Draw from this expert alone, counted from 0.
    rows
        Rows of the grid: draws of each expert.
    seed
        The same seed gives the same picture.
    out
        PNG to write, with an .npz of the same name beside it; by default RUN/figures/DOMAIN.png.
    device
        cpu, cuda, cuda:1, or auto for a GPU where there is one.
    """
    checks.require_int("rows", rows, 1)
    checks.require_int("seed", seed, 0, 2**63 - 1)
    if domain == "all" and expert is not None:
        raise ValueError(
            "--expert draws from one expert, and --domain all from all together as well; leave out one"
        )
    if domain == "joint" and expert is not None:
        raise ValueError(
            "--expert draws from one expert, and joint is all together; add --domain learned"
        )
    if domain == "all" and out is not None:
        raise ValueError(
            "--out names one picture, and --domain all draws four; leave out one of them"
        )
    network = _open(run, device)
    for each in DOMAINS if domain == "all" else (domain,):
        name = each if expert is None else f"{each}-{expert}"
        path = out or _place(run, FIGURES, f"{name}.png")
        print(_draw_domain(network, each, expert, rows, seed, path))


@torch.no_grad()
def _draw_domain(
    network: CapsuleNetwork, domain: Domain, expert: int | None, rows: int, seed: int, path: Path
) -> Path:
    """Draw the Figure 2 of a domain: a column for each expert, or a grid where one expert or all speak."""
    generator = torch.Generator(_device_of(network)).manual_seed(seed)
    if domain == "joint" or expert is not None:
        images = network.generate(rows * COLUMNS, domain, expert=expert, generator=generator)
        title = f"domain {domain}" + ("" if expert is None else f", expert {expert}")
        return plotting.image_grid(images, path, columns=COLUMNS, title=title)
    experts = range(network.architecture.experts[-1][0])
    alone = [network.generate(rows, domain, expert=j, generator=generator) for j in experts]
    return plotting.expert_grid(
        torch.stack(alone, dim=1), path, title=f"domain {domain}, one column per expert"
    )


def reconstruct(
    run: Positional[Run],
    *,
    data: str | None = None,
    data_path: str | None = None,
    split: Split | None = None,
    count: int = 40,
    out: Path | None = None,
    device: str = "auto",
) -> None:
    """Draw images above what the model makes of them.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    data
        Name of a set, or path of a file or folder of images; by default what the model was trained on, or for a model
        that comes with poecaps the bundled sample of it, where the full set is not on this machine.
    data_path
        Folder that holds a full set known by name.
    split
        train or test; by default test where there is one.
    count
        How many images, from the first on.
    out
        PNG to write, with an .npz of the same name beside it; by default RUN/figures/reconstructions.png.
    device
        cpu, cuda, cuda:1, or auto for a GPU where there is one.
    """
    checks.require_int("count", count, 1)
    network = _open(run, device)
    images = _load_images(network, run, data, data_path, split)
    print(
        _draw_reconstructions(
            network, images, out or _place(run, FIGURES, "reconstructions.png"), count
        )
    )


@torch.no_grad()
def _draw_reconstructions(network: CapsuleNetwork, data: ImageSet, path: Path, count: int) -> Path:
    images = data.batch(range(min(count, len(data))))
    made = torch.cat(
        [network.reconstruct(part.to(_device_of(network))).cpu() for part in images.split(BATCH)]
    )
    return plotting.reconstructions(images, made, path)


def traverse(
    run: Positional[Run],
    *,
    expert: int = 0,
    image: int | None = None,
    data: str | None = None,
    data_path: str | None = None,
    split: Split | None = None,
    steps: int = STEPS,
    reach: float = REACH,
    out: Path | None = None,
    device: str = "auto",
) -> None:
    """Vary one number of an expert at a time: a row for each, from low to high.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    expert
        Which expert, counted from 0.
    image
        Start from the code of this image of the data; by default from the expert's mean code, with all others off.
    data
        Name of a set, or path of a file or folder of images; by default what the model was trained on, or for a model
        that comes with poecaps the bundled sample of it, where the full set is not on this machine.
    data_path
        Folder that holds a full set known by name.
    split
        train or test; by default test where there is one.
    steps
        Images in a row.
    reach
        How far to go to both sides, in standard deviations of the training codes.
    out
        PNG to write, with an .npz of the same name beside it; by default RUN/figures/expert-NUMBER.png.
    device
        cpu, cuda, cuda:1, or auto for a GPU where there is one.
    """
    checks.require_int("steps", steps, 2)
    checks.require_nonnegative("reach", reach)
    if image is None and (data, data_path, split) != (None, None, None):
        raise ValueError(
            "--data, --data-path and --split choose where --image is taken from; name that as well"
        )
    network = _open(run, device)
    offsets = torch.linspace(-reach, reach, steps)
    start, title, name = None, f"expert {expert}", f"expert-{expert}"
    if image is not None:
        images = _load_images(network, run, data, data_path, split)
        checks.require_int("image", image, 0, len(images) - 1)
        with torch.no_grad():
            start = network.encode(images.batch([image]).to(_device_of(network)))[0]
        title, name = f"{title}, from image {image}", f"{name}-image-{image}"
    with torch.no_grad():
        drawn = network.traverse(expert, offsets, start=start)
    path = out or _place(run, FIGURES, f"{name}.png")
    title = f"{title}: a row per parameter, columns in standard deviations"
    print(plotting.traversal_grid(drawn, path, values=offsets, title=title))


def encode(
    run: Positional[Run],
    *,
    data: str | None = None,
    data_path: str | None = None,
    split: Split = "train",
    out: Path | None = None,
    device: str = "auto",
) -> None:
    """Write the codes of images, and the firing probabilities of the experts, as NumPy arrays.

    The file holds codes (N, J, D), firing (N, J) and, where the data have them, labels (N,).

    Parameters
    ----------
    run
        Folder or name of a trained model.
    data
        Name of a set, or path of a file or folder of images; by default what the model was trained on, or for a model
        that comes with poecaps the bundled sample of it, where the full set is not on this machine.
    data_path
        Folder that holds a full set known by name.
    split
        train or test.
    out
        File to write; by default RUN/codes-SPLIT.npz, or RUN/codes-DATA-SPLIT.npz where --data is given.
    device
        cpu, cuda, cuda:1, or auto for a GPU where there is one.
    """
    out = out or _place(
        run, "-".join(["codes", *([Path(data).stem] if data else []), f"{split}.npz"])
    )
    if out.suffix.lower() != ".npz":
        raise ValueError(f"--out must name an .npz file, but is {out}")
    network = _open(run, device)
    images = _load_images(network, run, data, data_path, split)
    with torch.no_grad():
        codes = torch.cat(
            [network.encode(part.to(_device_of(network))).cpu() for part in images.batches(BATCH)]
        )
    arrays: dict[str, Any] = {"codes": codes.numpy(), "firing": codes.norm(dim=-1).numpy()}
    if images.labels is not None:
        arrays["labels"] = images.labels
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part.npz")
    try:
        np.savez(part, **arrays)
        part.replace(out)
    except OSError as error:  # a full disk does not say which file it was
        raise OSError(error.errno, error.strerror, str(out)) from error
    finally:
        part.unlink(missing_ok=True)
    print(f"{out}: codes {codes.shape[0]:,}×{codes.shape[1]}×{codes.shape[2]} of {images}")


def evaluate(
    run: Positional[Run],
    *,
    data: str | None = None,
    data_path: str | None = None,
    samples: int = 10_000,
    seed: int = 0,
    out: Path | None = None,
    device: str = "auto",
) -> None:
    """Measure a model by one fixed protocol, as a table and as JSON.

    How much of the labels a linear map reads off the codes, how near samples are to test images, how many of them are
    recognisable, how much experts specialise. docs/evaluation.md defines each number. The model card of the run, its
    README.md, shows them, too.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    data
        Name of a set, or path of a file or folder of images; by default what the model was trained on, or for a model
        that comes with poecaps the bundled sample of it, where the full set is not on this machine.
    data_path
        Folder that holds a full set known by name.
    samples
        How many images are drawn from each domain.
    seed
        The same seed gives the same numbers.
    out
        JSON file to write; by default RUN/evaluation.json.
    device
        cpu, cuda, cuda:1, or auto for a GPU where there is one.
    """
    checks.require_int("samples", samples, 2)
    checks.require_int("seed", seed, 0, 2**63 - 1)
    out = out or _place(run, "evaluation.json")
    if out.suffix.lower() != ".json":
        raise ValueError(f"--out must name a .json file, but is {out}")
    network = _open(run, device)
    if data is None:
        data, data_path = _own_images(run, data_path)
    train, test = (_load_images(network, run, data, data_path, split) for split in SPLITS)
    name = data.removesuffix("-sample")
    judge = evaluation.load_classifier(name) if name in evaluation.CLASSIFIERS else None
    result = evaluation.evaluate(
        network, train, test, judge, seed=seed, samples=samples, device=_device_of(network)
    )
    print(result.table())
    write_json(out, json.loads(result.to_json()))
    print(f"written to {out}")
    folder = models.find(run)
    if out.resolve() == (folder / card.MEASURED).resolve():
        _write_card(network, folder, draw=not (folder / card.PICTURE).is_file())


def explore(
    runs: Positional[tuple[Run, ...]] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
) -> None:
    """Show in a browser what each expert has learned: turn its parameters, and watch the image change.

    Ctrl-C ends it. docs/explorer.md tells more.

    Parameters
    ----------
    runs
        Folders or names of trained models to switch between; by default the model mnist that comes with poecaps.
    host
        Address to listen at; any but this machine's own lets others use it, too.
    port
        Port to listen at; 0 takes a free one.
    browser
        Open the page in a browser.
    """
    checks.require_int("port", port, 0, 65535)
    try:
        from poecaps.explorer import guard, server
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "pydantic", "starlette", "uvicorn"):
            raise
        raise OSError(
            f"the explorer needs {error.name}; pip install 'poecaps[explorer]'"
        ) from error
    if not runs and SHOWN not in models.names():
        raise FileNotFoundError(
            f"the model {SHOWN} does not come with this installation; name a run, as in: poecaps explore runs/demo"
        )
    explored: list[Explored] = []
    for run in runs or (SHOWN,):
        explored.append(_explored(run, [each.name for each in explored]))

    def ready(address: str) -> None:
        if host not in guard.LOCAL:
            print(
                f"warning: at {host} others can use the explorer, too, without a password",
                file=sys.stderr,
            )
        print(f"the explorer is at {address} (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(address)

    server.serve(explored, host=host, port=port, ready=ready)


def _explored(run: str, taken: Sequence[str]) -> Explored:
    """Open a model for the explorer, under a name of its own, with test images where they are to be had."""
    from poecaps.explorer.render import Explored

    network = _open(run, "cpu")
    try:
        images = _load_images(network, run, None, None, None)
    except (datasets.DataError, OSError, ValueError) as error:
        print(f"{run} is shown without test images: {error}", file=sys.stderr)
        images = None
    name = run if models.is_shipped(run) else Path(run).resolve().name or "model"
    names = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
    return Explored(next(each for each in names if each not in taken), run, network, images)


def info(
    run: Positional[Annotated[str | None, tyro.conf.arg(metavar="[RUN]", help=MODEL)]] = None,
) -> None:
    """Tell about a trained model, or without one about this installation.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    """
    lines = _about_installation() if run is None else _about_run(run)
    for name, value in lines:
        print(f"{name:12} {value}")


def _about_installation() -> Iterator[tuple[str, str]]:
    machine = record.describe_versions()
    yield from machine.items()
    device = find_device("auto")
    yield "device", record.describe_device(device)
    yield "routing", kernels.describe(device)
    yield "convolving", filters.describe(device)
    absent = {name for name in datasets.named.PUBLISHED if not _is_here(name)}
    yield (
        "data",
        ", ".join(
            name + " (not on this machine)" * (name in absent) for name in datasets.named.NAMES
        ),
    )
    yield "models", ", ".join(models.names()) or "none"
    yield "presets", ", ".join(PRESETS)


def _about_run(given: str) -> Iterator[tuple[str, str]]:
    run = _find(given)
    about = record.read(run) if (run / record.RECORD).is_file() else None
    if about is None and not (run / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{run} holds no run: there is neither a {record.RECORD} nor a model.safetensors in it"
        )
    yield "run", f"{given}, which comes with poecaps" if models.is_shipped(given) else given
    if (run / "model.safetensors").is_file():
        network = CapsuleNetwork.load(run)
        channels, height, width = network.architecture.image_shape
        inputs, dim = network.preprocessing.mean.shape
        yield "images", f"{height}×{width}, {'grey' if channels == 1 else 'RGB'}"
        yield "capsules", f"{inputs} of {dim} numbers"
        yield (
            "experts",
            ", then ".join(
                f"{count} of {dim} numbers" for count, dim in network.architecture.experts
            ),
        )
        yield "weights", f"{sum(each.numel() for each in network.parameters()):,}"
    if about is None:
        return
    source = about["data"]
    yield (
        "trained on",
        f"{source.get('source')} ({source.get('images'):,} images, sha256 {source.get('sha256', '')[:12]}…)",
    )
    yield (
        "finished",
        about.get("finished")
        or f"not yet; go on with: poecaps train --resume {shlex.quote(str(run))}",
    )
    for start in about["starts"]:
        yield "command", f"{start.get('command')}  ({start.get('time')}, {start.get('device')})"
    for stage, numbers in _last_numbers(run / METRICS).items():
        yield (
            stage,
            ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items()),
        )
    for name, value in _changed(about["config"]):
        yield "option", f"{name} = {value}"


def completion(shell: Positional[Literal["bash", "zsh", "fish"]]) -> None:
    """Print a script with which a shell completes the commands, options and choices of poecaps.

    Keep it where the shell looks for such scripts, so that it is made only once:

    bash: poecaps completion bash > ~/.local/share/bash-completion/completions/poecaps

    zsh: poecaps completion zsh > ~/.zfunc/_poecaps, with fpath+=~/.zfunc before compinit in ~/.zshrc

    fish: poecaps completion fish > ~/.config/fish/completions/poecaps.fish

    Parameters
    ----------
    shell
        Which shell.
    """
    script = io.StringIO()
    try:
        with contextlib.redirect_stdout(script):
            _call(["--tyro-write-completion", shell, "-"])
    except SystemExit as leave:  # how the writing of the script ends
        if leave.code:
            raise
    # zsh counts words from 1, but the script that tyro writes from 0.
    for line in (
        script.getvalue()
        .replace('"${words[@]}" "$CURRENT"', '"${words[@]}" "$((CURRENT - 1))"')
        .splitlines()
    ):
        # A description of two lines would be offered as two words.
        print(re.sub(r"\\{1,2}n", " ", line) if line.startswith("COMPLETION_SPEC") else line)
    print(ELSE_FILES[shell])


def _changed(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name the options that are not those of the preset `default`."""
    usual = asdict(PRESETS["default"]())
    for each in fields(Config):
        given, normal = config.get(each.name), usual[each.name]
        if isinstance(given, dict):
            yield from (
                (f"{each.name}.{name}", value)
                for name, value in given.items()
                if value != _as_json(normal.get(name))
            )
        elif given != _as_json(normal):
            yield each.name, given


def _as_json(value: Any) -> Any:
    return [_as_json(each) for each in value] if isinstance(value, tuple) else value


def _last_numbers(path: Path) -> dict[str, dict[str, float]]:
    if not path.is_file() or not path.stat().st_size:
        return {}
    stages = plotting.read_metrics(path)
    return {
        stage: {name: float(points[-1, 1]) for name, points in curves.items()}
        for stage, curves in stages.items()
    }


# ---------------------------------------------------------------------------------------------------------
# Helpers


def _find(run: str) -> Path:
    """Find the folder of a model, and say so where a name could have meant another."""
    if models.is_shipped(run) and (Path(run) / "model.safetensors").is_file():
        print(
            f"{run} is the model that comes with poecaps; the one in the folder here is ./{run}",
            file=sys.stderr,
        )
    return models.find(run)


def _open(run: str, device: str) -> CapsuleNetwork:
    """Load the model of a run, or say how to finish it."""
    where, folder = find_device(device), _find(run)
    if not (folder / "model.safetensors").exists() and (folder / CHECKPOINT).is_file():
        raise FileNotFoundError(
            f"{run} is not finished; go on with: poecaps train --resume {shlex.quote(run)}"
        )
    return CapsuleNetwork.load(folder, where)


def _place(run: str, *parts: str) -> Path:
    """Where a result goes by default: into the folder of the run, or beside us where the run is part of the package."""
    return Path(f"{run}-{parts[-1]}") if models.is_shipped(run) else Path(run, *parts)


def _device_of(network: CapsuleNetwork) -> torch.device:
    return next(network.parameters()).device


def _load_images(
    network: CapsuleNetwork,
    run: str | Path,
    source: str | None,
    path: str | None,
    split: Split | None,
    *,
    tell: bool = True,
) -> ImageSet:
    """Load images that the model can see; by default those it was trained on, and of these the test images.

    Tell which files were skipped, if asked to.
    """
    channels, height, width = network.architecture.image_shape
    if source is None:
        source, path = _own_images(run, path)
    shape: dict[str, Any] = {}
    where = Path(source).expanduser()
    if (
        source not in datasets.named.NAMES
        and where.is_dir()
        and find_images(where, "train") is None
    ):
        least = least_side(network.architecture.kernel_size)
        shape = {"size": (height, width), "channels": channels, "smallest": least}
    with without_warning():
        if split is None:
            try:
                found = datasets.load(source, split="test", path=path, **shape)
            except datasets.DataError:  # not divided into training and test images
                found = datasets.load(source, split="train", path=path, **shape)
        else:
            found = datasets.load(source, split=split, path=path, **shape)
    if tell and found.skipped:
        print(f"found {found.describe()}", file=sys.stderr, flush=True)
    if found.shape != (channels, height, width):
        kind = "grey" if channels == 1 else "RGB"
        raise datasets.DataError(
            f"the model sees {kind} images of {height}×{width}, but there are {found}"
        )
    return found


def _own_images(run: str | Path, path: str | None) -> tuple[str, str | None]:
    """Name what a model was trained on, and the folder of it.

    For a model that comes with poecaps, where the full set is not on this machine, this is the bundled sample of it.
    """
    folder = models.find(run)
    if not (folder / record.RECORD).is_file():
        raise ValueError(f"{run} does not say what it was trained on; name images with --data")
    config = record.read(folder)["config"]
    source, path = str(config.get("data")), path or config.get("data_path")
    if (
        models.is_shipped(run)
        and path is None
        and source in datasets.named.PUBLISHED
        and not _is_here(source)
    ):
        taken = f"{source}-sample"
        absent = f"the full set {source} is not on this machine"
        print(
            f"{absent}; takes the bundled {taken} (--data {source} downloads it)", file=sys.stderr
        )
        source = taken
    return source, path


def _is_here(name: str) -> bool:
    """Tell whether a full set can be had without a download."""
    try:
        return all(datasets.named.find_full(name, split, None, download=False) for split in SPLITS)
    except datasets.DatasetNotFoundError:
        return False
