"""What separates two evaluations of a step: numbers per row, which add up over any part of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult
from rolloutdoctor.evaluation.row_changes import ROUNDING, baseline_drift, is_change
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.tally import Sums, largest, ratio, smallest
from rolloutdoctor.results.findings import Measure


@dataclass(frozen=True)
class Change(Sums):
    """Counts and totals of a part of a run; loss and gradient of unmasked rows, unless said.

    Attributes:
        rows: of the part.
        live: rows with a trained token; all of them without a mask.
        groups: groups, counted at their first row.
        compared: rows whose advantage was computed on both sides.
        shifted: unmasked rows with another advantage.
        shifted_groups: groups with such a row, counted at the first of them.
        undefined: unmasked rows whose advantage is NaN on one side only.
        shift: absolute changes of the advantage.
        shift_max: the largest.
        flips: unmasked rows whose advantage has the other sign.
        drifted: unmasked rows with another baseline.
        drift: absolute changes of the baseline.
        drift_max: the largest.
        steps: steps whose loss was computed on both sides.
        tokens: trained tokens.
        policy: policy loss before.
        policy_after: policy loss after.
        kl_loss: KL loss before.
        kl_loss_after: KL loss after.
        kl: KL summed over trained tokens before.
        kl_after: the same after.
        l1: absolute derivatives before.
        l1_after: the same after.
        sq: squared derivatives before.
        sq_after: the same after.
        versus_l1: absolute differences of the derivatives.
        versus_dot: products of the derivatives.
        same: unmasked rows with the same advantage and in the same scopes, that have a weight on both sides.
        rescaled: of these, rows whose tokens have another weight in the loss.
        same_sq: squared derivatives of these rows before.
        same_dot: products of their derivatives.
        weight: their weights after over before.
        weight_low: the smallest of these.
        weight_high: the largest.
    """

    rows: float = 0.0
    live: float = 0.0
    groups: float = 0.0
    compared: float = 0.0
    shifted: float = 0.0
    shifted_groups: float = 0.0
    undefined: float = 0.0
    shift: float = 0.0
    shift_max: float = largest()
    flips: float = 0.0
    drifted: float = 0.0
    drift: float = 0.0
    drift_max: float = largest()
    steps: float = 0.0
    tokens: float = 0.0
    policy: float = 0.0
    policy_after: float = 0.0
    kl_loss: float = 0.0
    kl_loss_after: float = 0.0
    kl: float = 0.0
    kl_after: float = 0.0
    l1: float = 0.0
    l1_after: float = 0.0
    sq: float = 0.0
    sq_after: float = 0.0
    versus_l1: float = 0.0
    versus_dot: float = 0.0
    same: float = 0.0
    rescaled: float = 0.0
    same_sq: float = 0.0
    same_dot: float = 0.0
    weight: float = 0.0
    weight_low: float = smallest()
    weight_high: float = largest()

    @property
    def differs(self) -> bool:
        """True if any number is another."""
        losses = ((self.policy, self.policy_after), (self.kl_loss, self.kl_loss_after), (self.kl, self.kl_after))
        gone = any(one != other and not (one != one and other != other) for one, other in losses)
        return self.shifted > 0 or self.drifted > 0 or self.versus_l1 > 0 or self.rescaled > 0 or gone


ADDED = tuple(one.name for one in fields(Change) if "merge" not in one.metadata and one.name != "steps")
HIGHEST = tuple(one.name for one in fields(Change) if one.name.endswith(("_max", "_high")))
LOWEST = tuple(one.name for one in fields(Change) if one.name.endswith("_low"))


def row_changes(before: Evaluation, after: Evaluation) -> dict[str, Tensor]:
    """The fields of `Change` for every row and its advantages, ``[N]`` float64 each; `after` compares with `before`.

    Of an estimator with a time axis a row's advantage is the mean over its trained tokens, and its shift the mean of
    the absolute shifts.
    """
    batch = before.batch
    count = len(batch)
    one_N = torch.ones(count, dtype=torch.float64, device=batch.device)
    found = {"rows": one_N, "live": one_N}
    if before.rows is None or after.rows is None:
        return found
    length_N = before.rows.length_N
    live_N = one_N > 0 if length_N is None else length_N > 0
    found |= {"live": live_N.double(), "compared": one_N}
    found |= _advantage_changes(before, after, live_N)
    if before.tokens is None or after.tokens is None or length_N is None:
        return found
    one, other = before.tokens, after.tokens
    found |= {
        "tokens": length_N,
        "policy": one.policy_N * one.policy_weight_N,
        "policy_after": other.policy_N * other.policy_weight_N,
        "kl_loss": one.kl_loss_N * one.weight_N,
        "kl_loss_after": other.kl_loss_N * other.weight_N,
        "kl": one.kl_N,
        "kl_after": other.kl_N,
        "l1": one.grad_l1_N,
        "l1_after": other.grad_l1_N,
        "sq": one.grad_sq_N,
        "sq_after": other.grad_sq_N,
        "versus_l1": other.versus_l1_N,
        "versus_dot": other.versus_dot_N,
    }
    same_N = live_N & (found["shifted"] == 0)
    for weight_N in (one.weight_N, other.weight_N, one.policy_weight_N, other.policy_weight_N):
        same_N &= weight_N > 0
    for scope in ("policy", "kl"):
        inside_N = before.in_scope(getattr(before.objective, scope))
        same_N &= inside_N == after.in_scope(getattr(after.objective, scope))
    weight_N = torch.where(same_N, other.policy_weight_N / one.policy_weight_N, 0.0)
    of_kl_N = torch.where(same_N, other.weight_N / one.weight_N, 0.0)
    rescaled_N = same_N & (((weight_N - 1).abs() > ROUNDING) | ((of_kl_N - 1).abs() > ROUNDING))
    found |= {
        "same": same_N.double(),
        "rescaled": rescaled_N.double(),
        "same_sq": torch.where(same_N, one.grad_sq_N, 0.0),
        "same_dot": torch.where(same_N, other.versus_dot_N, 0.0),
        "weight": weight_N,
        "weight_low": torch.where(same_N, weight_N, math.inf),
        "weight_high": weight_N,
    }
    return found


def _advantage_changes(before: Evaluation, after: Evaluation, live_N: Tensor) -> dict[str, Tensor]:
    assert before.rows is not None
    assert after.rows is not None
    batch = before.batch
    one_N, other_N, gap_N = _row_advantages(before, after)
    undefined_N = live_N & (one_N.isnan() != other_N.isnan())
    shifted_N = live_N & (is_change(gap_N, one_N, other_N) | undefined_N)
    found = {
        "shifted": shifted_N.double(),
        "undefined": undefined_N.double(),
        "shift": torch.where(shifted_N & ~undefined_N, gap_N, 0.0),
        "flips": (shifted_N & (one_N * other_N < 0)).double(),
        "advantage": one_N,
        "advantage_after": other_N,
    }
    found["shift_max"] = found["shift"]
    if batch.groups is not None and len(batch):
        order_N, starts = batch.groups.order_N, batch.groups.offsets[:-1]
        found["groups"] = torch.zeros_like(found["shift"]).index_fill_(0, order_N[starts], 1.0)
        # Where in its group the first shifted row is: the place of the largest of 0 and N - position.
        place_N = torch.arange(len(batch), 0, -1, device=batch.device, dtype=torch.float64)
        first_G = seg.high(place_N * shifted_N[order_N], batch.groups.offsets)
        chosen = order_N[(len(batch) - first_G[first_G > 0]).long()]
        found["shifted_groups"] = torch.zeros_like(found["shift"]).index_fill_(0, chosen, 1.0)
    moved = baseline_drift(before.rows, after.rows, live_N)
    if moved is not None:
        drift_N, drifted_N = moved
        found["drifted"] = drifted_N.double()
        found["drift"] = found["drift_max"] = torch.where(drifted_N, drift_N.abs(), 0.0)
    return found


def _row_advantages(before: Evaluation, after: Evaluation) -> tuple[Tensor, Tensor, Tensor]:
    """Advantage of every row before and after, and the absolute change, ``[N]`` each."""
    one, other = before.rows, after.rows
    assert one is not None
    assert other is not None
    if one.advantage_N is not None and other.advantage_N is not None:
        return one.advantage_N, other.advantage_N, (one.advantage_N - other.advantage_N).abs()
    mask_T, rows = before.batch.column("response_mask"), before.batch.rows
    one_T, other_T = _per_token(one, rows), _per_token(other, rows)

    def mean(x_T: Tensor) -> Tensor:
        total_N = seg.total(torch.where(mask_T, x_T, 0.0), rows)
        return total_N / seg.total(mask_T, rows).clamp(min=1)

    return mean(one_T), mean(other_T), mean((one_T - other_T).abs())


def _per_token(part: RowResult, rows: Tensor) -> Tensor:
    if part.advantage_N is not None:
        return seg.expand(part.advantage_N, rows)
    assert part.advantage_T is not None  # a first pass has one of the two
    return part.advantage_T.double()


def tallies(changes: Mapping[str, Tensor], index_N: Tensor, count: int) -> list[Change]:
    """Add up the rows of each part; on the CPU, so that the order of addition is always the same."""
    index_N = index_N.cpu()
    zero_N = torch.zeros(len(index_N), dtype=torch.float64)
    parts: dict[str, list[float]] = {}
    for name in ADDED:
        values_N = changes[name].double().cpu() if name in changes else zero_N
        parts[name] = seg.total_by(index_N, values_N, count).tolist()
    for names, reduction, start in ((HIGHEST, "amax", 0.0), (LOWEST, "amin", math.inf)):
        for name in names:
            if name in changes:
                filled = torch.full((count,), start, dtype=torch.float64)
                parts[name] = filled.scatter_reduce_(0, index_N, changes[name].double().cpu(), reduction).tolist()
    return [Change(**{name: values[part] for name, values in parts.items()}) for part in range(count)]


def measures(change: Change, steps: float | None = None) -> dict[str, Measure]:
    """Turn a tally into the numbers that users see.

    Args:
        change: of the run, a step or any other part.
        steps: what losses are divided by, so that the parts of a run add up to its mean; None: the tally's own steps.
    """
    steps = change.steps if steps is None else steps
    able, live = steps > 0, change.compared > 0
    own: dict[str, tuple[float | None, str]] = {
        "rows": (int(change.rows), "rows"),
        "unmasked_rows": (int(change.live), "rows"),
        "groups": (int(change.groups), "groups"),
        "changed_rows": (int(change.shifted) if live else None, "rows"),
        "changed_groups": (int(change.shifted_groups) if live else None, "groups"),
        "undefined_rows": (int(change.undefined) if live else None, "rows"),
        "advantage_shift_mean": (ratio(change.shift, change.shifted - change.undefined), "advantage"),
        "advantage_shift_max": (change.shift_max if live else None, "advantage"),
        "sign_flips": (int(change.flips) if live else None, "rows"),
        "drifted_rows": (int(change.drifted) if live else None, "rows"),
        "baseline_drift_mean": (ratio(change.drift, change.drifted), "reward"),
        "baseline_drift_max": (change.drift_max if live else None, "reward"),
        "loss_before": (ratio(change.policy + change.kl_loss, steps), "loss"),
        "loss_after": (ratio(change.policy_after + change.kl_loss_after, steps), "loss"),
        "policy_loss_before": (ratio(change.policy, steps), "loss"),
        "policy_loss_after": (ratio(change.policy_after, steps), "loss"),
        "kl_loss_before": (ratio(change.kl_loss, steps), "loss"),
        "kl_loss_after": (ratio(change.kl_loss_after, steps), "loss"),
        "kl_before": (ratio(change.kl, change.tokens), "nats"),
        "kl_after": (ratio(change.kl_after, change.tokens), "nats"),
        "grad_l1_before": (change.l1 if able else None, "1"),
        "grad_l1_after": (change.l1_after if able else None, "1"),
        "grad_l2_before": (_root(change.sq) if able else None, "1"),
        "grad_l2_after": (_root(change.sq_after) if able else None, "1"),
        "spurious_share_l1": (ratio(change.versus_l1, change.l1), "share"),
        "relative_change_l1": (ratio(change.versus_l1, change.l1_after), "share"),
        "kappa": (ratio(change.versus_dot, change.sq_after), "1"),
        "cosine": (ratio(change.versus_dot, _root(change.sq) * _root(change.sq_after)), "1"),
        "other_rows": (int(change.same) if able else None, "rows"),
        "other_rows_rescaled": (int(change.rescaled) if able else None, "rows"),
        "other_rows_scale": (ratio(change.same_dot, change.same_sq), "1"),
        "weight_ratio_mean": (ratio(change.weight, change.same), "1"),
        "weight_ratio_min": (change.weight_low if change.same else None, "1"),
        "weight_ratio_max": (change.weight_high if change.same else None, "1"),
    }
    return {name: Measure(value, unit) for name, (value, unit) in own.items()}


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
