"""What slime's mismatch helper does exactly at its bounds: a ratio of one is exact, so a bound of one is a tie."""

import pytest
import torch

from rolloutdoctor.formulas.corrections.sampler import Rows, corrected
from rolloutdoctor.objective.corrections import SamplerCorrection

TRAINER = torch.tensor([-1.0, -1.0, -1.0, -0.5], dtype=torch.float64)
SAMPLER = torch.tensor([-1.0, -0.5, -1.0, -1.0], dtype=torch.float64)
"""Two rows of two tokens: ratios 1 and below in the first, 1 and above in the second."""


def rows():
    offsets, micro_N = torch.tensor([0, 2, 4]), torch.tensor([0, 0])
    return Rows(TRAINER, SAMPLER, torch.ones(4, dtype=torch.bool), offsets, micro_N)


def kept(**options):
    """Tokens that are kept where all ratios are allowed, but for what the options say."""
    free = {"weighs": True, "low": 0.0, "high": 100.0}
    return corrected(rows(), SamplerCorrection(**free | options)).kept_T.tolist()


@pytest.mark.parametrize(
    ("low", "high", "wanted"), [(1.0, 100.0, [True, False, True, True]), (0.0, 1.0, [True, True, True, False])]
)
def test_a_ratio_at_a_bound_is_kept(low, high, wanted):
    assert kept(mode="mask", low=low, high=high) == wanted
    assert kept(reject_level="token", reject_low=low, reject_high=high) == wanted


def test_only_a_ratio_below_the_veto_rejects_its_row():
    # slime compares the log-ratio with the log of the veto by `<`: the second row has none below it.
    options = {"reject_level": "token", "reject_low": 0.0, "reject_high": 100.0, "veto": 1.0}
    assert kept(**options) == [False, False, True, True]
