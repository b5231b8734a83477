"""The tables of README.md, docs/results.md and docs/benchmarks.md, made of the numbers in docs/results.

`python -m benchmarks.report README.md docs/results.md docs/benchmarks.md` puts each table anew after the comment that
names it, such as `<!-- table: peers mnist -->`, up to the next empty line. So no number in them is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.routing import NAMES, OF_COPY, OF_PRODUCT, ORDERS, share
from benchmarks.study import cell, find
from benchmarks.study import table as study_table
from poecaps.code_density import DOMAINS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Columns = Mapping[
        str, tuple[str, str]
    ]  # heading: where an evaluation has the number, how to write it

NUMBERS = Path(__file__).parents[1] / "docs" / "results"
SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
MARK = re.compile(r"(<!-- table: ([a-z-]+(?: [a-z-]+)*) -->\n)(?:[^\n]+\n)*")

TARGETS = {  # what: (place in an evaluation, how to write it, target of MNIST, of Fashion-MNIST)
    "linear probe on codes": ("probe.test_accuracy", ".4f", "≥ 0.960 (0.985)", "≥ 0.850 (0.900)"),
    "Fréchet distance, joint": ("domains.joint.frechet.distance", ".1f", None, None),
    "recognisable, joint": (
        "domains.joint.recognisability.share",
        ".1%",
        "≥ 80 % (95 %)",
        "≥ 65 % (85 %)",
    ),
    "recognisable, one expert at a time, learned": (
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
    "effective rank of the code": ("effective_rank", ".1f", "≥ 15 (30)", "≥ 15 (30)"),
    "negatives, restricted": ("domains.restricted.negatives.share", ".1%", "0 %", "0 %"),
}
OF_CODES = {
    "numbers": ("code_size", ".0f"),
    "probe": ("probe.test_accuracy", ".4f"),
    "NMI": ("specialisation.normalised", ".3f"),
    "rank": ("effective_rank", ".1f"),
    "reconstruction error": ("reconstruction.relative", ".1%"),
}
OF_SAMPLES = {
    "Fréchet distance": ("frechet.distance", ".1f"),
    "recognisable": ("recognisability.share", ".1%"),
    "classes": ("diversity.classes", ".2f"),
}
_CHAINS = {"joint": "chains from coins", "from images": "chains from images"}
_MIXTURE = {"joint": "mixture of Gaussians"}
PEERS: dict[
    str, tuple[str, dict[str, str]]
] = {  # name in the numbers: (what it is called here, how its samples of each domain are called)
    "pixels": ("pixels", {}),
    "k-means": ("k-means of pixels, 20 clusters", {}),
    "pca": ("PCA", _MIXTURE),
    "bernoulli-rbm": ("BernoulliRBM (scikit-learn)", _CHAINS),
    "gaussian-rbm": ("Gaussian–Bernoulli RBM", _CHAINS),
    "vae": ("VAE", {"joint": "prior", "density": "mixture of Gaussians"}),
    "autoencoder": ("autoencoder alone, PCA", _MIXTURE),
    "autoencoder-all": ("autoencoder alone, all features", {}),
}
RBMS = ("bernoulli-rbm", "gaussian-rbm")


def numbers(data: str, what: str) -> Any:
    """Read docs/results/DATA-WHAT.json."""
    return json.loads((NUMBERS / f"{data}-{what}.json").read_text(encoding="utf-8"))


def defaults(data: str) -> list[Mapping[str, Any]]:
    """Return the evaluations of the preset `default`, one for each seed."""
    return [row["evaluation"] for row in numbers(data, "study") if row["variant"] == "default"]


def peers_named(data: str, name: str) -> list[Mapping[str, Any]]:
    """Return the evaluations of one baseline, one for each seed."""
    return [each for each in numbers(data, "baselines") if each["name"] == name]


def lay_out(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Write a Markdown table whose first columns are texts and whose others are numbers."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def targets() -> str:
    """Set the default of both sets against what was wanted."""
    rows = []
    for what, (where, form, *wanted) in TARGETS.items():
        row = [what]
        for data, target in zip(SETS, wanted, strict=True):
            row.append(cell([find(each, where) for each in defaults(data)], form))
            row.append(target if target is not None else _distances_to_beat(data, where))
        rows.append(row)
    return lay_out(["", "MNIST", "target (stretch)", "Fashion-MNIST", "target (stretch)"], rows)


def _distances_to_beat(data: str, where: str) -> str:
    """Write the Fréchet distance of the best RBM, whatever its chains start from, and in brackets the VAE's."""
    chains = ((name, where.replace("joint", domain)) for name in RBMS for domain in PEERS[name][1])
    machines = (
        cell([find(each, at) for each in peers_named(data, name)], ".0f") for name, at in chains
    )
    rbm = min(machines, key=lambda text: float(text.split()[0]))
    return f"< {rbm}, RBM ({cell([find(each, where) for each in peers_named(data, 'vae')], '.0f')}, VAE)"


