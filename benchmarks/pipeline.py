"""Time the whole pipeline: image files → trained model on disk → Figure 2, preset `default`.

`python -m benchmarks.pipeline --device cuda --path FOLDER` (FOLDER has the four files of MNIST)
runs the pipeline once for each seed, in one process, and prints the time of each part. Costs that
occur once per process are listed separately: the start of the interpreter with all imports, the GPU
context, and a small first run. This first run uses the same batch size and just enough images to
capture a step of each stage; kernels are compiled in it (on a GPU into an empty cache folder, so
that nothing is reused) and libraries are initialised.

`--evaluate` measures each model with the protocol of `poecaps evaluate`, to show that it is as good
as the models of docs/results.md. `--keep FOLDER` keeps models and figures, `--json FILE` writes the
numbers to a file.

Figure 2 has 20 columns (experts) of 4 draws, in the complete domain (2a) and in the restricted
domain (2b). The domain `learned`, which is not in the paper, is drawn as well.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks import machine
from benchmarks.claims import figure
from benchmarks.internals import CAPTURE_STEPS
from benchmarks.variants import lookup
from poecaps.code_density import CodeDensity
from poecaps.data import ImageSet, load
from poecaps.evaluation import CLASSIFIERS, evaluate, load_classifier
from poecaps.network import CapsuleNetwork
from poecaps.training import PRESETS, train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from poecaps.code_density import Domain
    from poecaps.training import Config, Progress

PANELS: tuple[Domain, ...] = ("complete", "restricted", "learned")
STAGES = ("autoencoder", "encoder", "decoder", "pixel_decoder")
QUALITY = (  # paths in an evaluation
    "probe.test_accuracy",
    "domains.joint.frechet.distance",
    "domains.joint.recognisability.share",
    "experts.recognisability.share",
    "specialisation.normalised",
    "effective_rank",
    "domains.restricted.negatives.share",
)


def process_age() -> float | None:
    """Return the seconds since this process started; None except on Linux."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return None
    start = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


IMPORT_SECONDS = process_age()  # interpreter start and imports


class Clock:
    """Times of the parts of a run: each part lasts from its start to the start of the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.starts: list[tuple[str, float]] = []

    def start(self, part: str) -> None:
        """Start a part; starting the current part again has no effect."""
        if not self.starts or self.starts[-1][0] != part:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.starts.append((part, time.perf_counter()))

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part; the last start only ends the part before it."""
        seconds: dict[str, float] = {}
        for (part, start), (_, end) in zip(self.starts, self.starts[1:], strict=False):
            seconds[part] = seconds.get(part, 0.0) + end - start
        return seconds


def run_pipeline(
    config: Config, folder: Path, data: ImageSet | None = None
) -> tuple[CapsuleNetwork, dict[str, float]]:
    """Run the pipeline once; return the network and the seconds of each part."""
    clock = Clock(torch.device(config.device))

    def report(progress: Progress) -> None:
        if progress.step == 0:
            clock.start(progress.stage)

    with ExitStack() as patches:
        for owner, method, part in (
            (CodeDensity, CodeDensity.fit, "code density"),
            (CapsuleNetwork, CapsuleNetwork.save, "saving"),
        ):
            timed = _starting(method, clock, part)
            patches.enter_context(mock.patch.object(owner, method.__name__, timed))
        clock.start("reading files")
        network = train(
            config, folder, data=data, report=report, found=lambda _: clock.start("preparation")
        )
        clock.start("Figure 2")
        for domain in PANELS:
            figure(network, domain, folder / f"{domain}.png", config.seed)
        clock.start("end")
    return network, clock.parts()


def _starting(method: Callable[..., Any], clock: Clock, part: str) -> Callable[..., Any]:
    """Return a method that starts a part of the clock before it runs."""

    def started(*arguments: Any, **options: Any) -> Any:
        clock.start(part)
        return method(*arguments, **options)

    return started


