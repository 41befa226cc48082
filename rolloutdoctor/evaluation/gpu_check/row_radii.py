"""How far the first pass of an evaluation may differ between two processors: scores, advantages, weights.

What an estimator makes of a small change is measured: the first pass is done again in float64 with columns moved, in
whole rows, all of them one way and then some up and others down. A value's radius is twice the largest response among
the rows that it is compared with; responses to different columns add up. Two things are moved:

- what comes from `exp` in the dtype of the tokens, the KL inside the reward, importance weights, and the probabilities
  of optimal token baselines: by as much as two processors leave open (`token_radii`), every token of a row;
- the rewards, by `PROBE` of the largest. Statistics are float64 on both sides (or float32, where TRL's own are asked
  for), of the same rewards, but sums are taken
  in different orders: n additions lose ``n 2^-53`` of the largest score. That is far less than `PROBE`, and too little
  to be seen in float64 itself; so the response is taken at `PROBE` and scaled down. Estimators are linear that close.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.gpu_check.shifted import Source, apart, plain, signs, together
from rolloutdoctor.evaluation.gpu_check.token_radii import (
    EXP_UNITS,
    ROUNDINGS,
    difference,
    kl_as_shift,
    log_shift,
    unit_of,
)
from rolloutdoctor.evaluation.rows import RowResult, row_parts
from rolloutdoctor.evaluation.scores import reward_kl_tokens
from rolloutdoctor.objective.objective import KlTerm, Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import CannotComputeError

DRAWS = 2
DOUBLE = unit_of(torch.float64)
PROBE = 2.0**-36

Parts = Mapping[str, RowResult | None]


def row_radii(
    batch: RolloutBatch, objectives: Mapping[str, Objective], dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Radii of the first pass of each objective, by the names of `RowResult`'s values; others are the same to the bit.

    Args:
        batch: the step, on the CPU.
        objectives: name to what the trainer computes at this step.
        dtype: of the token values.
    """
    batch, unit = plain(batch, dtype), unit_of(dtype)
    statistics = {name: unit_of(torch.float32) if one.advantage.single else DOUBLE for name, one in objectives.items()}
    # A movement far below the rounding of float32 statistics shows in exact ones alone.
    objectives = {
        name: replace(one, advantage=replace(one.advantage, single=False)) for name, one in objectives.items()
    }
    parts = row_parts(batch, objectives, torch.float64)
    sources = _sources(batch, list(objectives.values()), unit)
    by_source = [_again(source.moved, objectives) for source in sources]
    size = max((_size(batch, part) for part in parts.values() if part is not None), default=0.0)
    probed = _again(_with_rewards(batch, size * PROBE), objectives)
    # Eight times, for the sums of a mean, a variance and their like on two sides.
    additions = 8 * _additions(batch)
    found = least_row_radii(batch, parts, dtype)
    for name, part in parts.items():
        share = additions * statistics[name] / PROBE
        radii = found.get(name, {})
        for field in radii:
            here = getattr(part, field)
            for again, scale in [*((each, 2.0) for each in by_source), (probed, 2 * share)]:
                widest = _widest(batch, here, _values(again, name, field), per_token=field.endswith("_T"))
                radii[field] = radii[field] + scale * widest
    return found


