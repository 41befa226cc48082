import math

import pytest
from rules.checking import found_by, report_on, values

from rolloutdoctor.audit.step import compare_step
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules import step
from rolloutdoctor.testing import toy_batch

CODE = "RDG001"
TRL = {"trainer": "trl@1.16.0", "beta": 0.1, "scale_rewards": "none"}

# Two groups: rewards (1, 1) over rows of 2 and 2 tokens, and (1, 0) over rows of 1 and 3 tokens. On policy, with
# u = policy - ref = 0.5 on every token. TRL 1.16 multiplies k3 by the ratio, so its derivative is u = 0.5, times
# beta = 0.05. dapo gives each of the 8 tokens the weight 1/8; without scaling the advantages are 0, 0, 0.5, -0.5.
# Derivatives by 8:  dead rows 4 tokens of 0.05;  row 3: -0.5 + 0.05 = -0.45;  row 4: 3 tokens of 0.5 + 0.05 = 0.55.
# |.|:  dead 0.2, rest 0.45 + 1.65 = 2.1.   squares: dead 0.01, rest 0.2025 + 0.9075 = 1.11.


def mixed(step=0, **columns):
    return toy_batch([[1, 1], [1, 0]], lengths=[2, 2, 1, 3], policy=-1.0, ref=-1.5, step=step, **columns)


def dead(step=0, rewards=((1, 1), (0, 0)), **columns):
    return toy_batch(rewards, lengths=2, policy=-1.0, ref=-1.5, step=step, **columns)


def test_measures():
    found = found_by(CODE, mixed(), **TRL)
    assert values(found) == pytest.approx(
        {
            "groups_share": 1 / 2,
            "rows_share": 2 / 4,
            "tokens_share": 4 / 8,
            "grad_share_l1": 0.2 / 2.3,
            "grad_share_l2": math.sqrt(0.01 / 1.12),
            "relative_change_l1": 0.2 / 2.1,
            "kappa": 1.0,  # what the fix takes away is orthogonal to what it leaves
            "cosine": math.sqrt(1.11 / 1.12),
            "kl_loss_share": 4 / 8,
            # every token has the same p, so (1 - p)^2 cancels: dead once, rest twice, and the other way round
            "grad_share_logits_l2_low": math.sqrt(0.01 / (0.01 + 2 * 1.11)),
            "grad_share_logits_l2_high": math.sqrt(2 * 0.01 / (2 * 0.01 + 1.11)),
        },
        rel=1e-9,
    )
    assert (found.severity, found.verdict, found.fix) == (Severity.INFO, "exposed", "zero-std")


def test_exact_logits_share():
    # 1 - 2p + S with p = exp(-1), S = 0.5 on the dead tokens and 0.25 on the rest
    squares = [[0.5, 0.5], [0.5, 0.5], [0.25], [0.25] * 3]
    found = found_by(CODE, mixed(per_token={"sum_pi_squared": squares}), **TRL)
    spent = 0.01 * (1.5 - 2 / math.e)
    rest = 1.11 * (1.25 - 2 / math.e)
    assert values(found)["grad_share_logits_l2"] == pytest.approx(math.sqrt(spent / (spent + rest)), rel=1e-9)
    assert "grad_share_logits_l2_low" not in values(found)


@pytest.mark.parametrize(
    ("of_dead", "of_rest", "words"),
    [
        # Squared norms by logits are 0.01 and 1.11 times the spread; by log-probs the share is the root of 1 / 112.
        (0.24, 1.0, "log-probs overstate"),
        (0.26, 1.0, ""),
        (1.0, 0.23, "log-probs understate"),
        (1.0, 0.26, ""),
    ],
)
def test_nearly_certain_tokens_are_said_to_carry_it(of_dead, of_rest, words):
    policy = [[-0.1] * 2, [-0.1] * 2, [-0.1], [-0.1] * 3]
    of_token = [spread - 1 + 2 * math.exp(-0.1) for spread in (of_dead, of_dead, of_rest, of_rest)]
    batch = toy_batch(
        [[1, 1], [1, 0]],
        lengths=[2, 2, 1, 3],
        policy=policy,
        ref=[[each - 0.5 for each in row] for row in policy],
        per_token={"sum_pi_squared": [[square] * len(row) for square, row in zip(of_token, policy, strict=True)]},
    )
    message = found_by(CODE, batch, **TRL).message
    assert (words in message) if words else ("nearly certain" not in message)


