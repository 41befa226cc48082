import math
from dataclasses import replace

import pytest
from rules.checking import found_by, report_on, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDA001"
RLOO = {"trainer": "verl", "adv_estimator": "rloo"}

# Group 1 has rewards 100 (rejected), 1 and 3 over 1, 1 and 2 tokens; group 2 has 1 and 0 over one token each.
# rloo, all vote:  1 - (100 + 3) / 2 = -50.5 and 3 - (100 + 1) / 2 = -47.5;  live rows vote: 1 - 3 = -2, 3 - 1 = 2.
# Baselines: 51.5 and 50.5 against 3 and 1.
REWARDS = [[100, 1, 3], [1, 0]]
MASK = [[0], [1], [1, 1], [1], [1]]
ALL_VOTE = [0.0, -50.5, -47.5, 1.0, -1.0]
LIVE_VOTE = [0.0, -2.0, 2.0, 1.0, -1.0]


def batch(step=0, **columns):
    return toy_batch(REWARDS, mask=MASK, policy=-1.0, step=step, **columns)


def test_measures():
    found = found_by(CODE, batch(), **RLOO)
    # token-mean over 5 trained tokens at ratio one: g = -A / 5 on every token
    square_all = 50.5**2 + 2 * 47.5**2 + 1 + 1
    square_live = 4 + 2 * 4 + 1 + 1
    dot = 50.5 * 2 - 2 * 47.5 * 2 + 1 + 1
    assert values(found) == pytest.approx(
        {
            "rejected_rows": 1,
            "affected_groups": 1,
            "baseline_drift_mean": (48.5 + 49.5) / 2,
            "baseline_drift_max": 49.5,
            "advantage_shift_mean": (48.5 + 49.5) / 2,
            "advantage_shift_max": 49.5,
            "sign_flips": 1,
            "live_rows": 2,
            "drifted_rows": 2,
            "spurious_share_l1": (48.5 + 2 * 49.5) / (50.5 + 2 * 47.5 + 1 + 1),
            "relative_change_l1": (48.5 + 2 * 49.5) / (2 + 2 * 2 + 1 + 1),
            "kappa": dot / square_live,
            "cosine": dot / math.sqrt(square_all * square_live),
        },
        rel=1e-9,
    )
    assert (found.severity, found.verdict, found.fix) == (Severity.WARNING, "exposed", "rejected-rows")
    assert found.evidence == "no logged advantages to compare with"
    assert [(one.group_id, one.sample_id, one.weight) for one in found.examples] == [
        ("g0", "r2", 49.5),
        ("g0", "r1", 48.5),
    ]
    assert found.examples[0].note == "advantage -47.5, without fully masked responses 2"


def test_trl():
    # Scores 1 (masked because truncated), 0 and 1. All vote: mean 2/3, std sqrt((1/9 + 4/9 + 1/9) / 2) = sqrt(1/3).
    # Live rows: mean 1/2, std sqrt(1/2).
    every, live = math.sqrt(1 / 3) + 1e-4, math.sqrt(1 / 2) + 1e-4
    shifts = [abs(-2 / 3 / every + 0.5 / live), abs(1 / 3 / every - 0.5 / live)]
    found = found_by(CODE, toy_batch([[1, 0, 1]], mask=[[0], [1], [1]]), trainer="trl")
    assert values(found)["advantage_shift_mean"] == pytest.approx(sum(shifts) / 2, rel=1e-9)
    assert values(found)["advantage_shift_max"] == pytest.approx(max(shifts), rel=1e-9)
    assert values(found)["baseline_drift_mean"] == pytest.approx(1 / 6, rel=1e-9)
    assert values(found)["sign_flips"] == 0


def test_opo_is_immune_where_two_survive():
    assert found_by(CODE, batch(), trainer="verl", adv_estimator="opo") is None


def test_token_mean_counted_before_rejection():
    # The rejected row's token stays in the denominator of both, so the shares do not move.
    before = batch(per_token={"response_mask_pre": 1})
    options = {**RLOO, "rollout_rs": "token_k1", "rollout_rs_threshold": 2}
    assert values(found_by(CODE, before, **options)) == pytest.approx(values(found_by(CODE, batch(), **RLOO)))


@pytest.mark.parametrize("wobble", [0.0, 2**-23])
def test_confirmed_if_logged_advantages_show_that_all_vote(wobble):
    logged = [value * (1 + wobble) for value in ALL_VOTE]
    found = found_by(CODE, batch(per_row={"advantage": logged}), **RLOO)
    assert (found.severity, found.verdict) == (Severity.WARNING, "confirmed")
    assert "the logged advantages of 2 rows match the formula that includes fully masked responses" in found.evidence


