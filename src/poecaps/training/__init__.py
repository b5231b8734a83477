"""Train the stages, from Python."""

from poecaps.training.config import (
    PRESETS,
    Config,
    DecoderStage,
    EncoderStage,
    PixelDecoderStage,
    Stage,
    default,
    paper,
)
from poecaps.training.errors import TrainingError
from poecaps.training.loop import resume, train
from poecaps.training.progress import Progress

__all__ = [
    "PRESETS",
    "Config",
    "DecoderStage",
    "EncoderStage",
    "PixelDecoderStage",
    "Progress",
    "Stage",
    "TrainingError",
    "default",
    "paper",
    "resume",
    "train",
]
