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
        joined, rows = evaluation.whole
        radius = of_whole(joined)
        return Radius(radius.largest[rows], radius.likely[rows])

    return inner
