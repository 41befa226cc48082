"""Lines of names and numbers with a counter: loops of one's own, and Megatron's."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rolloutdoctor.importers.logs.bar_form import BAR
from rolloutdoctor.importers.logs.counters import COUNTERS, counted, of_one_counter, through_epochs
from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import (
    FEWEST_NUMBERS,
    Form,
    Printed,
    is_log_line,
    is_update,
    mean_rewards_in,
    name_of,
    pairs,
)
from rolloutdoctor.metric_names.generic import is_held_out, is_metric
from rolloutdoctor.metric_names.table import metric_quantities


class Pairs(Form):
    """Lines of names with numbers and a counter: loops of one's own, Megatron's ``iteration 2/ 624 | loss: ... |``.

    ``training_log`` (megatron/training/training.py) prints the second. A line that is a name and a number alone belongs
    to the step before.
    """

    title = "lines of names and numbers"

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps; what has a counter, and no metric that many of them have, is the text of a response."""
        means: list[Printed] = []
        steps = _whole([*self._steps(_with_means(lines, means))])
        records = of_one_counter([record for record in steps if _logs(record)])
        # A line or two with a counter may be the text of a response.
        records = means if len(records) < min(FEWEST_NUMBERS, len(means)) else records
        times = Counter(name for record in records for name in record.values if is_metric(name))
        most = max(times.values(), default=0)
        often = {name for name, count in times.items() if _OF_MANY * count >= most}
        # Lines of updates may be rarer than the rewards of each step.
        updates = [record for record in records if is_update(record.values)]
        often |= {name for record in updates for name in record.values if len(updates) >= _FEWEST_UPDATES}
        yield from through_epochs([record for record in records if not often.isdisjoint(record.values)])

    def _steps(self, lines: Iterable[str]) -> Iterator["_Step"]:
        """Yield what stands above the first line with a counter, and each of these with what the lines below it add."""
        current = _Step(Printed({}))
        ends_in_bar = False
        for line in lines:
            line = BAR.sub(" ", line) if "%|" in line else line
            line = _AT_STEP.sub(r"\2: \1", line) if " step " in line else line
            if line.startswith(("wandb:", "TrainOutput(")):
                # A summary is of the run.
                continue
            step = counted(line) if "=" in line or ":" in line or "|" in line or " " in line else None
            rows = [(label, value) for label, value in pairs(line) if not _is_counter(label, value, step)]
            if ends_in_bar and "|" in line and not line.rstrip().endswith("|"):
                # The last number of a line that was cut may have lost its end.
                rows = rows[:-1]
            values: dict[str, float | None] = {
                name: value
                for label, text in rows
                if (name := name_of(label)) not in COUNTERS or name == "epoch"
                if (value := number(text)) is not None
            }
            metrics = {name: value for name, value in values.items() if name != "epoch"}
            is_log, is_whole = is_log_line(metrics), len(values) >= FEWEST_NUMBERS - 1 and is_log_line(metrics)
            # A share of an epoch is no step, and with it the line is of one all the same.
            is_of_epoch = (
                step is None and is_whole and any(name_of(label) == "epoch" for label, text in rows if "." in text)
            )
            if is_of_epoch:
                yield current
                current = _Step(Printed(values, counter="epoch"))
            elif step is not None and (is_whole or len(rows) <= 1 or len(values) <= 1):
                yield current
                ends_in_bar = line.rstrip().endswith("|")
                # A step alone, or with one metric, is the head of a block; of a step alone responses speak, too.
                counter = step[2] if is_log else f"{step[2]} alone"
                current = _Step(Printed(values if is_log else {}, step[0], counter=counter, total_steps=step[1]))
            elif step is None and (is_log or _says(metrics)) and current.takes(metrics, len(rows)):
                current.add(metrics)
        yield current


_AT_STEP = re.compile(r"(?i)\b(\w[\w ]{0,60}) (?:at|after) (step [0-9]{1,15})(?=\s{0,3}[:=])")
"""``Eval accuracy at step 10: 0.125``."""


def _says(metrics: Mapping[str, float | None]) -> bool:
    """Tell numbers of an update by names that clocks and options do not have either: ``lr: 1e-6``, ``MeanLen: 150``."""
    return len(metrics) == 1 and bool(_SAID_ALONE & {*metric_quantities(metrics).values()})


