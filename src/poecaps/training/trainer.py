"""The training loop: all stages of a run, from its start or from a checkpoint."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from poecaps._devices import use_bfloat16
from poecaps._files import ModelError
from poecaps._graphs import Graphed, pays_off
from poecaps.data import DataError
from poecaps.kernels import winograd
from poecaps.layer import CapsuleRouting
from poecaps.network import CapsuleNetwork
from poecaps.options import Architecture
from poecaps.serialization import load_state
from poecaps.training import origin
from poecaps.training import record as run_record
from poecaps.training.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    CheckpointTimer,
    newest_checkpoint,
    write_checkpoint,
    write_errors,
)
from poecaps.training.config import batch_sizes
from poecaps.training.errors import SavedInterrupt, TrainingError
from poecaps.training.features import FeatureCache
from poecaps.training.metrics import MetricsLog
from poecaps.training.optim import (
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    renew_optimizer,
    set_learning_rate,
)
from poecaps.training.progress import Progress, ProgressMeter
from poecaps.training.seeds import Stream, derive_seed, make_generator
from poecaps.training.stages import StageTrainer, make_stages
from poecaps.training.steps import TrainingStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from poecaps._progress import Report as Counted
    from poecaps.data import ImageSet
    from poecaps.training.config import Config
    from poecaps.training.distributed import Distributed
    from poecaps.training.interrupts import Interrupts
    from poecaps.training.optim import Optimizer

    Report = Callable[[Progress], None]

# Metrics are computed so often in an epoch, and in a stage at least.
METRICS_PER_EPOCH, METRICS_PER_STAGE = 2, 10
INTERRUPT_CHECK_STEPS = 10  # steps between two exchanges about interrupts with other processes
MAX_DENSITY_IMAGES = 100_000  # codes to which the density is fitted, a random subset of more images


@contextmanager
def _numerical_errors() -> Iterator[None]:
    """Raise TrainingError, with a remedy, if a covariance of features cannot be decomposed."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise TrainingError(
            "the features are not finite, or too large for their covariance to be computed; lower "
            "the learning rates, and train again"
        ) from error


