"""RDI013: prompts that start over, and epochs that do so by right."""

import random

import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.rules.resumed_data import KEEP, ResumedData, ResumedTally
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
    assert found.headline == "steps 6 to 9 have the prompts of steps 0 to 3, and other prompts follow"
    value = values(found)
    assert (value["repeated_steps"], value["first_repeated"], value["source"]) == (4, 6, 0)
    assert value["different_share"] == pytest.approx(9 / 13)


def test_two_steps_within_an_epoch_are_information():
    order, epochs = "abcdabefgh", [step / 40 for step in range(10)]
    found = find(order, epochs)
    assert (found.severity.label, found.verdict) == ("info", "exposed")
    assert found.headline.startswith("steps 4 to 5 have the prompts of steps 0 to 1, 0.1 epochs later")
    # A generation that is gone over twice, two steps of another epoch, and an epoch that nobody logged.
    assert find("ababcdefgh", epochs) is None
    assert find(order, [step / 4 for step in range(10)]) is None
    assert find(order) is None
    # One step alone.
    assert find("abcdaefghi", epochs) is None


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


@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_of_weeks_in_any_order(resumes):
    draw = random.Random(0)
    hashes = [draw.getrandbits(48) for _ in range(6000)]
    order = [*range(5000), *(range(4000, 4100) if resumes else ()), *range(5000, 6000)]
    parts = [ResumedTally(seen={f"{hashes[one]:012x}:{at}": -1.0}) for at, one in enumerate(order)]
    whole = ResumedTally.of_all(parts)
    draw.shuffle(parts)
    assert ResumedTally.of_all(parts) == whole
    assert len({name.partition(":")[0] for name in whole.seen}) == KEEP
    rule = ResumedData()
    found = rule.measures(whole)
    if resumes:
        # About a third of the hundred steps is compared.
        assert 20 <= found["repeated_steps"].value <= 45
        assert found["first_repeated"].value - 5000 == found["source"].value - 4000 < 20
        (repeat,) = rule._repeats(whole)
        assert repeat.goes_on
    else:
        assert found["repeated_steps"].value == 0


def test_an_epoch_of_weeks_without_shuffling():
    draw = random.Random(0)
    hashes = [draw.getrandbits(48) for _ in range(3000)]
    parts = (ResumedTally(seen={f"{hashes[at % 3000]:012x}:{at}": at / 3000}) for at in range(9000))
    whole = ResumedTally.of_all(parts)
    assert all(one.epochs == pytest.approx(round(one.epochs)) for one in ResumedData()._repeats(whole))
