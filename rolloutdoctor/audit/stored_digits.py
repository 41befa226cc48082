"""Digits lost in storing: columns stored in bfloat16, or with few digits, of values that the trainer had in full."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.ops.elementwise import unwarned
from rolloutdoctor.ops.logged_digits import Digits

LOG_PROBS = ("policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")

SOME, STRONG = 8.0, 64.0
"""Bits of evidence that values were rounded: minus the binary logarithm of the chance that float32 numbers are not."""

_LOOKED_AT = 2**14
"""Values that are looked at."""

_BITS = ((8, 0xFFFF), (11, 0x1FFF))
"""Significant bits of bfloat16 and float16, and the bits of a float32 that are 0 then."""

Floats = NDArray[np.float64]


@unwarned()
def digits_stored(x: Tensor, evidence: float = STRONG) -> tuple[Digits, ...]:
    """Return what the values of a column, ``[n]``, may have been stored with; nothing if it is their full precision.

    Args:
        x: the values.
        evidence: `SOME` where all that follows is that small differences are lost, else `STRONG`.

    >>> digits_stored(torch.linspace(0.1, 1, 20).bfloat16().float())
    (Digits(kind='bits', kept=8),)
    >>> digits_stored(torch.linspace(0.1, 1, 20))
    ()
    """
    some = x[:: max(1, len(x) // _LOOKED_AT)].detach().cpu().double().numpy()
    sizes: Floats = np.unique(np.abs(some[np.isfinite(some) & (some != 0)]))
    if not len(sizes) or bool((sizes == np.floor(sizes)).all()):
        return ()  # whole numbers are themselves
    candidates = (_bits(sizes), _fewest(sizes, "decimals"), _fewest(sizes, "significant"))
    return tuple(digits for digits in candidates if digits is not None and _evidence(digits, sizes) >= evidence)


def _evidence(digits: Digits, sizes: Floats) -> float:
    """Bits of evidence in some values: of each how many times finer float32 is than the lattice."""
    spacing = 2 * _radius(digits, torch.from_numpy(sizes)).numpy()
    finer = spacing / np.spacing(sizes.astype(np.float32)).astype(np.float64)
    return float(np.log2(np.maximum(finer, 1.0)).sum())


def stored_radius(x: Tensor) -> Tensor | None:
    """Return how far storing may have moved each value of a column, float64 ``[n]``; None if it did not."""
    digits = digits_stored(x, SOME)
    if not digits:
        return None
    size = x.double().abs().nan_to_num(0.0, 0.0, 0.0)
    return torch.stack([_radius(stored, size) for stored in digits]).amax(0)


@remembered
def advantage_stored_radius(batch: RolloutBatch) -> Tensor | None:
    """Return `stored_radius` of the column `advantage` of a step: many hypotheses ask for it."""
    return stored_radius(batch.column("advantage"))


def _radius(digits: Digits, size: Tensor) -> Tensor:
    """`Digits.radius` of many values."""
    if digits.kind == "decimals":
        return torch.full_like(size, digits.radius(1.0))
    if digits.kind == "bits":
        return torch.where(size > 0, torch.ldexp(torch.full_like(size, 0.5), size.frexp().exponent - digits.kept), 0.0)
    exponent = size.clamp(min=1e-300).log10().floor()
    return torch.where(size > 0, 10.0 ** (exponent - digits.kept + 1) / 2, 0.0)


def _bits(sizes: Floats) -> Digits | None:
    single = sizes.astype(np.float32)
    if (single != sizes).any():
        return None
    held = single.view(np.uint32)
    return next((Digits("bits", bits) for bits, zero in _BITS if not (held & np.uint32(zero)).any()), None)


def _fewest(sizes: Floats, kind: Literal["decimals", "significant"]) -> Digits | None:
    """The fewest digits with which all values are what they are."""
    fewest = None
    for places in range(6, 1, -1):
        fits = _has_decimals(sizes, places) if kind == "decimals" else _has_significant(sizes, places)
        if not fits:
            break
        fewest = Digits(kind, places)
    return fewest


def _has_decimals(sizes: Floats, decimals: int) -> bool:
    return bool(_is_stored(np.round(sizes, decimals), sizes).all())


def _has_significant(sizes: Floats, digits: int) -> bool:
    return all(_is_stored(np.array([float(f"{x:.{digits - 1}e}")]), np.array([x])).all() for x in sizes.tolist())


def _is_stored(rounded: Floats, value: Floats) -> NDArray[np.bool_]:
    """Return where a value is a rounded one, in double or in single precision."""
    is_stored: NDArray[np.bool_] = (rounded == value) | (rounded.astype(np.float32) == value)
    return is_stored


@remembered
def coarse_log_probs(batch: RolloutBatch) -> str:
    """Say which log-probs of a step the file holds with few digits; empty if none.

    What the trainer made of the full ones is not what these give.
    """
    stored = [(name, digits_stored(_some(batch, name))) for name in LOG_PROBS if name in batch.per_token]
    coarse = [(name, digits) for name, digits in stored if digits]
    if not coarse:
        return ""
    names = [name for name, _ in coarse]
    words = min(coarse[0][1], key=lambda digits: digits.kept).words
    return f"the file holds {_listed(names)} with {words}, and the trainer may have had more"


def _some(batch: RolloutBatch, name: str) -> Tensor:
    return batch.tokens_of(name, slice(0, min(batch.tokens, _LOOKED_AT)))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
