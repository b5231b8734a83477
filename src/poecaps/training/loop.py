"""One loop that drives the three stages: autoencoder, capsule encoders, capsule decoders."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import functional as F
from poecaps._files import ModelError, read_tensors, write_tensors
from poecaps.data import load
from poecaps.data._storage import allocate
from poecaps.network import FORMAT, VERSION, CapsuleNetwork, check_version
from poecaps.training.config import Config, EncoderStage, Stage, from_json

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from poecaps.data import ImageSet

CHUNK = 250  # images that go through the frozen autoencoder together
PROBE = 512  # training images that the running numbers are measured on
LOGS_PER_EPOCH = 4
EXPLODED = 1e6  # a mean weight of this size is no model any more


class TrainingError(RuntimeError):
    """Training diverged, or its results cannot be written."""

    __module__ = "poecaps"


def train(
    config: Config, folder: str | os.PathLike[str], *, report: Callable[[dict[str, Any]], None] | None = None
) -> CapsuleNetwork:
    """Train a network and save it in a folder, with its running numbers in `metrics.jsonl`.

    Parameters
    ----------
    config
        What to train, on what and how.
    folder
        Where results go. It must be new or empty; to go on with a run, use `resume`.
    report
        Called with the running numbers, a few times an epoch.

    Raises
    ------
    FileExistsError
        If the folder holds something already.
    TrainingError
        If training diverges or a file cannot be written; the last checkpoint stays whole.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder, or go on with the run in it by resume")
    return _Run(config, folder, report).go(task=0, step=0)


