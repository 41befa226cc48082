"""Radii that several comparisons of one evaluation ask for are computed once, and forgotten with it."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from rolloutdoctor.evaluation.evaluate import Evaluation

Found = TypeVar("Found")


def remembered(radius_of: Callable[[Evaluation], Found]) -> Callable[[Evaluation], Found]:
    """Remember what was found of every evaluation that is still in use."""
    known: WeakKeyDictionary[Evaluation, Found] = WeakKeyDictionary()

    @wraps(radius_of)
    def inner(evaluation: Evaluation) -> Found:
        if evaluation not in known:
            known[evaluation] = radius_of(evaluation)
        return known[evaluation]

    return inner
