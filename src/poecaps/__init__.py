"""Products of expert capsules: capsule networks trained without labels."""

from poecaps import data, functional
from poecaps._checks import check_capsules
from poecaps.functional import Routing, routing_by_agreement, squash, unsquash
from poecaps.layer import CapsuleExperts

__version__ = "0.1.0"
__all__ = [
    "CapsuleExperts",
    "Routing",
    "check_capsules",
    "data",
    "functional",
    "routing_by_agreement",
    "squash",
    "unsquash",
]