def least_row_radii(batch: RolloutBatch, parts: Parts, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Radii that no movement shows, those of the last operations: what lies within them lies within `row_radii`."""
    there = {name: part for name, part in parts.items() if part is not None}
    size = max((_size(batch, part) for part in there.values()), default=0.0)
    return {name: _own(batch, part, size, unit_of(dtype)) for name, part in there.items()}


def _again(moved: Sequence[RolloutBatch] | Iterator[RolloutBatch], objectives: Mapping[str, Objective]) -> list[Parts]:
    """The first pass of moved steps; one where the trainer fails says nothing: that does not hang on rounding."""
    found: list[Parts] = []
    for batch in moved:
        try:
            found.append(row_parts(batch, objectives, torch.float64))
        except CannotComputeError:
            continue
    return found


def _values(again: Sequence[Parts], name: str, field: str) -> list[Tensor]:
    parts = [parts[name] for parts in again]
    return [getattr(part, field) for part in parts if part is not None]


def _own(batch: RolloutBatch, part: RowResult, size: float, unit: float) -> dict[str, Tensor]:
    rounding = 8 * _additions(batch) * DOUBLE
    radii = {"score_N": rounding * (part.score_N.abs() + size)}
    for name in ("advantage_N", "baseline_N", "advantage_T"):
        value = getattr(part, name)
        if value is not None:
            radii[name] = rounding * (value.abs() + (size if name == "baseline_N" else 0.0))
    if part.weight_T is not None:
        radii["weight_T"] = ROUNDINGS * unit * part.weight_T.double().abs()
    return {name: radius.nan_to_num(0.0, 0.0, 0.0) for name, radius in radii.items()}


def _sources(batch: RolloutBatch, objectives: Sequence[Objective], unit: float) -> list[Source]:
    """The columns from which `exp` comes into the first pass, moved."""
    shifts: dict[str, Tensor] = {}
    for objective in objectives:
        term = objective.kl_reward
        if term is not None and term.at_step({}).coef and batch.has(term.log_probs, "ref_log_probs"):
            shifts["ref_log_probs"] = _kl_shift(batch, term, unit)
        if objective.correction.weights is not None and batch.has("old_log_probs", "rollout_log_probs"):
            log_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
            shifts["rollout_log_probs"] = log_shift(log_T, unit)
        if objective.advantage.spec.takes_weights and batch.has("old_log_probs", "sum_pi_squared"):
            # What the variance of a path is made of: 1 - 2 p + sum pi^2.
            grown_T = batch.column("old_log_probs").double().exp()
            size_T = 1 + 2 * grown_T + batch.column("sum_pi_squared").double().abs()
            shifts["sum_pi_squared"] = (2 * EXP_UNITS * grown_T + ROUNDINGS * size_T).nan_to_num(0.0, 0.0, 0.0) * unit
    return [
        Source(name, [*together(batch, name, shift_T), *apart(batch, name, shift_T, times=DRAWS, by_row=True)])
        for name, shift_T in shifts.items()
    ]


def _kl_shift(batch: RolloutBatch, term: KlTerm, unit: float) -> Tensor:
    """How far the reference's log-probs must move, away from those they are compared with."""
    u_T = batch.column(term.log_probs).double() - batch.column("ref_log_probs").double()
    return -kl_as_shift(term, u_T, unit)


def _with_rewards(batch: RolloutBatch, shift: float) -> Iterator[RolloutBatch]:
    """The step with the rewards of rows moved, and the values of the critic the other way."""
    for sign_N in signs(len(batch), DRAWS):
        moved_N = sign_N * shift
        # Over a row they add up to the same.
        moved_T = seg.expand(moved_N / batch.rows.diff().clamp(min=1), batch.rows)
        per_token = {name: batch.per_token[name] for name in batch.per_token}
        for name, moved in (("token_rewards", moved_T), ("values", -seg.expand(moved_N, batch.rows))):
            if name in per_token:
                per_token[name] = per_token[name].double() + moved
        per_row = dict(batch.per_row)
        if "reward" in per_row:
            per_row["reward"] = per_row["reward"] + moved_N
        rewards = {name: reward_N + moved_N for name, reward_N in batch.rewards.items()}
        yield replace(batch, per_row=per_row, per_token=per_token, rewards=rewards)


def _additions(batch: RolloutBatch) -> float:
    """Additions one after another: over the rows of a group and the tokens of a row; sums over a step are trees."""
    rows = max(batch.groups.sizes, default=1) if batch.groups is not None else 1
    longest = int(batch.rows.diff().max()) if len(batch) else 1
    return rows + longest + 64 + max(len(batch), batch.tokens) / 2**14


def _size(batch: RolloutBatch, part: RowResult) -> float:
    """The largest score that a row can have by its parts: rewards, those of its tokens, penalties and values."""

    def size(x: Tensor) -> Tensor:
        return x.double().abs().nan_to_num(0.0, 0.0, 0.0)

    sizes_N = size(part.score_N)
    for x_N in (*batch.rewards.values(), *(x for name, x in batch.per_row.items() if name.startswith("reward"))):
        sizes_N = sizes_N + size(x_N)
    columns = [batch.per_token[name] for name in ("token_rewards", "values") if name in batch.per_token]
    term = part.objective.kl_reward
    if term is not None and batch.has(term.log_probs, "ref_log_probs"):
        kl_T = reward_kl_tokens(batch, part.objective, torch.float64)
        columns += [] if kl_T is None else [term.coef * kl_T]
    for x_T in columns:
        sizes_N = sizes_N + seg.total(size(x_T), batch.rows)
    return float(sizes_N.max()) if len(sizes_N) else 0.0


def _widest(batch: RolloutBatch, here: Tensor, moved: Sequence[Tensor], *, per_token: bool) -> Tensor:
    """The largest response among the rows that a value is compared with; of tokens, among those of its row."""
    widest = torch.zeros(here.shape, dtype=torch.float64)
    for theirs in moved:
        widest = torch.maximum(widest, difference(theirs, here))
    if per_token:
        return seg.expand(seg.high(widest, batch.rows).clamp(min=0), batch.rows)
    groups = batch.groups
    if groups is None or not len(groups):
        return widest
    return seg.high(widest[groups.order_N], groups.offsets)[groups.index_N]
