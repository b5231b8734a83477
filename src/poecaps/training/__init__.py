"""Training of capsule networks."""

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
from poecaps.training.progress import Progress
from poecaps.training.run import TrainingResult, resume, resume_training, run_training, train

__all__ = [
    "PRESETS",
    "Config",
    "DecoderStage",
    "EncoderStage",
    "PixelDecoderStage",
    "Progress",
    "Stage",
    "TrainingError",
    "TrainingResult",
    "default",
    "paper",
    "resume",
    "resume_training",
    "run_training",
    "train",
]
