from dataclasses import replace

import numpy as np
import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

CODE = "RDA010"
BASELINE = {"trainer": "verl", "options": {"adv_estimator": "reinforce_plus_plus_baseline"}}
SLIME = {"trainer": "slime", "options": {"normalize_advantages": True, "grpo_std_normalization": False}}
RETURNS = {"trainer": "verl", "options": {"adv_estimator": "reinforce_plus_plus"}}

REWARDS = [[3.0, 1.0, 0.5], [0.0, 2.0]]
MASK = [[1, 1, 0, 0], [1, 0], [1, 1, 1], [1, 1, 0, 0, 1], [1]]
RANK = [0, 0, 1, 1, 0]
CENTRED = [1.5, -0.5, -1.0, -1.0, 1.0]
LONGEST = 5


def positions(values, kind):
    """One row of the padded matrix for each response, and which of its positions count."""
    x, counted = np.zeros((5, LONGEST)), np.zeros((5, LONGEST), bool)
    for row, (value, mask) in enumerate(zip(values, MASK, strict=True)):
        for place, trained in enumerate(mask):
            x[row, place] = value if trained or kind == "response" else 0.0
            counted[row, place] = bool(trained) or kind == "response"
        counted[row] |= kind == "padded"
    return x[counted]


def whitened(values, mean_over, variance_over, own_centre=False):
    mean = positions(values, mean_over).mean()
    others = positions(values, variance_over)
    centre = others.mean() if own_centre else mean
    variance = ((others - centre) ** 2).sum() / (len(others) - 1)
    return [(value - mean) / np.sqrt(variance + 1e-8) for value in values]


def by_rank(values):
    made = [0.0] * 5
    for rank in (0, 1):
        rows = [row for row in range(5) if RANK[row] == rank]
        tokens = np.concatenate([[values[row]] * sum(MASK[row]) for row in rows])
        for row in rows:
            made[row] = (values[row] - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    return made


def batch(made, rank=True):
    columns = {"advantage": made, **({"rank": RANK} if rank else {})}
    return toy_batch(REWARDS, mask=MASK, policy=-1.0, per_row=columns)


def causes(batches, *, trainer, options, logged=None):
    report = diagnose(batches, trainer=trainer, options=options, logged=logged)
    return {one.code: one for one in report.findings if one.cause is not None}, report


CASES = {
    "whitened-over-response": ("response", "response"),
    "whitened-over-response-mean": ("response", "trained"),
    "whitened-over-response-variance": ("trained", "response"),
    "whitened-over-padded": ("padded", "padded"),
    "whitened-over-padded-mean": ("padded", "trained"),
    "whitened-over-padded-variance": ("trained", "padded"),
    "whitened-over-padded-mean-own-centre": ("padded", "trained", True),
    "whitened-over-padded-variance-own-centre": ("trained", "padded", True),
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("setup", [BASELINE, SLIME], ids=["verl", "slime"])
def test_moments_over_other_tokens(name, setup):
    # slime compares the whole step where groups differ in size.
    values = CENTRED if setup is BASELINE else [score - 1.3 for group in REWARDS for score in group]
    made = whitened(values, *CASES[name])
    right = whitened(values, "trained", "trained")
    found, _ = causes([batch(made)], **setup)
    assert list(found) == [CODE]
    finding = found[CODE]
    assert finding.cause.hypothesis == name
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    shifts = [abs(one - other) for one, other in zip(made, right, strict=True)]
    assert finding.measures["advantage_shift_max"].value == pytest.approx(max(shifts), rel=1e-6)
    flips = sum(one * other < 0 for one, other in zip(made, right, strict=True))
    assert finding.measures["sign_flips"].value == flips


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("setup", [BASELINE, SLIME], ids=["verl", "slime"])
def test_moments_of_each_rank(setup):
    values = CENTRED if setup is BASELINE else [score - 1.3 for group in REWARDS for score in group]
    found, _ = causes([batch(by_rank(values))], **setup)
    assert found[CODE].cause.hypothesis == "whitened-by-rank"
    # Without the column nothing explains it, and it is not clean either.
    found, report = causes([batch(by_rank(values), rank=False)], **setup)
    assert CODE not in found
    assert "RDA004" in [one.code for one in report.findings]


@pytest.mark.parametrize("zeros", ["response", "padded"])
def test_returns_over_padding(zeros):
    # One return for all tokens of a row: the reward, at gamma 1.
    mask = [[1, 1, 0, 0], [1, 0, 1], [1, 1, 1]]
    rewards = [3.0, 1.0, 0.5]
    # The reward is at the last token: masked in the first row, it is lost.
    returns = [0.0, 1.0, 0.5]
    tokens = [value for value, row in zip(returns, mask, strict=True) for trained in row if trained]
    extra = (12 if zeros == "padded" else 10) - len(tokens)
    everything = np.array([*tokens, *[0.0] * extra])
    mean, std = everything.mean(), np.sqrt(everything.var(ddof=1) + 1e-8)
    made = [[(value - mean) / std * trained for trained in row] for value, row in zip(returns, mask, strict=True)]
    rows = toy_batch([rewards], mask=mask, per_token={"advantages": made})
    found, _ = causes([rows], **RETURNS)
    assert found[CODE].cause.hypothesis == f"whitened-over-{zeros}"


@pytest.mark.parametrize("setup", [BASELINE, SLIME], ids=["verl", "slime"])
def test_over_the_trained_tokens_is_clean(setup):
    values = CENTRED if setup is BASELINE else [score - 1.3 for group in REWARDS for score in group]
    report = diagnose([batch(whitened(values, "trained", "trained"))], **setup, select=[CODE])
    assert [code for code, _ in report.clean] == [CODE]


def test_an_objective_that_does_not_whiten_may_have_been_whitened():
    made = whitened(CENTRED, "padded", "padded")
    found, _ = causes([batch(made)], trainer="trl", options={"scale_rewards": "none"})
    assert found[CODE].cause.hypothesis == "whitened-anyway-over-padded"


def test_nothing_logged_is_no_verdict():
    (skipped,) = diagnose([toy_batch(REWARDS, mask=MASK)], **BASELINE, select=[CODE]).skipped
    assert skipped.reason == "nothing was logged that could show it"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("setup", [BASELINE, SLIME, RETURNS], ids=["verl", "slime", "returns"])
def test_healthy_runs(setup, seed):
    batch = random_batch(seed)
    spec = TRAINERS[setup["trainer"]]
    given = resolve(spec.options, parse_version(spec.newest), [Layer("test", setup["options"])], trainer=spec.name)
    rows = evaluate(batch, spec.objective(given)).rows
    if rows.advantage_T is not None:
        logged = replace(batch, per_token={**batch.per_token, "advantages": rows.advantage_T.float()})
    else:
        logged = replace(batch, per_row={**batch.per_row, "advantage": rows.advantage_N.float().double()})
    ranked = replace(logged, per_row={**logged.per_row, "rank": torch.arange(len(batch)) % 2})
    report = diagnose([ranked], **setup, select=[CODE])
    assert [code for code, _ in report.clean] == [CODE]
