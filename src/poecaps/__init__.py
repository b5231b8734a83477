"""Products of expert capsules: capsule networks trained without labels."""

from poecaps import data, functional, models
from poecaps._checks import check_capsules
from poecaps._files import ModelError
from poecaps.autoencoder import ConvAutoencoder
from poecaps.functional import Routing, routing_by_agreement, squash, unsquash
from poecaps.layer import CapsuleExperts
from poecaps.models import load
from poecaps.network import Architecture, CapsuleNetwork
from poecaps.training import TrainingError, resume, train

__version__ = "0.1.0"
__all__ = [
    "Architecture",
    "CapsuleExperts",
    "CapsuleNetwork",
    "ConvAutoencoder",
    "ModelError",
    "Routing",
    "TrainingError",
    "check_capsules",
    "data",
    "functional",
    "load",
    "models",
    "resume",
    "routing_by_agreement",
    "squash",
    "train",
    "unsquash",
]
