"""Runs of several steps made by the trainers' real functions in float32, and faults in what these are given.

A run is a list of steps; a step is the rows as a trainer records them, its advantages among them, and what it logs.
A fault changes what the real code gets, or the real code itself, and never what the file says.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from parity import test_trl, test_trl_rloo, test_verl_advantages
from parity.padded import pad, precision
from parity.trl_generation import scored
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import TRAINERS

GROUPS, SIZE, MICROS = 6, 4, 4
SINGLE = torch.float32
STEPS = 6
WEIGHTS = [1.0, 0.5]

Step = tuple[RolloutBatch, dict[str, float]]
"""Rows as recorded, and what was logged."""


@dataclass(frozen=True)
class Setup:
    """A trainer with options under its own names, and how its rows were drawn.

    Attributes:
        trainer: its name.
        options: those recorded.
        drift: how far the policy is from the old log-probs; 0: equal.
        rewards: kind of rewards, one of `REWARDS`.
        layout: how the step was cut: "whole", "micro-batches", "two updates" (two optimiser steps), or "unrecorded",
            micro-batches that the file does not tell.
        rejected: share of rows that a filter masked.
        unscored: share of rows without a reward.
        by_row: advantages are recorded for rows, not for tokens.
        seed: of the rows.
    """

    trainer: str
    options: Mapping[str, object]
    drift: float = 0.05
    rewards: str = "normal"
    layout: str = "micro-batches"
    rejected: float = 0.0
    unscored: float = 0.0
    by_row: bool = False
    seed: int = 1


Given = Callable[[RolloutBatch], RolloutBatch]


@dataclass(frozen=True)
class Fault:
    """What is done wrong.

    Attributes:
        scoring: rows as the advantage code gets them.
        order: row of the record that each row of the advantage code is, ``[N]``.
        update: rows as the loss gets them.
        options: options that the real code runs with, and the file does not say.
        record: another truth in the rows, which the trainer does not look at.
        items: tokens that the generation counts.
        patched: changes the real code for a while.
        log: changes what is logged, given the metrics and a function that makes the real update again.
    """

    scoring: Given | None = None
    order: Callable[[RolloutBatch], Tensor] | None = None
    update: Given | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    record: Given | None = None
    items: Callable[[RolloutBatch], int] | None = None
    patched: Callable[[], AbstractContextManager] = nullcontext
    log: Callable[[dict[str, float], Callable[[RolloutBatch], dict[str, float]], RolloutBatch], dict] | None = None


NONE = Fault()

REWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "tenths": lambda x: (x * 3).round() / 10,
    "far from zero": lambda x: 50 + x * 0.01,
}


def rows_of(setup: Setup, step: int) -> RolloutBatch:
    """Rows of a step: six groups of four; rewards differ in every group."""
    verl = setup.trainer == "verl"
    seed = 1000 * setup.seed + step
    batch = random_batch(
        seed,
        sizes=(SIZE,) * GROUPS,
        longest=12,
        empty=0.0,
        rejected=0.0,
        holes=0.0 if setup.trainer == "trl-rloo" else 0.1,
        adjacent=not verl,
    )
    draw = np.random.default_rng(seed)
    count = len(batch)

    def normal(width: float) -> Tensor:
        return torch.tensor(draw.normal(0, width, batch.tokens))

    policy_T = batch.column("policy_log_probs").double()
    old_T = policy_T + normal(setup.drift) if setup.drift else policy_T
    columns = {
        "policy_log_probs": policy_T,
        "old_log_probs": old_T,
        "ref_log_probs": policy_T + normal(0.3),
        "rollout_log_probs": old_T + normal(0.01),
        "entropy": torch.tensor(draw.random(batch.tokens)),
        "values": normal(1.0),
        "sum_pi_squared": policy_T.exp().square(),
    }
    per_token = {name: column_T.float() for name, column_T in columns.items()}
    # Every response has a token of the model; a filter masks it as a whole.
    pre_T = batch.column("response_mask_pre").clone()
    pre_T[batch.rows[:-1]] = True
    kept_N = torch.tensor(draw.random(count) >= setup.rejected)
    ended_N = torch.tensor(draw.random(count) >= 0.2)
    if setup.options.get("mask_truncated_completions"):
        kept_N = ended_N
    per_token["response_mask_pre"] = pre_T
    per_token["response_mask"] = pre_T & torch.repeat_interleave(kept_N, batch.rows.diff())
    drawn_RN = torch.tensor(draw.normal(size=(2, count)))
    drawn_RN = REWARDS[setup.rewards](drawn_RN)
    # Two equal rewards in each group are no accident of the draw: no group is without a signal.
    drawn_RN[:, batch.groups.order_N[batch.groups.offsets[:-1]]] += 1.0
    drawn_RN = drawn_RN.float().double()
    drawn_RN[:, torch.tensor(draw.random(count) < setup.unscored)] = torch.nan
    per_row = {"reward_baseline": torch.tensor(draw.normal(size=count)).float().double()}
    if verl:
        per_row["reward"] = drawn_RN[0]
        rewards: dict[str, Tensor] = {}
    else:
        rewards = {"f0": drawn_RN[0], "f1": drawn_RN[1]}
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]
        per_row["reward"] = (weights * drawn_RN).sum(0)
    places = torch.arange(count)
    if setup.layout != "whole":
        per_row["micro_batch_id"] = places * MICROS // count
    if setup.layout == "two updates":
        per_row["optim_step_id"] = places * 2 // count
    return replace(
        batch,
        step=step,
        per_row=per_row,
        per_token=per_token,
        rewards=rewards,
        statuses=["stop" if ended else "length" for ended in ended_N.tolist()],
        sample_ids=[f"{step}/{row}" for row in range(count)],
        group_ids=[f"{step}/{group}" for group in range(GROUPS)],
    )


def reordered(batch: RolloutBatch, source_N: Tensor) -> RolloutBatch:
    """The rows in another order; groups go by position."""
    parts = torch.arange(batch.tokens).split(batch.rows.diff().tolist())
    source_T = torch.cat([parts[row] for row in source_N.tolist()])
    return replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[source_N].cumsum(0)]),
        groups=Groups.of(batch.groups.index_N[source_N]),
        per_row={name: x_N[source_N] for name, x_N in batch.per_row.items()},
        per_token={name: batch.column(name)[source_T] for name in batch.per_token},
        rewards={name: x_N[source_N] for name, x_N in batch.rewards.items()},
        statuses=[batch.statuses[row] for row in source_N.tolist()],
        sample_ids=[batch.sample_ids[row] for row in source_N.tolist()],
    )


def regrouped(batch: RolloutBatch, index_N: Tensor) -> RolloutBatch:
    """The rows with other groups."""
    groups = Groups.of(torch.unique(index_N, return_inverse=True)[1])
    return replace(batch, groups=groups, group_ids=[f"{batch.step}/{group}" for group in range(len(groups))])


def _short(options: Mapping[str, object]) -> dict[str, object]:
    return {name.rpartition(".")[2]: value for name, value in options.items()}


def _cells(batch: RolloutBatch, scale_factor: int, counted: int | None) -> Iterator[tuple[Tensor, dict, float]]:
    """Rows of each micro-batch, with the sizes that verl's engine tells it, and its share of what is logged."""
    zero_N = torch.zeros(len(batch), dtype=torch.int64)
    optim_N, micro_N = (batch.per_row.get(name, zero_N) for name in ("optim_step_id", "micro_batch_id"))
    mask = pad(batch, batch.column("response_mask"))
    optims = optim_N.unique().tolist()
    for optim in optims:
        mine_N = optim_N == optim
        sizes = {
            "dp_size": 1,
            "batch_num_tokens": int(mask[mine_N].sum()) if counted is None else counted,
            "global_batch_size": int(mine_N.sum()),
            "loss_scale_factor": scale_factor,
        }
        for micro in micro_N[mine_N].unique().tolist():
            yield mine_N & (micro_N == micro), sizes, 1 / len(optims)


