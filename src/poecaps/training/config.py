"""What a training run is made of, as dataclasses that are saved as JSON beside its results."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

from poecaps import _checks as checks
from poecaps.functional import MIXINGS, Mixing
from poecaps.options import ModelOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")
Precision = Literal["auto", "float32", "bfloat16"]
Optimizer = Literal["adam", "sgd"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)


@dataclass(frozen=True)
class Stage:
    """One stage of training: how long, and with which optimiser."""

    epochs: int = 5
    """Passes over the training images."""
    optimizer: Optimizer = "adam"
    """Adam, or SGD with momentum."""
    learning_rate: float = 1e-3
    """Learning rate at the start."""
    final_learning_rate_ratio: float = 0.01
    """Learning rate at the end, as a share of that at the start; it falls along a cosine."""
    momentum: float = 0.9
    """Share of the last step that SGD takes again; for Adam, the decay of its first moment."""
    weight_decay: float = 0.0
    """Weight of the ℓ2 penalty."""

    def check(self, name: str) -> None:
        """Refuse values that cannot be meant, naming the stage they belong to."""
        checks.require_int(f"{name}.epochs", self.epochs, 0)
        checks.require_choice(f"{name}.optimizer", self.optimizer, OPTIMIZERS)
        for field_name in (
            "learning_rate",
            "final_learning_rate_ratio",
            "momentum",
            "weight_decay",
        ):
            checks.require_nonnegative(f"{name}.{field_name}", getattr(self, field_name))
        if self.momentum >= 1:
            raise ValueError(f"{name}.momentum must be below 1, but is {self.momentum}")

    def learning_rate_at(self, progress: float) -> float:
        """Learning rate when this share of the stage is done."""
        fall = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (
            self.final_learning_rate_ratio + (1 - self.final_learning_rate_ratio) * fall
        )


@dataclass(frozen=True)
class CapsuleStage(Stage):
    """A stage that trains a capsule layer from the beginning."""

    init_std: float = 0.01
    """Standard deviation of the initial weights."""

    def check(self, name: str) -> None:
        """Refuse values that cannot be meant, naming the stage they belong to."""
        super().check(name)
        checks.require_nonnegative(f"{name}.init_std", self.init_std)


@dataclass(frozen=True)
class EncoderStage(CapsuleStage):
    """Contrastive divergence of the capsule encoder."""

    k: int = 1
    """How often a step mixes."""
    mixing: Mixing = "deterministic"
    """Whether experts send their mean or a Bernoulli draw down."""
    winners: int | None = None
    """How many experts may fire for an image while they learn, whatever the model lets fire later; None: as many."""
    target_firing: float | None = None
    """Mean firing probability of the strongest expert that all weights are scaled to in the end; None: not scaled."""

    def check(self, name: str) -> None:
        """Refuse values that cannot be meant, naming the stage they belong to."""
        super().check(name)
        checks.require_int(f"{name}.k", self.k, 1)
        checks.require_choice(f"{name}.mixing", self.mixing, MIXINGS)
        if self.winners is not None:
            checks.require_int(f"{name}.winners", self.winners, 1)
        if self.target_firing is not None:
            checks.require_nonnegative(f"{name}.target_firing", self.target_firing)
            if not 0 < self.target_firing < 1:
                raise ValueError(
                    f"{name}.target_firing must be between 0 and 1, but is {self.target_firing}"
                )


@dataclass(frozen=True)
class DecoderStage(CapsuleStage):
    """Learning of the capsule decoder."""

    single_expert_share: float = 0.0
    """Share of images drawn from their strongest expert alone, so that each expert learns to draw by itself."""

    def check(self, name: str) -> None:
        """Refuse values that cannot be meant, naming the stage they belong to."""
        super().check(name)
        checks.require_share(f"{name}.single_expert_share", self.single_expert_share)


@dataclass(frozen=True)
class PixelDecoderStage(Stage):
    """Tuning of all that draws: the filters of the pixel_decoder, and the capsule decoder they draw from."""

    single_expert_share: float = 0.0
    """Share of images drawn from their strongest expert alone."""
    cross_entropy: float = 0.05
    """Weight of the pixels' cross-entropy beside their absolute difference: the larger, the softer what is drawn."""

    def check(self, name: str) -> None:
        """Refuse values that cannot be meant, naming the stage they belong to."""
        super().check(name)
        checks.require_share(f"{name}.single_expert_share", self.single_expert_share)
        checks.require_nonnegative(f"{name}.cross_entropy", self.cross_entropy)


