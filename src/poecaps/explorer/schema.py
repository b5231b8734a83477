"""Requests and responses of the explorer, validated by pydantic and documented as OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from poecaps.explorer.render import MAX_MAGNITUDE, MAX_OFFSET, Setting

MAX_SETTINGS, MAX_PARAMETERS = 1024, 1024


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
    test_images: Annotated[int, Field(description="Number of test images.")]
    mean: Annotated[
        list[list[float]],
        Field(description="Vectors before squashing where all offsets are 0: (J, D)."),
    ]
    deviation: Annotated[
        list[list[float]], Field(description="What an offset of 1 adds to them: (J, D).")
    ]


class Encoding(BaseModel):
    """The encoding of an image by a model."""

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


class PythonCode(BaseModel):
    """Lines of Python that reproduce an image."""

    lines: str


class Error(BaseModel):
    """Why a request failed."""

    error: str
