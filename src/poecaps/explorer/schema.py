"""Requests and responses of the explorer, validated by pydantic and documented as OpenAPI."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from poecaps.explorer.chains import (
    ADAPTED_STEPS,
    ANNEAL,
    MAX_ANNEAL,
    MAX_CHAINS,
    MAX_STATE_BYTES,
    MAX_STEP,
    MAX_STEP_SIZE,
    MAX_STEPS,
    MAX_TEMPERATURE,
    MIN_STEP_SIZE,
    ChainError,
    ChainState,
)
from poecaps.explorer.effects import Measure  # noqa: TC001 (pydantic reads the annotations)
from poecaps.explorer.render import MAX_MAGNITUDE, MAX_OFFSET, Part, Setting
from poecaps.explorer.training import (
    MAX_EXPERTS,
    MAX_IMAGES,
    MIN_EXPERTS,
    MIN_IMAGES,
    Status,
)

MAX_SETTINGS, MAX_PARAMETERS = 1024, 1024
MAX_SEED = 2**53 - 1  # the largest integer that JavaScript represents exactly
BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
MAX_BASE64 = 4 * -(-MAX_STATE_BYTES // 3)
FLOAT32 = "<f4"  # little-endian


def _as_integer(value: Any) -> Any:
    """Convert 3.0 to 3, because JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Offset = Annotated[float, Field(ge=-MAX_OFFSET, le=MAX_OFFSET, allow_inf_nan=False)]


class ExpertSetting(BaseModel):
    """Slider positions of one expert.

    Its vector before squashing is z = ± magnitude · (mean + deviation ⊙ offsets).
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    expert: Annotated[
        int,
        Field(ge=0, le=2**31 - 1, description="The expert, counted from 0."),
        BeforeValidator(_as_integer),
    ]
    offsets: Annotated[
        list[Offset],
        Field(
            default_factory=list,
            max_length=MAX_PARAMETERS,
            description="One number per instantiation parameter, in standard deviations from the "
            "mean; missing numbers are 0.",
        ),
    ]
    magnitude: Annotated[
        float,
        Field(ge=0, le=MAX_MAGNITUDE, allow_inf_nan=False, description="Factor of the vector."),
    ] = 1.0
    negative: Annotated[
        bool, Field(description="Whether the sign of the vector is flipped: the paper's negatives.")
    ] = False


class Code(BaseModel):
    """A code, as the settings of its experts.

    Several settings of one expert add up; experts without a setting are 0.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"example": {"experts": [{"expert": 3, "offsets": [0.5, -1.0]}]}},
    )

    experts: Annotated[list[ExpertSetting], Field(max_length=MAX_SETTINGS)]

    def settings(self) -> tuple[Setting, ...]:
        """Convert to the settings of `render`."""
        return tuple(
            Setting(e.expert, tuple(e.offsets), e.magnitude, e.negative) for e in self.experts
        )

    @classmethod
    def from_settings(cls, settings: tuple[Setting, ...]) -> Code:
        """Convert from the settings of `render`."""
        experts = [
            ExpertSetting(
                expert=s.expert, offsets=list(s.offsets), magnitude=s.magnitude, negative=s.negative
            )
            for s in settings
        ]
        return cls(experts=experts)


Seed = Annotated[
    int,
    Field(ge=0, le=MAX_SEED, description="The same seed gives the same chains."),
    BeforeValidator(_as_integer),
]
Temperature = Annotated[float, Field(ge=1, le=MAX_TEMPERATURE, allow_inf_nan=False)]


class ChainStart(BaseModel):
    """Where Markov chains on the density of a model start."""

    model_config = ConfigDict(extra="forbid", strict=True)

    chains: Annotated[
        int,
        Field(ge=1, le=MAX_CHAINS, description="Number of chains."),
        BeforeValidator(_as_integer),
    ] = 1
    seed: Seed = 0
    anneal: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_ANNEAL,
            description="Steps in which chains from noise are annealed from the base measure to "
            "the model.",
        ),
        BeforeValidator(_as_integer),
    ] = ANNEAL
    image: Annotated[
        str | None,
        Field(
            max_length=MAX_BASE64,
            pattern=BASE64,
            description="Image at which all chains start: the H·W·C bytes of its pixels, row by "
            "row, as base64. The chains are then not annealed. By default they start from noise.",
        ),
    ] = None

    def pixels(self) -> Any:
        """Return the bytes of the image as an array of uint8, or None."""
        return None if self.image is None else np.frombuffer(base64.b64decode(self.image), np.uint8)


