"""Hypotheses about advantages whose numbers are solved: an order of rows, blocks, a line, a divisor, weights.

Some logged values give the numbers; all others have to follow from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf, isfinite, lgamma, log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.hypotheses.hypothesis import AdvantagesEdit, Family, Hypothesis, Seen, changing
from rolloutdoctor.hypotheses.partitions import CODE as PARTITION
from rolloutdoctor.hypotheses.partitions import REFERENCES as PARTITION_REFERENCES
from rolloutdoctor.hypotheses.partitions import REMEDY as PARTITION_REMEDY
from rolloutdoctor.hypotheses.partitions import places, regrouped, usual_size
from rolloutdoctor.hypotheses.row_order import REFERENCES as ORDER_REFERENCES
from rolloutdoctor.hypotheses.row_order import REMEDY as ORDER_REMEDY
from rolloutdoctor.hypotheses.row_order import moved_rewards
from rolloutdoctor.hypotheses.whitening import whitens
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.rounding import Radius
from rolloutdoctor.results.errors import CannotComputeError, UsageError

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

Trials = Sequence[Sequence[Seen]]

LARGEST_STEP = 512
"""Rows by which a column is tried to be off, and rows of a block."""

ENOUGH_BITS = 12.0
"""How unlikely it is, as a binary logarithm, that other values are the same in another order."""

SPARE = 4
"""Different values beyond the two that a line is solved from, and beyond the numbers of any other fit."""

_UPSTREAM = "compare the advantage computation of the trainer that ran with that of the recorded version"
_STATE = "state the option that the run really had, with --set or in the file's metadata, and check again"


def _has_rows(objective: Objective) -> bool:
    return objective.advantage.spec.has_groups


def _steps(trials: Trials) -> list[tuple[Evaluation, Tensor]]:
    """Evaluations, and the logged advantages of their rows; the recomputed one where nothing tells."""
    found = []
    for one in (each for trial in trials for each in trial):
        rows = one.evaluation.rows
        if rows is not None and rows.advantage_N is not None and one.advantage_N is not None and len(one.advantage_N):
            found.append((one.evaluation, _told(one.evaluation, one.advantage_N)))
    return found


def _told(evaluation: Evaluation, logged_N: Tensor) -> Tensor:
    rows = evaluation.rows
    assert rows is not None
    assert rows.advantage_N is not None
    untold_N = logged_N.isnan()
    if rows.rejected_N is not None:
        untold_N = untold_N | (rows.rejected_N & (logged_N == 0))
    return torch.where(untold_N, rows.advantage_N, logged_N)


def _values(evaluation: Evaluation) -> tuple[Tensor, Tensor]:
    """Recomputed advantages and their radii, ``[N]``."""
    rows = evaluation.rows
    assert rows is not None
    assert rows.advantage_N is not None
    return rows.advantage_N.nan_to_num(0.0), advantage_radius(evaluation).likely.expand(len(rows.advantage_N))


def _units(batch: "RolloutBatch", unit: str) -> Tensor | None:
    """Which group, rank or step each row is in, ``[N]`` int64."""
    if unit == "group":
        return None if batch.groups is None else batch.groups.index_N
    if unit == "rank":
        rank_N = batch.per_row.get("rank")
        return None if rank_N is None else torch.unique(rank_N, return_inverse=True)[1]
    return torch.zeros_like(places(batch))


def _sorted(unit_N: Tensor, value_N: Tensor) -> Tensor:
    """Rows by unit, and by value within it."""
    order_N = value_N.argsort(stable=True)
    return order_N[unit_N[order_N].argsort(stable=True)]


def _simplest(low: float, high: float, known: Sequence[float] = ()) -> float | None:
    """The first of some known numbers between two, or the one there of the fewest digits."""
    for value in known:
        if low <= value <= high:
            return value
    middle = (low + high) / 2
    if not isfinite(middle) or low > high:
        return None
    return next(value for value in (*(float(f"{middle:.{digits}g}") for digits in range(1, 8)), middle)
                if low <= value <= high or value == middle)  # fmt: skip


def _rows_of(evaluation: Evaluation, batch: "RolloutBatch", objective: Objective) -> Tensor | None:
    try:
        rows = evaluate_rows(batch, objective, evaluation.dtype)
    except (CannotComputeError, UsageError):
        return None
    return None if rows is None else rows.advantage_N


# Order.


def _reordered(unit: str) -> AdvantagesEdit:
    def edit(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius] | None:
        unit_N = _units(evaluation.batch, unit)
        if unit_N is None:
            return None
        (value_N, radius_N), logged_N = _values(evaluation), _told(evaluation, logged_N)
        source_N = torch.empty_like(unit_N)
        source_N[_sorted(unit_N, logged_N)] = _sorted(unit_N, value_N)
        return value_N[source_N], Radius.of(radius_N[source_N])

    return edit


def _shifted(rows: int) -> AdvantagesEdit:
    def edit(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius] | None:
        value_N, radius_N = _values(evaluation)
        return value_N.roll(rows), Radius.of(radius_N.roll(rows))

    return edit


def _order_bits(evaluation: Evaluation, logged_N: Tensor, unit: str) -> float:
    """Binary logarithm of the multisets that the units could have had of their different values, n of d each."""
    unit_N = _units(evaluation.batch, unit)
    if unit_N is None:
        return 0.0
    value_N, radius_N = _values(evaluation)
    off_N = (value_N - logged_N).abs() > 2 * radius_N
    bits = 0.0
    for one in torch.unique(unit_N[off_N]).tolist():
        n = int((unit_N == one).sum())
        d = len(torch.unique(value_N[unit_N == one].float()))
        bits += (lgamma(n + d) - lgamma(d) - lgamma(n + 1)) / log(2)
    return bits


def _late(rows: int, what: str) -> str:
    count = "the row" if abs(rows) == 1 else f"the row {abs(rows)} places"
    return f"every row has the {what} of {count} {'before' if rows > 0 else 'after'} it"


def _order(name: str, words: str, edit: AdvantagesEdit) -> Hypothesis:
    return Hypothesis(
        name, "RDI004", "advantages", words, ORDER_REMEDY, advantages=edit, references=ORDER_REFERENCES
    )  # fmt: skip


def _rolled(rows: int) -> Callable[["RolloutBatch"], Tensor]:
    return lambda batch: places(batch).roll(rows)


@cache
def moved(rows: int) -> Hypothesis:
    """Return the hypothesis that rewards are some rows late (early, below 0)."""
    side, count = "late" if rows > 0 else "early", abs(rows)
    return Hypothesis(
        name=f"rewards-{count}-rows-{side}",
        code="RDI004",
        stage="advantages",
        words=_late(rows, "reward"),
        remedy=ORDER_REMEDY,
        rows=moved_rewards(_rolled(rows)),
        references=ORDER_REFERENCES,
    )


def _shifts(evaluation: Evaluation) -> list[int]:
    half = min(len(evaluation.batch) // 2, LARGEST_STEP)
    return [sign * rows for rows in range(1, half + 1) for sign in (1, -1)]


def _solve_order(trials: Trials) -> Iterator[Hypothesis]:
    steps = _steps(trials)
    if not steps:
        return
    evaluation, logged_N = max(steps, key=lambda step: len(torch.unique(step[1].float())))
    value_N, radius_N = _values(evaluation)
    fitting: list[tuple[int, int, str]] = []
    for rows in _shifts(evaluation):
        rolled_N, around_N = value_N.roll(rows), radius_N.roll(rows)
        fitting.append((int(((rolled_N - logged_N).abs() <= 2 * around_N).sum()), rows, "advantages"))
        batch = moved_rewards(_rolled(rows))(evaluation.batch, evaluation.objective)
        made_N = None if batch is None else _rows_of(evaluation, batch, evaluation.objective)
        if made_N is not None:
            near_N = (made_N - logged_N).abs() <= 2 * radius_N.max().clamp(max=1e-3)
            fitting.append((int(near_N.sum()), rows, "rewards"))
    fitting.sort(key=lambda one: (-one[0], one[2] == "advantages", abs(one[1])))
    for _, rows, what in fitting[:4]:
        if what == "rewards":
            yield moved(rows)
        else:
            side = f"{abs(rows)}-rows-{'late' if rows > 0 else 'early'}"
            yield _order(f"advantages-{side}", _late(rows, "advantage"), _shifted(rows))
    for unit, words in (
        ("group", "within each group the advantages, or the rewards, are in another order than the rows"),
        ("step", "the advantages of the step are in another order than its rows"),
    ):
        if sum(_order_bits(*step, unit) for step in steps) >= ENOUGH_BITS:
            yield _order(f"another-order-in-{unit}", words, _reordered(unit))


# Blocks.


def _blocks(size: int, offset: int) -> Hypothesis:
    after = f", the first of which ends after {offset}" if offset else ""
    return Hypothesis(
        name=f"groups-of-{size}-rows" + (f"-from-{offset}" if offset else ""),
        code=PARTITION,
        stage="advantages",
        words=f"the advantages compare blocks of {size} consecutive rows{after}, not the rows of a group_id",
        remedy=PARTITION_REMEDY,
        rows=lambda batch, _: (
            None if batch.groups is None else regrouped(batch, (places(batch) - offset) % len(batch) // size)
        ),
        references=PARTITION_REFERENCES,
    )


def _solve_blocks(trials: Trials) -> Iterator[Hypothesis]:
    """Blocks whose logged advantages add up to 0, small ones first: those of several of them do so, too."""
    steps = _steps(trials)
    if not steps:
        return
    evaluation, logged_N = max(steps, key=lambda step: int((step[1] != 0).sum()))
    count, found = len(logged_N), 0
    _, radius_N = _values(evaluation)
    error_N = radius_N + rounding.stored(logged_N).likely
    total, error = (torch.cat([x_N.new_zeros(1), x_N.cumsum(0)]) for x_N in (logged_N, error_N))
    some = torch.cat([total.new_zeros(1), (logged_N.abs() > 4 * error_N).double().cumsum(0)])
    usual = usual_size(evaluation.batch)
    for size in range(2, min(count, LARGEST_STEP) + 1):
        gone = (total[size:] - total[:-size]).abs() <= 2 * (error[size:] - error[:-size]) + 1e-12 * count
        full = (some[size:] - some[:-size]) > 1
        for offset in range(size):
            here, used = gone[offset::size], full[offset::size]
            if not bool(here.all()) or int(used.sum()) < 2 or (size, offset) == (usual, 0):
                continue
            yield _blocks(size, offset)
            found += 1
            if found == 6:
                return


# A line.


def _ends(unit_N: Tensor, value_N: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the smallest and the largest value of each unit, ``[U]`` each."""
    order_N = _sorted(unit_N, value_N)
    offsets = seg.offsets_of(torch.bincount(unit_N))
    filled = offsets.diff() > 0
    return order_N[offsets[:-1][filled]], order_N[offsets[1:][filled] - 1]


