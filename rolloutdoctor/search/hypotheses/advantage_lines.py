"""Hypotheses about advantages with numbers that are solved: a line, the divisor, the weights of reward functions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf, isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.rounding import Radius
from rolloutdoctor.search.hypotheses.advantage_fits import (
    advantage_family,
    advantages_of,
    by_unit,
    filled_advantages,
    logged_steps,
    recomputed,
    units,
)
from rolloutdoctor.search.hypotheses.hypothesis import UPSTREAM, AdvantagesEdit, Hypothesis, Seen, changing
from rolloutdoctor.search.hypotheses.whitening import whitens

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

SPARE = 4
"""Different values beyond those that the numbers of a fit are solved from."""


# A line.


def _line(unit: str, evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Factor and offset of each row's unit, through the rows of its extreme values; and the radius, ``[N]`` each."""
    unit_N = units(evaluation.batch, unit)
    if unit_N is None or not len(unit_N):
        return None
    value_N, radius_N = recomputed(evaluation)
    order_N, offsets = by_unit(unit_N, value_N), seg.offsets_of(torch.bincount(unit_N))
    low_U, high_U = order_N[offsets[:-1]], order_N[offsets[1:] - 1]
    span_U = value_N[high_U] - value_N[low_U]
    factor_U = torch.where(span_U > 0, (logged_N[high_U] - logged_N[low_U]) / span_U, 0.0)
    offset_U = logged_N[low_U] - factor_U * value_N[low_U]
    own_N = factor_U[unit_N].abs() * radius_N + rounding.stored(logged_N).likely
    return factor_U[unit_N], offset_U[unit_N], own_N + torch.maximum(own_N[low_U], own_N[high_U])[unit_N]


def _on_line(unit: str) -> AdvantagesEdit:
    def edit(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius] | None:
        line = _line(unit, evaluation, filled_advantages(evaluation, logged_N))
        return None if line is None else (line[0] * recomputed(evaluation)[0] + line[1], Radius.of(line[2]))

    return edit


def _spare(evaluation: Evaluation, unit: str) -> int:
    """Different values beyond two of each unit."""
    unit_N = units(evaluation.batch, unit)
    if unit_N is None:
        return 0
    pairs = torch.stack([unit_N.double(), recomputed(evaluation)[0].float().double()])
    return int((torch.bincount(torch.unique(pairs, dim=1)[0].long()) - 2).clamp(min=0).sum())


_OVER = {"step": "all rows of the step", "rank": "the rows of each rank", "group": "the rows of each group"}


def _solve_line(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    steps = logged_steps(trials)
    for unit, over in _OVER.items():
        lines = [_line(unit, *step) for step in steps]
        factors, offsets = ([line[place] for line in lines if line is not None] for place in (0, 1))
        if not factors or sum(_spare(evaluation, unit) for evaluation, _ in steps) < SPARE:
            continue
        factor, offset = torch.cat(factors), torch.cat(offsets)
        name, code = f"line-in-{unit}", "RDA004"
        is_factor = float(factor.max() - factor.min()) <= 1e-5 * float(factor.abs().max())
        if all(_is_standardised(*step, unit) for step in steps):
            name = f"normalised-again-over-{unit}"
            words = f"the advantages are centred and divided by their standard deviation once more, over {over}"
        elif is_factor and float(offset.abs().max()) <= 1e-5:
            name, words = "constant-factor", f"the advantages are {float(factor.mean()):.6g} times the recomputed value"
        elif whitens(steps[0][0].objective):
            code, words = (
                "RDA010",
                "the advantages are whitened with another mean and variance than the trained tokens'",
            )
        else:
            numbers = f"times {_range(factor)}, plus {_range(offset)}"
            words = f"the advantages are a straight line of the recomputed ones over {over} ({numbers})"
        yield Hypothesis(name, code, "advantages", words, UPSTREAM, advantages=_on_line(unit))


def _range(x: Tensor) -> str:
    low, high = float(x.min()), float(x.max())
    return f"{low:.4g}" if high - low <= 1e-4 * abs(high) else f"{low:.4g} to {high:.4g}"


def _is_standardised(evaluation: Evaluation, logged_N: Tensor, unit: str) -> bool:
    """True if the logged advantages of each unit have a mean of 0 and a standard deviation of about 1."""
    unit_N = units(evaluation.batch, unit)
    parts = [] if unit_N is None else [logged_N[unit_N == number] for number in torch.unique(unit_N).tolist()]
    varying = [part for part in parts if len(part) > 1 and bool((part != part[0]).any())]
    centred = all(abs(float(x.mean())) < 1e-4 for x in varying)
    return centred and all(any(0.99 < float(x.std(correction=d)) < 1.0001 for d in (0, 1)) for x in varying)


# The divisor.

_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)


