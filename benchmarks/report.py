"""Generate the tables of the documentation from the numbers in docs/results.

`python -m benchmarks.report PAGE [PAGE ...]` replaces each table after a comment with its name,
such as `<!-- table: peers mnist -->`, up to the next empty line. Without arguments, it fills
README.md and every page in docs/ and paper/ that has such a comment. No number in these tables is
typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.capsule_codes import table as capsule_codes_table
from benchmarks.colour import table as colour_table
from benchmarks.copying import table as copying_table
from benchmarks.criteria import CHOICE, CHOSEN, by_measure, early, effects, many, part_gain
from benchmarks.criteria import PARTS as CLASS_PARTS
from benchmarks.density import (
    DRAW_COLUMNS,
    NATS_COLUMNS,
    TEMPERED_COLUMNS,
    routing_table,
    story_table,
)
from benchmarks.density import table as density_table
from benchmarks.held_gradient import table as held_gradient_table
from benchmarks.intervals import Interval, mean_interval, single_difference_interval
from benchmarks.libraries import PARTS
from benchmarks.mixing import table as mixing_table
from benchmarks.pixels import table as pixels_table
from benchmarks.routing import COPY_RATES, ORDERS, PLAIN_TORCH, PRODUCT_RATES, SIZE_NAMES, share
from benchmarks.study import COLUMNS as STUDY_COLUMNS
from benchmarks.study import class_table
from benchmarks.study import table as study_table
from benchmarks.table_defaults import START
from benchmarks.table_defaults import control as candidates_control
from benchmarks.table_defaults import table as candidates_table
from benchmarks.tables import table as tables_table
from benchmarks.transformations import MAP_COLUMNS, QUALITY_COLUMNS
from benchmarks.transformations import table as transformations_table
from benchmarks.variants import cell, lookup
from benchmarks.zoo import routed_table
from poecaps import models
from poecaps.evaluation.fidelity import Z_95

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    # Heading of a column: path of the number in an evaluation, format
    Columns = Mapping[str, tuple[str, str]]

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "docs" / "results"
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
MARK = re.compile(r"(<!-- table: ([a-z-]+(?: [a-z-]+)*) -->\n)(?:[^\n]+\n)*")

TARGETS = {  # row: (path in an evaluation, format, target on MNIST, target on Fashion-MNIST)
    "linear probe on codes": ("probe.test_accuracy", ".4f", "≥ 0.960 (0.985)", "≥ 0.850 (0.900)"),
    "Fréchet distance, all experts together": ("domains.joint.frechet.distance", ".1f", None, None),
    "recognisable draws, all experts together": (
        "domains.joint.recognisability.share",
        ".1%",
        "≥ 80 % (95 %)",
        "≥ 65 % (85 %)",
    ),
    "recognisable draws, one expert at a time": (
        "experts.recognisability.share",
        ".1%",
        "≥ 80 % (95 %)",
        "≥ 60 % (80 %)",
    ),
    "NMI of most active expert and label": (
        "specialisation.normalised",
        ".3f",
        "≥ 0.45 (0.65)",
        "≥ 0.45 (0.65)",
    ),
    "negatives, restricted domain": ("domains.restricted.negatives.share", ".1%", "0 %", "0 %"),
}
CODE_COLUMNS = {
    "code size": ("code_size", ".0f"),
    "linear probe": ("probe.test_accuracy", ".4f"),
    "NMI": ("specialisation.normalised", ".3f"),
    "effective rank": ("effective_rank", ".1f"),
    "reconstruction error": ("reconstruction.relative", ".1%"),
}
SAMPLE_COLUMNS = {
    "Fréchet distance": ("frechet.distance", ".1f"),
    "recognisable": ("recognisability.share", ".1%"),
    "effective classes": ("diversity.effective_classes", ".2f"),
}
_CHAINS = {"joint": "chains from random units", "from images": "chains from images"}
_MIXTURE = {"joint": "mixture of Gaussians"}
# Name of a baseline in the numbers: (name in tables, {domain: source of its samples in tables})
BASELINES: dict[str, tuple[str, dict[str, str]]] = {
    "pixels": ("pixels", {}),
    "k-means": ("k-means of pixels, 20 clusters", {}),
    "pca": ("PCA", _MIXTURE),
    "bernoulli-rbm": ("BernoulliRBM (scikit-learn)", _CHAINS),
    "gaussian-rbm": ("Gaussian–Bernoulli RBM", _CHAINS),
    "vae": ("VAE", {"joint": "prior", "density": "mixture of Gaussians"}),
    "autoencoder": ("autoencoder without capsules, PCA", _MIXTURE),
    "autoencoder-all": ("autoencoder without capsules, all features", {}),
}
PROBE = "probe.test_accuracy"
RBMS = ("bernoulli-rbm", "gaussian-rbm")


def numbers(data: str, kind: str) -> Any:
    """Read docs/results/DATA-KIND.json."""
    return json.loads((NUMBERS / f"{data}-{kind}.json").read_text(encoding="utf-8"))


def bundled_evaluation(data: str) -> Any:
    """Read the measures of a bundled model, which `poecaps info` and its card also show."""
    return json.loads((models.find(data) / "evaluation.json").read_text(encoding="utf-8"))


def default_evaluations(data: str) -> list[Mapping[str, Any]]:
    """Return the evaluations of the preset `default`, one for each seed."""
    return [row["evaluation"] for row in numbers(data, "study") if row["variant"] == "default"]


def baseline_evaluations(data: str, name: str) -> list[Mapping[str, Any]]:
    """Return the evaluations of one baseline, one for each seed."""
    return [result for result in numbers(data, "baselines") if result["name"] == name]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Format a Markdown table; the first `texts` columns are left-aligned, the others right."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def mean_cell(results: Sequence[Mapping[str, Any]], path: str, form: str) -> str:
    """Format mean and standard deviation of a number over results."""
    return cell([lookup(result, path) for result in results], form)


def mean_cells(
    results: Sequence[Mapping[str, Any]], columns: Columns, prefix: str = ""
) -> list[str]:
    """Format mean and standard deviation for each column; the prefix is put before its path."""
    return [mean_cell(results, prefix + path, form) for path, form in columns.values()]


def without_deviation(text: str) -> str:
    """Remove the standard deviation from a cell."""
    return text.split(" ± ")[0]


def targets(data: str) -> str:
    """Compare the preset `default` with the targets, and with what it has on equal terms."""
    plain = [row for row in numbers(data, "study") if row["variant"] == "no pixel decoder"]
    rows = []
    for name, (path, form, *wanted) in TARGETS.items():
        target = wanted[list(DATASETS).index(data)]
        # The decoder changes neither the codes nor which expert is the most active.
        drawn = path.startswith(("domains", "experts"))
        without = mean_cell([row["evaluation"] for row in plain], path, form) if drawn else ""
        same_mixture = mean_cell(
            baseline_evaluations(data, "vae"), path.replace(".joint.", ".density."), form
        )
        rows.append(
            [
                name,
                mean_cell(default_evaluations(data), path, form),
                target if target is not None else _distances_to_beat(data, path),
                without,
                same_mixture,
            ]
        )
    head = ["measure", "`default`", "target (stretch)", "no pixel decoder, one seed"]
    return markdown_table([*head, "VAE, same mixture"], rows)


def _distances_to_beat(data: str, path: str) -> str:
    """Format the Fréchet distance of the best RBM, over all starts of chains, and of the VAE."""
    chains = (
        (name, path.replace("joint", domain)) for name in RBMS for domain in BASELINES[name][1]
    )
    distances = (mean_cell(baseline_evaluations(data, name), at, ".0f") for name, at in chains)
    rbm = min(distances, key=lambda text: float(without_deviation(text)))
    vae = mean_cell(baseline_evaluations(data, "vae"), path, ".0f")
    return f"< {rbm}, RBM ({vae}, prior of the VAE): not on equal terms"


def baseline_comparison(data: str) -> str:
    """Compare the preset `default` with the baselines."""
    rows = []
    own = {"joint": "mixture of Gaussians, by a pixel decoder"}
    models = [("poecaps, `default`", own, default_evaluations(data))]
    models += [
        (label, domains, baseline_evaluations(data, name))
        for name, (label, domains) in BASELINES.items()
    ]
    for label, domains, results in models:
        code = mean_cells(results, CODE_COLUMNS)
        code[0] = without_deviation(code[0])  # the size of a code is constant
        first_cells = [label, *code]
        for domain, source in domains.items() or [("none", "–")]:
            name, *code_cells = first_cells
            samples = mean_cells(results, SAMPLE_COLUMNS, f"domains.{domain}.")
            rows.append([name, source, *code_cells, *samples])
            first_cells = [""] * len(first_cells)
    training = mean_cells(default_evaluations(data)[:1], SAMPLE_COLUMNS, "training_samples.")
    rows.append(["*training images*", "", *[""] * len(CODE_COLUMNS), *training])
    return markdown_table(["model", "samples from", *CODE_COLUMNS, *SAMPLE_COLUMNS], rows, texts=2)


def short_comparison() -> str:
    """Compare the means of the preset `default` and the baselines, both datasets in one table."""
    models = [("poecaps, mixture of Gaussians, pixel decoder", "default", "joint")]
    models += [
        (f"{label}, {source}", name, domain)
        for name, (label, domains) in BASELINES.items()
        for domain, source in domains.items()
    ]
    rows = []
    for label, name, domain in models:
        row = [label]
        for data in DATASETS:
            results = (
                default_evaluations(data) if name == "default" else baseline_evaluations(data, name)
            )
            for path, form in (
                ("probe.test_accuracy", ".3f"),
                (f"domains.{domain}.frechet.distance", ".0f"),
            ):
                row.append(without_deviation(mean_cell(results, path, form)))
        rows.append(row)
    return markdown_table(
        [
            "model, samples from",
            "MNIST: linear probe",
            "Fréchet distance",
            "Fashion-MNIST: linear probe",
            "Fréchet distance",
        ],
        rows,
    )


def paper_comparison() -> str:
    """Compare samples and codes of models of 320 numbers, for the short description."""
    models = {
        "`poecaps`, mixture, pixel decoder": ("default", "joint"),
        "PCA of pixels, mixture": ("pca", "joint"),
        "Gaussian–Bernoulli RBM, chains from images": ("gaussian-rbm", "from images"),
        "VAE, prior": ("vae", "joint"),
        "VAE, mixture": ("vae", "density"),
        "autoencoder, PCA of features, mixture": ("autoencoder", "joint"),
    }
    rows = []
    for data, title in DATASETS.items():
        for label, (name, domain) in models.items():
            results = (
                default_evaluations(data) if name == "default" else baseline_evaluations(data, name)
            )
            distance = mean_cell(results, f"domains.{domain}.frechet.distance", ".1f")
            rows.append([f"{title}: {label}", mean_cell(results, PROBE, ".4f"), distance])
    return markdown_table(["", "linear probe", "Fréchet distance"], rows)


BUNDLED_ROWS = {  # path in an evaluation: name in tables
    "domains.complete": "complete (one expert, Gaussian)",
    "domains.restricted": "restricted (one expert, half of the Gaussian)",
    "domains.learned": "learned (one expert, fitted mixture)",
    "domains.joint": "joint (all experts together, fitted mixture)",
    "reconstructed_samples": "*reconstructions of training images*",
    "training_samples": "*training images*",
}
BUNDLED_COLUMNS = {
    "Fréchet distance": ("frechet.distance", ".1f"),
    "contrast matched": ("matched_frechet.distance", ".1f"),
    "random features": ("random_frechet.distance", ".3f"),
    "recognisable": ("recognisability.share", ".1%"),
    "effective classes": ("diversity.effective_classes", ".2f"),
    "negatives": ("negatives.share", ".1%"),
    "precision": ("neighbourhoods.precision", ".1%"),
    "recall": ("neighbourhoods.recall", ".1%"),
    "coverage": ("neighbourhoods.coverage", ".1%"),
    "nearer": ("nearest.nearer", ".1%"),
}


def bundled_domains(data: str) -> str:
    """List the measures of samples of a bundled model, with 95 % intervals over draws."""
    evaluation = bundled_evaluation(data)
    rows = []
    for place, label in BUNDLED_ROWS.items():
        samples: Any = evaluation
        for key in place.split("."):
            samples = samples[key]
        row = [label]
        for path, form in BUNDLED_COLUMNS.values():
            value, error = lookup(samples, path), samples["errors"].get(path)
            assert value is not None  # noqa: S101 (measured for every row)
            row.append(interval_cell(value, error, form))
        rows.append(row)
    return markdown_table(["domain", *BUNDLED_COLUMNS], rows)


def interval_cell(value: float, error: float | None, form: str) -> str:
    """Format a number with the half-width of its 95 % interval, if its standard error is known."""
    if error is None:
        return format(value, form).replace("%", " %")
    return Interval(value, Z_95 * error).text(form)


def expert_draws() -> str:
    """List purity, variety and variation of the draws of one expert, on both datasets."""
    columns = {"purity": ("purity.mean", ".1%"), "variety": ("variety.mean", ".1%")}
    columns |= {
        name: (f"variation.{name}", ".0%") for name in ("thickness", "slant", "width", "height")
    }
    rows = [
        [label, *mean_cells(default_evaluations(data), columns, "experts.")]
        for data, label in DATASETS.items()
    ]
    return markdown_table(["dataset", *columns], rows)


def default_study(data: str) -> str:
    """List the variants of the preset `default`; numbers that differ from it are bold."""
    rows = [row for row in numbers(data, "study") if not row["variant"].startswith("paper")]
    head, rule, *lines = study_table(rows, "change to the preset `default`").splitlines()
    return "\n".join([head, rule, *(_mark_shown(data, rows, line) for line in lines)])


def _mark_shown(data: str, rows: Sequence[Mapping[str, Any]], line: str) -> str:
    """Make the cells of a line of the study bold whose difference from `default` is shown."""
    label, seeds, *cells = line.strip("| ").split(" | ")
    found = [row for row in rows if row["variant"] == label]
    if len(found) != 1:
        return line
    for at, (path, _) in enumerate(STUDY_COLUMNS.values()):
        value = lookup(found[0], path)
        if value is not None and difference_from_default(data, path, value).excludes_zero:
            cells[at] = f"**{cells[at]}**"
    return f"| {' | '.join([label, seeds, *cells])} |"


def difference_from_default(data: str, path: str, value: float) -> Interval:
    """Compare a number of one run with that of the preset `default` over its seeds."""
    rows = [row for row in numbers(data, "study") if row["variant"] == "default"]
    several = [each for row in rows if (each := lookup(row, path)) is not None]
    return single_difference_interval(value, several)


def paper_study(data: str) -> str:
    """List the variants of the preset `paper`."""
    rows = [row for row in numbers(data, "study") if row["variant"].startswith("paper")]
    return study_table(rows, "variant of the preset `paper`")


def paper_claims(data: str) -> str:
    """List the effect of the sign and the measures of expert draws, for each measured run."""
    columns: dict[str, Callable[[Any], float | None]] = {
        "negatives at x": lambda run: run["sign_flips"]["negatives"],
        "removed at −x": lambda run: run["sign_flips"]["negatives_removed"],
        "created at −x": lambda run: run["sign_flips"]["negatives_created"],
        "negatives, restricted": lambda run: run["domains"]["restricted"]["negatives"],
        "recognisable, complete": lambda run: run["domains"]["complete"]["recognisable"],
        "recognisable, restricted": lambda run: run["domains"]["restricted"]["recognisable"],
        "recognisable, learned": lambda run: run["domains"]["learned"]["recognisable"],
        "purity, learned": lambda run: run["domains"]["learned"]["purity"],
    }
    rows = [
        [run["run"], *(cell([read(run)], ".1%") for read in columns.values())]
        for run in numbers(data, "claims")
    ]
    return markdown_table(["variant", *columns], rows)


def routed_zoo() -> str:
    """List what learning does to the exact likelihood of models with three routing iterations."""
    return routed_table(json.loads((NUMBERS / "zoo-routed.json").read_text(encoding="utf-8")))


# --------------------------------------------------------------------------------------------------
# Speed

TF32_RATES = ("flop_per_s", "tf32_flop_per_s")
POECAPS = {"cpu": "poecaps, compiled C", "cuda": "poecaps, Triton"}  # fastest version by device


class SpeedTarget(NamedTuple):
    """A target of speed and the measured value."""

    name: str
    target: float
    value: float | None
    unit: str = ""
    maximum: bool = False
    """Whether the target is an upper bound; otherwise it is a lower bound."""

    def row(self) -> list[str]:
        """Format the row of the table."""
        assert self.value is not None  # noqa: S101 (checked by the caller)
        met = self.value <= self.target if self.maximum else self.value >= self.target
        texts = [
            f"1/{1 / value:.0f}" if self.target < 1 else _three_digits(value)
            for value in (self.target, self.value)
        ]
        target, measured = (f"{text} {self.unit}".strip() for text in texts)
        return [
            self.name,
            f"{'≤' if self.maximum else '≥'} {target}",
            measured,
            "met" if met else "**missed**",
        ]


def speed_targets() -> Iterator[SpeedTarget]:
    """List the targets of speed with their measured values."""
    yield SpeedTarget(
        "eager einsum, two CPU cores, B 256, against compiled C",
        8,
        _times_poecaps("cpu", 256, "einsum, eager"),
        "× poecaps",
    )
    yield SpeedTarget("the same, against plain PyTorch", 8, _plain_torch_ratio(256), "× poecaps")
    for threads, cores in (("1", "one CPU core"), ("2", "two CPU cores")):
        for mode, target in (("eager", 10), ("compiled", 5)):
            yield SpeedTarget(
                f"{mode} einsum, {cores}, B 128, forward and backward",
                target,
                _pass_ratio(threads, "forward and backward", f"einsum, {mode}"),
                "× poecaps",
            )
    for version in ("autocast to bfloat16", "bfloat16", "float16", "torch.compile"):
        yield SpeedTarget(
            f"forward, one CPU core, B 128: {version}",
            1.5,
            _pass_ratio("1", "forward", f"poecaps, {version}"),
            "× float32",
            maximum=True,
        )
    yield SpeedTarget(
        "eager einsum, one CPU core, B 128, learning step, against AVX2",
        9,
        _pass_ratio("1", "learning step", "einsum, eager", "poecaps, AVX2"),
        "× poecaps",
    )
    yield SpeedTarget(
        "AVX2, one CPU core, B 128, learning step",
        2.2,
        _pass_ratio("1", "learning step", "poecaps, AVX2"),
        "× AVX-512",
        maximum=True,
    )
    for batch in (256, 1024):
        for mode, target in (("eager", 14), ("compiled", 8)):
            yield SpeedTarget(
                f"{mode} einsum, H200, B {batch}, both CUDA graphs",
                target,
                _times_poecaps("cuda", batch, f"einsum, {mode}, CUDA graph"),
                "× poecaps",
            )
    yield SpeedTarget(
        "compiled einsum, H200, B 256, both launched",
        4,
        _times_poecaps("cuda", 256, "einsum, compiled"),
        "× poecaps",
    )
    yield SpeedTarget(
        "learning step, H200, B 256, launched", 350, _launched_microseconds(256), "µs", maximum=True
    )
    for version, label in ((POECAPS["cuda"], ""), ("poecaps, torch.compile", ", both compiled")):
        yield SpeedTarget(
            f"compiled einsum, H200, B 256, forward and backward, both CUDA graphs{label}",
            6,
            _pass_ratio(
                None,
                "forward and backward",
                "einsum, compiled, CUDA graph",
                f"{version}, CUDA graph",
            ),
            "× poecaps",
        )
    yield SpeedTarget(
        "extra memory, H200, B 1024",
        1 / 20,
        _memory_ratio("cuda", 1024),
        "of eager einsum's",
        maximum=True,
    )
    for optimizer in ("SGD", "Adam"):
        yield SpeedTarget(
            f"largest I that trains, H200, J 64, B 256, {optimizer}",
            100_000,
            _largest(f"{POECAPS['cuda']}, {optimizer}"),
        )
    for device, version, label, theirs in (
        ("cuda", "poecaps, replayed", "H200, CUDA graph", "launched einsum and autograd"),
        ("cuda", "poecaps", "H200, launched", "launched einsum and autograd"),
        ("cpu", "poecaps", "one CPU core", "einsum and autograd"),
    ):
        yield SpeedTarget(
            f"sampler step, {label}, the least of all sizes, against {theirs}",
            4,
            _least_sampler_ratio(device, version),
            "× poecaps",
        )
    yield SpeedTarget("autoencoder, H200, batch size 128", 200, _teraflops("128"), "TFLOP/s")
    yield SpeedTarget("autoencoder, H200, best batch size", 200, _teraflops(None), "TFLOP/s")
    yield SpeedTarget(
        "image files to Figure 2, H200, median", 5, _pipeline_seconds(), "s", maximum=True
    )


def measured(kind: str, device: str) -> Any:
    """Read docs/results/KIND-DEVICE.json; None if the file does not exist."""
    return numbers(kind, device) if (NUMBERS / f"{kind}-{device}.json").is_file() else None


def _pass_ratio(
    threads: str | None, name: str, version: str, base: str = "poecaps, AVX-512"
) -> float | None:
    """Return how many times as long as another version one version of a pass takes.

    On a CPU with some threads; on a GPU if they are None.
    """
    report = measured("passes", "cuda" if threads is None else "cpu")
    if report is None:
        return None
    results = report["threads"]
    versions = results.get(threads or next(iter(results)), {}).get(name, {})
    if version not in versions or base not in versions:
        return None
    return float(versions[version]["median_s"] / versions[base]["median_s"])


def _plain_torch_ratio(batch: int) -> float | None:
    einsum, plain = (
        _times_poecaps("cpu", batch, version) for version in ("einsum, eager", PLAIN_TORCH)
    )
    return einsum / plain if einsum and plain else None


def _times_poecaps(device: str, batch: int, version: str) -> float | None:
    steps = (measured("routing", device) or {}).get("steps", {})
    ratio: float | None = steps.get(str(batch), {}).get(version, {}).get("times_poecaps")
    return ratio


def _launched_microseconds(batch: int) -> float | None:
    """Return the time of a learning step that the host launches on a GPU."""
    steps = (measured("routing", "cuda") or {}).get("steps", {})
    seconds = steps.get(str(batch), {}).get(POECAPS["cuda"], {}).get("median_s")
    return None if seconds is None else 1e6 * float(seconds)


def _memory_ratio(device: str, batch: int) -> float | None:
    report = measured("routing", device)
    if not report or str(batch) not in report["steps"]:
        return None
    poecaps, einsum = (
        report["steps"][str(batch)][version]["extra_bytes"]
        for version in (POECAPS[device], "einsum, eager")
    )
    return poecaps / einsum if poecaps and einsum else None


def _largest(version: str) -> float | None:
    results = (measured("largest", "cuda") or {}).get("largest", {}).get(version, {})
    return max(
        (int(inputs) for inputs, result in results.items() if result and result["finite"]),
        default=None,
    )


def _least_sampler_ratio(device: str, version: str) -> float | None:
    """Return how many times as long as poecaps einsum takes, for the size with the least ratio."""
    cases = (measured("sampler", device) or {}).get("cases", {})
    ratios = (
        case["einsum and autograd"]["median_s"] / case[version]["median_s"]
        for case in cases.values()
    )
    return min(ratios, default=None)


def _teraflops(batch: str | None) -> float | None:
    batches = (measured("autoencoder", "cuda") or {}).get("batches", {})
    rates = [
        result["flop_per_s"] / 1e12 for name, result in batches.items() if batch in (None, name)
    ]
    return max(rates, default=None)


def _pipeline_seconds() -> float | None:
    report = measured("pipeline", "cuda")
    return report and report["summary"]["total"]["median_s"]


def speed_target_table() -> str:
    """Compare the measured speed with the targets."""
    rows = [target.row() for target in speed_targets() if target.value is not None]
    return markdown_table(["measurement", "target", "measured", "result"], rows) if rows else ""


def machine_description(kind: str, device: str) -> str:
    """Describe machine, versions, command and peak rates of a measurement."""
    report = measured(kind, device)
    if report is None:
        return ""
    machine = report["machine"]
    labels = {"python": "Python", "cuda": "CUDA", "compiler": "C compiler"}
    order = ("python", "torch", "cuda", "triton", "numpy", "compiler", "poecaps")
    versions = [f"{labels.get(name, name)} {machine[name]}" for name in order if name in machine]
    lines = [
        f"Machine: {machine['device']}; {', '.join(versions)}.",
        f"Command: `{report['command']}`.",
    ]
    rates = {
        name.removesuffix("_flop_per_s"): rate for name, rate in report.get("ceilings", {}).items()
    }
    if rates:
        copy = rates.pop("copy_bytes_per_s")
        products = ", ".join(
            f"{_three_digits(rate / 1e12)} TFLOP/s in {name}" for name, rate in rates.items()
        )
        lines.append(
            f"Peak rates of the machine in the same run: copy {_three_digits(copy / 1e9)} GB/s; "
            f"matrix product {products}."
        )
    return "\n".join(lines)


STEP_HEAD = ["B", "version", "median ms", "min–max", "× poecaps", "extra MB"]


def encoder_steps(device: str) -> str:
    """Compare the versions of the encoder's step."""
    report = measured("routing", device)
    if report is None:
        return ""
    ceilings = report["ceilings"]
    shares = {
        "of product": PRODUCT_RATES,
        "of tf32 product": TF32_RATES,
        "of copy": COPY_RATES,
    }
    shares = {name: rates for name, rates in shares.items() if rates[1] in ceilings}
    rows = []
    for batch, versions in report["steps"].items():
        for name, result in versions.items():
            order = f" ({result['order']})" if result["order"] else ""
            cells = [_percent(share(result, ceilings, *rates)) for rates in shares.values()]
            rows.append([batch, f"{name}{order}", *_times(result), _megabytes(result), *cells])
    return markdown_table([*STEP_HEAD, *shares], rows, 2)


