"""The runs in a text, one after another: by what their lines say, and where they begin anew."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isnan

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.notes import RunOfText
from rolloutdoctor.importers.logs.printed import Printed
from rolloutdoctor.metric_names.table import functions, metric_quantities
from rolloutdoctor.metric_names.training_kind import OF_REWARD_MODEL

_OF_POLICY = ("reward", "kl", "clip_ratio", "completions/")
"""How names in a line of a policy update begin; one on responses of an earlier step logs no rewards."""


def runs_in(records: Sequence[Printed]) -> list[RunOfText]:
    """Return the runs of a text, from which line to which; what a resumed run repeats is in it twice."""
    steps = [record.step or 0 for record in records]
    if len({*steps}) >= _FEWEST and steps == sorted(steps, reverse=True):
        # The last line comes first.
        return [RunOfText(0, len(records))]
    runs: list[RunOfText] = []
    start, last = 0, _Last()
    beginnings = _beginnings(records)
    for place, record in enumerate(records):
        if record.split == TRAIN and (last.is_other(record) or (place in beginnings and last.differs(record))):
            runs.append(RunOfText(start, place, last.kind))
            start, last = place, _Last()
        if record.split == TRAIN:
            last.take(record)
    return [*runs, RunOfText(start, len(records), last.kind)] if records else []


_FEWEST = 3
"""Steps that fall from the first line to the last one, and do not begin anew."""

_TOKENS = "num_tokens"
"""What TRL counts from the beginning of a training, where its lines have no step."""

_PPO = "PPO"
"""The task of lines without a loss of their own that TRL's PPO trainer prints."""

_FAR = 3
"""How many times its second step a run has done before the same step is the second one of another run."""


def _beginnings(records: Sequence[Printed]) -> set[int]:
    """Return the records whose step falls and is the interval of the steps from there on: nothing was logged before it.

    A training that was resumed goes on from a multiple of the interval that is not the first one.
    """
    training = [(place, record.step) for place, record in enumerate(records) if record.split == TRAIN]
    steps = [step or 0 for _, step in training]
    return {
        place
        for (place, step), before, after, then in zip(training[1:], steps, steps[2:], steps[3:], strict=False)
        if step is not None and step < before and after - step == then - after == step
    }


class _Last:
    """What is known of the run so far."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.kind = ""
        self.first: dict[str, int] = {}
        self.epochs: list[float] = []
        self.tokens = 0.0
        self.at_first: dict[str, float | None] = {}
        self.place: float | None = None
        self.furthest = 0
        self.second: tuple[int, dict[str, float | None]] | None = None
        self.at: dict[int, dict[str, float | None]] = {}

    def is_other(self, record: Printed) -> bool:
        """Tell whether a line is of another run: other reward functions, another task, or it begins anew."""
        names = frozenset(record.values)
        mine, kind = _functions(names), _kind(names)
        epoch = record.values.get("epoch")
        place = epoch if record.step is None else record.step
        # Lines of one step may be of several parts of it.
        falls = place is not None and self.place is not None and place < self.place
        if self.functions and mine and not mine <= self.functions and not mine >= self.functions:
            return falls or record.step is None
        # No other training has lines of PPO; those of losses may stand between those of rewards.
        if self.kind and kind and kind != self.kind and (falls or (record.step is None and _PPO in (kind, self.kind))):
            return True
        if record.step is None and (record.values.get(_TOKENS) or self.tokens) < self.tokens:
            # A run that was resumed counts them anew as well, and its epochs go on.
            return falls or record.is_after_end
        if record.step is None:
            # Printed with two digits, the first lines of a run may have one epoch.
            return epoch is not None and len(self.epochs) > 1 and epoch <= self.epochs[0] < self.epochs[-1]
        first = self.first.get(record.counter)
        if first is None or len(self.first) > 1:
            return False
        if record.step <= first:
            # Until there is another step lines may be of parts of the first one.
            return (falls or first < self.furthest) and _differ(record.values, self.at_first)
        # Before its first step a run may be evaluated once; what goes on from there is far behind its end.
        second, is_far = self.second or (0, self.at_first), self.furthest > _FAR * record.step
        is_evaluated = not second[1].keys() <= self.at_first.keys()
        return is_evaluated and is_far and record.step <= second[0] and _differ(record.values, second[1])

    def differs(self, record: Printed) -> bool:
        """Tell whether a line has other values than the run so far at its step, which no summary of it has.

        What has a step 0 begins anew at 0.
        """
        return 0 not in self.at and _differ(record.values, self.at.get(record.step or 0, self.at_first))

    def take(self, record: Printed) -> None:
        """Add a line."""
        names = frozenset(record.values)
        self.functions |= _functions(names)
        self.kind = self.kind or _kind(names)
        epoch = record.values.get("epoch")
        self.place = epoch if record.step is None else record.step
        self.epochs += [] if epoch is None else [epoch]
        self.tokens = record.values.get(_TOKENS) or self.tokens
        if record.step is not None:
            self.at.setdefault(record.step, record.values)
            self.furthest = max(self.furthest, record.step)
            first = self.first.setdefault(record.counter, record.step)
            if record.step == first:
                self.at_first |= record.values
            elif self.second is None and record.step > first:
                self.second = record.step, dict(record.values)


def _differ(left: Mapping[str, float | None], right: Mapping[str, float | None]) -> bool:
    shared = ((left[name], right[name]) for name in left.keys() & right.keys())
    return any(mine != other and not (isnan(mine or 0) and isnan(other or 0)) for mine, other in shared)


@lru_cache(maxsize=64)
def _functions(names: frozenset[str]) -> frozenset[str]:
    """The reward functions of a line, none of a single number; most lines have the names of the one before."""
    return frozenset(functions(names)) if len(names) > 1 else frozenset()


@lru_cache(maxsize=64)
def _kind(names: frozenset[str]) -> str:
    """The task of a line of the transformers Trainer; empty where its names do not say."""
    if any(name.startswith("rewards/chosen") for name in names):
        return "preferences"
    if names >= OF_REWARD_MODEL:
        return "reward model"
    if "loss" not in names:
        return _PPO if "objective/rlhf_reward" in names else ""
    is_rewarded = any(name.startswith(_OF_POLICY) for name in names) or "reward" in metric_quantities(names).values()
    return "rewards" if is_rewarded else "losses alone"
