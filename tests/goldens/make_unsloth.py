"""Call the loss of unsloth-zoo and store what it gives: `make_unsloth.py REPOSITORY`, a git directory of unsloth-zoo.

Nothing is imported: its loss and the class that goes through it in chunks are taken out of the source.
"""

import ast
import math
import subprocess
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from goldens import trl_releases as releases
from goldens import unsloth_steps as steps
from goldens.make_trl_releases import store
from parity.padded import pack, pad, precision
from trl import GRPOTrainer

from rolloutdoctor.evaluation.evaluate import evaluate

NAMES = ("grpo_compute_loss", "UnslothEfficientGRPO")


def loss_of(repository: str, commit: str) -> type:
    """The class whose `apply` is the loss of a micro-batch."""
    command = ["git", f"--git-dir={repository}", "show", f"{commit}:unsloth_zoo/rl_replacements.py"]
    tree = ast.parse(subprocess.run(command, capture_output=True, check=True).stdout.decode())
    body = [node for node in tree.body if getattr(node, "name", None) in NAMES]
    names = {"torch": torch, "math": math, "torch_compile_options": {}}
    exec(compile(ast.Module(body, []), "unsloth", "exec"), names)
    return names["UnslothEfficientGRPO"]


def results(loss: type, entry: tuple) -> dict[str, list[float]]:
    """Loss, gradient and metrics of one entry, in both precisions."""
    zoo, case, _, options = entry
    batch, mine = steps.batch_of(case, options), steps.objective(zoo, options)
    found = {}
    for name, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        with precision(dtype):
            advantage_N = evaluate(batch, mine, dtype=dtype).rows.advantage_N.to(dtype)
            cells = {each: pad(batch, column, dtype) for each, column in batch.per_token.items()}
            mask = pad(batch, batch.column("response_mask"), torch.int64)
            leaf = cells["policy_log_probs"].clone().requires_grad_()
            total, kls, lengths = 0.0, [], []
            # TRL counts the tokens with the mask that it made, which the loss makes anew.
            kept_N = [not options.get("mask_truncated_completions") or each == "stop" for each in batch.statuses]
            counted = mask[torch.tensor(kept_N)].sum()
            for micro in range(releases.ACCUMULATION):
                here_N = batch.per_row["micro_batch_id"] == micro
                weighs = options.get("use_vllm", False)
                given = {
                    "epsilon_low": mine.surrogate.clip_low,
                    "epsilon_high": mine.surrogate.clip_high,
                    "delta": options.get("delta"),
                    "loss_type": options.get("loss_type", "bnpo"),
                    "importance_sampling_level": options.get("importance_sampling_level", "token"),
                    "max_completion_length": releases.WIDTH,
                    "num_items_in_batch": counted,
                    "current_gradient_accumulation_steps": releases.ACCUMULATION,
                    "use_vllm": weighs,
                    "vllm_importance_sampling_mode": options.get("vllm_importance_sampling_mode", "token_truncate"),
                    "get_gamma_weights": GRPOTrainer.get_gamma_weights,
                    "vllm_importance_sampling_cap": 3.0 if steps.release_of(options) >= "0.26" else 2.0,
                }
                # As `grpo_accumulated_loss` does for a TRL without these options.
                given["vllm_importance_sampling_clip_min"] = 0
                given["vllm_importance_sampling_clip_max"] = given["vllm_importance_sampling_cap"]
                with_old = "old_log_probs" in cells
                value, length, kl, *_ = loss.apply(
                    leaf[here_N],
                    cells["old_log_probs"][here_N] if with_old else None,
                    cells["ref_log_probs"][here_N],
                    cells["rollout_log_probs"][here_N] if weighs else None,
                    None,
                    torch.zeros_like(mask[here_N]),
                    mask[here_N],
                    advantage_N[here_N],
                    options.get("beta", 0.001),
                    None,
                    int(here_N.sum()) if zoo == "2026.1.2" else 1,
                    given,
                )
                total = total + value.sum()
                kls.append(float(kl))
                lengths.append(float(length))
            total.backward()
        grad_T = pack(batch, leaf.grad)
        found[f"{name}/loss"] = [float(total)]
        found[f"{name}/grad"] = [*releases.projections(grad_T).tolist(), float(grad_T.double().abs().sum())]
        found[f"{name}/metrics"] = [sum(lengths) / len(lengths), sum(kls) / len(kls)]
    return found | {"names": ["completion_length", "kl"]}


def main(repository: str) -> None:
    """Write the file."""
    torch.set_num_threads(1)
    # What compiles leaves functions as they are.
    torch.compile = lambda function, **_: function
    utils = types.ModuleType("unsloth_zoo.temporary_patches.utils")
    utils.torch_compile_with_fallback = lambda **_: lambda function: function
    for name in ("unsloth_zoo", "unsloth_zoo.temporary_patches"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[utils.__name__] = utils
    losses = {zoo: loss_of(repository, commit) for zoo, commit in steps.ZOOS.items()}
    found = {"/".join(entry[:3]): results(losses[entry[0]], entry) for entry in steps.entries()}
    store(steps.FILE, found)


if __name__ == "__main__":
    main(sys.argv[1])