def test_confirmed_by_token_advantages():
    tokens = [[7.0], [-50.5], [-47.5, -47.5], [1.0], [-1.0]]  # what stands in a masked token does not count
    assert found_by(CODE, batch(per_token={"advantages": tokens}), **RLOO).verdict == "confirmed"


@pytest.mark.parametrize("wobble", [0.0, 2**-23])
def test_clean_if_logged_advantages_show_that_live_rows_vote(wobble):
    logged = [value * (1 + wobble) for value in LIVE_VOTE]
    assert found_by(CODE, batch(per_row={"advantage": logged}), **RLOO) is None


@pytest.mark.parametrize(
    "logged",
    [
        [0.0, -10.0, 10.0, 1.0, -1.0],
        [0.0, -50.5, 2.0, 1.0, -1.0],  # one row each way
        [0.0, -50.5 * (1 + 1e-4), -47.5, 1.0, -1.0],
    ],
)
def test_exposed_if_logged_advantages_fit_neither(logged):
    found = found_by(CODE, batch(per_row={"advantage": logged}), **RLOO)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert "the options do not match this run" in found.evidence


def test_unknown_advantages_do_not_decide():
    found = found_by(CODE, batch(per_row={"advantage": [math.nan] * 5}), **RLOO)
    assert (found.verdict, found.evidence) == ("exposed", "no logged advantages to compare with")


def test_logged_in_one_of_two_steps():
    # Null in the second step: what is logged still shows it.
    found = found_by(CODE, [batch(per_row={"advantage": ALL_VOTE}), batch(1)], **RLOO)
    assert found.verdict == "confirmed"
    assert values(found)["rejected_rows"] == 2


def test_earlier_mask_proves_the_rejection():
    mask = {"response_mask_pre": [[1], [1], [1, 1], [1], [1]]}
    found = found_by(CODE, batch(per_token=mask), **RLOO)
    assert found.evidence.endswith("; response_mask_pre shows that 1 row had tokens before rejection")
    never = {"response_mask_pre": [[0], [1], [1, 1], [1], [1]]}
    assert "response_mask_pre" not in found_by(CODE, batch(per_token=never), **RLOO).evidence


@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_unscored_rejected_rows_do_not_count(trainer):
    options = {"adv_estimator": "rloo"} if trainer == "verl" else {}
    nothing = toy_batch([[math.nan, 1, 3]], mask=[[0], [1], [1]])
    assert found_by(CODE, nothing, trainer=trainer, **options) is None


def test_unscored_rejected_rows_beside_a_scored_one():
    rows = toy_batch([[math.nan, 1, 3], [100, 1, 3]], mask=[[0], [1], [1]] * 2)
    found = values(found_by(CODE, rows, trainer="trl", scale_rewards="none"))
    # only the second group: 1 - 104/3 and 3 - 104/3 against -1 and 1
    assert [found[name] for name in ("rejected_rows", "affected_groups", "live_rows")] == [1, 1, 2]
    assert found["advantage_shift_mean"] == pytest.approx(104 / 3 - 2)


def test_whole_group_rejected_is_clean():
    assert found_by(CODE, toy_batch([[100, 1], [1, 0]], mask=[[0], [0], [1], [1]]), **RLOO) is None


def test_whole_group_rejected_beside_an_affected_one():
    found = found_by(CODE, toy_batch([[100, 1], [5, 1, 0]], mask=[[0], [0], [0], [1], [1]]), **RLOO)
    assert values(found)["rejected_rows"] == 3
    assert values(found)["affected_groups"] == 1
    assert values(found)["live_rows"] == 2


def test_some_tokens_rejected_is_clean():
    assert found_by(CODE, toy_batch([[100, 1]], mask=[[0, 1], [1, 1]]), **RLOO) is None


def test_equal_rewards_without_scaling_are_clean():
    # The rejected row has the mean of its siblings, so it moves no baseline.
    assert found_by(CODE, toy_batch([[2, 1, 3]], mask=[[0], [1], [1]]), trainer="trl", scale_rewards="none") is None


def test_empty_response_is_a_rejected_row():
    found = found_by(CODE, toy_batch([[100, 1, 3]], mask=[[], [1], [1]]), **RLOO)
    assert values(found)["rejected_rows"] == 1


def test_estimators_without_groups_are_clean():
    rows = toy_batch([[1, 0]], mask=[[0], [1]], policy=-1.0, ref=-1.0, values=0.0)
    assert found_by(CODE, rows, trainer="slime", advantage_estimator="ppo") is None