def mean_of(
    results: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], within: str = ""
) -> list[str]:
    """Write a cell for each column: mean and spread of a number over results."""
    return [
        cell([find(each, within + where) for each in results], form)
        for where, form in columns.values()
    ]


def peers(data: str) -> str:
    """Set the default beside its baselines."""
    rows = []
    models = [("poecaps, `default`", _MIXTURE, defaults(data))]
    models += [(called, ways, peers_named(data, name)) for name, (called, ways) in PEERS.items()]
    for called, ways, results in models:
        code = mean_of(results, OF_CODES)
        code[0] = code[0].split(" ± ")[0]  # the size of a code has no spread
        for domain, way in ways.items() or [("none", "–")]:
            rows.append([called, way, *code, *mean_of(results, OF_SAMPLES, f"domains.{domain}.")])
            called, code = "", [""] * len(code)
    real = mean_of(defaults(data)[:1], OF_SAMPLES, "training.")
    rows.append(["*training images*", "", *[""] * len(OF_CODES), *real])
    return lay_out(["", "samples from", *OF_CODES, *OF_SAMPLES], rows, texts=2)


def short() -> str:
    """Set means of the default beside those of its peers, on both sets in one table."""
    ways = [("poecaps", "default", "joint")]
    ways += [
        (f"{called}, {way}", name, domain)
        for name, (called, of) in PEERS.items()
        for domain, way in of.items()
    ]
    rows = []
    for called, name, domain in ways:
        row = [called]
        for data in SETS:
            results = defaults(data) if name == "default" else peers_named(data, name)
            for where, form in (
                ("probe.test_accuracy", ".3f"),
                (f"domains.{domain}.frechet.distance", ".0f"),
            ):
                row.append(cell([find(each, where) for each in results], form).split(" ± ")[0])
        rows.append(row)
    return lay_out(
        [
            "",
            "linear probe, MNIST",
            "Fréchet distance",
            "linear probe, Fashion-MNIST",
            "Fréchet distance",
        ],
        rows,
    )


def domains(data: str) -> str:
    """Tell what the default draws in each domain."""
    columns = {**OF_SAMPLES, "negatives": ("negatives.share", ".1%")}
    rows = [[domain, *mean_of(defaults(data), columns, f"domains.{domain}.")] for domain in DOMAINS]
    return lay_out(["domain", *columns], rows)


def experts() -> str:
    """Tell how pure and how various the draws of one expert are, on both sets."""
    columns = {"purity": ("purity.mean", ".1%"), "variety": ("variety.mean", ".1%")}
    columns |= {
        name: (f"variation.{name}", ".0%") for name in ("thickness", "slant", "width", "height")
    }
    rows = [
        [called, *mean_of(defaults(data), columns, "experts.")] for data, called in SETS.items()
    ]
    return lay_out(["", *columns], rows)


def study(data: str) -> str:
    """Set the default beside what was changed of it."""
    return study_table(
        [row for row in numbers(data, "study") if not row["variant"].startswith("paper")]
    )


def steps(data: str) -> str:
    """Tell what the paper's recipe gives, and what each step from there on."""
    return study_table(
        [row for row in numbers(data, "study") if row["variant"].startswith("paper")]
    )


