"""Time the whole way: raw files of images → trained model on disk → Figure 2, with the preset `default`.

`python -m benchmarks.pipeline --device cuda --path FOLDER` (FOLDER holds MNIST's four files) goes that way once for
each seed, in one process, and prints what each part took. What a process pays once is told apart: the start of the
interpreter with all imports, the context of the GPU, and a first small run, the same way with the same batch size on as
few images as it takes to record a step of each stage, in which kernels are compiled (on a GPU into an empty folder, so
that none is found from before) and libraries set themselves up.

`--evaluate` measures each model afterwards by the protocol of `poecaps evaluate`, so that it is seen to be as good as
those of docs/results.md. `--keep FOLDER` keeps models and pictures, `--json FILE` the numbers.

Figure 2 is 20 columns (experts) of 4 draws, in the complete domain (2a) and in the restricted one (2b); the domain
`learned`, which the paper does not have, is drawn as well.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from benchmarks.claims import figure
from benchmarks.study import find
from poecaps.code_density import CodeDensity
from poecaps.data import ImageSet, load
from poecaps.evaluation import CLASSIFIERS, evaluate, load_classifier
from poecaps.network import CapsuleNetwork
from poecaps.training import PRESETS, train
from poecaps.training.graphs import MIN_REPLAYS, WARMUP_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poecaps.code_density import Domain
    from poecaps.training import Config, Progress

PANELS: tuple[Domain, ...] = ("complete", "restricted", "learned")
STAGES = ("autoencoder", "encoder", "decoder", "pixel_decoder")
QUALITY = (  # places in an evaluation
    "probe.test_accuracy",
    "domains.joint.frechet.distance",
    "domains.joint.recognisability.share",
    "experts.recognisability.share",
    "specialisation.normalised",
    "effective_rank",
    "domains.restricted.negatives.share",
)


def age() -> float | None:
    """Tell for how many seconds this process has run, where Linux says so."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return None
    began = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


STARTED = age()  # interpreter and imports are done


class Clock:
    """Where the time goes: each part lasts from its mark to the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, float]] = []

    def mark(self, part: str) -> None:
        """Begin a part; marking the one that is going on changes nothing."""
        if not self.marks or self.marks[-1][0] != part:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks.append((part, time.perf_counter()))

    def parts(self) -> dict[str, float]:
        """Tell how long each part took, until the last mark, which is no part."""
        found: dict[str, float] = {}
        for (part, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            found[part] = found.get(part, 0.0) + end - start
        return found


def go(
    config: Config, folder: Path, data: ImageSet | None = None
) -> tuple[CapsuleNetwork, dict[str, float]]:
    """Go the way once: the network, and the seconds of each part."""
    clock = Clock(torch.device(config.device))

    def report(progress: Progress) -> None:
        if progress.step == 0:
            clock.mark(progress.stage)

    with ExitStack() as patches:
        patches.enter_context(_marked(CodeDensity, "fit", clock, "density"))
        patches.enter_context(_marked(CapsuleNetwork, "save", clock, "saving"))
        clock.mark("reading files")
        network = train(
            config, folder, data=data, report=report, found=lambda _: clock.mark("preparation")
        )
        clock.mark("Figure 2")
        for domain in PANELS:
            figure(network, domain, folder / f"{domain}.png", config.seed)
        clock.mark("end")
    return network, clock.parts()


@contextmanager
def _marked(owner: type, name: str, clock: Clock, part: str) -> Iterator[None]:
    """Mark a part whenever a method is called."""
    method = getattr(owner, name)

    def marked(*given: Any, **options: Any) -> Any:
        clock.mark(part)
        return method(*given, **options)

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, method)


def first_run(config: Config, data: ImageSet, folder: Path) -> float:
    """Go the way with few images and one epoch, and return the seconds."""
    few = data.images[: (WARMUP_STEPS + MIN_REPLAYS) * config.batch_size]
    stages = {
        name: replace(getattr(config, name), epochs=min(1, getattr(config, name).epochs))
        for name in STAGES
    }
    began = time.perf_counter()
    go(replace(config, **stages), folder, ImageSet(few, source="few images"))
    return time.perf_counter() - began


def quality(network: CapsuleNetwork, options: argparse.Namespace) -> dict[str, float | None]:
    """Measure a network as docs/results.md does."""
    training, test = (
        load(options.data, split=split, path=options.path) for split in ("train", "test")
    )
    judge = (
        load_classifier(options.data)
        if options.data.removesuffix("-sample") in CLASSIFIERS
        else None
    )
    result = evaluate(
        network, training, test, judge, samples=options.samples, device=options.device
    )
    whole = json.loads(result.to_json())
    return {where: find(whole, where) for where in QUALITY}


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Tell the median and the spread of each part, and of the total."""
    parts = {name: [each["parts"][name] for each in rounds] for name in rounds[0]["parts"]}
    parts["total"] = [each["total_s"] for each in rounds]
    return {name: machine.spread(values) for name, values in parts.items()}


def table(report: Mapping[str, Any]) -> str:
    """Lay out what was measured."""
    lines = [f"{'once in a process':<34}{'s':>9}"]
    lines += [
        f"  {name:<32}{value:9.3f}" for name, value in report["once"].items() if value is not None
    ]
    lines.append(f"{'each time':<34}{'median':>9}{'min':>9}{'max':>9}")
    for name, found in report["summary"].items():
        lines.append(
            f"  {name:<32}{found['median_s']:9.3f}{found['min_s']:9.3f}{found['max_s']:9.3f}"
        )
    for each in report["rounds"]:
        shown = {
            where: f"{value:.4g}"
            for where, value in (each["quality"] or {}).items()
            if value is not None
        }
        if shown:
            lines.append(
                f"seed {each['seed']}: "
                + ", ".join(f"{where} {value}" for where, value in shown.items())
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--data", default="mnist", help="images to learn from (default: mnist)")
    parser.add_argument("--path", help="folder that holds the set")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run for each (default: 0 1 2)"
    )
    parser.add_argument("--evaluate", action="store_true", help="measure how good the models are")
    parser.add_argument(
        "--samples", type=int, default=10_000, help="drawn for that (default: 10000)"
    )
    parser.add_argument("--keep", type=Path, help="folder for models and pictures")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    config = replace(
        PRESETS["default"](), data=options.data, data_path=options.path, device=options.device
    )
    with tempfile.TemporaryDirectory() as scratch:
        if device.type == "cuda":
            os.environ["TRITON_CACHE_DIR"] = str(Path(scratch) / "kernels")
        once: dict[str, float | None] = {"interpreter and imports": STARTED}
        began = time.perf_counter()
        if device.type == "cuda":
            torch.zeros(1, device=device).item()
            once["context of the GPU"] = time.perf_counter() - began
        small = load(options.data, path=options.path)
        once["first small run, with compilation"] = first_run(
            config, small, Path(scratch) / "first"
        )
        report: dict[str, Any] = {
            "command": machine.command("benchmarks.pipeline", parser, options),
            "machine": machine.describe(device),
            "data": {"images": len(small), "shape": list(small.shape)},
            "once": once,
            "rounds": [],
        }
        print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
        for seed in options.seeds:
            folder = (options.keep or Path(scratch)) / f"seed-{seed}"
            network, parts = go(replace(config, seed=seed), folder)
            each = {"seed": seed, "total_s": sum(parts.values()), "parts": parts}
            print(f"seed {seed}: {each['total_s']:.3f} s", flush=True)
            each["quality"] = quality(network, options) if options.evaluate else None
            report["rounds"].append(each)
    report["summary"] = summarise(report["rounds"])
    print(table(report))
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