def _line(unit: str, evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Factor and offset of each row's unit, through the rows of its extreme values; and the radius, ``[N]`` each."""
    unit_N = _units(evaluation.batch, unit)
    if unit_N is None or not len(unit_N):
        return None
    unit_N = torch.unique(unit_N, return_inverse=True)[1]
    value_N, radius_N = _values(evaluation)
    low_U, high_U = _ends(unit_N, value_N)
    span_U = value_N[high_U] - value_N[low_U]
    factor_U = torch.where(span_U > 0, (logged_N[high_U] - logged_N[low_U]) / span_U, 0.0)
    offset_U = logged_N[low_U] - factor_U * value_N[low_U]
    own_N = factor_U[unit_N].abs() * radius_N + rounding.stored(logged_N).likely
    return factor_U[unit_N], offset_U[unit_N], own_N + torch.maximum(own_N[low_U], own_N[high_U])[unit_N]


def _on_line(unit: str) -> AdvantagesEdit:
    def edit(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius] | None:
        found = _line(unit, evaluation, _told(evaluation, logged_N))
        if found is None:
            return None
        factor_N, offset_N, radius_N = found
        return factor_N * _values(evaluation)[0] + offset_N, Radius.of(radius_N)

    return edit


def _spare(evaluation: Evaluation, unit: str) -> int:
    """Different values beyond two of each unit."""
    unit_N = _units(evaluation.batch, unit)
    if unit_N is None:
        return 0
    pairs = torch.stack([unit_N.double(), _values(evaluation)[0].float().double()])
    count_U = torch.bincount(torch.unique(pairs, dim=1)[0].long())
    return int((count_U - 2).clamp(min=0).sum())


_LINE_UNITS = {"step": "in every step", "rank": "on every rank", "group": "in every group"}


def _solve_line(trials: Trials) -> Iterator[Hypothesis]:
    steps = _steps(trials)
    for unit, where in _LINE_UNITS.items():
        if sum(_spare(evaluation, unit) for evaluation, _ in steps) < SPARE:
            continue
        lines = [(evaluation, logged_N, _line(unit, evaluation, logged_N)) for evaluation, logged_N in steps]
        known = [(evaluation, logged_N, line) for evaluation, logged_N, line in lines if line is not None]
        if known:
            yield _lined(unit, where, known)


def _lined(
    unit: str, where: str, lines: Sequence[tuple[Evaluation, Tensor, tuple[Tensor, Tensor, Tensor]]]
) -> Hypothesis:
    factor, offset = (torch.cat([line[place] for _, _, line in lines]) for place in (0, 1))
    is_factor = float((factor.max() - factor.min()).abs()) <= 1e-5 * float(factor.abs().max())
    of_whitened = whitens(lines[0][0].objective)
    name = f"line-in-{unit}"
    if all(_is_standardised(evaluation, logged_N, unit) for evaluation, logged_N, _ in lines):
        over = {"step": "all rows of the step", "rank": "the rows of each rank", "group": "the rows of each group"}
        name = f"normalised-again-over-{unit}"
        words = f"the advantages are centred and divided by their standard deviation once more, over {over[unit]}"
    elif is_factor and float(offset.abs().max()) <= 1e-5:
        name, words = "constant-factor", f"the advantages are {float(factor.mean()):.6g} times the recomputed value"
    elif of_whitened:
        words = f"{where} the advantages are whitened with another mean and variance than those of the trained tokens"
    else:
        words = (
            f"{where} the advantages are a straight line of the recomputed ones (times {_range(factor)}, plus "
            f"{_range(offset)})"
        )
    return Hypothesis(
        name=name,
        code="RDA010" if of_whitened and name == f"line-in-{unit}" else "RDA004",
        stage="advantages",
        words=words,
        remedy=_UPSTREAM,
        advantages=_on_line(unit),
    )


def _range(x: Tensor) -> str:
    low, high = float(x.min()), float(x.max())
    return f"{low:.4g}" if high - low <= 1e-4 * abs(high) else f"{low:.4g} to {high:.4g}"


def _is_standardised(evaluation: Evaluation, logged_N: Tensor, unit: str) -> bool:
    """True if the logged advantages of each unit have a mean of 0 and a standard deviation of 1, or below by epsilon."""
    unit_N = _units(evaluation.batch, unit)
    assert unit_N is not None  # it has a line
    for one in torch.unique(unit_N).tolist():
        here = logged_N[unit_N == one]
        if len(here) < 2 or bool((here == here[0]).all()):
            continue
        if abs(float(here.mean())) > 1e-4 or not any(0.99 < float(here.std(correction=d)) < 1.0001 for d in (0, 1)):
            return False
    return True


# The divisor.

_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)


