"""RDI013: prompts that start over, and epochs that do so by right."""

import numpy as np
import polars as pl
import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.evaluation.run_tables import EMPTY_METRICS, RunTables
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.integrity.resumed_data import ResumedData
from rolloutdoctor.rules.measures.repeated_stretches import bits_of as chance
from rolloutdoctor.testing import toy_batch

CODE = "RDI013"


def steps(order, rows=4):
    """A step for each letter, with two prompts of two rows."""
    return [
        toy_batch(
            [[1, 0], [0, 1]], per_row={"prompt": [ord(one) * 2] * 2 + [ord(one) * 2 + 1] * (rows - 2)}, step=place
        )
        for place, one in enumerate(order)
    ]


def find(order, epochs=None, batches=None):
    batches = batches or steps(order)
    logged = [{} if epochs is None else {"epoch": epoch} for epoch in epochs or [0.0] * len(order)]
    return found_by(CODE, batches, trainer=None, logged=logged)


def test_a_data_loader_that_started_over():
    found = find("abcdefabcdghi")
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert found.headline == "steps 6 to 9 repeat the prompts of steps 0 to 3, and other prompts follow"
    assert "no epoch ends there, so the data loader restarted" in found.message
    value = values(found)
    assert (value["repeated_steps"], value["first_repeated"], value["source"]) == (4, 6, 0)
    assert value["different_share"] == pytest.approx(9 / 13)


def test_two_steps_within_an_epoch_are_information():
    order, epochs = "abcdabefgh", [step / 40 for step in range(10)]
    found = find(order, epochs)
    assert (found.severity.label, found.verdict) == ("info", "exposed")
    assert found.headline.startswith("steps 4 to 5 repeat the prompts of steps 0 to 1, 0.1 epochs later")
    assert "two repeated steps may be chance" in found.message
    # A generation that is gone over twice, two steps of another epoch, and an epoch that nobody logged.
    assert find("ababcdefgh", epochs) is None
    assert find(order, [step / 4 for step in range(10)]) is None
    assert find(order) is None
    # One step alone.
    assert find("abcdaefghi", epochs) is None


@pytest.mark.parametrize(
    ("order", "prompts", "bits"),
    [
        # 2 (4 log2(16) - log2(24)) less the logarithm of 15 pairs of steps.
        ("abcdab", 4, 18.923),
        # 20 different prompts and 21 pairs.
        ("abcdabe", 4, 21.013),
        # Of small steps chance repeats two sooner: 2 log2(29) less the logarithm of 435.
        ("abcdefghijklmnopqrstuvwxyzABCab", 1, 0.855),
    ],
)
def test_two_steps_are_enough_where_chance_does_not_repeat_them(order, prompts, bits):
    batches = [
        toy_batch(
            [[1.0, 0.0]] * prompts,
            per_row={"prompt": [100 * ord(one) + row // 2 for row in range(2 * prompts)]},
            step=place,
        )
        for place, one in enumerate(order)
    ]
    found = find(order, [step / 100 for step in range(len(order))], batches)
    assert chance([prompts] * 2, prompts * len(set(order)), len(order)) == pytest.approx(bits, abs=1e-3)
    assert found.severity.label == ("warning" if bits >= 20 else "info")
    assert ("once in 2^21 runs" in found.evidence) == (bits >= 20)
    # Where nobody logged an epoch one may have ended there.
    assert find(order, batches=batches) is None


def test_the_chance_is_that_of_drawing_with_replacement():
    draw = np.random.default_rng(0)
    # Two given steps of two prompts each, of six: 2 / 36 each.
    first, again = (np.sort(draw.integers(0, 6, (2, 200_000, 2))) for _ in range(2))
    is_pair = (first[..., 0] != first[..., 1]).all(0)
    share = (first == again).all((0, 2))[is_pair].mean()
    assert chance([2, 2], 6, 2) == pytest.approx(-np.log2(share), abs=0.1)


def test_the_logged_epoch_proves_it():
    epochs = [step / 20 for step in range(12)]
    found = find("abcdefabcdef", epochs)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert "0.3 epochs later by the log" in found.headline


def test_an_epoch_without_shuffling():
    assert find("abcdefabcdef", [step / 6 for step in range(12)]) is None
    # Where no epoch is logged it looks the same as data that started over.
    found = find("abcdefabcdef")
    assert found.severity.label == "info"
    assert "an epoch without shuffling looks the same" in found.message
    assert find("abcabcabc", [step / 3 for step in range(9)]) is None


@pytest.mark.parametrize(
    "order",
    [
        "abcdefghi",
        # Shuffled anew.
        "abcdefdbfaec",
        # Two steps are chance with a small training set.
        "abcdefabghij",
        # Several updates of one generation.
        "aabbccddee",
        "aaaaaaaaaa",
    ],
)
def test_clean(order):
    assert find(order) is None


def test_rows_may_come_in_any_order():
    batches = steps("abcdabcefg")
    for batch in batches[4:7]:
        batch.per_row["prompt"][:] = batch.per_row["prompt"].flip(0)
    assert find("abcdabcefg", batches=batches).severity.label == "warning"
    # One other prompt makes another step.
    batches[5].per_row["prompt"][:] = torch.tensor([7, 7, 8, 8])
    assert find("abcdabcefg", batches=batches) is None


def test_skipped():
    assert outcomes(report_on(steps("abcdefg"), trainer=None, select=[CODE])) == {CODE: "clean"}
    (skipped,) = report_on(steps("abcd"), trainer=None, select=[CODE]).skipped
    assert "needs 6" in skipped.reason
    (skipped,) = report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE]).skipped
    assert "prompt_ids" in skipped.reason


def measured(order, epochs=None):
    """The measures of a run of one row a step."""
    steps = pl.DataFrame({"step": range(len(order))}).with_columns(split=pl.lit("train"))
    rows = steps.with_columns(prompt=pl.Series(order, dtype=pl.Int64))
    metrics = EMPTY_METRICS
    if epochs is not None:
        metrics = steps.with_columns(metric=pl.lit("epoch"), logged=pl.Series(epochs, dtype=pl.Float64))
    return ResumedData().measured(RunTables(rows, metrics, steps=steps), Context(frozenset()))


def test_a_run_of_weeks():
    found = measured([*range(1, 5000), *range(4000, 4100), *range(5000, 6000)])
    assert (found["repeated_steps"], found["first_repeated"], found["source"]) == (100, 4999, 3999)
    assert found.table["goes_on"].drop_nulls().all()
    assert measured(range(1, 6000))["repeated_steps"] == 0


def test_an_epoch_of_weeks_without_shuffling():
    found = measured([1 + step % 3000 for step in range(9000)], [step / 3000 for step in range(9000)])
    assert found["repeated_steps"] == 6000
    assert found.table["later"].drop_nulls().to_list() == pytest.approx([1.0] * 6000)
