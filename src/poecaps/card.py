"""The model card of a saved network: `README.md` for the Hugging Face Hub, with drawn images.

A card is written into the folder of a network (`config.json`, `model.safetensors`). Facts about
the training come from `run.json`, measures from `evaluation.json`, if these files exist. A card
holds no path of the machine: images that are not a known set are called by the name of their file
or folder. Names are escaped, so that Markdown, HTML and YAML show them unchanged.
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
from poecaps._files import ModelError, atomic_write, read_json
from poecaps._json import dataclass_from_json, is_number
from poecaps._modules import device_of
from poecaps.code_density import DOMAIN_INFO
from poecaps.data.datasets import NAMES
from poecaps.serialization import has_half_precision
from poecaps.training import record
from poecaps.training.config import Config, changed_options, nearest_preset

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
IN_TABLE = {"data", "seed", "batch_size"}  # options with their own row in the table of the card
MARK = "<!-- written by poecaps, sha256 {}; once edited, it is not overwritten -->"


@dataclass(frozen=True)
class KnownData:
    """Facts about a data set that is known by name."""

    description: str
    hub_name: str
    """Name on the Hub."""


KNOWN_DATA = {
    "mnist": KnownData(
        "[MNIST](http://yann.lecun.com/exdb/mnist/), by Yann LeCun, Corinna Cortes and "
        "Christopher J.C. Burges, "
        "[CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/)",
        "mnist",
    ),
    "fashion-mnist": KnownData(
        "[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist), by Han Xiao, "
        "Kashif Rasul and Roland Vollgraf, Zalando Research, MIT licence",
        "fashion_mnist",
    ),
}
DRAWS = {  # in the rows of the card
    domain: f"draws from {info.description if info.whole_code else f'one expert: {domain}'}"
    for domain, info in DOMAIN_INFO.items()
}
PROBE = "linear probe on codes, test accuracy"
MEASURES = {  # rows of the card: path of the number in evaluation.json, and its format
    PROBE: (("probe", "test_accuracy"), ".2%"),
    "linear probe on firing probabilities alone": (("firing_probe", "test_accuracy"), ".2%"),
    "normalised mutual information of the most active expert and the label": (
        ("specialisation", "normalised"),
        ".3f",
    ),
    "effective rank of the code": (("effective_rank",), ".1f"),
    "reconstruction error, relative to the mean image": (("reconstruction", "relative"), ".1%"),
    "purity of the draws of one expert": (("experts", "purity", "mean"), ".1%"),
    "purity of the draws of one expert of the energy": (
        ("density_experts", "purity", "mean"),
        ".1%",
    ),
} | {
    f"{measure} {draws}": (("domains", domain, *path), form)
    for domain, draws in DRAWS.items()
    for measure, path, form in (
        ("recognisable", ("recognisability", "share"), ".1%"),
        ("Fréchet distance of", ("frechet", "distance"), ".1f"),
        # without labels
        ("Fréchet distance in random features of", ("random_frechet", "distance"), ".4f"),
        ("precision of", ("neighbourhoods", "precision"), ".1%"),
        ("recall of", ("neighbourhoods", "recall"), ".1%"),
    )
}
HUB_METRICS = {  # rows that the head of the card repeats, by the Hub's name for such a number
    PROBE: "accuracy",
    f"recognisable {DRAWS['joint']}": "recognisable-draws",
    f"Fréchet distance of {DRAWS['joint']}": "frechet-distance",
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
    """Write the model card of a network into its folder, unless the existing card was edited.

    Parameters
    ----------
    folder
        Folder of the saved network, with `run.json` and `evaluation.json` if they exist.
    network
        The network.
    name
        Name of the model; by default that of its folder.
    licence
        Licence of the weights in the notation of the Hub, such as ``"mit"``.
    shipped
        Whether the model comes with poecaps, so that it is found by its name.
    draw
        Whether to draw the picture of the card. An existing picture is shown in any case.

    Returns
    -------
    bool
        False if the card was edited and therefore not overwritten.
    """
    path = folder / CARD
    if path.is_file() and not _is_unedited(path):
        return False
    if draw:
        _draw_samples(network, folder / PICTURE)
    run = record.read(folder) if (folder / record.RECORD).is_file() else None
    card = _Card(
        name=name or folder.resolve().name,
        network=network,
        licence=licence,
        data_name=None if run is None else _data_name(str(run["config"]["data"])),
        run=None if run is None else record.without_machine(run),
        measured=read_measured(folder),
        half=has_half_precision(folder),
        shipped=shipped,
        picture=(folder / PICTURE).is_file(),
    )
    text = _valid_utf8("\n".join(card.lines()) + "\n")
    with atomic_write(path) as file:
        file.write(f"{text}\n{MARK.format(_digest(text))}\n".encode())
    return True


def read_measured(folder: Path) -> dict[str, Any] | None:
    """Read the evaluation of the network in a folder, or return None if there is none.

    Raises
    ------
    ModelError
        If the file is damaged, or was not written by `poecaps evaluate`.
    """
    path = folder / MEASURED
    if not path.is_file():
        return None
    measured = read_json(path)
    numbers = [_measure(measured, row) for row in MEASURES]
    if (
        not isinstance(measured.get("data"), str)
        or not all(type(measured.get(name)) is int for name in ("test_images", "samples", "seed"))
        or not all(each is None or is_number(each) for each in numbers)
    ):
        raise ModelError(f"{path} is not an evaluation; delete it, or evaluate the model again")
    return measured


def measures(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the names and formatted values of all measures in the JSON of an evaluation."""
    values = {row: (_measure(measured, row), form) for row, (_, form) in MEASURES.items()}
    return {row: f"{value:{form}}" for row, (value, form) in values.items() if value is not None}


