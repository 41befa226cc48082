"""Clean runs of many kinds, small enough that hundreds are checked in minutes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rules.sampling import ENTROPIES, Rollouts, mix, sample

from rolloutdoctor.data.batch import RolloutBatch

END = 300
"""Token id that ends a response; the synthetic model has no such token."""

TURN, SEPARATOR = 301, 302
"""Token ids that end a turn, and follow it in a chat template."""


OPTIONS: Mapping[str, Mapping[str, object]] = {
    "verl": {"algorithm.adv_estimator": "grpo"},
    "trl": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"},
}
"""Options beside a trainer's defaults."""

CORRECTED: Mapping[str, Mapping[str, object]] = {
    "verl": {"algorithm.rollout_correction.rollout_is": "token"},
    "trl": {},
}
"""What weighs by the sampler's log-probs."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a run is like that has no fault.

    Attributes:
        trainer: who made it.
        options: the trainer's, beside its defaults.
        steps: how many.
        prompts: of each step.
        pool: prompts of the data set; it is gone through in a new order in every epoch.
        asynchronous: rows are up to two versions old, and say so.
        ends: responses that end themselves carry a token for it; the longest are cut off.
        difficulty: chance of a right response, by prompt, is drawn between these.
        reward: what a right response gets.
        model: what `rules.sampling.sample` is given.
    """

    trainer: str = "verl"
    options: Mapping[str, object] = field(default_factory=dict)
    steps: int = 5
    prompts: int = 8
    pool: int = 200
    asynchronous: bool = False
    ends: bool = True
    difficulty: tuple[float, float] = (0.2, 0.8)
    reward: float = 1.0
    model: Mapping[str, object] = field(default_factory=dict)


