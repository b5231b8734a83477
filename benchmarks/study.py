"""Ablation study of the recipe: change one option at a time, train, evaluate.

`python -m benchmarks.study --data mnist --path FOLDER --json FILE` trains a network for each
variant below, evaluates it with the protocol of `poecaps evaluate`, and adds a row to FILE for
each; `--jobs` sets the number of networks trained at the same time. `--only default --seeds 0,1,2`
trains the preset three times. Variants that FILE already contains are skipped. `--table FILE`
prints FILE as a table.

A variant is a preset with some options changed; its row contains the equivalent `poecaps train`
command.
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

from benchmarks import machine
from benchmarks.internals import command_for
from poecaps._modules import device_of
from poecaps.data import load
from poecaps.evaluation import CLASSIFIERS, evaluate, load_classifier
from poecaps.training import PRESETS, Config, Progress, TrainingError, train

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Variant:
    """A preset and the options that differ from it, by their names on the command line."""

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


def default_with(**changes: Any) -> Variant:
    """Change options of the preset `default`; a double underscore stands for the dot."""
    return Variant("default", {name.replace("__", "."): value for name, value in changes.items()})


def paper_with(**changes: Any) -> Variant:
    """Change options of the preset `paper`."""
    return replace(default_with(**changes), preset="paper")


_SCALED = {"model__centre": True, "model__scale": 0.4, "decoder__learning_rate": 1.0}
_WHITENED = {**_SCALED, "model__whiten": True, "model__normalize": "outputs"}

STUDY: dict[str, Variant] = {
    "default": Variant(),
    # Preprocessing of the capsules
    "equalized components 0": default_with(model__equalized_components=0),
    "equalized components 8": default_with(model__equalized_components=8),
    "equalized components 32": default_with(model__equalized_components=32),
    "equalized components 64": default_with(model__equalized_components=64),
    "not whitened": default_with(model__whiten=False),
    "not whitened, equalized components 0": default_with(
        model__whiten=False, model__equalized_components=0
    ),
    "scale 0.05": default_with(model__scale=0.05),
    "scale 0.4": default_with(model__scale=0.4),
    "autoencoder dropout 0.5": default_with(model__dropout=0.5),
    "autoencoder, 15 epochs": default_with(autoencoder__epochs=15),
    # Competition
    "2 winners": default_with(encoder__winners=2),
    "5 winners": default_with(encoder__winners=5),
    "no competition": default_with(encoder__winners=None),
    "no competition, equalized components 0": default_with(
        encoder__winners=None, model__equalized_components=0
    ),
    "1 winner, also after training": default_with(model__winners=1),
    # Routing
    "normalized over inputs": default_with(model__normalize="inputs"),
    "normalized over inputs, sharpness 5": default_with(
        model__normalize="inputs", model__sharpness=5.0
    ),
    "no routing": default_with(model__iterations=1),
    "sharpness 3": default_with(model__sharpness=3.0),
    "sharpness 8": default_with(model__sharpness=8.0),
    # Contrastive divergence
    "CD-3": default_with(encoder__k=3),
    "Bernoulli mixing": default_with(encoder__mixing="bernoulli"),
    "encoder learning rate 0.03": default_with(encoder__learning_rate=0.03),
    "encoder learning rate 0.3": default_with(encoder__learning_rate=0.3),
    "encoder SGD": default_with(encoder__optimizer="sgd", encoder__learning_rate=10.0),
    "encoder, 3 epochs": default_with(encoder__epochs=3),
    "no target firing": default_with(encoder__target_firing=None),
    # Decoding
    "single-expert share 0": default_with(
        decoder__single_expert_share=0.0, pixel_decoder__single_expert_share=0.0
    ),
    "single-expert share 0.6": default_with(
        decoder__single_expert_share=0.6, pixel_decoder__single_expert_share=0.6
    ),
    "no pixel decoder": default_with(
        model__pixel_decoder=False, pixel_decoder__epochs=0, decoder__epochs=13
    ),
    "pixel decoder, absolute error only": default_with(pixel_decoder__cross_entropy=0.0),
    "pixel decoder, mostly cross-entropy": default_with(pixel_decoder__cross_entropy=100.0),
    "pixel decoder, 3 epochs": default_with(pixel_decoder__epochs=3),
    "100 joint components": default_with(model__joint_components=100),
    # Sizes
    "40 experts of 8": default_with(model__experts=((40, 8),)),
    "10 experts of 32": default_with(model__experts=((10, 32),)),
    # The recipe of the paper, and options that the paper does not specify
    "paper": paper_with(),
    "paper, decoder learning rate 0.01": paper_with(decoder__learning_rate=0.01),
    "paper, decoder learning rate 1": paper_with(decoder__learning_rate=1.0),
    "paper, decoder learning rate 1, encoder learning rate 10": paper_with(
        decoder__learning_rate=1.0, encoder__learning_rate=10.0
    ),
    "paper, decoder learning rate 1, encoder learning rate 1000": paper_with(
        decoder__learning_rate=1.0, encoder__learning_rate=1000.0
    ),
    "paper, decoder learning rate 1, biases": paper_with(
        decoder__learning_rate=1.0, model__bias=True
    ),
    "paper, sharpness 20": paper_with(model__sharpness=20.0),
    "paper, sharpness 20, decoder learning rate 0.01": paper_with(
        model__sharpness=20.0, decoder__learning_rate=0.01
    ),
    "paper, sharpness 20, decoder learning rate 1": paper_with(
        model__sharpness=20.0, decoder__learning_rate=1.0
    ),
    "paper, sharpness 20, weight decay 1e-4": paper_with(
        model__sharpness=20.0, decoder__weight_decay=1e-4
    ),
    # Step by step from the paper towards the default; with scaled features the decoder's
    # learning rate is 1
    "paper, decoder learning rate 1, 1 winner": paper_with(
        decoder__learning_rate=1.0, encoder__winners=1
    ),
    "paper, decoder learning rate 1, centred": paper_with(
        decoder__learning_rate=1.0, model__centre=True
    ),
    "paper, scaled": paper_with(model__scale=0.4, decoder__learning_rate=1.0),
    "paper, scaled, sharpness 20": paper_with(
        model__scale=0.4, model__sharpness=20.0, decoder__learning_rate=1.0
    ),
    "paper, scaled, sharpness 20, decoder learning rate 0.1": paper_with(
        model__scale=0.4, model__sharpness=20.0
    ),
    "paper, scaled, sharpness 20, decoder learning rate 10": paper_with(
        model__scale=0.4, model__sharpness=20.0, decoder__learning_rate=10.0
    ),
    "paper, scaled, sharpness 20, 1 winner": paper_with(
        model__scale=0.4, model__sharpness=20.0, decoder__learning_rate=1.0, encoder__winners=1
    ),
    "paper, centred and scaled": paper_with(**_SCALED),
    "paper, centred and scaled, 1 winner": paper_with(**_SCALED, encoder__winners=1),
    "paper, centred and scaled, sharpness 5": paper_with(**_SCALED, model__sharpness=5.0),
    "paper, centred and scaled, sharpness 5, 1 winner": paper_with(
        **_SCALED, model__sharpness=5.0, encoder__winners=1
    ),
    "paper, whitened, normalized over outputs": paper_with(**_WHITENED),
    "paper, whitened, normalized over outputs, encoder learning rate 1": paper_with(
        **_WHITENED, encoder__learning_rate=1.0
    ),
    "paper, whitened, normalized over outputs, 1 winner": paper_with(
        **_WHITENED, encoder__winners=1
    ),
    "paper, whitened, normalized over outputs, 1 winner, single-expert share 0.3": paper_with(
        **_WHITENED, encoder__winners=1, decoder__single_expert_share=0.3
    ),
}

COLUMNS = {  # heading: path of the number in an evaluation, format
    "linear probe": ("probe.test_accuracy", ".4f"),
    "NMI": ("specialisation.normalised", ".3f"),
    "effective rank": ("effective_rank", ".1f"),
    "pixel MSE": ("reconstruction.error", ".4f"),
    "Fréchet distance": ("domains.joint.frechet.distance", ".1f"),
    "recognisable, all experts": ("domains.joint.recognisability.share", ".1%"),
    "recognisable, one expert": ("experts.recognisability.share", ".1%"),
    "purity": ("experts.purity.mean", ".1%"),
    "variety": ("experts.variety.mean", ".1%"),
    "negatives": ("domains.restricted.negatives.share", ".1%"),
}
ROW_NAMES = {  # the rows of unchanged presets; any other row has the name of its variant
    "default": "default (preset, unchanged)",
    "paper": "paper (preset, unchanged)",
}


@dataclass(frozen=True)
class Job:
    """One network to train and evaluate."""

    name: str
    data: str
    path: str | None
    seed: int
    device: str
    samples: int
    threads: int
    keep: str | None
    """Folder to keep the run in; None: the run is deleted."""


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate, and return the row.

    Diverged training is a result and gives a row without an evaluation; any other error is raised.
    """
    torch.set_num_threads(job.threads)
    config = STUDY[job.name].config(
        data=job.data, data_path=job.path, seed=job.seed, device=job.device
    )
    stage_ends: dict[str, float] = {}

    def report(progress: Progress) -> None:
        stage_ends[progress.stage] = time.perf_counter()

    with tempfile.TemporaryDirectory() as scratch:
        folder = (
            Path(job.keep or scratch) / f"{job.name.replace(' ', '-').replace(',', '')}-{job.seed}"
        )
        start = time.perf_counter()
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
        stage_starts = [start, *stage_ends.values()]
        row["seconds"] = {
            stage: round(stage_end - stage_start, 2)
            for (stage, stage_end), stage_start in zip(
                stage_ends.items(), stage_starts, strict=False
            )
        }
        row["training_seconds"] = round(trained - start, 2)
        training, test = (load(job.data, split=split, path=job.path) for split in ("train", "test"))
        has_classifier = job.data.removesuffix("-sample") in CLASSIFIERS
        classifier = load_classifier(job.data) if has_classifier else None
        result = evaluate(
            network, training, test, classifier, samples=job.samples, device=device_of(network)
        )
        if job.keep is not None:
            (folder / "evaluation.json").write_text(result.to_json() + "\n")
    row["evaluation_seconds"] = round(time.perf_counter() - trained, 2)
    return row | {"evaluation": json.loads(result.to_json())}


