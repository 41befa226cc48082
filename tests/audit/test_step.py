"""The audit of one step: what a trainer logs of its own numbers agrees, and what is missing is no contradiction."""

from dataclasses import replace

import pytest
import torch

from rolloutdoctor.audit.doubts import LayoutDoubt
from rolloutdoctor.audit.logged import of_step
from rolloutdoctor.audit.step import compare_step, tallies_of
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.table import TRAINERS

SETUPS = {
    "trl": {"beta": 0.1, "num_generations": 4},
    "trl-rloo": {"beta": 0.05, "num_generations": 4},
    "verl": {"adv_estimator": "grpo", "use_kl_loss": True, "rollout.n": 4},
    "slime": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "openrlhf": {"algo.advantage.estimator": "rloo", "algo.kl.use_loss": True, "rollout.n_samples_per_prompt": 4},
    "miles": {"advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "ms-swift": {"beta": 0.1, "num_generations": 4},
    "skyrl": {"kl_loss_coef": 0.1},
}
each_setup = pytest.mark.parametrize("trainer", SETUPS)


def configured(trainer):
    return configure(RunMetadata(), trainer, [Layer("test", SETUPS[trainer])])


def a_batch(seed=0, **columns):
    batch = random_batch(seed, sizes=(4, 4, 4), empty=0.0, rejected=0.0)
    cut = {"micro_batch_id": torch.arange(len(batch)) // 6}
    return replace(batch, per_row={**batch.per_row, **cut, **columns})


def audited(trainer, batch, metrics, **changes):
    """Audit a batch whose metrics were logged as given, evaluated as configured."""
    made = configured(trainer)
    evaluation = evaluate(batch, made.objective)
    own = made.trainer.metrics(evaluation)
    logged = of_step(batch, metrics, made.objective)
    return tallies_of(compare_step(logged, evaluation, made.trainer, made.config, own, **changes))


def logged_by(trainer, batch):
    """What the trainer logs, in float32 as it does, from its own objective in float64."""
    made = configured(trainer)
    found = evaluate(batch, made.objective, dtype=torch.float64)
    metrics = {name: float(torch.tensor(value)) for name, value in made.trainer.metrics(found).items()}
    return found, metrics


@each_setup
@pytest.mark.parametrize("seed", range(4))
def test_a_run_agrees_with_itself(trainer, seed):
    batch = a_batch(seed)
    found, metrics = logged_by(trainer, batch)
    batch = replace(batch, per_row={**batch.per_row, "advantage": found.rows.advantage_N.float().double()})
    tallies = audited(trainer, batch, metrics)
    assert {"advantages"} < tallies.keys()
    assert all(tally.agree == tally.compared > 0 for tally in tallies.values()), tallies
    assert not any(tally.not_compared for tally in tallies.values())


@each_setup
def test_a_value_that_is_off_by_ten_radii_is_found(trainer):
    batch = a_batch()
    _, metrics = logged_by(trainer, batch)
    name = configured(trainer).trainer.log.loss
    tallies = audited(trainer, batch, {**metrics, name: metrics[name] + 1e-4})
    assert tallies[name].disagree == 1
    assert all(tally.agree == tally.compared for other, tally in tallies.items() if other != name)


def test_advantages_per_token_are_compared_row_by_row():
    batch = a_batch()
    found, _ = logged_by("verl", batch)
    spread_T = torch.repeat_interleave(found.rows.advantage_N.float(), batch.rows.diff())
    # What stands on masked tokens is in no loss.
    spread_T = torch.where(batch.column("response_mask"), spread_T, 7.0)
    tally = audited("verl", replace(batch, per_token={**batch.per_token, "advantages": spread_T}), {})["advantages"]
    assert tally.agree == tally.compared == int((batch.trained.diff() > 0).sum())
    first = int(batch.column("response_mask").nonzero()[0])
    spread_T[first] += 0.01
    tally = audited("verl", replace(batch, per_token={**batch.per_token, "advantages": spread_T}), {})["advantages"]
    assert tally.disagree == 1
    assert tally.first[1] == "r0"


def test_rows_of_incomplete_groups_are_not_compared():
    batch = a_batch()
    keep_N = torch.ones(len(batch), dtype=torch.bool)
    keep_N[int((batch.groups.index_N == 0).nonzero()[0])] = False
    found, metrics = logged_by("trl", batch)
    tokens_T = torch.repeat_interleave(keep_N, batch.rows.diff())
    part = replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[keep_N].cumsum(0)]),
        groups=Groups.of(batch.groups.index_N[keep_N], 3),
        per_row={name: x_N[keep_N] for name, x_N in batch.per_row.items()}
        | {"advantage": found.rows.advantage_N[keep_N]},
        per_token={name: x_T[tokens_T] for name, x_T in batch.per_token.items()},
        sample_ids=[name for name, kept in zip(batch.sample_ids, keep_N.tolist(), strict=True) if kept],
    )
    tallies = audited("trl", part, metrics)
    assert (tallies["advantages"].compared, tallies["advantages"].agree) == (8, 8)
    assert tallies["advantages"].not_compared == 3
    assert not any(tally.disagree for tally in tallies.values())
    assert tallies["loss"].reason == "some groups do not have the configured number of rows"
    # A hypothesis may look at them all the same.
    assert audited("trl", part, metrics, in_doubt=True)["loss"].disagree == 1


