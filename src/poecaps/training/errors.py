"""The exceptions of a training run that does not reach its end."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training diverged, its results cannot be written, or another process has stopped."""

    __module__ = "poecaps"


class SavedInterrupt(KeyboardInterrupt):
    """An interrupt (Ctrl-C, SIGTERM) after which the last step was saved."""
