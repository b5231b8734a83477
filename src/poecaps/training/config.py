"""Options of a training run: dataclasses, saved as JSON beside its results, and presets.

The docstrings of the fields are the help texts of the command line, each on a single line.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from poecaps import _checks as checks
from poecaps.data.images import HELD_OUT_SHARE
from poecaps.functional import MIXINGS, Mixing
from poecaps.options import MAX_ITERATIONS, MAX_SIZE, DensityOptions, ModelOptions
from poecaps.views import ViewOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Precision = Literal["auto", "float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Optimizer = Literal["adam", "sgd"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
Criterion = Literal["margin", "agreement", "reconstruction", "energy"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
DecoderTarget = Literal["capsules", "reconstruction"]
DECODER_TARGETS: tuple[DecoderTarget, ...] = get_args(DecoderTarget)
MAX_EPOCHS, MAX_RESTARTS = 10**6, 1000
# Without a given batch size, an epoch has at least so many steps, as far as batches of the smallest
# size allow it; sets of at least 4,096 images have the usual one.
USUAL_BATCH_SIZE, SMALLEST_BATCH_SIZE, USUAL_STEPS = 128, 16, 32
MAX_PROCESS_TIMEOUT = 1e6  # seconds; torch counts milliseconds in 32 bits


@dataclass(frozen=True)
class Stage:
    """Options of a training stage: its length and its optimizer."""

    epochs: int = 5
    """Number of passes over the training images."""
    batch_size: int | None = None
    """Images per step of this stage; None: the batch_size of all stages."""
    optimizer: Optimizer = "adam"
    """Optimizer: adam, or sgd with momentum."""
    learning_rate: float = 1e-3
    """Initial learning rate."""
    final_learning_rate_ratio: float = 0.01
    """Final learning rate as a fraction of the initial one; it decays along a cosine."""
    momentum: float = 0.9
    """Momentum of SGD; for Adam, the decay rate of the first moment."""
    weight_decay: float = 0.0
    """Weight of the ℓ2 penalty."""

    def validate(self, name: str) -> None:
        """Raise ValueError or TypeError if an option is invalid; `name` is that of the stage."""
        checks.require_int(f"{name}.epochs", self.epochs, 0, MAX_EPOCHS)
        if self.batch_size is not None:
            checks.require_int(f"{name}.batch_size", self.batch_size, 1, MAX_SIZE)
        checks.require_choice(f"{name}.optimizer", self.optimizer, OPTIMIZERS)
        checks.require_nonnegative(f"{name}.learning_rate", self.learning_rate)
        checks.require_nonnegative(
            f"{name}.final_learning_rate_ratio", self.final_learning_rate_ratio
        )
        checks.require_nonnegative(f"{name}.momentum", self.momentum)
        checks.require_nonnegative(f"{name}.weight_decay", self.weight_decay)
        if self.momentum >= 1:
            raise ValueError(f"{name}.momentum must be below 1, but is {self.momentum}")

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate when this fraction of the stage is done."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (
            self.final_learning_rate_ratio + (1 - self.final_learning_rate_ratio) * cosine
        )


@dataclass(frozen=True)
class CapsuleStage(Stage):
    """Options of a stage that trains a capsule layer from scratch."""

    init_std: float = 0.01
    """Standard deviation of the initial weights."""

    def validate(self, name: str) -> None:
        """Raise ValueError or TypeError if an option is invalid; `name` is that of the stage."""
        super().validate(name)
        checks.require_nonnegative(f"{name}.init_std", self.init_std)


@dataclass(frozen=True)
class EncoderStage(CapsuleStage):
    """Options of the contrastive divergence that trains the capsule encoder."""

    k: int = 1
    """Number of mixing steps in contrastive divergence (CD-k)."""
    mixing: Mixing = "deterministic"
    """State of the experts during mixing: deterministic (the mean) or bernoulli (a random draw)."""
    winners: int | None = None
    """Number of experts that may fire for an image during training; None: model.winners."""
    target_firing: float | None = None
    """Mean firing probability of the strongest expert after a final scaling; None: no scaling."""
    views: ViewOptions = field(default_factory=ViewOptions)
    """Views of an image that compete together, so that an expert stands for what they share."""
    restarts: int = 1
    """Encoders that learn at the same time from different random weights; the best one is kept."""
    halvings: int = 0
    """How often the worse half of them is dropped; the last time after half of the stage."""
    recombinations: int = 0
    """Encoders that are made of the experts of all of them after half of the stage; 0: none."""
    criterion: Criterion = "margin"
    """What the best of several encoders has most of, a number of `poecaps.metrics`; no labels."""

    def validate(self, name: str) -> None:
        """Raise ValueError or TypeError if an option is invalid; `name` is that of the stage."""
        super().validate(name)
        checks.require_int(f"{name}.k", self.k, 1, MAX_ITERATIONS)
        checks.require_choice(f"{name}.mixing", self.mixing, MIXINGS)
        if self.winners is not None:
            checks.require_int(f"{name}.winners", self.winners, 1)
        if self.target_firing is not None:
            checks.require_nonnegative(f"{name}.target_firing", self.target_firing)
            if not 0 < self.target_firing < 1:
                raise ValueError(
                    f"{name}.target_firing must be between 0 and 1, but is {self.target_firing}"
                )
        if not isinstance(self.views, ViewOptions):
            raise TypeError(f"{name}.views must be ViewOptions, but is {self.views!r}")
        self.views.validate(f"{name}.views.")
        checks.require_int(f"{name}.restarts", self.restarts, 1, MAX_RESTARTS)
        checks.require_int(f"{name}.halvings", self.halvings, 0)
        most = self.restarts.bit_length() - 1
        if self.halvings > most:
            raise ValueError(
                f"{name}.halvings must be at most {most} for {name}.restarts {self.restarts}, so "
                f"that an encoder is left, but is {self.halvings}"
            )
        self._validate_recombinations(name)
        checks.require_choice(f"{name}.criterion", self.criterion, CRITERIA)
        if self.restarts > 1 and self.init_std == 0:
            raise ValueError(
                f"{name}.init_std must be above 0 for {name}.restarts {self.restarts}, so that the "
                "encoders differ"
            )
        if self.restarts > 1 and self.criterion == "agreement" and self.views.count == 1:
            raise ValueError(
                f"{name}.criterion agreement needs {name}.views.count of at least 2, but is 1"
            )

    def _validate_recombinations(self, name: str) -> None:
        """Raise ValueError or TypeError if encoders cannot be recombined."""
        checks.require_int(f"{name}.recombinations", self.recombinations, 0, MAX_RESTARTS)
        if not self.recombinations:
            return
        for option, value in (("restarts", self.restarts), ("views.count", self.views.count)):
            if value < 2:
                raise ValueError(
                    f"{name}.recombinations needs {name}.{option} of at least 2, but is {value}"
                )
        if self.halvings:
            raise ValueError(
                f"{name}.recombinations takes the experts of all encoders: {name}.halvings must "
                f"be 0, but is {self.halvings}"
            )

    def recombines_after(self, step: int, steps: int) -> bool:
        """Return whether encoders are recombined when so many of all steps are done: half."""
        return self.recombinations > 0 and step >= max(1, steps // 2)

    def halvings_after(self, step: int, steps: int) -> int:
        """Return how often encoders have been dropped when so many of all steps are done.

        With h halvings, they are dropped after 1/2^h, …, 1/4 and 1/2 of the steps.
        """
        after = [max(1, steps >> number) for number in range(1, self.halvings + 1)]
        return sum(step >= each for each in after)

    def mean_restarts(self) -> float:
        """Return the mean number of encoders that learn in a step.

        With S restarts, it is S·(h + 2)/2^(h + 1) for h halvings, and (S + R)/2 for R
        recombinations.
        """
        if self.recombinations:
            return (self.restarts + self.recombinations) / 2
        return self.restarts * (self.halvings + 2) / (2 << self.halvings)


@dataclass(frozen=True)
class DecoderStage(CapsuleStage):
    """Options of the training of the capsule decoder."""

    # Images from one expert alone teach each expert to generate images on its own.
    single_expert_share: float = 0.0
    """Fraction of images that are decoded from their strongest expert alone."""
    target: DecoderTarget = "capsules"
    """What to decode: the capsules, or their reconstruction by W (another reading of the paper)."""

    def validate(self, name: str) -> None:
        """Raise ValueError or TypeError if an option is invalid; `name` is that of the stage."""
        super().validate(name)
        checks.require_share(f"{name}.single_expert_share", self.single_expert_share)
        checks.require_choice(f"{name}.target", self.target, DECODER_TARGETS)


@dataclass(frozen=True)
class PixelDecoderStage(Stage):
    """Options of the fine-tuning of the pixel decoder and the lowest capsule decoder."""

    single_expert_share: float = 0.0
    """Fraction of images that are decoded from their strongest expert alone."""
    cross_entropy: float = 0.05
    """Weight of the cross-entropy beside the absolute error; the larger, the softer the images."""

    def validate(self, name: str) -> None:
        """Raise ValueError or TypeError if an option is invalid; `name` is that of the stage."""
        super().validate(name)
        checks.require_share(f"{name}.single_expert_share", self.single_expert_share)
        checks.require_nonnegative(f"{name}.cross_entropy", self.cross_entropy)


@dataclass(frozen=True)
class DensityStage(CapsuleStage):
    """Options of the maximum likelihood that trains the density by Markov chains."""

    strength_rate: float = 10.0
    """Factor of the learning rate of strengths and origins, relative to that of the weights."""
    chains: int = 1024
    """Number of chains, of all processes together."""
    lifetime: int = 300
    """Steps after which a chain starts anew from the base measure; 0: chains are persistent."""
    levels: int = 0
    """Temperatures of parallel tempering, between the model and the base measure; 0: none."""
    leapfrog_steps: int = 5
    """Leapfrog steps of a trajectory of Hamiltonian Monte Carlo."""
    target_acceptance: float = 0.8
    """Share of accepted trajectories to which the step size is adapted."""
    average: float = 0.999
    """Decay of the running average of the weights, which is the result; 0: no average."""
    partition_chains: int = 128
    """Chains that estimate the partition function after the training."""
    partition_steps: int = 500
    """Temperatures of this estimate; 0: no estimate."""

    def validate(self, name: str) -> None:
        """Raise ValueError or TypeError if an option is invalid; `name` is that of the stage."""
        super().validate(name)
        checks.require_nonnegative(f"{name}.strength_rate", self.strength_rate)
        checks.require_int(f"{name}.lifetime", self.lifetime, 0)
        # Of fewer than 5 chains that are annealed, none may be at t = 1 in some of the steps.
        checks.require_int(f"{name}.chains", self.chains, 5 if self.lifetime else 2, MAX_SIZE)
        checks.require_int(f"{name}.levels", self.levels, 0)
        if self.levels and self.lifetime:
            raise ValueError(
                f"{name}.levels needs persistent chains, {name}.lifetime 0, but that is "
                f"{self.lifetime}; set one of them to 0"
            )
        if self.levels == 1 or (self.levels and self.chains % self.levels):
            raise ValueError(
                f"{name}.levels must be 0, or at least 2 and divide {name}.chains, "
                f"{self.chains}, but is {self.levels}"
            )
        checks.require_int(f"{name}.leapfrog_steps", self.leapfrog_steps, 1, MAX_ITERATIONS)
        checks.require_share(f"{name}.target_acceptance", self.target_acceptance)
        checks.require_share(f"{name}.average", self.average)
        if self.average == 1:
            raise ValueError(f"{name}.average must be below 1, but is {self.average}")
        if self.target_acceptance in (0, 1):
            raise ValueError(
                f"{name}.target_acceptance must be between 0 and 1, but is {self.target_acceptance}"
            )
        checks.require_int(f"{name}.partition_chains", self.partition_chains, 2, MAX_SIZE)
        checks.require_int(f"{name}.partition_steps", self.partition_steps, 0, MAX_SIZE)


@dataclass(frozen=True)
class Config:
    """All options of a training run."""

    data: str = "mnist-sample"
    """Data: mnist, fashion-mnist, either with -sample, hf:NAME, or a file or folder of images."""
    data_path: str | None = None
    """Folder that contains the full dataset named by data."""
    size: tuple[int, int] | None = None
    """Height and width to which a folder of images is scaled and cropped."""
    channels: int | None = None
    """Channels to which a folder of images is converted: 1 (grey) or 3 (RGB)."""
    images: int | None = None
    """Number of training images, a random subset of the data; None: all of them."""
    held_out: float = HELD_OUT_SHARE
    """Share of a folder of images without a test part that is kept for evaluation."""
    model: ModelOptions = field(default_factory=ModelOptions)
    """Sizes and options of the model."""
    autoencoder: Stage = field(default_factory=Stage)
    """Stage 1: the convolutional autoencoder."""
    density: DensityStage = field(default_factory=lambda: DensityStage(epochs=0))
    """The density over the input capsules, if the model has one."""
    encoder: EncoderStage = field(default_factory=EncoderStage)
    """Stage 2: the capsule encoder, layer by layer."""
    decoder: DecoderStage = field(default_factory=DecoderStage)
    """Stage 3: the capsule decoder, layer by layer."""
    pixel_decoder: PixelDecoderStage = field(default_factory=lambda: PixelDecoderStage(epochs=0))
    """Stage 4: the pixel decoder, if the model has one."""
    multi_scale: float = 0.0
    """Weight of the error of pixels at several scales in the first and the last stage; 0: none."""
    batch_size: int | None = None
    """Images per step, of all processes; stages may differ. None: 128, fewer for few images."""
    seed: int = 0
    """Seed of all random numbers; on one machine's CPU, the same seed gives the same result."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, mps, or auto for an NVIDIA GPU if there is one."""
    precision: Precision = "auto"
    """Precision of the convolutions; auto: bfloat16 if the device is fast with it, else float32."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints, the most that a crash can cost; 0: one after every step."""
    process_timeout: float = 300.0
    """Seconds for which several processes wait for one of them before they give up."""

    def validate(self) -> None:
        """Raise an error if an option is invalid.

        Raises
        ------
        ValueError, TypeError
            The message names the option, its value and the valid values.
        """
        for name, value, cls in (
            ("autoencoder", self.autoencoder, Stage),
            ("density", self.density, DensityStage),
            ("encoder", self.encoder, EncoderStage),
            ("decoder", self.decoder, DecoderStage),
            ("pixel_decoder", self.pixel_decoder, PixelDecoderStage),
            ("model", self.model, ModelOptions),
        ):
            if not isinstance(value, cls):
                raise TypeError(f"{name} must be a {cls.__name__}, but is a {type(value).__name__}")
        self.autoencoder.validate("autoencoder")
        self.density.validate("density")
        self.encoder.validate("encoder")
        self.decoder.validate("decoder")
        self.pixel_decoder.validate("pixel_decoder")
        self.model.validate("model.")
        if self.pixel_decoder.epochs > 0 and not self.model.pixel_decoder:
            raise ValueError(
                "pixel_decoder.epochs must be 0 for a model without a pixel decoder; "
                "set model.pixel_decoder"
            )
        if self.density.epochs > 0 and self.model.density.experts is None:
            raise ValueError(
                "density.epochs must be 0 for a model without a density; set model.density.experts"
            )
        experts = min(count for count, _ in self.model.experts)
        if self.encoder.winners is not None and self.encoder.winners > experts:
            raise ValueError(
                f"encoder.winners must be at most {experts}, the number of experts, "
                f"but is {self.encoder.winners}"
            )
        if self.encoder.winners is not None and self.model.agreement != "cosine":
            raise ValueError(
                "encoder.winners needs model.agreement cosine; set model.winners instead"
            )
        winners = self.model.winners if self.encoder.winners is None else self.encoder.winners
        if self.encoder.recombinations and (winners is None or self.model.agreement != "cosine"):
            raise ValueError(
                "encoder.recombinations needs experts that compete and model.agreement cosine; set "
                "encoder.winners"
            )
        criterion = self.encoder.criterion
        if self.encoder.restarts > 1 and experts == 1 and criterion in ("margin", "agreement"):
            raise ValueError(
                f"encoder.criterion {criterion} needs at least 2 experts in every layer, "
                f"but model.experts is {self.model.experts}"
            )
        if self.images is not None:
            checks.require_int("images", self.images, 2)
        checks.require_share("held_out", self.held_out)
        if self.held_out == 1:
            raise ValueError("held_out must be below 1, so that images to learn from are left")
        checks.require_nonnegative("multi_scale", self.multi_scale)
        if self.batch_size is not None:
            checks.require_int("batch_size", self.batch_size, 1, MAX_SIZE)
        checks.require_nonnegative("checkpoint_every", self.checkpoint_every)
        checks.require_positive("process_timeout", self.process_timeout)
        if self.process_timeout > MAX_PROCESS_TIMEOUT:
            raise ValueError(
                f"process_timeout must be at most {MAX_PROCESS_TIMEOUT:g} seconds, but is "
                f"{self.process_timeout:g}"
            )
        checks.require_int("seed", self.seed, 0, 2**63 - 1)
        texts = {"data": self.data, "data_path": self.data_path or "", "device": self.device}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a string, but is {text!r}")
        checks.require_choice("precision", self.precision, PRECISIONS)

    def batch_size_for(self, images: int) -> int:
        """Return the number of images per step for so many training images.

        If it is not given, it is the largest power of two from 16 to 128 with which an epoch has at
        least 32 steps, or 16: a model that sees few images needs them in many steps.
        """
        if self.batch_size is not None:
            return self.batch_size
        largest = int(2 ** math.floor(math.log2(max(1, images // USUAL_STEPS))))
        return min(max(largest, SMALLEST_BATCH_SIZE), USUAL_BATCH_SIZE)

    def untrained(self) -> dict[str, str]:
        """Return which of experts and decoder keep their random weights, each with the reason.

        The pixel decoder's stage also trains the capsule decoder, if there is only one layer.
        """
        reasons = {"experts": "encoder.epochs 0"} if self.encoder.epochs == 0 else {}
        also = len(self.model.experts) == 1 and self.pixel_decoder.epochs > 0
        if self.decoder.epochs == 0 and not also:
            reasons["decoder"] = "decoder.epochs 0"
        return reasons


def batch_sizes(config: Config, images: int) -> dict[str, int]:
    """Return the images per step of each stage, by the names of `stage_options`.

    `images` is the number of training images.
    """
    options = {name: getattr(config, field) for name, field in stage_options(config).items()}
    usual = config.batch_size_for(images)
    return {name: each.batch_size or usual for name, each in options.items()}


def stage_options(config: Config) -> dict[str, str]:
    """Return the names of the stages of a run, in order, each with the field of its options.

    The name of a stage, such as ``"pixel decoder"`` or ``"encoder 2"``, appears in progress,
    metrics and messages. Its options are in the field ``"pixel_decoder"`` or ``"encoder"`` of
    `Config`.
    """
    layers = range(1, len(config.model.experts) + 1)
    return {
        "autoencoder": "autoencoder",
        **({"density": "density"} if config.model.density.experts is not None else {}),
        **{f"encoder {layer}": "encoder" for layer in layers},
        **{f"decoder {layer}": "decoder" for layer in layers},
        **({"pixel decoder": "pixel_decoder"} if config.model.pixel_decoder else {}),
    }


def default() -> Config:
    """Return the options with the best results.

    The strongest principal components of the capsules are equalized, so that the experts have many
    features to learn. During training each image has one winner, so that the experts become
    different; afterwards all experts contribute to a code, each with its firing probability. In the
    last stage a pixel decoder with separate filters learns to generate sharp images from codes.
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
    """Return the options of the paper, read as literally as possible."""
    sgd: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 1e-7, "momentum": 0.9}
    return Config(
        model=ModelOptions(bias=False, sharpness=1.0, centre=False, scale=None, whiten=False),
        autoencoder=Stage(epochs=10, learning_rate=3e-3),
        encoder=EncoderStage(epochs=10, learning_rate=100.0, **sgd),
        decoder=DecoderStage(epochs=10, learning_rate=0.1, **sgd),
    )


def energy() -> Config:
    """Return the options of a model that draws images from its own energy.

    The model of `default`, with a density over the features that learns by Markov chains. It is
    made for a GPU and the full datasets; docs/training.md has sizes for a CPU.
    """
    base = default()
    density = DensityOptions(
        experts=(600, 8),
        linear_dims=8,
        strength=5.0,
        base_components=256,
        base_max_variance=5.0,
    )
    return replace(
        base,
        model=replace(base.model, density=density),
        density=DensityStage(
            epochs=13,
            learning_rate=2e-3,
            final_learning_rate_ratio=0.1,
            chains=2048,
            lifetime=0,
            levels=32,
        ),
    )


def fast() -> Config:
    """Return the options of a small model, for a machine without a GPU or a first look.

    The model of `default` with a quarter of the filters, which trains several times faster.
    """
    base = default()
    return replace(base, model=replace(base.model, features=32))


Preset = Literal["default", "fast", "paper", "energy"]
PRESETS: dict[str, Callable[[], Config]] = {
    "default": default,
    "fast": fast,
    "paper": paper,
    "energy": energy,
}

# Options that depend on the machine and do not change the trained model (but for rounding).
MACHINE_OPTIONS = ("data_path", "device", "checkpoint_every", "process_timeout")


def nearest_preset(config: Config) -> str:
    """Return the name of the preset with the fewest changed options."""
    return min(PRESETS, key=lambda name: len(changed_options(config, name)))


def changed_options(
    config: Config, preset: str, *, include_machine: bool = False
) -> dict[str, Any]:
    """Return the options that differ from a preset, by their names, such as ``"encoder.k"``.

    Parameters
    ----------
    config
        Options to compare.
    preset
        Name of a preset.
    include_machine
        Whether to compare the options that depend on the machine, `MACHINE_OPTIONS`, as well.
    """
    usual = dict(_flatten(asdict(PRESETS[preset]())))
    return {
        name: value
        for name, value in _flatten(asdict(config))
        if value != usual[name] and (include_machine or name not in MACHINE_OPTIONS)
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
