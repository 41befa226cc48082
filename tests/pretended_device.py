"""A device that says that it is a GPU and computes on the CPU.

It refuses what a GPU refuses: tensors of two devices in one operation, and numpy's view of its memory. It may round
`exp`, `log` and `sqrt` otherwise than the CPU, by up to two ulps, and run out of memory at a chosen allocation.

It is a backend of torch in Python: a tensor that wraps one of the CPU and takes every operation on it, and two modes
for what makes tensors of the device, which hold for the thread that enters it.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from rolloutdoctor.engine import devices
from rolloutdoctor.evaluation import device

NAME = "pretended"


class _NoModule(_DummyBackendModule):
    """What `torch.pretended` says of the device: there is none, for whoever looks for one.

    A backend stays registered until the process ends, and the trainings of other tests run in that process.
    """

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _NoHook(_DummyPrivateUse1Hook):
    """The same for what torch asks in C++."""

    def is_available(self) -> bool:
        return False


_setup_privateuseone_for_python_backend(NAME, backend_module=_NoModule(), hook=_NoHook())

DEVICE = torch.device(NAME, 0)

aten = torch.ops.aten

TWO_DEVICES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations that CUDA takes tensors of the CPU in: copies, and indices."""

WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
"""Operations for which the CPU waits until a GPU is done."""

ROUNDED = {
    aten.exp.default,
    aten.exp_.default,
    aten.expm1.default,
    aten.log.default,
    aten.log_.default,
    aten.log1p.default,
    aten.sqrt.default,
    aten.sqrt_.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.rsqrt.default,
}
"""Functions that libraries compute to within two ulps."""

FullError = Callable[[int], Exception]


def out_of_memory(size: int) -> Exception:
    """Return what torch raises when an allocation fails."""
    return torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 is full.")


def unclassed_out_of_memory(size: int) -> Exception:
    """Return what libraries of CUDA raise through torch, without a class of its own."""
    return RuntimeError(f"CUDA error: out of memory ({size} bytes)\nCUDA kernel errors might be reported later.")


def broken(size: int) -> Exception:
    """Return what torch raises after a kernel that failed."""
    return RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA.")


def broken_amd(size: int) -> Exception:
    """Return the same of ROCm."""
    return RuntimeError("HIP error: no kernel image is available for execution on the device")


@dataclass
class Behaviour:
    """How the device departs from the CPU, and what it was asked for.

    Attributes:
        ulps: how far results of `ROUNDED` are moved at most.
        fails_at: number of the allocation that fails, from 1; 0: none.
        capacity: bytes that are allocated at a time, at most; None: any.
        error: makes the exception of one that fails.
        allocations: how many there were.
        failures: how many of them failed.
        held: bytes that are allocated now.
        peak: bytes that were allocated at a time, at most.
        operations: name to how often it was run.
        waits: name to how often the CPU had to wait.
    """

    ulps: int = 0
    fails_at: int = 0
    capacity: int | None = None
    error: FullError = out_of_memory
    allocations: int = 0
    failures: int = 0
    held: int = 0
    peak: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def allocate(self, x: Tensor) -> None:
        """Count an allocation, and fail if this is the one."""
        self.allocations += 1
        is_full = self.capacity is not None and self.held + x.nbytes > self.capacity
        if is_full or self.allocations == self.fails_at:
            self.failures += 1
            raise self.error(x.nbytes)
        self.held += x.nbytes
        self.peak = max(self.peak, self.held)

    def free(self, size: int) -> None:
        """Give memory back."""
        self.held -= size

    def rounded(self, x: Tensor) -> Tensor:
        """Move values by up to `ulps`, equal ones alike; 0, 1, infinities and NaN stay."""
        if not self.ulps or not x.is_floating_point():
            return x
        values = np.atleast_1d(x.contiguous().numpy())
        bits = values.view(f"u{values.itemsize}").astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        steps = (bits >> np.uint64(40)).astype(np.int64) % (2 * self.ulps + 1) - self.ulps
        steps[~np.isfinite(values) | (values == 0) | (values == 1)] = 0
        for _ in range(self.ulps):
            ahead = np.nextafter(values, np.where(steps > 0, np.inf, -np.inf).astype(values.dtype))
            values = np.where(steps == 0, values, ahead).astype(values.dtype)
            steps -= np.sign(steps)
        return torch.from_numpy(values).reshape(x.shape)


_behaviours: list[Behaviour] = []


class DeviceTensor(torch.Tensor):
    """A tensor that says that it lies on the device.

    Attributes:
        memory: the tensor of the CPU that it wraps.
    """

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> Self:
        """Wrap a tensor of the CPU."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=DEVICE,
            requires_grad=memory.requires_grad,
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({self.memory})"

    def tolist(self) -> Any:
        """Copy to a list, which waits for the device."""
        _behaviours[-1].waits["tolist"] += 1
        return self.memory.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, as torch does for CUDA."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args: Any, **kwargs: Any) -> None:
        self.numpy()


def _is_ours(device: object) -> bool:
    if device is None or isinstance(device, Tensor):
        return False
    try:
        return torch.device(device).type == NAME
    except (RuntimeError, TypeError):
        return False


def _mapped(change: Callable[[Tensor], object], x: Any) -> Any:
    """Return arguments or results with every tensor changed; torch's own way takes ten times as long."""
    if isinstance(x, Tensor):
        return change(x)
    return type(x)(_mapped(change, each) for each in x) if type(x) in (list, tuple) else x