def _divided(objective: Objective) -> bool:
    rule = objective.advantage
    return rule.spec.is_standard_score and rule.scale != "none" and not (rule.whitened or rule.normalised)


def _solve_divisor(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    """Epsilon is what a divisor is above its standard deviation: every group has to give the same."""
    steps = logged_steps(trials)
    recorded = steps[0][0].objective.advantage if steps else None
    for biased, in_root in product((False, True), repeat=2) if recorded is not None else ():
        assert recorded is not None
        low, high, sizes = -inf, inf, set[float]()
        for evaluation, logged_N in steps:
            bare = changing("advantage", epsilon=0.0, biased_std=biased, epsilon_in_root=False, single=False)
            unit_N = advantages_of(evaluation, evaluation.batch, bare(evaluation.objective))
            rows = evaluation.rows
            if unit_N is None or rows is None or rows.baseline_N is None:
                return
            centred_N = rows.score_N - rows.baseline_N
            deviation_N, divisor_N = centred_N / unit_N, centred_N / logged_N
            error_N = divisor_N * (2 * recomputed(evaluation)[1] + rounding.stored(logged_N).likely) / logged_N.abs()
            if in_root:
                error_N, deviation_N, divisor_N = 2 * divisor_N * error_N, deviation_N**2, divisor_N**2
            told_N = (logged_N.abs() > 1e-3) & (centred_N.abs() > 1e-6) & divisor_N.isfinite() & deviation_N.isfinite()
            over_N, error_N = (divisor_N - deviation_N)[told_N], error_N[told_N]
            low = max([low, *(over_N - error_N).tolist()])
            high = min([high, *(over_N + error_N).tolist()])
            sizes |= set(deviation_N[told_N].float().tolist())
        middle = (low + high) / 2
        if low > high or high < 0 or not isfinite(middle):
            continue
        likely = (recorded.epsilon, *_EPSILONS, *(float(f"{middle:.{digits}g}") for digits in range(1, 8)), middle)
        epsilon = next(value for value in likely if low <= value <= high)
        changes = (biased, in_root, epsilon) != (recorded.biased_std, recorded.epsilon_in_root, recorded.epsilon)
        if changes and epsilon >= 0 and (epsilon in _EPSILONS or len(sizes) >= SPARE):
            yield _divisor(epsilon, recorded.epsilon, biased=biased, in_root=in_root)


@cache
def _divisor(epsilon: float, recorded: float, *, biased: bool, in_root: bool) -> Hypothesis:
    parts, words = ["biased-std"] * biased, ["the standard deviation divides by n, not by n - 1"] * biased
    if epsilon != recorded or in_root:
        text = f"{epsilon:g}" if epsilon >= 0.01 or not epsilon else f"{epsilon:.7g}".replace("e-0", "e-")
        text = {"0.001": "1e-3", "0.0001": "1e-4"}.get(text, text)
        parts.append(f"epsilon-{text}" + "-in-root" * in_root)
        where = "added to the variance before the root" if in_root else "beside the standard deviation"
        words.append(f"epsilon is {text}, {where}")
    return Hypothesis(
        name="-".join(parts) or "unbiased-std",
        code="RDA004",
        stage="advantages",
        words=", and ".join(words) or "the standard deviation divides by n - 1, not by n",
        remedy=UPSTREAM,
        objective=changing("advantage", epsilon=epsilon, biased_std=biased, epsilon_in_root=in_root),
    )


# Weights of reward functions.


def _terms(batch: "RolloutBatch") -> dict[str, Tensor]:
    """Return the possible terms of a reward: the reward functions, or the reward, and the length of the response."""
    terms = dict(batch.rewards) or {"reward": batch.per_row["reward"]}
    return {name: x_N.nan_to_num(0.0) for name, x_N in terms.items()} | {"length": batch.rows.diff().double()}


def _solve_weights(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    """Centred rewards times their weights are the advantages, or, where those are divided, parallel to them."""
    steps = logged_steps(trials)
    equations, sides, names = [], [], list(_terms(steps[0][0].batch)) if steps else []
    objective = steps[0][0].objective if steps else None
    for evaluation, logged_N in steps:
        batch, rule = evaluation.batch, evaluation.objective.advantage
        bare = replace(changing("advantage", scale="none", single=False)(evaluation.objective), kl_reward=None)
        columns = [
            advantages_of(evaluation, replace(batch, per_row={**batch.per_row, "reward": x_N}), bare)
            for x_N in _terms(batch).values()
        ]
        unit_N = units(batch, "group" if rule.scale == "group" else "step")
        present = [x_N for x_N in columns if x_N is not None]
        if len(present) < len(names) or unit_N is None:
            return
        made_NF = torch.stack(present, dim=1).double()
        if not (rule.spec.divides and rule.scale != "none"):
            equations.append(made_NF)
            sides.append(logged_N)
            continue
        for number in torch.unique(unit_N[logged_N != 0]).tolist():
            a_NF, y_N = made_NF[unit_N == number], logged_N[unit_N == number]
            products_F = (y_N[:, None] * a_NF).sum(0)
            equations.append(a_NF - torch.outer(y_N, products_F) / y_N.square().sum())
            sides.append(products_F[None])
    if objective is None or sum(map(len, equations)) < len(names) + SPARE:
        return
    made_MF, side_M = torch.cat(equations), torch.cat(sides)
    if not (made_MF.isfinite().all() and side_M.isfinite().all()):
        return
    if side_M.dim() == 1:
        yield _weighted(torch.linalg.lstsq(made_MF, side_M[:, None]).solution[:, 0], names)
        return
    weight_F = torch.linalg.svd(made_MF, full_matrices=False).Vh[-1]
    weight_F = weight_F * (side_M * weight_F).sum().sign()
    for weight, value in zip(weight_F, objective.reward_weights or (1.0,) * (len(names) - 1), strict=False):
        if abs(float(weight)) > 1e-9 and value:
            yield _weighted(weight_F * abs(value / float(weight)), names)


def _weighted(weight_F: Tensor, names: Sequence[str]) -> Hypothesis:
    near = [(float(f"{weight:.3g}"), weight) for weight in weight_F.tolist()]
    weights = [a if abs(a - b) <= 1e-4 * max(abs(b), 1e-3) else b for a, b in near]
    weights = [0.0 if abs(weight) < 1e-7 else weight for weight in weights]

    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        terms = _terms(batch)
        if list(terms) != list(names):
            return None
        reward_N = torch.stack([weight * x_N for weight, x_N in zip(weights, terms.values(), strict=True)]).sum(dim=0)
        return replace(batch, per_row={**batch.per_row, "reward": reward_N})

    parts = [f"{name} {weight:.4g}" for name, weight in zip(names[:-1], weights, strict=False)]
    token_words = f", and {weights[-1]:.4g} for each token of the response" if weights[-1] else ", and not as recorded"
    return Hypothesis(
        name="reward-weights-" + "-".join(f"{weight:.4g}" for weight in weights),
        code="RDA004",
        stage="advantages",
        words=f"the rewards behind the advantages are weighted {', '.join(parts)}{token_words}",
        remedy=UPSTREAM,
        rows=edit,
        columns=frozenset({"rewards"}),
    )


DIVISOR = advantage_family(
    "divisor", "RDA004", "the divisor is another standard deviation, or has another epsilon", _solve_divisor, _divided
)
WEIGHTS = advantage_family(
    "reward-weights",
    "RDA004",
    "the reward functions, or the length of a response, have other weights",
    _solve_weights,
)
LINE = advantage_family(
    "line",
    "RDA004",
    "the advantages are a straight line of the recomputed ones: scaled, or normalised once more",
    _solve_line,
)