def test_exact_share_lies_between_the_bounds():
    # S is between p^2 (all other tokens infinitely rare) and p^2 + (1 - p)^2 (one other token)
    p = math.exp(-1.0)
    for square in (p**2, p**2 + (1 - p) ** 2):
        exact = values(found_by(CODE, mixed(per_token={"sum_pi_squared": square}), **TRL))["grad_share_logits_l2"]
        bounds = values(found_by(CODE, mixed(), **TRL))
        assert bounds["grad_share_logits_l2_low"] <= exact <= bounds["grad_share_logits_l2_high"]


def test_rounded_squares_are_not_negative_norms():
    # p is about one, and the sum of squares was rounded below p^2: 1 - 2p + S is below 0
    squares = {"sum_pi_squared": (1 - 2.0**-24) ** 2 - 1e-6}
    batch = toy_batch([[1, 1], [1, 0]], lengths=1, policy=-(2.0**-24), ref=-1.5, per_token=squares)
    assert 0 <= values(found_by(CODE, batch, **TRL))["grad_share_logits_l2"] <= 1


def test_exact_share_needs_the_column_in_every_step():
    batches = [mixed(per_token={"sum_pi_squared": 0.5}), mixed(step=1)]
    found = found_by(CODE, batches, **TRL)
    assert "grad_share_logits_l2" not in values(found)
    assert "grad_share_logits_l2_low" in values(found)


def test_run_and_steps():
    # Step 1 has no dead group: lengths 1 and 1, weight 1/2, |-0.45| + 0.55 = 1.0, squares 0.2025 + 0.3025 = 0.505.
    live = toy_batch([[1, 0]], lengths=1, policy=-1.0, ref=-1.5, step=1)
    found = found_by(CODE, [live, mixed()], **TRL)
    assert [(row["step"], row["split"]) for row in found.per_step] == [(0, "train"), (1, "train")]
    assert [row["grad_share_l1"] for row in found.per_step] == pytest.approx([0.2 / 2.3, 0.0])
    assert [row["groups_share"] for row in found.per_step] == pytest.approx([0.5, 0.0])
    assert values(found)["groups_share"] == pytest.approx(1 / 3)
    assert values(found)["tokens_share"] == pytest.approx(4 / 10)
    # Over the run the gradients of the steps stand side by side: 0.2/8 of 2.3/8 + 1.0/2.
    assert values(found)["grad_share_l1"] == pytest.approx((0.2 / 8) / (2.3 / 8 + 1.0 / 2))
    total = 1.12 / 64 + 0.505 / 4
    assert values(found)["grad_share_l2"] == pytest.approx(math.sqrt((0.01 / 64) / total))
    assert values(found)["cosine"] == pytest.approx(math.sqrt((total - 0.01 / 64) / total))


def test_fractional_rewards_that_are_equal():
    # In float32 the standard deviation of eight 0.3 is not 0; max - min is.
    batch = toy_batch([[0.3] * 8, [1, 0]], lengths=1, policy=-1.0, ref=-1.5)
    assert values(found_by(CODE, batch, dtype="float32", **TRL))["groups_share"] == 0.5


def test_nearly_equal_rewards_are_not():
    batch = toy_batch([[0.3, 0.3001]], lengths=1, policy=-1.0, ref=-1.5)
    assert found_by(CODE, batch, **TRL) is None


