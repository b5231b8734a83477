"""Run the command line by `python -m poecaps`."""

import sys

from poecaps.cli import main

sys.exit(main())
