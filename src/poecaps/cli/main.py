"""Dispatch of the commands, and how their errors are reported.

Results (paths and numbers) go to standard output, progress and errors to standard error. The exit
status is 0 after success, 1 after a failure, 2 for an invalid command, and 130 after Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from typing import TYPE_CHECKING, NoReturn

import torch
import tyro
from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps._files import ModelError
from poecaps._version import __version__
from poecaps.cli.arguments import preset_of
from poecaps.cli.cluster import cluster
from poecaps.cli.completion import Shell, correct
from poecaps.cli.density import likelihood, sample
from poecaps.cli.encode import encode
from poecaps.cli.evaluate import evaluate
from poecaps.cli.explore import explore
from poecaps.cli.generate import generate, reconstruct, traverse
from poecaps.cli.info import info
from poecaps.cli.options import registry
from poecaps.cli.outputs import say
from poecaps.cli.train import train_command
from poecaps.data import DataError
from poecaps.training import TrainingError
from poecaps.training.distributed import Distributed

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILURES = (ModelError, TrainingError, DataError, OSError, torch.OutOfMemoryError, MemoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        say(f"poecaps {__version__}")
        return 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            _dispatch(given or ["--help"])
    except KeyboardInterrupt:
        return _report_error("interrupted", 130)
    except FAILURES as error:
        return _report_error(str(error) or type(error).__name__, 1)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's error without memory on a CPU
            raise
        return _report_error(f"not enough memory ({str(error).splitlines()[0]})", 1)
    except (ValueError, TypeError) as error:
        return _report_error(str(error), 2)
    return 0


def run_program() -> NoReturn:
    """Run the command line as a program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the encoding may lack characters such as ×
    status = main()
    if Distributed.from_environment().size > 1:
        # The threads of torch.distributed may abort the process when Python shuts down normally.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def completion(shell: Positional[Shell]) -> None:
    """Print a script that completes the commands, options and values of poecaps in a shell.

    Save it where the shell looks for such scripts:

    bash: poecaps completion bash > ~/.local/share/bash-completion/completions/poecaps

    zsh: poecaps completion zsh > ~/.zfunc/_poecaps (in ~/.zshrc, before compinit: fpath+=~/.zfunc)

    fish: poecaps completion fish > ~/.config/fish/completions/poecaps.fish

    Parameters
    ----------
    shell
        The shell.
    """
    script = io.StringIO()
    try:
        with contextlib.redirect_stdout(script):
            _dispatch(["--tyro-write-completion", shell, "-"])
    except SystemExit as leave:  # tyro exits once it has written the script
        if leave.code:
            raise
    print(correct(script.getvalue(), shell))


def _dispatch(arguments: Sequence[str]) -> None:
    """Call the command that the arguments name."""
    tyro.extras.subcommand_cli_from_dict(
        {
            "train": train_command(preset_of(arguments)),
            "generate": generate,
            "reconstruct": reconstruct,
            "traverse": traverse,
            "encode": encode,
            "cluster": cluster,
            "evaluate": evaluate,
            "sample": sample,
            "likelihood": likelihood,
            "explore": explore,
            "info": info,
            "completion": completion,
        },
        prog="poecaps",
        description="Products of expert capsules: learn from images without labels, and draw new "
        f"ones.\n\nVersion {__version__}. Start with: poecaps train",
        args=arguments,
        registry=registry,
    )


def _show_warning(message: Warning | str, *_: object) -> None:
    """Print a warning on one line, without the source code that Python would print."""
    say(f"warning: {message}", file=sys.stderr)


def _report_error(message: str, status: int) -> int:
    say(f"poecaps: {message}", file=sys.stderr)
    return status
