"""Rules that measure several steps at once give each step what it has alone, to the bit."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.data.several_steps import SMALL, can_join
from rolloutdoctor.rules.measures.every_nth import MOST
from rolloutdoctor.rules.measures.sampled_rows import SAMPLED_TOKENS
from tests.rules.checking import assert_measured_alike, folded, report_on
from tests.rules.test_contract import SETUPS, full_batch, logged_by

pytestmark = pytest.mark.one_order

SIZES = ((3, 2, 1, 2), (4, 4), (1,), (2, 2, 2))


def recorded(batch, draw, *, is_split):
    """The batch with what asynchronous trainers record: versions, several updates a step, ranks, entropies."""
    rows = {name: torch.randint(-1, 6, (len(batch),), generator=draw) for name in ("policy_version_min", "rank")}
    rows["policy_version_max"] = rows["policy_version_min"] + torch.randint(0, 2, (len(batch),), generator=draw)
    rows["rank"] = rows["rank"] % 2
    tokens = dict(batch.per_token)
    tokens["entropy"] = torch.rand(batch.tokens, generator=draw, dtype=torch.float64)
    if is_split:
        rows["optim_step_id"] = torch.randint(2, 5, (len(batch),), generator=draw)
        del tokens["old_log_probs"]
    return dataclasses.replace(batch, per_row={**batch.per_row, **rows}, per_token=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("setup", [*SETUPS, "no trainer"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(4)), is_split=st.booleans())
def test_together_as_alone(setup, seed, order, is_split):
    batches = [full_batch(seed + place, step=7 * order[place], sizes=SIZES[place]) for place in range(4)]
    draw = torch.Generator().manual_seed(seed)
    batches = [recorded(batch, draw, is_split=is_split) for batch in batches]
    assert all(can_join(batches[0], batch) for batch in batches[1:])
    options = SETUPS.get(setup, {"trainer": None})
    plan, _, _ = folded(batches, logged=logged_by(setup) if setup in SETUPS else {}, **options)
    assert_measured_alike(plan, batches)


def test_steps_of_which_some_rows_are_sampled():
    batches = [full_batch(place, step=place, sizes=(4,) * 5, longest=2_500, empty=0.0) for place in range(3)]
    draw = torch.Generator().manual_seed(1)
    batches = [recorded(batch, draw, is_split=False) for batch in batches]
    assert all(SAMPLED_TOKENS < batch.tokens <= SMALL <= MOST for batch in batches)
    plan, _, _ = folded(batches, **SETUPS["trl"])
    assert_measured_alike(plan, batches)


def test_ties_between_steps_are_kept_in_one_order():
    """Of many places of one weight the same few are kept, whatever steps are measured together."""
    batch = full_batch(3, sizes=(4, 4, 4), rejected=0.0, empty=0.0, holes=0.0)
    batch = dataclasses.replace(batch, per_row={**batch.per_row, "reward": batch.per_row["reward"] * 0})
    batches = [dataclasses.replace(batch, step=step) for step in (9, 2, 5)]
    plan, _, _ = folded(batches, trainer=None)
    assert_measured_alike(plan, batches)
    (found,) = (one for one in report_on(batches, trainer=None).findings if one.code == "RDA011")
    assert [example.step for example in found.examples] == [2, 2, 2, 5, 5]
