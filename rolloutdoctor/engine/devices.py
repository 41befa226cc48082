"""Turn the names of a device and a dtype into torch's, and choose where a command computes."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rolloutdoctor.results.errors import DeviceError, DeviceWarning, UsageError

if TYPE_CHECKING:
    import torch

    from rolloutdoctor.engine.options import ReadOptions
    from rolloutdoctor.io.run import Run

    Options = TypeVar("Options", bound=ReadOptions)

Result = TypeVar("Result")

DTYPES = ("float32", "float64")

GPU_TOKENS = 20_000_000
"""Tokens from which ``auto`` takes a GPU: with fewer, starting it and copying each small step take longer."""


def gpu() -> "torch.device | None":
    """Return the GPU that torch finds, an NVIDIA or (ROCm) an AMD one; None if there is none."""
    import torch

    return torch.device("cuda") if torch.cuda.is_available() else None


def find_device(name: str) -> "torch.device":
    """Return the device of a name; ``auto``, where `on_device` has not chosen one, is the CPU.

    Raises:
        UsageError: if there is no such device.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"no device {name!r} (known: auto, cpu, cuda)")
    if name != "cuda":
        return torch.device("cpu")
    device = gpu()
    if device is None:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu, or auto")
    return device


def on_device(
    options: "Options", runs: "Sequence[Run]", command: "Callable[[Options], Result]", *, alone: bool = True
) -> Result:
    """Run a command with ``cpu`` or ``cuda`` in its options, as the user's ``device`` and the size of the runs say.

    With ``auto``, a command that a GPU fails begins again on the CPU: no result is of both.

    Args:
        options: of the command.
        runs: what it reads.
        command: is called with the options that name the device.
        alone: False if ``auto`` may not take a GPU: several processes would share it, or nothing can begin again.

    Raises:
        UsageError: if there is no such device.
        DeviceError: if a GPU was asked for, and fails or does not compute what the CPU computes.
    """
    if options.device != "auto":
        if options.device == "cuda" and alone and _has_rows(runs):
            _probe()
        return command(options)
    if not (alone and _is_large(options, runs) and gpu() is not None):
        return command(replace(options, device="cpu"))
    try:
        _probe()
        return command(replace(options, device="cuda"))
    except DeviceError as error:
        warnings.warn(DeviceWarning(f"{error.reason}; the CPU computes everything instead"), stacklevel=2)
    return command(replace(options, device="cpu"))


def _has_rows(runs: "Sequence[Run]") -> bool:
    return any(not run.metrics_only for run in runs)


def _is_large(options: "ReadOptions", runs: "Sequence[Run]") -> bool:
    """Tell whether the footers say that there are many tokens; what does not say is small."""
    sizes = [run.size(options.steps, options.split) for run in runs if not run.metrics_only and run.unit == "tokens"]
    return sum(sizes) >= GPU_TOKENS


def _probe() -> None:
    """Raise a `DeviceError` if the GPU does not take a small computation."""
    from rolloutdoctor.evaluation.device import probe

    probe(find_device("cuda"))


def find_dtype(name: str) -> "torch.dtype":
    """Return the type of token values of a name.

    Raises:
        UsageError: if it is none of them.
    """
    import torch

    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r} (known: {', '.join(DTYPES)})")
    return torch.float64 if name == "float64" else torch.float32
