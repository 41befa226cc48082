"""Float32 arithmetic that is the subject: the residue of equal rewards, and TRL's flag."""

import numpy as np
import pytest
import torch

from rolloutdoctor.formulas.advantages.float32 import residue, zero_std_flags
from rolloutdoctor.ops.groups import Groups

VALUES = torch.cat([torch.tensor([0.1, 0.3, 0.6, 0.7, 1.1, 1.2, 2.7, 10.1, 100.1]), torch.linspace(0.05, 9.95, 91)])


def grouped(size: int) -> tuple[torch.Tensor, Groups]:
    """One group of equal rewards for each value."""
    return VALUES.double().repeat_interleave(size), Groups.of(torch.arange(len(VALUES)).repeat_interleave(size))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 11, 16, 22, 23, 31, 32, 48, 64])
def test_residue_is_that_of_verl(size):
    algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    score_N, groups = grouped(size)
    rewards = score_N.float()[:, None]
    uids = np.array([str(group) for group in groups.index_N.tolist()], dtype=object)
    wanted, _ = algos.compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), uids)
    own = residue(score_N, groups, 1e-6)
    assert torch.equal(own, wanted.squeeze(1))
    if size == 8:
        assert int((own != 0).sum()) > 100


def test_residue_of_scores_that_differ_is_the_advantage():
    groups = Groups.of(torch.tensor([1, 0, 1, 0, 2]))
    found = residue(torch.tensor([1.0, 5.0, 3.0, 5.0, 7.0], dtype=torch.float64), groups, 1e-6)
    assert found.tolist() == pytest.approx([-0.7071, 0, 0.7071, 0, 0], abs=1e-4)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16, 32])
def test_flags_are_those_of_trl(size):
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    score_N, groups = grouped(size)
    score_N[::97] = torch.nan
    std_N = nanstd(score_N.float().view(-1, size), dim=1).repeat_interleave(size)
    wanted_N = torch.isclose(std_N, torch.zeros_like(std_N))
    for scale in ("group", "none"):
        assert torch.equal(zero_std_flags(score_N, groups, scale), wanted_N)
    if size == 8:
        # Rounding hides equal rewards from the flag.
        assert 0 < int(wanted_N.sum()) < len(wanted_N)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [0.5, 0.3, 0.1, 2.7])
@pytest.mark.parametrize("rows", [2, 8, 24])
def test_flags_of_a_batch_are_those_of_trl(rows, value):
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    score_N = torch.full((rows,), value, dtype=torch.float64)
    groups = Groups.of(torch.arange(rows) // 2)
    std = nanstd(score_N.float())
    wanted = bool(torch.isclose(std, torch.zeros_like(std)))
    assert zero_std_flags(score_N, groups, "batch").tolist() == [wanted] * rows
    score_N[0] += 1
    assert not zero_std_flags(score_N, groups, "batch").any()


def test_groups_of_one_are_flagged():
    groups = Groups.of(torch.arange(3))
    score_N = torch.tensor([1.0, 2.0, torch.nan], dtype=torch.float64)
    assert zero_std_flags(score_N, groups, "group").tolist() == [True, True, True]
    assert zero_std_flags(score_N[:1], Groups.of(torch.zeros(1, dtype=torch.int64)), "batch").tolist() == [True]
