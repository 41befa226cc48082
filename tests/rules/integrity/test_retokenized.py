"""RDI010: turns whose first tokens are not those that were sampled."""

import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.rules.measures.turn_starts import distances, turn_starts
from rolloutdoctor.testing import toy_batch

CODE = "RDI010"
MASK = [1] * 20 + [0] * 4 + [1] * 20


def batch_of(start=0.5, elsewhere=0.002, rows=20, first=0.0, low=-1.0, mask=MASK, step=0):
    """Rows of two turns; `start` is how far the first four tokens of the second are apart, at a log-prob of `low`."""
    draw = torch.Generator().manual_seed(step)
    policy, rollout = [], []
    for _ in range(rows):
        noise = (torch.rand(len(mask), generator=draw) * elsewhere).tolist()
        away = [start if 24 <= place < 28 else first if place < 4 else 0.0 for place in range(len(mask))]
        policy.append([low if 24 <= place < 28 else -1.0 for place in range(len(mask))])
        rollout.append([mine - gap - off for mine, gap, off in zip(policy[-1], away, noise, strict=True)])
    return toy_batch([[1, 0] * (rows // 2)], mask=[mask] * rows, policy=policy, rollout=rollout, step=step)


def find(batches):
    return found_by(CODE, batches, trainer=None)


def test_starts_of_turns_stand_out():
    found = find(batch_of())
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert value["turns"] == 20
    assert value["start_median_low"] <= 0.501 <= value["start_median_high"]
    assert value["other_median_low"] <= 0.001 <= value["other_median_high"]
    assert value["median_ratio_low"] == pytest.approx(value["start_median_low"] / value["other_median_high"])


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(start=0.0),
        # One and a half times is what engines differ by.
        batch_of(start=0.005, elsewhere=0.02),
        # The first tokens of a response are no turn behind masked ones.
        batch_of(start=0.0, first=0.5),
    ],
)
def test_clean(batch):
    assert find(batch) is None


@pytest.mark.parametrize(
    "batch",
    [
        # Four times is no five.
        batch_of(start=0.03, elsewhere=0.02),
        # Far apart by proportion, and nothing by size.
        batch_of(start=0.005, elsewhere=1e-5),
    ],
)
def test_less_than_other_tokens_would_do_is_information(batch):
    assert find(batch).severity.label == "info"


def test_clean_says_what_it_excludes():
    (bound,) = report_on(batch_of(start=0.0), trainer=None, select=[CODE]).excluded
    assert bound.words == f"rules out a median distance at the start of turns above {bound.bound:.3g} nats"
    assert bound.estimate <= 0.001 <= bound.bound <= 0.0025
    assert bound.limit == 0.01


def test_unlikely_tokens_are_held_against_unlikely_ones():
    # All unlikely tokens are off by as much, and turns begin with more of them.
    batch = batch_of(start=0.5, low=-3.0)
    rollout_T, policy_T = batch.column("rollout_log_probs"), batch.column("policy_log_probs")
    later = torch.arange(batch.tokens) % len(MASK) >= 36
    policy_T[later], rollout_T[later] = -3.0, -3.5
    assert find(batch) is None


def test_too_few_turns():
    report = report_on(batch_of(rows=18), trainer=None, select=[CODE])
    assert "needs 20" in report.skipped[0].reason
    assert find([batch_of(rows=10), batch_of(rows=10, step=1)]) is not None


def test_not_applicable_and_skipped():
    single = batch_of(mask=[1] * 44)
    report = report_on(single, trainer=None, select=[CODE])
    assert "second turn" in report.not_applicable[0].reason
    assert outcomes(report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE])) == {CODE: "skipped"}


def test_where_turns_start():
    mask = [[0, 1, 0, 0, 1, 1, 0, 1], [0, 0, 1, 1], [], [1, 0, 1, 1]]
    batch = toy_batch([[1, 0, 1, 0]], mask=mask, rollout=-1.5)
    block = TokenBlock(batch, slice(0, 4), slice(0, 16))
    assert turn_starts(block).nonzero().squeeze(1).tolist() == [4, 7, 14]
    # Tokens 4, 5 and 7 of the first row, 14 and 15 of the last one; the others are 1 and 12.
    near, rest = distances(batch, torch.tensor([True, False, False, True]))
    assert sum(near.values()) == 5
    assert sum(rest.values()) == 2
    # A turn of one token ends with its row: what follows begins the next one.
    batch = toy_batch([[1, 0]], mask=[[1, 0, 1], [1, 1, 0, 1]], rollout=-1.5)
    near, rest = distances(batch, torch.tensor([True, True]))
    assert (sum(near.values()), sum(rest.values())) == (2, 3)
