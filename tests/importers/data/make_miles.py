"""Make `miles/`: dumps that miles' own functions wrote.

    python tests/importers/data/make_miles.py CHECKOUT

CHECKOUT is a clone of radixark/miles at 31f1ca961a94. Real are `Sample`, `save_debug_rollout_data`,
`convert_samples_to_train_data`, `build_dp_schedule`, `save_debug_train_data_for_rank`, `maybe_dump_policy_loss_debug`.
What needs Megatron, Ray or a GPU is left out: log-probs are random, and advantages are the rewards of `grpo` at every
token. Two ranks, two optimizer steps a rollout, micro-batches of up to 20 tokens; one rollout has two segments.
"""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent / "miles"
GROUPS, SIZE, ROWS = 3, 4, 13


def samples(rollout, draw):
    from miles.utils.types import Sample

    made = []
    for row in range(ROWS):
        length = int(torch.randint(1, 6, (1,), generator=draw))
        made.append(
            Sample(
                group_index=GROUPS * rollout + min(row // SIZE, GROUPS - 1),
                index=ROWS * rollout + row,
                rollout_id=ROWS * rollout + (4 if row == 5 else row),
                prompt="question",
                tokens=[5, 6, 7 + min(row // SIZE, GROUPS - 1), *range(20, 20 + length)],
                response="answer",
                response_length=length,
                label="7",
                reward=float(row % 3 == 0 or row in (4, 5)),
                loss_mask=[1] * length,
                rollout_log_probs=(-torch.rand(length, generator=draw)).tolist(),
                remove_sample=row == 2,
                status=Sample.Status.TRUNCATED if row == 1 else Sample.Status.COMPLETED,
            )
        )
    return made


def train(rollout, made, draw):
    from miles.backends.training_utils.debug_dump import maybe_dump_policy_loss_debug
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.dp_schedule import build_dp_schedule
    from miles.utils.train_dump_utils import save_debug_train_data_for_rank

    args = SimpleNamespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        reward_key=None,
        use_dynamic_global_batch_size=False,
        micro_batch_size=2,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=20,
        balance_data=False,
        balance_by_flops=False,
        qkv_format="thd",
        dump_details=str(HERE),
        save_debug_train_data=str(HERE / "train_data" / "{rollout_id}_{rank}.pt"),
    )
    data = convert_samples_to_train_data(args, made, {}, None, None)
    total = [len(tokens) for tokens in data["tokens"]]
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    ids = data["rollout_ids"]
    parts, micros, counts, rollouts = build_dp_schedule(args, parallel, total, global_batch_size=6, rollout_indices=ids)
    per_row = ("tokens", "response_lengths", "rewards", "truncated", "sample_indices", "rollout_ids", "loss_masks")
    for rank, part in enumerate(parts):
        own = {name: [data[name][row] for row in part] for name in per_row}
        own["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in own["loss_masks"]]
        sampled = [torch.tensor(data["rollout_log_probs"][row]) for row in part]
        own |= {
            "tokens": [torch.tensor(tokens) for tokens in own["tokens"]],
            "total_lengths": [total[row] for row in part],
            "raw_reward": data["raw_reward"],
            "rollout_log_probs": sampled,
            "log_probs": [each + 0.01 for each in sampled],
            "advantages": [torch.full_like(x, reward) for x, reward in zip(sampled, own["rewards"], strict=True)],
            "num_microbatches": counts,
            "micro_batch_indices": micros[rank],
            "num_rollouts": rollouts,
        }
        own["returns"] = own["advantages"]
        torch.distributed.get_rank, torch.distributed.is_initialized = (lambda rank=rank: rank), (lambda: True)
        import miles.backends.training_utils.debug_dump as losses

        losses._POLICY_LOSS_DUMP_COUNTER = sum(len(each) for each in COUNTED.get(rank, ()))
        COUNTED.setdefault(rank, []).append(micros[rank])
        for rows in micros[rank]:
            pick = {name: [own[name][row] for row in rows] for name in ("total_lengths", "response_lengths")}
            old, mask, advantage, sampler = (
                [own[name][row] for row in rows]
                for name in ("log_probs", "loss_masks", "advantages", "rollout_log_probs")
            )
            at_loss = [x + 0.02 * torch.randn(len(x), generator=draw) for x in old]
            maybe_dump_policy_loss_debug(
                args=args,
                batch=pick,
                train_log_probs=at_loss,
                old_log_probs=old,
                rollout_log_probs=sampler,
                advantages=advantage,
                local_loss_masks=mask,
                ppo_kl=torch.cat(old) - torch.cat(at_loss),
                pg_loss=-torch.cat(advantage),
            )
        save_debug_train_data_for_rank(args, rollout_id=rollout, rollout_data=own, rank=rank)


COUNTED: dict = {}


def make():
    from miles.ray.rollout.debug_data import save_debug_rollout_data

    args = SimpleNamespace(
        save_debug_rollout_data=str(HERE / "rollout_data" / "{rollout_id}.pt"), save_debug_trajectory_data=None
    )
    for rollout in (0, 1):
        draw = torch.Generator().manual_seed(rollout)
        made = samples(rollout, draw)
        save_debug_rollout_data(args, made, rollout_id=rollout, evaluation=False)
        if rollout:
            save_debug_rollout_data(args, {"eval": {"samples": made[:2]}}, rollout_id=rollout, evaluation=True)
        train(rollout, made, draw)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), sys.argv[1]]
    from stubs import stub

    stub("megatron", "ray", "sglang", "mooncake", "httpx")
    shutil.rmtree(HERE, ignore_errors=True)
    make()
