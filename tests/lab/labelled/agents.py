"""Runs of agents: clean look-alikes, and faults in what the trainer's functions get; advantages are those of verl's.

Trajectories are drawn: turns of the policy, tools that answer with a header, a verdict at the end. What is drawn of
them is written as a trainer records it, in one row or several, with advantages by verl's own function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from labelled.real_functions import VERSIONS, Planted
from parity.real_runs import resolved

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.writer import RunWriter

HEADER, END = (90, 91, 92), 2
GROUP, TASKS = 4, 5
FAILS = "tool timed out"

VERL = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "trainer.use_v1": False,
}
PER_ROW = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": False,
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "trainer.use_v1": False,
}
MILES = {"advantage_estimator": "grpo", "n_samples_per_prompt": GROUP}


@dataclass
class Turn:
    """What one author wrote: token ids, and whether they are trained."""

    author: str
    ids: list[int]
    trained: bool = True
    error: str | None = None


@dataclass
class Rollout:
    """A trajectory: a list of turns for each of its rows, and the prompt of each row.

    Attributes:
        step, task, number: which step, task of the step and rollout of the task it is.
        rows: prompt and turns of each row.
        rewards: of each row.
        error: why it failed.
        status: how it ended.
    """

    step: int
    task: int
    number: int
    rows: list[tuple[list[int], list[Turn]]]
    rewards: list[float]
    error: str | None = None
    status: str = "stop"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How rollouts are drawn, and what is made of them.

    Attributes:
        trainer: whose run it is.
        options: of the trainer.
        steps: how many.
        layout: "whole": one row; "turns": a row for each turn; "pieces": a row for each piece of a context.
        calls: step and task to the largest number of calls.
        changes: of a rollout, in their order; each gets a generator of random numbers.
        by_turn: each turn has a reward of its own.
        vote: what a row's advantage is made of: "row", or "trajectory", whose rows count once.
        group: what names the group of a rollout.
        advantages: of rows to those that are recorded, for each step: by row, or by token.
        columns: columns that are left out.
        extra: further columns of the rows of a step.
        seed: of all that is drawn.
    """

    trainer: str = "verl"
    options: Mapping[str, object] = field(default_factory=lambda: VERL)
    steps: int = 8
    layout: str = "whole"
    calls: Callable[[int, int], int] = lambda step, task: 3
    changes: tuple[Callable[[Rollout, np.random.Generator], None], ...] = ()
    by_turn: bool = False
    vote: str = "row"
    group: Callable[[Rollout], str] = lambda rollout: f"{rollout.step}/{rollout.task}"
    advantages: Callable[[int, list[dict[str, Any]]], None] = lambda step, rows: None
    columns: tuple[str, ...] = ()
    extra: Callable[[int, list[dict[str, Any]]], None] = lambda step, rows: None
    seed: int = 0

    def write(self, path: Path) -> None:
        """Draw the run, and write it."""
        config = {name: one.value for name, one in resolved(self.trainer, self.options).settings.items()}
        draw = np.random.default_rng([20261129, self.seed])
        version = {**VERSIONS, "miles": None}.get(self.trainer)
        with RunWriter(path, RunMetadata(self.trainer, version, config)) as writer:
            for step in range(self.steps):
                rows = [row for each in self._rollouts(step, draw) for row in self._rows_of(each, draw)]
                _advantages(rows, self.vote, bool(config.get("algorithm.norm_adv_by_std_in_grpo", True)))
                self.advantages(step, rows)
                self.extra(step, rows)
                names = [name for name in rows[0] if name not in (*self.columns, "tokens_of")]
                writer.write({name: [row[name] for row in rows] for name in names})

    def _rollouts(self, step: int, draw: np.random.Generator) -> Iterator[Rollout]:
        for task in range(TASKS):
            prompt, hard = words(draw, 12), draw.uniform(0.25, 0.75)
            for number in range(GROUP):
                calls = int(draw.integers(1, self.calls(step, task) + 1)) if self.calls(step, task) > 0 else 0
                made = Rollout(step, task, number, [(prompt, conversation(calls, draw))], [float(draw.random() > hard)])
                if self.layout == "turns":
                    made.rows = by_turn(*made.rows[0])
                elif self.layout == "pieces" and calls > 1:
                    made.rows = compacted(*made.rows[0], draw)
                made.rewards = made.rewards * len(made.rows)
                if self.by_turn:
                    made.rewards = [round(float(draw.normal()), 3) for _ in made.rows]
                for change in self.changes:
                    change(made, draw)
                yield made

    def _rows_of(self, rollout: Rollout, draw: np.random.Generator) -> Iterator[dict[str, Any]]:
        name = f"{rollout.step}/{rollout.task}/{rollout.number}"
        for place, ((prompt, turns), reward) in enumerate(zip(rollout.rows, rollout.rewards, strict=True)):
            cuts = np.cumsum([0, *(len(turn.ids) for turn in turns)]).tolist()
            ids = [token for turn in turns for token in turn.ids]
            yield {
                "step": rollout.step,
                "group_id": self.group(rollout),
                "sample_id": f"{name}/{place}",
                "trajectory_id": (rollout.step * TASKS + rollout.task) * GROUP + rollout.number,
                "task_id": f"task {rollout.step}/{rollout.task}",
                "reward": reward,
                "advantage": 0.0,
                "prompt_ids": prompt,
                "response_ids": ids,
                "response_mask": [int(turn.trained and turn.author == "model") for turn in turns for _ in turn.ids],
                "old_log_probs": draw.normal(-1.0, 0.4, len(ids)).clip(-6, -1e-3).astype(np.float32).tolist(),
                "turns": [
                    {"author": turn.author, "start": start, "stop": stop, "error": turn.error}
                    for turn, start, stop in zip(turns, cuts, cuts[1:], strict=False)
                ],
                "status": rollout.status,
                "error": rollout.error,
            }


