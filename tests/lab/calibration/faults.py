"""For each rule the fault that it looks for, planted at several strengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from calibration.clean import END, SEPARATOR, World, sampled
from rules.drift import Policy, step_of
from rules.padded import with_copies

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.testing import toy_batch

Run = list[RolloutBatch]
VERL: Mapping[str, object] = {"algorithm.adv_estimator": "grpo"}
TRL: Mapping[str, object] = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
MEAN_SIZE = (2 / np.pi) ** 0.5
"""Of a standard normal value; also its correlation with its sign, so that of a score of slope 1 with the length that
it adds to noise is this by the root of two."""
PLAIN = World(options=VERL, steps=4, model={"size": 8, "lengths": (16, 40), "vocab": 48, "noise": 0.02})


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        code: of the rule that looks for it.
        words: what its strength is.
        strengths: from weak to severe.
        make: strength and seed to a run.
        warns: only a warning or an error counts; else any finding does.
        trainer: who made the run.
        options: the trainer's.
        planted: strength to the size of the effect in the unit of the rule's bound, where that follows from it.
    """

    code: str
    words: str
    strengths: Sequence[float]
    make: Callable[[float, int], Run]
    warns: bool = True
    trainer: str = "verl"
    options: Mapping[str, object] = field(default_factory=lambda: VERL)
    planted: Callable[[float], float] | None = None


def _sampler(name: str, **model: object) -> Callable[[float, int], Run]:
    """A field of the sampler."""
    return lambda strength, seed: sampled(replace(PLAIN, model={**PLAIN.model, **model, name: strength}), seed)


def _edited(edit: Callable[[RolloutBatch, float, np.random.Generator], RolloutBatch], **model: object):
    """A change of clean steps."""

    def make(strength: float, seed: int) -> Run:
        batches = sampled(replace(PLAIN, model={**PLAIN.model, **model}), seed)
        return [edit(batch, strength, np.random.default_rng([seed, 9, batch.step])) for batch in batches]

    return make


def _tokens(batch: RolloutBatch, **columns: np.ndarray) -> RolloutBatch:
    changed = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
    return replace(batch, per_token={**batch.per_token, **changed})


def _column(batch: RolloutBatch, name: str) -> np.ndarray:
    return batch.column(name).numpy().copy()


def _stopped_sync(rate: float, seed: int) -> Run:
    world = replace(PLAIN, steps=8, pool=1000, model={**PLAIN.model, "drift": rate})
    return sampled(world, seed, lambda step: {"behind": max(0, step - 3)})


def _lost_sync(rate: float, seed: int) -> Run:
    policy = Policy(rate=rate, length=4, vocabulary=6, seed=seed)
    return [step_of(policy, step, prompts=range(8), versions=lambda step, row: 0) for step in range(12)]


