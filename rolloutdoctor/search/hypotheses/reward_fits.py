"""Hypotheses about rewards that are solved from logged advantages: bounds, and rows with the reward of another."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops.rounding import Radius
from rolloutdoctor.search.hypotheses import row_order
from rolloutdoctor.search.hypotheses.advantage_fits import filled_advantages, logged_steps, recomputed
from rolloutdoctor.search.hypotheses.hypothesis import Family, Hypothesis, Seen, changing, has_groups

ENOUGH_BITS = 24.0
"""Bits of evidence that the rewards of other rows must give: one run in ten million."""

MOST_TRIED = 1_000_000
"""Predictions of one group."""

LEAST_SPAN = 100.0
"""Radii between the advantages of two rows from which those of the others follow."""

SLACK = 2.0**-20
"""Of the largest reward: what the rounding of two to float32 and a few sums leaves of a multiple."""

FEWEST_BOUNDED = 3
"""Rows that give the same bound."""


@dataclass(frozen=True, eq=False)
class _Group:
    """A group of a step, ``[n]`` each.

    Attributes:
        rows: places in the step.
        reward_n: their rewards.
        penalty_n: what these lose before the estimator sees them.
        logged_n: logged advantages.
        error_n: radii of these.
    """

    rows: Tensor
    reward_n: Tensor
    penalty_n: Tensor
    logged_n: Tensor
    error_n: Tensor

    def predicted(self, left: Tensor, right: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards that go with the logged advantages where those of two rows are known, and radii, ``[k, n]`` each.

        Args:
            left: ``[k]``, a row of the group.
            right: ``[k]``, another one.
            low: ``[k]``, reward of the one.
            high: ``[k]``, reward of the other.
        """
        low, high = low - self.penalty_n[left], high - self.penalty_n[right]
        span_k = self.logged_n[right] - self.logged_n[left]
        factor_k = (high - low) / span_k
        away_kn = (self.logged_n - self.logged_n[left][:, None]) / span_k[:, None]
        value_kn = low[:, None] + away_kn * (high - low)[:, None] + self.penalty_n
        error_k = self.error_n[left] + self.error_n[right]
        error_kn = factor_k.abs()[:, None] * (self.error_n + error_k[:, None] * (1 + away_kn.abs()))
        return value_kn, error_kn + 4 * rounding.stored(value_kn).likely


def groups_off(evaluation: Evaluation, logged_N: Tensor) -> Iterator[_Group]:
    """The groups of a step in which an advantage disagrees."""
    batch, rows = evaluation.batch, evaluation.rows
    if batch.groups is None or rows is None:
        return
    value_N, radius_N = recomputed(evaluation)
    error_N = radius_N + rounding.stored(logged_N).likely
    off_N = (value_N - logged_N).abs() > error_N
    # A group of equal rewards has a radius of its own; what was logged had others.
    error_N = error_N.clamp(max=float(error_N.median())) if len(error_N) else error_N
    for group in torch.unique(batch.groups.index_N[off_N]).tolist():
        at = (batch.groups.index_N == group).nonzero()[:, 0]
        reward_n = batch.column("reward")[at].double()
        yield _Group(at, reward_n, reward_n - rows.score_N[at], logged_N[at].double(), error_N[at].double())


# Bounds.


def _bounded_rows(steps: Sequence[tuple[Evaluation, Tensor]], *, upper: bool) -> Iterator[float]:
    """Rewards that rows have instead of their own, by two neighbours in reward that may have theirs."""
    side = 1 if upper else -1
    for evaluation, logged_N in steps:
        for group in groups_off(evaluation, logged_N):
            order = (side * group.reward_n).argsort()
            left, right = order[:-1], order[1:]
            apart = (group.logged_n[right] - group.logged_n[left]).abs() > LEAST_SPAN * group.error_n.max()
            left, right = left[apart], right[apart]
            made_kn, error_kn = group.predicted(left, right, group.reward_n[left], group.reward_n[right])
            beyond_kn = side * (group.reward_n - group.reward_n[right][:, None]) > 0
            yield from made_kn[beyond_kn & (side * (group.reward_n - made_kn) > 2 * error_kn)].tolist()


