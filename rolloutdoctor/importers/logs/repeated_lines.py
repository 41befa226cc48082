"""Lines that a loop prints again and again with nothing that counts them: ``loss/total 5.2``, ``reward is 0.9``."""

import re
from collections.abc import Iterable, Iterator

from rolloutdoctor.importers.logs.numbers import REWARD_STD, std_of
from rolloutdoctor.importers.logs.printed import PAIR, Printed, name_of, number, pairs
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities

_FEWEST = 20
"""Lines with a loss: fewer may stand in any text."""

_BETWEEN = re.compile(r"[\s,;|]|\band\b")

_SHORT = 400
"""Characters of a line that a loop prints again and again."""

_TIMES = 4
"""Times as many as the steps that another form finds, which have more in them."""


class RepeatedLines:
    """Lines that are names and numbers alone: one with a loss is a step, and rewards before it are of its responses."""

    title = "lines of names and numbers"
    remarks = ("nothing counts the lines: each with a loss is a step, and the rewards before it are of its responses",)

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps, if lines that a counter numbers are few beside them."""
        steps: list[Printed] = []
        rewards: list[float | None] = []
        numbered = 0
        for line in lines:
            values = _numbers(line) if "{" not in line and _are_pairs_alone(line) else {}
            if any("loss" in name.lower() for name in values):
                steps.append(Printed(values | _of_rewards(rewards)))
                rewards = []
            elif len(values) == 1 and {*metric_quantities(values).values()} == {"reward"}:
                rewards += values.values()
            else:
                numbered += any(map(is_metric, (name_of(label) for label, _ in pairs(line))))
        if len(steps) >= max(_FEWEST, _TIMES * numbered):
            yield from steps


def _are_pairs_alone(line: str) -> bool:
    """Tell a line of names and numbers in which nothing else stands."""
    return len(line) <= _SHORT and PAIR.search(line) is not None and not _BETWEEN.sub("", PAIR.sub(" ", line))


def _numbers(line: str) -> dict[str, float | None]:
    """Return the numbers of a line by name; nothing of one with a name that is of no metric, as a counter's is."""
    named = {name_of(label): number(text) for label, text in pairs(line)}
    return named if all(is_metric(name) for name in named) else {}


def _of_rewards(rewards: list[float | None]) -> dict[str, float | None]:
    """Return the mean and the deviation of the rewards of some responses."""
    known = [value for value in rewards if value is not None]
    std = std_of(known)
    mean: dict[str, float | None] = {"reward": sum(known) / len(known)} if known else {}
    return mean if std is None else mean | {REWARD_STD: std}
