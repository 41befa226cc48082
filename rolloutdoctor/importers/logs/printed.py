"""Numbers in a line of text: a dict of Python or JSON, whole or cut, and names with a number behind them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.numbers import REWARD_STD, number, of_rewards
from rolloutdoctor.metric_names.generic import is_metric, snake
from rolloutdoctor.metric_names.table import metric_quantities

NUMBER = r"[-+]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?|\.[0-9]{1,20}|nan|inf|NaN|Infinity)"

NULL = "None|null"
"""A metric without a value: TRL logs None where every value that it would average is NaN."""

LONGEST_LINE = 2**16
"""Characters of a line of names and numbers."""

FEWEST_NUMBERS = 3
"""Numbers of a line: two may stand in any text."""

# A text that has no end is one to the end of the line: to look for its end again behind each quote takes the square.
_TOKENS = re.compile(
    r"""('(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)"""
    rf"""(?:\s?:\s*(?:(?:np|numpy)\.\w{{1,20}}\(|tensor\()?['"]?({NUMBER}(?:/[0-9]{{1,18}})?|{NULL})"""
    # A tensor prints where it is, and what made it.
    r"""(?:(?:,\s\w{1,20}=[^(){},]{1,60}){1,4}\))?['")\s]*(?=[,}]))?|([\[{(])|[\]})]"""
)
PAIR = re.compile(
    # What stands behind ``=`` is a value: ``stage=base reward=0.5``.
    r"(?<![\w./@=-])([A-Za-z_][\w./@()-]{0,100}+(?: [A-Za-z_(][\w./@()-]{0,40}+){0,4}?)"
    # Megatron counts "number of nan iterations".
    rf"(?: {{0,40}}(?:[:=]|->|=>|→|\.{{3,60}}(?= ))[ \t]{{0,40}}|[ \t]{{1,40}}(?!(?i:nan|inf) [a-z]{{1,40}}+ ?:))"
    rf"({NUMBER})(?:/ ?([0-9]{{1,18}}))?%?(?=$|[\s,;|)\]}}±]|[a-z]{{1,2}}\b| -|\+/?-)"
)
_REWARDS = re.compile(r"(?<![\w./-])((?i:rewards?|scores))\s?[:=]\s?(?:tensor\()?\[([-+0-9., eEnaif'\"]{1,4000})\]")
"""The rewards of the responses of a step, as a list."""

_ENCLOSED = re.compile(rf"([:=] ?)\(({NUMBER})\)")
"""A number in brackets of its own: ``mean_reward: (-0.28)``."""

_DICT_BEHIND = re.compile(r"[0-9}][,;|]?\s{1,4}(?:[|,-]\s{0,4})?[A-Za-z_][\w/ .-]{0,60}[:=]\s?\{(?=['\"])")
"""A dict in a line of names and numbers: ``loss: 0.5, rewards: {'total': 3}``."""


@dataclass(frozen=True)
class Printed:
    """The numbers of one line: a step where the line has one, and what the line says it is.

    Attributes:
        values: by name.
        step: None if the line has none.
        split: that they are of.
        counter: whose number the step is, where a program counts several things.
        total_steps: steps that the run was planned for, where the line says so.
        texts: what stands in place of a number, by name.
        is_after_end: whether a training has ended on a line before it, and no other line of numbers is between.
    """

    values: dict[str, float | None]
    step: int | None = None
    split: str = TRAIN
    counter: str = ""
    total_steps: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    is_after_end: bool = False