def claims(data: str) -> str:
    """Tell what the sign does, and what experts draw, for each model that was asked."""
    columns: dict[str, Callable[[Any], float | None]] = {
        "negatives, complete": lambda of: of["flips"]["negatives"],
        "of these, none at −x": lambda of: of["flips"]["cured"],
        "of the others, negative at −x": lambda of: of["flips"]["flipped"],
        "negatives, restricted": lambda of: of["objects"]["restricted"]["negatives"],
        "recognisable, complete": lambda of: of["objects"]["complete"]["recognisable"],
        "restricted": lambda of: of["objects"]["restricted"]["recognisable"],
        "learned": lambda of: of["objects"]["learned"]["recognisable"],
        "purity, learned": lambda of: of["objects"]["learned"]["purity"],
    }
    rows = [
        [each["run"], *(cell([read(each)], ".1%") for read in columns.values())]
        for each in numbers(data, "claims")
    ]
    return lay_out(["variant", *columns], rows)


# ---------------------------------------------------------------------------------------------------------
# Speed

OF_TF32 = ("flop_per_s", "tf32_flop_per_s")


class Pace(NamedTuple):
    """A target of speed, and what was measured."""

    what: str
    target: float
    value: float | None
    unit: str = ""
    most: bool = False
    """Whether the target is the most it may be, rather than the least."""

    def row(self) -> list[str]:
        """Write it as a row of a table."""
        assert self.value is not None  # noqa: S101 (asked before)
        met = self.value <= self.target if self.most else self.value >= self.target
        texts = [
            f"1/{1 / each:.0f}" if self.target < 1 else _brief(each)
            for each in (self.target, self.value)
        ]
        wanted, found = (f"{text} {self.unit}".strip() for text in texts)
        return [
            self.what,
            f"{'≤' if self.most else '≥'} {wanted}",
            found,
            "met" if met else "**missed**",
        ]


def paces() -> Iterator[Pace]:
    """List the targets of speed."""
    yield Pace("eager einsum, two CPU cores, B 256", 8, _ratio("cpu", 256, "eager"), "× ours")
    yield Pace("the same, ours in plain PyTorch", 8, _plain_ratio(256), "× ours")
    for batch in (256, 1024):
        for way, target in (("eager", 10), ("compiled", 6)):
            for called, graph in (("launched", ""), ("replayed", ", CUDA graph")):
                value = _ratio("cuda", batch, way + graph)
                yield Pace(f"{way} einsum, H200, B {batch}, both {called}", target, value, "× ours")
    yield Pace(
        "extra memory, H200, B 1024",
        1 / 20,
        _memory_ratio("cuda", 1024),
        "of eager einsum's",
        most=True,
    )
    for name in ("SGD", "Adam"):
        yield Pace(
            f"largest I that trains, H200, J 64, B 256, {name}", 100_000, _largest(f"ours, {name}")
        )
    yield Pace("autoencoder, H200, batch 128", 200, _teraflops("128"), "TFLOP/s")
    yield Pace("autoencoder, H200, best batch", 200, _teraflops(None), "TFLOP/s")
    yield Pace("raw files to Figure 2, H200, median", 10, _pipeline_seconds(), "s", most=True)


def measured(what: str, on: str) -> Any:
    """Read docs/results/WHAT-ON.json; None if it is not there."""
    return numbers(what, on) if (NUMBERS / f"{what}-{on}.json").is_file() else None


def _ratio(on: str, batch: int, way: str) -> float | None:
    return _times_ours(on, batch, f"einsum, {way}")


def _plain_ratio(batch: int) -> float | None:
    theirs, plain = (
        _times_ours("cpu", batch, name) for name in ("einsum, eager", "ours, plain PyTorch")
    )
    return theirs / plain if theirs and plain else None


def _times_ours(on: str, batch: int, version: str) -> float | None:
    steps = (measured("routing", on) or {}).get("steps", {})
    ratio: float | None = steps.get(str(batch), {}).get(version, {}).get("times_ours")
    return ratio


def _memory_ratio(on: str, batch: int) -> float | None:
    found = measured("routing", on)
    if not found or str(batch) not in found["steps"]:
        return None
    ours, theirs = (
        found["steps"][str(batch)][each]["extra_bytes"] for each in ("ours", "einsum, eager")
    )
    return ours / theirs if ours and theirs else None


def _largest(version: str) -> float | None:
    rungs = (measured("routing", "cuda") or {}).get("largest", {}).get(version, {})
    return max(
        (int(inputs) for inputs, each in rungs.items() if each and each["finite"]), default=None
    )


