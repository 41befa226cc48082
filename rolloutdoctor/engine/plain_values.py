"""Plain values that JSON can write, and the dataclasses that they make up: numbers read back as they were."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin

MOST = 2**63
"""Whole numbers are below it."""


def record(value: Any) -> dict[str, object]:  # noqa: ANN401  # any dataclass
    """The fields of a dataclass; its mappings of other dataclasses are left to the caller."""
    return {one.name: plain(getattr(value, one.name)) for one in fields(value) if one.name != "config"}


def plain(value: object) -> object:
    """What JSON can write without losing anything; `value_of` turns it back.

    >>> plain((1, 0.1, float("nan")))
    {'tuple': [1, 0.1, {'float': 'nan'}]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [plain(one) for one in value]}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {"map": {str(name): plain(one) for name, one in value.items()}}
    raise TypeError(f"{type(value).__name__} cannot be kept in a state")


def value_of(plain: object) -> object:
    """Turn what `plain` made back.

    Raises:
        ValueError: if nothing could have been made into it.
    """
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError("a number is too large")
    if isinstance(plain, list):
        return [value_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(value_of(one) for one in inner)
    if kind == "map":
        return {name: value_of(one) for name, one in inner.items()}
    raise ValueError(f"unknown kind of value {kind!r}")


def built(kind: Callable[..., Any], plain: Mapping[str, object], **given: object) -> Any:  # noqa: ANN401  # a `kind`
    """The dataclass of these fields: all of them, and numbers where numbers belong.

    Raises:
        TypeError: if they are not the fields of the class.
    """
    found = {name: value_of(one) for name, one in plain.items()} | given
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass, called as what it makes
        if not _fits(found[one.name], one.type):
            raise TypeError(f"{one.name} is {found[one.name]!r}")
    return kind(**found)


def _fits(value: object, kind: object) -> bool:
    """Tell whether a value is of the type that a field is declared with; whole numbers are counts or steps."""
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) < MOST)
    if kind is int:
        return type(value) is int and 0 <= value < MOST
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, tuple):
        kinds = inner[:1] * len(value) if inner[-1:] == (Ellipsis,) else inner
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin is not None and isinstance(value, Mapping):
        return all(_fits(name, inner[0]) and _fits(one, inner[1]) for name, one in value.items())
    if origin is not None:
        return False
    return isinstance(value, kind) if isinstance(kind, type) else True
