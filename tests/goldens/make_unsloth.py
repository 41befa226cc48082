"""Call the loss of releases of unsloth-zoo and store what it gives: `make_unsloth.py RELEASE=FOLDER ...`.

FOLDER has the sources of the release (`make goldens` takes them out of its wheel). Nothing is imported: its loss and
the class that goes through it in chunks are taken out of the source. Results of other releases stay as they are.
"""

import ast
import json
import math
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from goldens import trl_releases as releases
from goldens import unsloth_steps as steps
from goldens.make_trl_releases import store
from parity.padded import pack, pad, precision
from trl import GRPOTrainer

from rolloutdoctor.evaluation.evaluate import evaluate

NAMES = ("grpo_compute_loss", "UnslothEfficientGRPO")


def loss_of(folder: str) -> type:
    """The class whose `apply` is the loss of a micro-batch."""
    tree = ast.parse((Path(folder) / "unsloth_zoo" / "rl_replacements.py").read_text(encoding="utf-8"))
    body = [node for node in tree.body if getattr(node, "name", None) in NAMES]
    names = {"torch": torch, "math": math, "torch_compile_options": {}}
    exec(compile(ast.Module(body, []), "unsloth", "exec"), names)
    return names["UnslothEfficientGRPO"]


def off_policy_mask(**given: object) -> torch.Tensor:
    """TRL's, under the name that the release calls it by."""
    if "old_per_token_logps" in given:
        given["sampling_per_token_logps"] = given.pop("old_per_token_logps")
    return GRPOTrainer.get_off_policy_mask(**given)


