"""Make `verl_rejected.parquet` and `verl_rejected.metrics.parquet`: verl keeps rejected rows in the baseline.

Taken from `run.parquet`: prompts, responses, groups, the policy's log-probs (here verl's `old_log_probs`) and the
reference's. The responses are scored anew: 1 for the right sum, less for a number further from it, since with rewards
of 0 and 1 no baseline can turn the sign of an advantage.

Constructed, because that run sampled with the weights that it trained: the sampler's log-probs, and the policy's
log-probs at the loss. Both are the recorded ones with noise added to the log-odds of each token, so that they stay
log-probs. For one row in sixteen and for all rows of one group in twelve the sampler is moved a long way, as one
with older weights would be.

verl's functions do the rest: rollout correction in decoupled mode (`seq_sum_k1`), the advantages of `grpo`, the
policy and the KL loss, and the metrics of the batch, in float32 and on padded tensors.

    python sample_data/make_verl_rejected.py

needs verl 0.9.1 and takes some seconds on one CPU core.
"""

import os

# Some of verl's functions are compiled on first use, which takes longer than everything here.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, get_adv_estimator_fn, kl_penalty
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import ActorConfig

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.writer import RunWriter, metrics_path, write_metrics

SEED = 1
HERE = Path(__file__).parent
OUTPUT = HERE / "verl_rejected.parquet"
GROUP_SIZE = 8
SAMPLER_NOISE = 0.25
"""Standard deviation of the log-odds between sampler and trainer, everywhere."""
STALE_ROWS, STALE_GROUPS = 1 / 16, 1 / 12
"""Share of the rows, and of the groups, that an old sampler is pretended to have made."""
STALE_SHIFT, STALE_NOISE = -2.0, 1.5
"""Mean and standard deviation of the log-odds between that sampler and the trainer."""
POLICY_NOISE = 0.3
"""The same between the policy at the loss and before the update."""

ACTOR = "actor_rollout_ref.actor"
CONFIG = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_rs": "seq_sum_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.4_2.5",
    "actor_rollout_ref.rollout.n": GROUP_SIZE,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.28,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.entropy_coeff": 0.0,
    # The trainer that takes the token count of token-mean after rejection.
    "trainer.use_v1": False,
}


def actor_config():
    """verl's typed configuration of the actor, from the options above."""
    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
    names += ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff")
    options = {name: CONFIG[f"{ACTOR}.{name}"] for name in names}
    return ActorConfig(strategy="fsdp", rollout_n=GROUP_SIZE, ppo_micro_batch_size_per_gpu=GROUP_SIZE, **options)


def correction_config():
    """verl's typed configuration of the rollout correction, from the options above."""
    names = ("rollout_is", "rollout_rs", "rollout_rs_threshold", "bypass_mode")
    return RolloutCorrectionConfig(**{name: CONFIG[f"algorithm.rollout_correction.{name}"] for name in names})


def moved(log_probs, shift, spread, draw):
    """Log-probs with noise added to their log-odds, float32."""
    log_probs = torch.tensor(log_probs, dtype=torch.float64).clamp(max=-1e-9)
    odds = log_probs - torch.log(-torch.expm1(log_probs))
    noise = shift + spread * torch.randn(len(odds), generator=draw, dtype=torch.float64)
    return torch.nn.functional.logsigmoid(odds + noise).float()


def construct(rows, draw):
    """The log-probs that the recorded run does not have, one tensor for each row."""
    groups = list(dict.fromkeys(row["group_id"] for row in rows))
    chosen = torch.rand(len(groups), generator=draw) < STALE_GROUPS
    stale_groups = {group for group, stale in zip(groups, chosen.tolist(), strict=True) if stale}
    stale_rows = (torch.rand(len(rows), generator=draw) < STALE_ROWS).tolist()
    sampler, policy = [], []
    for row, stale in zip(rows, stale_rows, strict=True):
        is_stale = stale or row["group_id"] in stale_groups
        shift, spread = (STALE_SHIFT, STALE_NOISE) if is_stale else (0.0, SAMPLER_NOISE)
        sampler.append(moved(row["policy_log_probs"], shift, spread, draw))
        policy.append(moved(row["policy_log_probs"], 0.0, POLICY_NOISE, draw))
    return sampler, policy


def score(prompt, response):
    """1 for the right sum, a sixteenth less for each unit away from it, never below 0."""
    if not response.isdecimal():
        return 0.0
    right = sum(int(number) for number in prompt.rstrip("=").split("+"))
    return max(0.0, 1 - abs(int(response) - right) / 16)