def words(draw: np.random.Generator, count: int) -> list[int]:
    """So many token ids of text."""
    return draw.integers(100, 30_000, count).tolist()


def said(draw: np.random.Generator) -> Turn:
    """A turn of the policy: some text, and the end of it."""
    return Turn("model", [*words(draw, int(draw.integers(6, 20))), END])


def answer(draw: np.random.Generator) -> Turn:
    """A turn of a tool: its header, and some text."""
    return Turn("tool", [*HEADER, *words(draw, int(draw.integers(4, 12)))])


def conversation(calls: int, draw: np.random.Generator) -> list[Turn]:
    """The policy calls a tool so many times, and says something at last."""
    return [turn for _ in range(calls) for turn in (said(draw), answer(draw))] + [said(draw)]


def by_turn(prompt: list[int], turns: Sequence[Turn]) -> list[tuple[list[int], list[Turn]]]:
    """A row for each turn of the policy; what came before is its prompt."""
    rows, before = [], list(prompt)
    for turn in turns:
        if turn.author == "model":
            rows.append((list(before), [turn]))
        before += turn.ids
    return rows


def compacted(prompt: list[int], turns: list[Turn], draw: np.random.Generator) -> list[tuple[list[int], list[Turn]]]:
    """Two rows: after some turns a summary takes their place."""
    cut = 2 * int(draw.integers(1, len(turns) // 2 + 1))
    return [(prompt, turns[:cut]), ([*prompt[:4], *words(draw, 8)], turns[cut:])]


def _advantages(rows: list[dict[str, Any]], vote: str, divides: bool) -> None:
    """Give rows the advantages of verl's own function, over rows or over one row of each trajectory."""
    import torch
    from verl.trainer.ppo import core_algos

    counted = rows if vote == "row" else list({row["trajectory_id"]: row for row in rows}.values())
    found, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=torch.tensor([[row["reward"]] for row in counted]),
        response_mask=torch.ones(len(counted), 1),
        index=np.array([row["group_id"] for row in counted], dtype=object),
        norm_adv_by_std_in_grpo=divides,
    )
    values = found[:, 0].double().tolist()
    if vote == "row":
        own = values
    else:
        of = {row["trajectory_id"]: value for row, value in zip(counted, values, strict=True)}
        own = [of[row["trajectory_id"]] for row in rows]
    for row, value in zip(rows, own, strict=True):
        row["advantage"] = value


# Faults.


def sometimes(share: float, change: Callable[[Rollout, np.random.Generator], None]):
    """The change, of a share of the rollouts."""
    return lambda rollout, draw: change(rollout, draw) if draw.random() < share else None


def loses_first_turn(rollout: Rollout, draw: np.random.Generator) -> None:
    """The mask begins behind the first turn of the policy."""
    first = next(turn for turn in rollout.rows[0][1] if turn.author == "model")
    first.trained = len(rollout.rows[0][1]) < 2


def forges(rollout: Rollout, draw: np.random.Generator) -> None:
    """The policy writes a tool's turn itself, and goes on."""
    last = rollout.rows[-1][1][-1]
    last.ids[:-1] = [*last.ids[:3], *HEADER, *words(draw, 6), *last.ids[3:-1]]


def scores_failure(rollout: Rollout, draw: np.random.Generator) -> None:
    """A tool fails, and the rollout counts as a wrong one."""
    rollout.rewards, rollout.error, rollout.status = [0.0] * len(rollout.rows), FAILS, "error"


def strips(rollout: Rollout, draw: np.random.Generator) -> None:
    """The first tokens of each turn are left out of the contexts that follow."""
    before, rows = list(rollout.rows[0][0]), []
    for number, (prompt, turns) in enumerate(rollout.rows):
        if number:
            earlier = rollout.rows[number - 1]
            whole = len(earlier[0]) + len(earlier[1][0].ids)
            before = [*before, *earlier[1][0].ids[4:], *prompt[whole:]]
        rows.append((list(before), turns))
    rollout.rows = rows


def of_step(place: str) -> Callable[[list[dict[str, Any]]], None]:
    """Advantages of the next or of the last row of each trajectory, or its tokens as SkyRL copied them."""

    def changed(rows: list[dict[str, Any]]) -> None:
        own: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            own.setdefault(row["trajectory_id"], []).append(row)
        for its in own.values():
            values = [row["advantage"] for row in its]
            taken = [*values[1:], values[-1]] if place == "next" else [values[-1]] * len(its)
            for row, value in zip(its, taken, strict=True):
                row["advantage"] = value
            if place == "tokens":
                # advantages = last_step_advantages[traj_ids]: rows end at the same place, and the mask is the last's.
                reach = len(its[-1]["response_ids"])
                for row in its:
                    length = len(row["response_ids"])
                    row["tokens_of"] = [0.0] * max(0, length - reach) + [values[-1]] * min(length, reach)

    return changed


def in_steps(share: float, steps: int, change: Callable[[list[dict[str, Any]]], None]):
    """The change in the last steps, a share of all."""
    return lambda step, rows: change(rows) if step >= steps - round(share * steps) else None


def as_tokens(step: int, rows: list[dict[str, Any]]) -> None:
    """Advantages, one a token."""
    for row in rows:
        value = row.pop("advantage")
        row["advantages"] = row.get("tokens_of") or [value] * len(row["response_ids"])


def in_updates(rows_each: int, step: int, rows: list[dict[str, Any]]) -> None:
    """Optimizer steps of so many rows."""
    for place, row in enumerate(rows):
        row["optim_step_id"] = place // rows_each


def branches(most: int) -> Callable[[Rollout, np.random.Generator], None]:
    """Rollouts of as many rows as they have calls, some more than others."""

    def change(rollout: Rollout, draw: np.random.Generator) -> None:
        for _ in range(int(draw.integers(0, most))):
            rollout.rows.append(([*rollout.rows[0][0][:4], *words(draw, 8)], [said(draw)]))
            rollout.rewards.append(rollout.rewards[0])

    return change


def by_task(most: int) -> Callable[[Rollout, np.random.Generator], None]:
    """Rollouts of one task give equally many rows, and those of others more."""

    def change(rollout: Rollout, draw: np.random.Generator) -> None:
        for _ in range(rollout.task * most // TASKS):
            rollout.rows.append(([*rollout.rows[0][0][:4], *words(draw, 8)], [said(draw)]))
            rollout.rewards.append(rollout.rewards[0])

    return change


def fails_together(share: float) -> Callable[[Rollout, np.random.Generator], None]:
    """All rollouts of some tasks fail."""
    return lambda rollout, draw: scores_failure(rollout, draw) if _is_chosen(rollout, share) else None


def _is_chosen(rollout: Rollout, share: float) -> bool:
    return ((rollout.step * TASKS + rollout.task) * 7) % 20 < 20 * share


def grouped(share: float) -> Callable[[Rollout], str]:
    """The group of some tasks' rollouts is the rollout's own."""
    return lambda each: f"{each.step}/{each.task}" + (f"/{each.number}" if _is_chosen(each, share) else "")


def more_rows(times: float, rollout: Rollout, draw: np.random.Generator) -> None:
    """Later steps give more rows."""
    for _ in range(round(times * rollout.step / 7)):
        rollout.rows.append(([*rollout.rows[0][0][:4], *words(draw, 8)], [said(draw)]))
        rollout.rewards.append(rollout.rewards[0])


TURNS = Agent(layout="turns", by_turn=True)
Kinds = tuple[str, str, str, Callable[[float], Agent], tuple[float, float, float], bool]


def _another_turn(kind: float) -> Agent:
    place, share = {1: ("next", 0.25), 2: ("last", 0.5), 3: ("tokens", 1.0)}[int(kind)]
    change = in_steps(share, TURNS.steps, of_step(place))
    return replace(TURNS, advantages=change, extra=as_tokens)


KINDS: tuple[Kinds, ...] = (
    ("first turn masked", "RDI019", "share of rollouts",
        lambda s: Agent(changes=(sometimes(s, loses_first_turn),)), (0.2, 0.5, 1.0), False),
    ("forged turn of a tool", "RDI020", "share of rollouts",
        lambda s: Agent(changes=(sometimes(s, forges),)), (0.03, 0.1, 0.4), False),
    ("failed rollouts count as 0", "RDA005", "share of rollouts",
        lambda s: Agent(changes=(sometimes(s, scores_failure),)), (0.05, 0.15, 0.4), False),
    ("groups that failed as a whole", "RDA011", "share of groups",
        lambda s: Agent(changes=(fails_together(s),)), (0.2, 0.5, 0.9), True),
    ("groups keyed by the rollout", "RDA022", "share of groups",
        lambda s: Agent(group=grouped(s)), (0.3, 0.6, 1.0), False),
    ("rows vote in the baseline", "RDA021", "most rows of a rollout, less one",
        lambda s: Agent(changes=(branches(int(s)),)), (2, 4, 8), False),
    ("rows weigh in the loss", "RDA023", "rows of some tasks, less one",
        lambda s: Agent(options=PER_ROW, changes=(by_task(int(s)),)), (2, 5, 10), False),
    ("batches cut by rows", "RDA025", "rows more for each rollout in the last step",
        lambda s: Agent(trainer="miles", options=MILES, vote="trajectory", changes=(partial(more_rows, s),),
            extra=partial(in_updates, 10)), (1, 2, 4), False),
    ("advantage of another turn", "RDA027", "1: of the next, 2 of 8 steps; 2: of the last, 4 steps; 3: its tokens, all",
        _another_turn, (1, 2, 3), False),
    ("no tool is called any more", "RDT020", "share of steps",
        lambda s: Agent(steps=12, calls=lambda step, task: 0 if step >= 12 - 12 * s else 3), (0.25, 0.5, 0.75), False),
    ("all run to the cap on turns", "RDT021", "share of steps",
        lambda s: Agent(steps=12, changes=(partial(to_the_cap, s),)), (0.25, 0.5, 0.75), False),
    ("stripped thinking", "RDI021", "share of rollouts",
        lambda s: replace(TURNS, changes=(sometimes(s, strips),)), (0.1, 0.4, 1.0), True),
)  # fmt: skip


def to_the_cap(share: float, rollout: Rollout, draw: np.random.Generator) -> None:
    """In the last steps every rollout makes six calls."""
    if rollout.step >= 12 - 12 * share:
        rollout.rows = [(rollout.rows[0][0], conversation(6, draw))]


def kinds_of_agents(seed: int = 0) -> Iterator[Planted]:
    """Faults of agents."""
    for name, code, about, made, strengths, information in KINDS:
        makers = {
            strength: replace(made(value), seed=1000 * seed + 3 * number + 100).write
            for number, (strength, value) in enumerate(zip(("weak", "middle", "strong"), strengths, strict=True))
        }
        values = ", ".join(f"{value:g}" for value in strengths)
        yield Planted(f"agents: {name}", (code,), f"{about}: {values}", makers, information)


# Clean runs that look like faults.


def stops_at_header(rollout: Rollout, draw: np.random.Generator) -> None:
    """Generation stops at the tool's header, which ends the policy's turn; the tool's begins with it, too."""
    for turn in rollout.rows[0][1][:-1]:
        if turn.author == "model":
            turn.ids[-1:] = HEADER


def quotes(rollout: Rollout, draw: np.random.Generator) -> None:
    """The policy quotes two tokens of the header."""
    rollout.rows[0][1][0].ids[2:4] = HEADER[:2]


def verdict(rollout: Rollout, draw: np.random.Generator) -> None:
    """The environment has the last word, which is the reward."""
    rollout.rows[0][1].append(Turn("tool", [*HEADER, 80 + int(rollout.rewards[0])]))


def retries_call(rollout: Rollout, draw: np.random.Generator) -> None:
    """Some calls fail, and are made again."""
    turns = rollout.rows[0][1]
    if draw.random() < 0.4 and len(turns) > 2:
        turns[1].error = FAILS
        turns[2:2] = [said(draw), answer(draw)]


def retries_turn(rollout: Rollout, draw: np.random.Generator) -> None:
    """The first turn was sampled twice."""
    if draw.random() < 0.4:
        rollout.rows.insert(0, (list(rollout.rows[0][0]), [said(draw)]))
        rollout.rewards.insert(0, round(float(draw.normal()), 3))


def sub_agent(rollout: Rollout, draw: np.random.Generator) -> None:
    """A sub-agent with a context of its own."""
    rollout.rows.append((words(draw, 9), [said(draw), answer(draw), said(draw)]))
    rollout.rewards.append(rollout.rewards[0])


def last_alone(rollout: Rollout, draw: np.random.Generator) -> None:
    """The last turn alone is trained."""
    for turn in rollout.rows[0][1][:-1]:
        turn.trained = False


def fails_with_reward(rollout: Rollout, draw: np.random.Generator) -> None:
    """A rollout that failed late was scored by what it had done."""
    if draw.random() < 0.2:
        rollout.error, rollout.rewards = FAILS, [0.5]


ONCE = Agent(trainer="miles", options=MILES, vote="trajectory")
CLEAN: Mapping[str, Agent] = {
    "rows of trajectories that count once": replace(ONCE, changes=(branches(4),)),
    "compacted contexts": replace(ONCE, layout="pieces"),
    "sub-agents": replace(ONCE, changes=(sometimes(0.4, sub_agent),)),
    "a turn ends with a stop string": Agent(changes=(stops_at_header,)),
    "the environment's verdict is the reward": Agent(changes=(verdict,)),
    "calls that fail and are made again": Agent(changes=(retries_call,)),
    "turns sampled twice": replace(TURNS, changes=(retries_turn,)),
    "a curriculum of longer tasks": Agent(calls=lambda step, task: 1 + step),
    "a row for each turn, with its own reward": replace(TURNS, extra=as_tokens),
    "the last turn alone is trained": Agent(changes=(last_alone,)),
    "tools that easy tasks do not need": Agent(calls=lambda step, task: 3 * (task % 2)),
    "failed rollouts with a reward": Agent(changes=(fails_with_reward, quotes)),
}
TRUE_OF_ROWS = ("RDA021",)
"""True of rows of one trajectory in verl's trainer before V1: each votes in the baseline of its group."""


def clean_agents(seed: int = 0) -> Iterator[tuple[str, Callable[[Path], None], tuple[str, ...]]]:
    """Two runs of each look-alike, and what is true of it."""
    for number, (name, agent) in enumerate(CLEAN.items()):
        for again in range(2):
            made = replace(agent, seed=1000 * seed + 2 * number + again)
            yield f"{name}, {again + 1}", made.write, TRUE_OF_ROWS if agent.layout == "turns" else ()
