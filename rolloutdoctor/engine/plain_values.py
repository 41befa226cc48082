"""Plain values that JSON can write, and the dataclasses that they make up: numbers read back as they were."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
    # What is frequent comes first.
    if type(plain) is float:
        if not math.isfinite(plain):
            raise ValueError("a number is too large")
        return plain
    if isinstance(plain, list):
        return [value_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "map":
        return {name: value_of(one) for name, one in inner.items()}
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(value_of(one) for one in inner)
    raise ValueError(f"unknown kind of value {kind!r}")


def built(kind: Callable[..., Any], plain: Mapping[str, object], **given: object) -> Any:  # noqa: ANN401  # a `kind`
    """The dataclass of these fields: all of them, and numbers where numbers belong.

    Raises:
        TypeError: if they are not the fields of the class.
    """
    found = {name: value_of(one) for name, one in plain.items()} | given
    for name, fits in _checks(kind):
        if not fits(found[name]):
            raise TypeError(f"{name} is {found[name]!r}")
    return kind(**found)


Check = Callable[[Any], bool]
"""Tells whether a value is of a type."""


@cache
def _checks(kind: "type[DataclassInstance]") -> tuple[tuple[str, Check], ...]:
    """The checks of the fields of a dataclass by their names: of one kind there are many."""
    return tuple((one.name, _check_of(one.type)) for one in fields(kind))


def _check_of(kind: object) -> Check:
    """Return the check of the type that a field is declared with; whole numbers are counts or steps."""
    if kind is float:
        return lambda value: type(value) is float or (type(value) is int and abs(value) < MOST)
    if kind is int:
        return lambda value: type(value) is int and 0 <= value < MOST
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, UnionType):
        either = [_check_of(one) for one in inner]
        return lambda value: any(fits(value) for fits in either)
    if origin is tuple:
        return _check_of_tuple(inner)
    if origin is not None and issubclass(origin, Mapping):
        of_name, of_value = map(_check_of, inner)
        return lambda value: (
            isinstance(value, Mapping) and all(map(of_name, value)) and all(map(of_value, value.values()))
        )
    if origin is not None:
        return lambda value: False
    return (lambda value: isinstance(value, kind)) if isinstance(kind, type) else (lambda value: True)


def _check_of_tuple(kinds: tuple[object, ...]) -> Check:
    if kinds[-1:] == (Ellipsis,):
        every = _check_of(kinds[0])
        return lambda value: isinstance(value, tuple) and all(map(every, value))
    each = [_check_of(one) for one in kinds]
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(each)
        and all(fits(one) for fits, one in zip(each, value, strict=True))
    )
