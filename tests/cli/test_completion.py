"""`poecaps completion`, in the shells that are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from poecaps.cli.completion import COMPLETE_FILES, Shell
from poecaps.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

COMPLETED = {  # a line that is being typed, and what it may become
    "poecaps gen": ["generate"],
    "poecaps generate --domain l": ["learned"],
    "poecaps generate --do": ["--domain"],
    "poecaps train --encoder.f": ["--encoder.final-learning-rate-ratio"],
    "poecaps sam": ["sample"],
    "poecaps sample --temperat": ["--temperature"],
    "poecaps lik": ["likelihood"],
    "poecaps likelihood --im": ["--images"],
    "poecaps generate --domain m": ["model", "model-experts"],
}


def scripted(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if os.name == "nt" or shutil.which(shell) is None:  # on Windows, that of WSL or of Git
        pytest.skip(f"there is no {shell}")
    capsys.readouterr()
    assert main(["completion", shell]) == 0
    path = folder / "_poecaps"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def test_bash_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = scripted("bash", tmp_path, capsys)
    for line, wanted in COMPLETED.items():
        words = f"COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}"
        program = f'source {script}; {words}; _tyro_poecaps; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "--norc", "-c", program], capture_output=True, text=True, check=True
        )
        assert sorted(done.stdout.split("\n")[:-1]) == wanted
        assert done.stderr == ""
    registered = ["bash", "--norc", "-c", f"source {script}; complete -p poecaps"]
    assert (
        "-o default"
        in subprocess.run(registered, capture_output=True, text=True, check=True).stdout
    )  # files, too


def test_fish_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = scripted("fish", tmp_path, capsys)
    (tmp_path / "runs").mkdir()
    for line, wanted in {**COMPLETED, "poecaps generate ru": ["runs/"]}.items():
        program = f"source {script}; complete -C '{line}'"
        arguments = ["fish", "--no-config", "-c", program]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert sorted(each.split("\t")[0] for each in done.stdout.splitlines()) == wanted


def test_zsh_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own functions work only while somebody types, so others stand in for them."""
    script = scripted("zsh", tmp_path, capsys)
    for line, wanted in COMPLETED.items():
        program = (
            "_describe() { print -rl -- ${(P)2%%:*} }; _files() { print files };"
            "typeset -A compstate=(nmatches 1);"
            f"words=({line}); CURRENT={len(line.split())}; source {script}"
        )
        done = subprocess.run(
            ["zsh", "-f", "-c", program], capture_output=True, text=True, check=True
        )
        assert sorted(done.stdout.split()) == wanted
    assert script.read_text(encoding="utf-8").startswith("#compdef poecaps\n")  # how zsh finds it


def test_only_words_are_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A help text of two lines would be offered as a second word."""
    script = scripted("bash", tmp_path, capsys)
    for command in (
        "train",
        "generate",
        "reconstruct",
        "traverse",
        "encode",
        "evaluate",
        "sample",
        "likelihood",
        "explore",
    ):
        words = f"COMP_WORDS=(poecaps {command} --); COMP_CWORD=2"
        program = f'source {script}; {words}; _tyro_poecaps; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "--norc", "-c", program], capture_output=True, text=True, check=True
        )
        assert len(done.stdout.splitlines()) >= 4
        assert all(word.startswith("--") for word in done.stdout.splitlines())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_is_corrected(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the shell is not installed: zsh counts words from 1, and all offer files."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script.endswith(f"\n{COMPLETE_FILES[shell]}\n")
    assert ('"$((CURRENT - 1))"' in script) == (shell == "zsh")
    assert '"$CURRENT"' not in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_knows_the_commands_of_a_density(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the shell is not installed."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("sample", "likelihood", "temperature", "images"):
        assert word in script
