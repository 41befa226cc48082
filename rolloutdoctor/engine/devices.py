"""Turn the names of a device, a kernel and a dtype into what evaluates steps."""

import torch

from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.evaluation.cuda.fused import KERNELS, why_not
from rolloutdoctor.evaluation.gpu_check.first_step import Evaluator
from rolloutdoctor.results.errors import UsageError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def find_device(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is a GPU if there is one.

    Raises:
        UsageError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UsageError(f"no device {name!r} (known: auto, cpu, cuda)")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu, or auto")
    return torch.device(name)


def find_evaluator(options: ReadOptions) -> Evaluator:
    """Return what evaluates steps under some options.

    Raises:
        UsageError: if there is no such device or kernel, or the kernel cannot run on the device.
    """
    device = find_device(options.device)
    if options.kernel not in KERNELS:
        raise UsageError(f"no kernel {options.kernel!r} (known: {', '.join(KERNELS)})")
    why = why_not(device) if options.kernel == "triton" else None
    if why is not None:
        raise UsageError(f"--kernel triton: {why}; use --kernel torch")
    return Evaluator(device, options.kernel)


def find_dtype(name: str) -> torch.dtype:
    """Return the type of token values of a name.

    Raises:
        UsageError: if it is none of them.
    """
    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r} (known: {', '.join(DTYPES)})")
    return DTYPES[name]
