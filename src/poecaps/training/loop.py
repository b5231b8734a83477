"""One loop that drives the stages, from wherever it was interrupted."""

from __future__ import annotations

import json
import math
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import kernels
from poecaps._files import ModelError, read_tensors, write_atomically, write_tensors
from poecaps.autoencoder import least_side
from poecaps.data import DataError, load
from poecaps.data.folder import suppress_skipped_warnings
from poecaps.data.datasets import NAMES
from poecaps.layer import CapsuleExperts
from poecaps.network import FORMAT, VERSION, Architecture, CapsuleNetwork, check_version
from poecaps.training import record as records
from poecaps.training import workers as processes
from poecaps.training.adam import FusedAdam
from poecaps.training.config import Config, Stage, from_json
from poecaps.training.errors import TrainingError
from poecaps.training.interrupts import Interrupts
from poecaps.training.progress import Progress
from poecaps.training.stages import Material, Task, plan
from poecaps.training.steps import FEWEST, PLAIN, Steps

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from poecaps.data import ImageSet

    Report = Callable[[Progress], None]
    Found = Callable[[ImageSet], None]
    Optimizer = torch.optim.Optimizer | FusedAdam

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"
MEASURES_PER_EPOCH = 2
STOP_CHECK = 10  # steps between two questions whether another process was interrupted
EXPLODED = 1e3  # a mean weight of this size is no model any more
FITTED = 100_000  # codes that the density is fitted to, of more images a random part


def train(
    config: Config,
    folder: str | os.PathLike[str],
    *,
    data: ImageSet | None = None,
    report: Report | None = None,
    found: Found | None = None,
) -> CapsuleNetwork:
    """Train a network and save it in a folder.

    The folder receives the network (`config.json`, `model.safetensors`), a record of the run (`run.json`: options,
    versions, fingerprint of the data, command), its running numbers (`metrics.jsonl`) and its last checkpoint.
    An interrupt (Ctrl-C) takes effect after the current step, once a checkpoint is saved.

    The network comes back frozen, as `poecaps.load` opens it; `network.requires_grad_()` unfreezes it.

    Started by `torchrun`, all processes train one network together, each on its share of every batch.

    Parameters
    ----------
    config
        What to train, on what and how.
    folder
        Where results go. It must be new or empty; to go on with a run, use `resume`.
    data
        Images in memory to learn from, in place of those that `config.data` names.
    report
        Called with a `poecaps.training.Progress` after every step.
    found
        Called once with the images, before anything is learned from them. Without it, a warning tells which files of
        a folder were skipped.

    Raises
    ------
    ValueError, TypeError
        If an option cannot be meant.
    FileExistsError
        If the folder holds something already.
    TrainingError
        If training diverges or a file cannot be written; the last checkpoint stays whole.
    """
    config.check()
    if data is None:
        config = replace(config, data=_settled(config.data), data_path=_settled(config.data_path))
    else:
        config = replace(config, data=data.source, data_path=None, size=None, channels=None)
    folder = Path(folder)
    if processes.attempt() > 0 and _was_launched_here(folder):
        return resume(folder, data=data, report=report, found=found)
    with _started(config, folder, report, found, data, new=True) as run:
        return run.go(task=0, step=0)


def _was_launched_here(folder: Path) -> bool:
    """Tell whether the run in a folder was begun by the same call of `torchrun`."""
    return (folder / CHECKPOINT).is_file() and read_tensors(folder / CHECKPOINT)[1].get(
        "launch"
    ) == processes.launch()


def _is_free(folder: Path) -> bool:
    """Tell whether there is nothing in a folder but what a run left that was killed before it could begin."""
    return not folder.exists() or all(
        file.name.startswith(f".{CHECKPOINT}-") for file in folder.iterdir()
    )


