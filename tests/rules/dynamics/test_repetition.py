"""RDT011: responses in a loop, and long responses that are none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rules.checking import found_by, report_on, values

from rolloutdoctor.ops.repeats import repeated_ngrams
from rolloutdoctor.ops.segments import Runs
from rolloutdoctor.rules.dynamics import repetition
from rolloutdoctor.testing import toy_batch

CODE = "RDT011"
GROUPS, SIZE, LENGTH = 8, 4, 200


def response(draw, kind):
    """Token ids of a response."""
    if kind == "loop":
        return [int(one) for one in draw.integers(0, 1000, 40)] + [7, 8, 9, 10, 11] * 32
    if kind == "list":
        # A line of a table: the same words, and other numbers in between.
        return [one for _ in range(LENGTH // 8) for one in (1, 2, 3, 4, 5, *draw.integers(0, 1000, 3))]
    return draw.integers(0, 1000, LENGTH).tolist()


def step(number=0, kinds="prose", reward=None, mask=None, **kwargs):
    draw = np.random.default_rng(number)
    kinds = [kinds] * GROUPS * SIZE if isinstance(kinds, str) else list(kinds)
    scores = draw.integers(0, 2, (GROUPS, SIZE)) if reward is None else np.reshape(reward, (GROUPS, SIZE))
    ids = [response(draw, kind) for kind in kinds]
    return toy_batch(
        scores.astype(float).tolist(), lengths=LENGTH, mask=mask, per_token={"response_ids": ids}, step=number, **kwargs
    )


def slow(ids, told, n=16):
    """16-grams one by one."""
    places = [at for at in range(len(ids) - n + 1) if all(told[at : at + n])]
    grams = [tuple(ids[at : at + n]) for at in places]
    return len(grams), len(grams) - len(set(grams))


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_a_slow_loop(seed):
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 2, int(size)) for size in draw.integers(0, 90, 12)]
    told = [draw.random(len(one)) < 0.98 for one in rows]
    runs = Runs.of_sizes([len(one) for one in rows])
    count_N, again_N = repeated_ngrams(torch.tensor(np.concatenate(rows)), torch.tensor(np.concatenate(told)), runs)
    assert list(zip(count_N.tolist(), again_N.tolist(), strict=True)) == [
        slow(one.tolist(), kept.tolist()) for one, kept in zip(rows, told, strict=True)
    ]


def test_a_policy_that_degenerates():
    steps = [step(at, ["loop" if row < 2 * at else "prose" for row in range(GROUPS * SIZE)]) for at in range(8)]
    found = found_by(CODE, steps, trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert (value["looping"], value["responses"]) == (2 * sum(range(8)), 8 * GROUPS * SIZE)
    assert value["looping_share_last"] == pytest.approx((12 + 14) / 64)
    assert found.examples[0].note == "75.7 % of 185 16-grams occurred before"


def test_loops_that_are_rewarded():
    kinds = ["loop" if row % SIZE == 0 else "prose" for row in range(GROUPS * SIZE)]
    few = [step(at) for at in range(16)]
    paid = [step(16 + at, kinds, reward=[float(kind == "loop") for kind in kinds]) for at in range(4)]
    found = found_by(CODE, [*few, *paid], trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert values(found)["reward_difference"] == pytest.approx(0.75)
    assert "the reward pays for it" in found.advice
    fair = [step(at, kinds, reward=[float(kind != "loop") for kind in kinds]) for at in range(4)]
    assert found_by(CODE, [*fair, *few], trainer=None).severity.label == "info"


@pytest.mark.parametrize("is_paid", [False, True])
def test_tables_that_the_task_asks_for(is_paid):
    """Some prompts ask for one from the first step on, and a right answer is one."""
    kinds = ["loop" if row % SIZE == 0 else "prose" for row in range(GROUPS * SIZE)]
    reward = [float(kind == "loop") for kind in kinds] if is_paid else None
    found = found_by(CODE, [step(at, kinds, reward=reward) for at in range(8)], trainer=None)
    assert (found.severity.label, found.verdict) == ("info", "confirmed")


def test_loops_that_are_cut_off():
    kinds = ["loop"] * 16 + ["prose"] * 16
    cut = replace(step(0, kinds), statuses=["length"] * 16 + ["stop"] * 16)
    found = found_by(CODE, cut, trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert values(found)["truncated_share"] == 1
    assert "do not end" in found.advice


@pytest.mark.parametrize("kinds", ["prose", "list"])
def test_long_responses_without_loops_are_clean(kinds):
    assert found_by(CODE, [step(at, kinds) for at in range(4)], trainer=None) is None


def test_what_a_tool_repeats_does_not_count():
    mask = [[1] * 20 + [0] * 160 + [1] * 20] * (GROUPS * SIZE)
    (skipped,) = report_on(step(0, "loop", mask=mask), trainer=None, select=[CODE]).skipped
    assert "128 trained tokens" in skipped.reason


def test_a_single_loop_is_not_found_and_few_responses_are_not_clean():
    assert (
        found_by(CODE, [step(at, ["loop"] + ["prose"] * 31 if not at else "prose") for at in range(6)], trainer=None)
        is None
    )
    (skipped,) = report_on(step(), trainer=None, select=[CODE]).skipped
    assert "leave a share of looping responses" in skipped.reason


def test_short_responses_are_skipped():
    batch = toy_batch([[1, 0]], lengths=40, per_token={"response_ids": [[5] * 40] * 2})
    (skipped,) = report_on(batch, trainer=None, select=[CODE]).skipped
    assert "128 trained tokens" in skipped.reason


def test_some_responses_of_a_long_step_are_looked_at(monkeypatch):
    monkeypatch.setattr(repetition, "SAMPLED_TOKENS", 2000)
    found = found_by(CODE, [step(at, "loop") for at in range(4)], trainer=None)
    assert 10 < values(found)["responses"] < 100
    assert values(found)["looping_share"] == 1
