"""The command line: `poecaps train`, `generate`, `evaluate` and others, listed in `main`.

`main` dispatches and reports errors. `train`, `generate` (with `reconstruct` and `traverse`),
`encode`, `evaluate`, `explore` and `info` are the commands, `completion` writes completion scripts.
`options` defines the options that several commands share, `loading` opens models and their images,
`arguments` converts between command lines and configurations.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def run() -> NoReturn:
    """Run the command line as a program."""
    # Imported here, so that `poecaps.cli.arguments` can be used without loading every command.
    try:
        from poecaps.cli.main import run_program
    except KeyboardInterrupt:  # the import takes a moment
        print("poecaps: interrupted", file=sys.stderr)
        sys.exit(130)

    run_program()
