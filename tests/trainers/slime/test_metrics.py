"""slime's logged metrics and rows that share a trajectory, against loops over lists."""

import statistics
from dataclasses import replace

import oracles
import pytest
import torch
from objectives import objective_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.slime import trainer as slime

TRAJECTORY = [0, 0, 1, -1, 2, 2, 5, 6, 6, 6, -1, 9]
"""Below 0 a row is a trajectory of its own."""
OPTIM = [0] * 6 + [1] * 6


def objective(version: str = "0.3.1", **options: object) -> Objective:
    return objective_of(f"slime@{version}", **options)


def batch_of(seed: int, **per_row: list[int]) -> RolloutBatch:
    batch = random_batch(seed, sizes=(4, 4, 4), adjacent=True, empty=0.0, dtype=torch.float64)
    columns = {name: torch.tensor(numbers) for name, numbers in per_row.items()}
    return replace(batch, per_row={**batch.per_row, **columns})


def keys(trajectory: list[int]) -> list[tuple[str, int]]:
    return [("row", row) if name < 0 else ("shared", name) for row, name in enumerate(trajectory)]


def shared_mean(batch: RolloutBatch, x_T: torch.Tensor, trajectory: list[int], rows: range) -> float:
    """Token means of trajectories over some rows, then the mean of these."""
    values, masks = (
        oracles.cut(column.tolist(), batch.rows.tolist()) for column in (x_T, batch.column("response_mask"))
    )
    named = keys(trajectory)
    sums, counts = {}, {}
    for row in rows:
        on = [value for value, kept in zip(values[row], masks[row], strict=True) if kept]
        sums[named[row]] = sums.get(named[row], 0.0) + sum(on)
        counts[named[row]] = counts.get(named[row], 0) + len(on)
    return oracles.mean([sums[name] / max(counts[name], 1) for name in sums])


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_trajectory_share_one_mean(seed):
    batch = batch_of(seed, trajectory_id=TRAJECTORY, optim_step_id=OPTIM)
    mine = objective(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", use_opsm=True)
    found = evaluate(batch, mine, dtype=torch.float64)
    own = slime.metrics(found)
    policy_T, ref_T, old_T = (batch.column(f"{name}_log_probs") for name in ("policy", "ref", "old"))
    steps = (range(6), range(6, 12))
    for name, x_T in (("kl_loss", (policy_T - ref_T) ** 2 / 2), ("ppo_kl", old_T - policy_T)):
        wanted = oracles.mean([shared_mean(batch, x_T, TRAJECTORY, rows) for rows in steps])
        assert own[f"train/{name}"] == pytest.approx(wanted, rel=1e-12)
    # The metrics of the rollout are over all of its trajectories at once.
    for name, column in (("log_probs", "old_log_probs"), ("rollout_log_probs", "rollout_log_probs")):
        wanted = shared_mean(batch, batch.column(column), TRAJECTORY, range(12))
        assert own[f"rollout/{name}"] == pytest.approx(wanted, rel=1e-12)
    # Rows that drifted are counted, and divided by trajectories.
    drift, masks, advantages = (
        oracles.cut(column.tolist(), batch.rows.tolist())
        for column in (
            old_T - policy_T,
            batch.column("response_mask"),
            torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff()),
        )
    )
    shares = []
    for rows in steps:
        count = 0.0
        for row in rows:
            trained = max(sum(masks[row]), 1)
            mean = sum(gap for gap, on in zip(drift[row], masks[row], strict=True) if on) / trained
            count += sum(each < 0 for each in advantages[row]) * (mean > 1e-4) / trained
        shares.append(count / len({keys(TRAJECTORY)[row] for row in rows}))
    assert own["train/opsm_clipfrac"] == pytest.approx(oracles.mean(shares), rel=1e-12)
    assert oracles.mean(shares) > 0


def test_a_trajectory_for_every_row_changes_nothing():
    batch = batch_of(0)
    alone = replace(batch, per_row={**batch.per_row, "trajectory_id": torch.arange(12)})
    mine = objective(use_kl_loss=True, kl_loss_coef=0.1)
    first, second = (evaluate(each, mine, dtype=torch.float64, per_token=True) for each in (batch, alone))
    assert torch.equal(first.per_token.grad_T, second.per_token.grad_T)
    assert slime.metrics(first) == slime.metrics(second)


def test_a_token_mean_knows_no_trajectories():
    mine = objective(calculate_per_token_loss=True)
    batch = batch_of(0, trajectory_id=TRAJECTORY)
    without = replace(batch, per_row={"reward": batch.per_row["reward"]})
    first, second = (evaluate(each, mine, dtype=torch.float64) for each in (batch, without))
    assert first.loss == second.loss


RETURNS = {
    "grpo": {"normalize_advantages": True},
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "gamma": 0.9, "lambd": 0.8, "normalize_advantages": True},
    "reinforce_plus_plus_baseline": {"normalize_advantages": True, "kl_coef": 0.1},
    "reinforce_plus_plus": {"normalize_advantages": True, "kl_coef": 0.1, "gamma": 0.9},
}


