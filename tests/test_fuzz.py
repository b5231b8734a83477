"""Altered files are used or refused on one line; `make fuzz` does it for ten minutes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.systems import needs_limits


@needs_limits
def test_altered_files_lead_to_a_result_or_to_one_line() -> None:
    """With limits of time and memory, which need a process of their own; the corpus comes first."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "200", "--seed", "20260215"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n200 inputs" in done.stdout
    assert done.stdout.endswith("wrong: 0\n")


@needs_limits
def test_a_seed_leads_to_the_same_inputs_again(tmp_path: Path) -> None:
    """Neither times nor the random order of a header are in them."""
    from tests import fuzz  # needs the module `resource`

    for kind in ("commands", "run", "npz", "idx"):
        found = []
        for name in ("first", "second"):
            folder = tmp_path / f"{kind}-{name}"
            folder.mkdir()
            fuzz.KINDS[kind][0](folder)
            dice = random.Random(1)
            for _ in range(4):
                fuzz.alter(folder, dice)
            found.append({file.name: file.read_bytes() for file in folder.iterdir()})
        assert found[0] == found[1]
