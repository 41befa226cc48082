"""Turn the names of a device and a dtype into torch's."""

from typing import TYPE_CHECKING

from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float64")


def find_device(name: str) -> "torch.device":
    """Return the device of a name; ``auto`` is a GPU if there is one.

    Raises:
        UsageError: if there is no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UsageError(f"no device {name!r} (known: auto, cpu, cuda)")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu, or auto")
    return torch.device(name)


def find_dtype(name: str) -> "torch.dtype":
    """Return the type of token values of a name.

    Raises:
        UsageError: if it is none of them.
    """
    import torch

    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r} (known: {', '.join(DTYPES)})")
    return torch.float64 if name == "float64" else torch.float32
