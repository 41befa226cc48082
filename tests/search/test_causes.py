"""Every hypothesis, planted into a run of a trainer: it is named, or nothing is logged that would be different."""

import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from engine.runs import TRL, write

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.table import FIX_CODE, HYPOTHESES
from rolloutdoctor.testing import diagnose, random_batch
from rolloutdoctor.trainers.options import Layer

SETUPS = {
    "trl": {"beta": 0.1, "num_generations": 4},
    "trl-rloo": {"beta": 0.05, "num_generations": 4},
    # Every row votes: its V1 trainer needs trajectories of one reward.
    "verl": {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1, "trainer.use_v1": False},
    "slime": {"use_kl_loss": True, "kl_loss_coef": 0.1},
}
AUDITED = [rule.code for rule in RULES if isinstance(rule, AuditedRule)]


@cache
def configured(trainer):
    return configure(RunMetadata(), trainer, [Layer("test", SETUPS[trainer])])


@cache
def a_batch(seed=1):
    """Four groups of two tasks, two ranks, four micro-batches; one reward is missing, one row rejected, one failed."""
    batch = random_batch(seed, sizes=(4,) * 4, longest=12, rejected=0.05, empty=0.0, spread=0.2)
    places = torch.arange(len(batch))
    failed = [row == 9 for row in range(len(batch))]
    rewards = {"task": batch.per_row["reward"] - 0.5, "format": torch.full((len(batch),), 0.5, dtype=torch.float64)}
    return replace(
        batch,
        rewards=rewards,
        errors=["timeout" if each else None for each in failed],
        statuses=["error" if each else "stop" for each in failed],
        per_row={
            **batch.per_row,
            "micro_batch_id": places // 4,
            "rank": places % 2,
            "trajectory_id": places // 2,
            "task_id": places // 8,
        },
    )


def planted(trainer, edits, batch, dtype=torch.float64):
    """The rows with the advantages, and the metrics, of a trainer that does what some hypotheses say; None if none."""
    made = configured(trainer)
    objective, seen = made.objective, batch
    for edit in edits:
        objective = objective if edit.objective is None else edit.objective(objective)
        seen = seen if edit.rows is None else edit.rows(seen, objective) or seen
    try:
        found = evaluate(seen, objective, dtype=dtype)
        metrics = dict(made.trainer.metrics(found))
    except CannotComputeError:
        return None
    for edit in edits:
        metrics |= {} if edit.metrics is None else edit.metrics(found, made.trainer, metrics)
    metrics = {name: float(torch.tensor(value)) for name, value in metrics.items()}
    logged = {} if found.rows.advantage_N is None else {"advantage": found.rows.advantage_N.float().double()}
    return replace(batch, per_row={**batch.per_row, **logged}), metrics


SAYS_TOO_LITTLE = {
    ("trl-rloo", "group-is-row"),
    ("trl-rloo", "loss-is-micro-batch-token-mean"),
    ("trl-rloo", "ratio-is-one"),
    ("verl", "mask-forgotten-in-kl"),
}
"""In one step: all advantages and the loss are 0, or a single loss is, or lies no more than some 100 radii from what
the options give."""


def report(trainer, batch, metrics):
    # Options that nobody stated are refuted by nothing; those that the names in the log show are told by these.
    made = configured(trainer)
    choices = made.trainer.choices
    names = {name for each in (*choices.advantage, *choices.kl, *choices.loss) for name in each}
    names -= {trace.option for trace in made.trainer.log.traces}
    stated = {name: made.config[name] for name in names} | SETUPS[trainer]
    return diagnose([batch], trainer=trainer, options=stated, logged=metrics, select=AUDITED)


def names_of(found):
    causes = [finding.cause for finding in found.findings if finding.cause is not None]
    fixes = {name for entry in found.audit for name in entry.with_fixes}
    return {name for cause in causes for name in (cause.hypothesis, *cause.also)} | fixes


def cases():
    """Every hypothesis into one trainer, by turns; with ``ROLLOUTDOCTOR_FUZZ`` into every trainer."""
    for place, one in enumerate(HYPOTHESES):
        able = [trainer for trainer in SETUPS if one.applies(configured(trainer).objective)]
        chosen = able if "ROLLOUTDOCTOR_FUZZ" in os.environ or not able else [able[place % len(able)]]
        for trainer in chosen:
            yield pytest.param(trainer, one, id=f"{trainer} {one.name}")


