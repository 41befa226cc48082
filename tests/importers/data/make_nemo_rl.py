"""Make `nemo_rl/`: dumps that `Logger.log_batched_dict_as_jsonl` of NeMo-RL wrote.

    python tests/importers/data/make_nemo_rl.py CHECKOUT

CHECKOUT is a clone of NVIDIA-NeMo/RL at 7ea279abf. The writer (nemo_rl/utils/logger.py with BatchedDataDict) is the
real one, with stand-ins for what it imports and does not use here; the batch is random, in the shapes that `grpo_train`
of nemo_rl/algorithms/grpo.py gives it: padded on the right, float masks, zeros where nothing was computed.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

HERE = Path(__file__).parent / "nemo_rl"
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 4]]
SIZE = 4


def batch(step, *, dynamic, on_policy):
    draw = torch.Generator().manual_seed(step)
    prompts = [prompt for prompt in PROMPTS for _ in range(SIZE)]
    lengths = torch.randint(1, 6, (len(prompts),), generator=draw).tolist()
    width = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, : len(prompt) + length] = torch.tensor(prompt + list(range(20, 20 + length)))
        mask[row, len(prompt) : len(prompt) + length] = 1
    sampled = -torch.rand(len(prompts), width, generator=draw) * mask
    rewards = (torch.rand(len(prompts), generator=draw) < 0.5).float()
    sample_mask = torch.ones(len(prompts))
    sample_mask[1] = 0
    groups = rewards.view(-1, SIZE)
    advantages = (groups - (groups.sum(1, keepdim=True) - groups) / (SIZE - 1)).view(-1, 1)
    prev = torch.zeros_like(sampled) if on_policy else sampled + 0.01 - 0.5 * (1 - mask)
    rows = {"content": ["".join(chr(97 + each) for each in prompt) for prompt in prompts], "rewards": rewards.tolist()}
    if dynamic:
        # repeated_batch is not filtered, and longer: its rewards do not belong to these rows
        rows["filtered_rewards"] = rewards.tolist()
        rows["rewards"] = [9.0] * len(prompts) + [8.0] * SIZE
    rows["input_lengths"] = [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
    rows["token_ids"] = ids.tolist()
    rows["token_loss_mask"] = mask.tolist()
    rows["sample_loss_mask"] = sample_mask.tolist()
    rows["advantages"] = advantages.expand(-1, width).tolist()
    rows["generation_logprobs"] = sampled.tolist()
    rows["prev_logprobs"] = prev.tolist()
    return rows


def make(name, **options):
    from nemo_rl.utils.logger import Logger

    logger = SimpleNamespace(base_log_dir=str(HERE / name))
    for step in (1, 2):
        Logger.log_batched_dict_as_jsonl(logger, batch(step, **options), f"train_data_step{step}.jsonl")


def make_sync():
    """`grpo_sync.py` puts the unfiltered rewards first: the writer counts rows by them and ends in empty lists."""
    from nemo_rl.utils.logger import Logger

    rows = batch(1, dynamic=True, on_policy=False)
    rows = {"rewards": rows.pop("rewards"), **rows}
    logger = SimpleNamespace(base_log_dir=str(HERE / "dynamic_sync"))
    Logger.log_batched_dict_as_jsonl(logger, rows, "train_data_step1.jsonl")


if __name__ == "__main__":
    from stubs import stub

    sys.path.insert(0, sys.argv[1])
    stub("mlflow", "ray", "requests", "swanlab", "wandb", "prometheus_client", "torch.utils.tensorboard")
    stub("nemo_rl.data", "nemo_rl.distributed.collectives", "nemo_rl.utils.venvs", "nemo_rl.distributed.model_utils")
    package = ModuleType("nemo_rl")
    package.__path__ = [f"{sys.argv[1]}/nemo_rl"]
    sys.modules["nemo_rl"] = package
    from nemo_rl.distributed import batched_data_dict

    batched_data_dict.PackedTensor = type("PackedTensor", (), {})
    make("grpo", dynamic=False, on_policy=False)
    make("on_policy", dynamic=False, on_policy=True)
    make("dynamic", dynamic=True, on_policy=False)
    make_sync()
