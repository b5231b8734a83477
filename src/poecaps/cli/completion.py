"""Corrections of the completion scripts that tyro writes; each is needed with tyro 1.0.16."""

from __future__ import annotations

from typing import Literal

Shell = Literal["bash", "zsh", "fish"]

# tyro completes options and commands, but not positional arguments, such as the folder of a run:
# where it has no completions, the shell shall offer files.
COMPLETE_FILES: dict[Shell, str] = {
    "bash": "complete -o default -F _tyro_poecaps poecaps",
    "zsh": "(( compstate[nmatches] )) || _files",
    "fish": "complete --command poecaps --force-files --condition 'not __fish_use_subcommand'",
}


def correct(script: str, shell: Shell) -> str:
    """Return a completion script of tyro with its errors corrected."""
    # The script expects the index of the current word counted from 0, but zsh counts from 1.
    script = script.replace('"${words[@]}" "$CURRENT"', '"${words[@]}" "$((CURRENT - 1))"')
    return f"{script}\n{COMPLETE_FILES[shell]}"
