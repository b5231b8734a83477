"""Ablation study of the recipe: change one option at a time, train, evaluate.

`python -m benchmarks.study --data mnist --path FOLDER --json FILE` trains a network for each
variant below, evaluates it with the protocol of `poecaps evaluate`, and adds a row to FILE for
each; `--jobs` sets the number of networks trained at the same time. `--only default --seeds 0,1,2`
trains the preset three times. Variants that FILE already contains are skipped. `--table FILE`
prints FILE as a table.

`--held-out 10000` leaves the last 10,000 training images out of the training and evaluates on them;
with `--on test` as well, it evaluates on the test images. Options are chosen by the former, and
measured once by the latter.

`--classes` does the same for a second list: what views, routing, equalized components and
competition each contribute to experts that stand for classes, with 10 and with 20 experts. Its
table has the measures of clusterings, and its rows belong into a file of their own.

`--readings` does the same for a third list: both readings of the paper's initial weights and of its
rule for the decoder, with 10 and 50 epochs.

A variant is a preset with some options changed; its row contains the equivalent `poecaps train`
command.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import variants
from benchmarks.variants import WITHOUT, Job, Variant, class_variants, preset_with
from poecaps._modules import device_of
from poecaps.evaluation import CLASSIFIERS, evaluate, load_classifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

default_with = partial(preset_with, "default")
paper_with = partial(preset_with, "paper")

_SCALED = {"model__centre": True, "model__scale": 0.4, "decoder__learning_rate": 1.0}
_WHITENED = {**_SCALED, "model__whiten": True, "model__normalize": "outputs"}

# What the paper leaves open: whether 0.01 is the standard deviation or the variance of the initial
# weights, what the data of the decoder's rule are, and the number of epochs.
_VARIANCE = {"encoder__init_std": 0.1, "decoder__init_std": 0.1}
_READINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", initial variance 0.01": _VARIANCE,
    ", decoder of reconstructions": {"decoder__target": "reconstruction"},
    ", initial variance 0.01, decoder of reconstructions": {
        **_VARIANCE,
        "decoder__target": "reconstruction",
    },
}
_LONG = {"encoder__epochs": 50, "decoder__epochs": 50}
READINGS: dict[str, Variant] = {
    f"paper{reading}{length}": paper_with(**options, **epochs)
    for reading, options in _READINGS.items()
    for length, epochs in (("", {}), (", 50 epochs", _LONG))
}

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

CLASSES: dict[str, Variant] = class_variants(  # what makes experts into classes
    default_with, {**WITHOUT, "8 restarts": {"encoder__restarts": 8}}
)

COLUMNS = {  # heading: path of the number in a row, format
    "linear probe": ("evaluation.probe.test_accuracy", ".4f"),
    "NMI": ("evaluation.specialisation.normalised", ".3f"),
    "effective rank": ("evaluation.effective_rank", ".1f"),
    "pixel MSE": ("evaluation.reconstruction.error", ".4f"),
    "Fréchet distance": ("evaluation.domains.joint.frechet.distance", ".1f"),
    "recognisable, all experts": ("evaluation.domains.joint.recognisability.share", ".1%"),
    "recognisable, one expert": ("evaluation.experts.recognisability.share", ".1%"),
    "purity": ("evaluation.experts.purity.mean", ".1%"),
    "variety": ("evaluation.experts.variety.mean", ".1%"),
    "negatives": ("evaluation.domains.restricted.negatives.share", ".1%"),
}
CLASS_COLUMNS = {
    "accuracy": ("evaluation.specialisation.accuracy", ".3f"),
    "NMI": ("evaluation.specialisation.normalised", ".3f"),
    "adjusted Rand index": ("evaluation.specialisation.adjusted_rand", ".3f"),
    "purity": ("evaluation.specialisation.purity", ".3f"),
    "k-means of firing, accuracy": ("evaluation.firing_clusters.accuracy", ".3f"),
    "k-means of firing, NMI": ("evaluation.firing_clusters.normalised", ".3f"),
    "linear probe": ("evaluation.probe.test_accuracy", ".4f"),
    "effective rank": ("evaluation.effective_rank", ".1f"),
    "recognisable, one expert": ("evaluation.experts.recognisability.share", ".1%"),
    "Fréchet distance": ("evaluation.domains.joint.frechet.distance", ".1f"),
    "training, s": ("training_seconds", ".0f"),
}
ROW_NAMES = {  # the rows of unchanged presets; any other row has the name of its variant
    "default": "default (preset, unchanged)",
    "paper": "paper (preset, unchanged)",
}


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate, and return the row."""
    o = job.options
    config = variants.with_filters(job.config({**STUDY, **CLASSES, **READINGS}), o)
    training, test = variants.load_images(o)
    with job.folder() as folder:
        network, trained = variants.train_and_time(config, folder, training)
        row = job.row(config) | trained | variants.protocol_of(o)
        if network is None:
            return row
        if selection := variants.read_selections(folder):
            row["selection"] = selection
        has_classifier = o.data.removesuffix("-sample") in CLASSIFIERS
        classifier = load_classifier(o.data) if has_classifier else None
        start = time.perf_counter()
        result = evaluate(
            network, training, test, classifier, samples=o.samples, device=device_of(network)
        )
        row["evaluation_seconds"] = round(time.perf_counter() - start, 2)
        if o.keep is not None:
            (folder / "evaluation.json").write_text(result.to_json() + "\n")
    return row | {"evaluation": json.loads(result.to_json())}


def table(rows: Sequence[Mapping[str, Any]], heading: str = "variant") -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    names = {name: ROW_NAMES.get(name, name) for name in STUDY}
    return variants.table(rows, names, COLUMNS, heading)


def class_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of `CLASSES` as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in CLASSES}, CLASS_COLUMNS, "experts")


def reading_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of `READINGS` as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in READINGS}, COLUMNS, "reading of the paper")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate the requested variants, or print a file as a table."""
    parser = variants.make_parser(__doc__, samples=10_000)
    parser.add_argument(
        "--classes", action="store_true", help="what makes experts into classes (see above)"
    )
    parser.add_argument(
        "--readings", action="store_true", help="readings of the paper's recipe (see above)"
    )
    variants.add_filters(parser)
    variants.add_protocol(parser)
    options = parser.parse_args(arguments)
    if options.classes:
        variants.run_study(parser, arguments, CLASSES, run, class_table)
    elif options.readings:
        variants.run_study(parser, arguments, READINGS, run, reading_table)
    else:
        variants.run_study(parser, arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
