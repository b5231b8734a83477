"""The command `train`."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from poecaps import plotting
from poecaps._devices import keep_freed_memory
from poecaps._files import own_folder
from poecaps._progress import Counter
from poecaps.cli.generate import (
    ROWS,
    density_options,
    describe_draws,
    draw_density,
    draw_domain,
    draw_reconstructions,
)
from poecaps.cli.loading import load_images, training_source, untrained_note
from poecaps.cli.outputs import FIGURES, say, write_card
from poecaps.code_density import DOMAINS
from poecaps.data.folder import SMALL_SIDE
from poecaps.data.mapped import is_on_hub
from poecaps.training import (
    PRESETS,
    Config,
    Progress,
    TrainingError,
    TrainingResult,
    resume_training,
    run_training,
)
from poecaps.training.checkpoint import newest_checkpoint
from poecaps.training.config import Preset, batch_sizes, nearest_preset, stage_options
from poecaps.training.distributed import Distributed
from poecaps.training.errors import SavedInterrupt
from poecaps.training.metrics import METRICS
from poecaps.training.progress import TensorBoard, display
from poecaps.training.run import absolute_path, unused_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poecaps.data import ImageSet

RECONSTRUCTIONS = 40  # images of the figure
LARGE_SIDE = 64  # pixels; there is a warning if images have a larger area than such a square
# A stage that decodes pixels and loses this share of their variance after so few steps needs more.
FEW_STEPS, LARGE_ERROR, MORE_EPOCHS = 250, 0.5, 10
# An encoder need not reconstruct well to have learned, but it should not make its inputs larger:
# features of an autoencoder that has learned little are noise, which the whitening amplifies.
WILD_ERROR = 5.0


def train_command(preset_given: str) -> Callable[..., None]:
    """Return the command `train`, whose options default to the values of a preset."""

    def train(
        config: Annotated[Config, tyro.conf.arg(name="")] = PRESETS[preset_given](),  # noqa: B008
        *,
        preset: Preset = "default",  # noqa: ARG001 (config has its values)
        out: Annotated[
            Path | None,
            tyro.conf.arg(
                metavar="FOLDER",
                help_behavior_hint="(default: the first of runs/DATA, runs/DATA-2, … that is free)",
            ),
        ] = None,
        resume: Annotated[
            Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
        ] = None,
        quiet: bool = False,
        tensorboard: bool = False,
        figures: bool = True,
    ) -> None:
        """Train a model on images, in stages, and draw figures of the result.

        Without options, it is trained on 10,000 handwritten digits that are part of the package.

        Parameters
        ----------
        preset
            Values of other options: default (best results), fast (a small model), paper or energy.
        out
            New folder for the results.
        resume
            Resume the run in this folder from its last checkpoint, with the options of the run.
        quiet
            Print only errors.
        tensorboard
            Also write curves for TensorBoard, to the folder tensorboard of the run.
        figures
            Draw figures after training.
        """
        if resume is not None and (
            out is not None or _without_machine_options(config) != PRESETS["default"]()
        ):
            raise ValueError(
                "--resume uses the options of the run; leave out all others except --device, "
                "--process-timeout, --quiet, --tensorboard, --figures, and --data with the images "
                "of the run"
            )
        folder = (resume or out or unused_folder(config.data)).expanduser()
        config.validate()
        keep_freed_memory()
        result = _train(config, folder, resume is not None, quiet, tensorboard)
        if Distributed.from_environment().is_main:
            _finish(result, _named_data(config), quiet=quiet, figures=figures)

    return train


class TrainingReporter:
    """Reports a run on standard error, and for TensorBoard if requested.

    Parameters
    ----------
    folder
        The folder of the run.
    resumed
        Whether the run is resumed.
    quiet
        Whether to print nothing.
    tensorboard
        Whether to write curves for TensorBoard.
    warns_of_size
        Whether to warn of large images, for users who may not have chosen their size.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed: bool,
        quiet: bool,
        tensorboard: bool,
        warns_of_size: bool = False,
    ) -> None:
        self.folder, self.resumed, self.quiet = folder, resumed, quiet
        self.warns_of_size = warns_of_size
        self.started = False
        self.displays: list[Any] = [] if quiet else [display()]
        self.reading = None if quiet else Counter("reading", "files")
        self.encoding = None if quiet else Counter("encoding")
        if tensorboard:
            self.displays.append(TensorBoard(folder))

    def found(self, images: ImageSet) -> None:
        """Report the training images, with a warning if they are large."""
        if self.quiet:
            return
        say(f"found {images.describe()}", file=sys.stderr)
        _, height, width = images.shape
        if self.warns_of_size and height * width > LARGE_SIDE**2:
            advice = (
                f"--size {SMALL_SIDE} {SMALL_SIDE} scales them" if images.files else "scale them"
            )
            say(
                f"warning: images of {height}×{width} take much time and memory; {advice} down",
                file=sys.stderr,
            )

    def report(self, progress: Progress) -> None:
        """Report the progress after a step; before the first step also the folder of the run."""
        if not self.started and not self.quiet:
            action = "resuming" if self.resumed else "training in"
            say(f"{action} {self.folder}", file=sys.stderr)
        self.started = True
        for each in self.displays:
            each(progress)

    def close(self) -> None:
        """Finish all displays."""
        for each in self.displays:
            each.close()


