"""Processors that compute right in another way, and such that compute wrong: what a GPU may be, and what it must not.

Each changes what the operations of a simulated GPU give; the CPU is left alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from simulated import device
from torch import Tensor

aten = torch.ops.aten

Run = Callable[..., Tensor]

ELEMENTARY = ("exp", "expm1", "log", "sigmoid")


def _off_by_ulps(run: Run, ulps: int, seed: int) -> Run:
    """Another library's function: every result is up to some ulps off, but 0 and 1 are exact."""

    def other(x: Tensor, *args: object) -> Tensor:
        found = run(x, *args)
        draw = torch.Generator().manual_seed(seed)
        off = torch.randint(-ulps, ulps + 1, found.shape, generator=draw).to(found.dtype)
        exact = (found == 0) | (found == 1) | ~found.isfinite()
        return found.copy_(torch.where(exact, found, found + off * torch.finfo(found.dtype).eps * found.abs()))

    return other


def _turned(x: Tensor, reduce: str, *, offsets: Tensor, **words: object) -> Tensor:
    """Sums of runs from their ends."""
    turned = len(x) - offsets.flip(0)
    return aten.segment_reduce.default(x.flip(0), reduce, offsets=turned, **words).flip(0)


@contextmanager
def instead(rewritten: dict[object, Run]) -> Iterator[None]:
    """Let operations of the device be others."""
    with pytest.MonkeyPatch.context() as patch:
        for operation, run in rewritten.items():
            patch.setitem(device._REWRITTEN, operation, run)
        yield


@contextmanager
def other_library(ulps: int = 2, seed: int = 0) -> Iterator[None]:
    """A GPU with another `exp`, and with sums in another order."""
    rewritten: dict[object, Run] = {aten.segment_reduce.default: _turned}
    for name in ELEMENTARY:
        for each in (getattr(aten, name).default, getattr(aten, f"{name}_").default):
            rewritten[each] = _off_by_ulps(each, ulps, seed)
    with instead(rewritten):
        yield


def _counts(x: Tensor) -> bool:
    """True of what is counted: with other lengths of rows an evaluation would not come to its end."""
    return bool((x == x.round()).all())


def _sum_with(change: Callable[[Tensor], Tensor]) -> Run:
    """Sums of runs that are changed afterwards."""

    def changed(x: Tensor, reduce: str, **words: object) -> Tensor:
        found = aten.segment_reduce.default(x, reduce, **words)
        return change(found) if reduce == "sum" and len(found) > 1 and not _counts(x) else found

    return changed


def _one_row(sums: Tensor) -> Tensor:
    found = sums.clone()
    found[int(sums.abs().nan_to_num().argmax())] *= 1 + 1e-3
    return found


def _nothing_in_one_row(sums: Tensor) -> Tensor:
    found = sums.clone()
    found[int(sums.abs().nan_to_num().argmax())] = torch.nan
    return found


def _swapped(sums: Tensor) -> Tensor:
    found = sums.clone()
    first, last = int(sums.argmin()), int(sums.argmax())
    found[first], found[last] = sums[last], sums[first]
    return found


def _in_float32(x: Tensor, reduce: str, *, offsets: Tensor, **words: object) -> Tensor:
    """A running total in float32, of which the sums of runs are differences."""
    if reduce != "sum" or _counts(x):
        return aten.segment_reduce.default(x, reduce, offsets=offsets, **words)
    total = torch.cat([torch.zeros(1), 1e3 + x.float().cumsum(0)])
    return total[offsets].diff().to(x.dtype)


def _lost_block(x: Tensor, *args: object, **words: object) -> Tensor:
    """The last tokens of a step are never worked on."""
    found = aten.exp.default(x)
    found[len(found) * 3 // 4 :] = 0.0
    return found


def _fast(x: Tensor, *args: object, **words: object) -> Tensor:
    """The approximate function of the hardware, of 2^-11 relative."""
    return aten.exp.default(x) * (1 + 2.0**-11)


FAULTS: dict[str, dict[object, Run]] = {
    "a row wrong by 1e-3": {aten.segment_reduce.default: _sum_with(_one_row)},
    "NaN in a row": {aten.segment_reduce.default: _sum_with(_nothing_in_one_row)},
    "rows swapped": {aten.segment_reduce.default: _sum_with(_swapped)},
    "a block lost": {aten.exp.default: _lost_block, aten.exp_.default: lambda x: x.copy_(_lost_block(x))},
    "sums in float32": {aten.segment_reduce.default: _in_float32},
    "an approximate exp": {aten.exp.default: _fast, aten.exp_.default: lambda x: x.copy_(_fast(x))},
}
"""What a GPU can do wrong, as the operations that do it."""
