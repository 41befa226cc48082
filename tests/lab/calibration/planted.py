"""Plant one cause into synthetic runs, and compare the share that `why` names with the planted one.

``python tests/lab/calibration/planted.py`` makes 210 runs, some twenty minutes of one core, and prints a table by kind
of cause; every number follows from the seeds. The planted share is the change of the metric with the cause less that
without it, over the same draws.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rolloutdoctor as rd

AT, SIDE, PROMPTS, GROUP, POOL, RANKS = 20, 20, 96, 8, 400, 8
WITHIN = 0.05
"""A named share is right within this share of the planted one."""


@dataclass
class World:
    """Responses of both windows, one line each; rewards are pass rates by prompt, drawn once."""

    draw: np.random.Generator
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)

    @property
    def after(self) -> np.ndarray:
        """Responses of the window after."""
        return self.columns["step"] >= AT

    def some(self, share: float) -> np.ndarray:
        """Responses of the window after, at random."""
        return self.after & (self.draw.random(len(self.after)) < share)

    def of_tokens(self, name: str) -> np.ndarray:
        """Give a value of a response to its tokens."""
        return np.repeat(self.columns[name], self.columns["length"])

    @property
    def place(self) -> np.ndarray:
        """Position of each token."""
        length = self.columns["length"]
        return np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)


def drawn(seed: int, *, tokens: bool) -> World:
    """A run without a cause: prompts recur, and nothing changes from one window to the other but by chance."""
    draw = np.random.default_rng(seed)
    world = World(draw)
    steps = 2 * SIDE if not tokens else 20
    prompts, pool = (PROMPTS, POOL) if not tokens else (48, 96)
    first = AT - steps // 2
    prompt = np.concatenate([draw.permutation(pool)[:prompts] for _ in range(steps)])
    ease = draw.beta(2, 2, pool)
    c = world.columns
    c["step"] = np.repeat(np.arange(first, first + steps), prompts * GROUP)
    c["group"] = np.repeat(np.tile(np.arange(prompts), steps), GROUP)
    c["prompt"], c["ease"] = np.repeat(prompt, GROUP), np.repeat(ease[prompt], GROUP)
    count = len(c["step"])
    c["rank"] = c["group"] * RANKS // prompts
    c["luck"] = draw.random(count)
    c["length"] = draw.integers(4, 13, count) if not tokens else draw.integers(20, 120, count)
    c["format"] = (draw.random(count) < 0.9).astype(float)
    c["status"] = np.full(count, "stop")
    c["lag"] = np.zeros(count, dtype=np.int64)
    c["answer"] = (c["luck"] < c["ease"]).astype(float)
    c["w_format"] = np.full(count, 0.5)
    c["lost"] = np.zeros(count)
    return world


def reward_of(world: World, *, functions: bool) -> np.ndarray:
    """The reward of each response."""
    c = world.columns
    total = c["answer"] + c["w_format"] * c["format"] if functions else c["answer"]
    return np.where(c["lost"] > 0, 0.0, total)


# Each kind edits a run, and names the line, and the part of it, that should have the share.


def new_prompts(world: World) -> tuple[str, str]:
    c, share = world.columns, world.draw.uniform(0.3, 0.7)
    new = (c["prompt"] % 100 < 100 * share) & world.after
    c["prompt"] = np.where(new, c["prompt"] + 1000, c["prompt"])
    c["ease"] = np.where(new, 0.25 * c["ease"], c["ease"])
    c["answer"] = (c["luck"] < c["ease"]).astype(float)
    return "prompts", ""


def weights_of_prompts(world: World) -> tuple[str, str]:
    """Easy prompts are left out of the window after: a curriculum."""
    c, strength = world.columns, world.draw.uniform(0.75, 1.0)
    ease_of = dict(zip(c["prompt"].tolist(), c["ease"].tolist(), strict=True))
    hard = np.array(sorted(ease_of, key=lambda one: ease_of[one])[: len(ease_of) // 3])
    group = c["step"] * 1000 + c["group"]
    swap = {one: world.draw.random() < strength for one in np.unique(group[world.after]).tolist()}
    to = {one: int(world.draw.choice(hard)) for one in swap}
    moved = np.array([swap.get(one, False) for one in group.tolist()])
    c["prompt"] = np.where(moved, np.array([to.get(one, 0) for one in group.tolist()]), c["prompt"])
    c["ease"] = np.array([ease_of[one] for one in c["prompt"].tolist()])
    c["answer"] = (c["luck"] < c["ease"]).astype(float)
    return "prompts", ""


def outage_span(world: World) -> tuple[str, str]:
    c, length = world.columns, int(world.draw.integers(3, 9))
    first = AT + int(world.draw.integers(0, SIDE - length))
    c["lost"] = ((c["step"] >= first) & (c["step"] < first + length)).astype(float)
    return "verifier outage", ""


def outage_rank(world: World) -> tuple[str, str]:
    c, length = world.columns, int(world.draw.integers(12, 19))
    first, rank = AT + int(world.draw.integers(0, SIDE - length)), int(world.draw.integers(RANKS))
    inside = (c["step"] >= first) & (c["step"] < first + length)
    c["lost"] = (inside & ((c["rank"] == rank) | (c["rank"] == (rank + 3) % RANKS))).astype(float)
    return "verifier outage", ""


def truncation(world: World) -> tuple[str, str]:
    c, cut = world.columns, world.some(world.draw.uniform(0.25, 0.7))
    c["status"] = np.where(cut | (world.draw.random(len(cut)) < 0.03), "length", "stop")
    c["answer"] = np.where(c["status"] == "length", 0.0, c["answer"])
    return "truncation", ""


def errors(world: World) -> tuple[str, str]:
    """Rollouts fail and are scored 0, as where a tool is down."""
    c, failed = world.columns, world.some(world.draw.uniform(0.25, 0.7))
    c["status"] = np.where(failed | (world.draw.random(len(failed)) < 0.03), "error", "stop")
    c["answer"] = np.where(c["status"] == "error", 0.0, c["answer"])
    return "errors", ""


def stale(world: World) -> tuple[str, str]:
    c, old = world.columns, world.some(world.draw.uniform(0.3, 0.7))
    c["lag"] = np.where(old, world.draw.integers(2, 6, len(old)), 0)
    c["answer"] = np.where(old & (world.draw.random(len(old)) < 0.6), 0.0, c["answer"])
    return "version lag", ""


def longer(world: World) -> tuple[str, str]:
    """Long responses are right less often, in both windows; after there are more of them."""
    c, count = world.columns, len(world.after)
    long = world.draw.random(count) < np.where(world.after, world.draw.uniform(0.6, 0.9), 0.2)
    c["length"] = np.where(long, 40, c["length"])
    c["answer"] = np.where(long & (world.draw.random(count) < 0.7), 0.0, c["answer"])
    return "response length", ""


def weight_of_function(world: World) -> tuple[str, str]:
    c = world.columns
    c["w_format"] = np.where(world.after, world.draw.choice([0.0, 0.1, 1.0]), 0.5)
    return "weight of format", ""


def function_falls(world: World) -> tuple[str, str]:
    c = world.columns
    c["format"] = np.where(world.some(world.draw.uniform(0.4, 0.8)), 0.0, c["format"])
    return "reward function format", ""


def pass_rate(world: World) -> tuple[str, str]:
    c = world.columns
    c["answer"] = np.where(world.some(world.draw.uniform(0.3, 0.7)), 0.0, c["answer"])
    return "pass rate on equal prompts", ""


def all_wrong(world: World) -> tuple[str, str]:
    c, share = world.columns, world.draw.uniform(0.35, 0.8)
    c["answer"] = np.where(world.after & (c["prompt"] % 100 < 100 * share), 0.0, c["answer"])
    return "pass rate on equal prompts", "all wrong in one window"


def all_right(world: World) -> tuple[str, str]:
    c, share = world.columns, world.draw.uniform(0.35, 0.8)
    c["answer"] = np.where(world.after & (c["prompt"] % 100 < 100 * share), 1.0, c["answer"])
    return "pass rate on equal prompts", "all right in one window"


def length_cap(world: World) -> tuple[str, str]:
    """Responses are cut off at a quarter of their length."""
    c, cut = world.columns, world.some(world.draw.uniform(0.3, 0.7))
    c["status"] = np.where(cut, "length", "stop")
    c["length"] = np.where(cut, np.maximum(1, c["length"] // 4), c["length"])
    return "truncation", ""


def length_grows(world: World) -> tuple[str, str]:
    c = world.columns
    c["length"] = np.where(world.some(0.8), 2 * c["length"], c["length"])
    return "response length on equal prompts", ""


def entropy_late(world: World) -> tuple[str, str]:
    t, late = world.tokens, world.place >= 64
    t["entropy"] = np.where(late & world.of_tokens("is_after"), world.draw.uniform(0.2, 0.7), 1.0) * t["entropy"]
    return "entropy on equal prompts", "64 to 255"


def entropy_unsure(world: World) -> tuple[str, str]:
    t = world.tokens
    unsure = t["policy"] < np.log(0.1)
    t["entropy"] = np.where(unsure & world.of_tokens("is_after"), world.draw.uniform(0.2, 0.7), 1.0) * t["entropy"]
    return "entropy on equal prompts", "0 to 0.1"


def kl_of_losers(world: World) -> tuple[str, str]:
    """Responses of negative advantage move away from the reference."""
    t, c = world.tokens, world.columns
    gap = world.draw.uniform(0.5, 1.0)
    t["ref"] = t["ref"] + np.where(world.of_tokens("is_after") & (world.of_tokens("loser") > 0), gap, 0.0)
    assert c is not None
    return "KL on equal prompts", "negative advantage"


def kl_term(world: World) -> tuple[str, str]:
    """The reference is further away, and the KL term of the loss grows."""
    t = world.tokens
    t["ref"] = t["ref"] + np.where(world.of_tokens("is_after"), world.draw.uniform(0.5, 1.0), 0.0)
    return "KL loss", ""


def clipped_winners(world: World) -> tuple[str, str]:
    t = world.tokens
    some = world.draw.random(len(t["old"])) < world.draw.uniform(0.2, 0.5)
    winner = world.of_tokens("winner") > 0
    t["old"] = np.where(world.of_tokens("is_after") & winner & some, t["policy"] - 0.5, t["old"])
    return "clip fraction on equal prompts", "positive advantage"


def gradient_late(world: World) -> tuple[str, str]:
    """Late tokens have a large ratio where that is not clipped."""
    t, late = world.tokens, world.place >= 64
    loser = world.of_tokens("loser") > 0
    t["old"] = np.where(
        world.of_tokens("is_after") & late & loser, t["policy"] - world.draw.uniform(0.5, 0.9), t["old"]
    )
    return "gradient norm on equal prompts", "64 to 255"


@dataclass(frozen=True)
class Kind:
    """A kind of cause: what it edits, the metric that it changes, and what the run is made of."""

    name: str
    metric: str
    plant: Callable[[World], tuple[str, str]]
    functions: bool = False


KINDS = (
    Kind("new prompts", "reward", new_prompts),
    Kind("mix of the same prompts", "reward", weights_of_prompts),
    Kind("outage, time span", "reward", outage_span),
    Kind("outage, rank", "reward", outage_rank),
    Kind("truncation", "reward", truncation),
    Kind("version lag", "reward", stale),
    Kind("response length", "reward", longer),
    Kind("weight of a reward function", "reward", weight_of_function, functions=True),
    Kind("a reward function falls", "reward", function_falls, functions=True),
    Kind("pass rate", "reward", pass_rate),
    Kind("groups all wrong", "reward", all_wrong),
    Kind("groups all right", "reward", all_right),
    Kind("length cap", "response_length", length_cap),
    Kind("longer responses", "response_length", length_grows),
    Kind("entropy, late positions", "entropy", entropy_late),
    Kind("entropy, improbable tokens", "entropy", entropy_unsure),
    Kind("KL, negative advantage", "kl", kl_of_losers),
    Kind("loss, KL term", "loss", kl_term),
    Kind("clip fraction, positive advantage", "clip_fraction", clipped_winners),
    Kind("gradient norm, late positions", "grad_norm", gradient_late),
    Kind("errors", "reward", errors),
)


def made(kind: Kind, seed: int, path: Path, *, planted: bool) -> tuple[str, str, float]:
    """Write a run with a cause, or the same draws without.

    Returns:
        The line that should name the cause, its part, and the change of reward or length.
    """
    of_tokens = kind.metric not in ("reward", "response_length")
    world = drawn(seed, tokens=of_tokens)
    c, t, draw = world.columns, world.tokens, world.draw
    if kind.plant is longer:
        # The contrast is in both windows, planted or not.
        draw.random(1)
    named = ("", "")
    if not of_tokens and planted:
        named = kind.plant(world)
    if kind.plant is longer and not planted:
        c["length"], c["answer"] = _short_before(seed)
    reward = reward_of(world, functions=kind.functions)
    value = c["length"] if kind.metric == "response_length" else reward
    change = float(value[world.after].mean() - value[~world.after].mean())
    if not of_tokens and not planted:
        return "", "", change
    key = c["step"] * 1000 + c["group"]
    _, of_group = np.unique(key, return_inverse=True)
    mean = np.bincount(of_group, reward) / np.bincount(of_group)
    c["is_after"], c["loser"], c["winner"] = world.after, reward < mean[of_group], reward > mean[of_group]
    count = int(c["length"].sum())
    noise = np.random.default_rng([seed, 7])
    t["policy"] = -noise.exponential(0.8, count)
    t["old"], t["ref"] = t["policy"] + 0.0, t["policy"] - noise.normal(0, 0.1, count)
    t["entropy"] = -t["policy"] * noise.uniform(0.5, 1.5, count)
    if of_tokens and planted:
        named = kind.plant(world)
    _write(path, world, reward, functions=kind.functions, kl=kind.metric in ("kl", "loss"))
    return *named, change


def _short_before(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and answers where the share of long responses stays that of the window before."""
    world = drawn(seed, tokens=False)
    world.draw.random(1)
    c, count = world.columns, len(world.after)
    uniform = world.draw.random(count)
    world.draw.uniform(0.6, 0.9)
    long = uniform < 0.2
    fails = world.draw.random(count) < 0.7
    return np.where(long, 40, c["length"]), np.where(long & fails, 0.0, c["answer"])


