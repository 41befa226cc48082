"""What an objective makes of how far the sampler's log-probs are from the trainer's."""

from math import inf, log
from typing import NamedTuple

from rolloutdoctor.objective.objective import Objective


class Bound(NamedTuple):
    """A bound on a sum over the tokens of a row.

    Attributes:
        of: what is summed: ``k1`` (delta), ``k2`` or ``k3``.
        low: smallest sum that is left alone.
        high: largest.
        rejects: rows beyond it are left out; else their weight is cut.
    """

    of: str
    low: float
    high: float
    rejects: bool


def corrects_the_sampler(objective: Objective | None) -> bool:
    """True if the objective weighs, bounds or rejects by the sampler's log-probs."""
    if objective is None:
        return False
    around, inside = objective.correction, objective.sampler_correction
    return (
        objective.surrogate.old == "rollout_log_probs"
        or (around.weights is not None and around.weighs)
        or around.rejects
        or (inside is not None and inside.weighs)
        or any(gate.against == "rollout_log_probs" and gate.kind != "high_entropy" for gate in objective.gates)
    )


def sequence_bounds(objective: Objective | None) -> list[Bound]:
    """Return the bounds on sums over rows that the objective has."""
    if objective is None:
        return []
    weights, inside, bounds = objective.correction.weights, objective.sampler_correction, list[Bound]()
    if weights is not None and objective.correction.weighs and weights.level == "sequence":
        bounds.append(_of_weight(weights.low, weights.high, rejects=weights.low is not None))
    for rejection in objective.correction.rejections if objective.correction.rejects else ():
        over, _, of = rejection.statistic.rpartition("_")
        if over == "seq_sum":
            low, high = -inf if rejection.low is None else rejection.low, rejection.high
            bounds.append(Bound(of, *((-high, -low) if of == "k1" else (low, high)), rejects=True))
    if inside is not None and inside.weighs and inside.level == "sequence":
        bounds.append(_of_weight(inside.low, inside.high, rejects=inside.mode == "mask"))
    if inside is not None and inside.reject_level == "sequence":
        bounds.append(_of_weight(inside.reject_low, inside.reject_high, rejects=True))
    return bounds + [
        _of_weight(gate.low, gate.high, rejects=gate.outside == "zero")
        for gate in objective.gates
        if gate.kind == "importance" and gate.level == "sequence" and gate.against == "rollout_log_probs"
    ]


def _of_weight(low: float | None, high: float | None, *, rejects: bool) -> Bound:
    """Bound the sum of delta by the weight that is its exponential; None: that side is free."""
    ends = ((low, -inf), (high, inf))
    least, most = (none if value is None else log(value) if value > 0 else -inf for value, none in ends)
    return Bound("k1", least, most, rejects)
