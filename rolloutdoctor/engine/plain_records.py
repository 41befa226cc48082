"""Nested dataclasses, mappings and tuples as plain values that JSON can write, and back."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.engine.plain_values import plain, value_of


def frozen(value: Any) -> Any:  # noqa: ANN401  # any JSON
    """What JSON can write; equal values give equal ones.

    >>> frozen({(1, "train"): [float("inf")]})
    {'pairs': [[{'tuple': [1, 'train']}, [{'float': 'inf'}]]]}
    """
    if isinstance(value, StepKey):
        return {"step": [value.step, value.split]}
    if is_dataclass(value):
        return {type(value).__name__: {one.name: frozen(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, Mapping):
        return {"pairs": [[frozen(key), frozen(one)] for key, one in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [frozen(one) for one in value]}
    if isinstance(value, list):
        return [frozen(one) for one in value]
    return plain(value)


def thawed(value: Any, kinds: Mapping[str, Callable[..., Any]]) -> Any:  # noqa: ANN401  # any JSON
    """Turn what `frozen` made back.

    Args:
        value: what it made.
        kinds: the dataclasses that there may be, by name.

    Raises:
        KeyError, TypeError, ValueError: if it made no such thing.
    """
    if isinstance(value, list):
        return [thawed(one, kinds) for one in value]
    if not isinstance(value, dict):
        return value_of(value)
    ((kind, inner),) = value.items()
    if kind == "step":
        return StepKey(*inner)
    if kind == "pairs":
        return {thawed(key, kinds): thawed(one, kinds) for key, one in inner}
    if kind == "tuple":
        return tuple(thawed(one, kinds) for one in inner)
    if kind == "float":
        return value_of(value)
    return kinds[kind](**{name: thawed(one, kinds) for name, one in inner.items()})