def _measure(measured: Mapping[str, Any] | None, row: str) -> Any:
    """Return the number of a row, or None if it was not measured."""
    value: Any = measured
    for key in MEASURES[row][0]:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def is_unedited(text: str) -> bool:
    """Return whether a card is unchanged since `write` wrote it."""
    body, _, last = text.rstrip("\n").rpartition("\n\n")
    return last == MARK.format(_digest(f"{body}\n"))


def _is_unedited(path: Path) -> bool:
    try:
        return is_unedited(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:  # `write` writes UTF-8
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _draw_samples(network: CapsuleNetwork, path: Path) -> None:
    generator = torch.Generator(device_of(network)).manual_seed(0)
    images = network.generate(ROWS * COLUMNS, "joint", generator=generator)
    plotting.image_grid(images, path, columns=COLUMNS, raw=False)


@dataclass(frozen=True)
class _Card:
    """Everything that a card states."""

    name: str
    network: CapsuleNetwork
    licence: str
    data_name: str | None
    run: Mapping[str, Any] | None
    measured: Mapping[str, Any] | None
    half: bool
    shipped: bool
    picture: bool

    def lines(self) -> Iterator[str]:
        """Yield the card, line by line."""
        run = self.run
        config = None if run is None else dataclass_from_json(Config, run["config"], defaults=True)
        known = None if config is None else KNOWN_DATA.get(config.data.removesuffix("-sample"))
        yield from self._head(known)
        data = self.data_name
        trained = "" if data is None else f", trained on {_escape(data)} without labels"
        yield f"# {_escape(self.name)}\n\nA product of expert capsules{trained}.\n"
        yield from self._usage()
        yield from self._facts(config, known)
        yield from self._options(config)
        yield "\n## Evaluation\n"
        yield from self._evaluation()
        yield "\n## Intended use\n"
        yield "For trying out poecaps, for comparisons and for teaching."
        yield "The model knows only images of this kind, centred and scaled as in its data;"
        yield "its results for other images are meaningless."

    def _head(self, known: KnownData | None) -> Iterator[str]:
        """Yield the metadata for the Hub, in YAML; strings are JSON, which YAML includes."""
        yield "---"
        yield f"library_name: poecaps\nlicense: {_quote(self.licence)}\npipeline_tag: {TASK}"
        yield "tags:\n" + "\n".join(f"- {tag}" for tag in TAGS)
        if known:
            yield f"datasets:\n- {known.hub_name}"
        values = {row: _measure(self.measured, row) for row in HUB_METRICS}
        values = {row: value for row, value in values.items() if value is not None}
        if self.measured is not None and values:
            yield "metrics:\n" + "\n".join(f"- {HUB_METRICS[row]}" for row in values)
            data = _data_name(self.measured["data"])
            slug = re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "images"
            kind = known.hub_name if known else _quote(slug)
            yield f"model-index:\n- name: {_quote(self.name)}\n  results:"
            yield f"  - task:\n      type: {TASK}"
            yield f"    dataset:\n      type: {kind}\n      name: {_quote(data)}\n    metrics:"
            for row, value in values.items():
                yield f"    - type: {HUB_METRICS[row]}\n      name: {_quote(row)}"
                yield f"      value: {value:.6g}"
        yield "---\n"

    def _usage(self) -> Iterator[str]:
        if self.picture:
            yield f"![{ROWS * COLUMNS} random draws from all experts together]({PICTURE})\n"
        if self.shipped:
            command = _code_block("sh", f"poecaps generate {shlex.quote(self.name)}")
            yield f"The model comes with poecaps:\n\n{command}\n"
        else:
            shape = ", ".join(map(str, self.network.architecture.image_shape))
            yield "Draw images with `poecaps generate FOLDER`, or in Python:\n"
            yield "```python\nimport poecaps\n"
            if "/" in self.name:  # a repository on the Hub
                yield f"network = poecaps.from_pretrained({_quote(self.name)})"
            else:
                yield 'network = poecaps.load("FOLDER")  # the folder of this file'
            yield f"images = network.generate(20)  # (20, {shape})\n```\n"

    def _facts(self, config: Config | None, known: KnownData | None) -> Iterator[str]:
        channels, height, width = self.network.architecture.image_shape
        layers = (
            f"{count} experts of dimension {dim}"
            for count, dim in self.network.architecture.experts
        )
        weights = sum(parameter.numel() for parameter in self.network.parameters())
        yield "| | |\n| --- | --- |"
        yield f"| images | {height}×{width}, {'grey' if channels == 1 else 'RGB'} |"
        yield f"| code | {', then '.join(layers)} |"
        yield f"| weights | {weights:,}{', the large tensors in float16' if self.half else ''} |"
        if self.run is not None and config is not None and self.data_name is not None:
            data, last = self.run["data"], (self.run["starts"] or [{}])[-1]
            own = f"{_escape(self.data_name)}, provided by the author of the model"
            yield f"| data | {known.description if known else own} |"
            images, checksum = data["images"], data.get("sha256")
            yield f"| training images | {images:,}, SHA-256 of the array `{checksum}` |"
            preset = nearest_preset(config)
            changed = ", with the changes below" if _changed(config, preset) else ""
            yield f"| preset | {preset}{changed} |"
            yield f"| batch size | {config.batch_size_for(images)} |"
            yield f"| seed | {config.seed} |"
            device, version = str(last.get("device")), last.get("versions", {}).get("torch")
            yield f"| trained on | {_escape(device)}, {last.get('precision')}, torch {version} |"
            yield f"| finished | {self.run['finished']} |"
        chosen = "not chosen yet" if self.licence == "unknown" else _escape(self.licence)
        yield f"| licence | weights: {chosen}; images: that of their authors |"

    def _options(self, config: Config | None) -> Iterator[str]:
        """Yield the options that differ from the preset."""
        preset = None if config is None else nearest_preset(config)
        changed = {} if config is None or preset is None else _changed(config, preset)
        if changed:
            yield f"\nOptions that differ from the preset `{preset}`:\n"
            yield _code_block("yaml", "\n".join(f"{k}: {_yaml(v)}" for k, v in changed.items()))
        if config is not None:
            yield "\nAll options are in `run.json`."

    def _evaluation(self) -> Iterator[str]:
        """Yield the measures of `poecaps evaluate`."""
        measured = self.measured
        if measured is None:
            model = shlex.quote(self.name) if self.shipped else "FOLDER"
            yield f"Not evaluated yet; run `poecaps evaluate {model}`."
            return
        data = _escape(_data_name(measured["data"]))
        about = measured.get("metadata")
        is_of_these = isinstance(about, dict) and about.get("half") is True
        rounded = ", before the weights were rounded" if self.half and not is_of_these else ""
        yield f"Measured by `poecaps evaluate` on {data}, {measured['test_images']:,} images,"
        draws, seed = f"{measured['samples']:,} draws", measured["seed"]
        yield f"with {draws} from each domain, seed {seed}{rounded}."
        yield "The documentation of poecaps defines each measure in `docs/evaluation.md`.\n"
        yield "| | |\n| --- | ---: |"
        yield from (f"| {row} | {value} |" for row, value in measures(measured).items())


def _changed(config: Config, preset: str) -> dict[str, Any]:
    """Return the options that differ from a preset and have no row in the table."""
    changed = changed_options(config, preset)
    return {name: value for name, value in changed.items() if name not in IN_TABLE}


def _data_name(source: str) -> str:
    """Return the name of a file or folder of images; for a split, that of the folder around it."""
    path = Path(source)
    if source in NAMES:
        return source
    return (path.parent.name if path.name in ("train", "test") else "") or path.name or "images"


def _valid_utf8(text: str) -> str:
    """Replace characters of file names that UTF-8 cannot encode by question marks."""
    return text.encode("utf-8", "replace").decode()


def _quote(text: str) -> str:
    """Write a string on one line so that JSON, YAML and Python read it back."""
    return "".join(
        each if each.isprintable() else f"\\U{ord(each):08x}"
        for each in json.dumps(_valid_utf8(text), ensure_ascii=False)
    )


def _yaml(value: Any) -> str:
    return _quote(value) if isinstance(value, str) else json.dumps(value)


def _escape(text: str) -> str:
    """Write a name on one line so that Markdown shows it unchanged, also in a table."""
    line = "".join(each if each.isprintable() else " " for each in _valid_utf8(text)).strip()
    return re.sub(
        r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", html.escape(line, quote=False)
    )


def _code_block(language: str, text: str) -> str:
    """Return a fenced code block, with a fence that is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