@dataclass(frozen=True)
class Config:
    """A whole training run."""

    data: str = "mnist-sample"
    """Name of a set (mnist, fashion-mnist, or either with -sample), or path of a file or folder of images."""
    data_path: str | None = None
    """Folder that holds a full set known by name."""
    size: tuple[int, int] | None = None
    """Height and width to bring a folder of images to."""
    channels: int | None = None
    """1 (grey) or 3 (RGB) for a folder of images."""
    model: ModelOptions = field(default_factory=ModelOptions)
    """Sizes and options of the model."""
    autoencoder: Stage = field(default_factory=Stage)
    """Stage 1."""
    encoder: EncoderStage = field(default_factory=EncoderStage)
    """Stage 2, for each capsule layer."""
    decoder: DecoderStage = field(default_factory=DecoderStage)
    """Stage 3, for each capsule layer."""
    pixel_decoder: PixelDecoderStage = field(default_factory=lambda: PixelDecoderStage(epochs=0))
    """Stage 4, for a model with a pixel_decoder."""
    batch_size: int = 128
    """Images in a step, of all processes together."""
    seed: int = 0
    """Where all random numbers start from: the same seed, the same result on the same machine's CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto for a GPU where there is one."""
    precision: Precision = "auto"
    """Numbers that the convolutions compute with; auto: bfloat16 where the machine is fast with it, else float32."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints while a stage learns, so much can a crash cost; 0: one after every step."""

    def check(self) -> None:
        """Refuse values that cannot be meant.

        Raises
        ------
        ValueError, TypeError
            Naming the field, what it is and what it may be.
        """
        stages = {
            "autoencoder": Stage,
            "encoder": EncoderStage,
            "decoder": DecoderStage,
            "pixel_decoder": PixelDecoderStage,
        }
        kinds = {**stages, "model": ModelOptions}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} must be a {kind.__name__}, but is a {type(getattr(self, name)).__name__}"
                )
        for name in stages:
            getattr(self, name).check(name)
        self.model.validate("model.")
        if self.pixel_decoder.epochs > 0 and not self.model.pixel_decoder:
            raise ValueError(
                "pixel_decoder.epochs must be 0 for a model without a pixel_decoder; set model.pixel_decoder"
            )
        fewest = min(count for count, _ in self.model.experts)
        if self.encoder.winners is not None and self.encoder.winners > fewest:
            raise ValueError(
                f"encoder.winners must be at most {fewest}, the number of experts, but is {self.encoder.winners}"
            )
        if self.encoder.winners is not None and self.model.agreement != "cosine":
            raise ValueError(
                "encoder.winners needs model.agreement cosine; set model.winners instead"
            )
        checks.require_int("batch_size", self.batch_size, 1)
        checks.require_nonnegative("checkpoint_every", self.checkpoint_every)
        checks.require_int("seed", self.seed, 0, 2**63 - 1)
        for name in ("data", "device"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a string, but is {getattr(self, name)!r}")
        checks.require_choice("precision", self.precision, get_args(Precision))


def from_json(kind: type[T], values: Any) -> T:
    """Rebuild a dataclass of this module from the JSON of its fields.

    Raises
    ------
    ValueError
        If fields are missing or unknown.
    """
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != known:
        raise ValueError(f"{kind.__name__} must have the fields {', '.join(sorted(known))}")
    hints = get_type_hints(kind)
    rebuilt = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            rebuilt[name] = from_json(hints[name], value)
        else:
            rebuilt[name] = _as_tuples(value)
    return kind(**rebuilt)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def default() -> Config:
    """Return what works best.

    The strongest directions of the capsules are levelled, so that experts have many things to learn. Each image
    teaches one expert, so that experts become different things; afterwards all of them speak, the stronger the louder.
    At last, filters of their own learn to draw sharply what the experts say.
    """
    return Config(
        model=ModelOptions(
            normalize="outputs",
            sharpness=1.0,
            scale=0.15,
            whiten=True,
            equalized_components=16,
            pixel_decoder=True,
        ),
        autoencoder=Stage(epochs=5, learning_rate=3e-3),
        encoder=EncoderStage(epochs=10, learning_rate=0.1, winners=1, target_firing=0.5),
        decoder=DecoderStage(epochs=3, learning_rate=0.03, single_expert_share=0.3),
        pixel_decoder=PixelDecoderStage(epochs=10, learning_rate=1e-3, single_expert_share=0.3),
    )


def paper() -> Config:
    """Return the paper's recipe as literally as it can be read."""
    sgd = {"optimizer": "sgd", "weight_decay": 1e-7, "momentum": 0.9}
    return Config(
        model=ModelOptions(bias=False, sharpness=1.0, centre=False, scale=None, whiten=False),
        autoencoder=Stage(epochs=10, learning_rate=3e-3),
        encoder=EncoderStage(epochs=10, learning_rate=100.0, **sgd),  # type: ignore[arg-type]
        decoder=DecoderStage(epochs=10, learning_rate=0.1, **sgd),  # type: ignore[arg-type]
    )


PRESETS = {"default": default, "paper": paper}
OF_THE_MACHINE = ("data_path", "device", "checkpoint_every")  # options that do not shape the result


def nearest_preset(config: Config) -> str:
    """Name the preset that the fewest options were changed of."""
    return min(PRESETS, key=lambda name: len(changed_options(config, name)))


def changed_options(config: Config, preset: str) -> dict[str, Any]:
    """Options that are not those of a preset, by their names."""
    usual = dict(_flat(asdict(PRESETS[preset]())))
    return {
        name: value
        for name, value in _flat(asdict(config))
        if value != usual[name] and name not in OF_THE_MACHINE
    }


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def command(config: Config) -> str:
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
