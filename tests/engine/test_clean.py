"""No rule is called clean where its stage disagrees, is in doubt, or holds nothing that its fault would change."""

import json
import re
from dataclasses import replace

import pytest
import torch
from search.test_causes import SETUPS, a_batch, by_name, planted

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.rules.audited import AuditedRule, DiffersRule
from rolloutdoctor.rules.known_fault import ReleaseFaultRule
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

AUDITED = [rule for rule in RULES if isinstance(rule, AuditedRule)]
LOSS = {"trl": "loss", "trl-rloo": "loss", "verl": "actor/pg_loss", "slime": "train/loss", "ms-swift": "loss"}
METRIC = {
    "trl": "reward",
    "trl-rloo": "reward",
    "verl": "critic/score/mean",
    "slime": "rollout/raw_reward",
    "ms-swift": "reward",
}


def noise(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_run(trainer, stage, steps=4):
    """Steps of a trainer, of which one stage of the log is replaced by noise."""
    batches, logged = [], []
    for step in range(steps):
        batch, metrics = planted(trainer, [], a_batch(step))
        off = noise(len(batch) + 1, step)
        if stage == "advantages":
            batch = replace(batch, per_row={**batch.per_row, "advantage": off[1:]})
        elif stage is not None:
            name = (LOSS if stage == "loss" else METRIC)[trainer]
            metrics = {**metrics, name: metrics[name] + 0.3 + float(off[0].abs())}
        batches.append(replace(batch, step=step))
        logged.append(metrics)
    return batches, logged


def check(trainer, batches, logged, **more):
    return diagnose(batches, trainer=trainer, options=SETUPS[trainer], logged=logged, **more)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
@pytest.mark.parametrize("stage", ["advantages", "loss", "metrics"])
def test_what_nothing_explains_leaves_no_rule_of_its_stage_clean(trainer, stage):
    found = check(trainer, *a_run(trainer, stage))
    # Rows tell of a fault of the release what it changes in them, and no response here repeats another to fill a batch.
    by_log = [rule for rule in AUDITED if not isinstance(rule, ReleaseFaultRule)]
    of_stage = {rule.code for rule in by_log if stage in rule.stages} - {"RDI015"}
    assert sorted(of_stage & {code for code, _ in found.clean}) == []
    told = [one for one in found.skipped if one.code in of_stage and "no hypothesis of this rule" in one.reason]
    assert len(told) >= 3
    assert all(one.remedy for one in told)
    differs = {"advantages": "RDA004", "loss": "RDG005", "metrics": "RDM004"}[stage]
    assert differs in {one.code for one in found.findings}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
def test_a_healthy_run_keeps_them_clean(trainer):
    found = check(trainer, *a_run(trainer, None))
    assert {rule.code for rule in AUDITED if isinstance(rule, DiffersRule)} <= {code for code, _ in found.clean}
    assert not any("no hypothesis of this rule" in one.reason for one in found.skipped)


@pytest.mark.slow
def test_a_stage_that_another_cause_explains_is_tested():
    batches, logged = a_run("verl", None)
    name = METRIC["verl"]
    found = check("verl", batches, [{**each, name: 4 * each[name]} for each in logged])
    assert "RDM007" in {one.code for one in found.findings}
    assert {"RDM004", "RDM006", "RDI014"} <= {code for code, _ in found.clean}


@pytest.mark.slow
def test_a_fault_that_the_data_cannot_tell_from_the_cause_is_not_clean():
    """Without a loss in the log a KL metric of k1 and a KL term of k1 look alike."""
    batch, metrics = planted("trl", [by_name("kl-metric-is-k1")], a_batch())
    found = check("trl", [batch], [{name: metrics[name] for name in ("kl", "reward")}])
    codes = {one.code for one in found.findings} & {"RDG007", "RDM004"}
    (other,) = {"RDG007", "RDM004"} - codes
    assert "these data cannot distinguish" in next(one.reason for one in found.skipped if one.code == other)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("trainer", "more"), [("verl", {}), ("trl", {"loss_type": "bnpo"})])
