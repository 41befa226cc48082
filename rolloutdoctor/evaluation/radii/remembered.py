"""Radii of rows that are computed once for steps that were evaluated together."""

from collections.abc import Callable
from functools import wraps

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.ops.rounding import Radius


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