def resume(
    folder: str | os.PathLike[str],
    *,
    device: str | None = None,
    data: ImageSet | None = None,
    report: Report | None = None,
    found: Found | None = None,
) -> CapsuleNetwork:
    """Go on with a run from its last checkpoint; on a CPU the result is that of a run without a break, bit for bit.

    A run that is finished is only opened.

    Parameters
    ----------
    folder
        Where the run is.
    device
        Where to go on; by default as the run was told when it began.
    data
        The images, if the run was given them in memory.
    report
        Called with a `poecaps.training.Progress` after every step.
    found
        Called once with the images, before anything is learned from them. Without it, a warning tells which files of
        a folder were skipped.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint in the folder.
    ModelError
        If the checkpoint is damaged, foreign, or of a newer version.
    poecaps.data.DataError
        If the images are no longer those that the run began with.
    """
    folder = Path(folder)
    source = folder / CHECKPOINT
    if not source.is_file():
        raise FileNotFoundError(
            f"{folder} holds no run to go on with: there is no {CHECKPOINT} in it"
        )
    tensors, about = read_tensors(source)
    check_version(about, source)
    try:
        config = from_json(Config, about["config"])
        config = replace(config, device=device or config.device)
        config.check()
        task, step = int(about["task"]), int(about["step"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{source} is no checkpoint of a run ({error})") from error
    if is_finished(folder):
        return CapsuleNetwork.load(folder, find_device(config.device))
    with _started(config, folder, report, found, data) as run:
        if not 0 <= task <= len(run.tasks) or not 0 <= step <= run.steps_of(task):
            raise ModelError(
                f"{source} is damaged: it stands at step {step} of stage {task + 1} of {len(run.tasks)}"
            )
        if (task, step) == (0, 0):  # nothing is learned yet, and nothing was saved
            return run.go(task, step)
        model = {
            name.removeprefix("model."): value
            for name, value in tensors.items()
            if name.startswith("model.")
        }
        run.network.load_tensors(model, source)
        run.network.to(run.device)
        state = {name: value for name, value in tensors.items() if name.startswith("optimizer.")}
        return run.go(task, step, state)


def is_finished(folder: Path) -> bool:
    """Tell whether the run in a folder is done and its network there."""
    whole = all(
        (folder / name).is_file() for name in (records.RECORD, "config.json", "model.safetensors")
    )
    return whole and bool(records.read(folder).get("finished"))


@contextmanager
def _started(
    config: Config,
    folder: Path,
    report: Report | None,
    found: Found | None,
    data: ImageSet | None,
    *,
    new: bool = False,
) -> Iterator[_Run]:
    device, interrupts = find_device(config.device), Interrupts()
    with interrupts.watched(), processes.joined(device) as workers:
        if new and workers.any(workers.first and not _is_free(folder), device):
            raise FileExistsError(
                f"{folder} is not empty; resume the run in it, or choose a new folder"
            )
        if data is None:
            smallest = least_side(config.model.kernel_size)
            with nullcontext() if found is None and workers.first else suppress_skipped_warnings():
                data = load(
                    config.data,
                    path=config.data_path,
                    size=config.size,
                    channels=config.channels,
                    smallest=smallest,
                )
        if found is not None:
            found(data)
        yield _Run(config, data, folder, report, device, workers, interrupts)


class _Run:
    """Everything a run holds while it goes."""

    def __init__(
        self,
        config: Config,
        data: ImageSet,
        folder: Path,
        report: Report | None,
        device: torch.device,
        workers: processes.Workers,
        interrupts: Interrupts,
    ) -> None:
        self.config, self.folder, self.report = config, folder, report
        self.device, self.workers, self.interrupts = device, workers, interrupts
        _require_variety(data)
        architecture = Architecture(
            **{each.name: getattr(config.model, each.name) for each in fields(config.model)},
            image_shape=data.shape,
        )
        self.network = CapsuleNetwork(architecture, generator=_generator(config.seed, 0)).to(device)
        if config.batch_size % workers.size:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes, {workers.size}, but is {config.batch_size}"
            )
        self.batch_size = min(config.batch_size, len(data) - len(data) % workers.size)
        self.steps_per_epoch = len(data) // self.batch_size
        self.half = _wants_bfloat16(config.precision, device)
        self.material = Material(data, self.network, device, workers, half=self.half)
        self.tasks = plan(config, self.material)
        self.order: tuple[tuple[int, int], Tensor] | None = None
        self.saved = time.monotonic()

    def go(
        self, task: int, step: int, optimizer_state: dict[str, Tensor] | None = None
    ) -> CapsuleNetwork:
        """Run the tasks from this position on, then fit the density of codes and save the network."""
        record = self._begin(task, step) if self.workers.first else {}
        self._lay_filters(torch.channels_last)  # faster
        for index in range(task, len(self.tasks)):
            self._do(index, step, optimizer_state or {})
            step, optimizer_state = 0, None
        with self._kept_if_broken(len(self.tasks)):
            self._fit_density()
            self._lay_filters(torch.contiguous_format)
            if self.workers.first:
                self._write(lambda: self.network.save(self.folder))
                record["finished"] = records.now()
                self._write(lambda: records.write(self.folder, record))
        return self.network.requires_grad_(False)

    def _lay_filters(self, memory_format: torch.memory_format) -> None:
        for part in (self.network.autoencoder, self.network.pixel_decoder):
            if part is not None:
                part.to(memory_format=memory_format)  # type: ignore[call-overload]

    def steps_of(self, task: int) -> int:
        """Count the steps of a task; beyond the last task there are none."""
        return self.tasks[task].stage.epochs * self.steps_per_epoch if task < len(self.tasks) else 0

    def _begin(self, task: int, step: int) -> dict[str, Any]:
        """Write into the folder what is started here, on which data."""
        self._write(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        if (task, step) == (0, 0):  # so that a run killed at any moment can go on
            self._save_checkpoint(0, 0, {})
        data = records.describe_data(self.material.data)
        record = records.begin(self.config, data)
        if (self.folder / records.RECORD).is_file():
            record = records.read(self.folder)
            if record.get("data", {}).get("sha256") != data["sha256"]:
                raise DataError(
                    f"the images of {data['source']} are not those that the run in {self.folder} began with"
                )
        records.start(
            record,
            stage=self.tasks[task].name if task < len(self.tasks) else "end",
            step=step,
            device=records.describe_device(self.device),
            precision="bfloat16" if self.half else "float32",
            processes=self.workers.size,
        )
        self._write(lambda: records.write(self.folder, record))
        self._write(lambda: self._forget_metrics_after(task, step))
        return record

    def _do(self, index: int, first_step: int, optimizer_state: dict[str, Tensor]) -> None:
        """Take the steps of one task."""
        task, fresh = self.tasks[index], first_step == 0
        total = self.steps_of(index)
        pace = _Pace(self, index, first_step)
        with self._kept_if_broken(index) if fresh else nullcontext():
            pace.tell(first_step, {})
            task.prepare(fresh, _generator(self.config.seed, 4, index))
            parameters, buffers = list(task.part.parameters()), list(task.part.buffers())
            self.workers.follow_first([tensor.detach() for tensor in (*parameters, *buffers)])
            recorded = self._can_record(task, total - first_step)
            optimizer = _optimizer(task.stage, parameters)
            _restore(optimizer, parameters, optimizer_state, self.folder / CHECKPOINT)
            draws = torch.Generator(self.device)
            every = max(1, self.steps_per_epoch // MEASURES_PER_EPOCH)
            self.network.eval()
            task.part.train()
            pace.begin()
            steps = Steps(task, optimizer, self.workers, draws, recorded=recorded)
        self.interrupts.stepping = True
        for step in range(first_step, total):
            _set_rate(optimizer, task.stage.learning_rate_at(step / total))
            # What is drawn at random is a function of the position, so that a resumed run draws the same.
            draws.manual_seed(_seed(self.config.seed, 2, index, step))
            loss = steps.take(self._batch(index, step))
            done = step + 1
            seen = (
                self._measure(task, done, total, loss) if done % every == 0 or done == total else {}
            )
            pace.tell(done, seen)
            stop = self._is_interrupted(done)
            if done < total and (stop or self._is_time()):
                self._require_sane(task, done)
                self._keep(index, done, optimizer)
            if stop and done < total:
                raise KeyboardInterrupt
        task.part.eval()
        task.finish()
        self.workers.follow_first([tensor.detach() for tensor in (*parameters, *buffers)])
        stop = self.workers.any(self.interrupts.asked, self.device)
        self._require_sane(task, total)
        if stop or self._is_time():
            self._keep(index + 1, 0)
        self.interrupts.stepping = False
        if stop:
            raise KeyboardInterrupt

    def _can_record(self, task: Task, steps: int) -> bool:
        """Tell whether the steps of a task can be replays of a recorded one, and are enough for it to pay."""
        alone = self.device.type == "cuda" and self.workers.size == 1
        layers = [each for each in task.part.modules() if isinstance(each, CapsuleExperts)]
        # What routes without Triton looks at its numbers, and that cannot be recorded.
        quick = all(
            kernels.choose(each.weight, each.weight, each.backend) == "triton" for each in layers
        )
        enough = steps >= PLAIN + FEWEST
        return alone and quick and enough and task.stage.optimizer == "adam" and task.is_resident()

    def _batch(self, index: int, step: int) -> Tensor:
        """Choose the images of a step: each epoch sees every image once, in an order of its own."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.order is None or self.order[0] != (index, epoch):
            order = torch.randperm(
                len(self.material), generator=_generator(self.config.seed, 3, index, epoch)
            )
            self.order = (index, epoch), order.to(self.device)
        return self.order[1][position * self.batch_size : (position + 1) * self.batch_size]

    def _is_interrupted(self, done: int) -> bool:
        """Tell whether this process was interrupted or, asked now and then, another."""
        if self.workers.size == 1:
            return self.interrupts.asked
        return done % STOP_CHECK == 0 and self.workers.any(self.interrupts.asked, self.device)

    def _fit_density(self) -> None:
        top = len(self.network.encoders)
        self.network.eval()
        self.material.make_codes(top)
        if self.workers.first:
            chosen = (
                torch.randperm(len(self.material), generator=_generator(self.config.seed, 5))[
                    :FITTED
                ]
                .sort()
                .values
            )
            self.network.code_density.fit(
                self.material.codes(top, chosen), _generator(self.config.seed, 1)
            )
        self.workers.follow_first(list(self.network.code_density.buffers()))

    # Results, which only the first process has

    def _measure(self, task: Task, step: int, total: int, loss: Tensor) -> dict[str, float]:
        """Measure whether the part learns, or fail if it has diverged."""
        if not self.workers.first:
            return {}
        task.part.eval()
        with torch.no_grad():
            seen = task.measure()
        task.part.train()
        numbers = {
            "loss": loss.item(),
            "learning_rate": task.stage.learning_rate_at((step - 1) / total),
            **seen,
        }
        if not all(map(math.isfinite, numbers.values())):
            raise self._diverged(task, step)
        return numbers

    def note(self, progress: Progress) -> None:
        """Append new numbers to the metrics, and report."""
        if not self.workers.first:
            return
        if progress.measured:
            line = {
                "stage": progress.stage,
                "step": progress.step,
                "epoch": progress.epoch,
                **progress.numbers,
                "images_per_second": round(progress.images_per_second, 1),
            }

            def append() -> None:
                with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

            self._write(append)
        if self.report is not None:
            self.report(progress)

    def _forget_metrics_after(self, task: int, step: int) -> None:
        """Drop the lines that a broken run wrote after its last checkpoint; they will be written again."""
        path = self.folder / METRICS
        if not path.exists():
            return
        order = {each.name: index for index, each in enumerate(self.tasks)}

        def counts(text: str) -> bool:
            try:
                line = json.loads(text)
                return bool((order[line["stage"]], line["step"]) <= (task, step))
            except (ValueError, TypeError, KeyError):  # cut by a crash
                return False

        kept = [
            text
            for text in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if counts(text)
        ]
        write_atomically(path, "".join(f"{text}\n" for text in kept).encode())

    def _diverged(self, task: Task, step: int) -> TrainingError:
        rate = task.stage.learning_rate_at(step / max(1, task.stage.epochs * self.steps_per_epoch))
        kept = (
            f"; the last checkpoint is kept in {self.folder}"
            if (self.folder / CHECKPOINT).exists()
            else ""
        )
        return TrainingError(
            f"{task.name} diverged at step {step} with a learning rate of {rate:.3g}; lower the rate of the stage{kept}"
        )

    def _is_time(self) -> bool:
        """Tell whether the last checkpoint is so old that the next is due."""
        return self.workers.first and time.monotonic() - self.saved >= self.config.checkpoint_every

    def _require_sane(self, task: Task, step: int) -> None:
        """Fail if the weights of a part have run away."""
        means = torch.stack(
            [parameter.detach().abs().mean() for parameter in task.part.parameters()]
        )
        if not bool((means < EXPLODED).all()):
            raise self._diverged(task, step)

    def _keep(self, index: int, step: int, optimizer: Optimizer | None = None) -> None:
        """Save everything that the run needs to go on from this position."""
        if not self.workers.first:
            return
        tensors = {f"model.{name}": value for name, value in self.network.state_dict().items()}
        if optimizer is not None:
            for number, parameter in enumerate(self.tasks[index].part.parameters()):
                for name, value in optimizer.state[parameter].items():
                    tensors[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
        self._save_checkpoint(index, step, tensors)

    @contextmanager
    def _kept_if_broken(self, index: int) -> Iterator[None]:
        """Where a run breaks off between two stages, save what those before this one have learned, if that can be."""
        try:
            yield
        except BaseException:
            if index > 0:
                with suppress(TrainingError):
                    self._keep(index, 0)
            raise

    def _save_checkpoint(self, index: int, step: int, tensors: dict[str, Tensor]) -> None:
        about = {
            "format": FORMAT,
            "version": VERSION,
            "config": asdict(self.config),
            "task": index,
            "step": step,
            "launch": processes.launch(),
        }
        self._write(lambda: write_tensors(self.folder / CHECKPOINT, tensors, about))
        self.saved = time.monotonic()

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            saved = (self.folder / CHECKPOINT).is_file()
            remedy = (
                "make room and go on from the last checkpoint with resume"
                if saved
                else "name another folder"
            )
            raise TrainingError(f"cannot write into {self.folder} ({error}); {remedy}") from error


class _Pace:
    """How fast a task goes, and where it stands."""

    def __init__(self, run: _Run, index: int, first_step: int) -> None:
        self.run, self.index, self.first_step = run, index, first_step
        self.numbers: dict[str, float] = {}
        epochs = [task.stage.epochs for task in run.tasks]
        self.epochs, self.before = epochs[index], sum(epochs[:index]) * run.steps_per_epoch
        self.begin()

    def begin(self) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def tell(self, done: int, seen: dict[str, float]) -> None:
        """Tell where the task stands after a step, with numbers if some were measured."""
        run, steps = self.run, self.epochs * self.run.steps_per_epoch
        pace = (done - self.first_step) / max(
            time.perf_counter() - self.began, 1e-9
        )  # steps a second
        self.numbers = seen or self.numbers
        run.note(
            Progress(
                stage=run.tasks[self.index].name,
                number=self.index + 1,
                stages=len(run.tasks),
                step=done,
                steps=steps,
                epoch=done / run.steps_per_epoch,
                epochs=self.epochs,
                total_step=self.before + done,
                images_per_second=pace * run.batch_size,
                seconds_left=(steps - done) / pace if pace else math.inf,
                numbers=self.numbers,
                measured=bool(seen),
            )
        )


def _require_variety(data: ImageSet) -> None:
    """Refuse images from which nothing can be learned."""
    if all(
        (data.images[start : start + 1024] == data.images[:1]).all()
        for start in range(0, len(data), 1024)
    ):
        what = (
            "there is only one image" if len(data) == 1 else f"all {len(data)} images are the same"
        )
        raise DataError(f"{what} in {data.source}; there is nothing to learn from it")


def _settled(path: Any) -> Any:
    """Make a path absolute, so that a run can go on from another folder; the name of a set stays as it is."""
    if not path or path in NAMES or not Path(path).expanduser().exists():
        return path
    return str(Path(path).expanduser().resolve())


def _optimizer(stage: Stage, parameters: list[nn.Parameter]) -> Optimizer:
    betas = (stage.momentum, 0.999)
    if stage.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=stage.learning_rate,
            momentum=stage.momentum,
            weight_decay=stage.weight_decay,
        )
    if parameters[0].device.type == "cuda":
        return FusedAdam(parameters, stage.learning_rate, betas, stage.weight_decay)
    return torch.optim.Adam(
        parameters, lr=stage.learning_rate, betas=betas, weight_decay=stage.weight_decay
    )


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _restore(
    optimizer: Optimizer, parameters: list[nn.Parameter], state: dict[str, Tensor], source: Path
) -> None:
    """Give an optimiser its memory back: for each parameter, what the optimiser keeps, in the parameter's shape."""
    if not state:
        return
    names = (
        {"momentum_buffer"}
        if isinstance(optimizer, torch.optim.SGD)
        else {"step", "exp_avg", "exp_avg_sq"}
    )
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]:
        names = set()
    shapes = {
        f"optimizer.{number}.{name}": () if name == "step" else tuple(parameter.shape)
        for number, parameter in enumerate(parameters)
        for name in names
    }
    found = {name: tuple(value.shape) for name, value in state.items()}
    wrong = sorted(
        name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)
    )
    if wrong or not all(
        value.is_floating_point() and value.isfinite().all() for value in state.values()
    ):
        raise ModelError(
            f"{source} is damaged: {' and '.join(wrong[:1]) or 'a number'} is no state of this optimiser"
        )
    for number, parameter in enumerate(parameters):
        for name in names:
            value = state[f"optimizer.{number}.{name}"]
            if name == "step":  # torch's own Adam counts on the host
                kept = value.to(
                    parameter.device if isinstance(optimizer, FusedAdam) else "cpu", torch.float32
                )
            else:
                kept = torch.empty_like(parameter).copy_(value)  # laid out as the parameter is
            optimizer.state[parameter][name] = kept


def _seed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*numbers))


def find_device(name: str) -> torch.device:
    """Turn the name of a device into one that is there; each process of a machine gets a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{processes.local_rank()}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("poecaps needs float64, and was tried on no other kind of device")
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises almost anything here
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device must be auto, cpu, or a GPU such as cuda:0, but is {name!r} ({reason})"
        ) from error
    return device


def _wants_bfloat16(precision: str, device: torch.device) -> bool:
    """Tell whether convolutions should run in bfloat16; by themselves, only where the machine multiplies in it."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, test, bool)()) for test in tests)
