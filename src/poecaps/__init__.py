"""Products of expert capsules: capsule networks trained without labels."""

from poecaps import data, functional, likelihood, models, sampling
from poecaps._checks import check_capsules
from poecaps._files import ModelError
from poecaps._graphs import graphed
from poecaps._version import __version__ as __version__
from poecaps.autoencoder import ConvAutoencoder
from poecaps.energy import CapsuleDensity
from poecaps.functional import Routing, routing_by_agreement, squash, unsquash
from poecaps.hub import from_pretrained, push_to_hub
from poecaps.layer import CapsuleExperts
from poecaps.models import load
from poecaps.network import CapsuleNetwork
from poecaps.options import Architecture
from poecaps.training import TrainingError, resume, train

__all__ = [
    "Architecture",
    "CapsuleDensity",
    "CapsuleExperts",
    "CapsuleNetwork",
    "ConvAutoencoder",
    "ModelError",
    "Routing",
    "TrainingError",
    "check_capsules",
    "data",
    "from_pretrained",
    "functional",
    "graphed",
    "likelihood",
    "load",
    "models",
    "push_to_hub",
    "resume",
    "routing_by_agreement",
    "sampling",
    "squash",
    "train",
    "unsquash",
]