def test_without_log_probs():
    found = found_by(CODE, toy_batch(REWARDS, mask=MASK, policy=None), **RLOO)
    assert values(found)["advantage_shift_max"] == 49.5
    assert [values(found)[name] for name in ("relative_change_l1", "kappa", "cosine")] == [None, None, None]


def test_gradient_of_the_steps_that_have_one():
    # A step without log-probs takes part in the rows, not in the gradient.
    both = values(found_by(CODE, [batch(), toy_batch(REWARDS, mask=MASK, policy=None, step=1)], **RLOO))
    one = values(found_by(CODE, batch(), **RLOO))
    assert both["live_rows"] == 2 * one["live_rows"]
    assert both["kappa"] == pytest.approx(one["kappa"])


def test_run_and_steps():
    # Second step: 4 (rejected), 1 and 0.  All: 1 - 4/2 = -1 and 0 - 5/2 = -2.5.  Live: 1 and -1.  Shifts 2 and 1.5.
    second = toy_batch([[4, 1, 0]], mask=[[0], [1], [1]], step=1)
    found = found_by(CODE, [second, batch()], **RLOO)
    assert [row["advantage_shift_mean"] for row in found.per_step] == [49.0, 1.75]
    assert [row["sign_flips"] for row in found.per_step] == [1, 1]
    assert values(found)["advantage_shift_mean"] == (48.5 + 49.5 + 2 + 1.5) / 4
    assert values(found)["advantage_shift_max"] == 49.5


def test_slime_with_groups_of_unequal_size_is_one_group():
    # slime takes the whole batch as one group then, so a rejected row moves the rows of the other group as well:
    # all: mean (100 + 1 + 0 + 2 + 7) / 5 = 22; live: 2.5. Every live row shifts by 19.5.
    rows = toy_batch([[100, 1], [0, 2, 7]], mask=[[0], [1], [1], [1], [1]])
    found = found_by(CODE, rows, trainer="slime", grpo_std_normalization=False)
    assert values(found)["live_rows"] == 4
    assert values(found)["advantage_shift_mean"] == pytest.approx(19.5)


def test_gpg_rescales_every_row_of_the_batch():
    # alpha is rows over rows with a score: 5 / 4 with all voting, 4 / 3 without the rejected 100. So the group without
    # a rejected row moves too: from -+0.5 * 5 / 4 to -+0.5 * 4 / 3. The other: mean 104 / 3, live 2.
    rows = toy_batch([[100, 1, 3], [1, 0]], mask=[[0], [1], [1], [1], [1]])
    found = values(found_by(CODE, rows, trainer="verl", adv_estimator="gpg"))
    before, after = 5 / 4, 4 / 3
    shifts = [abs((score - 104 / 3) * before - (score - 2) * after) for score in (1, 3)]
    shifts += [0.5 * (after - before)] * 2
    assert found["live_rows"] == 4
    assert found["affected_groups"] == 2
    assert found["advantage_shift_mean"] == pytest.approx(sum(shifts) / 4, rel=1e-9)
    assert found["advantage_shift_max"] == pytest.approx(max(shifts), rel=1e-9)
    # The baseline of the other group stays where it is.
    assert found["drifted_rows"] == 2
    assert found["baseline_drift_mean"] == pytest.approx(104 / 3 - 2, rel=1e-9)
    assert found["sign_flips"] == 1


def test_gpg_where_only_the_count_moves():
    # A group whose rows are all rejected changes no baseline of another, but the count over the batch.
    rows = toy_batch([[0, 0], [1, 0]], mask=[[0], [0], [1], [1]])
    found = values(found_by(CODE, rows, trainer="verl", adv_estimator="gpg"))
    assert (found["live_rows"], found["affected_groups"], found["baseline_drift_max"]) == (2, 1, 0.0)
    # alpha: 4 / 1 against 2 / 1
    assert found["advantage_shift_mean"] == pytest.approx(1.0, rel=1e-12)


def test_only_rows_that_move_count():
    # The rejected row of the second group has its siblings' mean.
    rows = toy_batch([[100, 1, 3], [2, 1, 3]], mask=[[0], [1], [1], [0], [1], [1]])
    options = {"trainer": "verl", "adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}
    found = values(found_by(CODE, rows, **options))
    assert (found["rejected_rows"], found["live_rows"], found["affected_groups"]) == (2, 2, 1)


def test_a_missing_mask_is_skipped():
    rows = replace(toy_batch([[1, 0]]), per_token={})
    (skipped,) = report_on(rows, select=[CODE], trainer="trl").skipped
    assert skipped.reason == "missing column response_mask"
    assert "rolloutdoctor.recorders.trl" in skipped.remedy
