"""Lines that a loop prints again and again with nothing that counts them: ``loss/total 5.2``, ``reward is 0.9``."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rolloutdoctor.importers.logs.counters import COUNTERS
from rolloutdoctor.importers.logs.numbers import number, of_rewards
from rolloutdoctor.importers.logs.printed import PAIR, Form, Printed, is_update, name_of, pairs
from rolloutdoctor.importers.logs.rows import STEPS
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities

_FEWEST = 20
"""Lines with a loss: fewer may stand in any text."""

_COUNT = re.compile(r"(?<![0-9])([0-9]{1,12})(?:it|/[0-9]{1,12}) \[")
"""The count of a progress bar, with or without its end."""

_BETWEEN = re.compile(r"[\s,;|]|\band\b")

_HEAD = re.compile(r"(?i)\W{0,40}(?:\w{1,20} )?step ?[:#=]? ?([0-9]{1,15})(?: ?/ ?[0-9]{1,15})?\W{0,40}")
"""A line with a step alone: ``=== GRPO step 3/60 ===``."""

_MOST_OF = 0.9
"""Share of the lines with a loss that have such a line above them."""

_IN_SENTENCE = 2
"""Spaces in what stands before a number of a sentence: ``the student needs a score of 93``."""

_SHORT = 400
"""Characters of a line that a loop prints again and again."""

_TIMES = 4
"""Times as many as the steps that another form finds, which have more in them."""


class RepeatedLines(Form):
    """Lines that are names and numbers alone: one with a loss is a step, and rewards before it are of its responses."""

    title = "lines of names and numbers"
    remarks = ("nothing counts the lines: each with a loss is a step, and the rewards before it are of its responses",)

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps, if lines that a counter numbers are few beside them."""
        steps: list[Printed] = []
        rewards: list[float | None] = []
        numbered, most, heads, losses = 0, 0, list[int](), Counter[tuple[str, ...]]()
        for line in lines:
            if "step" in line.lower() and (head := _HEAD.fullmatch(line)) is not None:
                heads.append(int(head[1]))
            values = _numbers(line) if "{" not in line and _are_pairs_alone(line) else {}
            if any("loss" in name.lower() for name in values):
                steps.append(Printed(values | of_rewards("reward", rewards)))
                losses[tuple(values)] += 1
                most, rewards = max(most, len(rewards)), []
            elif len(values) == 1 and {*metric_quantities(values).values()} == {"reward"}:
                rewards += values.values()
            else:
                # A response speaks of scores in sentences.
                numbered += any(
                    is_metric(name_of(label)) for label, _ in pairs(line) if label.count(" ") < _IN_SENTENCE
                )
        # A step above each, that grows, counts them, where no rewards of responses are to be averaged.
        grows = len(heads) >= _MOST_OF * len(steps) and all(after > before for before, after in pairwise(heads))
        is_counted = most <= 1 and grows
        # Several losses on a line each are of one block.
        alike = max(losses.values(), default=0) >= _MOST_OF * len(steps)
        if len(steps) >= max(_FEWEST, _TIMES * numbered) and alike and not is_counted:
            yield from steps


class RepeatedBlocks(Form):
    """Blocks of lines of one name and number each, the same names in the same order: a block is a step.

    The course notebooks of TRL's first PPOTrainer print ``objective/kl: 29.3`` and what is below it after every step.
    """

    title = "blocks of names and numbers"

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the blocks, if there are some, all of the same metrics, with the step that they or a bar above name."""
        blocks: list[dict[str, float | None]] = [{}]
        drawn: list[dict[str, int | None]] = [{}]
        bar: int | None = None
        for line in lines:
            if " [" in line and (counts := _COUNT.findall(line)):
                bar = int(counts[-1])
            of_line = [*pairs(line)] if _are_pairs_alone(line) else []
            for label, text in of_line if len(of_line) == 1 else []:
                if name_of(label) in blocks[-1]:
                    blocks.append({})
                    drawn.append({})
                blocks[-1][name_of(label)] = number(text)
                drawn[-1][name_of(label)] = bar
        # Around the first and the last block other lines may stand.
        names = Counter(map(tuple, blocks)).most_common(1)[0][0]
        # Accuracies and scores alone are of evaluations, one of each model.
        trained = [name for name in names if is_metric(name) and not any(word in name.lower() for word in _MEASURES)]
        if len(names) < _FEWEST_NAMES or not trained:
            return
        complete = [(block, at[names[0]]) for block, at in zip(blocks, drawn, strict=True) if block.keys() >= {*names}]
        if len(complete) >= _FEWEST_BLOCKS:
            yield from _of_steps(names, complete)


def _of_steps(names: Sequence[str], blocks: Sequence[tuple[dict[str, float | None], int | None]]) -> Iterator[Printed]:
    """Yield blocks with the steps that all of them name, or that the progress bars before them count one by one."""
    counter = next((name for name in STEPS if all((block.get(name) or 0.5) % 1 == 0 for block, _ in blocks)), "")
    bars = [at for _, at in blocks if at is not None]
    is_counted = len(bars) == len(blocks) and all(after == before + 1 for before, after in pairwise(bars))
    for block, at in blocks:
        step = block.get(counter) or (at if is_counted else None)
        values = {name: block[name] for name in names if name != counter}
        yield Printed(values, None if step is None else int(step))


class Updates(Form):
    """Lines with a loss and two more metrics: no response has them, so that each is of a step."""

    title = "lines of names and numbers"

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield a step for each line."""
        for line in lines:
            if "loss" in line.lower():
                named = {name_of(label): number(text) for label, text in pairs(line)}
                # Of lines with a step others say more: a number that counts is none of the update.
                values = {name: value for name, value in named.items() if name not in COUNTERS}
                if is_update(values):
                    yield Printed(values)


BLOCKS = RepeatedBlocks()

_MEASURES = ("acc", "score")
_FEWEST_BLOCKS, _FEWEST_NAMES = 5, 2
"""Blocks, and lines of each: fewer may stand in any text."""


def _are_pairs_alone(line: str) -> bool:
    """Tell a line of names and numbers in which nothing else stands."""
    return len(line) <= _SHORT and PAIR.search(line) is not None and not _BETWEEN.sub("", PAIR.sub(" ", line))


def _numbers(line: str) -> dict[str, float | None]:
    """Return the numbers of a line by name; nothing of one with a name that is of no metric, as a counter's is."""
    named = {name_of(label): number(text) for label, text in pairs(line)}
    return named if all(is_metric(name) for name in named) else {}
