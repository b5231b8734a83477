"""The errors that loading images can raise."""

from __future__ import annotations


class DataError(ValueError):
    """A file or folder is damaged, or does not contain the images or labels it should."""

    __module__ = "poecaps.data"


class MissingSplitError(DataError):
    """A file or folder has no test images, or no training images."""

    __module__ = "poecaps.data"


class DatasetNotFoundError(FileNotFoundError):
    """A named dataset was found in none of the folders that were searched."""

    __module__ = "poecaps.data"