def _divided(objective: Objective) -> bool:
    rule = objective.advantage
    return rule.spec.is_standard_score and rule.scale != "none" and not (rule.whitened or rule.normalised)


def _solve_divisor(trials: Trials) -> Iterator[Hypothesis]:
    """Epsilon is what a divisor is above its standard deviation, whose groups all have to give one number."""
    steps = _steps(trials)
    if not steps:
        return
    recorded = steps[0][0].objective.advantage
    for biased, in_root in sorted(product((False, True), repeat=2), key=lambda one: one[0] != recorded.biased_std):
        low, high, sizes = -inf, inf, set[float]()
        for evaluation, logged_N in steps:
            bare = changing("advantage", epsilon=0.0, biased_std=biased, epsilon_in_root=False)(evaluation.objective)
            unit_N = _rows_of(
                evaluation, evaluation.batch, replace(bare, advantage=replace(bare.advantage, single=False))
            )
            rows = evaluation.rows
            if unit_N is None or rows is None or rows.baseline_N is None:
                return
            centred_N = rows.score_N - rows.baseline_N
            _, radius_N = _values(evaluation)
            deviation_N, divisor_N = centred_N / unit_N, centred_N / logged_N
            error_N = divisor_N * (2 * radius_N + rounding.stored(logged_N).likely) / logged_N.abs()
            if in_root:
                error_N, deviation_N, divisor_N = 2 * divisor_N * error_N, deviation_N**2, divisor_N**2
            told_N = (logged_N.abs() > 1e-3) & (centred_N.abs() > 1e-6) & divisor_N.isfinite() & deviation_N.isfinite()
            if not bool(told_N.any()):
                continue
            over_N = (divisor_N - deviation_N)[told_N]
            low = max(low, float((over_N - error_N[told_N]).max()))
            high = min(high, float((over_N + error_N[told_N]).min()))
            sizes |= set(deviation_N[told_N].float().tolist())
        epsilon = _simplest(low, high, (recorded.epsilon, *_EPSILONS))
        if epsilon is None or epsilon < 0 or (epsilon not in _EPSILONS and len(sizes) < SPARE):
            continue
        if (biased, in_root, epsilon) != (recorded.biased_std, recorded.epsilon_in_root, recorded.epsilon):
            yield _divisor(epsilon, recorded.epsilon, biased=biased, in_root=in_root)


