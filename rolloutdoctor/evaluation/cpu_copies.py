"""Copies on the CPU of what was computed on a device: the only place where the values of a step leave it.

Rules, tables, pictures and comparisons see a step on the CPU alone. Small tensors are copied together, because each
copy waits for the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.evaluation.rows import RowResult
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums
from rolloutdoctor.formulas.losses.aggregation import Layout

TOGETHER = 2**16
"""Values of a tensor that is copied with others, at most: to join larger ones would take memory of the device."""

_RECORDS = (RowResult, TokenSums, Layout, PerToken)


def cpu_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with every tensor on the CPU; a tensor that two of them share is shared by the copies.

    Args:
        values: tensors, mappings of these, results of the two passes of an evaluation, or None.
    """
    tensors: dict[int, Tensor] = {}
    _collect(values, tensors)
    copies: dict[int, Any] = _copied(tensors)
    rebuilt: dict[str, Any] = _rebuilt(dict(values), copies)
    return rebuilt


def _collect(value: object, tensors: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors[id(value)] = value
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, tensors)
    elif isinstance(value, _RECORDS):
        for field in fields(value):
            _collect(getattr(value, field.name), tensors)


def _copied(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy tensors to the CPU, by their identity."""
    copies: dict[int, Tensor] = {}
    small: dict[torch.dtype, list[int]] = {}
    for key, x in tensors.items():
        if x.device.type == "cpu" or x.numel() > TOGETHER:
            copies[key] = x.cpu()
        else:
            small.setdefault(x.dtype, []).append(key)
    for keys in small.values():
        copies.update(zip(keys, _copied_together([tensors[key] for key in keys]), strict=True))
    return copies


def _copied_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one type in one transfer."""
    joined = torch.cat([x.reshape(-1) for x in tensors]).cpu()
    # Views of one memory cannot be told from tensors that overlap by who writes in place.
    parts = torch.split(joined, [x.numel() for x in tensors])
    return [part.clone().view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _rebuilt(value: Any, copies: dict[int, Any]) -> Any:  # noqa: ANN401 - what it was given
    """Return a value with the copies in place of its tensors; a record that comes twice is rebuilt once."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Mapping):
        return {key: _rebuilt(each, copies) for key, each in value.items()}
    if isinstance(value, _RECORDS):
        parts = {field.name: _rebuilt(getattr(value, field.name), copies) for field in fields(value)}
        copies[id(value)] = replace(value, **parts)
        return copies[id(value)]
    return value