def _train(
    config: Config, folder: Path, resume: bool, quiet: bool, tensorboard: bool
) -> TrainingResult:
    """Start or resume a run; only the first of several processes reports it."""
    first = Distributed.from_environment().is_main
    reporter = TrainingReporter(
        folder,
        resumed=resume,
        quiet=quiet or not first,
        tensorboard=tensorboard and first,
        warns_of_size=not resume and config.size is None and not config.model.halvings,
    )
    started = time.perf_counter()
    try:
        with closing(reporter):
            if resume:
                usual = PRESETS["default"]().process_timeout
                result = resume_training(
                    folder,
                    data=_named_data(config),
                    device=None if config.device == "auto" else config.device,
                    process_timeout=None
                    if config.process_timeout == usual
                    else config.process_timeout,
                    report=reporter.report,
                    found=reporter.found,
                    reading=reporter.reading,
                    encoding=reporter.encoding,
                )
            else:
                result = run_training(
                    config,
                    folder,
                    report=reporter.report,
                    found=reporter.found,
                    reading=reporter.reading,
                    encoding=reporter.encoding,
                )
    except KeyboardInterrupt as interrupt:
        newest = newest_checkpoint(folder)
        if first and newest is not None:
            age = max(0.0, time.time() - newest.stat().st_mtime)
            saved = isinstance(interrupt, SavedInterrupt)
            state = "checkpoint saved" if saved else f"the last checkpoint is {age:.0f} s old"
            say(
                f"{state}; resume with: {_resume_command(folder, config.data)}",
                file=sys.stderr,
            )
        raise
    except FileExistsError as error:
        if newest_checkpoint(folder) is None:
            raise
        message = f"{folder} is not empty; choose a new folder, or resume its run with: "
        message += _resume_command(folder)
        raise FileExistsError(message) from error
    if first and not quiet:
        seconds = time.perf_counter() - started
        status = "already finished" if result.data is None else f"trained in {seconds:.0f} s"
        say(f"{status}; the model is in {folder}")
        for line in _describe_selections(result):
            say(line)
        _warn_of_failure(result)
        note = untrained_note(folder)
        if note:
            say(f"note: {note}", file=sys.stderr)
    return result


def _without_machine_options(config: Config) -> Config:
    """Return options without those that may be given when a run is resumed."""
    usual = PRESETS["default"]()
    config = replace(config, device=usual.device, process_timeout=usual.process_timeout)
    return replace(config, data=usual.data)


def _named_data(config: Config) -> str | None:
    """Return the images that are named when a run is resumed, or None if none are."""
    return None if config.data == PRESETS["default"]().data else absolute_path(config.data)


def _resume_command(folder: Path, source: str = "") -> str:
    """Return the command that resumes a run; a dataset of the Hub is named again."""
    named = f" --data {shlex.quote(source)}" if is_on_hub(source) else ""
    return f"poecaps train --resume {_quote(folder)}{named}"


def _quote(folder: Path) -> str:
    return shlex.quote(str(folder))


