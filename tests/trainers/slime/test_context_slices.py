"""Whitening with context parallelism: what slime's and miles' own processes give, stored in `context_slices.npz`."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from goldens import make_context_slices as make
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.advantages import token_advantage_radius
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import diagnose, toy_batch

STORED = dict(np.load(Path(__file__).parents[2] / "goldens/data/context_slices.npz"))
ENDS = np.cumsum(STORED["lengths"].astype(int))[:-1]
TOKENS = ("old_log_probs", "ref_log_probs", "values")
CASES = [tuple(name.split("|")) for name in STORED if "|" in name]
CONFIGS = list(dict.fromkeys(config for _, config in CASES))


def rows_of(name, cast=float):
    """The values of each row."""
    return [[cast(x) for x in row] for row in np.split(STORED[name].astype(np.float64), ENDS)]


def batch_of(advantages=None):
    rewards = [[float(x) for x in group] for group in STORED["reward"].astype(np.float64).reshape(-1, 4)]
    per_token = {name: rows_of(name) for name in TOKENS} | ({} if advantages is None else {"advantages": advantages})
    batch = toy_batch(rewards, mask=rows_of("response_mask", int), policy=-1.0, per_token=per_token)
    prompt_N = torch.tensor(STORED["prompt_length"].astype(int))
    return replace(batch, per_row={**batch.per_row, "prompt_ids": prompt_N, "prompt_length": prompt_N})


def options_of(config, ranks):
    return {"advantage_estimator": "grpo", "normalize_advantages": True, **make.CONFIGS[config]} | {
        "context_parallel_size": ranks
    }


@cache
def made_by(made, config):
    name, ranks = made.split(" cp")
    return name, options_of(config, int(ranks)), rows_of(f"{made}|{config}")


@pytest.mark.parametrize(("made", "config"), CASES)
def test_advantages(made, config):
    name, options, stored = made_by(made, config)
    found = evaluate(batch_of(), objective_of(name, **options), dtype=torch.float64)
    wanted_T = torch.tensor([value for row in stored for value in row], dtype=torch.float64)
    rows, mask_T = found.rows, batch_of().column("response_mask")
    if rows.advantage_T is None:
        own_T = rows.advantage_N.repeat_interleave(batch_of().rows.diff())
        assert ((own_T - wanted_T).abs() < 1e-5)[mask_T].all()
        return
    radius = token_advantage_radius(found)
    gap_T = (rows.advantage_T - wanted_T).abs()[mask_T]
    assert (gap_T <= radius.largest).all()
    assert gap_T.max() < 1e-5


@pytest.mark.parametrize("config", CONFIGS)
def test_the_fix_gives_what_the_next_commits_give(config):
    _, options, stored = made_by("slime@0.3.2 cp2", config)
    fixed = choose("cp-whitening").apply(objective_of("slime@0.3.1", **options))
    found = evaluate(batch_of(), fixed, dtype=torch.float64).rows.advantage_T
    wanted_T = torch.tensor([value for row in stored for value in row], dtype=torch.float64)
    assert ((found - wanted_T).abs() < 1e-5)[batch_of().column("response_mask")].all()


def reported(stored, trainer, options):
    report = diagnose([batch_of(stored)], trainer=trainer, options=options)
    loud = [one for one in report.findings if one.severity > Severity.INFO and one.code[:3] == "RDA"]
    return loud, [code for code, _ in report.clean]


@pytest.mark.slow
@pytest.mark.parametrize(("made", "config"), [case for case in CASES if "0.3.2" not in case[0]])
def test_a_run_of_such_a_release_has_the_fault(made, config):
    name, options, stored = made_by(made, config)
    (finding,), _ = reported(stored, name, options)
    assert (finding.code, finding.fix, finding.verdict) == ("RDA010", "cp-whitening", "confirmed")
    assert finding.severity is Severity.WARNING
    assert ("after 0.3.1" in finding.advice) == name.startswith("slime")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_where_the_options_do_not_say_how_rows_were_cut(config, ranks):
    name, options, stored = made_by(f"slime@0.3.1 cp{ranks}", config)
    (finding,), _ = reported(stored, name, {**options, "context_parallel_size": 1})
    assert finding.code == "RDA010"
    assert finding.cause.hypothesis == f"whitened-per-cp-slice-{ranks}"
    assert finding.cause.as_found == finding.cause.compared > 0
    # A log of the whole step is no log of slices.
    _, _, whole = made_by(f"slime@0.3.2 cp{ranks}", config)
    assert reported(whole, name, {**options, "context_parallel_size": 1})[0] == []


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_fixed_trainer_that_states_an_older_release_is_healthy(config):
    _, options, stored = made_by("slime@0.3.2 cp2", config)
    loud, clean = reported(stored, "slime@0.3.1", options)
    assert loud == []
    assert "RDA010" in clean


def test_prompts_say_where_rows_are_cut():
    _, options, _ = made_by("slime@0.3.1 cp2", "grpo")
    objective, batch = objective_of("slime@0.3.1", **options), batch_of()
    bare = {name: x for name, x in batch.per_row.items() if not name.startswith("prompt")}
    assert evaluate(replace(batch, per_row=bare), objective).rows is None
    unknown = replace(batch, per_row={**batch.per_row, "prompt_length": -batch.per_row["prompt_length"]})
    with pytest.raises(CannotComputeError, match="prompt_ids in every row"):
        evaluate(unknown, objective)
    # Two more tokens of prompt move the cuts.
    moved = replace(batch, per_row={**batch.per_row, "prompt_length": batch.per_row["prompt_length"] + 2})
    first, second = (evaluate(each, objective).rows.advantage_T for each in (batch, moved))
    assert not torch.equal(first, second)


def test_a_rank_without_a_trained_token_ends_the_run():
    options = {"advantage_estimator": "grpo", "normalize_advantages": True, "context_parallel_size": 2}
    batch = toy_batch([[1, 0]], mask=[[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    prompt_N = torch.zeros(2, dtype=torch.int64)
    batch = replace(batch, per_row={**batch.per_row, "prompt_ids": prompt_N, "prompt_length": prompt_N})
    found = evaluate(batch, objective_of("slime@0.3.1", **options)).rows.advantage_T
    assert found.isfinite().all()
    mask_T = torch.tensor(2 * [True, True, False, False, False, False, False, False])
    late = replace(batch, per_token={**batch.per_token, "response_mask": mask_T})
    with pytest.raises(CannotComputeError, match="every slice"):
        evaluate(late, objective_of("slime@0.3.1", **options))


def test_padded_slices_of_miles_are_refused():
    options = {"advantage_estimator": "grpo", "normalize_advantages": True, "qkv_format": "bshd"}
    assert objective_of("miles", **options).advantage.whitened_over == "trained"
    with pytest.raises(UsageError, match="bshd"):
        objective_of("miles", **options, context_parallel_size=2)
