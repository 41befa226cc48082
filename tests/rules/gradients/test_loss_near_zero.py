import math

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.trl.grpo import objective
from rolloutdoctor.trainers.trl.options import OPTIONS

CODE = "RDG002"
TRL = {"trainer": "trl@1.16.0", "scale_rewards": "none"}

# 30 tokens: one group of lengths 8, 5 and 3 with advantages 1, -1/2 and -1/2 (rewards 1.5, 0, 0), another without
# spread over 7 and 7 tokens. Sum of A L = 8 - 2.5 - 1.5 = 4.
ARTICLE = {"rewards": [[1.5, 0, 0], [1, 1]], "lengths": [8, 5, 3, 7, 7]}


def trl_objective(**options):
    return objective(resolve(OPTIONS, (1, 16, 0), [Layer("test", {"scale_rewards": "none", **options})], trainer="trl"))


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", 0.0),  # row means of centred advantages cancel
        ("dapo", -4 / 30),
        ("bnpo", -4 / 30),
        ("dr_grpo", -4 / (5 * 10)),
    ],
)
def test_expected_loss_by_aggregation(loss_type, expected):
    options = {"loss_type": loss_type, "max_completion_length": 10}
    found = evaluate(toy_batch(**ARTICLE), trl_objective(**options))
    assert found.loss_at_ratio_one == pytest.approx(expected, abs=1e-7)
    assert found.loss == pytest.approx(expected, abs=1e-7)
    rule = found_by(CODE, toy_batch(**ARTICLE), **TRL, **options)
    if expected:
        assert rule is None  # a loss of -0.13 is not about zero
    else:
        assert values(rule)["expected_loss_at_ratio_one"] == pytest.approx(0, abs=1e-9)


def test_healthy_zero():
    # Row means: weights 1/(5 L). |g| by row = |A| / 5: 1/5, 1/10, 1/10. g^2 by row = L (A / 5L)^2 = A^2 / 25 L.
    found = found_by(CODE, toy_batch(**ARTICLE), **TRL, loss_type="grpo")
    square = (1 / 8 + 0.25 / 5 + 0.25 / 3) / 25
    assert values(found) == pytest.approx(
        {
            "loss": 0.0,
            "policy_loss": 0.0,
            "kl_loss": 0.0,
            "expected_loss_at_ratio_one": 0.0,
            "grad_l1": 2 / 5,
            "grad_l2": math.sqrt(square),
        },
        abs=1e-12,
    )
    assert (found.severity, found.verdict, found.fix) == (Severity.INFO, "exposed", None)
    assert found.advice.startswith("watch the reward and the gradient norm instead: on-policy the surrogate loss")
    assert found.examples[0].note == "gradient 0.4 (L1)"


def test_prediction_differs_from_the_loss_off_policy():
    # The row of advantage 1 has ratio 1/2 (not clipped from below): (-8/2 + 2.5 + 1.5) / 30 = 0; at ratio one -4/30.
    # |g| = |A| ratio / 30: 8 tokens of 1/2 and 8 of 1/2.
    old = [[-1 + math.log(2)] * 8, [-1.0] * 5, [-1.0] * 3, [-1.0] * 7, [-1.0] * 7]
    found = found_by(CODE, toy_batch(**ARTICLE, old=old), **TRL)
    assert values(found)["loss"] == pytest.approx(0, abs=1e-7)
    assert values(found)["expected_loss_at_ratio_one"] == pytest.approx(-4 / 30)
    assert values(found)["grad_l1"] == pytest.approx(8 / 30, rel=1e-6)
    assert values(found)["grad_l2"] == pytest.approx(2 / 30, rel=1e-6)


def test_kl_part():
    # u = policy - ref = 2^-5, k3 = exp(-u) - 1 + u; beta = 0.5. The policy part cancels, the KL part remains.
    batch = toy_batch([[1, 0]], lengths=2, policy=-1.0, ref=-1.03125)
    kl = 0.5 * (math.exp(-0.03125) - 1 + 0.03125)
    found = values(found_by(CODE, batch, **TRL, beta=0.5))
    assert found["policy_loss"] == pytest.approx(0, abs=1e-12)
    assert (found["kl_loss"], found["loss"], found["expected_loss_at_ratio_one"]) == pytest.approx((kl, kl, kl))


def test_dead_zero():
    found = found_by(CODE, toy_batch([[1, 1], [0, 0]]), **TRL)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert (values(found)["grad_l1"], values(found)["grad_l2"]) == (0.0, 0.0)
    assert "100 % of the steps have no gradient" in found.advice
    assert found.examples[0].note == "no gradient"


def test_empty_mask_is_dead():
    found = found_by(CODE, toy_batch([[1, 0]], mask=[[0], [0]]), **TRL)
    assert found.severity == Severity.WARNING


@pytest.mark.parametrize(("alive", "severity"), [(18, Severity.INFO), (17, Severity.WARNING)])
def test_one_dead_step_in_ten_is_information(alive, severity):
    steps = [toy_batch([[1, 0]], step=step) for step in range(alive)]
    dead = [toy_batch([[1, 1]], step=step) for step in (alive, alive + 1)]
    found = found_by(CODE, [*steps, *dead], **TRL)
    assert found.severity == severity
    assert found.examples[0].step == alive  # the dead step comes first


def test_a_lone_dead_step_without_a_kl_term_is_information():
    steps = [toy_batch([[1, 0]]), toy_batch([[1, 1]], step=1)]
    assert found_by(CODE, steps, **TRL).severity == Severity.INFO
    # With a KL term something has to move it.
    options = {**TRL, "beta": 0.1}
    steps = [toy_batch([[1, 0]], ref=-1.02), toy_batch([[1, 1]], ref=-1.0, step=1)]
    assert found_by(CODE, steps, **options).severity == Severity.WARNING
    # But for the first step, at which the policy is the reference.
    steps = [toy_batch([[1, 1]], ref=-1.0), toy_batch([[1, 0]], ref=-1.02, step=1)]
    assert found_by(CODE, steps, **options).severity == Severity.INFO