@cache
def _divisor(epsilon: float, recorded: float, *, biased: bool, in_root: bool) -> Hypothesis:
    parts, words = ["biased-std"] if biased else [], ["the standard deviation divides by n, not by n - 1"] * biased
    if epsilon != recorded or in_root:
        text = _plain(epsilon)
        parts.append(f"epsilon-{text}" + ("-in-root" if in_root else ""))
        where = "added to the variance before the root" if in_root else "beside the standard deviation"
        words.append(f"epsilon is {text}, {where}")
    return Hypothesis(
        name="-".join(parts) or "unbiased-std",
        code="RDA004",
        stage="advantages",
        words=", and ".join(words) or "the standard deviation divides by n - 1, not by n",
        remedy=_UPSTREAM,
        objective=changing("advantage", epsilon=epsilon, biased_std=biased, epsilon_in_root=in_root),
    )


def _plain(number: float) -> str:
    """``1e-4`` rather than ``0.0001`` or ``1e-04``."""
    text = f"{number:.7g}" if number == 0 or abs(number) >= 0.01 else f"{number:.6e}"
    mantissa, _, exponent = text.partition("e")
    return text if not exponent else f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


# Weights of reward functions.


def _terms(batch: "RolloutBatch") -> dict[str, Tensor]:
    """What a reward may be made of: the reward functions, or the reward, and the length of the response."""
    terms = dict(batch.rewards) or {"reward": batch.per_row["reward"]}
    return {name: x_N.nan_to_num(0.0) for name, x_N in terms.items()} | {"length": batch.rows.diff().double()}


