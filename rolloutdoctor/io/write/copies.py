"""Values of a training loop as NumPy arrays of their own, so that the loop can go on using the originals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def copied(value: object) -> Any:  # noqa: ANN401 - an array, or a list or mapping of the like
    """Copy tensors and arrays to the CPU, whatever they are nested in; floats below 32 bits become float32."""
    if hasattr(value, "detach"):
        tensor = value.detach().to("cpu", copy=True)
        return (tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor).numpy()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {str(name): copied(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [copied(each) for each in value]
    return value