def padded(cells, kind=torch.float32, left=False):
    side = "left" if left else "right"
    return pad_sequence([torch.as_tensor(cell, dtype=kind) for cell in cells], batch_first=True, padding_side=side)


def as_batch(rows, sampler, policy):
    """A step as verl's driver holds it when the rewards are in."""
    responses = padded([row["response_ids"] for row in rows], torch.int64)
    mask = padded([[1] * len(row["response_ids"]) for row in rows])
    prompts = padded([row["prompt_ids"] for row in rows], torch.int64, left=True)
    prompt_mask = padded([[1] * len(row["prompt_ids"]) for row in rows], left=True)
    scores = torch.zeros_like(mask)
    scores[torch.arange(len(rows)), mask.sum(1).long() - 1] = torch.tensor([row["reward"] for row in rows])
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "response_mask": mask,
        "old_log_probs": padded([row["policy_log_probs"] for row in rows]),
        "ref_log_prob": padded([row["ref_log_probs"] for row in rows]),
        "rollout_log_probs": padded(sampler),
        "log_prob": padded(policy),
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
    }
    uid = np.array([row["group_id"] for row in rows], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})


def actor_metrics(batch, actor):
    """What verl's loss logs for a step that is one mini-batch on one rank."""
    fields = batch.batch
    mask = fields["response_mask"].bool()
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(mask))
    policy_loss, found = compute_policy_loss_vanilla(
        old_log_prob=fields["old_log_probs"],
        log_prob=fields["log_prob"],
        advantages=fields["advantages"],
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    kl = kl_penalty(fields["log_prob"], fields["ref_log_prob"], kl_penalty=actor.kl_loss_type)
    kl_loss = agg_loss(kl, mask, actor.loss_agg_mode, **actor.global_batch_info)
    return found | {
        "actor/pg_loss": policy_loss.item(),
        "actor/kl_loss": kl_loss.item(),
        "actor/kl_coef": actor.kl_loss_coef,
    }


def main():
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(SEED)
    recorded = (
        pl.read_parquet(HERE / "run.parquet").filter(pl.col("split") == "train").sort("step", maintain_order=True)
    )
    sampler, policy = construct(recorded.to_dicts(), draw)
    actor, correction = actor_config(), correction_config()
    metrics, start = [], 0
    metadata = RunMetadata(trainer="verl", trainer_version="0.9.1", config=CONFIG)
    with RunWriter(OUTPUT, metadata) as writer:
        for (step,), frame in recorded.group_by("step", maintain_order=True):
            rows = [{**row, "reward": score(row["prompt"], row["response"])} for row in frame.to_dicts()]
            here = slice(start, start + len(rows))
            start = here.stop
            batch = as_batch(rows, sampler[here], policy[here])
            batch, logged = compute_rollout_correction_and_add_to_batch(batch, correction)
            fields = batch.batch
            fields["advantages"], fields["returns"] = get_adv_estimator_fn(CONFIG["algorithm.adv_estimator"])(
                token_level_rewards=fields["token_level_rewards"],
                response_mask=fields["response_mask"],
                index=batch.non_tensor_batch["uid"],
                norm_adv_by_std_in_grpo=CONFIG["algorithm.norm_adv_by_std_in_grpo"],
            )
            logged |= compute_data_metrics(batch, use_critic=False) | actor_metrics(batch, actor)
            metrics += [(step, "train", name, float(value)) for name, value in logged.items()]
            lengths = [len(row["response_ids"]) for row in rows]

            def ragged(name, batch=batch, lengths=lengths):
                return [cells[:n].tolist() for cells, n in zip(batch.batch[name], lengths, strict=True)]

            copied = ("group_id", "sample_id", "reward", "prompt", "response", "prompt_ids", "response_ids", "status")
            writer.write(
                {
                    "step": [step] * len(rows),
                    "split": ["train"] * len(rows),
                    **{name: [row[name] for row in rows] for name in copied},
                    "response_mask": [[int(x) for x in cells] for cells in ragged("response_mask")],
                    "response_mask_pre": [[1] * n for n in lengths],
                    "rollout_log_probs": ragged("rollout_log_probs"),
                    "old_log_probs": ragged("old_log_probs"),
                    "policy_log_probs": ragged("log_prob"),
                    "ref_log_probs": ragged("ref_log_prob"),
                    "advantages": ragged("advantages"),
                    # One mini-batch in one piece.
                    "micro_batch_id": [0] * len(rows),
                    "optim_step_id": [0] * len(rows),
                }
            )
    write_metrics(metrics_path(OUTPUT), metrics)


if __name__ == "__main__":
    main()