def _teraflops(batch: str | None) -> float | None:
    found = (measured("autoencoder", "cuda") or {}).get("batches", {})
    rates = [each["flop_per_s"] / 1e12 for name, each in found.items() if batch in (None, name)]
    return max(rates, default=None)


def _pipeline_seconds() -> float | None:
    found = measured("pipeline", "cuda")
    return found and found["summary"]["total"]["median_s"]


def pace() -> str:
    """Set the speed against what was wanted, as far as it was measured."""
    rows = [each.row() for each in paces() if each.value is not None]
    return lay_out(["", "target", "measured", ""], rows) if rows else ""


def machine(what: str, on: str) -> str:
    """Tell where, with what and by which command something was measured, and what the machine can do at best."""
    found = measured(what, on)
    if found is None:
        return ""
    about = found["machine"]
    names = {"python": "Python", "cuda": "CUDA", "compiler": "C by"}
    order = ("python", "torch", "cuda", "triton", "numpy", "compiler", "poecaps")
    versions = [f"{names.get(name, name)} {about[name]}" for name in order if name in about]
    line = f"{about['device']}; {', '.join(versions)}. Command: `{found['command']}`."
    rates = {
        name.removesuffix("_flop_per_s"): rate for name, rate in found.get("ceilings", {}).items()
    }
    if rates:
        copy = rates.pop("copy_bytes_per_s")
        products = ", ".join(
            f"{_brief(rate / 1e12)} TFLOP/s in {name}" for name, rate in rates.items()
        )
        line += f" Best rates of the machine in the same run: a copy {_brief(copy / 1e9)} GB/s, a product {products}."
    return line


def speed(on: str) -> str:
    """Set the versions of the encoder's step side by side."""
    found = measured("routing", on)
    if found is None:
        return ""
    ceilings = found["ceilings"]
    shares = {"of a product": OF_PRODUCT, "of a tf32 product": OF_TF32, "of a copy": OF_COPY}
    shares = {name: which for name, which in shares.items() if which[1] in ceilings}
    rows = []
    for batch, versions in found["steps"].items():
        for name, each in versions.items():
            order = f" ({each['order']})" if each["order"] else ""
            parts = [_percent(share(each, ceilings, *which)) for which in shares.values()]
            rows.append([batch, f"{name}{order}", *_times(each), _megabytes(each), *parts])
    return lay_out(
        ["B", "version", "median ms", "least–most", "× ours", "extra MB", *shares], rows, 2
    )


def orders(on: str) -> str:
    """Tell how fast einsum is in each order of contractions."""
    found = measured("routing", on)
    if found is None:
        return ""
    rows = []
    for batch, ways in found["orders"].items():
        for order in ORDERS:
            cells: list[str] = []
            for way in ways.values():
                median, _, ratio = _times(way[order])
                cells += [median, ratio, _megabytes(way[order])]
            rows.append([batch, order, *cells])
    ways = next(iter(found["orders"].values()))
    head = [f"{way}, {what}" for way in ways for what in ("ms", "× ours", "extra MB")]
    return lay_out(["B", "order", *head], rows, 2)


def decoder(on: str) -> str:
    """Set the decoder's step beside the reference."""
    found = measured("routing", on)
    if found is None:
        return ""
    rows = [
        [batch, name, *_times(each), _megabytes(each)]
        for batch, versions in found["decoder"].items()
        for name, each in versions.items()
    ]
    return lay_out(["B", "version", "median ms", "least–most", "× ours", "extra MB"], rows, 2)


def growth(on: str) -> str:
    """Tell how time and memory grow with each size."""
    found = measured("routing", on)
    if found is None or "growth" not in found:
        return ""
    versions = list(next(iter(next(iter(found["growth"].values())).values())))
    rows = []
    for size, values in found["growth"].items():
        for value, each in values.items():
            times = [_times(each[version])[0] for version in versions]
            memory = [_megabytes(each[version]) for version in versions if "graph" not in version]
            rows.append([f"{NAMES[size]} = {value}", *times, *memory])
    head = [*(f"{version}, ms" for version in versions)]
    head += [f"{version}, extra MB" for version in versions if "graph" not in version]
    return lay_out(["", *head], rows)


