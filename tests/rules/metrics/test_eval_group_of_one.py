import pytest
from rules.checking import found_by, report_on, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDM002"


def rows(rewards=((1,), (0,), (1, 0)), step=0, split="eval", **columns):
    return toy_batch(rewards, step=step, split=split, **columns)


def test_alone_in_their_group():
    found = found_by(CODE, rows(), trainer="trl")
    assert values(found) == {"rows": 2, "masked_rows": 0, "rows_masked_by_pr5640": 2}
    assert (found.severity, found.verdict, found.fix) == (Severity.INFO, "exposed", None)
    assert found.headline.endswith("0 of them fully masked; masking by std as in PR 5640 would blank 2")
    assert found.message.startswith("2 of 4 eval rows are alone in their group")
    assert "the mask proposed in TRL PR 5640 would remove 2 of them" in found.message
    assert [one.sample_id for one in found.examples] == ["r0", "r1"]


def test_masked_rows():
    # Row 0 is blanked; row 1 is not; row 2 is blank but has siblings.
    mask = [[0, 0], [1, 1], [0, 0], [1, 1]]
    found = found_by(CODE, rows(mask=mask), trainer="trl")
    assert values(found) == {"rows": 2, "masked_rows": 1, "rows_masked_by_pr5640": 2}
    assert (found.severity, found.verdict) == (Severity.WARNING, "confirmed")
    assert [(one.sample_id, one.note) for one in found.examples] == [
        ("r0", "no trained token"),
        ("r1", "alone in its group"),
    ]


def test_a_mask_that_would_blank_no_more_than_is_blank_is_not_in_the_headline():
    found = found_by(CODE, rows(mask=[[0, 0], [0, 0], [1, 1], [1, 1]]), trainer="trl")
    assert values(found) == {"rows": 2, "masked_rows": 2, "rows_masked_by_pr5640": 2}
    assert found.headline == "2 eval rows are alone in their group, 2 of them fully masked"


def test_an_empty_response_is_not_masked():
    found = found_by(CODE, rows(rewards=[[1], [0]], mask=[[], [1]]), trainer="trl")
    assert values(found)["masked_rows"] == 0


@pytest.mark.parametrize(("fraction", "verdict"), [(1.0, "confirmed"), (0.5, "exposed")])
def test_logged_fraction(fraction, verdict):
    found = found_by(CODE, rows(rewards=[[1], [0]]), trainer="trl", logged={"frac_reward_zero_std": fraction})
    assert (found.severity, found.verdict) == (Severity.INFO, verdict)


def test_logged_fraction_of_rows_with_siblings_too_proves_nothing():
    # It is 1 also if the pair has equal rewards.
    found = found_by(CODE, rows(rewards=[[1], [0, 0]]), trainer="trl", logged={"frac_reward_zero_std": 1.0})
    assert found.verdict == "exposed"


def test_batch_scale_flags_by_the_batch():
    # TRL's flag is about the batch then: rewards 1 and 0 have a spread, rewards 1 and 1 have none.
    options = {"trainer": "trl", "scale_rewards": "batch"}
    assert values(found_by(CODE, rows(rewards=[[1], [0]]), **options))["rows_masked_by_pr5640"] == 0
    assert values(found_by(CODE, rows(rewards=[[1], [1]]), **options))["rows_masked_by_pr5640"] == 2


def test_the_proposed_mask_is_trls():
    found = found_by(CODE, rows(), trainer="verl", adv_estimator="grpo")
    assert values(found) == {"rows": 2, "masked_rows": 0, "rows_masked_by_pr5640": 0}


def test_without_a_trainer():
    found = found_by(CODE, rows(mask=[[0], [1], [1], [1]]), trainer=None)
    assert values(found) == {"rows": 2, "masked_rows": 1, "rows_masked_by_pr5640": 0}


def test_training_rows_never_count():
    assert found_by(CODE, rows(split="train"), trainer="trl") is None
    assert found_by(CODE, rows(rewards=[[1, 0], [1, 1]]), trainer="trl") is None


def test_run_and_steps():
    batches = [rows(step=8, rewards=[[1]]), rows(step=4), rows(step=4, split="train")]
    found = found_by(CODE, batches, trainer="trl")
    assert [(row["step"], row["split"], row["rows"]) for row in found.per_step] == [(4, "eval", 2), (8, "eval", 1)]
    assert values(found)["rows"] == 3


def test_a_missing_group_is_skipped():
    batch = rows()
    object.__setattr__(batch, "groups", None)
    object.__setattr__(batch, "group_ids", ())
    (skipped,) = report_on(batch, select=[CODE], trainer="trl").skipped
    assert skipped.reason == "missing column group_id"
