from dataclasses import replace

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

CODE = "RDA006"
NONE = {"trainer": "trl", "options": {"scale_rewards": "none"}}
MASK = [[1, 1, 0, 1], [1, 1], [1, 0, 0]]
REWARDS = [[4, 1, 1]]
ROWS = [2.0, -1.0, -1.0]


def batch(tokens, **columns):
    return toy_batch(REWARDS, mask=MASK, per_token={"advantages": tokens}, **columns)


def found_in(rows, select=(CODE,), **setup):
    report = diagnose([rows], **(setup or NONE), select=list(select))
    assert not [one for one in report.skipped if one.code == CODE], report.skipped
    return next((one for one in report.findings if one.code == CODE), None)


def values(finding):
    return {name: measure.value for name, measure in finding.measures.items()}


def test_zero_on_trained_tokens():
    finding = found_in(batch([[2, 0, 0, 2], [-1, -1], [-1, 0, 0]]))
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert values(finding) == {
        "rows": 1,
        "zero_tokens": 1,
        "zero_token_share": 1 / 6,
        "dead_rows": 0,
        "varying_rows": 1,
        "largest_spread": 2.0,
        "outside_tokens": 0,
        "outside_mass_share": 0.0,
    }
    assert [(one.sample_id, one.note) for one in finding.examples] == [
        ("r0", "1 of 3 trained tokens have an advantage of 0; they range from 0 to 2")
    ]


def test_shifted_against_the_mask():
    # Everything one token late: masked and trained tokens swap.
    finding = found_in(batch([[0, 2, 2, 0], [0, -1], [0, -1, 0]]))
    assert values(finding)["zero_tokens"] == 2 + 1 + 1
    assert values(finding)["rows"] == 3
    assert values(finding)["zero_token_share"] == 4 / 6


def test_the_row_has_an_advantage():
    tokens = [[0, 0, 0, 0], [-1, -1], [-1, 0, 0]]
    assert values(found_in(batch(tokens, per_row={"advantage": ROWS})))["zero_tokens"] == 3


def test_rows_that_are_zero_as_a_whole():
    # Nothing but the reward says that the first row has an advantage of 2.
    finding = found_in(batch([[0, 0, 0, 0], [-1, -1], [-1, 0, 0]]))
    assert (finding.severity, values(finding)["dead_rows"]) == (Severity.ERROR, 1)
    assert "3 trained tokens (50 %) have advantage 0" in finding.message


def test_different_advantages_in_a_row():
    finding = found_in(batch([[2, 1.5, 0, 2], [-1, -1], [-1, 0, 0]]))
    assert values(finding)["varying_rows"] == 1
    assert values(finding)["largest_spread"] == 0.5
    assert values(finding)["zero_tokens"] == 0


def test_outside_of_the_mask_is_information():
    finding = found_in(batch([[2, 2, 7, 2], [-1, -1], [-1, 0, 0]]))
    assert finding.severity == Severity.INFO
    assert values(finding)["outside_tokens"] == 1
    assert values(finding)["outside_mass_share"] == 7 / (6 + 7 + 2 + 1)


@pytest.mark.parametrize(
    "tokens",
    [
        [[2, 2, 0, 2], [-1, -1], [-1, 0, 0]],
        # the row's own advantage on every response token
        [[2, 2, 2, 2], [-1, -1], [-1, -1, -1]],
        # rounded once
        [[2, 2 + 2.0**-22, 0, 2], [-1, -1], [-1, 0, 0]],
    ],
)
def test_look_alikes(tokens):
    assert found_in(batch(tokens)) is None


def test_an_advantage_of_zero():
    rows = toy_batch([[1, 1], [1, 0]], per_token={"advantages": [[0.0] * 4] * 2 + [[0.5] * 4, [-0.5] * 4]})
    assert found_in(rows) is None


def test_a_fully_masked_row_keeps_its_advantage():
    rows = toy_batch([[4, 1, 1]], mask=[[0, 0], [1, 1], [1]], per_token={"advantages": [[2, 2], [-1, -1], [-1]]})
    assert found_in(rows) is None


def test_estimators_with_a_time_axis():
    rows = batch([[2, 0, 0, 2], [-1, 5], [-1, 0, 0]])
    assert found_in(rows, trainer="verl", options={"adv_estimator": "reinforce_plus_plus"}) is None


def test_no_advantages_of_tokens():
    (skipped,) = diagnose([toy_batch(REWARDS, per_row={"advantage": ROWS})], **NONE, select=[CODE]).skipped
    assert skipped.reason == "missing column advantages"


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("verl", {"adv_estimator": "grpo"}),
        ("verl", {"adv_estimator": "reinforce_plus_plus_baseline"}),
        ("slime", {}),
        ("trl", {}),
    ],
)
def test_healthy_runs(trainer, options, seed, masked):
    batch, spec = random_batch(seed, binary=seed % 2 == 0), TRAINERS[trainer]
    given = resolve(spec.options, parse_version(spec.newest), [Layer("test", options)], trainer=trainer)
    made = evaluate(batch, spec.objective(given)).rows.advantage_N.float()
    tokens_T = torch.repeat_interleave(made, batch.rows.diff())
    if masked:
        tokens_T = tokens_T * batch.column("response_mask")
    logged = replace(batch, per_token={**batch.per_token, "advantages": tokens_T})
    assert found_in(logged, trainer=trainer, options=options) is None
