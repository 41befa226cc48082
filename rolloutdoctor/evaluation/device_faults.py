"""Faults of a GPU: torch raises them as several classes, and some are known by their words alone."""

import re
from dataclasses import dataclass

import torch

_WORDS = re.compile(r"\b(?:CUDA|HIP|ROCm|NVIDIA|cu(?:BLAS|DNN|SPARSE|SOLVER|RAND|FFT)|hip[A-Z]\w+)", re.IGNORECASE)
_MEMORY = re.compile(r"out of memory|memory allocation|ALLOC_FAILED", re.IGNORECASE)
# torch.AcceleratorError came after the oldest torch that is supported.
_ALWAYS = (torch.cuda.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
# A build of torch without CUDA raises AssertionError, and a tensor of a device that is read on the CPU TypeError.
_BY_WORDS = (RuntimeError, AssertionError, TypeError)


@dataclass(frozen=True)
class DeviceFault:
    """Why a device did not finish its work.

    Attributes:
        words: first line of what torch says.
        out_of_memory: True if the memory of the device was full.
    """

    words: str
    out_of_memory: bool

    @property
    def sentence(self) -> str:
        """The fault as the end of a sentence about the GPU."""
        return "ran out of memory" if self.out_of_memory else f"failed ({self.words})"


def device_fault(error: BaseException) -> DeviceFault | None:
    """Return the fault of a device that an exception reports; None: it is about something else.

    >>> device_fault(RuntimeError("CUDA error: out of memory")).sentence
    'ran out of memory'
    >>> device_fault(RuntimeError("HIP error: no kernel image is available")).sentence
    'failed (HIP error: no kernel image is available)'
    >>> device_fault(RuntimeError("shape [2] is invalid")) is None
    True
    """
    text = str(error)
    if not isinstance(error, _ALWAYS) and not (isinstance(error, _BY_WORDS) and _WORDS.search(text)):
        return None
    words = next(iter(text.strip().splitlines()), "") or type(error).__name__
    return DeviceFault(words.rstrip(". "), isinstance(error, torch.cuda.OutOfMemoryError) or bool(_MEMORY.search(text)))