def first_run(config: Config, data: ImageSet, folder: Path) -> float:
    """Run the pipeline with few images and one epoch per stage, and return the seconds."""
    size = config.batch_size_for(len(data))
    few = data.images[: CAPTURE_STEPS * size]
    stages = {
        name: replace(getattr(config, name), epochs=min(1, getattr(config, name).epochs))
        for name in STAGES
    }
    start = time.perf_counter()
    run_pipeline(
        replace(config, batch_size=size, **stages), folder, ImageSet(few, source="few images")
    )
    return time.perf_counter() - start


def quality(network: CapsuleNetwork, options: argparse.Namespace) -> dict[str, float | None]:
    """Measure a network with the protocol of docs/results.md."""
    training, test = (
        load(options.data, split=split, path=options.path) for split in ("train", "test")
    )
    classifier = (
        load_classifier(options.data)
        if options.data.removesuffix("-sample") in CLASSIFIERS
        else None
    )
    result = evaluate(
        network, training, test, classifier, samples=options.samples, device=options.device
    )
    evaluation = json.loads(result.to_json())
    return {path: lookup(evaluation, path) for path in QUALITY}


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Summarise the times of each part and of the total over the seeds."""
    parts = {name: [run["parts"][name] for run in rounds] for name in rounds[0]["parts"]}
    parts["total"] = [run["total_s"] for run in rounds]
    return {name: machine.summary(values) for name, values in parts.items()}


def table(report: Mapping[str, Any]) -> str:
    """Format the measured times."""
    lines = [f"{'once per process':<34}{'s':>9}"]
    lines += [
        f"  {name:<32}{value:9.3f}" for name, value in report["setup"].items() if value is not None
    ]
    lines.append(f"{'each run':<34}{'median':>9}{'min':>9}{'max':>9}")
    for name, times in report["summary"].items():
        lines.append(
            f"  {name:<32}{times['median_s']:9.3f}{times['min_s']:9.3f}{times['max_s']:9.3f}"
        )
    for run in report["rounds"]:
        values = [
            f"{path} {value:.4g}"
            for path, value in (run["quality"] or {}).items()
            if value is not None
        ]
        if values:
            lines.append(f"seed {run['seed']}: {', '.join(values)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--data", default="mnist", help="training images (default: mnist)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="seeds, one run for each (default: 0 1 2)",
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate the models")
    parser.add_argument(
        "--samples",
        type=int,
        default=10_000,
        help="samples from each domain for --evaluate (default: 10000)",
    )
    parser.add_argument("--keep", type=Path, help="folder to keep models and figures in")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    config = replace(
        PRESETS["default"](), data=options.data, data_path=options.path, device=options.device
    )
    with tempfile.TemporaryDirectory() as scratch:
        if device.type == "cuda":
            os.environ["TRITON_CACHE_DIR"] = str(Path(scratch) / "kernels")
        setup: dict[str, float | None] = {"interpreter and imports": IMPORT_SECONDS}
        start = time.perf_counter()
        if device.type == "cuda":
            torch.zeros(1, device=device).item()
            setup["GPU context"] = time.perf_counter() - start
        data = load(options.data, path=options.path)
        setup["first small run, with compilation"] = first_run(
            config, data, Path(scratch) / "first"
        )
        report: dict[str, Any] = {
            "command": machine.command("benchmarks.pipeline", parser, options),
            "machine": machine.describe(device),
            "data": {"images": len(data), "shape": list(data.shape)},
            "setup": setup,
            "rounds": [],
        }
        print(json.dumps(report, indent=1, ensure_ascii=False), flush=True)
        for seed in options.seeds:
            folder = (options.keep or Path(scratch)) / f"seed-{seed}"
            network, parts = run_pipeline(replace(config, seed=seed), folder)
            run = {"seed": seed, "total_s": sum(parts.values()), "parts": parts}
            print(f"seed {seed}: {run['total_s']:.3f} s", flush=True)
            run["quality"] = quality(network, options) if options.evaluate else None
            report["rounds"].append(run)
    report["summary"] = summarise(report["rounds"])
    print(table(report))
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