def _write(path: Path, world: World, reward: np.ndarray, *, functions: bool, kl: bool) -> None:
    c, t = world.columns, world.tokens
    offsets = np.concatenate([[0], np.cumsum(c["length"])])

    def cells(values: np.ndarray, kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, kind))

    count = len(c["step"])
    columns = {
        "step": pa.array(c["step"]),
        "group_id": pa.array([f"g{group}" for group in c["group"].tolist()]),
        "sample_id": pa.array([f"r{row}" for row in range(count)]),
        "prompt": pa.array([f"question {prompt}" for prompt in c["prompt"].tolist()]),
        "reward": pa.array(reward),
        "status": pa.array(c["status"].tolist()),
        "rank": pa.array(c["rank"]),
        "policy_version_min": pa.array(c["step"] - c["lag"]),
        "policy_version_max": pa.array(c["step"]),
        "response_mask": cells(np.ones(offsets[-1], np.uint8), pa.uint8()),
    }
    if functions:
        named = {"answer": c["answer"], "format": c["format"]}
        columns["rewards"] = pa.StructArray.from_arrays([pa.array(x) for x in named.values()], list(named))
    for name, own in {"policy_log_probs": "policy", "old_log_probs": "old", "ref_log_probs": "ref"}.items():
        columns[name] = cells(t[own].astype(np.float32), pa.float32())
    columns["entropy"] = cells(t["entropy"].astype(np.float32), pa.float32())
    options = {"algorithm.adv_estimator": "grpo", "actor.use_kl_loss": kl, "actor.kl_loss_coef": 0.5 if kl else 0.0}
    said = {"schema_version": 1, "trainer": "verl", "trainer_version": "0.9.1", "config": options}
    import json

    table = pa.table(columns).replace_schema_metadata({"rolloutdoctor": json.dumps(said)})
    pq.write_table(table, path)