def test_values_in_doubt_test_nothing(trainer, more):
    """Without micro_batch_id a value that disagrees may prove nothing, though others of its stage agree.

    The drift of verl and the loss of TRL's bnpo are means over each micro-batch.
    """
    batch, options = a_batch(), {**SETUPS[trainer], **more}
    made = configure(RunMetadata(), trainer, [Layer("test", options)])
    metrics = {name: float(value) for name, value in made.trainer.metrics(evaluate(batch, made.objective)).items()}
    rows = {name: x_N for name, x_N in batch.per_row.items() if name not in ("micro_batch_id", "rank", "trajectory_id")}
    codes = ["RDG005", "RDG006", "RDM005"]
    found = diagnose([replace(batch, per_row=rows)], trainer=trainer, options=options, logged=[metrics], select=codes)
    assert any(entry.compared for entry in found.audit)
    (doubted,) = {entry.quantity for entry in found.audit if entry.not_compared and entry.stage == "loss"}
    clean = {code for code, _ in found.clean}
    assert (doubted, clean) == {
        "verl": ("actor/ppo_kl", {"RDG005", "RDG006"}),
        "trl": ("loss", set()),
    }[trainer]
    assert all("could be compared" in one.reason for one in found.skipped)


@pytest.mark.slow
def test_a_group_that_is_not_complete_leaves_the_others_to_tell():
    batches, logged = a_run("trl", None)
    whole = batches[0]
    fewer = replace(
        whole,
        rows=whole.rows[:-1],
        groups=Groups.of(whole.groups.index_N[:-1], len(whole.groups)),
        per_row={name: x_N[:-1] for name, x_N in whole.per_row.items()},
        per_token={name: x_T[: int(whole.rows[-2])] for name, x_T in whole.per_token.items()},
        rewards={name: x_N[:-1] for name, x_N in whole.rewards.items()},
        sample_ids=whole.sample_ids[:-1],
        statuses=whole.statuses[:-1],
        errors=whole.errors[:-1],
    )
    found = check("trl", [fewer, *batches[1:]], logged, select=["RDI003", "RDA004", "RDG005"])
    assert any(entry.not_compared for entry in found.audit)
    assert {code for code, _ in found.clean} == {"RDI003", "RDA004", "RDG005"}
    found = check("trl", [fewer], logged[:1], select=["RDG005"])
    assert not found.clean


@pytest.mark.parametrize(
    ("code", "name"), [("RDG006", "clip_ratio/high_mean"), ("RDM006", "completions/mean_length"), ("RDG008", "reward")]
)
def test_a_value_that_the_fault_would_not_change_tests_nothing(code, name):
    batches, logged = a_run("trl", None)
    stage = find(code).stages[-1]
    found = check("trl", batches, [{name: each[name]} for each in logged], select=[code])
    (skipped,) = found.skipped
    assert skipped.reason == "nothing was logged that could show it", stage
    assert stage in STAGES


CLEAN = {
    "full": r"clean +(RD.*)",
    "concise": r"^clean: (.*)",
    "json": None,
    "jsonl": r'"type": ?"clean", ?"code": ?"(RD\w+)"',
    "markdown": r"^\*\*Clean:\*\* (.*)",
    "github": r"^clean (RD\w+)",
    "sarif": None,
    "junit": r'<testcase classname="rolloutdoctor\.(RD\w+)" name="[^"]*"/>',
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", CLEAN)
def test_every_format_calls_the_same_rules_clean(name):
    report = check("trl", *a_run("trl", "advantages"))
    text = RENDERERS[name](report, Style(width=100_000, verbose=True))
    if name == "json":
        told = json.loads(text)["clean"]
    elif name == "sarif":
        told = [words.split()[0] for words in json.loads(text)["runs"][0]["properties"]["clean"]]
    else:
        told = re.findall(r"RD\w\d+", " ".join(re.findall(CLEAN[name], text, re.MULTILINE)))
    # Those with a clause stand on lines of their own, after the others.
    assert (sorted(told) if name == "full" else told) == [code for code, _ in report.clean]
    # A test case that passes has no words in JUnit, and a count has no clauses.
    assert report.excluded
    assert name in ("junit", "concise") or all(one.words in text for one in report.excluded)
    codes = set(re.findall(r"RD\w\d+", text))
    for family, first, last in re.findall(r"(RD[A-Z])(\d+)-(\d+)", text):
        codes |= {f"{family}{number:03}" for number in range(int(first), int(last) + 1)}
    # A job is told how many rules were skipped, and no more of them.
    left_out = {one.code for one in report.skipped} if name == "github" else set()
    assert codes >= {rule.code for rule in RULES} - left_out
