"""A policy whose logits drift from version to version, and samplers that follow it or do not.

Both columns follow from logits: the sampler draws tokens from its own weights and gives their log-probs, the trainer
scores them with its own; either adds the noise of its kernels to the logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups


def _log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@dataclass
class Policy:
    """Logits of each (prompt, position) and version; siblings share them.

    Attributes:
        rate: how far logits drift with each version.
        sharpening: how much larger logits get with each version, as a share.
        peak: standard deviation of the logits of version 0.
        noise: standard deviation of the noise that a kernel adds to logits, for logits of size 1.
    """

    rate: float = 0.05
    sharpening: float = 0.0
    peak: float = 2.0
    noise: float = 0.005
    vocabulary: int = 24
    length: int = 64
    seed: int = 0

    def logits(self, prompt: int, version: int):
        draw = np.random.default_rng((self.seed, prompt))
        shape = (self.length, self.vocabulary)
        base, towards = self.peak * draw.normal(size=shape), draw.normal(size=shape)
        return (1 + self.sharpening * version) * (base + self.rate * version * towards)

    def noisy(self, logits, draw):
        """What a kernel makes of them: bf16 noise goes with the size of logits."""
        return logits + self.noise * (1 + np.abs(logits)) * draw.normal(size=logits.shape)


def step_of(
    policy: Policy,
    step: int,
    *,
    versions: Callable[[int, int], Sequence[int] | int] | None = None,
    trainer: int | None = None,
    prompts: Sequence[int] = (0, 1, 2, 3),
    group: int = 4,
    stamps: Callable[[int, int], tuple[int, int]] | None = None,
    prompt_length: Callable[[int], int] = lambda prompt: 200,
) -> RolloutBatch:
    """Sample and score one step.

    Args:
        policy: the model.
        step: its number.
        versions: step and row to the version that sampled the row, or one for each of its tokens; the step's own.
        trainer: version that scores; the step's own.
        prompts: one for each group.
        group: rows of a group.
        stamps: step and row to the version stamps; None: none are recorded.
        prompt_length: prompt to its tokens.
    """
    draw = np.random.default_rng((policy.seed, 77, step))
    trained = step if trainer is None else trainer
    sampled, scored, drawn = [], [], []
    length = policy.length
    for row in range(len(prompts) * group):
        prompt = prompts[row // group]
        by = step if versions is None else versions(step, row)
        if isinstance(by, int):
            own = policy.logits(prompt, by)
        else:
            own = np.stack([policy.logits(prompt, version)[t] for t, version in enumerate(by)])
        s = _log_softmax(policy.noisy(own, draw))
        token = (s + draw.gumbel(size=s.shape)).argmax(-1)
        drawn.append(token)
        o = _log_softmax(policy.noisy(policy.logits(prompt, trained), draw))
        sampled.append(np.take_along_axis(s, token[:, None], 1)[:, 0])
        scored.append(np.take_along_axis(o, token[:, None], 1)[:, 0])
    count = len(sampled)
    stamped = [] if stamps is None else [stamps(step, row) for row in range(count)]
    row_columns = {"reward": torch.tensor([float(row % 2) for row in range(count)], dtype=torch.float64)}
    if stamped:
        row_columns["policy_version_min"] = torch.tensor([low for low, _ in stamped])
        row_columns["policy_version_max"] = torch.tensor([high for _, high in stamped])
    return RolloutBatch(
        step=step,
        rows=torch.arange(count + 1) * length,
        groups=Groups.of(torch.arange(count) // group, len(prompts)),
        per_row=row_columns
        | {
            "prompt_ids": torch.tensor([1 + prompts[row // group] for row in range(count)]),
            "prompt_length": torch.tensor([prompt_length(prompts[row // group]) for row in range(count)]),
        },
        per_token={
            "rollout_log_probs": torch.from_numpy(np.concatenate(sampled)).float(),
            "old_log_probs": torch.from_numpy(np.concatenate(scored)).float(),
            "response_ids": torch.from_numpy(np.concatenate(drawn)),
            "response_mask": torch.ones(count * length, dtype=torch.bool),
        },
        group_ids=[f"p{prompt}" for prompt in prompts],
        sample_ids=[f"{step}-{row}" for row in range(count)],
    )


def run_of(policy: Policy, steps: int, **kwargs) -> list[RolloutBatch]:
    """Several steps."""
    return [step_of(policy, step, **kwargs) for step in range(steps)]