def high_entropy(entropies: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """TRL's mask of a micro-batch of one rank."""
    alone = types.SimpleNamespace(
        pad_across_processes=lambda x, **_: x, gather=lambda x: x, num_processes=1, device=entropies.device
    )
    return GRPOTrainer.get_high_entropy_mask(types.SimpleNamespace(accelerator=alone), entropies, mask, 1 - share)


def row_weights(batch: object, mask: torch.Tensor) -> torch.Tensor:
    """What Unsloth weighs rows by where groups of equal rewards are left out: one over the tokens that are kept."""
    reward_N, kept_N = batch.column("reward"), torch.zeros(len(batch), dtype=mask.dtype)
    for group in range(len(batch.group_ids)):
        here = batch.groups.index_N == group
        kept_N[here] = int(not torch.isclose(reward_N[here].std(), torch.zeros((), dtype=reward_N.dtype)))
    return kept_N / (mask.sum(1) * kept_N).sum().clamp(min=1)


def results(loss: type, entry: tuple) -> dict[str, list[float]]:
    """Loss, gradient and metrics of one entry, in both precisions."""
    zoo, case, _, options = entry
    batch, mine = steps.batch_of(case, options, zoo), steps.objective(zoo, options)
    own, stays = steps.given(zoo, options), steps.is_new(zoo)
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
            if stays:
                before = steps.release_of(options) < "1.9" and own.get("mask_truncated_completions")
                counted = pad(batch, batch.column("response_mask_pre"), torch.int64).sum() if before else mask.sum()
            accumulation = options.get("gradient_accumulation_steps", releases.ACCUMULATION)
            optim_steps = releases.ACCUMULATION // accumulation
            for micro in range(releases.ACCUMULATION):
                here_N = batch.per_row["micro_batch_id"] == micro
                weighs = options.get("use_vllm", False)
                given = {
                    "epsilon_low": 0.2,
                    "epsilon_high": own["epsilon_high"],
                    "delta": options.get("delta"),
                    "loss_type": own["loss_type"],
                    "importance_sampling_level": options.get("importance_sampling_level", "token"),
                    "max_completion_length": releases.WIDTH,
                    "num_items_in_batch": counted,
                    "current_gradient_accumulation_steps": accumulation,
                    "use_vllm": weighs,
                    "vllm_importance_sampling_mode": options.get("vllm_importance_sampling_mode", "token_truncate"),
                    "get_gamma_weights": GRPOTrainer.get_gamma_weights,
                    "vllm_importance_sampling_cap": 3.0 if steps.release_of(options) >= "0.26" else 2.0,
                }
                # As `grpo_accumulated_loss` does for a TRL without these options.
                given["vllm_importance_sampling_clip_min"] = 0
                given["vllm_importance_sampling_clip_max"] = given["vllm_importance_sampling_cap"]
                with_old = "old_log_probs" in cells
                if zoo not in ("2026.8.13", "2026.1.2"):
                    given |= extra(options, own, weighs, batch, mask, cells, here_N)
                with_sampler = weighs and (
                    own.get("vllm_importance_sampling_correction") or "off_policy_mask_threshold" in own
                )
                value, length, kl, *_ = loss.apply(
                    leaf[here_N],
                    cells["old_log_probs"][here_N] if with_old else None,
                    cells["ref_log_probs"][here_N],
                    cells["rollout_log_probs"][here_N] if with_sampler else None,
                    None,
                    torch.zeros_like(mask[here_N]),
                    mask[here_N],
                    advantage_N[here_N],
                    own["beta"],
                    None,
                    int(here_N.sum()) if zoo == "2026.1.2" else 1,
                    given,
                )
                total = total + value.sum() / optim_steps
                kls.append(float(kl))
                lengths.append(float(length))
            total.backward()
        # Its backward pass gives the gradient that it stored, whatever comes from above.
        grad_T = pack(batch, leaf.grad) / optim_steps
        found[f"{name}/loss"] = [float(total)]
        found[f"{name}/grad"] = [*releases.projections(grad_T).tolist(), float(grad_T.double().abs().sum())]
        found[f"{name}/metrics"] = [sum(lengths) / len(lengths), sum(kls) / len(kls)]
    return found | {"names": ["completion_length", "kl"]}


def extra(options: dict, own: dict, weighs: bool, batch: object, mask: object, cells: dict, here_N: object) -> dict:
    """What `grpo_accumulated_loss` passes on from 2026.9 on."""
    found = {
        "use_bias_correction_kl": options.get("use_bias_correction_kl", False),
        "vllm_importance_sampling_correction": options.get("vllm_importance_sampling_correction", False),
        "steps_per_generation": options.get("steps_per_generation", releases.ACCUMULATION),
        "off_policy_mask_threshold": options.get("off_policy_mask_threshold"),
        "get_off_policy_mask": off_policy_mask,
    }
    if "top_entropy_quantile" in options:
        share = options["top_entropy_quantile"]
        found["entropy_mask"] = high_entropy(cells["entropy"][here_N], mask[here_N], share)
    if steps.EXCLUDE in options:
        found["sample_weight"] = row_weights(batch, mask)[here_N]
    return found


def main(sources: list[str]) -> None:
    """Write the file."""
    torch.set_num_threads(1)
    # What compiles leaves functions as they are.
    torch.compile = lambda function, **_: function
    utils = types.ModuleType("unsloth_zoo.temporary_patches.utils")
    utils.torch_compile_with_fallback = lambda **_: lambda function: function
    for name in ("unsloth_zoo", "unsloth_zoo.temporary_patches"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[utils.__name__] = utils
    folders = dict(each.split("=", 1) for each in sources)
    with np.load(steps.FILE) as file:
        values, index = file["values"].tolist(), json.loads(bytes(file["index"]).decode())
    kept = {
        entry: {name: part if name == "names" else values[part[0] : sum(part)] for name, part in of_entry.items()}
        for entry, of_entry in index.items()
    }
    losses = {zoo: loss_of(folder) for zoo, folder in folders.items()}
    found = {}
    for entry in steps.entries():
        name = "/".join(entry[:3])
        found[name] = results(losses[entry[0]], entry) if entry[0] in losses else kept[name]
    store(steps.FILE, found)


if __name__ == "__main__":
    main(sys.argv[1:])