def passes(device: str) -> str:
    """Compare the versions of each pass of a layer, for each number of threads."""
    report = measured("passes", device)
    if report is None:
        return ""
    rows = []
    for threads, results in report["threads"].items():
        for name, versions in results.items():
            for version, result in versions.items():
                order = f" ({result['order']})" if result.get("order") else ""
                rows.append([threads, name, f"{version}{order}", *_times(result)])
    head = ["threads", "pass", "version", "median ms", "min–max", "× poecaps"]
    if device == "cuda":  # the threads of the host do not matter
        return markdown_table(head[1:], [row[1:] for row in rows], 2)
    return markdown_table(head, rows, 3)


def contraction_orders(device: str) -> str:
    """Compare einsum in each order of contractions."""
    report = measured("routing", device)
    if report is None:
        return ""
    rows = []
    for batch, modes in report["orders"].items():
        for order in ORDERS:
            cells: list[str] = []
            for results in modes.values():
                median, _, ratio = _times(results[order])
                cells += [median, ratio, _megabytes(results[order])]
            rows.append([batch, order, *cells])
    modes = next(iter(report["orders"].values()))
    head = [f"{mode}, {unit}" for mode in modes for unit in ("ms", "× poecaps", "extra MB")]
    return markdown_table(["B", "order", *head], rows, 2)


