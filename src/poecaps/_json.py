"""Dataclasses from JSON."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def dataclass_from_json(cls: type[T], values: Any, *, defaults: bool = False) -> T:
    """Rebuild a dataclass from the JSON of `dataclasses.asdict`.

    Fields that are dataclasses are rebuilt as well, and JSON arrays become tuples. Only the names
    of the fields are checked, not their values.

    Parameters
    ----------
    cls
        The dataclass.
    values
        A JSON object with the fields of the dataclass.
    defaults
        Whether fields that have a default may be missing.

    Raises
    ------
    ValueError
        If `values` is not an object, or if fields are missing or unknown.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    required = {
        name
        for name, field in known.items()
        if not defaults or (field.default is MISSING and field.default_factory is MISSING)
    }
    if not isinstance(values, dict) or not required <= values.keys() <= known.keys():
        raise ValueError(f"{cls.__name__} must have the fields {', '.join(sorted(known))}")
    types = get_type_hints(cls)
    return cls(
        **{
            name: dataclass_from_json(types[name], value, defaults=defaults)
            if is_dataclass(types[name])
            else _as_tuples(value)
            for name, value in values.items()
        }
    )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
