"""Radii that several comparisons of one evaluation ask for are computed once, and forgotten with it."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.ops.rounding import Radius

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


def remembered_by_row(radius_of: Callable[[Evaluation], Radius]) -> Callable[[Evaluation], Radius]:
    """Remember radii of rows that depend on the rows of a group alone; steps that were evaluated together share them.

    Such an evaluation is cut out of that of several steps, and so are its radii.
    """
    of_whole = remembered(radius_of)

    @wraps(radius_of)
    def inner(evaluation: Evaluation) -> Radius:
        if evaluation.whole is None:
            return of_whole(evaluation)
        whole, rows = evaluation.whole
        found = of_whole(whole)
        return Radius(found.largest[rows], found.likely[rows])

    return inner
