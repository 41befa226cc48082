"""The little that torch wants to know of CUDA before it makes a tensor there: answered without CUDA."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

_CUDA = 1
"""Place of CUDA among torch's kinds of device."""

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``."""


@contextmanager
def cuda_guard() -> Iterator[None]:
    """Let torch work with tensors that say they are on ``cuda:0``; its own kernels for them stay absent.

    A build of torch without CUDA knows nothing that selects a device, and refuses every view of a wrapped tensor. For
    traces of programs without a GPU torch has a guard that does nothing; it takes the place of one that finds no GPU.
    """
    name = {"linux": "libc10.so", "darwin": "libc10.dylib"}.get(sys.platform, "c10.dll")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, _REGISTRY)
    except (OSError, ValueError):
        pytest.skip("this build of torch does not say where its device guards are")
    before = guards[_CUDA]
    # All that is asked of it is how many GPUs there are; wherever that question is in its table, the answer is 0.
    answer = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p)(lambda _: 0)
    table = (ctypes.c_void_p * 64)(*[ctypes.cast(answer, ctypes.c_void_p)] * 64)
    nothing = ctypes.c_void_p(ctypes.addressof(table))
    if not before:
        guards[_CUDA] = ctypes.addressof(nothing)
    only_cpu = torch._C._only_lift_cpu_tensors()
    try:
        torch._C._ensureCUDADeviceGuardSet()
        assert guards[_CUDA] != ctypes.addressof(nothing)
        # `torch.tensor(..., device="cuda")` makes a tensor on the CPU, and moves it.
        torch._C._set_only_lift_cpu_tensors(True)
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(only_cpu)
        guards[_CUDA] = before