def decoder_steps(device: str) -> str:
    """Compare the decoder's step with the reference."""
    report = measured("routing", device)
    if report is None:
        return ""
    rows = [
        [batch, name, *_times(result), _megabytes(result)]
        for batch, versions in report["decoder"].items()
        for name, result in versions.items()
    ]
    return markdown_table(STEP_HEAD, rows, 2)


def _sizes_kind(device: str) -> str:
    """Return the kind of the report with other sizes: its own, or that of the steps."""
    kind = "routing-sizes"
    return kind if (NUMBERS / f"{kind}-{device}.json").is_file() else "routing"


def _sizes(device: str) -> Any:
    return measured(_sizes_kind(device), device)


def growth(device: str) -> str:
    """List time and memory for several values of each size."""
    report = _sizes(device)
    if report is None or "growth" not in report:
        return ""
    versions = list(next(iter(next(iter(report["growth"].values())).values())))
    with_memory = [version for version in versions if "graph" not in version]
    rows = []
    for size, values in report["growth"].items():
        for value, results in values.items():
            times = [_times(results[version])[0] for version in versions]
            memory = [_megabytes(results[version]) for version in with_memory]
            rows.append([f"{SIZE_NAMES[size]} = {value}", *times, *memory])
    head = [f"{version}, ms" for version in versions]
    head += [f"{version}, extra MB" for version in with_memory]
    return markdown_table(["size", *head], rows)


