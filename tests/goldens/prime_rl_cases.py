"""Inputs of the stored results of prime-rl: drawn by Python's own generator, so that every machine has the same."""

import random
import struct
from collections.abc import Sequence

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import PROMPT_LENGTH
from rolloutdoctor.ops.groups import Groups

CASES = ("ragged", "rejected", "singletons", "dense", "extreme", "ties", "two_steps", "tiny_spread")

CONFIGS: dict[str, tuple[str, dict[str, object], str]] = {
    "v0.3.0 token": ("v0.3.0", {}, "grpo"),
    "v0.3.0 sequence": ("v0.3.0", {"ratio_type": "sequence", "kl_tau": 0.01}, "grpo"),
    "v0.4.0 tight": (
        "v0.4.0",
        {"token_mask_low": 0.8, "token_mask_high": 1.2, "geo_mask_low": 0.9, "geo_mask_high": 1.1, "adv_tau": 0.5},
        "grpo",
    ),
    "v0.4.0 rows": ("v0.4.0", {"ratio_type": "sequence", "sequence_mask_low": 0.7, "sequence_clip_high": 1.5}, "grpo"),
    "v0.5.0": ("v0.5.0", {}, "grpo"),
    "v0.5.0 tight": ("v0.5.0", {"ipo_mask_low": 0.02, "ipo_mask_high": 0.05, "kl_tau": 0.01}, "grpo"),
    "v0.6.0": ("v0.6.0", {}, "grpo"),
    "v0.6.0 ipo": ("v0.6.0", {"type": "ipo"}, "grpo"),
    "v0.7.0 max_rl": ("v0.7.0", {"dppo_mask_low": 0.05, "dppo_mask_high": 0.02}, "max_rl"),
    "v0.8.0 rae": ("v0.8.0", {"adv_tau": 0.3, "kl_tau": 0.1}, "rae"),
    "main": ("HEAD", {}, "grpo"),
    "main tight": ("HEAD", {"dppo_mask_low": 0.02, "dppo_mask_high": 0.05, "kl_tau": 0.01}, "grpo"),
    "main ipo": ("HEAD", {"type": "ipo", "ipo_threshold": 0.03}, "grpo"),
    "main max_rl": ("HEAD", {"kl_tau": 0.0}, "max_rl"),
    "main hierarchical": ("HEAD", {}, "hierarchical_grpo"),
    "main unfiltered": ("HEAD", {"filter_zero_advantages": False}, "grpo"),
    "v0.4.0 weighted": ("v0.4.0", {"length_weighted_mean": True}, "grpo"),
    "v0.5.0 rescaled": ("v0.5.0", {"length_shaping_alpha": 0.33}, "grpo"),
    "v0.6.0 weighted": ("v0.6.0", {"length_weighted_baseline": True}, "grpo"),
    "v0.6.0 penalty": ("v0.6.0", {"coef": 0.25}, "grpo"),
    "v0.6.0 gated": (
        "v0.6.0",
        {"coef": 0.6, "gate_by_correctness": True, "length_weighted_baseline": True, "seq_len": 12},
        "grpo",
    ),
    "v0.7.0 penalty": ("v0.7.0", {"length_penalty": {"type": "linear"}}, "grpo"),
    "v0.8.0 outputs": (
        "v0.8.0",
        {"length_penalty": {"num_output_tokens_weight": 0.5, "num_input_tokens_weight": 0, "num_turns_weight": 0}},
        "grpo",
    ),
    "main penalty": ("HEAD", {"length_penalty": {"num_turns_weight": 0.7}}, "grpo"),
}
"""Name to the tag of the checkout, the options of the loss and of lengths, and the algorithm."""

PLACES = {
    **dict.fromkeys(
        ("length_weighted_mean", "length_shaping_alpha", "length_weighted_baseline"), "orchestrator.advantage."
    ),
    **dict.fromkeys(("coef", "gate_by_correctness"), "orchestrator.advantage.length_penalty."),
    "seq_len": "orchestrator.",
    "filter_zero_advantages": "orchestrator.train.",
}
"""Options that are not of the loss, and where they are."""


