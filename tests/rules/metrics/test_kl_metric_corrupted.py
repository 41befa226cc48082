import math

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.run import open_run
from rolloutdoctor.io.write.writer import RunWriter, write_metrics
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.table import find
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDM001"
PPO = {"trainer": "slime@0.3.1", "advantage_estimator": "ppo"}

# slime, k1: kl = policy - ref = 0.25 on each of 8 tokens; rewards 1 and 0; kl_coef 0.5.
# The buffer holds -0.125, plus the reward at the last token: its mean is -0.125 + 1/8 = 0.


def rows(step=0, rewards=((1, 0),), lengths=4, **columns):
    return toy_batch(rewards, lengths=lengths, policy=-1.0, ref=-1.25, values=0.0, step=step, **columns)


def test_reward_buffer():
    # kl_coef 0.25: -0.0625 + 0.125 = 0.0625
    found = found_by(CODE, rows(), logged={"rollout/kl": 0.0625}, kl_coef=0.25, **PPO)
    assert values(found) == pytest.approx(
        {
            "logged": 0.0625,
            "recomputed": 0.25,
            "abs_error": 0.1875,
            "rel_error": 0.75,
            "reward_share": 0.125 / (0.125 + 0.0625),
            "tokens_matching": None,  # no token values were stored
            "inverted": (0.125 - 0.0625) / 0.25,
        }
    )
    assert (found.severity, found.verdict, found.fix) == (Severity.ERROR, "confirmed", "kl-inplace")
    assert found.evidence.startswith("in 1 of 1 step the logged value equals '-kl_coef * kl")


def test_coefficient_zero_is_reward_only():
    found = found_by(CODE, rows(), logged={"rollout/kl": 0.125}, kl_coef=0.0, **PPO)
    assert values(found) == {
        "logged": 0.125,
        "recomputed": 0.0,
        "abs_error": 0.125,
        "rel_error": None,
        "reward_share": 1.0,
        "tokens_matching": None,
    }
    assert (found.severity, found.verdict) == (Severity.ERROR, "confirmed")


def test_copy_is_clean():
    assert found_by(CODE, rows(), logged={"rollout/kl": 0.25}, kl_coef=0.25, **PPO) is None
    assert found_by(CODE, rows(), logged={"rollout/kl": 0.0}, kl_coef=0.0, **PPO) is None


def test_copy_that_the_reward_buffer_equals_is_clean():
    # Rewards and coefficient of 0: both predict 0.
    assert found_by(CODE, rows(rewards=[[0, 0]]), logged={"rollout/kl": 0.0}, kl_coef=0.0, **PPO) is None
    still = toy_batch([[0, 0]], policy=-1.0, ref=-1.0, values=0.0, per_token={"kl": 0.0})
    assert found_by(CODE, still, kl_coef=0.25, **PPO) is None


def test_unexplained_mismatch_is_a_warning():
    found = found_by(CODE, rows(), logged={"rollout/kl": 0.5}, kl_coef=0.25, **PPO)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert values(found)["rel_error"] == 1.0
    assert values(found)["reward_share"] is None
    assert found.evidence == "no known formula reproduces all of the logged values"


@pytest.mark.parametrize(("logged", "outcome"), [(0.2500125, "skipped"), (0.26, "skipped"), (0.27, "found")])
def test_a_small_mismatch_is_neither_found_nor_clean(logged, outcome):
    # 4 % and 8 % of 0.25; the line is at 5 %
    report = report_on(rows(), logged={"rollout/kl": logged}, kl_coef=0.25, select=[CODE], **PPO)
    assert outcomes(report) == {CODE: outcome}


def test_the_steps_of_a_small_mismatch_are_counted():
    batches = [rows(step=step) for step in range(3)]
    logged = [{"rollout/kl": value} for value in (0.25, 0.26, 0.25)]
    (skipped,) = report_on(batches, logged=logged, kl_coef=0.25, select=[CODE], **PPO).skipped
    assert "in 1 of 3 steps" in skipped.reason


