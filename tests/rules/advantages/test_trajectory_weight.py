"""RDA023: rows of a trajectory that each weigh as much as another trajectory, and losses that count something else."""

import pytest
from objectives import objective_of
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch

CODE = "RDA023"
PER_ROW = {"trainer": "trl", "loss_type": "grpo", "beta": 0.0}


def rows(trajectories, lengths=4, **kwargs):
    rewards = [[float(place % 2) for place in range(len(trajectories))]]
    return toy_batch(rewards, lengths=lengths, per_row={"trajectory_id": trajectories}, **kwargs)


def test_a_trajectory_of_three_rows():
    found = found_by(CODE, rows([0, 0, 0, 1]), **PER_ROW)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    # 3/4 and 1/4 of the loss, where halves are equal parts.
    assert values(found) == pytest.approx({"moved_weight": 0.25, "largest_weight": 1.5, "most_rows": 3})
    assert found.examples[0].note == "3 rows, 1.5 times an equal part of the loss"


def test_lengths_do_not_matter_to_a_mean_over_rows():
    found = found_by(CODE, rows([0, 0, 0, 1], lengths=[2, 9, 4, 7]), **PER_ROW)
    assert values(found)["moved_weight"] == pytest.approx(0.25)


def test_a_row_without_a_trained_token_has_no_weight():
    batch = rows([0, 0, 1, 1], mask=[[1, 1], [0, 0], [1, 1], [1, 0]])
    # Two of the three trained rows are of the second trajectory: 2/3 and 1/3 of the loss.
    assert values(found_by(CODE, batch, **PER_ROW))["moved_weight"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("trajectories", [[0, 0, 1, 1], [0, 1, 2, 3], [-1, -1, -1, -1]])
def test_equal_numbers_of_rows(trajectories):
    report = report_on(rows(trajectories), select=[CODE], **PER_ROW)
    assert outcomes(report)[CODE] == ("clean" if trajectories[0] == trajectories[1] == 0 else "not applicable")


@pytest.mark.parametrize(
    "options",
    [
        {"trainer": "trl", "loss_type": "dapo", "beta": 0.0},
        {"trainer": "slime", "advantage_estimator": "grpo"},
    ],
    ids=["tokens", "trajectories"],
)
def test_a_loss_that_counts_something_else(options):
    report = report_on(rows([0, 0, 0, 1], lengths=[2, 9, 4, 7]), select=[CODE], **options)
    assert outcomes(report) == {CODE: "not applicable"}


def test_skipped_without_the_column():
    report = report_on(toy_batch([[1, 0]]), select=[CODE], **PER_ROW)
    assert report.skipped[0].reason == "missing column trajectory_id"


FIX = "one-weight-per-trajectory"
AVERAGES = [
    ("trl", {"loss_type": "grpo", "beta": 0.0, "scale_rewards": "none"}),
    (
        "verl",
        {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": False,
            "loss_agg_mode": "seq-mean-token-mean",
            "trainer.use_v1": False,
        },
    ),
]


@pytest.mark.parametrize(("trainer", "options"), AVERAGES)
def test_the_fix_gives_each_trajectory_an_equal_part(trainer, options):
    # The first trajectory has a row of two tokens, the second rows of 1, 3 and 4.
    batch = toy_batch([[1, 0, 0, 0]], lengths=[2, 1, 3, 4], per_row={"trajectory_id": [7, 8, 8, 8]})
    objective = objective_of(trainer, **options)
    before, after = (evaluate(batch, each).tokens for each in (objective, choose(FIX).apply(objective)))
    # A mean over four rows: a quarter each, by their tokens. Over two trajectories: halves, by tokens of these.
    assert before.weight_N.tolist() == pytest.approx([1 / 8, 1 / 4, 1 / 12, 1 / 16], rel=1e-6)
    assert after.weight_N.tolist() == pytest.approx([1 / 4, 1 / 16, 1 / 16, 1 / 16], rel=1e-6)
    # At ratio one the gradient of a token is minus its advantage, 3/4 and -1/4, times the weight.
    assert before.grad_l1_N.tolist() == pytest.approx([3 / 16, 1 / 16, 1 / 16, 1 / 16], rel=1e-6)
    assert after.grad_l1_N.tolist() == pytest.approx([3 / 8, 1 / 64, 3 / 64, 4 / 64], rel=1e-6)


def test_the_finding_names_the_fix_where_it_is_about_the_loss():
    assert found_by(CODE, rows([0, 0, 0, 1]), **PER_ROW).fix == FIX
    # A row is a sum over its tokens: a mean over the tokens of a trajectory is another loss.
    summed = found_by(CODE, rows([0, 0, 0, 1]), trainer="trl", loss_type="dr_grpo", beta=0.0)
    assert (summed.code, summed.fix) == (CODE, None)
