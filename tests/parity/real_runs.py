"""Runs of several steps made by the trainers' real functions in float32, and faults in what these are given.

A run is a list of steps; a step is the rows as a trainer records them, its advantages among them, and what it logs.
A fault changes what the real code gets, or the real code itself, and never what the file says.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from parity import test_trl, test_trl_rloo, test_verl_advantages
from parity.padded import pack, pad, precision
from parity.real_rows import reordered, rows_of
from parity.real_setup import NONE, SINGLE, STEPS, WEIGHTS, Fault, Setup, Step
from parity.trl_generation import scored
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS


def _short(options: Mapping[str, object]) -> dict[str, object]:
    return {name.rpartition(".")[2]: value for name, value in options.items()}


def _cells(
    batch: RolloutBatch, scale_factor: int, counted: int | None, counts: str
) -> Iterator[tuple[Tensor, dict, float]]:
    """Rows of each micro-batch, with the sizes that verl's engine tells it, and its share of what is logged.

    Tokens are counted by the mask `counts`, where `counted` does not state their number.
    """
    zero_N = torch.zeros(len(batch), dtype=torch.int64)
    optim_N, micro_N = (batch.per_row.get(name, zero_N) for name in ("optim_step_id", "micro_batch_id"))
    mask = pad(batch, batch.column(counts))
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


def verl_update(
    batch: RolloutBatch,
    options: Mapping[str, object],
    advantage_T: Tensor,
    counted: int | None,
    weights: Tensor | None = None,
):
    """What the actor logs of an update: the loss and its metrics, micro-batch by micro-batch."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    own = _short(options)
    actor = {name for name in own if name.startswith(("clip_ratio", "tau_"))}
    nested = {name: own[name] for name in own if name.startswith(("clip_cov", "kl_cov", "ppo_kl", "dro"))}
    mode, by_micro_batch = own["loss_agg_mode"], own.get("by_micro_batch", False)
    loss_mode = own.get("loss_mode", "vanilla")
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, **nested),
        **{name: own[name] for name in sorted(actor)},
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
    # The newer loop counts by its loss mask, which no rejection reaches.
    counts = "response_mask_pre" if "rollout_rs" in own and own.get("use_v1", True) else "response_mask"
    cells = list(_cells(batch, own["loss_scale_factor"], counted, counts))
    found: Counter = Counter()
    with precision(SINGLE):
        for rows, sizes, share in cells:
            if by_micro_batch:
                # As before verl told its micro-batches the sizes of the step.
                sizes = {"dp_size": 1, "loss_scale_factor": sizes["loss_scale_factor"]}
                share = 1 / len(cells)
            config.global_batch_info.clear()
            config.global_batch_info.update(sizes)
            given = {} if weights is None else {"rollout_is_weights": weights[rows]}
            loss, metrics = core_algos.get_policy_loss_fn(loss_mode)(
                old[rows], policy[rows], advantage[rows], mask[rows], loss_agg_mode=mode, config=config, **given
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


def verl_corrected(batch: RolloutBatch, own: Mapping[str, object]):
    """The rows with what the rollout correction leaves of their mask, its weights, and what it logs."""
    from verl.trainer.ppo import rollout_corr_helper

    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    with precision(SINGLE):
        weights, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=pad(batch, batch.column("old_log_probs")),
            rollout_log_prob=pad(batch, batch.column("rollout_log_probs")),
            response_mask=pad(batch, batch.column("response_mask_pre"), torch.int64),
            **{name: own[name] for name in names if name in own},
        )
    left = replace(batch, per_token={**batch.per_token, "response_mask": pack(batch, mask) != 0})
    return left, None if weights is None else weights.batch["rollout_is_weights"], metrics


def verl_step(setup: Setup, batch: RolloutBatch, fault: Fault) -> Step:
    """verl: the penalty, the estimator, the metrics of the batch, the actor's loss."""
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    options = {**setup.options, **fault.options}
    own = _short(options)
    metrics: dict[str, float] = {}
    weights = None
    if {"rollout_is", "rollout_rs"} & own.keys():
        batch, weights, metrics = verl_corrected(batch, own)
    seen = batch if fault.scoring is None else fault.scoring(batch)
    with precision(SINGLE), fault.patched():
        scores = rewards = test_verl_advantages.token_rewards(seen, SINGLE)
        mask = pad(seen, seen.column("response_mask"), torch.int64)
        if own["use_kl_in_reward"]:
            given = seen if fault.update is None else fault.update(seen)
            columns = {"old_log_probs": "old_log_probs", "ref_log_prob": "ref_log_probs"}
            data = {name: pad(given, given.column(column)) for name, column in columns.items()}
            # Rejection comes after the penalty, which goes by the mask before it.
            before = pad(seen, seen.column("response_mask_pre"), torch.int64)
            data |= {"token_level_scores": scores, "response_mask": before}
            control = core_algos.FixedKLController(own["kl_coef"])
            made, of_penalty = test_verl_advantages.kl_in_reward()(
                DataProto.from_dict(data), control, kl_penalty=own["kl_penalty"]
            )
            metrics |= of_penalty
            rewards = made.batch["token_level_rewards"]
        config = test_verl_advantages.Config(norm_adv_by_std_in_grpo=own["norm_adv_by_std_in_grpo"])
        config |= {name: own.get(name, 1.0) for name in ("gamma", "lam")} | {"weights": weights}
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
        return verl_update(rows, options, advantage_T, counted, weights)

    metrics |= update(batch if fault.update is None else fault.update(batch))
    if fault.log is not None:
        metrics = fault.log(metrics, update, batch)
    if setup.by_row:
        per_row = {**batch.per_row, "advantage": pad(batch, advantage_T)[:, 0].double()}
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