def _placed(x: Tensor, before: Mapping[int, DeviceTensor]) -> DeviceTensor:
    """Wrap a result; an operation that returns its argument, or a view of it, allocates nothing."""
    if id(x) in before:
        return before[id(x)]
    behaviour, pointers = _behaviours[-1], {each.memory.untyped_storage().data_ptr() for each in before.values()}
    if x.untyped_storage().data_ptr() in pointers:
        return DeviceTensor(x)
    behaviour.allocate(x)
    made = DeviceTensor(x)
    weakref.finalize(made, behaviour.free, x.nbytes)
    return made


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the memory of its tensors, and place the results."""
    behaviour, name = _behaviours[-1], str(function)
    ours: list[DeviceTensor] = []
    of_cpu: list[Tensor] = []

    def memory(x: Tensor) -> Tensor:
        if isinstance(x, DeviceTensor):
            ours.append(x)
            return x.memory
        if x.dim() > 0:
            of_cpu.append(x)
        return x

    given = _mapped(memory, args)
    more = {key: _mapped(memory, value) for key, value in kwargs.items()}
    if ours and of_cpu and function not in TWO_DEVICES:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )
    device = kwargs.get("device")
    behaviour.operations[name] += 1
    if function in WAITS:
        behaviour.waits[name] += 1
    if device is not None:
        more["device"] = torch.device("cpu")
    result = function(*given, **more)
    if function is aten.copy_.default:
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    if device is not None and torch.device(device).type == "cpu":
        behaviour.waits["to the CPU"] += 1
        return result
    if function is aten._local_scalar_dense.default:
        return result
    if function in ROUNDED and isinstance(result, Tensor):
        moved = behaviour.rounded(result)
        result = result.copy_(moved) if name.split(".")[1].endswith("_") else moved
    before = {id(x.memory): x for x in ours}
    return _mapped(lambda x: _placed(x, before), result)


class _Numbers(TorchDispatchMode):
    """Makes the tensors of one number that torch itself puts on the device: they hang on no argument."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return _run(function, args, kwargs) if types or _is_ours(kwargs.get("device")) else function(*args, **kwargs)


class _Factories(TorchFunctionMode):
    """Makes tensors of the device by functions that torch would look for it in before any operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.to:
            target = kwargs.get("device", args[1] if len(args) > 1 else None)
            if isinstance(target, str | torch.device) and _is_ours(target):
                return args[0] if isinstance(args[0], DeviceTensor) else _placed(args[0].clone(), {})
        if function is torch.Tensor.pin_memory:
            raise RuntimeError("CUDA error: cannot lock memory")
        if function is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            return _placed(args[0].memory.new_tensor(*args[1:], **kwargs), {})
        if function in (torch.as_tensor, torch.tensor) and args and isinstance(args[0], DeviceTensor):
            memory = args[0].memory.clone() if kwargs.get("dtype") is None else args[0].memory.to(kwargs["dtype"])
            is_cpu = kwargs.get("device") is not None and not _is_ours(kwargs["device"])
            return memory if is_cpu else _placed(memory, {})
        if _is_ours(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
            made = function(*args, **kwargs)
            is_made = isinstance(made, Tensor) and not isinstance(made, DeviceTensor)
            return _placed(made, {}) if is_made else made
        return function(*args, **kwargs)


@contextmanager
def pretended_device(**how: Any) -> Iterator[Behaviour]:
    """Let this thread use the device.

    Args:
        how: fields of `Behaviour`.

    Yields:
        The behaviour, with its counts.
    """
    with _entered(Behaviour(**how)) as behaviour:
        yield behaviour


@contextmanager
def _entered(behaviour: Behaviour) -> Iterator[Behaviour]:
    _behaviours.append(behaviour)
    try:
        with _Factories(), _Numbers():
            yield behaviour
    finally:
        _behaviours.pop()


@contextmanager
def pretended_gpu(monkeypatch: Any, **how: Any) -> Iterator[Behaviour]:
    """Let commands find the device as a GPU; only the evaluation of a step may touch it.

    Args:
        monkeypatch: pytest's.
        how: fields of `Behaviour`.

    Yields:
        The behaviour, with its counts.
    """
    behaviour = Behaviour(**how)

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with _entered(behaviour):
                return function(*args, **kwargs)

        return inner

    with monkeypatch.context() as patched:
        patched.setattr(devices, "gpu", lambda: DEVICE)
        patched.setattr(device.Evaluator, "_attempt", inside(device.Evaluator._attempt))
        patched.setattr(device, "probe", inside(device.probe))
        yield behaviour
