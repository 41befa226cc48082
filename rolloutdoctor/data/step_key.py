"""`StepKey`: what names a batch, a line of a log and a line of the tables."""

from collections.abc import Collection
from typing import NamedTuple

TRAIN = "train"
EVAL = "eval"


class StepKey(NamedTuple):
    """Identity of a batch: training and evaluation rows of one logged step are two batches."""

    step: int
    split: str


def logged_steps(keys: Collection[StepKey]) -> int:
    """Return how many steps of a training the lines of a log are of: an evaluation is of one that is trained as well.

    >>> logged_steps([StepKey(1, TRAIN), StepKey(2, TRAIN), StepKey(2, EVAL)]), logged_steps([StepKey(2, EVAL)])
    (2, 1)
    """
    return sum(key.split == TRAIN for key in keys) or len(keys)
