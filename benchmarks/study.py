"""What the recipe owes to each of its parts: change one thing at a time, train, measure.

`python -m benchmarks.study --data mnist --path FOLDER --json FILE` trains a network for each variant below and measures
it as `poecaps evaluate` does, several at a time (`--jobs`), and adds a row to FILE for each. `--only default --seeds
0,1,2` trains the preset three times. What FILE holds already is not done again. `--table FILE` prints FILE as a table.

A variant is a preset with some options changed; its row holds the `poecaps train` command that does the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps._files import write_atomically
from poecaps.cli.arguments import command_for
from poecaps.data import load
from poecaps.evaluation import CLASSIFIERS, evaluate, load_classifier
from poecaps.training import PRESETS, Config, Progress, TrainingError, train

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Variant:
    """A preset, and the options that are changed, by their names on the command line."""

    preset: str = "default"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **common: Any) -> Config:
        """Return the options of a run."""
        config = PRESETS[self.preset]()
        for name, value in self.changes.items():
            stage, _, option = name.rpartition(".")
            if stage:
                config = replace(
                    config, **{stage: replace(getattr(config, stage), **{option: value})}
                )
            else:
                config = replace(config, **{option: value})
        return replace(config, **common)


def changed(**changes: Any) -> Variant:
    """Change options of the preset `default`; a double underscore stands for the dot."""
    return Variant("default", {name.replace("__", "."): value for name, value in changes.items()})


def of_paper(**changes: Any) -> Variant:
    """Change options of the preset `paper`."""
    return replace(changed(**changes), preset="paper")


_SCALED = {"model__centre": True, "model__scale": 0.4, "decoder__learning_rate": 1.0}
_WHITENED = {**_SCALED, "model__whiten": True, "model__normalize": "outputs"}

STUDY: dict[str, Variant] = {
    "default": Variant(),
    # What experts see
    "level 0": changed(model__equalized_components=0),
    "level 8": changed(model__equalized_components=8),
    "level 32": changed(model__equalized_components=32),
    "level 64": changed(model__equalized_components=64),
    "not whitened": changed(model__whiten=False),
    "not whitened, level 0": changed(model__whiten=False, model__equalized_components=0),
    "scale 0.05": changed(model__scale=0.05),
    "scale 0.4": changed(model__scale=0.4),
    "autoencoder dropout 0.5": changed(model__dropout=0.5),
    "autoencoder 15 epochs": changed(autoencoder__epochs=15),
    # Competition
    "2 winners": changed(encoder__winners=2),
    "5 winners": changed(encoder__winners=5),
    "no competition": changed(encoder__winners=None),
    "no competition, level 0": changed(encoder__winners=None, model__equalized_components=0),
    "1 winner for ever": changed(model__winners=1),
    # Routing
    "over inputs": changed(model__normalize="inputs"),
    "over inputs, sharpness 5": changed(model__normalize="inputs", model__sharpness=5.0),
    "no routing": changed(model__iterations=1),
    "sharpness 3": changed(model__sharpness=3.0),
    "sharpness 8": changed(model__sharpness=8.0),
    # Contrastive divergence
    "CD-3": changed(encoder__k=3),
    "Bernoulli mixing": changed(encoder__mixing="bernoulli"),
    "encoder rate 0.03": changed(encoder__learning_rate=0.03),
    "encoder rate 0.3": changed(encoder__learning_rate=0.3),
    "encoder SGD": changed(encoder__optimizer="sgd", encoder__learning_rate=10.0),
    "encoder 3 epochs": changed(encoder__epochs=3),
    "firing as learned": changed(encoder__target_firing=None),
    # The way back
    "never alone": changed(
        decoder__single_expert_share=0.0, pixel_decoder__single_expert_share=0.0
    ),
    "alone 0.6": changed(decoder__single_expert_share=0.6, pixel_decoder__single_expert_share=0.6),
    "no pixel_decoder": changed(model__painter=False, pixel_decoder__epochs=0, decoder__epochs=13),
    "pixel_decoder, absolute difference alone": changed(pixel_decoder__cross_entropy=0.0),
    "pixel_decoder, cross-entropy almost alone": changed(pixel_decoder__cross_entropy=100.0),
    "pixel_decoder 3 epochs": changed(pixel_decoder__epochs=3),
    "100 components": changed(model__joint_components=100),
    # Sizes
    "40 experts of 8": changed(model__experts=((40, 8),)),
    "10 experts of 32": changed(model__experts=((10, 32),)),
    # The paper's recipe, and what it leaves open
    "paper": of_paper(),
    "paper, decoder rate 0.01": of_paper(decoder__learning_rate=0.01),
    "paper, decoder rate 1": of_paper(decoder__learning_rate=1.0),
    "paper, decoder rate 1, encoder rate 10": of_paper(
        decoder__learning_rate=1.0, encoder__learning_rate=10.0
    ),
    "paper, decoder rate 1, encoder rate 1000": of_paper(
        decoder__learning_rate=1.0, encoder__learning_rate=1000.0
    ),
    "paper, decoder rate 1, biases": of_paper(decoder__learning_rate=1.0, model__bias=True),
    "paper, sharpness 20": of_paper(model__sharpness=20.0),
    "paper, sharpness 20, decoder rate 0.01": of_paper(
        model__sharpness=20.0, decoder__learning_rate=0.01
    ),
    "paper, sharpness 20, decoder rate 1": of_paper(
        model__sharpness=20.0, decoder__learning_rate=1.0
    ),
    "paper, sharpness 20, l2 1e-4": of_paper(model__sharpness=20.0, decoder__weight_decay=1e-4),
    # From there on to the default, a step at a time; with features scaled the decoder takes a rate of 1
    "paper, decoder rate 1, 1 winner": of_paper(decoder__learning_rate=1.0, encoder__winners=1),
    "paper, decoder rate 1, centred": of_paper(decoder__learning_rate=1.0, model__centre=True),
    "paper, scaled": of_paper(model__scale=0.4, decoder__learning_rate=1.0),
    "paper, scaled, sharpness 20": of_paper(
        model__scale=0.4, model__sharpness=20.0, decoder__learning_rate=1.0
    ),
    "paper, scaled, sharpness 20, decoder rate 0.1": of_paper(
        model__scale=0.4, model__sharpness=20.0
    ),
    "paper, scaled, sharpness 20, decoder rate 10": of_paper(
        model__scale=0.4, model__sharpness=20.0, decoder__learning_rate=10.0
    ),
    "paper, scaled, sharpness 20, 1 winner": of_paper(
        model__scale=0.4, model__sharpness=20.0, decoder__learning_rate=1.0, encoder__winners=1
    ),
    "paper, centred and scaled": of_paper(**_SCALED),
    "paper, centred and scaled, 1 winner": of_paper(**_SCALED, encoder__winners=1),
    "paper, centred and scaled, sharpness 5": of_paper(**_SCALED, model__sharpness=5.0),
    "paper, centred and scaled, sharpness 5, 1 winner": of_paper(
        **_SCALED, model__sharpness=5.0, encoder__winners=1
    ),
    "paper, whitened, over outputs": of_paper(**_WHITENED),
    "paper, whitened, over outputs, encoder rate 1": of_paper(
        **_WHITENED, encoder__learning_rate=1.0
    ),
    "paper, whitened, over outputs, 1 winner": of_paper(**_WHITENED, encoder__winners=1),
    "paper, whitened, over outputs, 1 winner, alone 0.3": of_paper(
        **_WHITENED, encoder__winners=1, decoder__single_expert_share=0.3
    ),
}

COLUMNS = {  # heading: where evaluation.json has the number, how to write it
    "probe": ("probe.test_accuracy", ".4f"),
    "NMI": ("specialisation.normalised", ".3f"),
    "rank": ("effective_rank", ".1f"),
    "MSE": ("reconstruction.error", ".4f"),
    "FD joint": ("domains.joint.frechet.distance", ".1f"),
    "joint": ("domains.joint.recognisability.share", ".1%"),
    "one expert": ("experts.recognisability.share", ".1%"),
    "purity": ("experts.purity.mean", ".1%"),
    "variety": ("experts.variety.mean", ".1%"),
    "negatives": ("domains.restricted.negatives.share", ".1%"),
}


@dataclass(frozen=True)
class Job:
    """One network to train and measure."""

    name: str
    data: str
    path: str | None
    seed: int
    device: str
    samples: int
    threads: int
    keep: str | None
    """Folder that the run is kept in; None: it is thrown away."""


def do(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row; that training diverges is a result, that it fails otherwise is none."""
    torch.set_num_threads(job.threads)
    config = STUDY[job.name].config(
        data=job.data, data_path=job.path, seed=job.seed, device=job.device
    )
    ends: dict[str, float] = {}

    def report(progress: Progress) -> None:
        ends[progress.stage] = time.perf_counter()

    with tempfile.TemporaryDirectory() as scratch:
        folder = (
            Path(job.keep or scratch) / f"{job.name.replace(' ', '-').replace(',', '')}-{job.seed}"
        )
        began = time.perf_counter()
        row: dict[str, Any] = {
            "variant": job.name,
            "seed": job.seed,
            "command": command_for(config),
        }
        try:
            network = train(config, folder, report=report)
        except TrainingError as error:
            if " diverged at step " not in str(error):
                raise
            return row | {"failed": str(error).split(";")[0]}
        trained = time.perf_counter()
        starts = [began, *ends.values()]
        row["seconds"] = {
            stage: round(end - start, 2)
            for (stage, end), start in zip(ends.items(), starts, strict=False)
        }
        row["training_seconds"] = round(trained - began, 2)
        training, test = (load(job.data, split=split, path=job.path) for split in ("train", "test"))
        judge = (
            load_classifier(job.data) if job.data.removesuffix("-sample") in CLASSIFIERS else None
        )
        device = next(network.parameters()).device
        result = evaluate(network, training, test, judge, samples=job.samples, device=device)
        if job.keep is not None:
            (folder / "evaluation.json").write_text(result.to_json() + "\n")
    row["evaluation_seconds"] = round(time.perf_counter() - trained, 2)
    return row | {"evaluation": json.loads(result.to_json())}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay rows out as a Markdown table, a line for each variant: mean and, of several seeds, standard deviation."""
    lines = [
        f"| variant | seeds | {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' ---: |' * len(COLUMNS)}",
    ]
    names = [name for name in STUDY if any(row["variant"] == name for row in rows)]
    for name in names:
        own = [row for row in rows if row["variant"] == name]
        done = [row["evaluation"] for row in own if "evaluation" in row]
        if not done:
            lines.append(f"| {name} | {len(own)} | {own[0]['failed']} |{' |' * (len(COLUMNS) - 1)}")
            continue
        cells = [
            cell([find(each, where) for each in done], form) for where, form in COLUMNS.values()
        ]
        lines.append(f"| {name} | {len(done)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def find(result: Any, where: str) -> float | None:
    """Look up a number of an evaluation by its place, such as probe.test_accuracy."""
    for key in where.split("."):
        result = None if result is None else result.get(key)
    return None if result is None else float(result)


def cell(values: Sequence[float | None], form: str) -> str:
    """Write the mean of numbers and, of several, their standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = format(statistics.mean(known), form)
    if len(known) > 1:
        text += f" ± {format(statistics.stdev(known), form)}"
    return text.replace("%", " %")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure what is asked for, or print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        default="mnist",
        help="a set with a classifier: mnist, fashion-mnist (default: mnist)",
    )
    parser.add_argument("--path", help="folder that holds the set")
    parser.add_argument("--only", help="some of the variants, with ; between them (default: all)")
    parser.add_argument("--seeds", default="0", help="seeds, with , between them (default: 0)")
    parser.add_argument("--device", default="auto", help="(default: a GPU where there is one)")
    parser.add_argument(
        "--samples", type=int, default=10_000, help="drawn from each domain (default: 10000)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="networks trained at a time (default: 1)"
    )
    parser.add_argument("--json", type=Path, help="file that rows are added to")
    parser.add_argument("--keep", help="folder that the runs are kept in")
    parser.add_argument(
        "--table", type=Path, help="print this file as a table, and do nothing else"
    )
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    names = options.only.split(";") if options.only else list(STUDY)
    if unknown := [name for name in names if name not in STUDY]:
        parser.error(f"--only must name some of {'; '.join(STUDY)}; but names {'; '.join(unknown)}")
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.is_file():
        rows = json.loads(options.json.read_text())
    done = {(row["variant"], row["seed"]) for row in rows}
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    common = (options.device, options.samples, threads, options.keep)
    jobs = [
        Job(name, options.data, options.path, seed, *common)
        for seed in map(int, options.seeds.split(","))
        for name in names
        if (name, seed) not in done
    ]
    context = multiprocessing.get_context("spawn")  # a GPU cannot be used after a fork
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(do, job) for job in jobs]):
            rows.append(future.result())
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if (
                options.json is not None
            ):  # after each, so that a run that is cut short leaves what it has
                options.json.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(options.json, (json.dumps(rows, indent=1) + "\n").encode())
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
