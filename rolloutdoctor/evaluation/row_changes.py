"""Changes that a fix makes to rows, separated from rounding; shared by all commands that report a change."""

import numpy as np
from torch import Tensor

from rolloutdoctor.evaluation.rows import RowResult
from rolloutdoctor.ops.by_step import ByStep

ROUNDING = 1e-9
"""A change below this share of the largest value of the step is rounding, not a change."""


def is_change(gap: Tensor, *values: Tensor, by_step: ByStep | None = None) -> Tensor:
    """Return True where a difference is more than rounding of the values that were compared, bool like `gap`.

    Args:
        gap: absolute differences; NaN is no change.
        values: what was compared.
        by_step: rows of several steps; None: everything is of one.

    >>> import torch
    >>> is_change(torch.tensor([0.0, 1e-12, 1e-3]), torch.tensor([1.0, 2.0, 3.0]))
    tensor([False, False,  True])
    """
    sizes = [value.abs().nan_to_num(0.0, 0.0, 0.0) for value in values]
    if by_step is None:
        return gap > ROUNDING * max((float(size.max()) for size in sizes if size.numel()), default=0.0)
    return gap > ROUNDING * by_step.expand(np.max([by_step.high(size) for size in sizes], axis=0))


def baseline_drift(
    before: RowResult, after: RowResult, rows_N: Tensor, by_step: ByStep | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return by how much the baseline of each row changes, ``[N]`` with sign, and where it does, ``[N]`` bool.

    None for estimators without a baseline per row.

    Args:
        before: the rows as configured.
        after: the rows with a fix.
        rows_N: ``[N]`` bool, the rows to look at.
        by_step: the rows by step; None: they are of one.
    """
    if before.baseline_N is None or after.baseline_N is None:
        return None
    drift_N = before.baseline_N - after.baseline_N
    return drift_N, rows_N & is_change(drift_N.abs(), before.baseline_N, after.baseline_N, by_step=by_step)