def test_a_missing_rank_is_no_contradiction():
    batch = a_batch(rank=torch.tensor([0, 2] * 6))
    tallies = audited("trl", batch, {"reward": 77.0})
    assert tallies["reward"].not_compared == 1
    assert tallies["reward"].reason == "the file holds rows of 2 of at least 3 ranks"


def test_without_micro_batches_only_what_depends_on_them_is_in_doubt():
    batch = a_batch()
    bare = replace(batch, per_row={"reward": batch.per_row["reward"]})
    tallies = audited("trl", bare, {"kl": 77.0, "reward": 77.0, "loss": 77.0})
    assert tallies["kl"].not_compared == 1
    assert "micro_batch_id" in tallies["kl"].reason
    assert tallies["reward"].disagree == 1


@pytest.mark.slow
def test_a_cut_that_gives_the_same_by_chance_does_not_settle_it():
    """The token mean is the mean of the rows' means here, and that of pairs of rows is not."""
    values = {"a": -0.7, "b": 0.4, "none": 0.0}
    rows = [["a"], ["b"] * 2, ["none"] * 2, ["a"] * 3]
    ref = [[-1.0 + values[name] for name in row] for row in rows]
    options = {"beta": 0.5, "use_bias_correction_kl": False, "logging_steps": 1}
    batch = toy_batch([[1, 0, 0, 0]], lengths=[1, 2, 2, 3], ref=ref)
    cut = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.tensor([0, 0, 1, 1])})
    objective = configure(RunMetadata(), "trl", [Layer("test", options)]).objective
    logged = {"kl": TRAINERS["trl"].metrics(evaluate(cut, objective))["kl"]}
    (found,) = (each for each in diagnose([batch], trainer="trl", options=options, logged=logged).audit)
    assert (found.compared, found.not_compared) == (0, 1)
    assert "micro_batch_id" in found.reason
    (found,) = diagnose([cut], trainer="trl", options=options, logged=logged).audit
    assert found.agrees


def test_a_cut_may_move_a_value_that_rounding_moves_too():
    """A token at a clip bound makes the radius of the share large, and the cuts move it by less than that."""
    at = 0.1823215  # log 1.2
    old = [[-1.0 - at] + [-1.0] * 3, [-1.0 - 0.5] + [-1.0] * 2, [-1.0] * 4, [-1.0] * 3]
    batch = toy_batch([[1, 1, 0, 0]], lengths=[4, 3, 4, 3], old=old, ref=-1.2)
    evaluation = evaluate(batch, configured("trl").objective)
    doubt, name = LayoutDoubt(evaluation, TRAINERS["trl"]), "clip_ratio/high_mean"
    own = TRAINERS["trl"].metrics(evaluation)[name]
    assert not doubt.about(name, 0.5, own, 0.3)
    assert doubt.about(name, 0.31, own, 0.3)
    assert doubt.about(name, 0.5, own, 1e-6)


def test_without_log_probs_at_the_loss_its_values_are_in_doubt():
    batch = a_batch()
    columns = {name: x_T for name, x_T in batch.per_token.items() if name != "policy_log_probs"}
    tallies = audited("trl", replace(batch, per_token=columns), {"loss": 77.0, "reward": 77.0})
    assert tallies["loss"].not_compared == 1
    assert tallies["reward"].disagree == 1
    once = {**batch.per_row, "optim_step_id": torch.zeros(len(batch), dtype=torch.int64)}
    tallies = audited("trl", replace(batch, per_token=columns, per_row=once), {"loss": 77.0})
    assert tallies["loss"].disagree == 1


@pytest.mark.parametrize("trainer", ["trl", "trl-rloo"])
def test_one_update_a_batch_leaves_no_doubt_of_them(trainer):
    once = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    batch = a_batch()
    batch = replace(batch, per_token={name: batch.column(name) for name in batch.per_token if name[:6] != "policy"})
    for options, compared in ((once, 1), ({**once, "num_iterations": 2}, 0), ({**once, "use_vllm": True}, 0)):
        made = configure(RunMetadata(), trainer, [Layer("test", {**SETUPS[trainer], **options})])
        evaluation = evaluate(batch, made.objective)
        own = made.trainer.metrics(evaluation)
        logged = of_step(batch, {"loss": own["loss"] + 1}, made.objective)
        tally = tallies_of(compare_step(logged, evaluation, made.trainer, made.config, own))["loss"]
        assert (tally.disagree, tally.not_compared) == (compared, 1 - compared)


def test_a_dump_that_need_not_hold_every_row_contradicts_no_mean():
    batch = a_batch()
    made = configured("trl")
    evaluation = evaluate(batch, made.objective)
    wrong = replace(batch, per_row={**batch.per_row, "advantage": evaluation.rows.advantage_N + 1})
    logged = of_step(wrong, {"reward": 77.0}, made.objective, omits_rows=True)
    own = made.trainer.metrics(evaluation)
    tallies = tallies_of(compare_step(logged, evaluation, made.trainer, made.config, own))
    assert tallies["reward"].reason == "the files need not hold all rows of a step"
    assert tallies["advantages"].disagree == len(batch)  # whole groups are whole