_SAID_ALONE = {"response_length", "grad_norm", "learning_rate", "clip_fraction"}


@dataclass
class _Step:
    """A line with a counter, and what the lines below it add.

    Attributes:
        record: what the line says itself.
        added: metrics of the lines below.
        below: how often each name stood there.
    """

    record: Printed
    added: dict[str, float | None] = field(default_factory=dict)
    below: Counter[str] = field(default_factory=Counter)

    def takes(self, metrics: Mapping[str, float | None], numbers: int) -> bool:
        """Tell whether a line below is of the step.

        One of several numbers may be of a response, but for the loss of an update, alone right below its step or with
        two other metrics, and for means: ``average reward score: 0.5 | EMA reward score: 0.4`` of DeepSpeed-Chat. The
        parts of a reward and their total are of an episode of one response.
        """
        above = " ".join((*self.record.values, *self.added))
        of_update = "loss" in " ".join(metrics) and "loss" not in above and (not above or is_update(metrics))
        of_means = any(name.startswith(_MEANS) for name in metrics)
        of_episode = all("reward" in name for name in metrics) and "reward" in metric_quantities(metrics).values()
        return numbers == 1 or of_update or of_means or of_episode

    def add(self, more: Mapping[str, float | None]) -> None:
        """Add a line below.

        What the line of the step says is not said again by that of a response below it, and rewards that lines below it
        say again and again are those of responses.
        """
        values = self.record.values | self.added
        stated = {name for name in (*values, *metric_quantities(values).values()) if not self.below[name]}
        for name, quantity in [(name, metric_quantities(more).get(name)) for name in more]:
            if name in stated or quantity in stated:
                continue
            self.below[name] += 1
            if self.below[name] == 1:
                self.added[name] = more[name]
            elif quantity == "reward":
                self.added.pop(name, None)


def _whole(steps: Sequence[_Step]) -> list[Printed]:
    """Return steps with what stands below each, or above, where a loop prints its rewards before the step of them.

    Then the same names stand above the first step, between all others, and not below the last one.

    Args:
        steps: the first is what stands above all lines with a counter; of some the line itself has no metrics.
    """
    places = [place for place, step in enumerate(steps) if step.record.values]
    counts = Counter(name for place in places[:-1] for name in steps[place].added)
    above = {name for name, count in counts.items() if count >= _MOST_OF * (len(places) - 1)}
    if above and above <= steps[places[0] - 1].added.keys() and not above & steps[places[-1]].added.keys():
        for before, place in reversed([*pairwise([places[0] - 1, *places])]):
            from_above = {name: steps[before].added.pop(name) for name in above & steps[before].added.keys()}
            steps[place].added |= from_above
    return [
        replace(entry, values=entry.values | {name: value for name, value in more.items() if name not in entry.values})
        for entry, more in ((step.record, step.added) for step in steps[1:])
    ]


_MOST_OF = 0.9
"""Share of the steps between which lines stand that are of the next step."""


def _is_counter(label: str, value: str, step: tuple[int, int | None, str] | None) -> bool:
    """Tell the step of a line with a word before it, as ``rollout batch 3``, from its metrics."""
    first, _, last = name_of(label).rpartition("_")
    return step is not None and bool(first) and last in COUNTERS and value == str(step[0])


_MEANS = ("mean_", "avg_", "average_")

_OF_MANY = 10
"""A metric is of the log if it is in a tenth as many steps as the most common one: an evaluation is rarer than that."""

_FEWEST_UPDATES = 3
"""Lines with a loss and two more metrics that are known, which no response has again and again."""


def _logs(record: Printed) -> bool:
    """Tell the numbers of a step: two, or a reward alone, or an accuracy of an evaluation."""
    named = metric_quantities(record.values).items()
    is_alone = any(of == "reward" or (of == "accuracy" and is_held_out(name)) for name, of in named)
    return (is_alone or len(record.values) >= FEWEST_NUMBERS - 1) and is_log_line(record.values)


def _with_means(lines: Iterable[str], means: list[Printed]) -> Iterator[str]:
    """Yield lines, and keep the mean rewards in them, which are of steps though nothing counts them."""
    for line in lines:
        if not line.startswith("wandb:") and (rewards := mean_rewards_in(line)):
            means.append(Printed(rewards))
        yield line