def verl_update(batch: RolloutBatch, options: Mapping[str, object], advantage_T: Tensor, counted: int | None):
    """What the actor logs of an update: the loss and its metrics, micro-batch by micro-batch."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    own = _short(options)
    clips = {name: own[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c") if name in own}
    mode, by_micro_batch = own["loss_agg_mode"], own.get("by_micro_batch", False)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode="vanilla"),
        **clips,
    )
    policy, ref, old, advantage, mask = (
        pad(batch, x_T)
        for x_T in (
            batch.column("policy_log_probs"),
            batch.column("ref_log_probs"),
            batch.column("old_log_probs"),
            advantage_T,
            batch.column("response_mask"),
        )
    )
    cells = list(_cells(batch, own["loss_scale_factor"], counted))
    found: Counter = Counter()
    with precision(SINGLE):
        for rows, sizes, share in cells:
            if by_micro_batch:
                # As before verl told its micro-batches the sizes of the step.
                sizes = {"dp_size": 1, "loss_scale_factor": sizes["loss_scale_factor"]}
                share = 1 / len(cells)
            config.global_batch_info.clear()
            config.global_batch_info.update(sizes)
            loss, metrics = core_algos.compute_policy_loss_vanilla(
                old[rows], policy[rows], advantage[rows], mask[rows], loss_agg_mode=mode, config=config
            )
            found["actor/pg_loss"] += loss.item() * share
            if own["use_kl_loss"]:
                kl_mat = core_algos.kl_penalty(policy[rows], ref[rows], own["kl_loss_type"])
                kl = core_algos.agg_loss(kl_mat, mask[rows], mode, **sizes)
                found["actor/kl_loss"] += kl.item() * share
                loss = loss + own["kl_loss_coef"] * kl
            found["actor/loss"] += loss.item() * share
            for name, value in metrics.items():
                found[name] += value / len(cells)
    return dict(found)


def verl_step(setup: Setup, batch: RolloutBatch, fault: Fault) -> Step:
    """verl: the penalty, the estimator, the metrics of the batch, the actor's loss."""
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    options = {**setup.options, **fault.options}
    own = _short(options)
    seen = batch if fault.scoring is None else fault.scoring(batch)
    metrics: dict[str, float] = {}
    with precision(SINGLE), fault.patched():
        scores = rewards = test_verl_advantages.token_rewards(seen, SINGLE)
        mask = pad(seen, seen.column("response_mask"), torch.int64)
        if own["use_kl_in_reward"]:
            given = seen if fault.update is None else fault.update(seen)
            columns = {"old_log_probs": "old_log_probs", "ref_log_prob": "ref_log_probs"}
            data = {name: pad(given, given.column(column)) for name, column in columns.items()}
            data |= {"token_level_scores": scores, "response_mask": mask}
            control = core_algos.FixedKLController(own["kl_coef"])
            made, metrics = test_verl_advantages.kl_in_reward()(
                DataProto.from_dict(data), control, kl_penalty=own["kl_penalty"]
            )
            rewards = made.batch["token_level_rewards"]
        config = test_verl_advantages.Config(norm_adv_by_std_in_grpo=own["norm_adv_by_std_in_grpo"])
        config |= {name: own.get(name, 1.0) for name in ("gamma", "lam")}
        name = own["adv_estimator"]
        advantage_T = test_verl_advantages.upstream(core_algos, name, seen, SINGLE, config, rewards)
        lengths_N = seen.rows.diff()
        attention = (torch.arange(mask.shape[1]) < lengths_N[:, None]).long()
        prompts = torch.ones(len(seen), 2, dtype=torch.int64)
        data = {
            "token_level_scores": scores,
            "token_level_rewards": rewards,
            "advantages": pad(seen, advantage_T),
            "returns": pad(seen, advantage_T),
            "prompts": prompts,
            "responses": torch.zeros_like(attention),
            "attention_mask": torch.cat([prompts, attention], 1),
            "response_mask": mask,
        }
        of_data = compute_data_metrics(DataProto.from_dict(data), use_critic=False)
    metrics |= {name: value for name, value in of_data.items() if "returns" not in name}

    def update(rows: RolloutBatch) -> dict[str, float]:
        counted = None if fault.items is None else fault.items(rows)
        return verl_update(rows, options, advantage_T, counted)

    metrics |= update(batch if fault.update is None else fault.update(batch))
    if fault.log is not None:
        metrics = fault.log(metrics, update, batch)
    if setup.by_row:
        per_row = {**batch.per_row, "advantage": advantage_T[batch.rows[:-1]].double()}
        return replace(batch, per_row=per_row), metrics
    return replace(batch, per_token={**batch.per_token, "advantages": advantage_T.float()}), metrics