def plot(on: str) -> str:
    """Show how time and memory grow with each size."""
    found = measured("routing", on)
    device = "" if found is None else found["machine"]["device"]
    return (
        device
        and f"![time and memory of a step against each size, {device}](images/routing-{on}.png)"
    )


def largest(on: str) -> str:
    """Tell how long a step takes and how much memory, up to the largest layer that trains."""
    found = (measured("routing", on) or {}).get("largest")
    if not found:
        return ""
    rows = []
    for inputs in max(found.values(), key=len):
        cells = []
        for rungs in found.values():
            each = rungs.get(inputs)
            if each is None:
                cells.append("out of memory" if inputs in rungs else "–")
            else:
                broken = "" if each["finite"] else ", not finite"
                cells.append(
                    f"{_brief(each['seconds'])} s, {_brief(each['peak_bytes'] / 2**30)} GiB{broken}"
                )
        rows.append([f"{int(inputs):,}", *cells])
    return lay_out(["I", *found], rows)


def autoencoder(on: str) -> str:
    """Tell how fast the autoencoder learns."""
    found = measured("autoencoder", on)
    if found is None:
        return ""
    rows = []
    for batch, each in found["batches"].items():
        part = each["flop_per_s"] / found["ceilings"][f"{each['precision']}_flop_per_s"]
        rates = [f"{each['images_per_s']:,.0f}", _brief(each["flop_per_s"] / 1e12), _percent(part)]
        rows.append([batch, each["precision"], *_times(each)[:2], *rates])
    head = ["batch", "precision", "median ms", "least–most", "images/s", "TFLOP/s", "of a product"]
    return lay_out(head, rows, 2)


def pipeline(on: str) -> str:
    """Tell how long each part of the way from files to Figure 2 takes."""
    found = measured("pipeline", on)
    if found is None:
        return ""
    once = [
        [f"*once:* {name}", _brief(value), ""]
        for name, value in found["once"].items()
        if value is not None
    ]
    rows = [
        [name, _brief(each["median_s"]), _range(each, 1)] for name, each in found["summary"].items()
    ]
    rows[-1] = [f"**{text}**" for text in rows[-1]]
    return lay_out(["", "median s", "least–most"], once + rows)


def quality(on: str) -> str:
    """Set the models that were timed beside those of docs/results.md."""
    found = measured("pipeline", on)
    if found is None or not all(each["quality"] for each in found["rounds"]):
        return ""
    rows = []
    for what, (where, form, *_) in TARGETS.items():
        timed = cell([each["quality"].get(where) for each in found["rounds"]], form)
        rows.append([what, timed, cell([find(each, where) for each in defaults("mnist")], form)])
    return lay_out(["", "models timed here", "models of results.md"], rows)


def _times(each: Mapping[str, Any]) -> list[str]:
    """Write the median, the spread and the ratio to ours; why, where there is none."""
    if "failed" in each:
        return ["failed", each["failed"], ""]
    ratio = each.get("times_ours")
    return [
        _brief(1e3 * each["median_s"]),
        _range(each, 1e3),
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _range(each: Mapping[str, Any], factor: float) -> str:
    return f"{_brief(factor * each['min_s'])}–{_brief(factor * each['max_s'])}"


def _megabytes(each: Mapping[str, Any]) -> str:
    return "" if each.get("extra_bytes") is None else _brief(each["extra_bytes"] / 1e6)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{_brief(100 * part)} %"


def _brief(number: float) -> str:
    """Write three digits, or all before the point."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


TABLES: dict[str, Callable[..., str]] = {
    "short": short,
    "targets": targets,
    "peers": peers,
    "domains": domains,
    "experts": experts,
    "study": study,
    "steps": steps,
    "claims": claims,
    "pace": pace,
    "machine": machine,
    "speed": speed,
    "orders": orders,
    "decoder": decoder,
    "growth": growth,
    "plot": plot,
    "largest": largest,
    "autoencoder": autoencoder,
    "pipeline": pipeline,
    "quality": quality,
}


def fill(page: str) -> str:
    """Put every table of a page anew; what was not measured has none."""

    def table(mark: re.Match[str]) -> str:
        name, *of = mark[2].split()
        text = TABLES[name](*of)
        return f"{mark[1]}{text}\n" if text else mark[1]

    return MARK.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files to fill")
    for page in parser.parse_args(arguments).pages:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
