"""Radius of the mean of detached weights of rows; where its advantage is 0 to rounding, that of either sign.

The weight is ``exp(lambda - lambda w) w^k``, w the product of the row's ratios; k and lambda go with the sign.
"""

from math import exp, inf, sqrt

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.terms import over_forwards, row_log_ratios, sides
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops.rounding import Radius


def row_weight_radius(evaluation: Evaluation) -> Radius:
    """Radius of a mean over rows, or over forward passes of their means over rows."""
    rows, tokens = evaluation.rows, evaluation.tokens
    assert rows is not None
    assert tokens is not None
    assert rows.advantage_N is not None
    lost = _lost(evaluation) * sides(evaluation)
    numbers = evaluation.objective.surrogate.numbers
    curves = [(numbers[f"k_{side}"], max(numbers[f"lambda_{side}"], 1e-4)) for side in ("pos", "neg")]
    if any(power < 0 for power, _ in curves):
        # Such a weight has no largest value.
        return Radius.of(inf)
    steepest, highest = (max(each(*curve) for curve in curves) for each in (_steepest, _highest))
    has_no_sign_N = rows.advantage_N.abs() <= advantage_radius(evaluation).likely
    weight_N = over_forwards(tokens.layout)
    either = Radius.of((has_no_sign_N * weight_N).sum() * highest)
    return (lost * (weight_N * steepest)).sum() + either


def _lost(evaluation: Evaluation) -> Radius:
    """Bound the rounding of the log of a row's ratio, ``[N]``; where the sampler is corrected for, that is a part."""
    objective = evaluation.objective
    pairs = [("policy_log_probs", objective.surrogate.old)]
    pairs += [("old_log_probs", "rollout_log_probs") for gate in objective.gates if gate.kind == "importance"]
    radius = Radius.of(0.0)
    for pair in pairs:
        total_N, size_N, length_N = row_log_ratios(evaluation.batch, *pair)
        # A difference and an addition for every token; `exp` in the end.
        radius += rounding.total(size_N, length_N.clamp(min=1)) + rounding.stored(size_N + total_N.abs() + 8)
    return radius


def _highest(power: float, decay: float) -> float:
    """Largest weight: that of ``w = k / lambda``."""
    return _weight(power, decay, power)


def _steepest(power: float, decay: float) -> float:
    """Largest absolute derivative ``phi (k - lambda w)`` of a weight with respect to ``log w``."""
    root = sqrt(4 * power + 1)
    return max(
        abs(power - x) * _weight(power, decay, x) for x in ((2 * power + 1 + root) / 2, (2 * power + 1 - root) / 2)
    )


def _weight(power: float, decay: float, x: float) -> float:
    """The weight where ``lambda w`` is x."""
    return float((x / decay) ** power) * exp(decay - x)