def table(rows: Sequence[Mapping[str, Any]], heading: str = "variant") -> str:
    """Format rows as a Markdown table with one line per variant.

    A cell is the mean over the seeds and, for several seeds, the standard deviation.
    """
    lines = [
        f"| {heading} | seeds | {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' ---: |' * len(COLUMNS)}",
    ]
    names = [name for name in STUDY if any(row["variant"] == name for row in rows)]
    for name in names:
        same = [row for row in rows if row["variant"] == name]
        evaluations = [row["evaluation"] for row in same if "evaluation" in row]
        label = ROW_NAMES.get(name, name)
        if not evaluations:
            empty = " |" * (len(COLUMNS) - 1)
            lines.append(f"| {label} | {len(same)} | {same[0]['failed']} |{empty}")
            continue
        cells = [
            cell([lookup(evaluation, path) for evaluation in evaluations], form)
            for path, form in COLUMNS.values()
        ]
        lines.append(f"| {label} | {len(evaluations)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def lookup(evaluation: Any, path: str) -> float | None:
    """Return a number of an evaluation by its path, such as probe.test_accuracy."""
    for key in path.split("."):
        evaluation = None if evaluation is None else evaluation.get(key)
    return None if evaluation is None else float(evaluation)


def cell(values: Sequence[float | None], form: str) -> str:
    """Format the mean of values and, for several values, their standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = format(statistics.mean(known), form)
    if len(known) > 1:
        text += f" ± {format(statistics.stdev(known), form)}"
    return text.replace("%", " %")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate the requested variants, or print a file as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        default="mnist",
        help="a dataset with a classifier: mnist, fashion-mnist (default: mnist)",
    )
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--only", help="variants, separated by semicolons (default: all)")
    parser.add_argument("--seeds", default="0", help="seeds, comma-separated (default: 0)")
    parser.add_argument("--device", default="auto", help="(default: a GPU if available)")
    parser.add_argument(
        "--samples", type=int, default=10_000, help="samples from each domain (default: 10000)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="networks trained at the same time (default: 1)"
    )
    parser.add_argument("--json", type=Path, help="file to add the rows to")
    parser.add_argument("--keep", help="folder to keep the runs in")
    parser.add_argument("--table", type=Path, help="only print this file as a table")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    names = options.only.split(";") if options.only else list(STUDY)
    if unknown := [name for name in names if name not in STUDY]:
        parser.error(
            f"--only must be a list of {'; '.join(STUDY)}; but contains {'; '.join(unknown)}"
        )
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
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            rows.append(future.result())
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            # After each row, so that an interrupted run keeps its results.
            machine.write(rows, options.json)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