def trl_class(trainer: str) -> type:
    """The real trainer."""
    if trainer == "trl":
        from trl.trainer.grpo_trainer import GRPOTrainer

        return GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return RLOOTrainer


def trl_step(setup: Setup, batch: RolloutBatch, fault: Fault) -> Step:
    """Either trainer of TRL: the generation with its scores, then the loss."""
    cls, options = trl_class(setup.trainer), {**setup.options, **fault.options}
    seen = batch if fault.scoring is None else fault.scoring(batch)
    source_N = torch.arange(len(batch)) if fault.order is None else fault.order(batch)
    seen = seen if fault.order is None else reordered(seen, source_N)
    # One generation batch, whatever the updates are.
    whole = replace(seen, per_row={name: x_N for name, x_N in seen.per_row.items() if name != "micro_batch_id"})
    mine = TRAINERS[setup.trainer].objective(resolved(setup.trainer, options))
    with precision(SINGLE), fault.patched():
        (output,), _, metrics = scored(cls, whole, options, WEIGHTS)
        advantage_N = torch.empty_like(output["advantages"])
        advantage_N[source_N] = output["advantages"]

        def update(rows: RolloutBatch) -> dict[str, float]:
            if setup.trainer == "trl":
                loss, _, found = test_trl.upstream(
                    cls,
                    rows,
                    mine,
                    {"use_bias_correction_kl": True, **options},
                    SINGLE,
                    False,
                    advantage_N=advantage_N,
                    items=None if fault.items is None else fault.items(rows),
                )
            else:
                loss, _, found = test_trl_rloo.upstream(rows, mine, SINGLE, advantage_N=advantage_N)
            return {"loss": loss, **found}

        metrics = {**metrics, **update(batch if fault.update is None else fault.update(batch))}
        metrics.pop("num_tokens", None)
        if fault.log is not None:
            metrics = fault.log(metrics, update, batch)
    return replace(batch, per_row={**batch.per_row, "advantage": advantage_N.double()}), metrics