def test_masked_tokens_count_in_the_mean():
    # The mean is over response tokens, trained or not, and the reward lands on the last one whatever its mask.
    batch = rows(mask=[[1, 1, 0, 0], [1, 1, 1, 1]])
    assert found_by(CODE, batch, logged={"rollout/kl": 0.0625}, kl_coef=0.25, **PPO).verdict == "confirmed"


def test_several_ranks():
    # Rank 0: one row, reward 1 over 2 tokens: 1/2. Rank 1: rewards 0 and 3 over 4 and 8 tokens: 3/12.
    # Weighted by rows: (1/2 + 2/4) / 3.
    # KL is 0.25 everywhere; kl_coef 0.5.
    batch = rows(rewards=[[1, 0, 3]], lengths=[2, 4, 8], per_row={"rank": [0, 1, 1]})
    found = found_by(CODE, batch, logged={"rollout/kl": -0.125 + 1 / 3}, kl_coef=0.5, **PPO)
    assert found.verdict == "confirmed"
    assert values(found)["inverted"] == pytest.approx(0.25)
    # Without ranks the same tokens give 4/14.
    together = rows(rewards=[[1, 0, 3]], lengths=[2, 4, 8])
    assert found_by(CODE, together, logged={"rollout/kl": -0.125 + 1 / 3}, kl_coef=0.5, **PPO).verdict == "exposed"
    assert found_by(CODE, together, logged={"rollout/kl": -0.125 + 4 / 14}, kl_coef=0.5, **PPO).verdict == "confirmed"


def stored(*, last, others=-0.0625, **columns):
    tokens = [[others] * 3 + [last + others], [others] * 3 + [others]]
    return rows(per_token={"kl": tokens}, **columns)


def test_stored_tokens_alone():
    found = found_by(CODE, stored(last=1.0), kl_coef=0.25, **PPO)
    assert values(found)["tokens_matching"] == 1.0
    assert values(found)["logged"] == 0.0625  # what slime would log of these tokens
    assert (found.severity, found.verdict) == (Severity.ERROR, "confirmed")


@pytest.mark.parametrize(("logged", "verdict"), [(0.1, "confirmed"), (0.25, None)])
def test_stored_tokens_prove_it_of_a_metric_that_is_not_the_kl(logged, verdict):
    # 0.0625 would be the mean of the buffer, and 0.25 is the KL.
    found = found_by(CODE, stored(last=1.0), logged={"rollout/kl": logged}, kl_coef=0.25, **PPO)
    assert (None if found is None else found.verdict) == verdict


def test_stored_tokens_that_are_a_copy():
    assert found_by(CODE, stored(last=0.0, others=0.25), kl_coef=0.25, **PPO) is None


def test_stored_tokens_that_are_neither():
    # The first row has no reward in it: 7 of 8 tokens fit the buffer. The mean is -0.0625.
    found = found_by(CODE, stored(last=0.0), kl_coef=0.25, **PPO)
    assert values(found)["tokens_matching"] == 7 / 8
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")


def test_run_and_steps():
    # 0.0625 - 0.25 and 0.125 - 0.25 (second step: rewards sum to 1.5 over 8 tokens: -0.0625 + 0.1875)
    batches = [rows(1, rewards=[[1, 0.5]]), rows()]
    found = found_by(CODE, batches, logged=[{"rollout/kl": 0.125}, {"rollout/kl": 0.0625}], kl_coef=0.25, **PPO)
    assert [row["logged"] for row in found.per_step] == [0.0625, 0.125]
    assert values(found) == pytest.approx(
        {
            "logged": 0.09375,
            "recomputed": 0.25,
            "abs_error": 0.15625,
            "rel_error": 0.625,
            "reward_share": (0.125 + 0.1875) / (0.125 + 0.1875 + 2 * 0.0625),
            "tokens_matching": None,
            "inverted": 0.25,
        }
    )
    assert [(one.step, one.weight) for one in found.examples] == [(0, 0.1875), (1, 0.125)]