def differs(trainer, logged):
    """True if something logged is not what the trainer would have logged."""
    return any(not entry.agrees or entry.with_fixes for entry in report(trainer, *logged).audit)


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "one"), list(cases()))
def test_a_planted_hypothesis_is_named(trainer, one):
    logged = planted(trainer, [one], a_batch())
    if logged is None:
        pytest.skip("the trainer itself fails there")
    found = report(trainer, *logged)
    if all(entry.agrees and not entry.with_fixes for entry in found.audit):
        return  # what the trainer computes anyway, in these rows
    assert one.name in names_of(found) or one.code == FIX_CODE or (trainer, one.name) in SAYS_TOO_LITTLE
    if not names_of(found):
        return
    causes = [finding.cause for finding in found.findings if finding.cause is not None]
    # One fault is told as one.
    assert len(causes) <= 1
    for cause in causes:
        assert cause.as_found == cause.compared > cause.as_recorded
        assert cause.worst <= 1
    others = [one for one in found.findings if one.cause is None and one.severity > Severity.INFO]
    # A penalty that is logged contradicts the option that says that there is none.
    others = [
        one for one in others if one.headline != "the log contradicts the option algorithm.use_kl_in_reward = false"
    ]
    assert not others, [one.headline for one in others]


@pytest.mark.slow
def test_most_hypotheses_show_in_these_rows():
    """Without this the test above could pass over rows in which nothing differs."""
    by_trainer = dict.fromkeys(SETUPS, 0)
    for trainer in SETUPS:
        clean = planted(trainer, [], a_batch())
        for one in HYPOTHESES:
            if by_trainer[trainer] == 40 or not one.applies(configured(trainer).objective):
                continue
            logged = planted(trainer, [one], a_batch())
            if logged is not None and repr(logged) != repr(clean):
                by_trainer[trainer] += 1
    assert all(count == 40 for count in by_trainer.values()), by_trainer


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
def test_a_run_without_a_fault_has_no_cause(trainer):
    for seed in range(20):
        found = report(trainer, *planted(trainer, [], a_batch(seed)))
        assert not [one.headline for one in found.findings if one.severity > Severity.INFO], seed
        assert all(entry.agrees for entry in found.audit)


def by_name(name):
    return next(one for one in HYPOTHESES if one.name == name)


@pytest.mark.slow
def test_two_faults_are_both_named():
    edits = [by_name("groups-by-position"), by_name("loss-is-micro-batch-token-mean")]
    found = report("trl", *planted("trl", edits, a_batch()))
    assert {finding.cause.hypothesis for finding in found.findings} == {one.name for one in edits}


@pytest.mark.slow
def test_a_fault_in_some_steps_says_in_which():
    edit = by_name("rewards-one-row-late")
    batches, made = [], configured("trl")
    for step in range(6):
        batch, _ = planted("trl", [edit] if step in (2, 3) else [], a_batch(step))
        batches.append(replace(batch, step=step))
    found = diagnose(batches, trainer="trl", options=SETUPS["trl"], select=AUDITED)
    (finding,) = found.findings
    assert made.trainer.name == "trl"
    assert finding.code == "RDI004"
    assert finding.cause.steps == (2, 3, 2)
    assert "in 2 steps, 2 to 3" in finding.evidence


def test_how_much_a_cause_changes():
    """The measures against the two evaluations themselves."""
    edit, batch = by_name("groups-by-position"), a_batch()
    made = configured("trl")
    recorded = evaluate(batch, made.objective, per_token=True)
    other = evaluate(edit.rows(batch, made.objective), made.objective, per_token=True)
    old_N, new_N = recorded.rows.advantage_N, other.rows.advantage_N
    g, h = recorded.per_token.grad_T.double(), other.per_token.grad_T.double()
    (finding,) = report("trl", *planted("trl", [edit], batch)).findings
    value = {name: measure.value for name, measure in finding.measures.items()}
    assert value["sign_flips"] == int((old_N * new_N < 0).sum()) > 0
    assert value["advantage_shift_max"] == pytest.approx(float((old_N - new_N).abs().max()))
    assert value["relative_change_l1"] == pytest.approx(float((g - h).abs().sum() / g.abs().sum()), rel=1e-5)
    assert value["cosine"] == pytest.approx(float((g * h).sum() / g.norm() / h.norm()), rel=1e-5)
    assert (value["values_compared"], value["values_agreeing"], value["values_explained"]) == (
        16,
        finding.cause.as_recorded,
        16,
    )


def test_what_nothing_explains_is_said_with_its_shape():
    batch, metrics = planted("trl", [], a_batch())
    wrong = batch.per_row["advantage"] * 1.7
    (finding,) = report("trl", replace(batch, per_row={**batch.per_row, "advantage": wrong}), metrics).findings
    assert (finding.code, finding.severity, finding.verdict) == ("RDA004", Severity.ERROR, "confirmed")
    assert "1.7 times the recomputed value" in finding.message + finding.evidence


@pytest.mark.slow
def test_an_impossible_advantage_is_not_explained_away():
    batch, metrics = planted("trl", [], a_batch())
    wrong = batch.per_row["advantage"].sign() * 1e6
    found = report("trl", replace(batch, per_row={**batch.per_row, "advantage": wrong}), metrics)
    assert [finding.code for finding in found.findings] == ["RDA004"]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("raised", "is_named"), [(2.0, True), (0.0, False)])
