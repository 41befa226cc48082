"""`StepKey`: what names a batch, a line of a log and a line of the tables."""

from typing import NamedTuple

TRAIN = "train"
EVAL = "eval"


class StepKey(NamedTuple):
    """Identity of a batch: training and evaluation rows of one logged step are two batches."""

    step: int
    split: str
