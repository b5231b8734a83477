"""Unsupervised features for a logistic regression: expert capsules and scikit-learn's BernoulliRBM.

`python examples/sklearn_features.py` takes 5,000 of the digits that come with poecaps, learns 320
features with each of the two models without labels, and trains the same classifier on both kinds
of features and on the pixels. On one core of a busy machine it printed::

    pixels                     88.1% of 2000 test images, 8 s
    BernoulliRBM               89.1% of 2000 test images, 20 s
    expert capsules            91.4% of 2000 test images, 339 s
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import BernoulliRBM
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import poecaps
from poecaps.sklearn import CapsuleExpertsTransformer

if TYPE_CHECKING:
    import numpy as np

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", default="mnist-sample", help="or fashion-mnist-sample (default: mnist-sample)"
)
parser.add_argument("--images", type=int, default=5000, help="training images (default: 5000)")
parser.add_argument("--test", type=int, default=2000, help="test images (default: 2000)")
parser.add_argument(
    "--epochs", type=int, default=5, help="epochs of both the experts and the RBM (default: 5)"
)
parser.add_argument(
    "--filters", type=int, default=128, help="number of convolutional filters (default: 128)"
)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

train, test = (poecaps.data.load(options.data, split=split) for split in ("train", "test"))
assert train.labels is not None  # for the classifier only
assert test.labels is not None
X = train.images[: options.images, :, :, 0]  # (n, 28, 28), uint8
y = train.labels[: options.images]
X_test, y_test = test.images[: options.test, :, :, 0], test.labels[: options.test]

# Only the encoder is needed, so the stages of the decoders have no epochs.
capsules = CapsuleExpertsTransformer(
    n_experts=20,
    expert_dim=16,
    n_filters=options.filters,
    autoencoder_iter=3,
    n_iter=options.epochs,
    decoder_iter=0,
    pixel_decoder_iter=0,
    random_state=options.seed,
)
machine = BernoulliRBM(
    320, learning_rate=0.05, batch_size=50, n_iter=options.epochs, random_state=options.seed
)


def flat(images: np.ndarray) -> np.ndarray:
    """Return one row of pixels for each image, from 0 to 1."""
    return images.reshape(len(images), -1) / 255


def report(name: str, features: object, X: np.ndarray, X_test: np.ndarray) -> None:
    """Fit a pipeline and print the accuracy of its classifier."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    started = time.perf_counter()
    model = make_pipeline(features, classifier).fit(X, y)
    seconds = time.perf_counter() - started
    print(
        f"{name:24}{model.score(X_test, y_test):8.1%} of {len(y_test)} test images, "
        f"{seconds:.0f} s",
        flush=True,
    )


report("pixels", "passthrough", flat(X), flat(X_test))
report("BernoulliRBM", machine, flat(X), flat(X_test))
report("expert capsules", capsules, X, X_test)
