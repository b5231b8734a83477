"""Conversions between command lines and training configurations."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from poecaps.training.config import PRESETS, Config, changed_options, nearest_preset

if TYPE_CHECKING:
    from collections.abc import Sequence


def command_for(config: Config) -> str:
    """Return the `poecaps train` command with these options, as one line for a shell.

    The command names the preset with the fewest differences, and only options that differ from it.
    """
    preset = nearest_preset(config)
    words = ["poecaps", "train", *([] if preset == "default" else ["--preset", preset])]
    for name, value in changed_options(config, preset).items():
        stage, dot, option = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{stage}{dot}{'' if value else 'no-'}{option}")
        else:
            words += [f"--{stage}{dot}{option}", *_words(value)]
    return shlex.join(words)


def _words(value: Any) -> list[str]:
    """Return the words of an option's value; those of a tuple follow each other."""
    if isinstance(value, tuple):
        return [word for each in value for word in _words(each)]
    return [str(value)]


def preset_of(arguments: Sequence[str]) -> str:
    """Return the preset among the arguments of `poecaps train`; the last one counts.

    It must be known before the other options are parsed, because it determines their defaults.
    """
    for previous, argument in reversed(list(zip(["", *arguments], arguments, strict=False))):
        name = argument if previous == "--preset" else argument.removeprefix("--preset=")
        if (previous == "--preset" or name != argument) and name in PRESETS:
            return name
    return "default"
