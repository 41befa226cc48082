"""RDO013: rows of a pack that see those before them."""

import numpy as np
import pytest
from rules.checking import found_by, outcomes, report_on, values, without

from rolloutdoctor.testing import toy_batch

CODE = "RDO013"


def steps(factor, *, count=4, packs=6, rows=4, tokens=64, noise=0.02, seed=0, **per_row):
    """Packs of several rows; `factor` maps place in the pack and position to the size of the noise of a token."""
    found = []
    for step in range(count):
        draw = np.random.default_rng([seed, step])
        total = packs * rows
        place, position = np.arange(total) % rows, np.arange(tokens)
        own = -draw.gamma(1.0, 1.0, (total, tokens))
        apart = noise * draw.normal(size=own.shape) * -np.expm1(own)
        apart *= np.array([[factor(p, t) for t in position] for p in place])
        row_columns = {"micro_batch_id": (np.arange(total) // rows).tolist(), "pack_index": place.tolist()}
        made = {name: value(step, total) for name, value in per_row.items()}
        found.append(
            toy_batch([[1, 0]] * (total // 2), lengths=tokens, policy=np.minimum(own + apart, 0).tolist(),
                      rollout=own.tolist(), per_row=row_columns | made, step=step)
        )  # fmt: skip
    return found


def fading(place, position):
    """A state that is carried over, and forgotten."""
    return 1 + 20 * (place > 0) * np.exp(-position / 8)


def test_a_state_that_leaks_into_the_next_row():
    found = found_by(CODE, steps(fading), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert (value["packs"], value["packs_above"]) == (24, 24)
    assert value["gap_ratio"] > 5
    assert value["gap_behind_rest"] < value["gap_behind"] / 3
    assert "micro-batch" in found.examples[0].note


def test_attention_over_the_whole_pack():
    found = found_by(CODE, steps(lambda place, position: 1 + 9 * (place > 0)), trainer=None)
    assert values(found)["gap_behind_rest"] > 0.5 * values(found)["gap_behind"]


def test_packs_of_optimizer_steps_and_ranks_are_different():
    # The same numbers of micro-batches recur in each.
    ranks = {"rank": lambda step, total: [row * 2 // total for row in range(total)]}
    halves = {"optim_step_id": lambda step, total: [row * 2 // total for row in range(total)]}
    for per_row in (ranks, halves):
        batches = steps(fading, **per_row)
        for batch in batches:
            batch.per_row["micro_batch_id"][:] %= 3
        assert values(found_by(CODE, batches, trainer=None))["packs"] == 24


@pytest.mark.parametrize(
    "factor",
    [
        lambda place, position: 1.0,
        # The start of every row is off, rows of later places a little, and a kernel is merely loud.
        lambda place, position: 1 + 20 * (position < 16),
        lambda place, position: 1 + 0.3 * place,
        lambda place, position: 5.0,
        # The first of each pack, not those behind it.
        lambda place, position: 1 + 9 * (place == 0),
    ],
    ids=["healthy", "all starts", "a little", "loud", "the first"],
)
def test_look_alikes(factor):
    assert outcomes(report_on(steps(factor), trainer=None, select=[CODE])) == {CODE: "clean"}


def test_a_leak_below_the_noise_of_kernels():
    assert outcomes(report_on(steps(fading, noise=1e-5), trainer=None, select=[CODE])) == {CODE: "clean"}


def test_rows_of_older_versions_are_left_out():
    def stamp(step, total):
        return [10 + step - 3 * (row % 4 > 0) for row in range(total)]

    batches = steps(fading, policy_version_min=stamp, policy_version_max=stamp)
    (skipped,) = report_on(batches, trainer=None, select=[CODE]).skipped
    assert skipped.reason.startswith("0 packs of several rows")


def test_not_applicable_and_skipped():
    (one,) = report_on(steps(fading, rows=1, packs=24), trainer=None, select=[CODE]).not_applicable
    assert one.reason == "every row is the only one of its pack"
    (one,) = report_on(steps(fading, count=2), trainer=None, select=[CODE]).skipped
    assert one.reason.startswith("12 packs of several rows")
    assert one.reason.endswith("needs 16")
    (one,) = report_on([without(each, "pack_index") for each in steps(fading)], trainer=None, select=[CODE]).skipped
    assert one.reason == "missing column pack_index"


@pytest.mark.slow
def test_false_alarms():
    accused = sum(
        bool(report_on(steps(lambda place, position: 1.0, rows=rows, seed=seed), trainer=None, select=[CODE]).findings)
        for seed in range(150)
        for rows in (2, 3)
    )
    assert accused == 0


def test_a_clean_verdict_says_how_large_a_ratio_it_excludes():
    (excluded,) = report_on(steps(lambda place, position: 1 + 0.3 * place), trainer=None, select=[CODE]).excluded
    assert 1.3 < excluded.bound < 3
    assert excluded.words.startswith("rules out a gap behind the first row of a pack above ")
