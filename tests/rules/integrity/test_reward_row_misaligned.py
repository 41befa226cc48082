"""RDI004 by what rewards show of their rows; by advantages it is tested with the other causes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDI004"
GROUPS, SIZE = 8, 4
ROWS = GROUPS * SIZE
TRL = {"trainer": "trl", "options": {"scale_rewards": "none"}}


def lengths_of(seed):
    return np.random.default_rng(seed).integers(4, 60, ROWS)


def soft_overlong(length):
    """A penalty for length between two bounds."""
    return np.clip((30 - length) / 20, -1.0, 0.0)


def batch(value, *, step=0, lengths=None, order=None, advantages=False, ids=None, statuses=()):
    """Rewards of rows that a file has in another order: row i has that of row order[i]."""
    value = np.asarray(value, dtype=float)
    moved = value if order is None else value[order]
    lengths = lengths_of(step) if lengths is None else lengths
    per_row = {}
    if advantages:
        grouped = moved.reshape(GROUPS, SIZE)
        per_row["advantage"] = (grouped - grouped.mean(1, keepdims=True)).ravel().tolist()
    per_token = {} if ids is None else {"response_ids": ids}
    made = toy_batch(
        moved.reshape(GROUPS, SIZE).tolist(),
        lengths=[int(one) for one in lengths],
        per_row=per_row,
        per_token=per_token,
        step=step,
    )
    return replace(made, statuses=list(statuses)) if len(statuses) else made


def outcome(batches, setup=TRL):
    report = diagnose(batches if isinstance(batches, list) else [batches], **setup, select=[CODE])
    if report.findings:
        return report.findings[0]
    return "skipped" if report.skipped else "clean"


LATE = np.roll(np.arange(ROWS), 1)
ORDERS = {
    "every row has the reward of the row before it": LATE,
    "every row has the reward of the row after it": np.roll(np.arange(ROWS), -1),
    "every row has the reward of the group before it": np.roll(np.arange(ROWS), SIZE),
    "the rewards are in reversed order": np.arange(ROWS)[::-1],
    "the rewards are in the order of response length, the rows are not": np.argsort(lengths_of(0), kind="stable"),
}


@pytest.mark.parametrize("words", ORDERS)
def test_a_reward_for_length_belongs_to_its_row(words):
    value = soft_overlong(lengths_of(0))
    finding = outcome(batch(value, order=ORDERS[words]))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    broken = int((value[ORDERS[words]] != value).sum())
    assert finding.headline[0].lower() + finding.headline[1:] == (
        f"{words}: {broken} rows of {ROWS} break the rule that reward is a function of the response's "
        "length; in the right order none do"
    )
    assert {name: one.value for name, one in finding.measures.items() if name.startswith("rows")} == {
        "rows_tested": ROWS,
        "rows_keeping": ROWS - broken,
    }


def test_advantages_that_follow_say_that_the_trainer_used_them():
    finding = outcome(batch(soft_overlong(lengths_of(0)), order=LATE, advantages=True))
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert "the trainer used these rewards" in finding.evidence


def test_one_step_of_many():
    steps = [batch(soft_overlong(lengths_of(step)), step=step, order=LATE if step == 3 else None) for step in range(6)]
    finding = outcome(steps)
    assert finding.measures["rows_tested"].value == ROWS
    assert "in 1 step" in finding.evidence
    assert {example.step for example in finding.examples} == {3}


def test_rewards_of_their_own_rows_are_clean():
    assert outcome(batch(soft_overlong(lengths_of(0)))) == "clean"
    # float32, as a trainer's tensors have it.
    assert outcome(batch(soft_overlong(lengths_of(0)).astype(np.float32))) == "clean"


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("seed", range(20))
def test_a_reward_that_has_nothing_to_do_with_length_says_nothing(seed):
    draw = np.random.default_rng(seed)
    assert outcome(batch(draw.normal(size=ROWS), step=seed)) == "skipped"
    # Near to a line is no line.
    near = -lengths_of(seed) / 100 + draw.normal(0, 1e-4, ROWS)
    assert outcome(batch(near, step=seed, order=LATE)) == "skipped"


def copies(seed, kinds=2):
    """Responses of few kinds in each group, and a reward of each kind."""
    draw = np.random.default_rng(seed)
    kind = draw.integers(0, kinds, (GROUPS, SIZE))
    ids = [[100 + int(one)] * 8 for one in kind.ravel()]
    value = draw.random((GROUPS, kinds))[np.arange(GROUPS)[:, None], kind].round(1).ravel()
    return value, ids


def steps_of_copies(order, *, noise=0.0, steps=4):
    found = []
    for step in range(steps):
        value, ids = copies(step)
        flipped = np.random.default_rng(step).random(ROWS) < noise
        value = np.where(flipped, 1.0 - value, value)
        found.append(batch(value, step=step, lengths=np.full(ROWS, 8), ids=ids, order=order))
    return found


def test_equal_responses_have_equal_rewards():
    assert outcome(steps_of_copies(None)) == "clean"
    finding = outcome(steps_of_copies(LATE))
    assert "every row has the reward of the row before it" in finding.headline.lower()
    assert "break the rule that identical responses to one prompt have equal reward" in finding.headline


def test_a_judge_that_changes_its_mind_has_the_rewards_of_its_rows():
    assert outcome(steps_of_copies(None, noise=0.2)) == "skipped"


def test_equal_responses_that_agree_by_chance():
    # In an order that nothing knows of.
    order = np.arange(ROWS).reshape(GROUPS, SIZE)
    order = np.random.default_rng(5).permuted(order, axis=1).ravel()
    finding = outcome(steps_of_copies(order, steps=12))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert "no less often than different responses" in finding.message
    assert "the reward does not depend on the response" in finding.advice
    # Too few to say so.
    assert outcome(steps_of_copies(order, steps=1)) == "skipped"


@pytest.mark.parametrize("names", [("judge", "format"), ("format", "judge")])
def test_copies_are_those_of_the_function_that_differs_most(names):
    order = np.random.default_rng(5).permuted(np.arange(ROWS).reshape(GROUPS, SIZE), axis=1).ravel()
    steps = []
    for one, moved in zip(steps_of_copies(None, steps=12), steps_of_copies(order, steps=12), strict=True):
        of_function = {"format": one.per_row["reward"], "judge": moved.per_row["reward"]}
        steps.append(replace(one, rewards={name: of_function[name] for name in names}))
    alone = outcome(steps_of_copies(order, steps=12)).measures["differing_copies"].value
    assert outcome(steps).measures["differing_copies"].value == alone > 0


def truncated(order, *, right=0.0):
    found = []
    for step in range(12):
        draw = np.random.default_rng(step)
        cut = draw.random(ROWS) < 0.5
        value = np.where(cut & (draw.random(ROWS) >= right), 0.0, draw.integers(0, 2, ROWS))
        ends = ["length" if one else "stop" for one in cut]
        found.append(batch(value, step=step, order=order, statuses=ends))
    return found


def test_truncated_responses_have_the_lowest_reward():
    finding = outcome(truncated(LATE))
    assert "break the rule that truncated responses have the lowest reward" in finding.headline
    # Some that were cut off are right all the same.
    assert outcome(truncated(None, right=0.2)) == "skipped"
    assert outcome(truncated(LATE, right=0.2)) == "skipped"


def test_each_reward_function_is_looked_at():
    length = lengths_of(0)
    named = {
        "correct": torch.tensor(np.random.default_rng(1).integers(0, 2, ROWS), dtype=torch.float64),
        "brevity": torch.tensor(soft_overlong(length)[LATE]),
    }
    made = replace(batch(sum(named.values()).numpy()), rewards=named)
    finding = outcome(made)
    assert "brevity is a function of the response's length" in finding.headline


def test_order_of_parts_says_nothing():
    steps = [batch(soft_overlong(lengths_of(step)), step=step, order=LATE) for step in range(3)]
    assert outcome(steps).measures == outcome(steps[::-1]).measures


def test_places_are_the_logged_values_or_the_rows():
    value = np.random.default_rng(0).normal(size=ROWS)
    late = np.roll(value, 1).reshape(GROUPS, SIZE)
    advantage = torch.tensor((late - late.mean(1, keepdims=True)).ravel())
    made = batch(value)
    made = replace(made, per_row={**made.per_row, "advantage": advantage})
    first = outcome(made).examples[0]
    assert (first.group_id, first.sample_id) == (None, "r0")
    assert first.note.startswith("advantages: logged ")
    rows = outcome(batch(soft_overlong(lengths_of(0)), order=LATE)).examples
    assert rows[0].group_id == "g0"
    assert {one.note for one in rows} == {"breaks the rule that reward is a function of the response's length"}
