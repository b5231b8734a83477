"""The checks of `make build` on the files of a wheel and an sdist."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from tools import check_build
from tools.check_build import PACKAGE, BuildError, check_sdist, check_wheel, main, run

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(
    file.relative_to(PACKAGE.parent).as_posix()
    for file in PACKAGE.rglob("*")
    if file.is_file() and "__pycache__" not in file.parts
)
METADATA = "poecaps-1.0.dist-info/METADATA"


def wheel_of(folder: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(folder / "poecaps-1.0-py3-none-any.whl", "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return folder / "poecaps-1.0-py3-none-any.whl"


def sdist_of(folder: Path, names: list[str]) -> Path:
    with tarfile.open(folder / "poecaps-1.0.tar.gz", "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"poecaps-1.0/{name}"), io.BytesIO())
    return folder / "poecaps-1.0.tar.gz"


def test_a_wheel_holds_every_file_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_wheel(wheel_of(tmp_path, [*FILES, METADATA]))
    assert f"{len(FILES)} files" in capsys.readouterr().out


@pytest.mark.parametrize(
    "part",
    [
        "models/mnist/model.safetensors",
        "models/mnist/samples.png",
        "py.typed",
        "explorer/static/index.html",
        "kernels/cpu/routing.c",
        "kernels/cpu/backward.h",
        "kernels/cpu/lanes.h",
    ],
)
def test_a_wheel_that_lacks_a_file_raises_an_error(part: str, tmp_path: Path) -> None:
    assert f"poecaps/{part}" in FILES
    with pytest.raises(BuildError, match=f"lacks poecaps/{part}"):
        check_wheel(wheel_of(tmp_path, [name for name in FILES if name != f"poecaps/{part}"]))


@pytest.mark.parametrize(
    "name", ["tests/test_build.py", "poecaps/__pycache__/cli.cpython-311.pyc", "poecaps/notes.txt"]
)
def test_a_wheel_with_an_unexpected_file_raises_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"has the unexpected {name}"):
        check_wheel(wheel_of(tmp_path, [*FILES, name]))


def test_an_sdist_is_complete_and_without_data(tmp_path: Path) -> None:
    whole = ["pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src/poecaps/__init__.py"]
    check_sdist(sdist_of(tmp_path, whole))
    with pytest.raises(BuildError, match="lacks LICENSE"):
        check_sdist(sdist_of(tmp_path, [name for name in whole if name != "LICENSE"]))
    with pytest.raises(
        BuildError, match=r"has the unexpected \.data/mnist/train-images-idx3-ubyte"
    ):
        check_sdist(sdist_of(tmp_path, [*whole, ".data/mnist/train-images-idx3-ubyte"]))


def test_an_empty_folder_raises_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert "must hold one *.whl, but holds none" in capsys.readouterr().err


def test_a_command_that_does_not_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run([sys.executable, "-c", "print(3)"], tmp_path) == "3\n"
    monkeypatch.setattr(check_build, "LONGEST", 0.5)
    with pytest.raises(
        BuildError, match=r"must end within 0.5 seconds, but was still running: .*sleep"
    ):
        run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)


def test_a_command_that_fails_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="ended with status 3: no luck"):
        run(
            [sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"],
            tmp_path,
        )