def _solve_weights(trials: Trials) -> Iterator[Hypothesis]:
    steps = _steps(trials)
    if not steps:
        return
    names = list(_terms(steps[0][0].batch))
    objective = steps[0][0].objective
    bare = replace(objective, advantage=replace(objective.advantage, scale="none", single=False), kl_reward=None)
    equations, sides = [], []
    scaled = objective.advantage.spec.divides and objective.advantage.scale != "none"
    for evaluation, logged_N in steps:
        batch = evaluation.batch
        columns = [
            _rows_of(
                evaluation,
                replace(batch, per_row={**batch.per_row, "reward": term_N}),
                bare,
            )
            for term_N in _terms(batch).values()
        ]
        unit_N = _units(batch, "step" if objective.advantage.scale == "batch" else "group")
        known = [x_N for x_N in columns if x_N is not None]
        if len(known) < len(names) or unit_N is None:
            return
        made_NF = torch.stack(known, dim=1).double()
        for one in torch.unique(unit_N).tolist() if scaled else [None]:
            here = slice(None) if one is None else unit_N == one
            a_NF, y_N = made_NF[here], logged_N[here]
            size = float(y_N.norm())
            if scaled and not size:
                continue
            # Of a unit with a divisor of its own only the direction tells.
            equations.append(a_NF - torch.outer(y_N, y_N @ a_NF) / size**2 if scaled else a_NF)
            sides.append(y_N if not scaled else (y_N @ a_NF)[None])
    if not equations or sum(map(len, equations)) < len(names) + SPARE:
        return
    yield from _weights(names, torch.cat(equations), sides, scaled=scaled, recorded=objective.reward_weights)