def resolved(trainer: str, options: Mapping[str, object]):
    """The options as a configuration."""
    spec = TRAINERS[trainer]
    return resolve(spec.options, parse_version(spec.newest), [Layer("test", dict(options))], trainer=trainer)


def real_run(setup: Setup, fault: Fault = NONE, at: Sequence[int] = range(STEPS), steps: int = STEPS) -> list[Step]:
    """A run; the fault is in some of its steps."""
    made = []
    make = verl_step if setup.trainer == "verl" else trl_step
    for step in range(steps):
        batch = rows_of(setup, step)
        its = fault if step in at else NONE
        if its.record is not None:
            batch = its.record(batch)
        rows, metrics = make(setup, batch, its)
        if setup.layout == "unrecorded":
            rows = replace(rows, per_row={name: x for name, x in rows.per_row.items() if name != "micro_batch_id"})
        if not setup.drift and setup.seed % 2:
            # Which means that they are the policy's.
            rows = replace(
                rows, per_token={name: rows.column(name) for name in rows.per_token if name != "old_log_probs"}
            )
        made.append((rows, {name: float(np.float32(value)) for name, value in metrics.items()}))
    return made


ROW_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline")
TOKEN_ESTIMATORS = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def drawn(trainer: str, number: int) -> Setup:
    """A configuration that somebody could have."""
    draw = np.random.default_rng([20261123, list(TRAINERS).index(trainer), number])

    def one_of(*values):
        return values[int(draw.integers(len(values)))]

    common = {
        "drift": one_of(0.0, 0.05, 0.4),
        "rewards": one_of(*REWARDS),
        "layout": one_of("whole", "micro-batches", "two updates", "unrecorded"),
        "seed": number + 1,
    }
    if trainer == "verl":
        name = one_of(*ROW_ESTIMATORS, *ROW_ESTIMATORS, *TOKEN_ESTIMATORS)
        options: dict[str, object] = {
            "algorithm.adv_estimator": name,
            "algorithm.norm_adv_by_std_in_grpo": one_of(True, False),
            "algorithm.gamma": one_of(1.0, 0.95),
            "algorithm.lam": one_of(1.0, 0.9),
            "algorithm.use_kl_in_reward": one_of(True, False, False),
            "algorithm.kl_penalty": one_of("k1", "k2", "low_var_kl", "abs"),
            "algorithm.kl_ctrl.kl_coef": one_of(0.001, 0.05),
            "actor_rollout_ref.actor.use_kl_loss": one_of(True, True, False),
            "actor_rollout_ref.actor.kl_loss_type": one_of("k1", "k2", "low_var_kl", "abs", "k3+"),
            "actor_rollout_ref.actor.kl_loss_coef": one_of(0.001, 0.05, 0.3),
            "actor_rollout_ref.actor.loss_agg_mode": one_of(*AGGREGATIONS),
            "actor_rollout_ref.actor.loss_scale_factor": one_of(1, 37),
            "actor_rollout_ref.actor.clip_ratio_low": one_of(0.2, 0.1),
            "actor_rollout_ref.actor.clip_ratio_high": one_of(0.2, 0.28),
            "actor_rollout_ref.actor.clip_ratio_c": one_of(3.0, 1.5),
        }
        return Setup(trainer, options, by_row=name in ROW_ESTIMATORS and one_of(True, False), **common)
    options = {"num_generations": SIZE, "reward_weights": WEIGHTS, "epsilon": one_of(0.2, 0.1)}
    options["epsilon_high"] = one_of(None, 0.28)
    unscored = one_of(0.0, 0.0, 0.15)
    if trainer == "trl-rloo":
        options |= {"beta": one_of(0.0, 0.05), "normalize_advantages": one_of(True, False)}
        return Setup(trainer, options, unscored=unscored, **{**common, "drift": common["drift"] / 4})
    options |= {
        "beta": one_of(0.0, 0.01, 0.2),
        "loss_type": one_of("grpo", "bnpo", "dr_grpo", "dapo", "dapo"),
        "scale_rewards": one_of("group", "batch", "none"),
        "use_bias_correction_kl": one_of(True, False),
        "max_completion_length": test_trl.WIDTH,
        "importance_sampling_level": one_of("token", "token", "sequence"),
        "delta": one_of(None, None, 1.4),
    }
    return Setup(trainer, options, unscored=unscored, **common)
