"""What a fix changes of rows, told from rounding: every command that speaks of a change takes it from here."""

from torch import Tensor

from rolloutdoctor.evaluation.rows import RowResult

ROUNDING = 1e-9
"""A change below this share of the largest value of the step is rounding, not a change."""


def is_change(gap: Tensor, *values: Tensor) -> Tensor:
    """Return True where a difference is more than rounding of the values that were compared, bool like `gap`.

    Args:
        gap: absolute differences; NaN is no change.
        values: what was compared.

    >>> import torch
    >>> is_change(torch.tensor([0.0, 1e-12, 1e-3]), torch.tensor([1.0, 2.0, 3.0]))
    tensor([False, False,  True])
    """
    largest = [value.abs().nan_to_num(0.0, 0.0, 0.0).max() for value in values if value.numel()]
    return gap > ROUNDING * max(map(float, largest), default=0.0)


def baseline_drift(before: RowResult, after: RowResult, rows_N: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return by how much the baseline of each row changes, ``[N]`` with sign, and where it does, ``[N]`` bool.

    None for estimators without a baseline per row.

    Args:
        before: the rows as configured.
        after: the rows with a fix.
        rows_N: ``[N]`` bool, the rows to look at.
    """
    if before.baseline_N is None or after.baseline_N is None:
        return None
    drift_N = before.baseline_N - after.baseline_N
    return drift_N, rows_N & is_change(drift_N.abs(), before.baseline_N, after.baseline_N)