def test_a_constant_factor_of_a_metric_is_named(raised, is_named):
    """Of rewards that nearly cancel, one mean is too uncertain: it tells a factor to more than one in ten thousand."""
    drawn = a_batch()
    batch = replace(drawn, per_row={**drawn.per_row, "reward": drawn.per_row["reward"] + raised})
    batch, metrics = planted("verl", [], batch)
    (finding,) = report("verl", batch, {**metrics, "critic/score/mean": 4 * metrics["critic/score/mean"]}).findings
    assert finding.code == ("RDM007" if is_named else "RDM004")
    assert ("critic/score/mean is 4 times what the rows give" in finding.headline) is is_named


@pytest.mark.slow
def test_the_loss_is_not_blamed_for_a_metric():
    """The KL metric is k1, and the loss has k3 as recorded."""
    batch, metrics = planted("trl", [by_name("kl-metric-is-k1")], a_batch())
    (finding,) = report("trl", batch, metrics).findings
    assert (finding.code, finding.cause.hypothesis) == ("RDM004", "kl-metric-is-k1")
    # Without a loss in the log nothing tells the two apart, and both are named.
    (finding,) = report("trl", batch, {"kl": metrics["kl"]}).findings
    assert {finding.cause.hypothesis, *finding.cause.also} >= {"kl-loss-is-k1", "kl-metric-is-k1"}


@pytest.mark.slow
def test_a_run_that_has_a_fix_is_not_accused():
    fix = next(one for one in HYPOTHESES if one.code == FIX_CODE and one.name == "rejected-rows:singleton-raw")
    batch, metrics = planted("verl", [fix], a_batch())
    found = diagnose([batch], trainer="verl", options=SETUPS["verl"], logged=metrics)
    assert not [finding for finding in found.findings if finding.severity > Severity.INFO]
    entry = next(entry for entry in found.audit if entry.quantity == "advantages")
    assert entry.with_fixes == ("rejected-rows:singleton-raw",)


def possible(batch):
    """The batch without log-probs above 0."""
    columns = {name: x_T.clamp(max=0) if name.endswith("log_probs") else x_T for name, x_T in batch.per_token.items()}
    return replace(batch, per_token=columns)


def run_of(make_rewards, steps=6, groups=8, size=4, seed=0):
    """A run whose trainer saw other rewards than the rows say, given those of the whole file."""
    batches = [
        possible(replace(random_batch(seed + step, sizes=(size,) * groups, rejected=0.0, empty=0.0), step=step))
        for step in range(steps)
    ]
    reward_N = torch.cat([batch.column("reward") for batch in batches])
    seen_N = make_rewards(reward_N)
    made = configured("verl").objective
    found = []
    for batch, own_N in zip(batches, seen_N.split(groups * size), strict=True):
        other = replace(batch, per_row={**batch.per_row, "reward": own_N})
        advantage_N = evaluate(other, made).rows.advantage_N.float().double()
        found.append(replace(batch, per_row={**batch.per_row, "advantage": advantage_N}))
    return diagnose(found, trainer="verl", options=SETUPS["verl"])


@pytest.mark.slow
def test_a_cause_that_explains_most_of_the_values_is_named_with_what_it_leaves():
    """Rewards one row late over the whole file: the first row of a step has that of the step before."""
    found = run_of(lambda reward_N: reward_N.roll(1))
    assert [finding.code for finding in found.findings if finding.severity == Severity.ERROR] == ["RDI004"]
    finding = found.findings[0]
    assert finding.cause.as_recorded < finding.cause.as_found < finding.cause.compared == 192
    skipped = {one.code: one.reason for one in found.skipped}
    assert all("a cause of RDI004" in skipped[code] for code in ("RDA003", "RDA007"))
    assert f"neither reproduces {192 - finding.cause.as_found} values" in finding.evidence


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("values", ["0 or 1", "continuous"])
@pytest.mark.parametrize("seed", range(5))
def test_rewards_in_no_order_are_no_known_cause(seed, values):
    """By chance a wrong hypothesis gives half of the values that disagree where rewards are 0 or 1."""

    def shuffled(reward_N):
        order = torch.randperm(len(reward_N), generator=torch.Generator().manual_seed(seed))
        return (reward_N > reward_N.median()).double()[order] if values == "0 or 1" else reward_N[order]

    found = run_of(shuffled, seed=100 * seed)
    assert [finding.code for finding in found.findings if finding.cause is not None] == []
    assert "RDA004" in [finding.code for finding in found.findings]


def test_a_metric_of_a_single_reward_is_no_reason_to_warn(tmp_path):
    """Of one row there is no standard deviation."""
    columns = {
        "step": [0],
        "group_id": ["a"],
        "reward": [1.0],
        "rewards": [{"format": 1.0, "accuracy": 0.5}],
        "response_mask": [[1, 1]],
        "policy_log_probs": [[-1.0, -2.0]],
    }
    path = write(tmp_path / "run.parquet", columns, TRL, logged=[(0, "reward", 7.0), (0, "reward_std", 3.0)])
    found = check(open_run([path]), CheckOptions(device="cpu"))
    assert "RDM004" in {finding.code for finding in found.findings}
