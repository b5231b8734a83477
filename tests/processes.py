"""Commands in processes of their own, without the seconds that it takes to import PyTorch.

A process that has imported everything waits for commands, and forks itself for each of them. What
a command does, how it ends and which signals it receives is as if it had been started by itself.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Process:
    """A command that has been started, with the methods of `subprocess.Popen`."""

    def __init__(self, commands: Commands, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._commands, self._out, self._err = commands, out, err

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._commands.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return status

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Commands:
    """Starts commands; the process behind it ends with the `with` block."""

    def __enter__(self) -> Commands:
        self._folder = tempfile.TemporaryDirectory()
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._server.communicate(timeout=300)  # closes its input
        finally:
            self._server.kill()
            self._folder.cleanup()

    def ask(self, **request: Any) -> int | None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: int | None = json.loads(self._server.stdout.readline())
        return answer

    def start(self, *arguments: str | Path, module: str = "poecaps", **variables: str) -> Process:
        """Start `python -m module arguments`, with these variables in its environment."""
        self._count += 1
        out, err = (Path(self._folder.name) / f"{self._count}.{name}" for name in ("out", "err"))
        pid = self.ask(
            module=module,
            arguments=[str(each) for each in arguments],
            variables=variables,
            out=str(out),
            err=str(err),
        )
        assert pid is not None
        return Process(self, pid, out, err)


def serve() -> dict[str, Any] | None:
    """Fork for every command; return the command in the child, and None at the end."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif not (answer := os.fork()):
            command: dict[str, Any] = request
            return command
        print(json.dumps(answer), flush=True)  # noqa: T201
    return None


def run(command: dict[str, Any]) -> None:
    """Become this command."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(command[name], os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even if the tests ignore it
    os.environ.update(command["variables"])
    sys.argv[1:] = command["arguments"]
    runpy.run_module(command["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import torch.distributed.run  # noqa: F401

    import poecaps.cli.main  # noqa: F401

    if given := serve():
        run(given)
