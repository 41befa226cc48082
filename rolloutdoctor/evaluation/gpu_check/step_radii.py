"""How far the second pass of an evaluation may differ between two processors: every sum of every row.

Both sides are given the same row values, so each token stands for itself. A token's radius has three parts:

- *response*: the pass is done again in float64 with the log-probs moved, up and down, by what two processors' `exp`
  leave open (`token_radii.log_shift`). How far the term and its derivative move is what another `exp` makes of them,
  whatever the objective: it contains its Lipschitz constant, and the whole of a term that lies so near to a bound that
  it falls on its other side, be it clipped, rejected or chosen. Columns are moved one after another, and the responses
  added up. Where tokens are held against each other (a mean over the micro-batch, a quantile), they are also moved
  apart.
- *rounding*: `ROUNDINGS` units of every product that the term is put together from.
- of the KL, its own radius, because it cancels (`token_radii.kl_radii`).

What lies within `least_radii`, the part that follows from the value alone, need not be looked at: only the other rows
go through the responses, which take as long as some twenty evaluations.

A sum of n tokens has the sum of their radii, and ``2 n 2^-53 sum |x|`` for the order of a float64 sum. It is a bound
for the worst case: no rounding is taken for random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import Block, blocks_of
from rolloutdoctor.evaluation.general import GeneralEvaluator
from rolloutdoctor.evaluation.gpu_check.shifted import Source, apart, plain, together
from rolloutdoctor.evaluation.gpu_check.token_radii import (
    EXP_UNITS,
    ROUNDINGS,
    difference,
    kl_radii,
    log_shift,
    product_radius,
    square_radius,
    unit_of,
)
from rolloutdoctor.evaluation.layouts import layout_of
from rolloutdoctor.evaluation.rows import RowResult, in_separate_batches
from rolloutdoctor.formulas.losses.levels import row_mean
from rolloutdoctor.formulas.losses.selections import SELECTIONS
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import CannotComputeError

WIDE = torch.float64
DOUBLE = unit_of(WIDE)

Each = TypeVar("Each")

Values = tuple[TokenInputs, PolicyTerm, Tensor | None, Tensor]
"""What `GeneralEvaluator.values` gives."""

Get = Callable[[GeneralEvaluator, Block, Values], Tensor]
"""A value per token of a block."""

Response = Callable[[Get], Tensor]
"""How far such a value moves."""


@dataclass(frozen=True, eq=False)
class StepRadii:
    """Radii of the second pass of one objective.

    Attributes:
        rows: name in `TokenSums` to ``[N]`` float64.
        tokens: name in `PerToken` to the radii of the trained tokens of wanted rows, block by block; empty if these are
            not wanted.
    """

    rows: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)


class Derivative(NamedTuple):
    """A derivative and its radius, ``[t]`` each."""

    value_T: Tensor
    radius_T: Tensor


def step_radii(
    batch: RolloutBatch, parts: Mapping[str, RowResult], dtype: torch.dtype, per_token: frozenset[str], open_N: Tensor
) -> dict[str, StepRadii]:
    """Radii of the second pass of each objective; the first is the one that the others are compared with.

    Args:
        batch: the step, on the CPU.
        parts: the first pass of each objective, on the CPU.
        dtype: of the token values.
        per_token: objectives whose token values are wanted.
        open_N: ``[N]`` bool, rows whose radii are wanted.
    """
    batch = plain(batch, dtype)
    sources = _sources(batch, [part.objective for part in parts.values()], unit_of(dtype))
    steps = [batch, *(moved for source in sources for moved in source.moved)]
    layouts = {each: layout_of(batch, separate=each) for each in (False, True)}

    def passed(part: RowResult, step: RolloutBatch) -> GeneralEvaluator:
        layout = layouts[in_separate_batches(step, part.objective)]
        return GeneralEvaluator(part, step, layout, WIDE, per_token=False)

    objectives = {}
    for name, part in parts.items():
        moved = [_tried(partial(passed, part, step)) for step in steps[1:]]
        ways = _by_source(sources, moved)
        objectives[name] = _Radii(passed(part, batch), ways, dtype, per_token=name in per_token)
    for whole in zip(*(blocks_of(step, WIDE) for step in steps), strict=True):
        parts_of = [block.of_rows(open_N[block.rows]) for block in whole]
        blocks = [block for block in parts_of if block is not None]
        if not blocks:
            continue
        reference: Derivative | None = None
        for radii in objectives.values():
            derivative = radii.add(blocks[0], _by_source(sources, blocks[1:]), reference)
            reference = derivative if reference is None else reference
    return {name: radii.result() for name, radii in objectives.items()}


def _tried(make: Callable[[], GeneralEvaluator]) -> GeneralEvaluator | None:
    try:
        return make()
    except CannotComputeError:
        # Where the trainer fails does not hang on rounding alone.
        return None


def _by_source(sources: Sequence[Source], values: Sequence[Each]) -> list[list[Each]]:
    """Give one value for each moved step to its source."""
    left = iter(values)
    return [[next(left) for _ in source.moved] for source in sources]


def _sources(batch: RolloutBatch, objectives: Sequence[Objective], unit: float) -> list[Source]:
    """The columns from which `exp` comes into the second pass, moved."""
    coupled = any(map(_is_coupled, objectives))
    pairs: set[tuple[str, str]] = {("policy_log_probs", objective.surrogate.old) for objective in objectives}
    if coupled:
        pairs |= {("old_log_probs", "policy_log_probs"), ("old_log_probs", "rollout_log_probs")}
        pairs |= {("rollout_log_probs", "old_log_probs")}
    shifts: dict[str, Tensor] = {}
    for name, other in sorted(pairs):
        stored = batch.stored_name(name)
        if stored is None or not batch.has(other) or stored == batch.stored_name(other):
            continue
        log_T = batch.column(name).double() - batch.column(other).double()
        shift_T = log_shift(log_T, unit)
        shifts[stored] = torch.maximum(shifts[stored], shift_T) if stored in shifts else shift_T
    if any(objective.surrogate.kind.startswith("dppo_") for objective in objectives):
        # The distance that it bounds adds logs of 1 - p + 1e-8, 19 in size at most.
        shifts = {name: shift_T * (1 + 19 * ROUNDINGS / EXP_UNITS) for name, shift_T in shifts.items()}
    found = []
    for name, shift_T in shifts.items():
        moved = [*together(batch, name, shift_T)]
        moved += [*apart(batch, name, shift_T, times=1, by_row=False)] if coupled else []
        found.append(Source(name, moved))
    if "entropy" in batch.per_token and any(gate.kind == "high_entropy" for each in objectives for gate in each.gates):
        shift_T = 4 * unit_of(torch.float32) * batch.column("entropy").double().abs().nan_to_num(0.0, 0.0, 0.0)
        found.append(Source("entropy", [*apart(batch, "entropy", shift_T, times=1, by_row=False)]))
    return found


def _is_coupled(objective: Objective) -> bool:
    """True if more than its own log-ratio decides what becomes of a token."""
    rule = objective.surrogate
    more = objective.gates or objective.policy_correction is not None or objective.sampler_correction is not None
    return bool(more) or rule.kind in SELECTIONS or rule.kind.startswith("dppo_")


class _Radii:
    """The radii of one objective, which grow block by block."""

    def __init__(
        self, one: GeneralEvaluator, moved: list[list[GeneralEvaluator | None]], dtype: torch.dtype, *, per_token: bool
    ) -> None:
        self._one, self._moved, self._per_token = one, moved, per_token
        self._unit, self._tiny = unit_of(dtype), torch.finfo(dtype).tiny
        self._found = StepRadii()
        attributes = {"weight_N": "weight_N", "policy_weight_N": "of_policy_N", "counted_N": "counted_N"}
        for name, attribute in attributes.items():
            value_N = getattr(one, attribute)
            ways = [[getattr(way, attribute) for way in ways if way is not None] for ways in moved]
            self._found.rows[name] = 16 * DOUBLE * value_N.abs() + _response(value_N, ways)

    def result(self) -> StepRadii:
        """What was found."""
        rows = self._found.rows
        rows.setdefault("versus_dot_N", rows.get("grad_sq_N", torch.zeros(len(self._one.batch), dtype=WIDE)))
        if "kl_N" in rows:
            rows["kl_loss_N"] = rows["kl_N"] * abs(self._one.coef)
        return self._found

    def add(self, block: Block, moved: list[list[Block]], reference: Derivative | None) -> Derivative:
        """Add a block; `reference` is the derivative that this one's is compared with."""
        one, unit = self._one, self._unit
        seen = one.values(block)
        ways = [
            [(other, part, other.values(part)) for other, part in zip(others, parts, strict=True) if other is not None]
            for others, parts in zip(self._moved, moved, strict=True)
        ]

        def response(get: Get) -> Tensor:
            return _response(get(one, block, seen), [[get(*way) for way in each] for each in ways])

        given, term, kl_T, grad_T = seen
        size_T, ratio_size_T = self._sizes(given, term)
        least_T = self._tiny * (1 + size_T)
        of_value_T = response(lambda _, __, values: values[1].value_T) + ROUNDINGS * unit * size_T + least_T
        self._sum(block, "policy_N", of_value_T, term.value_T)
        one_T = _at_one(given, term)
        at_one_T = response(lambda _, __, values: _at_one(values[0], values[1])) + ROUNDINGS * unit * one_T.abs()
        self._sum(block, "loss_at_ratio_one_N", at_one_T, one_T)
        weight_T, kl_weight_T = block.expand(one.policy_weight_N), block.expand(one.kl_weight_N)
        of_grad_T = response(lambda _, __, values: values[3])
        of_grad_T = of_grad_T + weight_T.abs() * (ROUNDINGS * unit * size_T + least_T)
        loss_T = weight_T * term.value_T
        of_loss_T = response(_policy_loss) + weight_T.abs() * (ROUNDINGS * unit * size_T + least_T)
        if kl_T is not None:
            of_kl_T, of_slope_T = self._of_kl(block, given)
            of_kl_T = of_kl_T + response(lambda _, __, values: _there(values[2]))
            self._sum(block, "kl_N", of_kl_T, kl_T)
            of_grad_T = of_grad_T + kl_weight_T.abs() * (of_slope_T + ROUNDINGS * unit * (kl_T.abs() + 1))
            loss_T = loss_T + kl_weight_T * kl_T
            of_loss_T = of_loss_T + kl_weight_T.abs() * (of_kl_T + ROUNDINGS * unit * kl_T.abs())
        of_grad_T = of_grad_T + ROUNDINGS * unit * grad_T.abs()
        derivative = Derivative(grad_T, of_grad_T)
        self._sum_derivative(block, derivative)
        self._sum_metrics(block, given, term, response)
        if reference is not None:
            self._compare(block, derivative, reference)
        if self._per_token:
            of_ratio_T = response(lambda _, __, values: values[1].ratio_T) + ROUNDINGS * unit * ratio_size_T
            kept = {"kl_T": torch.zeros_like(grad_T) if kl_T is None else of_kl_T, "ratio_T": of_ratio_T}
            kept |= {"advantage_T": ROUNDINGS * unit * given.advantage_T.abs(), "grad_T": of_grad_T}
            kept |= {"loss_T": of_loss_T + ROUNDINGS * unit * loss_T.abs()}
            for name, radius_T in kept.items():
                self._found.tokens.setdefault(name, []).append(radius_T)
        return derivative

    def _sizes(self, given: TokenInputs, term: PolicyTerm) -> tuple[Tensor, Tensor]:
        """What a policy term and its derivative are put together from, and what the ratio is, ``[t]`` each.

        Every kind multiplies the advantage with the gates, the ratio, and maybe the log-prob (which `at_one_T` shows)
        or the log-ratio; what it adds up is one of these.
        """
        rule, ratio_T = self._one.objective.surrogate, term.ratio_T.abs()
        carried_T = given.gated(given.advantage_T).abs()
        if rule.kind == "vespo":
            inside_T = _exponent(given, rule.numbers)
            return (term.value_T.abs() + term.slope_T.abs()) * inside_T, ratio_T * inside_T
        factor_T = 1 + given.log_ratio_T.abs()
        if rule.kind == "geo_mean" and given.gate_T is not None:
            # The log of a multiplier plus 1e-10 is 23 in size at most.
            factor_T = factor_T + 23
        size_T = (term.slope_T.abs() + carried_T * (1 + ratio_T)) * factor_T
        return size_T + term.value_T.abs() * factor_T + _at_one(given, term).abs(), ratio_T

    def _of_kl(self, block: Block, given: TokenInputs) -> tuple[Tensor, Tensor]:
        term = self._one.objective.kl_loss
        assert term is not None
        u_T = block.column(term.log_probs) - block.column("ref_log_probs")
        return kl_radii(term, u_T, given.log_ratio_T, self._unit, lambda x_T: row_mean(given, x_T))

    def _sum_derivative(self, block: Block, derivative: Derivative) -> None:
        grad_T, radius_T = derivative
        self._sum(block, "grad_l1_N", radius_T, grad_T)
        square_T, of_square_T = grad_T.square(), square_radius(grad_T, radius_T)
        self._sum(block, "grad_sq_N", of_square_T, square_T)
        miss_T = block.one_minus_p_squared_T
        # The miss is an `expm1`, squared.
        of_miss_T = 2 * (EXP_UNITS + ROUNDINGS) * self._unit * miss_T
        of_low_T = product_radius(square_T, of_square_T, miss_T, of_miss_T)
        self._sum(block, "logits_low_sq_N", of_low_T, square_T * miss_T)
        if self._one.has_logits:
            grown_T, pi_T = block.column("policy_log_probs").exp(), block.column("sum_pi_squared")
            spread_T = 1 - 2 * grown_T + pi_T
            of_spread_T = DOUBLE * (ROUNDINGS * (1 + pi_T.abs()) + (2 * EXP_UNITS + ROUNDINGS) * grown_T)
            of_exact_T = product_radius(square_T, of_square_T, spread_T, of_spread_T)
            # Of a maximum, both.
            self._sum(block, "logits_sq_N", torch.maximum(of_exact_T, of_low_T), square_T * (1 + pi_T.abs()))

    def _sum_metrics(self, block: Block, given: TokenInputs, term: PolicyTerm, response: Response) -> None:
        rule = self._one.objective.surrogate
        zero_T = torch.zeros_like(given.policy_T)
        low_T = response(lambda _, __, values: values[1].ratio_T < 1 - rule.clip_low)
        high_T = response(lambda _, __, values: values[1].ratio_T > 1 + rule.clip_high)
        self._sum(block, "low_clipped_N", low_T, zero_T)
        self._sum(block, "high_clipped_N", high_T, zero_T)
        for name in ("drift_T", "clipped_T", "capped_T", "logged_T"):
            value_T = getattr(term, name)
            if value_T is None:
                continue
            radius_T = response(partial(_metric, name))
            if value_T.is_floating_point():
                factor_T = self._sizes(given, term)[1] if name == "logged_T" else value_T.abs()
                radius_T = radius_T + ROUNDINGS * self._unit * factor_T
            self._sum(block, f"{name[:-1]}N", radius_T, value_T)

    def _compare(self, block: Block, mine: Derivative, theirs: Derivative) -> None:
        self._sum(block, "versus_l1_N", mine.radius_T + theirs.radius_T, mine.value_T - theirs.value_T)
        of_product_T = product_radius(mine.value_T, mine.radius_T, theirs.value_T, theirs.radius_T)
        self._sum(block, "versus_dot_N", of_product_T, mine.value_T * theirs.value_T)

    def _sum(self, block: Block, name: str, radius_T: Tensor, value_T: Tensor) -> None:
        """Add the radii of the tokens of each row, and what the order of their float64 sum leaves open."""
        rows = self._found.rows
        if name not in rows:
            rows[name] = torch.zeros(len(self._one.batch), dtype=WIDE)
        order_n = 2 * DOUBLE * block.runs.lengths.double()
        rows[name][block.rows] = block.per_row(radius_T) + order_n * block.per_row(value_T.double().abs())


