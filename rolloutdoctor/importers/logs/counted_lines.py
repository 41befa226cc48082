"""What counts the lines of a text, such as ``Step 3/30`` or ``Epoch:[2/3](5/100)``."""

import re

_COUNTER = re.compile(
    r"(?i)(?<![\w/.])((?:global|training|train)[_ ]step|steps?|iteration|iter|it|update|batch|episode|ep|epoch)\b"
    r" ?[:=#]?[ \t]{0,12}\[? ?([0-9]{1,15})(?: ?/ {0,12}([0-9]{1,15}))?(?: ?\])?"
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
    >>> counted("[run-a]  3/100 | loss=0.5"), counted("[run-a] 3/100 correct")
    ((3, 100, ''), None)
    """
    ranks = {name: place for place, name in enumerate(_RANK)}
    best: tuple[int, int, int | None, str] | None = None
    for name, done, total, inner, of_inner in _COUNTER.findall(line):
        label = name.lower().replace(" ", "_")
        rank, step = ranks.get(label, len(_RANK)), int(done)
        whole = int(total) if total else None
        if inner:
            rank, step = -1, (max(step, 1) - 1) * int(of_inner) + int(inner)
            whole = whole and whole * int(of_inner)
        if best is None or rank < best[0]:
            best = rank, step, whole, label
    if best is None and (bracketed := _BRACKETED.match(line) or _BEHIND_A_NAME.match(line)) is not None:
        return int(bracketed[1]), int(bracketed[2]), ""
    return None if best is None else best[1:]
