"""Make `skyrl/`: batches that `TrainingInputBatch.save` of SkyRL wrote.

    python tests/importers/data/make_skyrl.py CHECKOUT

CHECKOUT is a clone of NovaSky-AI/SkyRL at a9564572eb8e. Of `training_batch.py` only imports are stubbed; the fields are
those that `RayPPOTrainer.dump_data` is given, right-aligned as `convert_prompts_responses_to_batch_tensors` has them.
"""

import sys
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent / "skyrl"


def stub(name: str, **values: object) -> None:
    """An empty module of a name."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(values)


def batch(kind: type, seed: int) -> object:
    """Six responses to two prompts, and one row of padding."""
    draw = torch.Generator().manual_seed(seed)
    lengths, prompts, width, ahead = [3, 5, 2, 4, 5, 1], [2, 2, 2, 3, 3, 3], 5, 3
    rows = len(lengths) + 1
    response = torch.zeros(rows, width, dtype=torch.int64)
    there = torch.zeros(rows, width + ahead, dtype=torch.int64)
    for row, length in enumerate([*lengths, width]):
        response[row, width - length :] = 1
        there[row, width + ahead - length - [*prompts, 1][row] :] = 1
    mask = response.float()
    mask[1, 2] = 0.0
    normal = [torch.randn(rows, width, generator=draw) for _ in range(4)]
    found = kind(
        {
            "sequences": torch.randint(5, 99, (rows, width + ahead), generator=draw) * there,
            "attention_mask": there,
            "response_mask": response,
            "loss_mask": mask,
            "action_log_probs": -normal[0].abs() * response,
            "base_action_log_probs": -normal[1].abs() * response,
            "rollout_logprobs": -normal[2].abs() * response,
            "advantages": normal[3] * response,
            "values": None,
        }
    )
    found.metadata = {
        "policy_prompt_boundaries": [(0, 3), (3, 6)],
        "policy_mini_batch_boundaries": [(0, 6)],
        "pad_size": 1,
        "avg_response_length": 20 / 6,
        "metrics": {"avg_kl": 0.1},
    }
    return found


if __name__ == "__main__":
    stub("jaxtyping", **dict.fromkeys(("Bool", "Float", "Integer"), dict))
    folder = "skyrl.backends.skyrl_train"
    for name in ("skyrl", "skyrl.backends", folder, f"{folder}.utils"):
        stub(name)
    stub(f"{folder}.utils.replay_utils", make_replay_padding_indices=None)
    source = (Path(sys.argv[1]) / folder.replace(".", "/") / "training_batch.py").read_text()
    module = ModuleType(f"{folder}.training_batch")
    sys.modules[module.__name__] = module
    exec(compile(source, "training_batch.py", "exec"), vars(module))
    for step in (1, 2):
        batch(module.TrainingInputBatch, step).save(str(HERE / f"global_step_{step}_training_input.pkl"))