def test_steps_whose_gradient_is_the_kl_term_are_counted():
    steps = [toy_batch([[1, 0]], ref=-1.02), toy_batch([[1, 1]], ref=-1.02, step=1)]
    found = found_by(CODE, steps, **TRL, beta=0.1)
    assert found.headline == (
        "the loss is about 0 in 2 of 2 steps by design: on-policy it is beta x KL (loss / (beta x KL) = 1.00 in 2 "
        "of 2), which starts at 0 and grows, and does not measure progress; all 2 steps had a gradient, 1 of them from "
        "the KL term alone"
    )


@pytest.mark.parametrize(
    "options",
    [
        {**TRL, "beta": 0.1},
        # With a value of 1 the advantages of the last two responses are 0, token by token.
        {
            "trainer": "slime",
            "advantage_estimator": "ppo",
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_loss_type": "low_var_kl",
        },
    ],
)
def test_an_advantage_of_a_masked_response_is_no_policy_gradient(options):
    batch = toy_batch([[1, 0], [1, 1]], mask=[[0, 0], [0, 0], [1, 1], [1, 1]], ref=-1.02, values=1.0)
    found = found_by(CODE, batch, **options)
    assert found.headline.endswith("; the step had a gradient, from the KL term alone")


@pytest.mark.parametrize(
    ("trainer", "norm", "options"),
    [
        ("trl", "grad_norm", {"loss_type": "grpo"}),
        ("verl", "actor/grad_norm", {"adv_estimator": "grpo"}),
        ("slime", "train/grad_norm", {}),
    ],
)
def test_cut_gradient(trainer, norm, options):
    batch = toy_batch([[1, 0]])
    found = found_by(CODE, batch, trainer=trainer, logged={norm: 0.0}, **options)
    assert (found.severity, found.verdict) == (Severity.ERROR, "confirmed")
    assert "broken autograd graph" in found.advice
    assert "in 1 step the logged gradient norm is 0 and the recomputed one is not" in found.evidence
    healthy = found_by(CODE, batch, trainer=trainer, logged={norm: 1.0}, **options)
    assert (healthy.severity, healthy.verdict) == (Severity.INFO, "exposed")


def test_norm_of_zero_at_a_dead_step_is_not_a_cut():
    found = found_by(CODE, toy_batch([[1, 1]]), logged={"grad_norm": 0.0}, **TRL)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")


def test_norm_of_one_of_several_optimizer_steps_is_not_compared():
    batch = toy_batch([[1, 0], [1, 0]], per_row={"optim_step_id": [0, 0, 1, 1]})
    found = found_by(CODE, batch, logged={"grad_norm": 0.0, "loss": 0.5}, **TRL)
    assert (found.severity, found.verdict) == (Severity.INFO, "exposed")
    assert found.evidence == "no logged loss to compare with"


@pytest.mark.parametrize(
    ("logged", "verdict", "evidence"),
    [
        (0.0, "confirmed", "the logged loss equals the recomputed one in 1 of 1 step"),
        (1e-6, "confirmed", "the logged loss equals the recomputed one in 1 of 1 step"),
        (0.01, "exposed", "the logged loss equals the recomputed one in 0 of 1 step"),
        (math.nan, "exposed", "the logged loss equals the recomputed one in 0 of 1 step"),
    ],
)
def test_logged_loss(logged, verdict, evidence):
    found = found_by(CODE, toy_batch([[1, 0]]), logged={"loss": logged}, **TRL)
    assert found.verdict == verdict
    assert found.evidence.startswith(evidence)


def test_one_step_that_does_not_match_is_not_confirmed():
    batches = [toy_batch([[1, 0]]), toy_batch([[1, 0]], step=1)]
    found = found_by(CODE, batches, logged=[{"loss": 0.0}, {"loss": 0.5}], **TRL)
    assert found.verdict == "exposed"


def test_run_and_steps():
    # Only the step in question counts; the other has no numbers of this kind.
    batches = [toy_batch(**ARTICLE, step=1), toy_batch([[1, 0]], lengths=2)]
    found = found_by(CODE, batches, **TRL)
    assert [row["grad_l1"] for row in found.per_step] == [pytest.approx(0.5), None]
    assert values(found)["grad_l1"] == pytest.approx(0.5)
    assert found.headline == "the loss is about 0 (below 0.001) in 1 of 2 steps; the step had a gradient"


def test_mean_over_the_steps_in_question():
    # |g| of one group (1, 0) is 1/2, of a dead one 0
    batches = [toy_batch([[1, 0]]), toy_batch([[1, 1]], step=1)]
    assert values(found_by(CODE, batches, **TRL))["grad_l1"] == pytest.approx(0.25)


def test_loss_that_is_not_a_number_is_not_about_zero():
    assert found_by(CODE, toy_batch([[1, 0]], policy=math.nan), **TRL) is None


def test_eval_rows_do_not_count():
    batches = [toy_batch(**ARTICLE), toy_batch([[1, 0]], split="eval")]
    assert found_by(CODE, batches, **TRL) is None


def test_a_rule_may_add_a_column_of_a_name_that_another_reads():
    # RDI001 adds "loss", which this rule reads.
    report = report_on(toy_batch([[1, 0]]), select=[CODE, "RDI001"], **TRL)
    assert outcomes(report) == {CODE: "found", "RDI001": "clean"}