def _cache(rate: float, seed: int) -> Run:
    policy, first, found = Policy(rate=rate, length=16, vocabulary=12, seed=seed), dict[int, int](), []
    for step in range(24):
        prompts = np.random.default_rng([seed, step]).choice(40, 6, replace=False).tolist()
        for prompt in prompts:
            first.setdefault(prompt, step)
        found.append(
            step_of(policy, step, prompts=prompts, versions=lambda step, row, its=prompts: first[its[row // 4]])
        )
    return found


def _late_rows(batch: RolloutBatch, share: float, draw: np.random.Generator) -> RolloutBatch:
    """The log-probs of some rows are those of the token before."""
    own, rows = _column(batch, "rollout_log_probs"), batch.rows.numpy()
    for row in np.flatnonzero(draw.random(len(batch)) < share):
        start, stop = rows[row : row + 2]
        own[start + 1 : stop] = own[start : stop - 1].copy()
    return _tokens(batch, rollout_log_probs=own)


def _observed(batch: RolloutBatch, share: float, draw: np.random.Generator) -> RolloutBatch:
    """Some rows hold five tokens of a tool, which are trained."""
    own, rows = _column(batch, "rollout_log_probs"), batch.rows.numpy()
    for row in np.flatnonzero(draw.random(len(batch)) < share):
        own[rows[row] + 4 : rows[row] + 9] = np.nan
    return _tokens(batch, rollout_log_probs=own)


def _masked_ends(batch: RolloutBatch, share: float, draw: np.random.Generator) -> RolloutBatch:
    mask, ends = _column(batch, "response_mask"), batch.rows.numpy()[1:] - 1
    mask[ends[(draw.random(len(batch)) < share) & (_column(batch, "response_ids")[ends] == END)]] = False
    return _tokens(batch, response_mask=mask)


def _copies(batch: RolloutBatch, share: float, draw: np.random.Generator) -> RolloutBatch:
    """Some rows are what the row before them in their group is, where that is no longer."""
    rows = batch.rows.numpy()
    columns = {name: _column(batch, name) for name in ("response_ids", "rollout_log_probs", "old_log_probs", "entropy")}
    columns = {name: column for name, column in columns.items() if batch.has(name)}
    for row in np.flatnonzero(draw.random(len(batch)) < share):
        if row % 8:
            before, own = slice(rows[row - 1], rows[row]), slice(rows[row], rows[row + 1])
            for column in columns.values():
                column[own] = column[before]
    return _tokens(batch, **columns)


def _filled(batch: RolloutBatch, count: float, draw: np.random.Generator) -> RolloutBatch:
    """The step is filled up with copies of some rows."""
    return with_copies(batch, draw.choice(len(batch), int(count), replace=False).tolist())


def _turns(apart: float, seed: int) -> Run:
    draw, found = np.random.default_rng(seed), []
    mask = np.r_[np.ones(20), np.zeros(4), np.ones(20)].astype(int).tolist()
    for step in range(4):
        own = -draw.gamma(0.5, 1.5, (16, 44))
        noise = 0.01 * draw.normal(size=own.shape) * -np.expm1(own)
        noise[:, 24:28] += apart * draw.normal(size=(16, 4))
        found.append(
            # Reflected: no log-prob is above 0.
            toy_batch(
                [[1, 0] * 8], mask=[mask] * 16, policy=(-abs(own + noise)).tolist(), rollout=own.tolist(), step=step
            )
        )
    return found


def _hidden(count: float, seed: int) -> Run:
    """Responses that were cut off and count as stopped."""
    draw, cap = np.random.default_rng(seed), 60
    finished = [[*[5] * int(length), END] for length in draw.integers(10, cap - 8, 320)]
    ids = [*finished, *[[5] * cap for _ in range(int(count))]]
    rewards = [[float(place % 2) for place in range(len(ids))]]
    rows = toy_batch(rewards, lengths=[len(row) for row in ids], per_token={"response_ids": ids})
    return [replace(rows, statuses=["stop"] * len(rows))]


def _cut_off(batch: RolloutBatch, share: float, draw: np.random.Generator) -> RolloutBatch:
    is_cut = draw.random(len(batch)) < share
    return replace(batch, statuses=np.where(is_cut, "length", "stop").tolist())


def _all_cut(share: float, seed: int) -> Run:
    batches = sampled(replace(PLAIN, steps=6, model={**PLAIN.model, "lengths": (20, 20)}), seed)
    draw = np.random.default_rng([seed, 4])
    return [_cut_off(batch, share, draw) for batch in batches]


def _resumed(steps: float, seed: int) -> Run:
    """The first steps recur after the sixth, and new ones follow."""
    order = [*range(6), *range(int(steps)), *range(6, 12 - int(steps))]
    draw = np.random.default_rng(seed)
    shift = int(draw.integers(0, 1000))
    return [
        toy_batch(
            [[1, 0]] * 4, per_row={"prompt_ids": [100 * shift + 8 * one + row // 2 + 1 for row in range(8)]}, step=at
        )
        for at, one in enumerate(order)
    ]


def _long_sequences(noise: float, seed: int) -> Run:
    draw, found = np.random.default_rng(seed), []
    for step in range(3):
        lengths = np.exp(draw.uniform(np.log(20), np.log(1500), 64)).astype(int)
        own = [-draw.gamma(0.5, 1.0, length) for length in lengths]
        other = [s + noise * draw.normal(size=len(s)) * -np.expm1(s) for s in own]
        rewards = [[1, 0] * 4] * 8
        found.append(
            toy_batch(
                rewards,
                lengths=lengths.tolist(),
                policy=[each.tolist() for each in other],
                rollout=[each.tolist() for each in own],
                step=step,
            )
        )
    return found


def _padding(shift: float, seed: int) -> Run:
    """The gap grows by a share of the noise for each hundred tokens of left padding."""
    found = []
    for step in range(4):
        draw = np.random.default_rng([seed, step])
        prompt, response, micro = draw.integers(50, 600, 48), draw.integers(20, 120, 48), np.arange(48) // 8
        padding = np.array([prompt[micro == each].max() for each in micro]) - prompt
        own = [-draw.uniform(0.2, 3, count) for count in response]
        other = [
            s + 0.01 * (1 + shift * pad / 100) * draw.normal(size=len(s)) for s, pad in zip(own, padding, strict=True)
        ]
        batch = toy_batch(
            [[1.0, 0.0]] * 24,
            lengths=response.tolist(),
            policy=[each.tolist() for each in other],
            rollout=[each.tolist() for each in own],
            per_row={"micro_batch_id": micro.tolist(), "prompt_length": prompt.tolist()},
            step=step,
        )
        found.append(replace(batch, per_row={**batch.per_row, "prompt_ids": torch.arange(1, 49)}))
    return found


def _first_ratio(factor: float) -> float:
    """How many times further apart the first 16 tokens of rows behind the first of their pack are, in the mean."""
    return 1 + (factor - 1) * float(np.exp(-np.arange(16) / 32).mean())


def _packed(factor: float, seed: int) -> Run:
    """The first tokens of rows behind the first of their pack are so many times further apart."""
    found = []
    for step in range(4):
        draw = np.random.default_rng([seed, step])
        own = [-draw.gamma(1.0, 1.0, count) for count in draw.integers(40, 100, 48)]
        place = np.arange(48) % 4
        apart = [
            0.02 * draw.normal(size=len(s)) * (1 + (factor - 1) * (at > 0) * np.exp(-np.arange(len(s)) / 32))
            for s, at in zip(own, place, strict=True)
        ]
        found.append(
            toy_batch(
                [[1.0, 0.0]] * 24,
                lengths=[len(s) for s in own],
                policy=[np.minimum(s + a, 0).tolist() for s, a in zip(own, apart, strict=True)],
                rollout=[each.tolist() for each in own],
                per_row={"micro_batch_id": (np.arange(48) // 4).tolist(), "pack_index": place.tolist()},
                step=step,
            )
        )
    return found


def _corrupted(gap: float, seed: int) -> Run:
    """From the first sync on the sampler's logits have noise of their own, the same in each step."""
    policy, broken = Policy(rate=0.02, seed=seed), Policy(rate=0.02, noise=gap, seed=seed)
    return [step_of(policy if step == 0 else broken, step, stamps=lambda at, row: (at, at)) for step in range(8)]


def _lost_updates(share: float, seed: int) -> Run:
    """So many of the updates reach no weight; the kernels give the same numbers for the same context."""
    policy, version, found = Policy(rate=0.01, noise=0.0, length=4, vocabulary=6, seed=seed), 0, []
    draw = np.random.default_rng([seed, 5])
    for step in range(8):
        one = step_of(policy, version, prompts=range(8))
        found.append(_tokens(replace(one, step=step), rollout_log_probs=_column(one, "rollout_log_probs") - 0.001))
        version += int(draw.random() >= share)
    return found


def _bare_turns(batch: RolloutBatch, share: float, draw: np.random.Generator) -> RolloutBatch:
    """Behind some turns of the model there is another token than the separator."""
    ids, mask = _column(batch, "response_ids"), _column(batch, "response_mask")
    first = np.flatnonzero((ids[1:] == SEPARATOR) & mask[:-1] & ~mask[1:]) + 1
    ids[first[draw.random(len(first)) < share]] = 5
    return _tokens(batch, response_ids=ids)


def _wrong_stamps(steps: float, seed: int) -> Run:
    """The version counter starts over when so many steps are left."""
    return [
        toy_batch(
            [[1, 0]] * 4,
            per_row=dict.fromkeys(("policy_version_min", "policy_version_max"), [step % (20 - int(steps))] * 8),
            step=step,
        )
        for step in range(20)
    ]


def _rewards(of_group: Callable[[np.random.Generator, float], np.ndarray]) -> Callable[[float, int], Run]:
    def make(strength: float, seed: int) -> Run:
        draw = np.random.default_rng(seed)
        return [
            toy_batch([of_group(draw, strength).tolist() for _ in range(16)], lengths=8, rollout=-1.0, step=step)
            for step in range(4)
        ]

    return make


def _dead(draw: np.random.Generator, share: float) -> np.ndarray:
    return np.zeros(8) if draw.random() < share else draw.permutation([1.0, 0, 1, 0, 1, 0, 1, 0])


def _rare(draw: np.random.Generator, rate: float) -> np.ndarray:
    return (draw.random(8) < 1 - rate).astype(float)


def _lengthy(strength: float, seed: int) -> Run:
    """The reward goes with the length."""
    draw, found = np.random.default_rng(seed), []
    for step in range(4):
        length = draw.integers(8, 64, 64)
        score = strength * (length - 36) / 16 + draw.normal(size=64)
        found.append(
            toy_batch(
                (score > 0).astype(float).reshape(8, 8).tolist(), lengths=length.tolist(), rollout=-1.0, step=step
            )
        )
    return found


def _noisy_verifier(strength: float, seed: int) -> Run:
    """Few short answers to each prompt, and rewards of which a share is drawn anew."""
    draw, found = np.random.default_rng(seed), []
    for step in range(4):
        answer = draw.integers(0, 4, 64)
        right = (answer % 2).astype(float)
        reward = np.where(draw.random(64) < strength, draw.permutation(right), right)
        ids = [[100 + int(one)] * 6 for one in answer]
        found.append(toy_batch(reward.reshape(8, 8).tolist(), lengths=6, per_token={"response_ids": ids}, step=step))
    return found


def _loops(strength: float, seed: int) -> Run:
    """Responses that say the same 20 tokens for two thirds of their length, from none to a share of the last step."""
    draw, found = np.random.default_rng(seed), []
    for step in range(4):
        ids = draw.integers(0, 1000, (64, 240))
        loops = np.flatnonzero(draw.random(64) < strength * step / 3)
        ids[loops, 80:] = np.tile(ids[loops, 80:100], 8)
        reward = draw.integers(0, 2, (8, 8)).astype(float).tolist()
        found.append(toy_batch(reward, lengths=240, per_token={"response_ids": ids.tolist()}, step=step))
    return found


CASES = (
    Case("RDO001", "share of contexts with different logits", (0.002, 0.005, 0.01, 0.03, 0.1), _sampler("spoilt")),
    Case("RDO002", "logit change per version, syncs stopped", (0.01, 0.03, 0.1, 0.2, 0.4), _stopped_sync),
    Case("RDO003", "temperature of the sampler", (0.98, 0.95, 0.9, 0.8, 0.6), _sampler("temperature")),
    Case("RDO004", "top-p of the sampler", (0.995, 0.98, 0.95, 0.9, 0.8), _sampler("top_p"), warns=False),
    Case(
        "RDO005", "decimal digits", (6, 5, 4, 3, 2, 1), lambda s, seed: _sampler("decimals")(int(s), seed), warns=False
    ),
    Case("RDO007", "noise per token, nats", (0.002, 0.01, 0.03, 0.06, 0.12), _long_sequences, True, "trl", TRL),
    Case("RDO008", "share of rerouted tokens", (0.005, 0.02, 0.05, 0.1, 0.2), _sampler("rerouted"), warns=False),
    Case("RDO009", "logit change per version, cache kept", (0.005, 0.01, 0.02, 0.05, 0.1), _cache),
    Case("RDO010", "logit change per version, no sync", (0.002, 0.01, 0.02, 0.05, 0.1), _lost_sync),
    Case(
        "RDO011",
        "gap per 100 tokens of padding, as a share of the noise",
        (0.05, 0.1, 0.25, 0.5, 1.0),
        _padding,
        planted=lambda shift: shift * 0.01 * MEAN_SIZE,
    ),
    Case("RDO013", "gap factor after the first row of a pack", (1.5, 2, 4, 8, 16), _packed, planted=_first_ratio),
    Case("RDO014", "logit noise after the first sync", (0.02, 0.05, 0.1, 0.3, 1.0), _corrupted),
    Case("RDG015", "share of lost updates", (0.3, 0.6, 0.8, 1.0), _lost_updates),
    Case("RDI005", "share of tokens filled with 0", (0.0003, 0.001, 0.003, 0.01, 0.05), _sampler("filled")),
    Case("RDI006", "share of rows with trained tool tokens", (0.003, 0.01, 0.03, 0.1, 0.3), _edited(_observed)),
    Case("RDI007", "share of masked end tokens", (0.02, 0.05, 0.1, 0.2, 0.5), _edited(_masked_ends)),
    Case("RDI008", "share of rows shifted by one token", (0.5, 0.8, 0.9, 0.95, 1.0), _edited(_late_rows)),
    Case("RDI009", "share of copied rows", (0.003, 0.01, 0.03, 0.1, 0.3), _edited(_copies, lengths=(24, 24))),
    Case("RDI010", "gap at the start of turns, nats", (0.01, 0.03, 0.1, 0.3, 1.0), _turns),
    Case("RDI011", "truncated rows with status stop", (2, 4, 6, 10, 30), _hidden),
    Case("RDI012", "share of truncated responses", (0.5, 0.9, 0.95, 0.99, 1.0), _all_cut),
    Case("RDI013", "repeated steps", (1, 2, 3, 4, 5), _resumed),
    Case("RDI015", "padding rows per step", (1, 2, 4, 8, 16), _edited(_filled)),
    Case("RDI016", "share of turns without the separator", (0.01, 0.03, 0.1, 0.3, 1.0), _edited(_bare_turns, turns=2)),
    Case("RDI017", "steps after the version counter restarted", (1, 2, 3, 5, 9), _wrong_stamps),
    Case("RDA011", "share of zero-variance groups", (0.01, 0.03, 0.1, 0.3), _rewards(_dead), warns=False),
    Case("RDA012", "share of wrong responses", (0.5, 0.4, 0.3, 0.15), _rewards(_rare), warns=False),
    Case(
        "RDA013",
        "correlation of score and length (slope)",
        (0.1, 0.3, 0.6, 1.0),
        _lengthy,
        warns=False,
        planted=lambda slope: MEAN_SIZE * slope / (1 + slope**2) ** 0.5,
    ),
    Case("RDA015", "share of resampled rewards", (0.01, 0.1, 0.3, 0.5, 0.7), _noisy_verifier),
    Case("RDA019", "correlation of score and length (slope)", (0.1, 0.3, 0.6, 1.0), _lengthy, warns=False),
    Case(
        "RDT011",
        "share of looping responses, last step",
        (0.01, 0.05, 0.1, 0.2, 0.5),
        _loops,
        planted=lambda share: share / 2,
    ),
)
