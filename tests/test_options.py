"""Options of the model: invalid ones are named, and they survive JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from poecaps._json import dataclass_from_json
from poecaps.options import Architecture, ModelOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": 0}, "model.features must be a whole number from 1 to 1048576, but is 0"),
        ({"capsule_dim": 3}, "model.features must be a multiple of capsule_dim, but 128 is not"),
        ({"experts": ()}, "model.experts must be one or more pairs"),
        ({"experts": ((3,),)}, "model.experts must be one or more pairs"),
        ({"experts": ((3, 0),)}, "every number of model.experts must be a whole number"),
        ({"dropout": 1.0}, "model.dropout must be below 1, but is 1.0"),
        ({"scale": 0.0}, "model.scale must be above 0, or None"),
        ({"sharpness": -1.0}, "model.sharpness must be a finite number of at least 0"),
        ({"equalized_components": -1}, "model.equalized_components must be a whole number"),
        ({"normalize": "input"}, "model.normalize must be one of .* did you mean 'inputs'"),
        ({"agreement": "dot"}, "model.agreement must be one of"),
        ({"winners": 21}, "model.winners must be a whole number from 1 to 20, but is 21"),
        ({"joint_components": 0}, "model.joint_components must be"),
        ({"image_shape": (28, 28)}, r"model.image_shape must be \(C, H, W\), but is \(28, 28\)"),
        ({"image_shape": (1, 28, 0)}, "every number of model.image_shape must be"),
    ],
)
def test_an_invalid_option_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Architecture(), **changes).validate("model.")


def test_the_defaults_are_valid() -> None:
    ModelOptions().validate()
    Architecture().validate()


def test_an_architecture_survives_json() -> None:
    architecture = Architecture(experts=((40, 8), (20, 16)), scale=None, image_shape=(3, 32, 30))
    values = json.loads(json.dumps(asdict(architecture)))
    assert dataclass_from_json(Architecture, values) == architecture


@dataclass(frozen=True)
class Inner:
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Outer:
    required: int
    inner: Inner = field(default_factory=Inner)


def test_nested_dataclasses_and_tuples_are_rebuilt() -> None:
    outer = Outer(3, Inner(((1, 2), (3, 4))))
    assert dataclass_from_json(Outer, json.loads(json.dumps(asdict(outer)))) == outer


@pytest.mark.parametrize("values", [[], None, 3, {"required": 1}, {"inner": {"sizes": []}}])
def test_missing_fields_raise_an_error(values: Any) -> None:
    with pytest.raises(ValueError, match="Outer must have the fields inner, required"):
        dataclass_from_json(Outer, values)


def test_fields_may_be_missing_that_have_a_default_if_that_is_allowed() -> None:
    assert dataclass_from_json(Outer, {"required": 1}, defaults=True) == Outer(1)
    assert dataclass_from_json(Outer, {"required": 1, "inner": {}}, defaults=True) == Outer(1)
    with pytest.raises(ValueError, match="Inner must have the fields sizes, but sizes is missing"):
        dataclass_from_json(Outer, {"required": 1, "inner": {}})
    with pytest.raises(ValueError, match="required is missing"):
        dataclass_from_json(Outer, {}, defaults=True)


@pytest.mark.parametrize("defaults", [True, False])
def test_unknown_fields_raise_an_error(defaults: bool) -> None:
    values = {"required": 1, "inner": {"sizes": []}, "surprise": 2}
    with pytest.raises(ValueError, match="surprise is unknown"):
        dataclass_from_json(Outer, values, defaults=defaults)
    nested = {"required": 1, "inner": {"sizes": [], "surprise": 2}}
    with pytest.raises(ValueError, match="Inner must have the fields sizes, but surprise"):
        dataclass_from_json(Outer, nested, defaults=defaults)
