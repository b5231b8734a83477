"""The exception of a failed training run."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training diverged, its results cannot be written, or another process has stopped."""

    __module__ = "poecaps"
