"""Check a wheel and an sdist: their files, and that they install and work in a new environment.

Run as: python tools/check_build.py DIST

The wheel is installed into a new virtual environment in a temporary folder, where the first
commands of a user are run; then the sdist is installed over it. The environment variable
PIP_CONSTRAINT sets the versions of the dependencies.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "poecaps"
LONGEST = 1800  # seconds that a command may take; installing torch takes longest
LARGEST = 100 * 2**20  # bytes of all files of a package; they have about 45 MB
STRAY = {".data", ".git", ".venv", "__pycache__", "build", "dist", "runs", "shared", "tensorboard"}
SMALL = shlex.split(
    "--model.features 8 --model.capsule-dim 4 --model.experts 3 5 --model.joint-components 4 "
    "--batch-size 10 --device cpu --autoencoder.epochs 1 --encoder.epochs 1 --decoder.epochs 1 "
    "--pixel-decoder.epochs 1"
)
MAKE_PICTURES = """
from pathlib import Path
from PIL import Image
Path("my/pictures").mkdir(parents=True)
for number in range(30):
    picture = Image.effect_noise((40, 48), 8 * number).convert("RGB")
    picture.save(f"my/pictures/{number}.png")
"""


class BuildError(Exception):
    """A package is incomplete, has unexpected files or does not work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a wheel and an sdist, print the steps, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    dist = parser.parse_args(arguments).dist
    try:
        wheel, sdist = _only(dist, "*.whl"), _only(dist, "*.tar.gz")
        check_wheel(wheel)
        check_sdist(sdist)
        with tempfile.TemporaryDirectory(prefix="poecaps-build-") as folder:
            try_out(wheel, sdist, Path(folder))
    except (BuildError, OSError) as error:
        print(f"check_build: {error}", file=sys.stderr)
        return 1
    return 0


def _only(dist: Path, pattern: str) -> Path:
    found = sorted(dist.glob(pattern))
    if len(found) != 1:
        raise BuildError(
            f"{dist} must hold one {pattern}, but holds "
            f"{', '.join(each.name for each in found) or 'none'}"
        )
    return found[0].resolve()


def check_wheel(wheel: Path) -> None:
    """Raise BuildError unless a wheel holds exactly the files of the package and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    _check_sizes(wheel, sizes)
    there = {
        PurePosixPath(name)
        for name in sizes
        if not PurePosixPath(name).parts[0].endswith(".dist-info")
    }
    files = (
        file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    wanted = {PurePosixPath(file.relative_to(PACKAGE.parent).as_posix()) for file in files}
    for problem, names in (
        ("lacks", wanted - there),
        ("has the unexpected", there - wanted),
    ):
        if names:
            raise BuildError(f"{wheel.name} {problem} {', '.join(map(str, sorted(names)[:5]))}")
    print(f"{wheel.name}: {len(there)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_sdist(sdist: Path) -> None:
    """Raise BuildError if an sdist lacks a file, or holds data or other local files."""
    with tarfile.open(sdist) as archive:
        sizes = {
            member.name.partition("/")[2]: member.size
            for member in archive.getmembers()
            if member.isfile()
        }
    _check_sizes(sdist, sizes)
    wanted = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src/poecaps/__init__.py")
    missing = set(wanted) - sizes.keys()
    if missing:
        raise BuildError(f"{sdist.name} lacks {', '.join(sorted(missing))}")
    print(f"{sdist.name}: {len(sizes)} files, {sdist.stat().st_size / 1e6:.1f} MB")


def _check_sizes(package: Path, sizes: Mapping[str, int]) -> None:
    stray = sorted(name for name in sizes if STRAY & set(PurePosixPath(name).parts))
    if stray:
        raise BuildError(f"{package.name} has the unexpected {', '.join(stray[:5])}")
    if sum(sizes.values()) > LARGEST:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        raise BuildError(
            f"{package.name} must hold at most {LARGEST:,} bytes, but holds "
            f"{sum(sizes.values()):,}; the largest files are {', '.join(largest)}"
        )


def try_out(wheel: Path, sdist: Path, folder: Path) -> None:
    """Install a wheel in a new environment, run a user's first commands, install the sdist."""
    venv.create(folder / "venv", with_pip=True)
    bin_ = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python, poecaps = str(bin_ / "python"), str(bin_ / "poecaps")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    version = wheel.name.split("-")[1]
    print("installs the wheel in a new environment", flush=True)
    run([*pip, str(wheel)], folder)

    place = run([python, "-c", "import poecaps; print(poecaps.__file__)"], folder)
    if folder.resolve() not in Path(place.strip()).resolve().parents:
        raise BuildError(
            f"poecaps must be imported from {folder}, but is imported from {place.strip()}"
        )
    _expect(run([poecaps, "--version"], folder), [f"poecaps {version}"])
    _expect(run([poecaps, "info"], folder), ["fashion-mnist, mnist", "mnist-sample"])
    run([poecaps, "generate", "mnist", "--device", "cpu"], folder)
    run([python, "-c", MAKE_PICTURES], folder)
    run([poecaps, "train", "--data", "my/pictures", "--size", "32", "32", *SMALL], folder)
    run([poecaps, "generate", "runs/pictures"], folder)
    run([poecaps, "generate", "runs/pictures", "--domain", "learned", "--out", "grid.png"], folder)
    run(
        [
            python,
            "-c",
            "from poecaps import evaluation as e; [e.load_classifier(n) for n in e.CLASSIFIERS]",
        ],
        folder,
    )
    trained = [
        f"runs/pictures/{name}" for name in ("README.md", "samples.png", "figures/joint.png")
    ]
    for file in ("mnist-joint.png", "grid.png", "grid.npz", *trained):
        if not (folder / file).is_file():
            raise BuildError(f"{file} was not written")

    print("installs the sdist over it", flush=True)
    run([*pip, "--no-deps", "--force-reinstall", str(sdist)], folder)
    _expect(run([poecaps, "--version"], folder), [f"poecaps {version}"])
    run([poecaps, "generate", "fashion-mnist", "--device", "cpu"], folder)
    print(f"poecaps {version} installs and works on its own")


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command in a folder, without the source on the path, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("  " + " ".join([Path(command[0]).name, *command[1:]])[:110], flush=True)
    try:
        done = subprocess.run(  # noqa: S603
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired as error:
        name = Path(command[0]).name
        raise BuildError(
            f"{name} must end within {LONGEST} seconds, but was still running: {command[1:]}"
        ) from error
    if done.returncode:
        raise BuildError(
            f"{Path(command[0]).name} ended with status {done.returncode}: "
            f"{done.stderr.strip()[-2000:]}"
        )
    return done.stdout


def _expect(text: str, facts: Iterable[str]) -> None:
    for fact in facts:
        if fact not in text:
            raise BuildError(f"{fact!r} must be printed, but the output is {text!r}")


if __name__ == "__main__":
    sys.exit(main())
