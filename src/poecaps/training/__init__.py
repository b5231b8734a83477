"""Train the three stages, from Python."""

from poecaps.training.config import PRESETS, Config, EncoderStage, Stage, default, paper
from poecaps.training.loop import TrainingError, resume, train

__all__ = ["PRESETS", "Config", "EncoderStage", "Stage", "TrainingError", "default", "paper", "resume", "train"]
