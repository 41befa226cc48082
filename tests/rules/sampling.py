"""Rollouts of a small synthetic language model, with faults planted in the engine that samples them.

Logits are a function of the context (prompt and preceding tokens) and of the policy version, so that siblings with a
common prefix share its logits. Sampler and trainer each add their own numerical noise to them, or round them, and every
log-prob is that of a softmax over the whole vocabulary: nothing is planted in a log-prob that does not follow from
logits, but for what an engine does to finished log-probs (rounding, fills, shifts).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups

ENTROPIES = {
    # How steep logits are: p is proportional to u ** -k with u uniform, and k is drawn log-uniformly by context.
    "varied": (0.6, 12.0),
    "high": (0.5, 1.5),
    "low": (12.0, 60.0),
    "collapsed": (3e4, 1e5),
}


def mix(x):
    """Scramble uint64 numbers (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform(x):
    """Uniform numbers in (0, 1) that follow from uint64 numbers."""
    return ((mix(x) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def as_bfloat16(x):
    """Round to bfloat16, and return as float64."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().double().numpy()


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What the engine does; the defaults are those of a healthy one.

    Attributes:
        temperature: that it samples at.
        top_p: smallest mass that is kept; 1: all.
        top_k: tokens that are kept; 0: all.
        min_p: tokens of at least this share of the largest probability are kept.
        reports: log-probs of the distribution that it samples from ("processed"), or of the model's ("raw").
        stretch: every log-prob is multiplied by it (a wrong unit).
        bfloat16: log-probs are rounded to bfloat16.
        decimals: log-probs are rounded to so many decimal digits; None: not at all.
        late: log-probs are given to the token so many places later (negative: earlier); the ends keep theirs.
        fill: what stands for the log-prob of tokens that have none.
        filled: share of tokens that have none.
        filled_tail: tokens at the end of every row that have none.
        behind: how many versions its weights are behind what it says; may be a function of rows' prompt numbers.
        spoilt: share of contexts for which it has other logits (cached keys and values of other weights).
        rerouted: share of tokens, in bursts, for which it has others in part (other experts of a mixture).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    reports: str = "processed"
    stretch: float = 1.0
    bfloat16: bool = False
    decimals: int | None = None
    late: int = 0
    fill: float = 0.0
    filled: float = 0.0
    filled_tail: int = 0
    behind: "float | Callable[[np.ndarray], np.ndarray]" = 0.0
    spoilt: float = 0.0
    rerouted: float = 0.0


FINISHING = ("stretch", "bfloat16", "decimals", "late", "fill", "filled", "filled_tail")
"""Fields of `Sampler` that say what is done to finished log-probs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """All rows of one step, token values packed, ``[T]``.

    Attributes:
        step: its number.
        rows: ``[N+1]`` offsets.
        prompts: ``[N]`` numbers of the prompts; the rows of one follow each other, and are one group.
        prompt_ids: token ids of each row's prompt.
        response_ids: ``[T]``.
        sampler: ``[T]`` log-probs of the engine, float32 (`rollout_log_probs`).
        trainer: ``[T]`` log-probs before the update, float32 (`old_log_probs`).
        policy: ``[T]`` log-probs at the loss, float32 (`policy_log_probs`).
        entropy: ``[T]`` of the trainer's distribution before the update, float32.
        mask: ``[T]`` tokens that are trained.
        version: ``[N]`` policy version that the engine says.
    """

    step: int
    rows: np.ndarray
    prompts: np.ndarray
    prompt_ids: Sequence[np.ndarray]
    response_ids: np.ndarray
    sampler: np.ndarray
    trainer: np.ndarray
    policy: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    version: np.ndarray
    rewards: np.ndarray = field(repr=False)

    def batch(self, *, without: Sequence[str] = ("policy_log_probs", "entropy", "policy_version_min")) -> RolloutBatch:
        """Return the step as rules see it, without some of its columns."""
        _, index_N = np.unique(self.prompts, return_inverse=True)
        per_token = {
            "response_ids": torch.from_numpy(self.response_ids),
            "rollout_log_probs": torch.from_numpy(self.sampler),
            "old_log_probs": torch.from_numpy(self.trainer),
            "policy_log_probs": torch.from_numpy(self.policy),
            "entropy": torch.from_numpy(self.entropy),
            "response_mask": torch.from_numpy(self.mask),
        }
        per_row = {
            "reward": torch.from_numpy(self.rewards),
            "policy_version_min": torch.from_numpy(self.version),
            "policy_version_max": torch.from_numpy(self.version),
        }
        left_out = {*without, *(["policy_version_max"] if "policy_version_min" in without else [])}
        return RolloutBatch(
            step=self.step,
            rows=torch.from_numpy(self.rows),
            groups=Groups.of(torch.from_numpy(index_N)),
            per_row={name: column for name, column in per_row.items() if name not in left_out},
            per_token={name: column for name, column in per_token.items() if name not in left_out},
            group_ids=[f"p{prompt}" for prompt in np.unique(self.prompts)],
            sample_ids=[f"r{row}" for row in range(len(self.rows) - 1)],
        )

    def table(self) -> pa.Table:
        """Return the step as rows of a run file, with every column."""

        def lists(values, kind):
            return pa.ListArray.from_arrays(pa.array(self.rows, pa.int32()), pa.array(values, kind))

        count = len(self.rows) - 1
        return pa.table(
            {
                "step": pa.array([self.step] * count, pa.int64()),
                "group_id": [f"p{prompt}" for prompt in self.prompts],
                "sample_id": [f"s{self.step}-{row}" for row in range(count)],
                "reward": self.rewards,
                "prompt_ids": pa.array([ids.tolist() for ids in self.prompt_ids], pa.list_(pa.int32())),
                "response_ids": lists(self.response_ids, pa.int32()),
                "response_mask": lists(self.mask.astype(np.uint8), pa.uint8()),
                "rollout_log_probs": lists(self.sampler, pa.float32()),
                "old_log_probs": lists(self.trainer, pa.float32()),
                "policy_log_probs": lists(self.policy, pa.float32()),
                "entropy": lists(self.entropy, pa.float32()),
                "policy_version_min": self.version,
                "policy_version_max": self.version,
            }
        )


def write_run(path, steps, **metadata) -> None:
    """Write steps as one run file."""
    table = pa.concat_tables([step.table() for step in steps])
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, path)


def sample(seed: int = 0, *, sampler: Sampler | None = None, **options: object) -> Rollouts:
    """Sample one step.

    Args:
        seed: of the draws and of the noise; the model is the same for all seeds.
        sampler: what the engine does.
        **options: fields of `Sampler`, instead of `sampler`, and arguments of `_drawn`.
    """
    faults = {each.name: options.pop(each.name) for each in fields(Sampler) if each.name in options}
    engine = replace(sampler or Sampler(), **faults)
    exact = replace(engine, **{name: getattr(Sampler, name) for name in FINISHING})
    given = ((name, each if np.ndim(each) == 0 else tuple(each)) for name, each in sorted(options.items()))
    drawn = _kept_draws(seed, exact, tuple(given))
    draw = np.random.default_rng()
    draw.bit_generator.state = drawn.state
    own_NL = _after(draw, engine, drawn.own_NL, drawn.length_N, drawn.mask_NL)
    inside_NL = np.arange(own_NL.shape[1]) < drawn.length_N[:, None]
    return replace(
        drawn.rollouts,
        sampler=own_NL[inside_NL].astype(np.float32),
        rewards=(draw.random(len(drawn.length_N)) < 0.5).astype(np.float64),
    )


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What was drawn, before anything is done to finished log-probs.

    Attributes:
        rollouts: without the sampler's log-probs and without rewards.
        own_NL: the sampler's log-probs.
        length_N: of the responses.
        mask_NL: tokens that are trained.
        state: of the generator, for the draws that follow.
    """

    rollouts: Rollouts
    own_NL: np.ndarray
    length_N: np.ndarray
    mask_NL: np.ndarray
    state: Mapping[str, object]


@cache
def _kept_draws(seed: int, engine: Sampler, options: tuple[tuple[str, object], ...]) -> _Drawn:
    """Draw each step once: many rules look at the same ones, and many faults are made of finished log-probs."""
    return _drawn(seed, engine, **dict(options))


def _drawn(
    seed: int,
    engine: Sampler,
    *,
    step: int = 0,
    prompts: "int | Sequence[int]" = 16,
    size: int = 8,
    lengths: tuple[int, int] = (16, 48),
    prompt_tokens: tuple[int, int] = (8, 24),
    vocab: int = 128,
    entropy: str = "varied",
    noise: float = 0.02,
    bfloat16_logits: bool = False,
    drift: float = 0.0,
    version: int = 0,
    lag: "int | Sequence[int]" = 0,
    policy_ahead: float = 0.0,
    trainer_temperature: float = 1.0,
    turns: int = 0,
    observed: float = 0.0,
) -> _Drawn:
    """Draw one step.

    Args:
        seed: of the draws and of the noise.
        engine: what the sampler does.
        step: its number.
        prompts: how many, or their numbers: the same number is the same prompt in every step.
        size: responses to each.
        lengths: shortest and longest response.
        prompt_tokens: shortest and longest prompt.
        vocab: size of the vocabulary.
        entropy: key of `ENTROPIES`.
        noise: standard deviation of what each engine adds to every logit.
        bfloat16_logits: both engines round their logits, around 20, to bfloat16.
        drift: how far the logits move from one policy version to the next.
        version: of the trainer.
        lag: how many versions the sampler's weights are older, as it says; one number, or one for each row.
        policy_ahead: how many versions `policy` is newer than `trainer` (several inner iterations).
        trainer_temperature: the trainer divides its logits by it.
        turns: spans of observation tokens, which are masked, in every row.
        observed: what the sampler gives for these; NaN is none.
    """
    draw = np.random.default_rng(seed)
    numbers = np.arange(prompts) if isinstance(prompts, int) else np.asarray(prompts)
    prompt_N = np.repeat(numbers, size)
    count = len(prompt_N)
    length_N = draw.integers(lengths[0], lengths[1] + 1, count)
    prompt_ids = [_prompt_ids(int(prompt), prompt_tokens, vocab) for prompt in prompt_N]
    model = _Model(vocab, ENTROPIES[entropy], drift)
    lag_N = np.broadcast_to(np.asarray(lag), count)
    behind_N = engine.behind(prompt_N) if callable(engine.behind) else np.full(count, engine.behind)
    mask_NL = _turns(draw, length_N, turns)

    longest = int(length_N.max())
    ids_NL = np.zeros((count, longest), np.int32)
    found = {name: np.zeros((count, longest)) for name in ("sampler", "trainer", "policy", "entropy")}
    context_N = mix(prompt_N.astype(np.uint64) + np.uint64(1 << 40))
    burst_N = np.zeros(count, bool)

    def computed(logits, live):
        """What an engine has of the exact logits of some rows."""
        drawn = noise * draw.standard_normal((count, vocab), dtype=np.float32)
        logits = logits + drawn[live]
        return as_bfloat16(logits - logits.max(1, keepdims=True) + 20.0) if bfloat16_logits else logits

    for place in range(longest):
        # Draws are for all rows, and what follows from them is worked out for those that are not at their end.
        live = np.flatnonzero(place < length_N)
        context_n = context_N[live]
        exact = model.at(context_n, version)
        sampled = model.at(context_n, (version - lag_N - behind_N)[live]) if drift else exact
        spoilt_n = uniform(context_n + np.uint64(77)) < engine.spoilt
        if spoilt_n.any():
            sampled = np.where(spoilt_n[:, None], model.at(mix(context_n + np.uint64(5)), version), sampled)
        sampled = computed(sampled, live)
        if engine.rerouted:
            # A burst goes on with probability one half; other experts change logits by parts of their spread.
            burst_N = draw.random(count) < np.where(burst_N, 0.5, engine.rerouted / 2)
            sampled = sampled + (burst_N[:, None] * 0.3 * draw.standard_t(3, (count, vocab)))[live]
        scored = computed(exact, live)
        processed = _kept(_log_softmax(sampled / engine.temperature), engine)
        chosen_n = _chosen(draw.random(count)[live], processed)
        observed_n = ~mask_NL[live, place]
        chosen_n = np.where(observed_n, draw.integers(0, vocab, count)[live], chosen_n)
        every = np.arange(len(live))
        own = processed if engine.reports == "processed" else _log_softmax(sampled)
        logs = _log_softmax(scored / trainer_temperature)
        found["sampler"][live, place] = np.where(observed_n, observed, own[every, chosen_n])
        found["trainer"][live, place] = logs[every, chosen_n]
        found["entropy"][live, place] = -(np.exp(logs) * logs).sum(1)
        newer = logs
        if policy_ahead:
            newer = computed(model.at(context_n, version + policy_ahead), live)
            newer = _log_softmax(newer / trainer_temperature)
        found["policy"][live, place] = newer[every, chosen_n]
        ids_NL[live, place] = chosen_n
        context_N[live] = mix(context_n ^ mix(chosen_n.astype(np.uint64) + np.uint64(1 << 50)))

    inside_NL = np.arange(longest) < length_N[:, None]
    nothing = np.zeros(0)
    rollouts = Rollouts(
        step=step,
        rows=np.concatenate([[0], np.cumsum(length_N)]).astype(np.int64),
        prompts=prompt_N,
        prompt_ids=prompt_ids,
        response_ids=ids_NL[inside_NL],
        sampler=nothing,
        trainer=found["trainer"][inside_NL].astype(np.float32),
        policy=found["policy"][inside_NL].astype(np.float32),
        entropy=found["entropy"][inside_NL].astype(np.float32),
        mask=mask_NL[inside_NL],
        version=(version - lag_N).astype(np.int64),
        rewards=nothing,
    )
    return _Drawn(rollouts, found["sampler"], length_N, mask_NL, draw.bit_generator.state)


def run(steps: int, seed: int = 0, **options: object) -> list[Rollouts]:
    """Sample some steps, each with a version and prompts of its own unless `prompts` gives their numbers.

    They are not to be written to: other runs share them.
    """
    found = []
    for step in range(steps):
        count = options.get("prompts", 16)
        own = {"prompts": range(10_000 * step, 10_000 * step + count)} if isinstance(count, int) else {}
        found.append(sample(1000 * seed + step, **{"step": step, "version": step, **options, **own}))
    return found


@dataclass(frozen=True)
class _Model:
    vocab: int
    steepness: tuple[float, float]
    drift: float

    def at(self, context_N, version) -> np.ndarray:
        """Logits of some contexts, ``[N, V]``."""
        low, high = self.steepness
        steep_N = low * (high / low) ** uniform(context_N + np.uint64(1))
        key_NV = mix(context_N)[:, None] ^ mix(np.arange(self.vocab, dtype=np.uint64) + np.uint64(1 << 32))[None]
        logits = -steep_N[:, None] * np.log(uniform(key_NV))
        version_N = np.broadcast_to(np.asarray(version, dtype=np.float64), len(context_N))
        if self.drift and version_N.any():
            # Nearly normal, and as smooth in the version as small steps of a policy are.
            way = uniform(key_NV + np.uint64(11)) + uniform(key_NV + np.uint64(12)) - 1
            logits = logits + self.drift * 2.45 * version_N[:, None] * way
        return logits


def _prompt_ids(prompt: int, tokens: tuple[int, int], vocab: int) -> np.ndarray:
    length = tokens[0] + int(mix(prompt) % np.uint64(tokens[1] - tokens[0] + 1))
    return (mix(np.arange(length, dtype=np.uint64) + np.uint64(1000 * prompt)) % np.uint64(vocab)).astype(np.int32)


def _turns(draw, length_N, turns) -> np.ndarray:
    longest = int(length_N.max())
    mask_NL = np.ones((len(length_N), longest), bool)
    for row, length in enumerate(length_N):
        for _ in range(turns):
            start = draw.integers(1, max(2, length - 1))
            mask_NL[row, start : start + draw.integers(2, 6)] = False
    return mask_NL


def _log_softmax(logits) -> np.ndarray:
    logits = logits - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _kept(logs, engine: Sampler) -> np.ndarray:
    """Renormalise over the tokens that top-k, top-p and min-p keep, as engines do."""
    if engine.top_p >= 1 and not engine.top_k and not engine.min_p:
        return logs
    ordered = -np.sort(-logs, 1)
    kept = np.ones_like(logs, bool)
    if engine.top_k:
        kept &= logs >= ordered[:, engine.top_k - 1 : engine.top_k]
    if engine.top_p < 1:
        mass = np.exp(ordered).cumsum(1)
        last = np.minimum((mass < engine.top_p).sum(1), logs.shape[1] - 1)
        kept &= logs >= ordered[np.arange(len(logs)), last][:, None]
    if engine.min_p:
        kept &= logs >= ordered[:, :1] + np.log(engine.min_p)
    return _log_softmax(np.where(kept, logs, -np.inf))


def _chosen(share_n, logs) -> np.ndarray:
    """The token of each row at a uniform share of the mass of all."""
    mass = np.exp(logs).cumsum(1)
    at = share_n * mass[:, -1]
    return np.minimum((mass <= at[:, None]).sum(1), logs.shape[1] - 1)


def _after(draw, engine: Sampler, own_NL, length_N, mask_NL) -> np.ndarray:
    """What is done to finished log-probs."""
    own_NL = own_NL * engine.stretch
    places = np.arange(own_NL.shape[1])
    if engine.late:
        source_NL = np.clip(places - engine.late, 0, length_N[:, None] - 1)
        own_NL = np.take_along_axis(own_NL, source_NL, 1)
    own_NL = np.where(draw.random(own_NL.shape) < engine.filled, engine.fill, own_NL)
    own_NL = np.where(places >= (length_N - engine.filled_tail)[:, None], engine.fill, own_NL)
    if engine.bfloat16:
        own_NL = as_bfloat16(own_NL)
    return own_NL if engine.decimals is None else np.round(own_NL, engine.decimals)