@pytest.mark.parametrize("estimator", RETURNS)
def test_returns_and_rewards_are_those_before_whitening(estimator):
    batch = random_batch(1, sizes=(4, 4, 4), adjacent=True, empty=0.0, rejected=0.0, dtype=torch.float64)
    mine = objective("0.3.2", **{"advantage_estimator": estimator, **RETURNS[estimator]})
    own = slime.metrics(evaluate(batch, mine, dtype=torch.float64))
    offsets, groups = batch.rows.tolist(), batch.groups.index_N.tolist()
    scores = batch.column("reward").tolist()
    kl, values, masks = (
        oracles.cut(column.tolist(), offsets)
        for column in (
            batch.column("old_log_probs") - batch.column("ref_log_probs"),
            batch.column("values"),
            batch.column("response_mask"),
        )
    )
    lengths = [sum(mask) for mask in masks]
    rewards = scores
    if estimator in ("grpo", "reinforce_plus_plus_baseline"):
        scale = "group" if estimator == "grpo" else "none"
        rewards = oracles.advantages("grpo", scores, groups, [True] * 12, lengths, scale=scale)
    returns = []
    for row, score in enumerate(rewards):
        if estimator == "grpo":
            returns.append([score] * len(masks[row]))
        elif estimator == "reinforce_plus_plus_baseline":
            returns.append([score - 0.1 * each for each in kl[row]])
        elif estimator == "ppo":
            dense = [-0.1 * each for each in kl[row]]
            dense[-1] += score
            made = oracles.gae(dense, values[row], 0.9, 0.8)
            returns.append([one + two for one, two in zip(made, values[row], strict=True)])
        else:
            dense = [-0.1 * each * on for each, on in zip(kl[row], masks[row], strict=True)]
            dense[max(place for place, on in enumerate(masks[row]) if on)] += score
            returns.append(oracles.reverse_scan(dense, 0.9, [0, len(dense)]))
    assert own["rollout/rewards"] == pytest.approx(oracles.mean(rewards), abs=1e-12)
    packed_T = torch.tensor([value for row in returns for value in row], dtype=torch.float64)
    wanted = shared_mean(batch, packed_T, [-1] * 12, range(12))
    assert own["rollout/returns"] == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    # Whitened advantages are another number.
    assert own["rollout/advantages"] != pytest.approx(own["rollout/returns"], abs=1e-3)


def test_lengths_and_responses_that_were_cut():
    masks = [[1, 1, 0], [1, 1, 1, 1], [0, 0], [1]]
    batch = toy_batch([[1, 0], [1, 1]], mask=masks, per_token={"response_mask_pre": [*masks[:2], [1, 0], [1]]})
    batch = replace(batch, statuses=["completed", "truncated", "length", "aborted"])
    own = slime.metrics(evaluate(batch, objective()))
    assert own["rollout/response_lengths"] == 10 / 4
    lengths = [2, 4, 1, 1]  # tokens of the model, the removed row's too
    assert own["rollout/response_len/mean"] == oracles.mean(lengths)
    assert own["rollout/response_len/median"] == statistics.median(lengths)
    assert (own["rollout/response_len/max"], own["rollout/response_len/min"]) == (4, 1)
    assert own["rollout/truncated"] == own["rollout/truncated_ratio"] == 0.5
    unknown = slime.metrics(evaluate(replace(batch, statuses=["completed", None, "length", "aborted"]), objective()))
    assert not {"rollout/truncated", "rollout/truncated_ratio"} & set(unknown)
    removed = replace(batch, per_token={"response_mask": batch.column("response_mask")})
    assert "rollout/response_len/mean" not in slime.metrics(evaluate(removed, objective()))


def test_entropy_of_the_rollout_is_reduced_like_its_kl():
    batch = batch_of(0, rank=[0] * 4 + [1] * 8)
    entropy_T = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = replace(batch, per_token={**batch.per_token, "entropy": entropy_T})
    runs = oracles.cut(entropy_T.tolist(), batch.rows.tolist())
    ranks = [[value for row in rows for value in runs[row]] for rows in (range(4), range(4, 12))]
    own = slime.metrics(evaluate(batch, objective(use_rollout_entropy=True), dtype=torch.float64))
    assert own["rollout/entropy"] == pytest.approx((4 * oracles.mean(ranks[0]) + 8 * oracles.mean(ranks[1])) / 12)
    assert "rollout/entropy" not in slime.metrics(evaluate(batch, objective()))


def test_slices_of_rows_hide_the_metric_of_the_stored_kl():
    batch = batch_of(0)
    options = {"advantage_estimator": "ppo", "kl_coef": 0.1}
    whole, sliced = (
        evaluate(batch, objective(**options, context_parallel_size=size), dtype=torch.float64) for size in (1, 2)
    )
    assert whole.loss == sliced.loss
    first, second = slime.metrics(whole), slime.metrics(sliced)
    assert set(first) - set(second) == {"rollout/kl"}
    assert all(first[name] == second[name] for name in second)
    # A logged value that is a sum over slices is not compared with anything.
    logged = {"rollout/kl": 2 * first["rollout/kl"]}
    report = diagnose([batch], trainer="slime", options={**options, "context_parallel_size": 2}, logged=logged)
    assert "RDM001" not in {finding.code for finding in report.findings}
    assert "RDM001" in {skipped.code for skipped in report.skipped}