def named(options: dict[str, object]) -> dict[str, object]:
    """The options under their full names."""
    found = {f"{PLACES.get(name, 'trainer.loss.')}{name}": value for name, value in options.items()}
    penalty = found.pop("trainer.loss.length_penalty", {})
    assert isinstance(penalty, dict)
    return found | {f"orchestrator.algo.length_penalty.{name}": value for name, value in penalty.items()}


def single(x: float) -> float:
    """Round to float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def rows_of(case: str) -> list[dict]:
    """The rows of a case: what a trace says, log-probs of trainer and sampler, entropy, rank and micro-batch."""
    draw = random.Random(f"prime-rl {case}")
    sizes = {"singletons": (1, 1, 3, 1, 2), "ties": (4, 8, 6, 2)}.get(case, (4, 3, 4))
    found = []
    for group, size in enumerate(sizes):
        prompt = random.Random(f"prompt {case} {group}").randrange(1, 9)
        tie = draw.choice([0.1, 0.3, 0.7, 0.01, 1.0])
        for place in range(size):
            reward = {
                "dense": draw.gauss(0, 2),
                "ties": tie if group < 3 else float(place),
                "tiny_spread": 0.3 + 1e-7 * draw.randrange(3),
            }.get(case, float(draw.random() < 0.5))
            length = draw.randrange(1, 16)
            mask = [draw.random() < 0.8 for _ in range(length)]
            if case == "rejected" and draw.random() < 0.3:
                mask = [False] * length
            elif case != "rejected":
                mask[-1] = True
            spread = {"extreme": 8.0, "two_steps": 0.6, "tiny_spread": 1e-3}.get(case, 0.1)
            policy = [single(-abs(draw.gauss(0, 1.5))) for _ in mask]
            sampler = [single(min(p + draw.gauss(0, spread), -1e-6)) for p in policy]
            found.append(
                {
                    "group": group,
                    "agent": place % 2,
                    "reward": single(reward),
                    "prompt": prompt,
                    "mask": mask,
                    "policy": policy,
                    "sampler": sampler,
                    "entropy": [single(draw.random()) for _ in mask],
                    "rank": len(found) % 2,
                    "micro": len(found) // 2 % 3,
                }
            )
    return found


def batch_of(rows: Sequence[dict], advantages: Sequence[Sequence[float]] | None, dtype: torch.dtype) -> RolloutBatch:
    """The rows as a step; `advantages` as logged, one for each token."""

    def flat(values: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([each for row in values for each in row], dtype=dtype)

    groups = torch.tensor([row["group"] for row in rows])
    lengths = torch.tensor([len(row["mask"]) for row in rows])
    mask_T = flat([row["mask"] for row in rows]) != 0
    per_token = {
        "response_mask": mask_T,
        "policy_log_probs": flat([row["policy"] for row in rows]),
        "rollout_log_probs": flat([row["sampler"] for row in rows]),
        "entropy": flat([row["entropy"] for row in rows]),
    }
    if advantages is not None:
        per_token["advantages"] = flat(advantages)
    return RolloutBatch(
        step=1,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        groups=Groups.of(groups),
        per_row={
            "reward": torch.tensor([row["reward"] for row in rows], dtype=torch.float64),
            "rank": torch.tensor([row["rank"] for row in rows]),
            "micro_batch_id": torch.tensor([row["micro"] for row in rows]),
            # The tokens of a prompt are a hash in a batch, beside their number.
            "prompt_ids": groups,
            PROMPT_LENGTH: torch.tensor([row["prompt"] for row in rows]),
        },
        rewards={},
        per_token=per_token,
        group_ids=[str(each) for each in range(int(groups.max()) + 1)],
        sample_ids=[str(each) for each in range(len(rows))],
    )
