"""Float32 arithmetic that is the subject: the residue of equal rewards, and TRL's flag."""

import platform

import numpy as np
import pytest
import torch

from rolloutdoctor.formulas.advantages.float32 import _sums, residue, row_sums, zero_std_flags
from rolloutdoctor.ops.groups import Groups

VALUES = torch.cat([torch.tensor([0.1, 0.3, 0.6, 0.7, 1.1, 1.2, 2.7, 10.1, 100.1]), torch.linspace(0.05, 9.95, 91)])


def grouped(size: int) -> tuple[torch.Tensor, Groups]:
    """One group of equal rewards for each value."""
    return VALUES.double().repeat_interleave(size), Groups.of(torch.arange(len(VALUES)).repeat_interleave(size))


@pytest.mark.one_order
@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="torch adds in another order there")
@pytest.mark.parametrize("size", [*range(1, 42), 127, 128, 129, 511, 512, 513, 1000, 4097])
def test_sums_are_those_of_torch_to_the_bit(size):
    draw = torch.Generator().manual_seed(size)
    for groups in (1, 3):
        assert torch.equal(row_sums(x := torch.randn(groups, size, generator=draw) + 1), x.sum(1))
        for columns in (1, 2, 4, 7, 9, 40):
            x = torch.randn(groups, size, columns, generator=draw) + 1
            assert torch.equal(_sums(x), x.sum(1))


def test_sums_by_hand():
    """The order: 32 partial sums, then what is left of eight, then the eight lanes; 2^24 + 1 is no float32 number."""
    x = torch.ones(1, 10)
    x[0, 0] = 2.0**24
    # 0 + 1 + 1 of the last two, 2 + 2^24 of the first lane, then seven ones: the first ties, the others are lost.
    assert row_sums(x).item() == 2.0**24 + 4
    assert row_sums(x[:, :4]).item() == 2.0**24
    assert row_sums(x.flip(1)).item() == 2.0**24


@pytest.mark.one_order
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


@pytest.mark.one_order
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


@pytest.mark.one_order
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
