"""What counts the lines of a text: ``Step 3/30``, ``Epoch:[2/3](5/100)``, and steps that each epoch counts anew."""

import re
from collections.abc import Sequence
from dataclasses import replace

from rolloutdoctor.importers.logs.printed import Printed

_COUNTER = re.compile(
    r"(?i)(?<![\w/.])((?:global|training|train)[_ ]step|steps?|iteration|iter|it|update|batch|episode|ep|epoch)\b"
    r" ?[:=#]?[ \t]{0,12}\[? ?(?:[0-9]{1,15}[-–])?([0-9]{1,15})(?: ?/ {0,12}([0-9]{1,15}))?(?: ?\])?"
    r"(?:\(([0-9]{1,15})/([0-9]{1,15})\))?(?![\w.%])"
)
_BRACKETED = re.compile(r"\s{0,8}\[ ?([0-9]{1,15}) ?/ ?([0-9]{1,15}) ?\]")
_BEHIND_A_NAME = re.compile(r"\s{0,8}\[[\w./-]{1,100}\] {1,12}([0-9]{1,15}) ?/ ?([0-9]{1,15}) {0,8}\|")
"""A step without a word, behind the name of the run: ``[run-a]  3/100 | loss=0.5``."""
_RANK = (
    *("global_step", "training_step", "train_step", "step", "steps", "iteration", "iter"),
    *("it", "update", "batch", "episode", "ep"),
)
COUNTERS = frozenset({*_RANK, "epoch", "current_steps"})
"""Names of what counts, in lower case; in a line that has several the first of `_RANK` counts."""


def counted(line: str) -> tuple[int, int | None, str] | None:
    """Return the step that a line of names and numbers is of, of how many where it says so, and what counts it.

    >>> counted("Step 3/30 | loss=0.5"), counted("Epoch:[2/3](5/100), Reward: 1.0"), counted("a step 3.5")
    ((3, 30, 'step'), (105, 300, 'epoch'), None)
    >>> counted("Steps 1-50 | loss=0.5")
    (50, None, 'steps')
    >>> counted("[run-a]  3/100 | loss=0.5"), counted("[run-a] 3/100 correct")
    ((3, 100, ''), None)
    """
    ranks = {name: place for place, name in enumerate(_RANK)}
    best: tuple[int, int, int | None, str] | None = None
    for name, done, total, inner, of_inner in _COUNTER.findall(line):
        label = name.lower().replace(" ", "_")
        rank, step = ranks.get(label, len(_RANK)), int(done)
        planned = int(total) if total else None
        if inner:
            rank, step = -1, (max(step, 1) - 1) * int(of_inner) + int(inner)
            planned = planned and planned * int(of_inner)
        if best is None or rank < best[0]:
            best = rank, step, planned, label
    if best is None and (bracketed := _BRACKETED.match(line) or _BEHIND_A_NAME.match(line)) is not None:
        return int(bracketed[1]), int(bracketed[2]), ""
    return None if best is None else best[1:]


def through_epochs(records: Sequence[Printed]) -> list[Printed]:
    """Return lines with steps that go on where a loop counts them anew in each epoch.

    >>> lines = [Printed({"epoch": epoch, "loss": 0.5}, step) for epoch in (1.0, 2.0) for step in (10, 20)]
    >>> [line.step for line in through_epochs(lines)]
    [10, 20, 30, 40]
    """
    continued: list[Printed] = []
    before, last = 0, None
    for record in records:
        epoch = record.values.get("epoch")
        if record.step is None or epoch is None or epoch % 1:
            return list(records)
        if last is not None and record.step <= last[0] and epoch == last[1] + 1:
            before += last[0] + (record.step == 0)
        elif last is not None and epoch < last[1]:
            if record.step > last[0]:
                # Epochs of an update, which each step has anew.
                return list(records)
            before = 0
        last = record.step, epoch
        continued.append(replace(record, step=before + record.step, total_steps=None) if before else record)
    return continued


def of_one_counter(records: Sequence[Printed]) -> list[Printed]:
    """Return the records of what counts most of them, or counts as it does: a summary of an epoch is of no step."""
    steps: dict[str, set[int | None]] = {}
    for record in records:
        steps.setdefault(record.counter, set()).add(record.step)
    main = max(steps.values(), key=len, default=set())
    # Asked once for each counter: a log may have a line for each of a million steps.
    counters = {counter for counter, counted in steps.items() if 2 * len(counted & main) >= len(counted)}
    return [replace(record, counter="step") for record in records if record.counter in counters]