def test_one_step_of_two_is_not_confirmed():
    # An upgrade in the middle of the run: what is known of the first step does not hold for the second.
    batches = [rows(), rows(1)]
    found = found_by(CODE, batches, logged=[{"rollout/kl": 0.0625}, {"rollout/kl": 0.25}], kl_coef=0.25, **PPO)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert "in 1 of 2 steps, and the reward buffer in 1" in found.message


def test_steps_without_the_metric_do_not_count():
    found = found_by(CODE, [rows(), rows(1)], logged=[{"rollout/kl": 0.0625}, {}], kl_coef=0.25, **PPO)
    assert (found.verdict, values(found)["logged"]) == ("confirmed", 0.0625)
    assert found.per_step[1]["logged"] is None


# TRL, on policy: k3 of u = 0.25 with ratio one, by tokens; verl: the same with low_var_kl, aggregated like the loss.
K3 = math.exp(-0.25) - 1 + 0.25


@pytest.mark.parametrize(
    ("trainer", "name", "options"),
    [
        ("trl", "kl", {"beta": 0.1}),
        ("verl", "actor/kl_loss", {"adv_estimator": "grpo", "use_kl_loss": True}),
        ("slime", "train/kl_loss", {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}),
    ],
)
@pytest.mark.parametrize(("factor", "fires"), [(1.0, False), (2.0, True), (math.nan, True)])
def test_metrics_of_the_loss(trainer, name, options, factor, fires):
    found = found_by(CODE, rows(), trainer=trainer, logged={name: K3 * factor}, **options)
    assert (found is not None) == fires
    if found is not None:
        assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
        assert values(found)["recomputed"] == pytest.approx(K3)


@pytest.mark.parametrize(
    ("beta", "loss", "verdict"),
    [
        # The loss, whose term is beta times the KL, agrees: the metric alone is wrong.
        (0.1, 0.1 * K3, "confirmed"),
        # It disagrees, too.
        (0.1, 0.1 * K3 + 0.1, "exposed"),
        # It would agree with any KL of that size.
        (1e-9, 1e-9 * K3, "exposed"),
    ],
)
def test_a_loss_that_agrees_says_that_the_metric_is_wrong(beta, loss, verdict):
    logged = [{"kl": K3 + 0.6, "loss": loss}, {"kl": K3, "loss": loss}]
    report = report_on([rows(), rows(1)], trainer="trl", logged=logged, select=[CODE, "RDG005"], beta=beta)
    found = next(one for one in report.findings if one.code == CODE)
    assert found.verdict == verdict
    other = next(one for one in report.findings if one.code == "RDG005")
    assert other.follows_from == (CODE if verdict == "confirmed" else None)


def test_nan_in_the_rows_explains_nan_in_the_log():
    batch = toy_batch([[1, 0]], policy=-1.0, ref=math.nan)
    assert found_by(CODE, batch, trainer="trl", logged={"kl": math.nan}, beta=0.1) is None
    assert found_by(CODE, batch, trainer="trl", logged={"kl": 0.1}, beta=0.1).severity == Severity.WARNING


def test_metric_of_one_of_several_optimizer_steps_is_not_compared():
    batch = rows(per_row={"optim_step_id": [0, 1]})
    report = diagnose([batch], trainer="trl", options={"beta": 0.1}, logged={"kl": 9.0}, select=[CODE])
    assert not report.findings
    assert report.skipped[0].reason == "no step has a logged KL that belongs to one optimizer step"


def test_no_kl_term_is_clean():
    assert found_by(CODE, rows(), trainer="trl", logged={"kl": 9.0}) is None