def test_groups_of_one_are_never_counted():
    batch = toy_batch([[1], [0], [1, 0]], lengths=1, policy=-1.0, ref=-1.5)
    options = {"trainer": "verl", "adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1}
    assert found_by(CODE, batch, **options) is None


def test_one_scored_row_is_a_group_of_one():
    batch = toy_batch([[1, math.nan], [1, 0]], lengths=1, policy=-1.0, ref=-1.5)
    assert found_by(CODE, batch, **TRL) is None


def test_unscored_row_of_a_dead_group_is_dead_too():
    batch = toy_batch([[1, 1, math.nan], [1, 0, 1]], lengths=1, policy=-1.0, ref=-1.5)
    assert values(found_by(CODE, batch, **TRL))["rows_share"] == 0.5


def test_eval_rows_are_never_counted():
    assert found_by(CODE, [mixed(), dead(split="eval")], **TRL).measures["groups_share"].value == 0.5
    report = report_on(dead(split="eval"), select=[CODE], **TRL)
    assert [skipped.reason for skipped in report.skipped] == ["no training rows were read"]


def test_no_kl_term_is_clean():
    assert found_by(CODE, mixed(), trainer="trl", beta=0.0) is None
    assert found_by(CODE, mixed(), trainer="verl", adv_estimator="grpo") is None


def test_policy_that_is_the_reference_is_clean():
    assert found_by(CODE, toy_batch([[1, 1]], policy=-1.0, ref=-1.0), **TRL) is None


def test_dead_rows_without_tokens_are_clean():
    batch = toy_batch([[1, 1], [1, 0]], mask=[[0], [0], [1], [1]], policy=-1.0, ref=-1.5)
    assert found_by(CODE, batch, **TRL) is None


@pytest.mark.parametrize(
    ("trainer", "norm", "options"),
    [
        ("trl", "grad_norm", {"beta": 0.1}),
        ("verl", "actor/grad_norm", {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1}),
        ("slime", "train/grad_norm", {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}),
    ],
)
def test_confirmed_by_the_gradient_norm_of_a_dead_step(trainer, norm, options):
    found = found_by(CODE, [dead(), mixed(1)], logged=[{norm: 0.25}, {norm: 2.0}], trainer=trainer, **options)
    assert (found.verdict, found.severity) == ("confirmed", Severity.INFO)
    assert f"{norm} is above zero (up to 0.25)" in found.evidence


@pytest.mark.parametrize("logged", [{}, {"grad_norm": 0.0}, {"grad_norm": math.nan}, {"actor/grad_norm": 1.0}])
def test_no_gradient_norm_is_no_proof(logged):
    found = found_by(CODE, dead(), logged=logged, **TRL)
    assert found.verdict == "exposed"


def test_a_step_with_a_live_group_is_no_proof():
    assert found_by(CODE, mixed(), logged={"grad_norm": 1.0}, **TRL).verdict == "exposed"


def test_logged_advantages_other_than_zero_are_no_proof():
    residue = dead(per_row={"advantage": [0.0, 0.0, 1e-4, 1e-4]})
    assert found_by(CODE, residue, logged={"grad_norm": 1.0}, **TRL).verdict == "exposed"
    zeros = dead(per_row={"advantage": [0.0, 0.0, 0.0, 0.0]})
    assert found_by(CODE, zeros, logged={"grad_norm": 1.0}, **TRL).verdict == "confirmed"


def test_token_advantages_count_too():
    residue = dead(per_token={"advantages": [[0, 0], [0, 0], [1e-4, 1e-4], [0, 0]]})
    assert found_by(CODE, residue, logged={"grad_norm": 1.0}, **TRL).verdict == "exposed"


def test_float32_residue_is_no_proof():
    # Nothing logged says that these advantages were 0, and in float32 eight times 0.6 does not give 0.
    batch = dead(rewards=[[0.6] * 8])
    assert found_by(CODE, batch, logged={"grad_norm": 1.0}, trainer="trl", beta=0.1).verdict == "exposed"


def test_a_logged_kl_is_no_proof():
    # It holds the KL of these groups whether or not their gradient does: the mean k3 of log-probs half a nat apart.
    options = {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}
    logged = {"actor/kl_loss": math.exp(-0.5) - 0.5}
    assert found_by(CODE, mixed(), trainer="verl", logged=logged, **options).verdict == "exposed"


def test_several_optimizer_steps_are_no_proof():
    batch = dead(per_row={"optim_step_id": [0, 0, 1, 1]})
    assert found_by(CODE, batch, logged={"grad_norm": 1.0}, **TRL).verdict == "exposed"


def test_a_norm_that_the_kl_cannot_explain_is_no_proof():
    # Policy and reference agree in step 0, so its norm of 1 comes from elsewhere.
    still = toy_batch([[1, 1]], policy=-1.0, ref=-1.0)
    found = found_by(CODE, [still, mixed(1)], logged=[{"grad_norm": 1.0}, {}], **TRL)
    assert found.verdict == "exposed"


def test_examples_are_the_groups_with_the_largest_gradient():
    batch = toy_batch([[1, 1], [0, 0], [1, 0]], lengths=[1, 1, 2, 2, 1, 1], policy=-1.0, ref=-1.5)
    found = found_by(CODE, batch, **TRL)
    assert [(example.group_id, example.sample_id) for example in found.examples] == [("g1", "r2"), ("g0", "r0")]
    assert found.examples[0].weight == pytest.approx(4 * 0.05 / 8)
    assert found.examples[0].note.startswith("every reward is 0; ")


def test_not_applicable_where_every_response_is_alone():
    report = report_on(toy_batch([[1], [0]], lengths=2, policy=-1.0, ref=-1.5), select=[CODE], **TRL)
    assert [(one.code, one.reason) for one in report.not_applicable] == [
        (CODE, "no training group has two or more responses")
    ]


def test_a_pair_is_a_group_and_one_without_a_trained_token_has_nothing_to_train():
    batch = toy_batch([[1, 0]], lengths=2, policy=-1.0, ref=-1.5)
    assert [code for code, _ in report_on(batch, select=[CODE], **TRL).clean] == [CODE]
    batch = toy_batch([[1, 1]], mask=[[0, 0]] * 2, policy=-1.0, ref=-1.5)
    report = report_on(batch, select=[CODE], **TRL)
    assert [(one.code, one.reason) for one in report.not_applicable] == [(CODE, "no token is trained")]


@pytest.mark.parametrize(("apart", "is_said"), [(0.006, False), (0.012, True)])
def test_their_share_of_the_kl_is_said_above_rounding(apart, is_said):
    batch = toy_batch([[1, 1], [1, 0]], lengths=2, policy=-1.0, ref=-1.0 - apart)
    assert ("of the KL term" in found_by(CODE, batch, **TRL).headline) is is_said


def adam_words(norms, **options):
    """What the finding says of Adam, after a first step that has a spread and further ones that have none."""
    steps = [mixed(1), *(dead(step=number) for number in range(2, len(norms) + 1))]
    logged = [{"grad_norm": norm} if norm is not None else {} for norm in norms]
    given = {"optim": "adamw_torch", "adam_beta1": 0.9, "max_grad_norm": 0.0, **options}
    stated = {name: value for name, value in given.items() if value is not None}
    found = found_by(CODE, steps, logged=logged, trainer="trl", beta=0.1, **stated)
    return found.message.partition("Adam")[2]


def test_the_share_of_the_first_moment_is_told_by_the_norms():
    # The one update of the KL alone has 0.1 of 0.1 + 0.9 * 1.
    assert "10 % are the step's own" in adam_words([1.0, 0.1])
    # Clipped at 0.1 the first one had no more: 0.1 of 0.1 + 0.9 * 0.1.
    assert "52.6 % are the step's own" in adam_words([1.0, 0.1], max_grad_norm=0.1)
    assert "in the median 12.1 %" in adam_words([1.0, 0.1, 0.15])


@pytest.mark.parametrize(
    ("norms", "options"),
    [
        ([1.0, None], {}),
        ([None, 0.1], {}),
        ([math.nan, 0.1], {}),
        ([1.0, 0.1], {"optim": "adafactor"}),
        ([1.0, 0.1], {"adam_beta1": None}),
    ],
)
def test_without_norms_or_options_no_share_is_told(norms, options):
    assert "'s momentum also carries gradients of earlier steps" in adam_words(norms, **options)


def test_metrics_that_the_fix_leaves_as_they_are_are_compared_once(monkeypatch):
    compared = []

    def compare(logged, evaluation, trainer, config, metrics):
        compared.append({name for name in logged.metrics if name in metrics})
        return compare_step(logged, evaluation, trainer, config, metrics)

    monkeypatch.setattr(step, "compare_step", compare)
    logged = {"loss": 0.025, "reward": 0.75, "completions/mean_length": 2.0}
    found_by(CODE, mixed(), logged=logged, **TRL)
    assert {frozenset(names) for names in compared} == {frozenset(logged), frozenset({"loss"})}
