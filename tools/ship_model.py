"""Put a trained run into the package, in half precision, with a model card and a record of how it was trained.

Run as: python tools/ship_model.py RUN NAME

Then `poecaps generate NAME` and `poecaps.load("NAME")` find it. Of the run's own record only what anybody could repeat
is kept: no paths, and the command is made anew from the options. What RUN/evaluation.json says, if there is one, goes
into the card.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps import models
from poecaps._files import ModelError, read_json, write_atomically, write_json
from poecaps.data import named
from poecaps.network import DOMAINS, CapsuleNetwork
from poecaps.training import Config, record
from poecaps.training.config import OF_THE_MACHINE, command, from_json, nearest_preset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KEPT = ("time", "stage", "step", "device", "precision", "processes")  # of each start of the run
SETS = {
    "mnist": "[MNIST](http://yann.lecun.com/exdb/mnist/), by Yann LeCun, Corinna Cortes and Christopher J.C. Burges, "
    "[CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/)",
    "fashion-mnist": "[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist), by Han Xiao, Kashif Rasul and "
    "Roland Vollgraf, Zalando Research, MIT licence",
}
MEASURED = {  # rows of the card, and where evaluation.json has them
    "linear probe on codes, test accuracy": (("probe", "test_accuracy"), ".2%"),
    "linear probe on firing probabilities alone": (("probe_of_firing", "test_accuracy"), ".2%"),
    "normalised mutual information of the most active expert and the label": (("specialisation", "normalised"), ".3f"),
    "effective rank of the code": (("effective_rank",), ".1f"),
    "reconstruction error, share of that of the mean image": (("reconstruction", "relative"), ".1%"),
    "purity of the draws of one expert": (("experts", "purity", "mean"), ".1%"),
} | {
    f"{what}, domain {domain}": (("domains", domain, *where), form)
    for domain in DOMAINS
    for what, where, form in (
        ("recognisable draws", ("recognisability", "share"), ".1%"),
        ("Fréchet distance", ("frechet", "distance"), ".1f"),
    )
}

CARD = """# {name}

A product of expert capsules that has learned {set} without labels. It comes with poecaps:

```sh
poecaps generate {name}
```

| | |
| --- | --- |
| images | {images} |
| code | {code} |
| weights | {weights}, the large tensors in float16 |
| data | {data} |
| training images | {count}, sha256 of the array `{sha256}` |
| preset | {preset}, with the changes below |
| seed | {seed} |
| trained on | {how} |
| finished | {finished} |
| licence | of the weights MIT, as of poecaps; the images keep that of their makers, above |

Trained by this command; all options are in `run.json`:

```sh
{command}
```

## Measured

{measured}

## What it is for

To try poecaps, to compare with, to teach. It knows images of this one kind, centred and scaled as in its data;
what it says of others means nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Ship a run, say where it is and how large, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run on a set known by name")
    parser.add_argument("name", help="what the model is to be called, such as mnist")
    options = parser.parse_args(arguments)
    try:
        folder = ship(options.run, options.name)
    except (ValueError, OSError) as error:
        print(f"ship_model: {error}", file=sys.stderr)
        return 1
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:12,}  {file}")
    return 0


def ship(run: Path, name: str) -> Path:
    """Write the folder of a shipped model, and return it.

    Raises
    ------
    ValueError
        If the run is not finished, was trained on images that others do not have, or has weights that float16 cannot
        hold; or if the name cannot be typed as one.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"the name must be made of small letters, digits and hyphens, but is {name!r}")
    network, about = CapsuleNetwork.load(run), record.read(run)
    if not about.get("finished"):
        raise ModelError(f"{run} is not finished")
    config = from_json(Config, about["config"])
    if config.data not in named.NAMES:
        raise ValueError(f"{run} was trained on {config.data}, but must be on one of {', '.join(named.NAMES)}")
    measured = read_json(run / "evaluation.json") if (run / "evaluation.json").is_file() else None
    with tempfile.TemporaryDirectory() as trial:
        network.save(trial, half=True)
        _check(CapsuleNetwork.load(trial), run)
    folder = models.FOLDER / name
    network.save(folder, half=True)
    write_json(folder / record.RECORD, without_machine(about, config))
    write_atomically(folder / "README.md", _card(name, network, config, about, measured).encode())
    return folder


@torch.no_grad()
def _check(network: CapsuleNetwork, run: Path) -> None:
    """Refuse a model that, once rounded and read back, draws no images."""
    for domain in DOMAINS:
        images = network.generate(20, domain, generator=torch.Generator().manual_seed(0))
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise ModelError(f"{run} in half precision draws no images from 0 to 1 in the domain {domain}")


def without_machine(about: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Keep of the record of a run what does not depend on whose machine it was."""
    usual = Config()
    shared = replace(config, **{name: getattr(usual, name) for name in OF_THE_MACHINE})
    starts = [
        {
            "command": command(config),
            **{name: start[name] for name in KEPT if name in start},
            "versions": {name: value for name, value in start.get("versions", {}).items() if name != "platform"},
        }
        for start in about["starts"]
    ]
    return record.begin(shared, about["data"]) | {"starts": starts, "finished": about["finished"]}


def _card(
    name: str, network: CapsuleNetwork, config: Config, about: Mapping[str, Any], measured: Mapping[str, Any] | None
) -> str:
    """Write the model card."""
    channels, height, width = network.architecture.image_shape
    data, last = about["data"], about["starts"][-1]
    versions = last.get("versions", {})
    return CARD.format(
        name=name,
        set=config.data,
        images=f"{height}×{width}, {'grey' if channels == 1 else 'RGB'}",
        code=", then ".join(f"{count} experts of {dim} numbers" for count, dim in network.architecture.experts),
        weights=f"{sum(each.numel() for each in network.parameters()):,}",
        data=SETS[config.data.removesuffix("-sample")],
        count=f"{data['images']:,}",
        sha256=data.get("sha256"),
        preset=nearest_preset(config),
        seed=config.seed,
        how=f"{last.get('device')}, {last.get('precision')}, torch {versions.get('torch')}",
        finished=about["finished"],
        command=command(config),
        measured="\n".join(_measured(name, measured)),
    )


def _measured(name: str, measured: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the numbers of `poecaps evaluate` as a table."""
    if measured is None:
        yield f"Not yet. `poecaps evaluate {name}` measures it."
        return
    images, draws = f"{measured['test_images']:,} images", f"{measured['samples']:,} draws"
    yield f"By `poecaps evaluate` on {measured['data']}, {images}, with {draws} from each domain and seed"
    yield f"{measured['seed']}, before the weights were rounded. `docs/evaluation.md` defines each number."
    yield ""
    yield "| | |"
    yield "| --- | ---: |"
    for row, (where, form) in MEASURED.items():
        value: Any = measured
        for key in where:
            value = None if value is None else value.get(key)
        if value is not None:
            yield f"| {row} | {value:{form}} |"


if __name__ == "__main__":
    sys.exit(main())
