"""Radii that several comparisons of one evaluation ask for are computed once, and forgotten with it."""

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.ops.rounding import Radius


def remembered(radius_of: Callable[[Evaluation], Radius]) -> Callable[[Evaluation], Radius]:
    """Remember the radius of every evaluation that is still in use."""
    known: WeakKeyDictionary[Evaluation, Radius] = WeakKeyDictionary()

    @wraps(radius_of)
    def inner(evaluation: Evaluation) -> Radius:
        if evaluation not in known:
            known[evaluation] = radius_of(evaluation)
        return known[evaluation]

    return inner
