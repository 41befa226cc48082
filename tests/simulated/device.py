"""A device that behaves like a GPU as far as a CPU can: what CUDA refuses is refused here too.

A tensor of this device wraps one on the CPU and says, to torch's own code as well, that it is on ``cuda:0``. Every
operation passes through `_run`, which sees to it that devices do not mix, that nothing depends on the order of threads,
and that the host is not asked for values unnoticed.

What such a device cannot show: how CUDA's kernels round and in which order they add up, errors that come later than
the call that made them, how much memory there is, and how long anything takes.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from simulated.guard import cuda_guard
from simulated.refusals import LOOKED_AT, RefusedError, arguments_of, check_order, check_places, operation
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_TO_NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)

WAITS: Counter[str] = Counter()
"""Operation and line of the package to how often the host waited there for values of the device."""

_SIZED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten._unique2.default}
_SIZED_BY_VALUES |= {aten.unique_consecutive.default, aten.unique_dim.default, aten.equal.default}


_WAITS_FOR = {func._schema.name for func in _SIZED_BY_VALUES}
_WAITS_FOR |= {"aten::index", "aten::index_put", "aten::_index_put_impl", "aten::repeat_interleave"}


class SimulatedTensor(Tensor):
    """A tensor of the simulated device.

    Attributes:
        on_host: its values.
    """

    on_host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_host: Tensor) -> "SimulatedTensor":
        return Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device="cuda:0",
        )

    def __init__(self, on_host: Tensor) -> None:
        self.on_host = on_host

    def __repr__(self, **kwargs: object) -> str:
        return f"simulated {self.on_host!r}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if not force:
            raise TypeError(_TO_NUMPY)
        return self.cpu().numpy()

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise TypeError(_TO_NUMPY)

    def __dlpack__(self, **kwargs: object) -> object:
        raise TypeError("the memory of a CUDA tensor cannot be read here")

    def tolist(self) -> Any:
        _wait("tolist")
        return self.on_host.tolist()


def _is_there(tensor: Tensor) -> bool:
    return isinstance(tensor, SimulatedTensor)


def _values(value: Any) -> Any:
    """An argument as it is on the CPU."""
    if isinstance(value, SimulatedTensor):
        return value.on_host
    return [_values(each) for each in value] if isinstance(value, list | tuple) else value


def _wrapped(value: Any) -> Any:
    """A result as it is on the device."""
    if isinstance(value, Tensor):
        return SimulatedTensor(value)
    if isinstance(value, tuple):
        values = map(_wrapped, value)
        return type(value)(values) if hasattr(value, "n_fields") else tuple(values)
    return list(map(_wrapped, value)) if isinstance(value, list) else value


def _wait(what: str) -> None:
    """Note that the host waits for the device, and where in the package it does."""
    frame = sys._getframe()
    while frame is not None and "/rolloutdoctor/" not in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_filename.rpartition('rolloutdoctor')[2]}:{frame.f_lineno}"
    WAITS[f"{what} {where}"] += 1


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do one operation on the values, or refuse it."""
    if func in _SPECIAL:
        return _SPECIAL[func](arguments_of(func, args, kwargs))
    tensors = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, Tensor)]
    there, to = any(map(_is_there, tensors)), kwargs.get("device")
    if not there and (to is None or to.type == "cpu"):
        return func(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        func(*map(_values, args), **kwargs)
        with no_dispatch():
            return func(*args, **kwargs)
    if there and not all(map(_is_there, tensors)):
        check_places(func, arguments_of(func, args, kwargs), _is_there)
    name = operation(func).name
    if there and name in LOOKED_AT:
        check_order(func, arguments_of(func, map(_values, args), {key: _values(kwargs[key]) for key in kwargs}))
    if there and name in _WAITS_FOR:
        _note_waits(func, arguments_of(func, args, kwargs))
    words = {key: _values(value) for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if to is not None:
        words["device"] = torch.device("cpu")
    found = _REWRITTEN.get(func, func)(*map(_values, args), **words)
    if to is not None and to.type == "cpu":
        return found
    wrapped, returned = _wrapped(found), operation(func).returned
    if not any(returned):
        return wrapped
    # An operation that writes to an argument returns this very argument.
    given = arguments_of(func, args, kwargs)
    values = wrapped if isinstance(wrapped, tuple) else (wrapped,)
    objects = [value if key is None else given[key] for key, value in zip(returned, values, strict=True)]
    return objects[0] if len(objects) == 1 else tuple(objects)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _note_waits(func: Any, given: Mapping[str, Any]) -> None:
    masks = [each for each in given.get("indices") or () if isinstance(each, Tensor) and each.dtype == torch.bool]
    unsized = func is aten.repeat_interleave.Tensor and given["output_size"] is None
    if func in _SIZED_BY_VALUES or unsized or any(map(_is_there, masks)):
        _wait(func._schema.name.removeprefix("aten::"))


def _to_copy(given: Mapping[str, Any]) -> Tensor:
    x, to = given["self"], given["device"] or given["self"].device
    memory = {name: given[name] for name in ("dtype", "layout", "memory_format") if given[name] is not None}
    if _is_there(x) and to.type == "cpu":
        if given["non_blocking"]:
            raise RefusedError("a copy to the CPU that nobody waits for can be read before it is there")
        _wait("to the CPU")
    found = aten._to_copy.default(_values(x), **memory)
    return SimulatedTensor(found) if to.type == "cuda" else found


def _copy(given: Mapping[str, Any]) -> Tensor:
    target, source = given["self"], given["src"]
    if _is_there(source) and not _is_there(target):
        if given["non_blocking"]:
            raise RefusedError("a copy to the CPU that nobody waits for can be read before it is there")
        _wait("to the CPU")
    _values(target).copy_(_values(source))
    return target


def _number(given: Mapping[str, Any]) -> Any:
    if _is_there(given["self"]):
        _wait("item")
    return aten._local_scalar_dense.default(_values(given["self"]))


def _pin(given: Mapping[str, Any]) -> Tensor:
    if _is_there(given["self"]):
        raise RefusedError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    pinned = given["self"].clone()
    pinned.is_in_pinned_memory = True
    return pinned


def _is_pinned(given: Mapping[str, Any]) -> bool:
    return getattr(given["self"], "is_in_pinned_memory", False)


_SPECIAL: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _number,
    aten._pin_memory.default: _pin,
    aten.is_pinned.default: _is_pinned,
}


def _garbage(empty: Tensor) -> Tensor:
    """Memory as it is found: nothing that a result could be made of."""
    return empty.fill_(torch.nan if empty.dtype.is_floating_point else True if empty.dtype == torch.bool else -77)


def _any_order(values: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort without a promise about equal values: here the last comes first."""
    if not values.dim():
        return values.clone(), torch.zeros((), dtype=torch.int64)
    found, places = torch.sort(values.flip(dim), stable=True, dim=dim, descending=descending)
    return found, values.shape[dim] - 1 - places


def _sort_stable(
    values: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    if stable:
        return torch.sort(values, stable=True, dim=dim, descending=descending)
    return _any_order(values, dim, descending)


def _top(
    values: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Tensor, Tensor]:
    found, places = _any_order(values, dim, largest)
    return found.narrow(dim, 0, k).clone(), places.narrow(dim, 0, k).clone()


_REWRITTEN: dict[Any, Callable[..., Any]] = {
    aten.empty.memory_format: lambda *args, **kwargs: _garbage(aten.empty.memory_format(*args, **kwargs)),
    aten.empty_like.default: lambda *args, **kwargs: _garbage(aten.empty_like.default(*args, **kwargs)),
    aten.empty_strided.default: lambda *args, **kwargs: _garbage(aten.empty_strided.default(*args, **kwargs)),
    aten.new_empty.default: lambda *args, **kwargs: _garbage(aten.new_empty.default(*args, **kwargs)),
    aten.sort.default: _any_order,
    aten.sort.stable: _sort_stable,
    aten.topk.default: _top,
}
"""Operations that leave something open, which turns out differently than on the CPU."""


@cache
def _is_made_of_others(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


class _Everywhere(TorchDispatchMode):
    """Sees the operations without a tensor of the device, which can make one."""


def _everywhere(
    mode: _Everywhere,
    func: Any,
    types: Collection[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    kwargs = kwargs or {}
    if torch.is_inference_mode_enabled() and _is_made_of_others(func):
        # In any other mode autograd has taken it apart before it comes here.
        with mode:
            return func.decompose(*args, **kwargs)
    if SimulatedTensor not in types and func not in _SPECIAL and kwargs.get("device") is None:
        return func(*args, **kwargs)
    return _run(func, args, kwargs)


# The wrapper of modes would load torch's compiler.
_Everywhere.__torch_dispatch__ = _everywhere


@contextmanager
def simulated_device() -> Iterator[None]:
    """Give torch, in this thread, one GPU that is simulated."""
    with pytest.MonkeyPatch.context() as patch, cuda_guard():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        # Too old a GPU for kernels of Triton, which know nothing of a simulation.
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        WAITS.clear()
        with _Everywhere():
            yield
