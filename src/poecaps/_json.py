"""Dataclasses from JSON: options that were saved beside weights are read back with their types."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def dataclass_from_json(cls: type[T], values: Any, *, defaults: bool = False) -> T:
    """Rebuild a dataclass from the JSON object of its fields.

    Nested dataclasses are rebuilt as well, and lists become tuples.

    Parameters
    ----------
    cls
        The dataclass.
    values
        The parsed JSON, as `dataclasses.asdict` gave it.
    defaults
        Whether a field that has a default may be missing, also in nested dataclasses.

    Raises
    ------
    ValueError
        If `values` is not an object, or if fields are unknown or missing.
    """
    known: dict[str, Field[Any]] = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
    required = {name for name, each in known.items() if not (defaults and _has_default(each))}
    if not isinstance(values, dict) or not required <= values.keys() <= known.keys():
        raise ValueError(
            f"{cls.__name__} must have the fields {', '.join(sorted(known))}, "
            f"but {_difference(values, required, known.keys())}"
        )
    hints = get_type_hints(cls)
    rebuilt = {
        name: dataclass_from_json(hints[name], value, defaults=defaults)
        if is_dataclass(hints[name])
        else _as_declared(hints[name], value)
        for name, value in values.items()
    }
    return cls(**rebuilt)


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number that a float can hold."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _difference(values: Any, required: set[str], known: Any) -> str:
    """Describe why values are not those of a dataclass."""
    if not isinstance(values, dict):
        return f"is a JSON {type(values).__name__}"
    missing, unknown = sorted(required - values.keys()), sorted(values.keys() - known)
    return f"{', '.join(missing)} is missing" if missing else f"{', '.join(unknown)} is unknown"


def _as_declared(hint: Any, value: Any) -> Any:
    """Return a value with the type of its field: JSON has lists, and no float that is whole."""
    if type(value) is int and (hint is float or float in get_args(hint)):
        with suppress(OverflowError):  # it is too large for any option
            return float(value)
    return _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