def _weights(
    names: Sequence[str],
    equations: Tensor,
    sides: Sequence[Tensor],
    *,
    scaled: bool,
    recorded: tuple[float, ...] | None,
) -> Iterator[Hypothesis]:
    if not scaled:
        yield _weighted(torch.linalg.lstsq(equations, torch.cat(list(sides))[:, None]).solution[:, 0], names)
        return
    weight_F = torch.linalg.svd(equations, full_matrices=False).Vh[-1]
    weight_F = weight_F * torch.cat(list(sides)).matmul(weight_F).sum().sign()
    for place, value in enumerate(recorded or (1.0,) * len(names)):
        if abs(float(weight_F[place])) > 1e-9 and value:
            yield _weighted(weight_F * (value / weight_F[place]).abs(), names)


def _weighted(weight_F: Tensor, names: Sequence[str]) -> Hypothesis:
    near = [float(f"{weight:.3g}") for weight in weight_F.tolist()]
    weights = [a if abs(a - b) <= 1e-4 * max(abs(b), 1e-3) else b for a, b in zip(near, weight_F.tolist(), strict=True)]
    weights = [0.0 if abs(weight) < 1e-7 else weight for weight in weights]

    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        terms = _terms(batch)
        if list(terms) != list(names):
            return None
        reward_N = torch.stack([weight * x_N for weight, x_N in zip(weights, terms.values(), strict=True)]).sum(dim=0)
        return replace(batch, per_row={**batch.per_row, "reward": reward_N})

    parts = [f"{name} {weight:.4g}" for name, weight in zip(names[:-1], weights, strict=False)]
    return Hypothesis(
        name="reward-weights-" + "-".join(f"{weight:.4g}" for weight in weights),
        code="RDA004",
        stage="advantages",
        words=f"the rewards behind the advantages are weighted {', '.join(parts)}"
        + (f", with {weights[-1]:.4g} for each token of the response" if weights[-1] else ", and not as recorded"),
        remedy=_STATE,
        rows=edit,
        columns=frozenset({"rewards"}),
    )