def growth_plot(device: str) -> str:
    """Show the plot of time and memory against each size."""
    report = _sizes(device)
    if report is None:
        return ""
    name = report["machine"]["device"]
    picture = f"images/{_sizes_kind(device)}-{device}.png"
    return f"![time and memory of a step against each size, {name}]({picture})"


def largest_layer(device: str) -> str:
    """List time and memory of a step up to the largest layer that can be trained."""
    report = measured("largest", device)
    if report is None:
        return ""
    largest = report["largest"]
    rows = []
    for inputs in max(largest.values(), key=len):
        cells = []
        for results in largest.values():
            result = results.get(inputs)
            if result is None:
                cells.append("out of memory" if inputs in results else "–")
            else:
                finite = "" if result["finite"] else ", not finite"
                seconds, peak = result["seconds"], result["peak_bytes"] / 2**30
                cells.append(f"{_three_digits(seconds)} s, {_three_digits(peak)} GiB{finite}")
        rows.append([f"{int(inputs):,}", *cells])
    return markdown_table(["I", *largest], rows)


def autoencoder_steps(device: str) -> str:
    """List the speed of the autoencoder's steps."""
    report = measured("autoencoder", device)
    if report is None:
        return ""
    rows = []
    for batch, result in report["batches"].items():
        peak = report["ceilings"][f"{result['precision']}_flop_per_s"]
        rates = [
            f"{result['images_per_s']:,.0f}",
            _three_digits(result["flop_per_s"] / 1e12),
            _percent(result["flop_per_s"] / peak),
        ]
        rows.append([batch, result["precision"], *_times(result)[:2], *rates])
    head = ["batch size", "precision", "median ms", "min–max", "images/s", "TFLOP/s", "of product"]
    return markdown_table(head, rows, 2)