class Form(ABC):
    """One way in which programs print numbers. The docstring names the upstream function.

    Attributes:
        title: what a text of this form is, in words.
        remarks: what the user should know of its numbers, in sentences.
    """

    title: str
    remarks: tuple[str, ...] = ()

    @abstractmethod
    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the lines with numbers, in their order."""


def dict_in(text: str) -> dict[str, str] | None:
    """Return the numbers of the dict that a text begins with, as they are written; None if it has none.

    What is nested in it is left out, and so is what was cut off.
    """
    row: dict[str, str] = {}
    depth = 0
    for match in _TOKENS.finditer(text):
        name, value, opened = match.groups()
        if name is None:
            depth += 1 if opened else -1
            if depth <= 0:
                break
        elif value is not None and depth == 1:
            row[name[1:-1]] = value
    return row or None


def values_of(row: dict[str, str]) -> dict[str, float | None]:
    """Return those values that are one number."""
    return {name: value for name, text in row.items() if (value := number(text)) is not None}


def nulls_of(row: dict[str, str]) -> dict[str, float | None]:
    """Return the names that a dict has with no value, as ``'kl': None``."""
    return {name: None for name, text in row.items() if text in NULL.split("|")}


@lru_cache(maxsize=64)
def pairs(line: str) -> tuple[tuple[str, str], ...]:
    """Return the names and numbers of a line such as ``loss=0.5 | grad norm: 1.5``, and of a dict behind them.

    >>> pairs("loss: 0.5, norm: 1.5, rewards: {'total': 3, 'format': 2}")
    (('loss', '0.5'), ('norm', '1.5'), ('total', '3'), ('format', '2'))
    >>> pairs("clipped: 12.5%, rewards=4.27s")
    (('clipped', '12.5%'),)
    >>> pairs("mean_reward: (-0.28) -- kl=(0.1, 0.2)")
    (('mean_reward', '-0.28'),)
    >>> pairs("Reward: 0.5 (std 0.1) | kl=0.2 (std: 0.3)")
    (('Reward', '0.5'), ('Reward std', '0.1'), ('kl', '0.2'), ('kl std', '0.3'))
    """
    return tuple(_pairs(line)) if len(line) <= LONGEST_LINE else ()


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    line, last = _ENCLOSED.sub(r"\1\2", line) if "(" in line else line, ""
    for match in PAIR.finditer(line):
        # ``rewards=4.27s`` is the time that they took.
        if not (line.startswith(("s", "ms"), match.end()) and is_metric(name_of(match[1]))):
            is_of_last = last and match[1] == "std" and line.endswith("(", 0, match.start())
            last = f"{last} std" if is_of_last else match[1].strip()
            yield last, f"{match[2]}%" if match[0].endswith("%") else match[2]
    for behind in _DICT_BEHIND.finditer(line) if "{" in line else ():
        yield from (dict_in(line[behind.end() - 1 :]) or {}).items()
    for label, inner in _REWARDS.findall(line) if "[" in line else ():
        rewards = [number(part.strip(" '\"")) for part in inner.split(",")]
        values = of_rewards(label, [] if None in rewards else rewards)
        yield from ((name, repr(value)) for name, value in values.items() if REWARD_STD in values)


_LEVEL = re.compile(r"^\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\]?[\s:]+")
"""What a logger puts before its line."""

_IN_WORDS = re.compile(r"^and\s|\sis$")
"""What is no part of a name in ``the kl is 0.5 and the loss is 0.1``."""


@lru_cache(2**14)
def name_of(label: str) -> str:
    """Return the name of a metric by its words; what is a name already stays.

    >>> name_of("Grad Norm"), name_of("rewards/Format/mean"), name_of("INFO step"), name_of("and kl is")
    ('grad_norm', 'rewards/Format/mean', 'step', 'kl')
    >>> name_of("MeanReward"), name_of("KL"), name_of("Step done. Average reward")
    ('mean_reward', 'kl', 'average_reward')
    """
    label = _IN_WORDS.sub("", _LEVEL.sub("", label.rpartition(". ")[2]))
    return label if "/" in label else snake(label).replace(" ", "_").strip("_.-()")


def is_log_line(names: Collection[str]) -> bool:
    """Tell the names of a line that logs numbers from those of options and of clocks."""
    return any(map(is_metric, names))


OF_MEANS = re.compile(r"mean|avg|average")


def mean_rewards_in(line: str) -> dict[str, float | None]:
    """Return the metrics of a line with a mean reward, which is of a step though nothing counts it.

    >>> mean_rewards_in("avg_reward: 0.5, kl: 0.1, lines: 3"), mean_rewards_in("reward: 0.5")
    ({'avg_reward': 0.5, 'kl': 0.1}, {})
    """
    if "reward" not in line or OF_MEANS.search(line) is None:
        return {}
    values: dict[str, float | None] = {name_of(label): number(text) for label, text in pairs(line)}
    quantities = metric_quantities(values)
    is_mean = any(quantities.get(name) == "reward" and OF_MEANS.search(name) for name in values)
    return {name: value for name, value in values.items() if name in quantities} if is_mean else {}


_LOSSES = {"loss", "policy_loss"}


def is_update(names: Collection[str]) -> bool:
    """Tell the names of a line with a loss and two more metrics that are known, which no response has.

    >>> is_update(["loss", "reward", "kl"]), is_update(["reward", "format", "answer"])
    (True, False)
    """
    quantities = {*metric_quantities(names).values()}
    return bool(_LOSSES & quantities) and len(quantities) >= FEWEST_NUMBERS
