"""What the local page shows of a run, a step and a group: plain data, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass

from rolloutdoctor.results.vitals import Vital


@dataclass(frozen=True)
class Overview:
    """A run before any of its rows is read.

    Attributes:
        name: of its files, in words.
        paths: the arguments that name it on a command line.
        trainer: title and version of the trainer, in words.
        steps: step, split and number of rows of every batch, in order; none where only metrics are there.
        vitals: what the trainer logged, by quantity.
        fixes: names of the fixes that are about this objective.
        against: the argument that names the run beside it, or None.
    """

    name: str
    paths: tuple[str, ...]
    trainer: str
    steps: tuple[tuple[int, str, int], ...]
    vitals: tuple[Vital, ...]
    fixes: tuple[str, ...]
    against: str | None = None


@dataclass(frozen=True)
class MetricSeries:
    """A metric as logged and as recomputed.

    Attributes:
        metric: its name in the log.
        steps: where both are there.
        logged, recomputed: its values.
        agrees: whether the two are within their rounding radius.
    """

    metric: str
    steps: tuple[int, ...]
    logged: tuple[float, ...]
    recomputed: tuple[float, ...]
    agrees: tuple[bool, ...]


@dataclass(frozen=True)
class StepMetric:
    """A metric of one step; None where it was not logged, or the rows do not determine it."""

    name: str
    logged: float | None
    recomputed: float | None


@dataclass(frozen=True)
class GroupLine:
    """A group of a step, in a line.

    Attributes:
        group_id: its name.
        prompt: the beginning of its prompt, or None without text.
        rows: how many responses.
        tokens: of the responses, trained ones alone where a mask says which.
        rewards: of the rows; None where a row could not be scored.
        spread: standard deviation of the rewards, or None.
        gradient: share of the step's sum of abs(dloss / dlogp), or None.
        change: share of the step's sum that the fix changes, or None without one.
        flags: what is special about it, in words.
    """

    group_id: str
    prompt: str | None
    rows: int
    tokens: int
    rewards: tuple[float | None, ...]
    spread: float | None
    gradient: float | None
    change: float | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class StepPage:
    """A step: its metrics and its groups.

    Attributes:
        step, split: which one.
        fix: the fix that it is compared with, or None.
        problem: why the loss could not be evaluated; empty where it was.
        metrics: as logged and recomputed.
        groups: in the order of the file.
    """

    step: int
    split: str
    fix: str | None
    problem: str
    metrics: tuple[StepMetric, ...]
    groups: tuple[GroupLine, ...]


@dataclass(frozen=True)
class Completion:
    """A response of a group.

    Attributes:
        sample_id: its name.
        status: how it ended, or None.
        reward: of the row, or None.
        rewards: by reward function.
        logged, recomputed, fixed: its advantage as logged, as recomputed, and with the fix: where there is one a row.
        differs: `logged` is farther from `recomputed` than rounding explains; None where one of them is missing.
        text: the response, or None without text.
        length: tokens of the response.
        ids: the first of them; as many as are shown.
        pieces: text of each, or none where the file does not hold it.
        trained: which of them are trained; none without a mask.
        values: name to a value for each of them: gradient, advantage, ratio, KL, sampler gap, entropy, log-prob.
    """

    sample_id: str
    status: str | None
    reward: float | None
    rewards: Mapping[str, float | None]
    logged: float | None
    recomputed: float | None
    fixed: float | None
    differs: bool | None
    text: str | None
    length: int
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    trained: tuple[bool, ...]
    values: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True)
class Turn:
    """A turn of a trajectory: tokens of one author.

    Attributes:
        row: sample_id of the response that it is in.
        turn: its number.
        author: model, tool, user or system.
        start, stop: its tokens, as places in the response; `stop` is not one of them.
        trained: how many of them are trained, or None without a mask.
        gradient: sum of abs(dloss / dlogp) over them, or None.
        share: `gradient` as a share of the step's, or None.
        version: version of the policy that sampled it, or None.
        status, error: how it ended, and what failed in it, or None.
        derived: the file does not say who wrote it: the author follows from the mask.
    """

    row: str
    turn: int
    author: str
    start: int
    stop: int
    trained: int | None
    gradient: float | None
    share: float | None
    version: int | None
    status: str | None
    error: str | None
    derived: bool


@dataclass(frozen=True)
class Trajectory:
    """A rollout of an agent, over all rows that it gave in the step.

    Attributes:
        trajectory_id: its name, or None where a row is a trajectory.
        rows: sample_ids of its rows.
        rewards: the different rewards of its rows.
        statuses: how they ended, each once.
        errors: what failed, each once.
        gradient: sum of abs(dloss / dlogp) over its turns, or None.
        share: `gradient` as a share of the step's, or None.
        count: how many turns it has.
        turns: the first of them, in the order of the rows.
    """

    trajectory_id: str | None
    rows: tuple[str, ...]
    rewards: tuple[float, ...]
    statuses: tuple[str, ...]
    errors: tuple[str, ...]
    gradient: float | None
    share: float | None
    count: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class GroupPage:
    """A group with its responses.

    Attributes:
        step, split, group_id: which one.
        fix: the fix that it is compared with, or None.
        prompt: its text, or None.
        problem: why the loss could not be evaluated; empty where it was.
        completions: in the order of the file.
        trajectories: those of its rows, turn by turn; none where the run has no turns.
    """

    step: int
    split: str
    group_id: str
    fix: str | None
    prompt: str | None
    problem: str
    completions: tuple[Completion, ...]
    trajectories: tuple[Trajectory, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A response of a run and the one with the same step and sample_id of another run.

    Attributes:
        a, b: the two; None where a run has no such row.
        same: whether they are one response, by their token ids or else by their text; None where this cannot be told.
    """

    a: Completion | None
    b: Completion | None
    same: bool | None


@dataclass(frozen=True)
class AgainstPage:
    """A group of a run beside the same rows of another run.

    Attributes:
        step, split, group_id: which one.
        fix: the fix that both are compared with, or None.
        prompts: its text in each run, or None.
        problems: why the loss of each run could not be evaluated; empty where it was.
        pairs: the rows of the group in A, then those that only B has in a group of this name.
    """

    step: int
    split: str
    group_id: str
    fix: str | None
    prompts: tuple[str | None, str | None]
    problems: tuple[str, str]
    pairs: tuple[Pair, ...]
