"""Options with which the real loss of unsloth-zoo was called on the steps of `trl_releases`; `make_unsloth.py` does."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from goldens import golden_data as gold
from goldens import trl_releases as releases
from objectives import objective_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.objective.objective import Objective

FILE = gold.DATA / "unsloth.npz"
ZOOS = {"2026.8.13": "ce232d6c", "2026.1.2": "da0c1e86"}
"""Release of unsloth-zoo to its commit; the second one takes every row for a chunk."""

TRL = "0.24.0"


def configurations(zoo: str) -> Iterator[tuple[str, dict]]:
    """Sets of options that a release has."""
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        yield loss_type, {"loss_type": loss_type, "beta": 0.04, "num_iterations": 2}
    yield "default", {"importance_sampling_level": "token"}
    yield "without_kl", {"beta": 0.0, "epsilon_high": 0.3, "num_iterations": 2}
    yield "delta", {"delta": 1.05, "num_iterations": 2}
    yield "sequence", {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}
    yield "weights", {"use_vllm": True, "vllm_importance_sampling_correction": True}
    if zoo == "2026.8.13":
        for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"):
            yield (
                mode,
                {"use_vllm": True, "vllm_importance_sampling_correction": True}
                | {"vllm_importance_sampling_mode": mode},
            )
        for loss_type in ("cispo", "sapo"):
            yield loss_type, {"loss_type": loss_type, "num_iterations": 2}
        rows = {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0, "num_iterations": 2}
        weighed = {"use_vllm": True, "vllm_importance_sampling_correction": True}
        yield "luspo", rows
        yield "luspo_weights", {**rows, **weighed, "vllm_importance_sampling_mode": "sequence_truncate"}
        yield "vespo", {"loss_type": "vespo", "beta": 0.04, "num_iterations": 2}
        yield "vespo_rows", {**weighed, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}
        yield "vespo_tokens", {**weighed, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
        yield "truncated_dapo", {"loss_type": "dapo", "mask_truncated_completions": True, "num_iterations": 2}
        yield "sequence_without_kl", {"importance_sampling_level": "sequence", "beta": 0.0, "num_iterations": 2}


def release_of(options: dict) -> str:
    """The TRL under it."""
    if "mask_truncated_completions" in options:
        return "1.9.0"
    if options.get("loss_type") in ("luspo", "vespo"):
        return "1.5.0"
    late = "vllm_importance_sampling_mode" in options or options.get("loss_type") in ("cispo", "sapo")
    return "0.26.2" if late else TRL


def entries() -> list[tuple[str, str, str, dict]]:
    """Release of unsloth-zoo, case, name and options."""
    return [
        (zoo, case, name, options)
        for zoo in ZOOS
        for number, (name, options) in enumerate(configurations(zoo))
        for place, case in enumerate((*releases.CASES, EMPTY))
        if case != "evaluation" and ((place + number) % 2 == 0 or name in ALWAYS or case == EMPTY)
    ]


EMPTY = "empty"
"""A step with a row of padding alone."""

ALWAYS = ("bnpo", "luspo", "vespo", "truncated_dapo")


def batch_of(case: str, options: dict) -> RolloutBatch:
    """A step of two micro-batches on one rank, no token of which is masked."""
    # Its loss makes the mask anew: what TRL masked is trained.
    own = {name: value for name, value in options.items() if name != "mask_truncated_completions"}
    batch = releases.batch_of("trl", "ragged" if case == EMPTY else case, release_of(options), own)
    if case == EMPTY:
        mask_T = batch.column("response_mask").clone()
        mask_T[batch.rows[1] : batch.rows[2]] = False
        batch = replace(batch, per_token={**batch.per_token, "response_mask": mask_T, "response_mask_pre": mask_T})
    batch.per_row["rank"] = torch.zeros_like(batch.per_row["rank"])
    batch.per_row["micro_batch_id"] = torch.arange(len(batch)) * releases.ACCUMULATION // len(batch)
    return batch


def objective(zoo: str, options: dict) -> Objective:
    """What the package makes of the options."""
    return objective_of(
        f"unsloth@{release_of(options)}", unsloth_zoo=zoo, max_completion_length=releases.WIDTH, **options
    )
