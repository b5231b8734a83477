"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import poecaps


def test_every_public_name_is_there_and_documented() -> None:
    for name in poecaps.__all__:
        assert (getattr(poecaps, name).__doc__ or "").strip(), name


def test_the_version_is_stated_once() -> None:
    assert version("poecaps") == poecaps.__version__


def test_the_package_is_typed() -> None:
    assert (Path(poecaps.__file__).parent / "py.typed").exists()


def test_importing_is_light() -> None:
    """Beyond torch and NumPy, importing poecaps loads nothing but itself."""
    program = (
        "import sys, torch, numpy; before = set(sys.modules); import poecaps;"
        "print({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "{'poecaps'}"
