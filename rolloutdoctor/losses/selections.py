"""Tokens that a policy term picks over a whole micro-batch, before the blocks go through it."""

from collections.abc import Callable

from torch import Tensor

from rolloutdoctor.losses.terms import TokenInputs
from rolloutdoctor.objective import Surrogate

SELECTIONS: dict[str, Callable[[TokenInputs, Tensor, Surrogate], Tensor]] = {}
"""Kind of surrogate to the tokens it picks: ``(the whole step, micro-batch of each token [T], rule) -> [T] bool``."""