def view_steps(device: str) -> str:
    """List the speed of the encoder's steps with several views and restarts."""
    report = measured("encoder", device)
    if report is None:
        return ""
    rows = [
        [
            f"{step['views']}",
            f"{step['restarts']}",
            *_times(step)[:2],
            f"{step['images_per_s']:,.0f}",
            f"{step['relative']:.2f}",
        ]
        for step in report["steps"]
    ]
    head = ["views", "starts", "median ms", "min–max", "images/s", "× one view, one start"]
    return markdown_table(head, rows)


def pipeline_parts(device: str) -> str:
    """List the times of the parts of the pipeline from files to Figure 2."""
    report = measured("pipeline", device)
    if report is None:
        return ""
    setup = [
        [f"*once per process:* {name}", _three_digits(value), ""]
        for name, value in report["setup"].items()
        if value is not None
    ]
    rows = [
        [name, _three_digits(times["median_s"]), _range(times, 1)]
        for name, times in report["summary"].items()
    ]
    rows[-1] = [f"**{text}**" for text in rows[-1]]
    return markdown_table(["part", "median s", "min–max"], setup + rows)


def pipeline_quality(device: str) -> str:
    """Compare the models of the pipeline with those of docs/results.md."""
    report = measured("pipeline-quality", device)
    if report is None:
        return ""
    rows = []
    for name, (path, form, *_) in TARGETS.items():
        timed = cell([run["quality"].get(path) for run in report["rounds"]], form)
        rows.append([name, timed, mean_cell(default_evaluations("mnist"), path, form)])
    return markdown_table(["measure", "models timed", "models of results.md"], rows)