def _solve_bounds(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    steps = logged_steps(trials)
    by_side: dict[bool, float] = {}
    for upper in (True, False) if steps else ():
        values = list(_bounded_rows(steps, upper=upper))
        near = Counter(f"{value:.5g}" for value in values)
        text, count = near.most_common(1)[0] if near else ("", 0)
        if count >= FEWEST_BOUNDED:
            by_side[upper] = shortest([value for value in values if f"{value:.5g}" == text])
    low, high = by_side.get(False), by_side.get(True)
    for bounds in dict.fromkeys(((None, high), (low, None), (low, high))):
        if bounds != (None, None) and (bounds[0] is None or bounds[1] is None or bounds[0] < bounds[1]):
            yield _bounded(*bounds)


def shortest(values: Sequence[float]) -> float:
    """The number of fewest digits within twice the range of some values."""
    low, high = min(values), max(values)
    spare = (high - low) / 2 + 1e-7 * abs(high)
    digits = (float(f"{(low + high) / 2:.{count}g}") for count in range(1, 17))
    return next((value for value in digits if low - spare <= value <= high + spare), (low + high) / 2)


def _bounded(low: float | None, high: float | None) -> Hypothesis:
    clauses = [f"{name} {bound:g}" for name, bound in (("below", low), ("above", high)) if bound is not None]
    return Hypothesis(
        name="rewards-clipped-" + "-".join(word.replace(" ", "-") for word in clauses),
        code="RDM006",
        stage="advantages",
        words=f"the advantages are made of rewards that are clipped where they are {' or '.join(clauses)}",
        remedy="state the bounds among the options, or log the reward that enters the advantages",
        objective=changing(
            "advantage", reward_bounds=(-torch.inf if low is None else low, torch.inf if high is None else high)
        ),
    )


# Rows with the reward of another.


def _spacing(values: Tensor, finest: float) -> float:
    """Spacing of the lattice on which some ascending values lie, or `finest`, where that is wider.

    >>> round(_spacing(torch.tensor([0.1, 0.4, 0.8]), 1e-4), 4)
    0.1
    """
    common, slack = 0.0, SLACK * float(values.abs().max())
    for gap in values.diff().tolist():
        # Euclid's algorithm, to within what rounding leaves of so many multiples.
        while gap > finest:
            times = round(common / gap)
            rest = abs(common - times * gap)
            common, gap = gap, rest if rest > (times + 1) * slack else 0.0
    return max(common, finest)


def _known(group: _Group, values: Tensor, intact: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Pairs of rows of a group and rewards for both, ``[k]`` each: `intact` of them have their own; None: too many."""
    size, count = len(group.rows), len(values)
    if (count**2 if not intact else size * (size - 1) * count ** (2 - intact)) * size > MOST_TRIED:
        return None
    if not intact:
        low, high = group.logged_n.argmin().expand(count**2), group.logged_n.argmax().expand(count**2)
        return low, high, values.repeat_interleave(count), values.repeat(count)
    place_n = torch.arange(size, device=values.device)
    left, right = torch.cartesian_prod(place_n, place_n)[(place_n[:, None] != place_n).flatten()].T
    if intact == 2:
        return left, right, group.reward_n[left], group.reward_n[right]
    left, right, second = left.repeat_interleave(count), right.repeat_interleave(count), values.repeat(len(left))
    return left, right, group.reward_n[left], second


def _sources(group: _Group, values: Tensor) -> tuple[Tensor, float] | None:
    """Rewards of the step that go with a group's logged advantages, ``[n]``, and what says so, in bits.

    Two rows of a group are taken to have their own rewards, else one, else none; the others' follow from the logged
    advantages, and have to be rewards of the step. The fewer have another one the better. Bits are those of the rows
    that have, beyond the two: how few of the rewards that a row could have are of the step.

    Args:
        group: the group.
        values: different rewards of the step, ascending.
    """
    span = float(group.logged_n.max() - group.logged_n.min())
    for intact in (2, 1, 0) if span > LEAST_SPAN * float(group.error_n.max()) else ():
        pairs = _known(group, values, intact)
        if pairs is None:
            return None
        one_k, other_k, first_k, second_k = pairs
        # A larger advantage goes with a larger score; what rounding leaves of equal ones is none.
        rise_k = second_k - first_k - (group.penalty_n[other_k] - group.penalty_n[one_k])
        rises_k = rise_k * (group.logged_n[other_k] - group.logged_n[one_k]).sign() > SLACK * values.abs().max()
        made_kn, error_kn = group.predicted(one_k[rises_k], other_k[rises_k], first_k[rises_k], second_k[rises_k])
        place_kn = torch.searchsorted(values, made_kn).clamp(1, len(values) - 1)
        below_kn, above_kn = values[place_kn - 1], values[place_kn]
        near_kn = torch.where(made_kn - below_kn < above_kn - made_kn, below_kn, above_kn)
        fits_k = ((near_kn - made_kn).abs() <= error_kn).all(1)
        if bool(fits_k.any()):
            near_kn, error_kn = near_kn[fits_k], error_kn[fits_k]
            changed_k = (near_kn != group.reward_n).sum(1)
            best = int(changed_k.argmin())
            changed = int(changed_k[best])
            # Rewards on a lattice are of the step whatever they are.
            width = _spacing(values, 2 * float(error_kn[best].max()))
            bits = log2(max(float(values[-1] - values[0]) / (width * len(values)), 1.0))
            tried = log2(len(made_kn)) if len(group.rows) - changed < 3 else 0.0
            return near_kn[best], (changed - (2 - intact)) * bits - tried
    return None


def _found(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, float] | None:
    """Rewards of the rows of a step, ``[N]``, and bits; None: a group has none."""
    reward_N, bits = evaluation.batch.column("reward").double().clone(), 0.0
    values = torch.unique(reward_N[reward_N.isfinite()])
    for group in groups_off(evaluation, logged_N) if len(values) > 2 else ():
        sources = _sources(group, values)
        if sources is None or not bool(group.reward_n.isfinite().all()):
            return None
        reward_N[group.rows] = sources[0]
        bits += sources[1]
    return reward_N, bits


def _of_other_rows(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius] | None:
    sources, batch = _found(evaluation, filled_advantages(evaluation, logged_N)), evaluation.batch
    if sources is None:
        return None
    moved = replace(batch, per_row={**batch.per_row, "reward": sources[0]})
    rows = evaluate_rows(moved, evaluation.objective, evaluation.dtype)
    if rows is None or rows.advantage_N is None:
        return None
    moved_evaluation = Evaluation(moved, evaluation.objective, rows, None, evaluation.dtype)
    return rows.advantage_N, Radius.of(advantage_radius(moved_evaluation).likely.expand(len(moved)))


OF_OTHER_ROWS = Hypothesis(
    name="rewards-of-other-rows",
    code="RDI004",
    stage="advantages",
    words="some rows have the reward of another row of their step",
    remedy=row_order.REMEDY,
    advantages=_of_other_rows,
    references=row_order.REFERENCES,
)


def _solve_other_rows(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    fits = [_found(*step) for step in logged_steps(trials)]
    if sum(each[1] for each in fits if each is not None) >= ENOUGH_BITS:
        yield OF_OTHER_ROWS


BOUNDS = Family(
    "reward-bounds",
    "RDM006",
    "advantages",
    "the rewards behind the advantages are clipped, and no option says so",
    _solve_bounds,
    has_groups,
)
OTHER_ROWS = Family("other-rows", "RDI004", "advantages", OF_OTHER_ROWS.words, _solve_other_rows, has_groups)
