"""What requests and answers of the explorer hold, checked by pydantic and documented as OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from poecaps.explorer.render import FARTHEST, LOUDEST, Setting

MOST_SETTINGS, MOST_PARAMETERS = 1024, 1024


def _whole(value: Any) -> Any:
    """Take 3.0 for 3, which in JSON are the same number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Offset = Annotated[float, Field(ge=-FARTHEST, le=FARTHEST, allow_inf_nan=False)]


class ExpertSetting(BaseModel):
    """Where the sliders of one expert stand: z = ± magnitude · (mean + deviation ⊙ offsets), before squashing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    expert: Annotated[
        int,
        Field(ge=0, le=2**31 - 1, description="Which expert, counted from 0."),
        BeforeValidator(_whole),
    ]
    offsets: Annotated[
        list[Offset],
        Field(
            default_factory=list,
            max_length=MOST_PARAMETERS,
            description="One number per instantiation parameter, in standard deviations from the mean; "
            "those not given are 0.",
        ),
    ]
    magnitude: Annotated[
        float, Field(ge=0, le=LOUDEST, allow_inf_nan=False, description="Factor of the vector.")
    ] = 1.0
    negative: Annotated[
        bool, Field(description="Whether the vector is turned round: the paper's negatives.")
    ] = False


class Picture(BaseModel):
    """A code, as the sliders of the experts that are on; an expert given twice adds up, all others are 0."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"example": {"experts": [{"expert": 3, "offsets": [0.5, -1.0]}]}},
    )

    experts: Annotated[list[ExpertSetting], Field(max_length=MOST_SETTINGS)]

    def settings(self) -> tuple[Setting, ...]:
        """Give the settings as the model takes them."""
        return tuple(
            Setting(e.expert, tuple(e.offsets), e.magnitude, e.negative) for e in self.experts
        )

    @classmethod
    def of(cls, settings: tuple[Setting, ...]) -> Picture:
        """Make a picture of settings."""
        experts = [
            ExpertSetting(
                expert=s.expert, offsets=list(s.offsets), magnitude=s.magnitude, negative=s.negative
            )
            for s in settings
        ]
        return cls(experts=experts)


class Model(BaseModel):
    """A trained model, and where the sliders of its experts are 0 and 1."""

    name: str
    image_shape: Annotated[list[int], Field(min_length=3, max_length=3, description="C, H, W.")]
    experts: Annotated[int, Field(description="Number of experts, J.")]
    parameters: Annotated[int, Field(description="Instantiation parameters of each, D.")]
    grid: Annotated[
        list[int],
        Field(
            min_length=2, max_length=2, description="Rows and columns of the positions of capsules."
        ),
    ]
    field: Annotated[int, Field(description="Side of the square of pixels that a position sees.")]
    stride: Annotated[
        int, Field(description="How many pixels the squares of neighbours lie apart.")
    ]
    test_images: Annotated[int, Field(description="How many test images there are.")]
    mean: Annotated[
        list[list[float]],
        Field(description="Vector before squashing where all offsets are 0: (J, D)."),
    ]
    deviation: Annotated[
        list[list[float]], Field(description="What an offset of 1 adds to it: (J, D).")
    ]


class Code(BaseModel):
    """What a model sees in an image."""

    firing: Annotated[list[float], Field(description="Firing probability of each expert: (J,).")]
    free_energy: Annotated[
        float, Field(description="F of the input capsules under the first layer.")
    ]
    picture: Annotated[Picture, Field(description="The code, to be decoded or changed.")]
    image: Annotated[
        list[list[list[int]]], Field(description="What was seen: (H, W, C), from 0 to 255.")
    ]
    reconstruction: Annotated[
        list[list[list[int]]], Field(description="What its code decodes to: (H, W, C).")
    ]
    routing: Annotated[
        list[list[list[float]]],
        Field(
            description="Routing coefficients of each expert, summed at each position: (J, rows, columns)."
        ),
    ]


class Python(BaseModel):
    """Lines of Python that make a picture again."""

    lines: str


class Error(BaseModel):
    """Why there is no answer."""

    error: str