def resume(folder: str | os.PathLike[str], *, report: Callable[[dict[str, Any]], None] | None = None) -> CapsuleNetwork:
    """Go on with a run from its last checkpoint; on a CPU the result is that of a run without a break, bit for bit.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint in the folder.
    ModelError
        If the checkpoint is damaged, foreign, or of a newer version.
    """
    folder = Path(folder)
    source = folder / CHECKPOINT
    if not source.is_file():
        raise FileNotFoundError(f"{folder} holds no run to go on with: there is no {CHECKPOINT} in it")
    tensors, about = read_tensors(source)
    check_version(about, source)
    try:
        config = from_json(Config, about["config"])
        task, step = int(about["task"]), int(about["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{source} is no checkpoint of a run ({error})") from error
    run = _Run(config, folder, report)
    model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    run.network.load_tensors(model, source)
    run.network.to(run.device)
    run.forget_metrics_after(task, step)
    return run.go(task, step, {name: value for name, value in tensors.items() if name.startswith("optimizer.")})


CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"


@dataclass(frozen=True)
class _Task:
    """One stage for one part of the network."""

    name: str
    stage: Stage
    part: nn.Module
    prepare: Callable[[], None]  # before the first step
    loss: Callable[[np.ndarray[Any, Any]], Tensor]  # of the images with these indices
    measure: Callable[[], dict[str, float]]


class _Run:
    """Everything a run holds while it goes."""

    def __init__(self, config: Config, folder: Path, report: Callable[[dict[str, Any]], None] | None) -> None:
        self.config, self.folder, self.report = config, folder, report
        self.data: ImageSet = load(
            config.data,
            **({"path": config.data_path} if config.data_path else {}),  # type: ignore[arg-type]
            **({"size": config.size} if config.size else {}),  # type: ignore[arg-type]
            **({"channels": config.channels} if config.channels else {}),  # type: ignore[arg-type]
        )
        self.device = _device(config.device)
        self.half = _wants_bfloat16(config.precision, self.device)
        architecture = replace(config.model, image_shape=self.data.shape)
        self.network = CapsuleNetwork(architecture, generator=_generator(config.seed, 0)).to(self.device)
        self.batch_size = min(config.batch_size, len(self.data))
        self.steps_per_epoch = len(self.data) // self.batch_size
        self.activations: np.ndarray[Any, Any] | None = None
        self.codes: dict[int, Tensor] = {}
        self.tasks = list(self._plan())

    def go(self, task: int, step: int, optimizer_state: dict[str, Tensor] | None = None) -> CapsuleNetwork:
        """Run the tasks from this position on, then fit the density of codes and save the network."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for index in range(task, len(self.tasks)):
            self._do(index, step, optimizer_state or {})
            step, optimizer_state = 0, None
        self.network.eval()
        top = len(self.network.encoders)
        self.network.density.fit(self._codes(top), _generator(self.config.seed, 1))
        self._write(lambda: self.network.save(self.folder))
        return self.network

    def _plan(self) -> Iterator[_Task]:
        config, network = self.config, self.network
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        yield _Task(
            "autoencoder",
            config.autoencoder,
            network.autoencoder,
            nothing,
            self._autoencoder_loss,
            self._see_autoencoder,
        )
        for layer in range(len(network.encoders)):
            yield _Task(
                f"encoder {layer + 1}",
                config.encoder,
                network.encoders[layer],
                lambda layer=layer: self._prepare_encoder(layer),  # type: ignore[misc]
                lambda indices, layer=layer: self._encoder_loss(layer, indices),  # type: ignore[misc]
                lambda layer=layer: self._see_encoder(layer),  # type: ignore[misc]
            )
        for layer in range(len(network.decoders)):
            yield _Task(
                f"decoder {layer + 1}",
                config.decoder,
                network.decoders[layer],
                lambda layer=layer: self._reset(network.decoders[layer], config.decoder.std),  # type: ignore[misc]
                lambda indices, layer=layer: self._decoder_loss(layer, indices),  # type: ignore[misc]
                lambda layer=layer: self._see_decoder(layer),  # type: ignore[misc]
            )

    def _do(self, index: int, first_step: int, optimizer_state: dict[str, Tensor]) -> None:
        """Take the steps of one task."""
        task = self.tasks[index]
        if first_step == 0:
            task.prepare()
        parameters = list(task.part.parameters())
        optimizer = _optimizer(task.stage, parameters)
        _restore(optimizer, parameters, optimizer_state)
        total = task.stage.epochs * self.steps_per_epoch
        every = max(1, self.steps_per_epoch // LOGS_PER_EPOCH)
        self.network.eval()
        task.part.train()
        for step in range(first_step, total):
            for group in optimizer.param_groups:
                group["lr"] = task.stage.rate_at(step / total)
            # What is drawn at random is a function of the position, so that a resumed run draws the same.
            torch.manual_seed(_seed(self.config.seed, 2, index, step))
            loss = task.loss(self._batch(index, step))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            done = step + 1
            if done % every == 0 or done == total:
                self._log(task, done, total, loss.item())
            if done % self.config.checkpoint_every == 0 and done < total:
                self._check_weights(task, done)
                self._save_checkpoint(index, done, optimizer, parameters)
        self._check_weights(task, total)
        task.part.eval()
        self._save_checkpoint(index + 1, 0, None, [])

    def _batch(self, index: int, step: int) -> np.ndarray[Any, Any]:
        """Choose the images of a step: each epoch sees every image once, in an order of its own."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.data), generator=_generator(self.config.seed, 3, index, epoch)).numpy()
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    # What each part learns from, and the numbers that tell whether it learns

    def _autoencoder_loss(self, indices: np.ndarray[Any, Any]) -> Tensor:
        with self._autocast():
            return self.network.autoencoder.loss(self._images(indices))

    def _see_autoencoder(self) -> dict[str, float]:
        images = self._images(self._probe())
        with self._autocast():
            error = (self.network.autoencoder(images).float() - images).square().sum()
        return {"reconstruction_error": (error / (images - images.mean(0)).square().sum()).item()}

    def _prepare_encoder(self, layer: int) -> None:
        if layer == 0:
            parts = [torch.from_numpy(part) for part in np.array_split(self._activations(), self._parts())]
            self.network.scaling.fit([part.to(self.device) for part in parts] if self.device.type != "cpu" else parts)
        self._reset(self.network.encoders[layer], self.config.encoder.std)

    def _encoder_loss(self, layer: int, indices: np.ndarray[Any, Any]) -> Tensor:
        stage: EncoderStage = self.config.encoder
        x = self._inputs(layer, indices)
        loss: Tensor = self.network.encoders[layer].contrastive_divergence(x, stage.k, mixing=stage.mixing)  # type: ignore[operator]
        return loss

    def _see_encoder(self, layer: int) -> dict[str, float]:
        encoder = self.network.encoders[layer]
        x = self._inputs(layer, self._probe())
        error = (encoder.reconstruct(x) - x).square().sum() / x.square().sum()  # type: ignore[operator]
        code = encoder(x)
        return {
            "reconstruction_error": error.item(),
            "firing": code.norm(dim=-1).mean().item(),
            "effective_rank": effective_rank(code.flatten(1)),
        }

    def _decoder_loss(self, layer: int, indices: np.ndarray[Any, Any]) -> Tensor:
        y, x = self._codes(layer + 1)[indices], self._inputs(layer, indices)
        loss: Tensor = self.network.decoders[layer].decoding_loss(y, x)  # type: ignore[operator]
        return loss

    def _see_decoder(self, layer: int) -> dict[str, float]:
        probe = self._probe()
        z = F.unsquash(self._inputs(layer, probe))
        error = F.unsquash(self.network.decoders[layer](self._codes(layer + 1)[probe])) - z
        return {"reconstruction_error": (error.square().sum() / (z - z.mean(0)).square().sum()).item()}

    # Material

    def _images(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return self.data.batch(indices).to(self.device)

    def _activations(self) -> np.ndarray[Any, Any]:
        """Features of all images as capsules, from the trained autoencoder, made once: (N, I, K)."""
        if self.activations is None:
            self.network.autoencoder.eval()
            dtype = np.dtype(np.float16 if self.half else np.float32)
            made: np.ndarray[Any, Any] | None = None
            for indices in np.array_split(np.arange(len(self.data)), self._parts()):
                with torch.no_grad(), self._autocast():
                    part = self.network.activations(self._images(indices)).float().cpu().numpy()
                made = allocate((len(self.data), *part.shape[1:]), dtype) if made is None else made
                made[indices] = part
            self.activations = made
        assert self.activations is not None  # noqa: S101 (there is at least one image)
        return self.activations

    def _inputs(self, layer: int, indices: np.ndarray[Any, Any]) -> Tensor:
        """Squashed capsules that a layer sees: (B, I, K)."""
        if layer > 0:
            return self._codes(layer)[indices]
        with torch.no_grad():
            a = torch.from_numpy(self._activations()[indices]).to(self.device).float()
            return self.network.scaling.to_capsules(a)

    def _codes(self, layer: int) -> Tensor:
        """Experts of a trained layer, counted from 1, for all images, made once: (N, J, D)."""
        if layer not in self.codes:
            encoder = self.network.encoders[layer - 1].eval()
            parts = np.array_split(np.arange(len(self.data)), self._parts())
            with torch.no_grad():
                self.codes[layer] = torch.cat([encoder(self._inputs(layer - 1, indices)) for indices in parts])
        return self.codes[layer]

    def _parts(self) -> int:
        return math.ceil(len(self.data) / CHUNK)

    def _probe(self) -> np.ndarray[Any, Any]:
        return np.arange(min(PROBE, len(self.data)))

    def _reset(self, part: nn.Module, std: float) -> None:
        generator = _generator(self.config.seed, 4)
        part.cpu()
        part.reset_parameters(std=std, generator=generator)  # type: ignore[operator]
        part.to(self.device)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.half else nullcontext()

    # Results

    def _log(self, task: _Task, step: int, total: int, loss: float) -> None:
        task.part.eval()
        with torch.no_grad():
            seen = task.measure()
        task.part.train()
        line: dict[str, Any] = {
            "stage": task.name,
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "loss": loss,
            "learning_rate": task.stage.rate_at((step - 1) / total),
            **seen,
        }
        if not all(math.isfinite(value) for value in (loss, *seen.values())):
            raise self._diverged(task, step)

        def append() -> None:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

        self._write(append)
        if self.report is not None:
            self.report(line | {"steps": total})

    def forget_metrics_after(self, task: int, step: int) -> None:
        """Drop the lines that a broken run wrote after its last checkpoint; they will be written again."""
        path = self.folder / METRICS
        if not path.exists():
            return
        order = {each.name: index for index, each in enumerate(self.tasks)}
        whole = [text for text in path.read_text(encoding="utf-8").splitlines() if text.endswith("}")]
        lines = [(json.loads(text), text) for text in whole]
        kept = [text for line, text in lines if (order[line["stage"]], line["step"]) <= (task, step)]
        path.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")

    def _check_weights(self, task: _Task, step: int) -> None:
        for parameter in task.part.parameters():
            size = parameter.detach().abs().mean().item()
            if not size < EXPLODED:
                raise self._diverged(task, step)

    def _diverged(self, task: _Task, step: int) -> TrainingError:
        rate = task.stage.rate_at(step / (task.stage.epochs * self.steps_per_epoch))
        kept = f"; the last checkpoint is kept in {self.folder}" if (self.folder / CHECKPOINT).exists() else ""
        return TrainingError(
            f"{task.name} diverged at step {step} with a learning rate of {rate:.3g}; lower the rate of the stage{kept}"
        )

    def _save_checkpoint(
        self, task: int, step: int, optimizer: torch.optim.Optimizer | None, parameters: list[nn.Parameter]
    ) -> None:
        tensors = {f"model.{name}": value for name, value in self.network.state_dict().items()}
        if optimizer is not None:
            for index, parameter in enumerate(parameters):
                for name, value in optimizer.state[parameter].items():
                    tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
        about = {"format": FORMAT, "version": VERSION, "config": asdict(self.config), "task": task, "step": step}
        self._write(lambda: write_tensors(self.folder / CHECKPOINT, tensors, about))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise TrainingError(
                f"cannot write into {self.folder} ({error}); make room and go on from the last checkpoint with resume"
            ) from error


def effective_rank(code: Tensor) -> float:
    """Participation ratio (Σλ)²/Σλ² of the covariance of codes (N, S): how many directions carry their variance."""
    centred = (code - code.mean(0)).double()
    covariance = centred.T @ centred
    total = covariance.trace()  # Σλ; Σλ² is the sum of its squared entries
    return (total.square() / covariance.square().sum()).item() if total > 0 else 0.0


def _optimizer(stage: Stage, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if stage.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=stage.rate, betas=(stage.momentum, 0.999), weight_decay=stage.l2)
    return torch.optim.SGD(parameters, lr=stage.rate, momentum=stage.momentum, weight_decay=stage.l2)


def _restore(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], state: dict[str, Tensor]) -> None:
    for key, value in state.items():
        _, index, name = key.split(".")
        parameter = parameters[int(index)]
        at_home = value.shape == parameter.shape  # counters of steps stay where the optimiser keeps them
        optimizer.state[parameter][name] = value.to(parameter.device) if at_home else value


def _seed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*numbers))


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _wants_bfloat16(precision: str, device: torch.device) -> bool:
    if precision == "auto":
        if device.type == "cpu":
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16"
