"""What CUDA refuses, or does in an order that changes from run to run: rules about one operation and its arguments.

The operations whose result depends on the order of their threads are those that `torch.use_deterministic_algorithms`
names, also those for which it has another kernel: nobody switches it on here. Where only some arguments make the order
matter - two values that are added up at one place, or written to it - only those are refused.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Arguments = Mapping[str, Any]


class RefusedError(RuntimeError):
    """CUDA would refuse this operation, or its result would change from run to run."""


@dataclass(frozen=True)
class Operation:
    """What an operation's schema says.

    Attributes:
        name: the same in place and not: ``aten::index_add``.
        arguments: their names.
        written: those that it writes to.
        returned: for each result the argument that it is, or None.
        pointwise: True if numbers on the CPU may be among its arguments.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    returned: tuple[str | None, ...]
    pointwise: bool


@cache
def operation(func: Any) -> Operation:
    """Read an operation's schema."""
    schema = func._schema
    written = {
        tuple(sorted(each.alias_info.before_set)): each.name
        for each in schema.arguments
        if each.alias_info and each.alias_info.is_write
    }
    returned = [
        written[tuple(sorted(each.alias_info.before_set))] if each.alias_info and each.alias_info.is_write else None
        for each in schema.returns
    ]
    return Operation(
        schema.name.rstrip("_"),
        tuple(each.name for each in schema.arguments),
        frozenset(written.values()),
        tuple(returned),
        torch.Tag.pointwise in func.tags,
    )


def arguments_of(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names of the operation's schema; those that were left out are None."""
    names = operation(func).arguments
    found = dict.fromkeys(names)
    found.update(zip(names, args, strict=False))
    found.update(kwargs)
    return found


def _meets(index: Tensor | None) -> bool:
    """True if an index names a place twice."""
    return index is not None and len(index.unique()) < index.numel()


def _adds(given: Arguments) -> bool:
    """True if floats meet at one place along a dimension."""
    if not given["self"].dtype.is_floating_point:
        return False
    return _meets_along(given)


def _meets_along(given: Arguments) -> bool:
    index, size = given["index"], given["self"].shape
    if index.dim() <= 1:
        return _meets(index)
    dim = given["dim"] % len(size)
    places = list(torch.meshgrid(*(torch.arange(length) for length in index.shape), indexing="ij"))
    places[dim] = index
    return _meets(torch.stack([place.reshape(-1) for place in places], 1).unique(dim=0, return_inverse=True)[1])


def _puts(given: Arguments) -> bool:
    """True if values that differ are written to one place, or floats are added up at one."""
    x, indices, values = given["self"], given["indices"], given["values"]
    if given["accumulate"] and not x.dtype.is_floating_point:
        return False
    numbers = torch.arange(x.numel()).reshape(x.shape)
    places = numbers[tuple(slice(None) if index is None else index for index in indices)]
    values = values.expand(places.shape)
    if given["accumulate"]:
        return _meets(places.reshape(-1))
    written = x.clone().index_put_(indices, values)[tuple(slice(None) if one is None else one for one in indices)]
    return not torch.equal(torch.nan_to_num(written), torch.nan_to_num(values.to(written.dtype)))


def _reduces(given: Arguments) -> bool:
    return given["reduce"] in ("sum", "mean", "prod", "add", "multiply") and _adds(given)


UNORDERED: dict[str, Callable[[Arguments], bool]] = {
    "aten::bincount": lambda given: given["weights"] is not None,
    "aten::cumsum": lambda given: (given["dtype"] or given["self"].dtype).is_floating_point,
    "aten::histc": lambda given: True,
    "aten::index_add": _adds,
    "aten::index_copy": _meets_along,
    "aten::index_put": _puts,
    "aten::_index_put_impl": _puts,
    "aten::index_reduce": _adds,
    "aten::put": lambda given: _meets(given["index"]) or bool(given["accumulate"]),
    "aten::scatter": lambda given: given.get("src") is not None and _meets_along(given),
    "aten::scatter_add": _adds,
    "aten::scatter_reduce": _reduces,
}
"""Operation to when its result depends on the order of the threads; of an operation in place as of the other."""

UNORDERED_OVERLOADS = {aten.median.dim, aten.median.dim_values, aten.nanmedian.dim, aten.nanmedian.dim_values}
"""The median of all values has no place, and is always the same."""

ABSENT = {"aten::histogram", "aten::histogramdd", "aten::_histogramdd_from_bin_cts"}
"""Operations without a kernel for CUDA."""

LOOKED_AT = UNORDERED.keys() | ABSENT | {"aten::median", "aten::nanmedian"}
"""Operations that `check_order` can refuse."""

ELSEWHERE = {
    "aten::index": ("indices",),
    "aten::index_put": ("indices",),
    "aten::_index_put_impl": ("indices",),
    "aten::_unsafe_index": ("indices",),
}
"""Operation to arguments that may be on the CPU while the tensor is on the GPU, never the other way round."""

TAKES_NUMBERS = {
    "aten::fill": ("value",),
    "aten::index_fill": ("value",),
    "aten::index_put": ("values",),
    "aten::_index_put_impl": ("values",),
    "aten::masked_fill": ("value",),
    "aten::where": ("self", "other"),
}
"""Beside the pointwise operations: arguments that may be zero-dimensional tensors on the CPU."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument."""
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, list | tuple) else []


def check_places(func: Any, given: Arguments, on_device: Callable[[Tensor], bool]) -> None:
    """Refuse tensors of which some are on the CPU, except where CUDA's kernels take these.

    Raises:
        RefusedError: if the operation would be refused.
    """
    about = operation(func)
    name, written, pointwise = about.name, about.written, about.pointwise
    stray, numbers = [], 0
    for argument, value in given.items():
        for tensor in tensors_in(value):
            if on_device(tensor):
                continue
            if argument in ELSEWHERE.get(name, ()) and on_device(given["self"]):
                continue
            if tensor.dim() == 0 and argument not in written and argument in TAKES_NUMBERS.get(name, ()):
                continue
            if tensor.dim() == 0 and argument not in written and pointwise and numbers == 0:
                numbers += 1
            else:
                stray.append(argument)
    if stray:
        raise RefusedError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({func}: on the CPU {', '.join(stray)})"
        )


def check_order(func: Any, given: Arguments) -> None:
    """Refuse what CUDA has no kernel for, or none with a result that is always the same; arguments are on the CPU.

    Raises:
        RefusedError: if the operation would be refused, or must not be used.
    """
    name = operation(func).name
    if name in ABSENT:
        raise RefusedError(f"Could not run {func} with arguments from the 'CUDA' backend")
    if func in UNORDERED_OVERLOADS or (name in UNORDERED and UNORDERED[name](given)):
        raise RefusedError(f"{func} does not have a deterministic implementation on CUDA for these arguments")
