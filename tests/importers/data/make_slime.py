"""Make `slime/`: dumps that slime's own functions wrote.

    python tests/importers/data/make_slime.py CHECKOUT

CHECKOUT is a clone of THUDM/slime at 624b824a8. Real are `Sample`, `save_debug_rollout_data`, `build_dp_schedule`,
which cuts the batch into ranks, optimizer steps and micro-batches, and `_build_dump_payload`. What needs Megatron, Ray
or a GPU is left out: log-probs and advantages are random. Two ranks, two optimizer steps a rollout, micro-batches of 1.
"""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

HERE = Path(__file__).parent / "slime"
GROUPS, SIZE = 3, 4


def samples(rollout, draw):
    from slime.utils.types import Sample

    made = []
    for row in range(GROUPS * SIZE):
        length = int(torch.randint(1, 6, (1,), generator=draw))
        prompt = [5, 6, 7 + row // SIZE]
        made.append(
            Sample(
                group_index=GROUPS * rollout + row // SIZE,
                index=GROUPS * SIZE * rollout + row,
                prompt="question",
                tokens=prompt + list(range(20, 20 + length)),
                response="answer",
                response_length=length,
                label="7",
                reward=float(row % 3 == 0),
                loss_mask=[1] * length,
                rollout_log_probs=(-torch.rand(length, generator=draw)).tolist(),
                remove_sample=row == 2,
                status=Sample.Status.TRUNCATED if row == 1 else Sample.Status.COMPLETED,
            )
        )
    return made


def train_data(rollout, made, draw):
    """As `_convert_samples_to_train_data`, `_split_train_data_by_dp` (slime/ray/rollout.py) and the actor leave it."""
    from slime.observability.train_data_utils import _build_dump_payload
    from slime.utils.dp_schedule import build_dp_schedule

    args = SimpleNamespace(micro_batch_size=1, use_dynamic_batch_size=False, max_tokens_per_gpu=None, balance_data=True)
    args.balance_by_flops = False
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, micro_batches, counts, sizes = build_dp_schedule(
        args,
        parallel,
        [len(sample.tokens) for sample in made],
        global_batch_size=GROUPS * SIZE // 2,
        rollout_indices=[sample.index for sample in made],
    )
    shards = []
    for rank, partition in enumerate(partitions):
        mine = [made[position] for position in partition]
        lengths = [sample.response_length for sample in mine]
        sampled = [torch.tensor(sample.rollout_log_probs) for sample in mine]
        random = [torch.rand(length, generator=draw) for length in lengths]
        data = {
            "partition": partition,
            "tokens": [torch.tensor(sample.tokens) for sample in mine],
            "response_lengths": lengths,
            "rewards": [sample.reward - 1 / 3 for sample in mine],
            "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in mine],
            "loss_masks": [
                torch.full((sample.response_length,), int(not sample.remove_sample), dtype=torch.int) for sample in mine
            ],
            "sample_indices": [sample.index for sample in mine],
            "rollout_log_probs": sampled,
            "log_probs": [each + 0.01 for each in sampled],
            "ref_log_probs": [each - 0.1 * noise for each, noise in zip(sampled, random, strict=True)],
            "advantages": [torch.full((sample.response_length,), sample.reward - 1 / 3) for sample in mine],
            "raw_reward": [sample.reward for sample in made],
            "total_lengths": [len(sample.tokens) for sample in mine],
            "global_batch_sizes": sizes,
            "num_microbatches": counts,
            "micro_batch_indices": micro_batches[rank],
        }
        shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
    return _build_dump_payload(shards, rollout_id=rollout, writer_rank=0)


def make():
    from slime.observability.rollout_data_utils import save_debug_rollout_data

    for rollout in (0, 1):
        draw = torch.Generator().manual_seed(rollout)
        made = samples(rollout, draw)
        path = str(HERE / "rollout_data" / "{rollout_id}.pt")
        save_debug_rollout_data(path, made, rollout_id=rollout, evaluation=False)
        if rollout:
            save_debug_rollout_data(path, {"eval": {"samples": made[:2]}}, rollout_id=rollout, evaluation=True)
        target = HERE / "train_data" / f"{rollout}.pt"
        target.parent.mkdir(exist_ok=True)
        torch.save(train_data(rollout, made, draw), target)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), sys.argv[1]]
    from stubs import stub

    stub("megatron", "ray", "sglang", "slime.utils.http_utils")
    flops = ModuleType("slime.utils.flops_utils")
    flops.calculate_fwd_flops = lambda seqlens, args: sum(seqlens)
    sys.modules["slime.utils.flops_utils"] = flops
    shutil.rmtree(HERE, ignore_errors=True)
    make()