@dataclass(frozen=True)
class Named:
    """What was planted, and what was named."""

    planted: float
    found: float
    gap: float
    inside: bool

    @property
    def is_right(self) -> bool:
        """Within the share."""
        return abs(self.found - self.planted) <= WITHIN * abs(self.planted)


def name(kind: Kind, seed: int, folder: Path) -> Named:
    """Plant a cause and ask for it."""
    path, bare = folder / "planted.parquet", folder / "bare.parquet"
    cause, part, _ = made(kind, seed, path, planted=True)
    _, _, other = made(kind, seed, bare, planted=False)
    ledger = rd.why(path, kind.metric, at=AT, device="cpu").ledgers[0]
    if kind.metric not in ("reward", "response_length"):
        other = rd.why(bare, kind.metric, at=AT, device="cpu").ledgers[0].change
    gap = ledger.change - sum(line.share for line in ledger.lines) - ledger.remainder
    planted = ledger.change - other
    prompts = ("new prompts", "prompts no longer drawn", "how often prompts are drawn")
    lines = [one for one in ledger.lines if one.cause == cause or (cause == "prompts" and one.cause in prompts)]
    found = sum(line.share for line in lines)
    if part:
        found = next((by[part] for line in lines for by in line.parts.values() if part in by), 0.0)
    ends = [line.interval for line in lines if line.interval is not None]
    inside = bool(ends) and sum(low for low, _ in ends) <= planted <= sum(high for _, high in ends)
    return Named(planted, found, gap, inside)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="of each kind")
    parser.add_argument("--kind", default="", help="only kinds whose name holds this")
    asked = parser.parse_args()
    right, all_runs, largest = 0, 0, 0.0
    print("| planted cause | metric | runs | share within 5 % | largest error | interval holds it |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for place, kind in enumerate(KINDS):
            if asked.kind not in kind.name:
                continue
            found = [name(kind, 1000 * place + run, Path(folder)) for run in range(asked.runs)]
            good = sum(one.is_right for one in found)
            worst = max(abs(one.found / one.planted - 1) for one in found)
            inside = sum(one.inside for one in found)
            right, all_runs = right + good, all_runs + len(found)
            largest = max(largest, *(abs(one.gap) for one in found))
            print(
                f"| {kind.name} | {kind.metric} | {len(found)} | {good} | {100 * worst:.1f} % | {inside} |", flush=True
            )
    print(
        f"\n{right} of {all_runs} within 5 % ({100 * right / all_runs:.1f} %); lines and remainder miss the change by "
        f"{largest:.1e} at most"
    )


if __name__ == "__main__":
    main()