# The KL penalty in the reward.


def _linear_penalty(objective: Objective) -> bool:
    term, rule = objective.kl_reward, objective.advantage
    linear = rule.spec.name in ("rloo", "raw") and not (rule.normalised or rule.whitened)
    return term is not None and term.coef != 0 and term.coef_metric is None and rule.sums_tokens and linear


def _solve_penalty(trials: Trials) -> Iterator[Hypothesis]:
    low, high, term, count = -inf, inf, None, 0
    for evaluation, logged_N in _steps(trials):
        term = evaluation.objective.kl_reward
        without_N = _rows_of(evaluation, evaluation.batch, replace(evaluation.objective, kl_reward=None))
        if without_N is None or term is None:
            return
        value_N, radius_N = _values(evaluation)
        slope_N = value_N - without_N
        error_N = 2 * radius_N + rounding.stored(logged_N).likely
        told_N = slope_N.abs() > 8 * error_N
        if not bool(told_N.any()):
            continue
        factor_N = ((logged_N - without_N) / slope_N)[told_N]
        around_N = (error_N / slope_N.abs())[told_N]
        low, high = max(low, float((factor_N - around_N).max())), min(high, float((factor_N + around_N).min()))
        count += int(told_N.sum())
    factor = _simplest(low, high, (0.0, 2.0, -1.0))
    if factor is None or term is None or factor == 1 or count < SPARE:
        return
    coef = factor * term.coef
    yield Hypothesis(
        name=f"kl-reward-times-{factor:g}",
        code="RDA004" if factor < 0 else "RDI014",
        stage="advantages",
        words={
            0.0: "the reward has no KL penalty, although a coefficient is recorded",
            -1.0: "the KL penalty enters the reward with the opposite sign, and rewards a distance from the reference",
        }.get(
            factor, f"the KL penalty in the reward has a coefficient of {coef:.6g}, {factor:.6g} times the recorded one"
        ),
        remedy=_STATE if factor >= 0 else _UPSTREAM,
        objective=changing("kl_reward", coef=coef),
        columns=frozenset({"old_log_probs", "ref_log_probs", "response_mask"}),
    )


def _centres(objective: Objective) -> bool:
    rule = objective.advantage
    return (rule.spec.is_standard_score or rule.spec.name == "rloo") and not (rule.whitened or rule.normalised)


def _family(
    name: str,
    code: str,
    words: str,
    solve: Callable[[Trials], Iterator[Hypothesis]],
    applies: Callable[[Objective], bool],
    *columns: str,
) -> Family:
    return Family(name, code, "advantages", words, solve, applies, frozenset(columns))


ADVANTAGE_FITS = (
    _family("divisor", "RDA004", "the advantages are divided by another standard deviation, or with another epsilon, which "
            "is solved", _solve_divisor, _divided),
    _family("reward-weights", "RDA004", "the reward functions, or the length of a response, have other weights, which are solved",
            _solve_weights, _has_rows, "rewards"),
    _family("kl-reward-coefficient", "RDI014", "the KL penalty in the reward has another coefficient, which is solved: none, "
            "twice, or of the opposite sign", _solve_penalty, _linear_penalty,
            "old_log_probs", "ref_log_probs", "response_mask"),
    _family("blocks", PARTITION, "the advantages compare consecutive rows, in blocks of any size from any row on, not the rows "
            "of a group_id", _solve_blocks, _centres),
    _family("order", "RDI004", "rewards or advantages are some rows late or early, or in another order within their groups or "
            "their step", _solve_order, _has_rows),
    _family("line", "RDA004", "the advantages are a straight line of the recomputed ones, in every step, rank or group: "
            "scaled, or normalised once more", _solve_line, _has_rows, "rank"),
)  # fmt: skip
