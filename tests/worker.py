"""The command `poecaps` in a process that torchrun has forked, which waits for its return."""

import sys

from poecaps.cli.main import main

if __name__ == "__main__" and (status := main()):
    sys.exit(status)
