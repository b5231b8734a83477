"""The run of `make demo` of which README.md and docs/training.md show numbers and pictures.

`python -m benchmarks.demo --json docs/results/demo-cpu.json --update` trains by the command of the
Makefile, evaluates 2,000 samples from each domain, and writes the numbers and the peak memory. With
`--update`, the numbers of both pages and the pictures in docs/images become those of the run. It
takes about five minutes on two cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from poecaps.code_density import DOMAINS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "results" / "demo-cpu.json"
FOLDER, SAMPLES = "runs/demo", 2000
PICTURES = (*DOMAINS, "reconstructions", "curves")
DIGITS = r"[\d.,]+"  # what stands in a place {} of a part


# --------------------------------------------------------------------------------------------------
# The run


def recipe(target: str, folder: str) -> list[list[str]]:
    """Return the arguments of poecaps in the recipe of a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    lines = makefile.split(f"\n{target}: install\n")[1].split("\n\n")[0]
    lines = re.sub(r"\$\(DEMO\w*\)", lambda _: folder, lines)
    commands = [line.split() for line in lines.splitlines()]
    return [words for command, *words in commands if command == "$(BIN)/poecaps"]


def measure(options: Sequence[str] = (), pictures: Path | None = None) -> dict[str, Any]:
    """Train and evaluate in a temporary folder.

    Parameters
    ----------
    options
        Further options of the training, for a try.
    pictures
        Folder to which the pictures of the run are copied.
    """
    (train,) = recipe("demo", FOLDER)
    train += options
    evaluate = ["evaluate", FOLDER, "--samples", str(SAMPLES)]
    with tempfile.TemporaryDirectory() as place:
        said = _poecaps(train, place)
        peak = _peak_of_children()
        _poecaps(evaluate, place)
        run = Path(place, FOLDER)
        about = json.loads((run / "run.json").read_text(encoding="utf-8"))
        evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
        if pictures is not None:
            for name in PICTURES:
                shutil.copy(run / "figures" / f"{name}.png", pictures)
    return {
        "commands": [shlex.join(["poecaps", *words]) for words in (train, evaluate)],
        "machine": machine.describe(torch.device("cpu")),
        "peak_bytes": peak,
        "output": shown(said),
        "config": about["config"],
        "evaluation": evaluation,
    }


def _poecaps(arguments: Sequence[str], place: str) -> list[str]:
    """Run a command in a folder and return the lines that it prints on both streams."""
    done = subprocess.run(  # noqa: S603 (a fixed program)
        [sys.executable, "-m", "poecaps", *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(arguments)} failed:\n{done.stdout}")
    return done.stdout.splitlines()


def _peak_of_children() -> int:
    """Return the largest resident memory of a process that this one has waited for, in bytes."""
    import resource

    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def shown(lines: Sequence[str]) -> list[str]:
    """Return the last line of each stage, and all that is printed after the stages."""
    stages = {line.split()[0]: line for line in lines if re.match(r"\d/\d ", line)}
    last = max(i for i, line in enumerate(lines) if line in stages.values())
    return [*stages.values(), *lines[last + 1 :]]


# --------------------------------------------------------------------------------------------------
# The pages


def _recognisable(report: Mapping[str, Any], domain: str) -> str:
    return f"{100 * report['evaluation']['domains'][domain]['recognisability']['share']:.1f}"


def _real(report: Mapping[str, Any]) -> str:
    share = report["evaluation"]["training_samples"]["recognisability"]["share"]
    return f"{100 * share:.1f}"


def _seconds(report: Mapping[str, Any]) -> str:
    (found,) = re.findall(r"^trained in (\d+) s", _block(report), re.M)
    return str(found)


def _memory(report: Mapping[str, Any]) -> str:
    return f"{report['peak_bytes'] / 1e9:.1f}"


def _torch(report: Mapping[str, Any]) -> str:
    return str(report["machine"]["torch"]).partition("+")[0]


def _block(report: Mapping[str, Any]) -> str:
    return "\n".join(report["output"])


README, TRAINING = "README.md", "docs/training.md"
# Page, text with places {}, pattern of what stands in a place, sources of the places.
PARTS: tuple[tuple[str, str, str, tuple[Callable[[Mapping[str, Any]], str], ...]], ...] = (
    (README, "bundled digits in {} s on two cores of a CPU with AVX-512", DIGITS, (_seconds,)),
    (README, "```text\n1/4 {}\n```", r"autoencoder [^`]*?", (lambda each: _block(each)[4:],)),
    (README, "torch {},\nat most {} GB of memory", DIGITS, (_torch, _memory)),
    (
        README,
        "at least 90 % certain of {} % of such draws,\nand of {} % of real digits",
        DIGITS,
        (lambda each: _recognisable(each, "joint"), _real),
    ),
    (
        TRAINING,
        "1 and 3) in {} s on two cores (a server CPU with AVX-512 and bfloat16, torch {})",
        DIGITS,
        (_seconds, _torch),
    ),
    (TRAINING, "the 10,000 images of `make demo` took {} GB", DIGITS, (_memory,)),
    (
        TRAINING,
        "Of 2,000 draws, {} % and {} % are recognisable",
        DIGITS,
        (
            lambda each: _recognisable(each, "complete"),
            lambda each: _recognisable(each, "restricted"),
        ),
    ),
)


def fill(page: str, text: str, report: Mapping[str, Any]) -> str:
    """Return the text of a page with the numbers of a report; each part must occur once."""
    for name, part, pattern, sources in PARTS:
        if name == page:
            filled = part.format(*(source(report) for source in sources))
            search = re.escape(part).replace(r"\{\}", f"(?:{pattern})")
            text, count = re.subn(search, lambda _, filled=filled: filled, text)  # type: ignore[misc]
            if count != 1:
                raise ValueError(f"{page} must have {part!r} once, but has it {count} times")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate, write the numbers, and update the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument(
        "--update", action="store_true", help="update README.md, docs/training.md and docs/images"
    )
    parser.add_argument(
        "--options", default="", help="further options of the training in one word, for a try"
    )
    options = parser.parse_args(arguments)
    images = ROOT / "docs" / "images" if options.update else None
    report = measure(shlex.split(options.options), images)
    machine.write(report, options.json)
    print("\n".join(report["output"]))
    for page in (README, TRAINING):
        text = (ROOT / page).read_text(encoding="utf-8")
        if options.update:
            (ROOT / page).write_text(fill(page, text, report), encoding="utf-8")


if __name__ == "__main__":
    main()