def _describe_selections(result: TrainingResult) -> Iterator[str]:
    """Yield a line for each stage that has kept one of several trained parts."""
    for stage, selection in result.record.get("selection", {}).items():
        kept, criterion = selection["kept"], selection["criterion"]
        last = dict(zip(selection["starts"], selection["scores"][criterion], strict=True))
        count = len([*selection["halvings"], selection][0]["starts"])
        name = f"start {kept}"
        if selection.get("recombinations"):
            name = f"recombination {selection['starts'].index(kept) + 1}"
        line = f"{stage}: {name} of {count} kept, {criterion} {last.pop(kept):.3g}"
        if len(last) > 1:
            line += f" (others {min(last.values()):.3g} to {max(last.values()):.3g})"
        elif last:
            line += f" (the other {min(last.values()):.3g})"
        dropped = count - len(selection["starts"])
        yield line + (f"; {dropped} dropped before the end" if dropped else "")


def _warn_of_failure(result: TrainingResult) -> None:
    """Warn of stages that have learned little: few images make few steps."""
    config, images = result.config, int(result.record["data"]["images"])
    fields, sizes, few = stage_options(config), batch_sizes(config, images), []
    for stage, values in result.metrics.items():
        if stage not in fields:  # of an altered file, which has no checksum
            continue
        error = values.get("reconstruction_error", 0.0)
        steps = getattr(config, fields[stage]).epochs * (images // min(sizes[stage], images))
        if stage in ("autoencoder", "pixel decoder") and steps < FEW_STEPS and error >= LARGE_ERROR:
            few.append(f"the {stage} had {steps} (error {error:.2g})")
        elif stage.startswith("encoder"):
            if error >= WILD_ERROR:
                say(
                    f"warning: the reconstructions of {stage} are far from its inputs "
                    f"(error {error:.2g}); lower --encoder.learning-rate, increase "
                    "--autoencoder.epochs, or use --preset fast",
                    file=sys.stderr,
                )
        elif error >= 1:
            option = fields[stage].replace("_", "-")
            say(
                f"warning: the {stage} does no better than the mean image (error {error:.2g}); "
                f"use more images, or increase --{option}.epochs",
                file=sys.stderr,
            )
    if few:
        names = [name for name in dict.fromkeys(fields.values()) if name != "density"]
        options = (
            f"--{name.replace('_', '-')}.epochs {MORE_EPOCHS * getattr(config, name).epochs}"
            for name in names
            if getattr(config, name).epochs
        )
        faster = ", and --preset fast to save time" * (nearest_preset(config) == "default")
        say(
            f"warning: few steps: {' and '.join(few)}; for {MORE_EPOCHS} times as many: "
            f"{' '.join(options)}{faster}",
            file=sys.stderr,
        )


def _finish(result: TrainingResult, asked: str | None, *, quiet: bool, figures: bool) -> None:
    """Draw the figures of a finished run and write its model card."""
    if figures and result.data is None and asked != absolute_path(result.config.data):
        training_source(result.folder, None)  # an error if somebody else has named the images
    try:
        for line in _draw_figures(result, quiet=quiet) if figures else ():
            if not quiet:
                say(line)
        write_card(result.network, result.folder, draw=figures)
        if not quiet:
            say(f"to see what each expert stands for: poecaps explore {_quote(result.folder)}")
    except OSError as error:
        raise TrainingError(
            f"the model in {result.folder} is complete, but its figures or its card are not "
            f"({error})"
        ) from error


def _draw_figures(result: TrainingResult, *, quiet: bool) -> Iterator[str]:
    """Draw the figures of a run, and yield a line about each."""
    network, folder = result.network, own_folder(result.folder / FIGURES)
    images = result.held_out if result.held_out is not None else result.data
    if images is None:
        config = result.config
        images = load_images(network, str(result.folder), config.data, config.data_path, None)
    path = draw_reconstructions(network, images, folder / "reconstructions.png", RECONSTRUCTIONS)
    yield f"originals (top) and reconstructions (bottom): {path}"
    for domain in DOMAINS:
        path = draw_domain(network, domain, None, ROWS, 0, folder / f"{domain}.png")
        yield f"{describe_draws(domain)}: {path}"
    if network.density is not None:
        options = density_options(network, 0, quiet=quiet)
        path, _ = draw_density(network, None, ROWS, folder / "model.png", options)
        yield f"draws from the energy, by chains from noise: {path}"
    if not result.metrics:  # no stage had an epoch
        return
    try:
        path = plotting.training_curves(result.folder / METRICS, folder / "curves.png")
        yield f"training curves: {path}"
    except ModuleNotFoundError as error:
        yield (
            f"training curves: not drawn, because {error.name} is missing; "
            "pip install 'poecaps[plots]'"
        )