def sampler_steps(device: str) -> str:
    """Compare the versions of a step of the Markov chains, for each size of a density."""
    report = measured("sampler", device)
    if report is None:
        return ""
    rows = [
        [
            case,
            name,
            *_times(result),
            f"{result['difference']:.0e}" if result["difference"] else "0",
        ]
        for case, versions in report["cases"].items()
        for name, result in versions.items()
    ]
    head = ["experts", "version", "median ms", "min–max", "× poecaps", "difference"]
    return markdown_table(head, rows, 2)


def library_gains(device: str) -> str:
    """Compare the parts of poecaps that go around a library with the library's own functions."""
    report = measured("libraries", device)
    if report is None:
        return ""
    rows = [
        [
            f"{task}: {name}",
            _three_digits(1e3 * times["median_s"]),
            _range(times, 1e3),
            "" if "memory_bytes" not in times else _three_digits(times["memory_bytes"] / 1e6),
            "" if "captured" not in times else f"{times['captured']:.4f}",
            "" if "gradient_error" not in times else f"{times['gradient_error']:.1e}",
        ]
        for part in PARTS
        for task, methods in report.get(part, {}).items()
        for name, times in methods.items()
    ]
    head = ["task: implementation", "median ms", "min–max", "extra MB", "captured", "error"]
    filled = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return markdown_table(
        [head[column] for column in filled], [[row[column] for column in filled] for row in rows]
    )