def drawn_world(seed: int) -> World:
    """A kind of clean run: each of what often looks like a fault comes in some of them."""
    draw = np.random.default_rng([seed, 1])
    size = int(draw.choice([2, 4, 8]))
    low = int(draw.integers(12, 30))
    entropy = str(draw.choice([*ENTROPIES, "varied", "varied", "high"]))
    # What a collapsed model thinks of observations is further off than a model's log-probs are.
    # All that it says to a prompt in so many tokens is the same: no group would have a spread of rewards.
    varies = entropy != "collapsed"
    turns = int(draw.choice([0, 0, 1, 2])) if varies else 0
    is_async = bool(draw.random() < 0.3)
    trainer = str(draw.choice(list(OPTIONS)))
    return World(
        trainer=trainer,
        options=OPTIONS[trainer] | (CORRECTED[trainer] if is_async else {}),
        steps=int(draw.integers(4, 9)),
        prompts=64 // size,
        pool=int(draw.choice([2 * 64 // size, 1000])),
        asynchronous=is_async,
        ends=bool(draw.random() < 0.8),
        difficulty=(0.0, 1.0) if draw.random() < 0.5 else (0.3, 0.6),
        reward=float(draw.choice([1.0, 1.0, 100.0])),
        model={
            "size": size,
            "lengths": (32, 32) if draw.random() < 0.15 and varies else (low, low + int(draw.integers(8, 24))),
            "vocab": 48,
            "entropy": entropy,
            "noise": float(np.exp(draw.uniform(np.log(0.002), np.log(0.08)))),
            "bfloat16_logits": bool(draw.random() < 0.3),
            "drift": float(draw.choice([0.0, 0.005, 0.02])),
            "policy_ahead": float(draw.choice([0.0, 0.0, 1.0])),
            "turns": turns,
            "observed": float(draw.choice([0.0, np.nan])),
        },
    )


def schedule(world: World, seed: int) -> Iterator[np.ndarray]:
    """Prompts of each step: epochs in an order of their own, cut as they come."""
    draw, waiting = np.random.default_rng([seed, 2]), np.zeros(0, np.int64)
    for _ in range(world.steps):
        while len(waiting) < world.prompts:
            waiting = np.concatenate([waiting, draw.permutation(world.pool)])
        yield np.sort(waiting[: world.prompts])
        waiting = waiting[world.prompts :]


def sampled(world: World, seed: int, at: Callable[[int], Mapping[str, object]] = lambda step: {}) -> list[RolloutBatch]:
    """Sample a run; `at` gives what else the sampler of a step does."""
    found = []
    for step, prompts in enumerate(schedule(world, seed)):
        draw = np.random.default_rng([seed, 3, step])
        size = world.model.get("size", 8)
        lag = draw.integers(0, min(2, step) + 1, len(prompts) * size) if world.asynchronous else 0
        options = {"prompts": prompts, "version": step, "lag": lag, **world.model, **at(step)}
        found.append(as_batch(world, sample(1000 * seed + step, step=step, **options), draw))
    return found


def as_batch(world: World, one: Rollouts, draw: np.random.Generator) -> RolloutBatch:
    """The step with all that a trainer may record of it."""
    without = [] if world.model.get("policy_ahead") else ["policy_log_probs"]
    batch = one.batch(without=without if world.asynchronous else [*without, "policy_version_min"])
    lengths, count = np.diff(one.rows), len(one.prompts)
    cap = lengths.max()
    # The model has the last word, or it was cut off.
    is_cut = ((lengths == cap) & (lengths.min() < cap)) | ~one.mask[one.rows[1:] - 1]
    ids = one.response_ids.copy()
    if world.ends:
        ids[one.rows[1:][~is_cut] - 1] = END
        _template(ids, one.mask, one.rows)
    chance = world.difficulty[0] + np.diff(world.difficulty)[0] * (mix(one.prompts + 7) >> np.uint64(11)) * 2.0**-53
    responses = zip(one.prompts.tolist(), map(bytes, np.split(ids, one.rows[1:-1])), strict=True)
    first: dict[tuple[int, bytes], int] = {}
    # As a verifier has it: equal responses to one prompt are equally right.
    drawn = draw.random(count)[[first.setdefault(response, row) for row, response in enumerate(responses)]]
    per_row = {
        **batch.per_row,
        "reward": torch.from_numpy(world.reward * (drawn < chance)),
        "prompt_ids": torch.from_numpy(one.prompts.astype(np.int64) + 1),
        "prompt_length": torch.from_numpy(100 + (mix(one.prompts) % np.uint64(200)).astype(np.int64)),
        "micro_batch_id": torch.arange(count) % max(1, count // 8),
        "pack_index": torch.arange(count) // max(1, count // 8),
    }
    return replace(
        batch,
        per_row=per_row,
        per_token={**batch.per_token, "response_ids": torch.from_numpy(ids)},
        statuses=np.where(is_cut, "length", "stop").tolist(),
    )


def _template(ids: np.ndarray, mask: np.ndarray, rows: np.ndarray) -> None:
    """End turns as a chat template does: those of the model at a token, those of the template at it and a separator."""
    is_last = np.zeros(len(mask), bool)
    is_last[rows[1:] - 1] = True
    before, after = mask & ~np.roll(mask, -1) & ~is_last, ~mask & np.roll(mask, -1) & ~is_last
    ids[before] = TURN
    ids[np.flatnonzero(before) + 1] = SEPARATOR
    # A span of four tokens or more ends with both.
    start = np.maximum.accumulate(np.where(before, np.arange(len(mask)) + 1, 0))
    ends = np.flatnonzero(after & (np.arange(len(mask)) - start >= 3))
    ids[ends - 1], ids[ends] = TURN, SEPARATOR


def clean_run(seed: int) -> tuple[World, list[RolloutBatch]]:
    """A clean run of a kind that is drawn."""
    world = drawn_world(seed)
    return world, sampled(world, seed)


def real_runs(
    seeds: Sequence[int],
) -> Iterator[tuple[str, dict[str, object], list[RolloutBatch], list[dict[str, float]]]]:
    """Clean runs whose advantages and metrics the real trainers computed, if they are installed."""
    try:
        from parity.real_faults import SETUPS
        from parity.real_runs import real_run
    except ImportError:
        return
    for seed in seeds:
        setup = list(SETUPS.values())[seed % len(SETUPS)]
        steps = real_run(replace(setup, seed=1000 + seed))
        # The entropies of these rows are drawn, and go with no distribution.
        rows = [
            replace(one, per_token={name: one.column(name) for name in one.per_token if name != "entropy"})
            for one, _ in steps
        ]
        yield setup.trainer, dict(setup.options), rows, [metrics for _, metrics in steps]
