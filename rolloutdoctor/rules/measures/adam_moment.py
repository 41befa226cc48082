"""Shares of steps in Adam's first moment, from logged gradient norms."""

import math
from collections.abc import Sequence
from itertools import pairwise

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.rules.base import Context

_SMALL = 1e-6
"""What clipping adds to the norm before it divides by it."""


def decayed(norms: Sequence[float | None], beta1: float, clip: float) -> list[float | None]:
    """Return the share of each norm, clipped, in the decayed sum up to it; None from the first unknown norm on.

    >>> decayed([1.0, 3.0, 0.25, 0.0, None, 1.0], beta1=0.5, clip=0.0)
    [1.0, 0.8571428571428571, 0.125, 0.0, None, None]

    A norm of the size of what clipping adds is cut to half of the bound:

    >>> [round(share, 4) for share in decayed([3e-6, 1e-6], beta1=0.5, clip=1e-6) if share]
    [1.0, 0.5714]
    """
    shares: list[float | None] = []
    total = 0.0
    for norm in norms:
        total *= beta1
        clipped = math.nan if norm is None else norm * min(1.0, clip / (norm + _SMALL)) if clip else norm
        total += clipped
        shares.append(clipped / total if 0 < total < math.inf else None)
    return shares


def shares_in_moment(norms: pl.DataFrame, context: Context) -> pl.DataFrame:
    """Return the share of each step's gradient in the norms that Adam's first moment adds up, ``step, split, share``.

    The moment after step t is ``(1 - beta1) sum_k beta1^k g_(t-k)``, g being gradients clipped to norms c. The share
    ``c_t / sum_k beta1^k c_(t-k)`` is at most ``|own part| / |moment|``, by the triangle inequality, whatever the
    directions of the gradients. It says nothing of the movement of a single parameter, which Adam also divides by the
    root of its second moment.

    Args:
        norms: steps with the logged norm of the gradient before clipping, in the third column.
        context: whose options have the decay rate and the clipping norm.

    Returns:
        No line if an option is only assumed, the optimizer is another one, or steps are missing since step 1; null from
        the first step without a norm on.
    """
    nothing = norms.select(*STEP_KEY, share=pl.lit(None, pl.Float64)).clear()
    options = context.trainer.roles.adam if context.trainer is not None else None
    if options is None or context.config is None:
        return nothing
    settings = context.config.settings
    needed = (options.optimizer, options.beta1, options.clip)
    if not all(settings[name].is_stated for name in needed) or settings[options.optimizer].value not in options.plain:
        return nothing
    beta1, clip = float(str(settings[options.beta1].value)), settings[options.clip].value
    ordered = norms.filter(split="train").sort("step")
    steps, values = ordered["step"].to_list(), ordered[norms.columns[2]].to_list()
    if not steps or steps[0] != 1 or any(after != before + 1 for before, after in pairwise(steps)):
        return nothing
    return ordered.select(*STEP_KEY, share=pl.Series(decayed(values, beta1, float(str(clip or 0))), dtype=pl.Float64))