def _times(result: Mapping[str, Any]) -> list[str]:
    """Format median, range and ratio to poecaps, or the reason of a failure."""
    if "failed" in result:
        return ["failed", result["failed"], ""]
    ratio = result.get("times_poecaps")
    return [
        _three_digits(1e3 * result["median_s"]),
        _range(result, 1e3),
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _range(times: Mapping[str, Any], factor: float) -> str:
    return f"{_three_digits(factor * times['min_s'])}–{_three_digits(factor * times['max_s'])}"


def _megabytes(result: Mapping[str, Any]) -> str:
    return "" if result.get("extra_bytes") is None else _three_digits(result["extra_bytes"] / 1e6)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{_three_digits(100 * value)} %"


def _three_digits(number: float) -> str:
    """Format three significant digits, or all digits before the decimal point."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


# Variants of `benchmarks.density` that are measured in detail, by their kind of chains: the variant
# and the draws.
CHOSEN_DENSITIES = {
    "mnist": {
        "tempered": ("energy", "tempered_draws"),
        "annealed": ("energy, annealed chains, 1,024 components", "draws"),
    },
    "fashion-mnist": {
        "tempered": ("energy, variances without a limit", "tempered_draws"),
        "annealed": (
            "energy, annealed chains, 1,024 components, variances up to 100, lives of 600 steps",
            "draws",
        ),
    },
}


def density_nats(data: str) -> str:
    """List the log-likelihoods of the densities."""
    return density_table(numbers(data, "density"), NATS_COLUMNS)


def density_draws(data: str) -> str:
    """List the quality of the annealed draws of the densities."""
    return density_table(numbers(data, "density"), DRAW_COLUMNS)


def density_tempered(data: str) -> str:
    """List the quality of the tempered draws of the densities that have them."""
    rows = [row for row in numbers(data, "density") if "tempered_draws" in row]
    return density_table(rows, TEMPERED_COLUMNS)


def density_routing(data: str) -> str:
    """List what routing gives to the density of features, seed by seed."""
    return routing_table(numbers(data, "density-routing"))


def density_story(data: str, step: str) -> str:
    """Compare the densities before and after a step of the story."""
    return story_table(numbers(data, "story"), step)


def density_mixing(data: str) -> str:
    """List how chains forget where they began."""
    return mixing_table(numbers(data, "mixing"))


def density_pixels(data: str) -> str:
    """List the likelihoods of images in pixels."""
    return pixels_table(numbers(data, "pixels"))


def density_parts(data: str, chains: str) -> str:
    """List what the base measure and the experts give, for the options chosen for the data."""
    variant, draws = CHOSEN_DENSITIES[data][chains]
    rows = [row for row in numbers(data, "density") if row["variant"] == variant]
    parts = {
        "base measure": "base_draws",
        "base measure and experts": draws,
        "training images": "reconstructions",
    }
    nats = {"base_draws": "nats.base", draws: "nats.lower"}
    lines = []
    for label, key in parts.items():
        columns = {
            "nats": (nats.get(key, ""), ",.0f"),
            "recognisable": (f"{key}.tied.recognisable", ".1%"),
            "classes": (f"{key}.tied.classes", ".2f"),
            "Fréchet distance": (f"{key}.tied.frechet", ".0f"),
            "recognisable, pixel decoder": (f"{key}.pixel_decoder.recognisable", ".1%"),
            "Fréchet distance, pixel decoder": (f"{key}.pixel_decoder.frechet", ".0f"),
        }
        cells = [cell([lookup(row, path) for row in rows], form) for path, form in columns.values()]
        lines.append([label, *cells])
    return markdown_table(["", *columns], lines)


def colour_digits(images: str = "coloured-digits") -> str:
    """List the results on coloured digits and photographs."""
    return colour_table(numbers(images, "colour"))


# --------------------------------------------------------------------------------------------------
# Experts as classes

SHOWN_CANDIDATES = 6  # of the search for the defaults of tables
CLASS_MEASURES = {"accuracy": "accuracy", "nmi": "NMI"}
CLASS_VIEWS = {"mnist": "4 views", "fashion-mnist": "4 small views"}  # in `benchmarks.criteria`

_CLUSTERGAN = "[the authors' repository](https://github.com/sudiptodip15/ClusterGAN)"
PUBLISHED_CLUSTERINGS = {  # accuracy and NMI on MNIST, then on Fashion-MNIST; source
    "VaDE": (0.945, None, None, None, "arXiv 1611.05148"),
    "ClusterGAN, mean of 10 runs": (0.910, 0.854, 0.612, 0.616, _CLUSTERGAN),
    "SCAE": (0.987, None, None, None, "arXiv 1906.06818"),
    "DynAE": (0.987, None, 0.591, None, "arXiv 1901.07752"),
    "SPC": (0.992, 0.975, 0.679, 0.735, "arXiv 2107.10692"),
}


# The variants of `benchmarks.criteria` that are compared with published clusterings.
CLASS_RECIPES = {
    "mnist": "10 experts of 32, 4 views, encoder batches of 512, 16 encoders",
    "fashion-mnist": (
        "10 experts of 32, 4 small views, no routing, encoder batches of 256, 16 encoders"
    ),
}


def class_effects(data: str) -> str:
    """Compare ten experts with and without each part of the recipe."""
    return effects(numbers(data, "criteria"), CLASS_VIEWS[data.removesuffix("-sample")])


def class_part_gain(data: str, part: str, measure: str) -> str:
    """Format what a part of the recipe gives to ten experts."""
    views = CLASS_VIEWS[data.removesuffix("-sample")]
    return part_gain(numbers(data, "criteria"), views, part, measure)


def class_parts(suffix: str = "") -> str:
    """Put what each part of the recipe gives side by side, for both datasets or their samples."""
    rows = [
        [
            part,
            *(
                class_part_gain(f"{data}{suffix}", part, each)
                for data in DATASETS
                for each in CLASS_MEASURES
            ),
        ]
        for part in CLASS_PARTS
        if part != CHOICE
    ]
    head = [f"{name}: {label}" for name in DATASETS.values() for label in CLASS_MEASURES.values()]
    return markdown_table(["part", *head], rows)


def class_criteria(data: str, measure: str) -> str:
    """Compare the encoders that each criterion chooses, by accuracy or purity."""
    return by_measure(numbers(data, "criteria"), measure)


def transformations(data: str, kind: str) -> str:
    """List what codes and experts keep of transformed images, or the R² of a kind of maps."""
    rows = numbers(data, "transformations")
    if kind == "quality":
        return transformations_table(rows, QUALITY_COLUMNS)
    rows = [row for row in rows if kind in row["transformations"]]
    return transformations_table(rows, MAP_COLUMNS[kind])


def default_with_views(data: str) -> str:
    """Compare the preset `fast` with and without views."""
    return class_table(numbers(data, "classes"))


def tables() -> str:
    """List the accuracy of linear classifiers on tables of columns."""
    return tables_table(table_accuracies())


def table_defaults() -> str:
    """List the candidates for the defaults of tables, the best five and the first defaults."""
    found = _table_defaults()["accuracies"]
    rule, lines = 2, candidates_table(found).splitlines()
    shown = [line for line in lines[rule + SHOWN_CANDIDATES :] if line.startswith(f"| {START} ")]
    return "\n".join([*lines[: rule + SHOWN_CANDIDATES], *shown])


def table_defaults_control() -> str:
    """Compare the defaults of tables with the first ones, on tables that did not choose them."""
    return candidates_control(_table_defaults()["untouched"])


def _table_defaults() -> Any:
    return json.loads((NUMBERS / "table-defaults.json").read_text(encoding="utf-8"))


def table_accuracies() -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Read the accuracies of `benchmarks.tables`: for each table and representation, each fold."""
    found: Mapping[str, Mapping[str, Sequence[float]]] = _tables_report()["accuracies"]
    return found


def tables_example() -> Mapping[str, Sequence[float]]:
    """Read the accuracies of the first block of the page, in its folds."""
    found: Mapping[str, Sequence[float]] = _tables_report()["example"]
    return found


def _tables_report() -> Any:
    return json.loads((NUMBERS / "tables.json").read_text(encoding="utf-8"))


NOVELTY_SCORES = {  # heading: name in `benchmarks.applications`, after "poecaps: "
    "−log P of the density": "−log P",
    "−log P of the base measure, without experts": "−log P of the base measure",
    "free energy of the density, without base measure": "free energy of the density",
    "norm of the whitened features": "norm of the features",
    "free energy of the encoder": "free energy",
    "reconstruction error": "reconstruction error",
}
NOVELTY_SETS = (("MNIST", "Fashion-MNIST"), ("Fashion-MNIST", "MNIST"))


def novelty() -> str:
    """List how well scores of small densities tell other images from test images."""
    found = [numbers(data, "novelty")["novelty"] for data in ("mnist", "fashion-mnist")]
    rows = []
    for heading, name in NOVELTY_SCORES.items():
        centred = f"poecaps: distance from the median {name}"
        cells = [
            f"{each[f'poecaps: {name}']:.3f}"
            + (f" ({each[centred]:.3f})" if centred in each else "")
            for each in found
        ]
        rows.append([heading, *cells])
    head = ["score (in brackets: distance from its median)"]
    return markdown_table([*head, *(f"{a}, others from {b}" for a, b in NOVELTY_SETS)], rows)


ONE_EXPERT = {  # heading: path in an evaluation, format
    "recognisable, all experts of the density": ("domains.model.recognisability.share", ".1%"),
    "effective classes, all experts of the density": (
        "domains.model.diversity.effective_classes",
        ".1f",
    ),
    "recognisable, one expert of the density": ("density_experts.recognisability.share", ".1%"),
    "effective classes, one expert of the density": (
        "density_experts.diversity.effective_classes",
        ".1f",
    ),
    "purity, one expert of the density": ("density_experts.purity.mean", ".1%"),
    "recognisable, one expert of the encoder": ("experts.recognisability.share", ".1%"),
    "effective classes, one expert of the encoder": ("experts.diversity.effective_classes", ".1f"),
    "purity, one expert of the encoder": ("experts.purity.mean", ".1%"),
}


def one_expert() -> str:
    """Compare draws of one expert of small densities with those of one expert of the encoder."""
    found = [numbers(data, "one-expert") for data in ("mnist", "fashion-mnist")]
    rows = [
        [heading, *(cell([lookup(each, path)], form) for each in found)]
        for heading, (path, form) in ONE_EXPERT.items()
    ]
    return markdown_table(["", "MNIST", "Fashion-MNIST"], rows)


def few_labels(data: str) -> str:
    """List the accuracy of linear classifiers that learned from few labels."""
    return few_label_table(numbers(data, "few-labels"))


def capsule_codes(data: str) -> str:
    """Compare the codes of experts with simpler codes of the same capsules."""
    return capsule_codes_table(numbers(data, "capsule-codes"))


def copying() -> str:
    """List how often draws and reconstructions are nearer to training images."""
    return copying_table({label: numbers(data, "copying") for data, label in DATASETS.items()})


def held_gradient() -> str:
    """List the share of the gradient that held coefficients drop with the bundled weights."""
    found = json.loads((NUMBERS / "held-gradient.json").read_text(encoding="utf-8"))
    return held_gradient_table({label: found[data] for data, label in DATASETS.items()})


def few_label_table(result: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Format the accuracies of `benchmarks.few_labels`, by number of labels and by features."""
    names = next(iter(result.values()))
    rows = [
        [f"{int(count):,}", *(mean_interval(accuracies[name]).text(".3f") for name in names)]
        for count, accuracies in result.items()
    ]
    return markdown_table(["labels", *names], rows)


def class_many(data: str) -> str:
    """Give the results of many encoders, most of which were dropped on the way."""
    return many(numbers(data, "criteria"))


def class_early(data: str) -> str:
    """Compare the scores of encoders on the way with those at the end."""
    return early(numbers(data, "criteria"))


BUNDLED_CLUSTERS = {  # heading: place in an evaluation
    "most active of twenty experts": "specialisation",
    "k-means on firing probabilities, ten clusters": "firing_clusters",
}


def bundled_classes() -> str:
    """List the measures of clusterings of the bundled models, on both datasets."""
    columns = {"accuracy": "accuracy", "NMI": "normalised", "ARI": "adjusted_rand"}
    columns["purity"] = "purity"
    rows = [
        [
            label,
            cluster,
            *(f"{bundled_evaluation(data)[place][key]:.3f}" for key in columns.values()),
        ]
        for data, label in DATASETS.items()
        for cluster, place in BUNDLED_CLUSTERS.items()
    ]
    return markdown_table(["dataset", "clusters", *columns], rows, texts=2)


def clusterings() -> str:
    """Put ten experts, the best of several encoders, beside published clusterings.

    The adjusted Rand index has columns only if some row has it.
    """
    ours = []
    for data, variant in CLASS_RECIPES.items():
        kept = [row for row in numbers(data, "criteria") if row["variant"] == variant]
        for measure, form in (("accuracy", ".4f"), ("nmi", ".3f"), ("ari", ".3f")):
            ours.append(mean_cell(kept, f"test_summary.{measure}.by.{CHOSEN}", form))
    rows = []
    for name, (*values, source) in PUBLISHED_CLUSTERINGS.items():
        published = ["–" if value is None else f"{value:.3f}" for value in values]
        rows.append([f"*{name}*", *published[:2], "–", *published[2:], "–", source])
    rows.append([f"poecaps, 10 experts, one of many encoders by {CHOSEN}", *ours, "this page"])
    head = ["method", "MNIST accuracy", "NMI", "ARI"]
    head += ["Fashion-MNIST accuracy", "NMI", "ARI", "source"]
    filled = [column for column in range(len(head)) if any(row[column] != "–" for row in rows)]
    return markdown_table(
        [head[column] for column in filled], [[row[column] for column in filled] for row in rows]
    )


TABLES: dict[str, Callable[..., str]] = {  # name in the comment of a page: table
    "short": short_comparison,
    "targets": targets,
    "peers": baseline_comparison,
    "paper": paper_comparison,
    "bundled": bundled_domains,
    "experts": expert_draws,
    "study": default_study,
    "steps": paper_study,
    "density-nats": density_nats,
    "density-draws": density_draws,
    "density-tempered": density_tempered,
    "density-parts": density_parts,
    "density-pixels": density_pixels,
    "density-routing": density_routing,
    "density-mixing": density_mixing,
    "density-story": density_story,
    "colour": colour_digits,
    "few-labels": few_labels,
    "capsule-codes": capsule_codes,
    "copying": copying,
    "held-gradient": held_gradient,
    "tables": tables,
    "table-defaults": table_defaults,
    "table-defaults-control": table_defaults_control,
    "class-effects": class_effects,
    "class-study": default_with_views,
    "transformations": transformations,
    "class-parts": class_parts,
    "class-criteria": class_criteria,
    "class-early": class_early,
    "class-many": class_many,
    "clusterings": clusterings,
    "bundled-classes": bundled_classes,
    "novelty": novelty,
    "one-expert": one_expert,
    "claims": paper_claims,
    "zoo-routed": routed_zoo,
    "pace": speed_target_table,
    "machine": machine_description,
    "speed": encoder_steps,
    "passes": passes,
    "orders": contraction_orders,
    "decoder": decoder_steps,
    "growth": growth,
    "plot": growth_plot,
    "largest": largest_layer,
    "autoencoder": autoencoder_steps,
    "views": view_steps,
    "pipeline": pipeline_parts,
    "quality": pipeline_quality,
    "sampler": sampler_steps,
    "libraries": library_gains,
}


def pages() -> list[Path]:
    """Return README.md, the pages of docs/ and those of paper/ that have tables."""
    folders = ("docs", "paper")
    files = [ROOT / "README.md"]
    files += [file for folder in folders for file in sorted((ROOT / folder).rglob("*.md"))]
    return [file for file in files if MARK.search(file.read_text(encoding="utf-8"))]


def fill(page: str) -> str:
    """Replace every table of a page; a table without numbers becomes empty."""

    def table(mark: re.Match[str]) -> str:
        name, *arguments = mark[2].split()
        text = TABLES[name](*arguments)
        return f"{mark[1]}{text}\n" if text else mark[1]

    return MARK.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the tables of pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pages",
        nargs="*",
        type=Path,
        help="Markdown files to fill (default: all that have tables)",
    )
    for page in parser.parse_args(arguments).pages or pages():
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