class Chain(BaseModel):
    """The state of chains: all that their next step depends on. Send it back as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seed: Seed
    step: Annotated[
        int,
        Field(ge=0, le=MAX_STEP, description="Steps made so far."),
        BeforeValidator(_as_integer),
    ]
    anneal: Annotated[
        int,
        Field(ge=0, le=MAX_ANNEAL, description="Steps in which the chains are annealed."),
        BeforeValidator(_as_integer),
    ]
    temperature: Annotated[Temperature, Field(description="Temperature of the last step.")]
    settled: Annotated[
        int,
        Field(
            ge=0,
            le=ADAPTED_STEPS,
            description=f"Steps at this temperature, up to {ADAPTED_STEPS}; until then the "
            "step size is adapted.",
        ),
        BeforeValidator(_as_integer),
    ]
    step_size: Annotated[
        float,
        Field(
            ge=MIN_STEP_SIZE,
            le=MAX_STEP_SIZE,
            allow_inf_nan=False,
            description="Length of a leapfrog step.",
        ),
    ]
    position: Annotated[
        str,
        Field(
            max_length=MAX_BASE64,
            pattern=BASE64,
            description="I·K numbers for each chain, float32 in little-endian order, as base64.",
        ),
    ]

    def state(self) -> ChainState:
        """Convert to the state of `poecaps.explorer.chains`; raise ChainError if it is none."""
        data = base64.b64decode(self.position)
        if len(data) % 4:
            raise ChainError(f"the state must hold float32, but has {len(data):,} bytes")
        return ChainState(
            np.frombuffer(data, FLOAT32).astype(np.float32),
            self.seed,
            self.step,
            self.anneal,
            self.temperature,
            self.settled,
            self.step_size,
        )

    @classmethod
    def from_state(cls, state: ChainState) -> Chain:
        """Convert from the state of `poecaps.explorer.chains`."""
        return cls(
            seed=state.seed,
            step=state.step,
            anneal=state.anneal,
            temperature=state.temperature,
            settled=state.settled,
            step_size=state.step_size,
            position=base64.b64encode(state.position.astype(FLOAT32).tobytes()).decode(),
        )


class ChainSteps(BaseModel):
    """Steps that chains make."""

    model_config = ConfigDict(extra="forbid", strict=True)

    chain: Chain
    steps: Annotated[
        int,
        Field(ge=1, le=MAX_STEPS, description="Number of steps."),
        BeforeValidator(_as_integer),
    ] = 1
    temperature: Annotated[
        Temperature,
        Field(description="1 is the model, higher is closer to the base measure."),
    ] = 1.0


class Walk(BaseModel):
    """A start of B chains, or T steps of them."""

    chain: Annotated[Chain, Field(description="The state, for the next request.")]
    images: Annotated[
        list[list[list[list[int]]]],
        Field(description="Image of each chain: (B, H, W, C), from 0 to 255."),
    ]
    free_energy: Annotated[
        list[list[float]],
        Field(description="Free energy after each step: (T, B); of a start, one row."),
    ]
    accepted: Annotated[
        list[list[bool]],
        Field(description="Whether each step was accepted: (T, B); of a start, empty."),
    ]
    inverse_temperature: Annotated[
        list[float],
        Field(
            description="Of each step, from 0 (the base measure) to 1 (the model): (T,); "
            "of a start, empty."
        ),
    ]


class ModelInfo(BaseModel):
    """The sizes of a model, and the mean and standard deviation of the codes of its experts."""

    name: str
    image_shape: Annotated[list[int], Field(min_length=3, max_length=3, description="C, H, W.")]
    experts: Annotated[int, Field(description="Number of experts, J.")]
    parameters: Annotated[int, Field(description="Instantiation parameters of each expert, D.")]
    grid: Annotated[
        list[int],
        Field(
            min_length=2,
            max_length=2,
            description="Rows and columns of the positions of the input capsules.",
        ),
    ]
    field: Annotated[int, Field(description="Side in pixels of the receptive field of a position.")]
    stride: Annotated[
        int, Field(description="Distance in pixels of the receptive fields of neighbours.")
    ]
    first_pixel: Annotated[
        int,
        Field(
            description="Row and column of the image at which the first receptive field begins; "
            "negative if it begins beyond the image."
        ),
    ]
    images: Annotated[int, Field(description="Number of images that can be encoded by index.")]
    part: Annotated[Part, Field(description="Which images they are.")]
    note: Annotated[str, Field(description="What to know about the model, if anything.")]
    background: Annotated[
        float | None,
        Field(description="Brightness of the background of its images, if they have a plain one."),
    ]
    chains: Annotated[
        int, Field(description="Most chains of a request; 0 if the model has no density.")
    ]
    mean: Annotated[
        list[list[float]],
        Field(description="Vectors before squashing where all offsets are 0: (J, D)."),
    ]
    deviation: Annotated[
        list[list[float]], Field(description="What an offset of 1 adds to them: (J, D).")
    ]


class Encoding(BaseModel):
    """The encoding of an image by a model."""

    inverted: Annotated[bool, Field(description="Whether the brightness was inverted.")]
    firing: Annotated[list[float], Field(description="Firing probability of each expert: (J,).")]
    free_energy: Annotated[
        float, Field(description="Free energy of the input capsules under the first layer.")
    ]
    picture: Annotated[Code, Field(description="The code, which can be changed and decoded.")]
    image: Annotated[
        list[list[list[int]]], Field(description="The model's input: (H, W, C), from 0 to 255.")
    ]
    reconstruction: Annotated[
        list[list[list[int]]], Field(description="Its reconstruction: (H, W, C), from 0 to 255.")
    ]
    routing: Annotated[
        list[list[list[float]]],
        Field(
            description="Routing coefficients of each expert, summed at each position: "
            "(J, rows, columns)."
        ),
    ]


class ParameterEffect(BaseModel):
    """What a parameter of an expert changes."""

    size: Annotated[
        float,
        Field(description="Mean change of a pixel per standard deviation, from 0 to 1."),
    ]
    measure: Annotated[
        Measure | None,
        Field(description="What it changes above all, if one measure of the images dominates."),
    ]
    rises: Annotated[bool, Field(description="Whether this measure rises with the parameter.")]


class CodeMap(BaseModel):
    """A map of codes, with thumbnails."""

    explained: Annotated[
        list[float] | None,
        Field(
            description="Shares of the variance of the codes along both axes of the map of an "
            "expert. The map of all experts has no such axes."
        ),
    ]
    columns: Annotated[int, Field(description="Thumbnails in a row, and in a column.")]
    filled: Annotated[
        list[bool], Field(description="Whether there are codes near each thumbnail, row by row.")
    ]
    images: Annotated[
        str, Field(description="Thumbnails, row by row: H·W·C bytes of each, as base64.")
    ]


class Ends(BaseModel):
    """Two codes to interpolate between."""

    model_config = ConfigDict(extra="forbid", strict=True)

    start: Code
    end: Code
    steps: Annotated[
        int,
        Field(ge=2, le=33, description="Number of codes, including both ends."),
        BeforeValidator(_as_integer),
    ] = 9


class Interpolation(BaseModel):
    """Codes between two codes, and their images."""

    codes: list[Code]
    images: Annotated[str, Field(description="H·W·C bytes of each image, as base64.")]


class TrainingSource(BaseModel):
    """Images that a model can learn from."""

    name: str
    label: str


class TrainingStart(BaseModel):
    """A training to start."""

    model_config = ConfigDict(extra="forbid", strict=True)

    source: Annotated[str, Field(max_length=1000, description="Name of the images to learn from.")]
    images: Annotated[
        int,
        Field(ge=MIN_IMAGES, le=MAX_IMAGES, description="Number of images."),
        BeforeValidator(_as_integer),
    ] = 2000
    experts: Annotated[
        int,
        Field(ge=MIN_EXPERTS, le=MAX_EXPERTS, description="Number of experts."),
        BeforeValidator(_as_integer),
    ] = 10
    seed: Annotated[
        int,
        Field(ge=0, le=MAX_SEED, description="The same seed gives the same model."),
        BeforeValidator(_as_integer),
    ] = 0


class TrainingPoint(BaseModel):
    """A point of the curves of a training."""

    stage: str
    share: Annotated[float, Field(description="Share of the stage that is done.")]
    error: Annotated[
        float | None, Field(description="What is lost of the input of the stage, as a share.")
    ]
    held_out: Annotated[
        float | None, Field(description="The same for images that are not learned from.")
    ]


class Pictures(BaseModel):
    """Some images."""

    shape: Annotated[list[int], Field(min_length=3, max_length=3, description="C, H, W.")]
    count: int
    pixels: Annotated[str, Field(description="H·W·C bytes of each image, as base64.")]


class Training(BaseModel):
    """A training that is running or has ended."""

    run: Annotated[int, Field(description="Number of the training; 0 before the first one.")]
    status: Status
    stages: Annotated[list[str], Field(description="Names of all stages.")]
    stage: Annotated[str | None, Field(description="Name of the stage that learns.")]
    done: Annotated[float, Field(description="Share of this stage that is done.")]
    seconds_left: Annotated[float | None, Field(description="Estimated time to the end.")]
    first: Annotated[int, Field(description="Number of the first of the points.")]
    points: list[TrainingPoint]
    pictures: Annotated[
        dict[str, Pictures],
        Field(description="images, their reconstructions, what experts have won, and draws."),
    ]
    model: Annotated[
        str | None, Field(description="Name of the trained model, once it can be explored.")
    ]
    error: Annotated[str | None, Field(description="Why the training ended, if it failed.")]


class PythonCode(BaseModel):
    """Lines of Python that reproduce an image."""

    lines: str


class Error(BaseModel):
    """Why a request failed."""

    error: str