class Trainer:
    """Training of a network in stages.

    Parameters
    ----------
    config
        Options of the run.
    data
        Training images.
    folder
        Folder of the run, for its checkpoint, metrics, record and network.
    device
        Device of the network.
    distributed
        Processes that train together; only the main process writes files and reports.
    interrupts
        Handler of signals, installed by the caller.
    report
        Function that is called with the progress after every step.
    encoding
        Function that is called with the number of images whose inputs or codes were computed
        before a stage or for the code density, and that of all images.
    held_out
        Images on which nothing is learned, for the running metrics.
    is_asked_for
        Whether the user has named the data, and not only a file of the run.
    """

    def __init__(
        self,
        config: Config,
        data: ImageSet,
        folder: Path,
        *,
        device: torch.device,
        distributed: Distributed,
        interrupts: Interrupts,
        report: Report | None = None,
        encoding: Counted | None = None,
        held_out: ImageSet | None = None,
        is_asked_for: bool = False,
    ) -> None:
        sizes = batch_sizes(config, len(data))
        for name, size in sizes.items():
            if size % distributed.size:
                raise ValueError(
                    f"batch_size must be a multiple of the number of processes, "
                    f"{distributed.size}, but is {size} for {name}; start another number of "
                    "processes"
                )
        self.config, self.folder, self.report = config, folder, report
        self.device, self.distributed, self.interrupts = device, distributed, interrupts
        architecture = Architecture.of(config.model, data.shape)
        generator = make_generator(config.seed, Stream.NETWORK)
        self.network = CapsuleNetwork(architecture, generator=generator).to(device)
        most = len(data) - len(data) % distributed.size
        self.batch_sizes = {name: min(size, most) for name, size in sizes.items()}
        self.steps_per_epoch = {name: len(data) // size for name, size in self.batch_sizes.items()}
        bfloat16 = use_bfloat16(config.precision, device)
        self.cache = FeatureCache(
            data,
            self.network,
            device,
            distributed,
            bfloat16=bfloat16,
            held_out=held_out,
            report=encoding if distributed.is_main else None,
        )
        self.stages = make_stages(config, self.cache)
        self.metrics_log = MetricsLog(folder)
        self.record: dict[str, Any] = {}  # of the run; only the main process writes it
        self.checkpoint_timer = CheckpointTimer(config.checkpoint_every)
        self.is_asked_for = is_asked_for
        self.has_saved = False  # whether this process has written a checkpoint
        # Measured in the last stage with convolutions and in the last one without.
        self.seconds_per_work: dict[bool, float] = {}

    @_numerical_errors()
    def fit(self, checkpoint: Checkpoint) -> None:
        """Train all stages from a checkpoint on, fit the code density and save the network."""
        self._load(checkpoint)
        if self.distributed.is_main:
            self.record = self._start_record(checkpoint)
        self._set_memory_format(torch.channels_last)  # convolutions are faster
        with winograd.in_training():
            for index in range(checkpoint.stage, len(self.stages)):
                start = checkpoint if index == checkpoint.stage else Checkpoint(self.config, index)
                self._fit_stage(index, start)
        with self._save_on_error(len(self.stages)):
            self._fit_code_density()
            self._set_memory_format(torch.contiguous_format)
            if self.distributed.is_main:
                with write_errors(self.folder):
                    self.network.save(self.folder)
                    self.record["finished"] = run_record.timestamp()
                    run_record.write(self.folder, self.record)
        self.network.requires_grad_(False)

    def _fit_stage(self, index: int, start: Checkpoint) -> None:
        """Train one stage, from a checkpoint within it or at its start."""
        stage, steps, first_step = self.stages[index], self._steps_of(index), start.step
        meter = self._make_meter(index, first_step)
        with self._save_on_error(index) if first_step == 0 else nullcontext():
            self._log(meter.update(first_step))
            stage.prepare(first_step == 0, make_generator(self.config.seed, Stream.STAGE, index))
            self._synchronize(stage)
            self._load_stage_state(stage, start)
            parameters = list(stage.module.parameters())
            optimizer = make_optimizer(stage.options, parameters, stage.learning_rate_factors())
            load_optimizer_state(optimizer, parameters, start.optimizer, self.folder / CHECKPOINT)
            generator = torch.Generator(self.device)
            self.network.eval()
            stage.module.train()
            meter.start_timer()
            train_step = self._make_step(stage, optimizer, generator, steps - first_step)
        self.interrupts.deferred = True
        epoch_steps, size = self.steps_per_epoch[stage.name], self.batch_sizes[stage.name]
        metrics_every = max(1, min(epoch_steps // METRICS_PER_EPOCH, steps // METRICS_PER_STAGE))
        order = _ImageOrder(self.config.seed, index, len(self.cache), size, self.device)
        for step in range(first_step, steps):
            if stage.should_select(step, steps):
                self._require_finite_weights(stage, step)
                stage.select(step, steps)
                parameters, factors = list(stage.module.parameters()), stage.learning_rate_factors()
                optimizer = renew_optimizer(optimizer, stage.options, parameters, factors)
                train_step = self._make_step(stage, optimizer, generator, steps - step)
            set_learning_rate(optimizer, stage.options.learning_rate_at(step / steps))
            generator.manual_seed(derive_seed(self.config.seed, Stream.STEP, index, step))
            loss = train_step(order.batch(step))
            done = step + 1
            metrics: dict[str, float] = {}
            if self.distributed.is_main and (done % metrics_every == 0 or done == steps):
                metrics = self._compute_metrics(stage, done, steps, loss)
            self._log(meter.update(done, metrics))
            if done < steps:
                self._save_or_stop(index, done, self._is_interrupted(done), optimizer)
        self._note_speed(stage, meter)
        stage.module.eval()
        stage.finish()
        self._record_selection(stage)
        self._synchronize(stage)
        interrupted = self.distributed.any(self.interrupts.requested, self.device)
        self._require_finite_weights(stage, steps)
        self._save_or_stop(index + 1, 0, interrupted)
        self.interrupts.deferred = False

    # ----------------------------------------------------------------------------------------------
    # Parts of the loop

    def _steps_of(self, index: int) -> int:
        """Return the number of steps of a stage; after the last stage there are none."""
        if index == len(self.stages):
            return 0
        stage = self.stages[index]
        return stage.options.epochs * self.steps_per_epoch[stage.name]

    def _make_meter(self, index: int, first_step: int) -> ProgressMeter:
        stage, work = self.stages[index], {each.name: self._work_of(each) for each in self.stages}
        return ProgressMeter(
            {each.name: each.options.epochs for each in self.stages},
            stage.name,
            first_step=first_step,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=self.batch_sizes[stage.name],
            work=work,
            expected={
                each.name: self.seconds_per_work[each.has_convolutions] * work[each.name]
                for each in self.stages[index + 1 :]
                if each.has_convolutions != stage.has_convolutions
                and each.has_convolutions in self.seconds_per_work
            },
        )

    def _work_of(self, stage: StageTrainer) -> float:
        """Estimate the multiplications of a step."""
        size = self.batch_sizes[stage.name]
        return size * stage.work(size)

    def _note_speed(self, stage: StageTrainer, meter: ProgressMeter) -> None:
        """Keep the speed of a stage that ends, from which that of later ones is estimated."""
        if meter.seconds_per_step is not None:
            speed = meter.seconds_per_step / self._work_of(stage)
            self.seconds_per_work[stage.has_convolutions] = speed

    def _make_step(
        self, stage: StageTrainer, optimizer: Optimizer, generator: torch.Generator, steps: int
    ) -> Callable[[Tensor], Tensor]:
        step = TrainingStep(stage, optimizer, self.distributed, generator)
        can_graph = self._can_graph(stage, steps)
        return Graphed(step, self.device, generator) if can_graph else step

    def _can_graph(self, stage: StageTrainer, steps: int) -> bool:
        """Return whether the steps of a stage can be CUDA graphs, and are enough to be worth it."""
        return (
            pays_off(steps, self.device)
            and self.distributed.size == 1
            and stage.options.optimizer == "adam"
            and stage.data_on_device()
            and all(
                layer.is_capturable
                for layer in stage.module.modules()
                if isinstance(layer, CapsuleRouting)
            )
        )

    def _synchronize(self, stage: StageTrainer) -> None:
        """Copy the state of a stage from the main process to all others."""
        tensors = [*stage.module.parameters(), *stage.module.buffers()]
        self.distributed.broadcast_from_main([tensor.detach() for tensor in tensors])

    def _is_interrupted(self, step: int) -> bool:
        """Return whether this process was interrupted or, asked from time to time, another one."""
        if self.distributed.size == 1:
            return self.interrupts.requested
        return step % INTERRUPT_CHECK_STEPS == 0 and self.distributed.any(
            self.interrupts.requested, self.device
        )

    def _fit_code_density(self) -> None:
        top = len(self.network.encoders)
        self.network.eval()
        self.cache.compute_codes(top)
        density = self.network.code_density
        if self.distributed.is_main:
            seed, count = self.config.seed, len(self.cache)
            order = torch.randperm(count, generator=make_generator(seed, Stream.DENSITY_IMAGES))
            codes = self.cache.codes(top, order[:MAX_DENSITY_IMAGES].sort().values)
            device = self.cache.statistics_device
            density.to(device).fit(codes.to(device), make_generator(seed, Stream.CODE_DENSITY))
            density.to(self.device)
        self.distributed.broadcast_from_main(list(density.buffers()))

    def _set_memory_format(self, memory_format: torch.memory_format) -> None:
        for module in (self.network.autoencoder, self.network.pixel_decoder):
            if module is not None:
                module.to(memory_format=memory_format)  # type: ignore[call-overload]

    # ----------------------------------------------------------------------------------------------
    # Metrics and divergence

    def _log(self, progress: Progress) -> None:
        """Append new metrics to the log and report the progress."""
        if not self.distributed.is_main:
            return
        if progress.measured:
            with write_errors(self.folder):
                self.metrics_log.append(progress)
        if self.report is not None:
            self.report(progress)

    def _compute_metrics(
        self, stage: StageTrainer, step: int, steps: int, loss: Tensor
    ) -> dict[str, float]:
        """Compute the running metrics; raise TrainingError if one is not finite."""
        stage.module.eval()
        with torch.no_grad():
            metrics = stage.metrics()
            held_out = stage.held_out_error()
        if held_out is not None:
            metrics["held_out_error"] = held_out
        stage.module.train()
        rate = stage.options.learning_rate_at((step - 1) / steps)
        metrics = {"loss": loss.item(), "learning_rate": rate, **metrics}
        if not all(map(math.isfinite, metrics.values())):
            raise self._divergence(stage, step)
        return metrics

    def _require_finite_weights(self, stage: StageTrainer, step: int) -> None:
        """Raise TrainingError if the weights of a stage are not finite, or far too large."""
        if stage.has_diverged():
            raise self._divergence(stage, step)

    def _divergence(self, stage: StageTrainer, step: int) -> TrainingError:
        steps = max(1, stage.options.epochs * self.steps_per_epoch[stage.name])
        rate = stage.options.learning_rate_at(step / steps)
        message = (
            f"{stage.name} diverged at step {step} with a learning rate of {rate:.3g}; "
            "lower the learning rate of this stage"
        )
        if newest_checkpoint(self.folder) is not None:
            message += f". The last checkpoint is in {self.folder}"
        return TrainingError(message)

    # ----------------------------------------------------------------------------------------------
    # Checkpoints and the record

    def _load(self, checkpoint: Checkpoint) -> None:
        """Restore the network; raise ModelError if the checkpoint does not fit the run."""
        source = self.folder / CHECKPOINT
        stage, step, stages = checkpoint.stage, checkpoint.step, len(self.stages)
        if not 0 <= stage <= stages or not 0 <= step <= self._steps_of(stage):
            raise ModelError(
                f"{source} is damaged: there is no step {step} of stage {stage + 1} of {stages}"
            )
        if (stage, step) != (0, 0):  # at the start, no weights are saved
            load_state(self.network, checkpoint.model, source)
            self.network.to(self.device)

    def _load_stage_state(self, stage: StageTrainer, start: Checkpoint) -> None:
        """Restore the state of a stage; raise ModelError if a checkpoint within it has none."""
        source = self.folder / CHECKPOINT
        if stage.has_state and start.step > 0 and not start.stage_state:
            raise ModelError(f"{source} is damaged: the state of {stage.name} is missing")
        stage.load_state(start.stage_state, source)

    def _save_or_stop(
        self, index: int, step: int, interrupted: bool, optimizer: Optimizer | None = None
    ) -> None:
        """Save a checkpoint if one is due, or if the run was interrupted, which ends it."""
        if interrupted or self._checkpoint_is_due(index, step):
            if step > 0:
                self._require_finite_weights(self.stages[index], step)
            self._save(index, step, optimizer)
        if interrupted:
            raise SavedInterrupt

    def _checkpoint_is_due(self, index: int, step: int) -> bool:
        """Return whether it is time for a checkpoint.

        If the state of the stage is divided among processes, all of them must take part, so they
        agree about it from time to time.
        """
        due = self.distributed.is_main and self.checkpoint_timer.is_due()
        if self.distributed.size == 1 or step == 0 or not self.stages[index].has_state:
            return due
        return step % INTERRUPT_CHECK_STEPS == 0 and self.distributed.any(due, self.device)

    def _save(self, index: int, step: int, optimizer: Optimizer | None = None) -> None:
        """Save a checkpoint."""
        state, stage_state = {}, {}
        if optimizer is not None:
            stage_state = self.stages[index].state()
            state = optimizer_state(optimizer, list(self.stages[index].module.parameters()))
        if not self.distributed.is_main:
            return
        model = self.network.state_dict()
        self._write_checkpoint(Checkpoint(self.config, index, step, model, state, stage_state))

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        with write_errors(self.folder):
            write_checkpoint(self.folder, checkpoint, is_ours=self.has_saved)
        self.has_saved = True
        self.checkpoint_timer.reset()

    def _record_selection(self, stage: StageTrainer) -> None:
        """Add to the record of the run which of several trained parts a stage has kept."""
        if stage.selection is not None and self.distributed.is_main:
            run_record.add_selection(self.record, stage.name, stage.selection)
            with write_errors(self.folder):
                run_record.write(self.folder, self.record)

    @contextmanager
    def _save_on_error(self, index: int) -> Iterator[None]:
        """If an error occurs between two stages, try to save the result of the earlier stages."""
        try:
            yield
        except BaseException as error:
            if index > 0:
                with suppress(TrainingError):
                    self._save(index, 0)
                    if isinstance(error, KeyboardInterrupt):
                        raise SavedInterrupt from error
            raise

    def _start_record(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Add this start to the record of the run."""
        data = run_record.describe_data(self.cache.data)
        record = run_record.new_record(self.config, data)
        if (self.folder / run_record.RECORD).is_file():
            record = run_record.read(self.folder)
            run_record.require_same_options(self.folder, record, self.config)
            if record["data"].get("sha256") != data["sha256"]:
                raise DataError(
                    f"the images of {data['source']} differ from those with which the run in "
                    f"{self.folder} was started"
                )
        if self.is_asked_for and (mark := origin.mark(self.config)) is not None:
            record[origin.MARK] = mark
        if (checkpoint.stage, checkpoint.step) == (0, 0):
            # So that a run that is killed at any moment can be resumed.
            self._write_checkpoint(Checkpoint(self.config))
        names = [stage.name for stage in self.stages]
        run_record.add_start(
            record,
            stage=[*names, "end"][checkpoint.stage],
            step=checkpoint.step,
            device=run_record.describe_device(self.device),
            precision="bfloat16" if self.cache.bfloat16 else "float32",
            processes=self.distributed.size,
        )
        with write_errors(self.folder):
            run_record.write(self.folder, record)
            self.metrics_log.truncate_after(checkpoint.stage, checkpoint.step, names)
        return record


class _ImageOrder:
    """The batches of a stage: each epoch has every image once, in a different random order."""

    def __init__(
        self, seed: int, stage: int, count: int, batch_size: int, device: torch.device
    ) -> None:
        self.seed, self.stage, self.count = seed, stage, count
        self.batch_size, self.device = batch_size, device
        self.epoch, self.order = -1, torch.empty(0)

    def batch(self, step: int) -> Tensor:
        """Return the indices of the images of a step: (B,)."""
        epoch, position = divmod(step, self.count // self.batch_size)
        if epoch != self.epoch:
            generator = make_generator(self.seed, Stream.ORDER, self.stage, epoch)
            self.epoch = epoch
            self.order = torch.randperm(self.count, generator=generator).to(self.device)
        return self.order[position * self.batch_size : (position + 1) * self.batch_size]
