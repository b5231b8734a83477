"""Dispatch of the commands, and how their errors are reported.

Results (paths and numbers) go to standard output, progress and errors to standard error. The exit
status is 0 after success, 1 after a failure, 2 for an invalid command, 130 after Ctrl-C, SIGTERM or
SIGHUP, and 141 if the output is no longer read, as by `head`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import os
import shutil
import sys
import textwrap
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

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
    from collections.abc import Callable, Sequence

FAILURES = (ModelError, TrainingError, DataError, OSError, torch.OutOfMemoryError, MemoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            _run(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _report_error("interrupted", 130)
    except BrokenPipeError:
        # Python would report the rest of the output when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the encoding may lack characters such as ×
    status = main()
    try:
        sys.stderr.flush()
    except OSError:  # Python would fail when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    if Distributed.from_environment().size > 1:
        # The threads of torch.distributed may abort the process when Python shuts down normally.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _open_missing_streams() -> None:
    """Open standard streams that are closed, so that no file gets the number of one of them."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115


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


def _run(arguments: Sequence[str]) -> None:
    """Run the command, or print the help or the version."""
    command = arguments[0] if arguments else "--help"
    if command == "--version":
        say(f"poecaps {__version__}")
    elif command in ("-h", "--help"):
        print(_overview())
    elif not command.startswith("-") and command not in _commands(arguments):
        close = difflib.get_close_matches(command, _commands(arguments), n=1)
        hint = f"did you mean {close[0]}?" if close else "poecaps --help lists the commands"
        raise ValueError(f"there is no command {command}; {hint}")
    elif "-h" in arguments or "--help" in arguments:
        text = _Buffer()
        try:
            with contextlib.redirect_stdout(text):
                _dispatch(arguments)
        finally:
            print(_wrap(text.getvalue()), end="")
    else:
        _dispatch(arguments)


def _commands(arguments: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the commands by their names; the arguments determine the defaults of `train`."""
    return {
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
    }


def _dispatch(arguments: Sequence[str]) -> None:
    """Call the command that the arguments name."""
    tyro.extras.subcommand_cli_from_dict(
        _commands(arguments), prog="poecaps", args=arguments, registry=registry
    )


def _overview() -> str:
    """Return the help of the program: the first sentence about each command."""
    about = {
        name: (inspect.getdoc(command) or "").split("\n\n")[0]
        for name, command in _commands([]).items()
    }
    options = {"-h, --help": "Show this help.", "--version": "Show the version."}
    return "\n".join(
        [
            "usage: poecaps [-h] [--version] COMMAND ...",
            "",
            _fill(
                "Products of expert capsules: learn from images without labels, and draw new "
                "ones. Start with: poecaps train"
            ),
            "",
            "commands:",
            *(_entry(name, " ".join(text.split())) for name, text in about.items()),
            "",
            "options:",
            *(_entry(name, text) for name, text in options.items()),
            "",
            _fill("poecaps COMMAND --help describes a command and its options."),
        ]
    )


def _entry(name: str, text: str) -> str:
    """Format a line of the help; the text starts in column 16."""
    return textwrap.fill(
        text, _help_width(), initial_indent=f"  {name:13} ", subsequent_indent=" " * 16
    )


def _wrap(text: str) -> str:
    """Wrap the descriptions of tyro's help; its coloured lines and its boxes fit already."""
    lines = text.splitlines()
    return "".join((line if "\x1b" in line else _fill(line)) + "\n" for line in lines)


def _fill(line: str) -> str:
    if len(line) <= _help_width():
        return line
    return textwrap.fill(line, _help_width(), break_on_hyphens=False, break_long_words=False)


def _help_width() -> int:
    return min(shutil.get_terminal_size().columns, 80)


class _Buffer(io.StringIO):
    """Text for standard output, with the characters and colours that are possible there."""

    def __init__(self) -> None:
        super().__init__()
        self.target = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of standard output."""
        return self.target.encoding

    def isatty(self) -> bool:
        """Return whether standard output is a terminal."""
        return self.target.isatty()


def _show_warning(message: Warning | str, *_: object) -> None:
    """Print a warning on one line, without the source code that Python would print."""
    say(f"warning: {message}", file=sys.stderr)


def _report_error(message: str, status: int) -> int:
    say(f"poecaps: {message}", file=sys.stderr)
    return status
