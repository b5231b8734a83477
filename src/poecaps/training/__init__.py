"""Training of capsule networks."""

from poecaps.training.config import (
    PRESETS,
    Config,
    DecoderStage,
    DensityStage,
    EncoderStage,
    PixelDecoderStage,
    Stage,
    default,
    energy,
    paper,
)
from poecaps.training.density import fit_density
from poecaps.training.errors import TrainingError
from poecaps.training.progress import Progress
from poecaps.training.run import TrainingResult, resume, resume_training, run_training, train

__all__ = [
    "PRESETS",
    "Config",
    "DecoderStage",
    "DensityStage",
    "EncoderStage",
    "PixelDecoderStage",
    "Progress",
    "Stage",
    "TrainingError",
    "TrainingResult",
    "default",
    "energy",
    "fit_density",
    "paper",
    "resume",
    "resume_training",
    "run_training",
    "train",
]
