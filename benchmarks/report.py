"""The tables of README.md and docs/results.md, made of the numbers in docs/results.

`python -m benchmarks.report README.md docs/results.md` puts each table anew after the comment that names it, such as
`<!-- table: peers mnist -->`, up to the next empty line. So no number in them is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.study import cell, find
from benchmarks.study import table as study_table
from poecaps.network import DOMAINS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Columns = Mapping[str, tuple[str, str]]  # heading: where an evaluation has the number, how to write it

NUMBERS = Path(__file__).parents[1] / "docs" / "results"
SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
MARK = re.compile(r"(<!-- table: ([a-z-]+(?: [a-z-]+)*) -->\n)(?:[^\n]+\n)*")

TARGETS = {  # what: (place in an evaluation, how to write it, target of MNIST, of Fashion-MNIST)
    "linear probe on codes": ("probe.test_accuracy", ".4f", "≥ 0.960 (0.985)", "≥ 0.850 (0.900)"),
    "Fréchet distance, joint": ("domains.joint.frechet.distance", ".1f", None, None),
    "recognisable, joint": ("domains.joint.recognisability.share", ".1%", "≥ 80 % (95 %)", "≥ 65 % (85 %)"),
    "recognisable, one expert at a time, learned": (
        "experts.recognisability.share",
        ".1%",
        "≥ 80 % (95 %)",
        "≥ 60 % (80 %)",
    ),
    "NMI of most active expert and label": ("specialisation.normalised", ".3f", "≥ 0.45 (0.65)", "≥ 0.45 (0.65)"),
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
    machines = (cell([find(each, at) for each in peers_named(data, name)], ".0f") for name, at in chains)
    rbm = min(machines, key=lambda text: float(text.split()[0]))
    return f"< {rbm}, RBM ({cell([find(each, where) for each in peers_named(data, 'vae')], '.0f')}, VAE)"


def mean_of(
    results: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], within: str = ""
) -> list[str]:
    """Write a cell for each column: mean and spread of a number over results."""
    return [cell([find(each, within + where) for each in results], form) for where, form in columns.values()]


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
    ways += [(f"{called}, {way}", name, domain) for name, (called, of) in PEERS.items() for domain, way in of.items()]
    rows = []
    for called, name, domain in ways:
        row = [called]
        for data in SETS:
            results = defaults(data) if name == "default" else peers_named(data, name)
            for where, form in (("probe.test_accuracy", ".3f"), (f"domains.{domain}.frechet.distance", ".0f")):
                row.append(cell([find(each, where) for each in results], form).split(" ± ")[0])
        rows.append(row)
    return lay_out(
        ["", "linear probe, MNIST", "Fréchet distance", "linear probe, Fashion-MNIST", "Fréchet distance"], rows
    )


def domains(data: str) -> str:
    """Tell what the default draws in each domain."""
    columns = {**OF_SAMPLES, "negatives": ("negatives.share", ".1%")}
    rows = [[domain, *mean_of(defaults(data), columns, f"domains.{domain}.")] for domain in DOMAINS]
    return lay_out(["domain", *columns], rows)


def experts() -> str:
    """Tell how pure and how various the draws of one expert are, on both sets."""
    columns = {"purity": ("purity.mean", ".1%"), "variety": ("variety.mean", ".1%")}
    columns |= {name: (f"variation.{name}", ".0%") for name in ("thickness", "slant", "width", "height")}
    rows = [[called, *mean_of(defaults(data), columns, "experts.")] for data, called in SETS.items()]
    return lay_out(["", *columns], rows)


def study(data: str) -> str:
    """Set the default beside what was changed of it."""
    return study_table([row for row in numbers(data, "study") if not row["variant"].startswith("paper")])


def steps(data: str) -> str:
    """Tell what the paper's recipe gives, and what each step from there on."""
    return study_table([row for row in numbers(data, "study") if row["variant"].startswith("paper")])


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
        [each["run"], *(cell([read(each)], ".1%") for read in columns.values())] for each in numbers(data, "claims")
    ]
    return lay_out(["variant", *columns], rows)


TABLES: dict[str, Callable[..., str]] = {
    "short": short,
    "targets": targets,
    "peers": peers,
    "domains": domains,
    "experts": experts,
    "study": study,
    "steps": steps,
    "claims": claims,
}


def fill(page: str) -> str:
    """Put every table of a page anew."""

    def table(mark: re.Match[str]) -> str:
        name, *of = mark[2].split()
        return f"{mark[1]}{TABLES[name](*of)}\n"

    return MARK.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files to fill")
    for page in parser.parse_args(arguments).pages:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