def _response(here: Tensor, ways: Sequence[Sequence[Tensor]]) -> Tensor:
    """How far a value moves: at most with one source, and with all of them together."""
    total = torch.zeros(here.shape, dtype=WIDE)
    for moved in ways:
        widest = torch.zeros_like(total)
        for theirs in moved:
            widest = torch.maximum(widest, difference(theirs, here))
        total += widest
    return total


def _there(x_T: Tensor | None) -> Tensor:
    assert x_T is not None  # an objective has a KL term in every block, or in none
    return x_T


def _at_one(given: TokenInputs, term: PolicyTerm) -> Tensor:
    return given.gated(-given.advantage_T) if term.at_one_T is None else term.at_one_T


def _policy_loss(one: GeneralEvaluator, block: Block, values: Values) -> Tensor:
    return block.expand(one.policy_weight_N) * values[1].value_T


def _metric(name: str, one: GeneralEvaluator, block: Block, values: Values) -> Tensor:
    """What a metric counts of a block."""
    x_T: Tensor = getattr(values[1], name)
    return x_T if one.kept_T is None else x_T * block.packed(one.kept_T)


def _exponent(given: TokenInputs, numbers: Mapping[str, float]) -> Tensor:
    """What vespo adds up before its last `exp`: that many units its weight of a row is off, ``[t]``."""
    log_N = given.row_sum(given.log_ratio_T.clamp(-20.0, 20.0))
    if given.log_weight_N is not None:
        log_N = log_N + given.log_weight_N
    log_T = given.expand(log_N).clamp(-20.0, 20.0)
    power, decay = (max(abs(numbers[f"{name}_{side}"]) for side in ("pos", "neg")) for name in ("k", "lambda"))
    return 1 + decay + power * log_T.abs() + (decay + 1e-4) * log_T.exp() * EXP_UNITS