@pytest.mark.parametrize(
    ("trainer", "options", "names"),
    [
        ("trl", {"beta": 0.1}, "kl"),
        ("verl", {"adv_estimator": "grpo", "use_kl_loss": True}, "actor/kl_loss or actor/reward_kl_penalty"),
        ("slime", {}, "rollout/kl or train/kl_loss"),
    ],
)
def test_nothing_logged_is_skipped(trainer, options, names):
    (skipped,) = report_on(rows(), select=[CODE], trainer=trainer, **options).skipped
    assert skipped.reason == f"no logged KL: neither a column kl nor the metric {names}"
    assert "NAME.metrics.parquet" in skipped.remedy


def test_options_and_version_expose_it_without_a_logged_kl():
    found = found_by(CODE, rows(), kl_coef=0.25, **PPO)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert found.headline == "slime 0.3.1 logs 0.0625 as KL; the real KL is 0.25"
    assert values(found)["recomputed"] == 0.25
    assert values(found)["logged"] is None
    # The release that is only assumed, the next one, another estimator, and rows where both are the same.
    for trainer, options in (("slime", "ppo"), ("slime@0.4.0", "ppo"), ("slime@0.3.1", "grpo")):
        report = report_on(rows(), select=[CODE], trainer=trainer, advantage_estimator=options, kl_coef=0.25)
        assert not report.findings
        assert not report.clean
    still = toy_batch([[0, 0]], policy=-1.0, ref=-1.0, values=0.0)
    assert outcomes(report_on(still, select=[CODE], kl_coef=0.25, **PPO)) == {CODE: "skipped"}


def windowed_run(folder, *, every, said):
    """Four steps of one group; the logged KL of a line is the mean over the steps since the line before."""
    reward, policy, ref = [1.0, 0.0], [[-1.0, -1.0], [-1.0]], {1: -1.1, 2: -1.5, 3: -1.2, 4: -2.0}
    truth = {step: math.exp(gap + 1) - (gap + 1) - 1 for step, gap in ref.items()}
    config = {"beta": 0.1, "num_generations": 2, "gradient_accumulation_steps": 1}
    config |= {"logging_steps": every} if said else {}
    with RunWriter(folder / "run.parquet", RunMetadata("trl", "1.16.0", config)) as writer:
        for step, gap in ref.items():
            writer.write(
                [
                    {
                        "step": step,
                        "group_id": "g",
                        "sample_id": str(row),
                        "reward": reward[row],
                        "response_mask": [1] * len(policy[row]),
                        "policy_log_probs": policy[row],
                        "ref_log_probs": [gap] * len(policy[row]),
                    }
                    for row in range(2)
                ]
            )
    lines = [(step, [truth[one] for one in range(step - every + 1, step + 1)]) for step in ref if step % every == 0]
    write_metrics(folder / "run.metrics.parquet", [(step, "train", "kl", sum(some) / every) for step, some in lines])
    return check(open_run([folder / "run.parquet"]), CheckOptions(rules=[find("RDM001")], device="cpu"))


def test_a_mean_over_several_steps_is_not_compared_with_one(tmp_path):
    report = windowed_run(tmp_path, every=2, said=True)
    assert not report.findings
    assert report.skipped[0].reason == "the logged kl is a mean over several steps, and there is no column kl"
    assert "logging_steps = 1" in report.skipped[0].remedy


def test_where_nothing_says_how_often_was_logged_the_logged_steps_do(tmp_path):
    assert windowed_run(tmp_path, every=2, said=False).skipped[0].code == "RDM001"


@pytest.mark.parametrize("said", [True, False])
def test_a_run_that_logged_every_step_is_compared(tmp_path, said):
    report = windowed_run(tmp_path, every=1, said=said)
    assert report.clean == (("RDM001", "kl-metric-corrupted"),)


def test_a_run_of_which_nothing_could_be_compared_is_not_clean():
    batch = toy_batch([[1, 0]], ref=-1.5, per_row={"optim_step_id": [0, 1]})
    report = diagnose([batch], trainer="trl", options={"beta": 0.1}, logged={"kl": 0.1}, select=["RDM001"])
    assert not report.clean
    assert report.skipped[0].reason == "no step has a logged KL that belongs to one optimizer step"
