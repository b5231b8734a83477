"""What can stop a run."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training diverged, its results cannot be written, or another process of it has stopped."""

    __module__ = "poecaps"
