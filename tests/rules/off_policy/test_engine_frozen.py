import math
from dataclasses import replace

import polars as pl
import pytest
import torch
from rules.checking import outcomes, report_on, values
from rules.drift import Policy, run_of, step_of

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.table import find

CODE = "RDO010"
PROMPTS = tuple(range(8))


def model(**changes):
    return Policy(**{"length": 4, "vocabulary": 6, "rate": 0.05, **changes})


def run(policy, steps=12, **kwargs):
    return run_of(policy, steps, **{"prompts": PROMPTS, **kwargs})


def found_in(batches):
    report = report_on(batches, trainer=None, select=[CODE])
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


def test_an_engine_that_never_updates():
    finding = found_in(run(model(), versions=lambda step, row: 0))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    found = values(finding)
    assert found["frozen_from"] == 0
    assert found["frozen_share"] >= 0.9
    assert found["sampler_move"] < 0.02 < 0.1 < found["trainer_move"]
    assert found["noise"] == pytest.approx(0.005, rel=0.5)
    assert "from version 0 on" in finding.headline


@pytest.mark.slow
def test_the_gap_of_an_old_engine_follows_from_it():
    # Longer responses than a first token needs, so that their gap is seen, too.
    batches = run(Policy(rate=0.1, length=32, vocabulary=6), versions=lambda step, row: min(step, 4))
    stale = report_on(batches, trainer=None, select=["RDO002"]).findings[0]
    assert stale.severity == Severity.WARNING
    both = {found.code: found for found in report_on(batches, trainer=None, select=["RDO002", CODE]).findings}
    assert both[CODE].severity == Severity.WARNING
    assert both["RDO002"].follows_from == CODE
    assert stale.follows_from is None


def test_an_engine_that_stops():
    finding = found_in(run(model(rate=0.08), 16, versions=lambda step, row: min(step, 6)))
    assert 4 <= values(finding)["frozen_from"] <= 7


@pytest.mark.slow
def test_prompts_of_an_epoch():
    # Each prompt recurs after four steps.
    batches = []
    for step in range(16):
        prompts = tuple(range(6 * (step % 4), 6 * (step % 4) + 6))
        batches += [
            replace(one, step=step)
            for one in run_of(model(), step + 1, prompts=prompts, versions=lambda step, row: 0)[step:]
        ]
    assert values(found_in(batches))["frozen_from"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        lambda: run(model()),
        lambda: run(model(noise=0.02)),
        # the engine follows some versions later
        lambda: run(model(), versions=lambda step, row: max(0, step - 3)),
        lambda: run(model(), versions=lambda step, row: step // 4 * 4),
        # neither moves
        lambda: run(model(rate=0.0)),
        lambda: run(model(rate=0.0, noise=0.02), versions=lambda step, row: 0),
        lambda: run(model(rate=0.0, noise=0.03), 20, versions=lambda step, row: 0),
        # a policy that sharpens
        lambda: run(model(rate=0.0, sharpening=0.1)),
    ],
    ids=lambda _: "",
)
def test_look_alikes(made):
    assert found_in(made()) is None


def test_small_moves_of_a_trainer_whose_engine_gives_the_same_numbers():
    slow = model(noise=0.0, rate=0.004)
    finding = found_in(run(slow, versions=lambda step, row: 0))
    found = values(finding)
    assert found["sampler_move"] == 0.0 < 0.002 < found["trainer_move"] < 0.1
    assert found_in(run(slow)) is None
    assert found_in(run(slow, versions=lambda step, row: max(0, step - 1))) is None
    # In bf16 log-probs that move by less than their spacing stay where they are, whatever the engine does.
    rounded = [
        replace(
            one,
            per_token={**one.per_token, "rollout_log_probs": one.column("rollout_log_probs").bfloat16().float()},
        )
        for one in run(model(noise=0.0, rate=0.002))
    ]
    assert found_in(rounded) is None


def with_reference(policy, steps, versions=None):
    """Steps whose reference is version 0, with prompts that never recur."""
    made = []
    for step in range(steps):
        kwargs = {"prompts": tuple(range(8 * step, 8 * step + 8)), "versions": versions}
        trainer, reference = step_of(policy, step, **kwargs), step_of(policy, step, trainer=0, **kwargs)
        columns = {**trainer.per_token, "ref_log_probs": reference.column("old_log_probs")}
        made.append(replace(trainer, per_token=columns))
    return made


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_sampler_that_is_the_reference(noise):
    policy = model(noise=noise, rate=0.1, length=16)
    finding = found_in(with_reference(policy, 6, lambda step, row: 0))
    assert finding.headline.startswith("the sampler still runs the reference weights")
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    for made in (with_reference(policy, 6), with_reference(replace(policy, rate=0.0), 6, lambda step, row: 0)):
        assert outcomes(report_on(made, trainer=None, select=[CODE])) == {CODE: "skipped"}


def test_stamps_are_versions():
    # Four steps of one version each: the sampler stays as it should.
    batches = run(
        model(),
        versions=lambda step, row: step // 4 * 4,
        stamps=lambda step, row: (step // 4 * 4,) * 2,
    )
    assert found_in(batches) is None
    unknown = [
        replace(one, per_row={**one.per_row, "policy_version_max": torch.full((len(one),), -1)}) for one in batches
    ]
    (skipped,) = report_on(unknown, trainer=None, select=[CODE]).skipped
    assert skipped.reason.startswith("0 pairs")


def test_no_verdict():
    (skipped,) = report_on(run(model(), 2, prompts=(0, 1)), trainer=None, select=[CODE]).skipped
    assert skipped.reason.endswith("; needs 20")
    assert skipped.remedy == "widen --steps to where prompts recur"
    alone = run(model(), 12, prompts=tuple(range(20)), group=1)
    (skipped,) = report_on(alone, trainer=None, select=[CODE]).skipped
    assert skipped.reason.startswith("no two responses of a group begin with the same token")
    nameless = [replace(one, per_row={"reward": one.per_row["reward"]}) for one in run(model(), 3)]
    (skipped,) = report_on(nameless, trainer=None, select=[CODE]).skipped
    assert skipped.reason == "no column shows which prompt a row answers"


def test_what_is_not_known_does_not_count():
    batches = run(model(), versions=lambda step, row: 0)
    odd = []
    for one in batches:
        sampler_T = torch.full((one.tokens,), math.nan)
        odd.append(replace(one, per_token={**one.per_token, "rollout_log_probs": sampler_T}))
    assert outcomes(report_on(odd, trainer=None, select=[CODE])) == {CODE: "skipped"}


@pytest.mark.parametrize(("contexts", "compared"), [(127, 127), (128, 128), (129, 128)])
def test_so_many_contexts_are_compared_at_each_token(contexts, compared):
    each = {f"{name}_{place}": [-1.0] * contexts for name in ("sampler", "trainer") for place in range(4)}
    each |= {f"context_{place}": range(1, contexts + 1) for place in range(4)}
    steps = {"step": [0] * contexts, "split": ["train"] * contexts, "policy_version_max": [0] * contexts}
    gaps = dict.fromkeys(("compared", "to_trainer", "to_reference"), [0.0] * contexts)
    rows = pl.DataFrame({**steps, "prompt": [1] * contexts, **each, **gaps})
    kept = find(CODE).reduced(rows, None).drop_nulls("place")
    assert kept.group_by("place").len().sort("place").rows() == [(place, compared) for place in range(4)]
