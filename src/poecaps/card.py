"""The model card of a saved network: `README.md` as the Hugging Face Hub shows it, with a picture of what it draws.

A folder that holds a network (`config.json`, `model.safetensors`) is whole with it: what is known of the training
comes from `run.json`, what was measured from `evaluation.json`, where these are there. No path of the machine gets into
a card: images of one's own are called by the name of their file or folder. Names are shown as they are, whatever
Markdown, HTML or YAML would make of them.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps import plotting
from poecaps._files import read_json, read_tensors, write_atomically
from poecaps.cli.arguments import command_for
from poecaps.data.datasets import NAMES
from poecaps.network import DOMAINS
from poecaps.training import record
from poecaps.training.config import Config, changes, from_json, nearest_preset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poecaps.network import CapsuleNetwork

CARD, PICTURE, MEASURED = "README.md", "samples.png", "evaluation.json"
ROWS, COLUMNS = 4, 10  # of the picture
TAGS = (
    "capsule-networks",
    "product-of-experts",
    "contrastive-divergence",
    "energy-based-model",
    "unsupervised",
)
TASK = "unconditional-image-generation"
WITH_ROWS = {"data", "seed"}  # options that the card shows beside the preset
MARK = "<!-- written by poecaps, sha256 {}; once edited, it is left alone -->"


@dataclass(frozen=True)
class Published:
    """What a card says of a set known by name."""

    about: str
    hub: str
    """What the Hub calls it."""


SETS = {
    "mnist": Published(
        "[MNIST](http://yann.lecun.com/exdb/mnist/), by Yann LeCun, Corinna Cortes and Christopher J.C. Burges, "
        "[CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/)",
        "mnist",
    ),
    "fashion-mnist": Published(
        "[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist), by Han Xiao, Kashif Rasul and "
        "Roland Vollgraf, Zalando Research, MIT licence",
        "fashion_mnist",
    ),
}
PROBE = "linear probe on codes, test accuracy"
ROWS_MEASURED = {  # rows of the card, and where evaluation.json has them
    PROBE: (("probe", "test_accuracy"), ".2%"),
    "linear probe on firing probabilities alone": (("probe_of_firing", "test_accuracy"), ".2%"),
    "normalised mutual information of the most active expert and the label": (
        ("specialisation", "normalised"),
        ".3f",
    ),
    "effective rank of the code": (("effective_rank",), ".1f"),
    "reconstruction error, share of that of the mean image": (
        ("reconstruction", "relative"),
        ".1%",
    ),
    "purity of the draws of one expert": (("experts", "purity", "mean"), ".1%"),
} | {
    f"{what}, domain {domain}": (("domains", domain, *where), form)
    for domain in DOMAINS
    for what, where, form in (
        ("recognisable draws", ("recognisability", "share"), ".1%"),
        ("Fréchet distance", ("frechet", "distance"), ".1f"),
    )
}
TYPES = {  # rows that the head of the card has too, by the Hub's name for such a number
    PROBE: "accuracy",
    "recognisable draws, domain joint": "recognisable-draws",
    "Fréchet distance, domain joint": "frechet-distance",
}


def write(
    folder: Path,
    network: CapsuleNetwork,
    *,
    name: str | None = None,
    licence: str = "unknown",
    shipped: bool = False,
    draw: bool = True,
) -> bool:
    """Write the model card of a network into the folder that it is saved in, unless somebody has edited it.

    Parameters
    ----------
    folder
        Where the network is, with `run.json` and `evaluation.json` if there are such.
    network
        The network.
    name
        What the model is called; by default as its folder.
    licence
        Of the weights, as the Hub writes it, such as ``"mit"``.
    shipped
        Whether the model comes with poecaps, so that its name finds it.
    draw
        Whether to draw the picture that the card shows; one that is there already is shown in any case.

    Returns
    -------
    bool
        False if the card was left alone because it is not as it was written.
    """
    path = folder / CARD
    if path.is_file() and not _is_as_written(path):
        return False
    if draw:
        _draw(network, folder / PICTURE)
    full = record.read(folder) if (folder / record.RECORD).is_file() else None
    about = None if full is None else record.without_machine(full)
    data = None if full is None else _name_of(str(full["config"]["data"]))
    measured = read_json(folder / MEASURED) if (folder / MEASURED).is_file() else None
    half = read_tensors(folder / "model.safetensors")[1].get("half") is True
    name, picture = name or folder.resolve().name, (folder / PICTURE).is_file()
    lines = _lines(
        name, network, data, about, measured, licence, half=half, shipped=shipped, picture=picture
    )
    text = _valid("\n".join(lines) + "\n")
    write_atomically(path, f"{text}\n{MARK.format(_digest(text))}\n".encode())
    return True


def is_ours(text: str) -> bool:
    """Tell whether a card is as `write` left it."""
    body, _, last = text.rstrip("\n").rpartition("\n\n")
    return last == MARK.format(_digest(f"{body}\n"))


def _is_as_written(path: Path) -> bool:
    try:
        return is_ours(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:  # which is not what `write` leaves
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def _draw(network: CapsuleNetwork, path: Path) -> None:
    generator = torch.Generator(next(network.parameters()).device).manual_seed(0)
    images = network.generate(ROWS * COLUMNS, "joint", generator=generator)
    plotting.image_grid(images, path, columns=COLUMNS, raw=False)


def _lines(
    name: str,
    network: CapsuleNetwork,
    data_name: str | None,
    about: Mapping[str, Any] | None,
    measured: Mapping[str, Any] | None,
    licence: str,
    *,
    half: bool,
    shipped: bool,
    picture: bool,
) -> Iterator[str]:
    """Yield the card, line after line."""
    config = None if about is None else from_json(Config, about["config"])
    known = None if config is None else SETS.get(config.data.removesuffix("-sample"))
    yield from _head(name, known, measured, licence)
    learned = "" if data_name is None else f" that has learned {_plain(data_name)} without labels"
    yield f"# {_plain(name)}\n\nA product of expert capsules{learned}.\n"
    if picture:
        yield f"![{ROWS * COLUMNS} draws from all experts together, none picked]({PICTURE})\n"
    if shipped:
        yield f"It comes with poecaps:\n\n{_fenced('sh', f'poecaps generate {shlex.quote(name)}')}\n"
    else:
        yield "`poecaps generate FOLDER` draws from the folder that holds it, or in Python:\n"
        yield "```python\nfrom poecaps import CapsuleNetwork\n"
        yield f"network = CapsuleNetwork.from_pretrained({_quoted(name)})"
        yield f"images = network.generate(20)  # (20, {', '.join(map(str, network.architecture.image_shape))})\n```\n"
    channels, height, width = network.architecture.image_shape
    weights = f"{sum(each.numel() for each in network.parameters()):,}"
    yield "| | |\n| --- | --- |"
    yield f"| images | {height}×{width}, {'grey' if channels == 1 else 'RGB'} |"
    layers = (f"{count} experts of {dim} numbers" for count, dim in network.architecture.experts)
    yield f"| code | {', then '.join(layers)} |"
    yield f"| weights | {weights}{', the large tensors in float16' if half else ''} |"
    if about is not None and config is not None and data_name is not None:
        data, last = about["data"], (about["starts"] or [{}])[-1]
        yield f"| data | {known.about if known else f'{_plain(data_name)}, images of the one who trained it'} |"
        yield f"| training images | {data['images']:,}, sha256 of the array `{data.get('sha256')}` |"
        preset = nearest_preset(config)
        changed = changes(config, preset).keys() - WITH_ROWS
        yield f"| preset | {preset}{', with the changes below' if changed else ''} |"
        yield f"| seed | {config.seed} |"
        torch_version = last.get("versions", {}).get("torch")
        yield f"| trained on | {_plain(str(last.get('device')))}, {last.get('precision')}, torch {torch_version} |"
        yield f"| finished | {about['finished']} |"
    theirs = "the images keep that of their makers"
    choice = "for the owner to choose" if licence == "unknown" else _plain(licence)
    yield f"| licence | of the weights {choice}; {theirs} |"
    if config is not None:
        yield "\nTrained by this command; all options are in `run.json`:\n"
        yield _fenced("sh", command_for(config))
    yield "\n## Measured\n"
    yield from _table(shlex.quote(name) if shipped else "FOLDER", measured, half)
    yield "\n## What it is for\n"
    yield "To try poecaps, to compare with, to teach. It knows images of this one kind, centred and scaled as in its"
    yield "data; what it says of others means nothing."


def _head(
    name: str, known: Published | None, measured: Mapping[str, Any] | None, licence: str
) -> Iterator[str]:
    """Yield what the Hub reads, in YAML; a string of JSON is one of YAML, too."""
    yield "---"
    yield f"library_name: poecaps\nlicense: {_quoted(licence)}\npipeline_tag: {TASK}"
    yield "tags:\n" + "\n".join(f"- {tag}" for tag in TAGS)
    if known:
        yield f"datasets:\n- {known.hub}"
    values = {} if measured is None else {row: _value(measured, row) for row in TYPES}
    values = {row: value for row, value in values.items() if value is not None}
    if measured is not None and values:
        yield "metrics:\n" + "\n".join(f"- {TYPES[row]}" for row in values)
        data = _name_of(measured["data"])
        kind = (
            known.hub
            if known
            else _quoted(re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "images")
        )
        yield f"model-index:\n- name: {_quoted(name)}\n  results:\n  - task:\n      type: {TASK}"
        yield f"    dataset:\n      type: {kind}\n      name: {_quoted(data)}\n    metrics:"
        for row, value in values.items():
            yield f"    - type: {TYPES[row]}\n      name: {_quoted(row)}\n      value: {value:.6g}"
    yield "---\n"


def _valid(text: str) -> str:
    """Put a question mark for what UTF-8 cannot hold, as names of files may have it."""
    return text.encode("utf-8", "replace").decode()


def _quoted(text: str) -> str:
    """Write a string on one line as JSON, YAML and Python have it."""
    return "".join(
        each if each.isprintable() else f"\\U{ord(each):08x}"
        for each in json.dumps(_valid(text), ensure_ascii=False)
    )


def _plain(text: str) -> str:
    """Write a name so that Markdown shows it as it is, on one line, in a table too."""
    line = "".join(each if each.isprintable() else " " for each in _valid(text)).strip()
    return re.sub(
        r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(line, quote=False)
    )


def _fenced(language: str, text: str) -> str:
    """Make a block of code that ends where it should, whatever is in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _name_of(source: str) -> str:
    """Call images by their file or folder; one that is only a split, by the folder around it."""
    path = Path(source)
    if source in NAMES:
        return source
    return (path.parent.name if path.name in ("train", "test") else "") or path.name or "images"


def _table(which: str, measured: Mapping[str, Any] | None, half: bool) -> Iterator[str]:
    """Yield the numbers of `poecaps evaluate`."""
    if measured is None:
        yield f"Not yet. `poecaps evaluate {which}` measures it."
        return
    images, draws = f"{measured['test_images']:,} images", f"{measured['samples']:,} draws"
    data = _plain(_name_of(measured["data"]))
    yield f"By `poecaps evaluate` on {data}, {images}, with {draws} from each domain and seed"
    rounded = ", before the weights were rounded" if half else ""
    yield f"{measured['seed']}{rounded}. `docs/evaluation.md` of poecaps defines each number.\n"
    yield "| | |\n| --- | ---: |"
    for row, (_, form) in ROWS_MEASURED.items():
        value = _value(measured, row)
        if value is not None:
            yield f"| {row} | {value:{form}} |"


def _value(measured: Mapping[str, Any], row: str) -> Any:
    value: Any = measured
    for key in ROWS_MEASURED[row][0]:
        value = None if value is None else value.get(key)
    return value
