"""Run the command line by `python -m poecaps`."""

from poecaps.cli import run

run()
