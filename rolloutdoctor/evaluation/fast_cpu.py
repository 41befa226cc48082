"""The second pass of an evaluation on the CPU, with few values per token made and none of them made again.

Within PPO's bounds the term of a token is ``-A r`` and its derivative ``a r + b s``: `r` is the ratio, `s` the slope of
the KL, and `A`, `a` and `b` are the row's. So an objective that differs from another in values per row alone takes two
products a token, and the bounds are worked out for the few tokens outside. Where something is not finite, the general
way is taken, which knows what each value enters.

This is numpy's, because torch takes several times as long to begin.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import PART_TOKENS, AdjacentRows, WholeRows
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.clipped import BOUNDS, free_range
from rolloutdoctor.objective.objective import KlTerm, Objective
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops.chosen import Chosen
from rolloutdoctor.ops.segments import Runs

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Sums = dict[str, Floats]
"""Float64 sums of some rows, ``[n]``, by their names in `TokenSums`."""

_PIECE = PART_TOKENS
"""Tokens whose KL is made at a time: what lies between its steps stays in the cache, and needs no room beside."""

_OF_DERIVATIVE = ("grad_l1_N", "grad_sq_N", "versus_dot_N")
"""Sums that are 0 where there is no derivative."""


class RowValues(NamedTuple):
    """What an objective gives to the tokens of a row, ``[N]`` each: scopes bool, the others in the dtype of tokens."""

    policy_N: Tensor
    kl_N: Tensor
    policy_weight_N: Tensor
    kl_weight_N: Tensor
    advantage_N: Tensor | None


class Part(NamedTuple):
    """What an objective takes part with.

    Attributes:
        values: that it gives to tokens, advantages included.
        recomputed_N: ``[N]`` bool, rows that it does not share with the reference; not looked at for that itself.
        sums: float64 ``[N]`` by their names in `TokenSums`: they grow block by block.
    """

    values: RowValues
    recomputed_N: Tensor
    sums: dict[str, Tensor]


class _Given:
    """What an objective gives to the tokens of its rows, ``[N]`` each.

    Attributes:
        advantage_N: in the policy term.
        weight_N: of the policy term, 0 out of its scope.
        ratio_N: what the ratio is multiplied with in the derivative.
        slope_N: what the slope of the KL is multiplied with.
        moves_N: whether one of these two is not 0.
    """

    def __init__(self, values: RowValues) -> None:
        assert values.advantage_N is not None  # objectives without them are not plain
        in_policy_N = values.policy_N.numpy()
        self.advantage_N: Floats = values.advantage_N.numpy()
        self.weight_N: Floats = np.where(in_policy_N, values.policy_weight_N.numpy(), 0)
        self.ratio_N: Floats = np.where(in_policy_N, -(self.weight_N * self.advantage_N), 0)
        self.slope_N: Floats = np.where(values.kl_N.numpy(), values.kl_weight_N.numpy(), 0)
        self.moves_N: Bools = (self.ratio_N != 0) | (self.slope_N != 0)


@dataclass(eq=False)
class _Seen:
    """What some rows give to every objective.

    Attributes:
        rows: of the step.
        runs: their tokens.
        left_out_n: rows that are not trained, though their tokens are here; None: there are none.
        ratio_T: importance ratios, but 0 for tokens set apart.
        ratio_n: their sums.
        slope_T: derivative of the KL; None: there is no such term.
        wide_T: float64 derivative of the reference.
        place_P: tokens set apart, because their ratios lie outside the free range.
        row_P: their rows.
        ratio_P: their ratios.
    """

    rows: slice | Ints
    runs: Runs
    left_out_n: Bools | None
    ratio_T: Floats
    ratio_n: Floats
    slope_T: Floats | None
    wide_T: Floats
    place_P: Ints
    row_P: Ints
    ratio_P: Floats

    def total(self, x_T: Floats) -> Floats:
        """Sum over the tokens of each row, ``[n]``; 0 for rows left out, whatever they hold."""
        sums_n = self.runs.sums(x_T)
        if self.left_out_n is not None:
            sums_n[self.left_out_n] = 0.0
        return sums_n

    def versus(self, other_T: Floats, room_T: Floats) -> Sums:
        """Compare another derivative with the reference's, both float64; `room_T` is overwritten."""
        dot_n = self.total(np.multiply(other_T, self.wide_T, out=room_T))
        np.subtract(other_T, self.wide_T, out=room_T)
        return {"versus_dot_N": dot_n, "versus_l1_N": self.total(np.abs(room_T, out=room_T))}

    def count(self, is_it_P: Bools) -> Floats:
        """How many of the tokens set apart each row has of some kind, ``[n]``."""
        return np.bincount(self.row_P[is_it_P], minlength=len(self.runs)).astype(np.float64)

    def set_apart(self, place_P: Ints) -> None:
        """Set some tokens apart, except those of rows left out."""
        row_P = np.searchsorted(self.runs.cuts, place_P, side="right") - 1
        if self.left_out_n is not None:
            is_trained_P = ~self.left_out_n[row_P]
            place_P, row_P = place_P[is_trained_P], row_P[is_trained_P]
        self.place_P, self.row_P, self.ratio_P = place_P, row_P, self.ratio_T[place_P]
        self.ratio_T[place_P] = 0

    def some(self, rows: Ints, is_one_n: Bools) -> "_Seen":
        """The same of some trained rows, ``[n]`` bool, whose numbers in the step are `rows`."""
        one_n = torch.from_numpy(is_one_n)
        chosen, runs = Chosen(one_n, self.runs), self.runs.some(one_n)

        def pick(x_T: Floats) -> Floats:
            return chosen.pick(torch.from_numpy(x_T)).numpy()

        is_one_P, number_n = is_one_n[self.row_P], np.cumsum(is_one_n) - 1
        place_P, row_P = self.place_P[is_one_P], self.row_P[is_one_P]
        return _Seen(
            rows=rows,
            runs=runs,
            left_out_n=None,
            ratio_T=pick(self.ratio_T),
            ratio_n=self.ratio_n[is_one_n],
            slope_T=None if self.slope_T is None else pick(self.slope_T),
            wide_T=pick(self.wide_T),
            place_P=place_P - self.runs.cuts[row_P] + runs.cuts[number_n[row_P]],
            row_P=number_n[row_P],
            ratio_P=self.ratio_P[is_one_P],
        )


class ClippedCpuEvaluator:
    """The sums of objectives that share what becomes of a token, block by block."""

    def __init__(
        self, batch: RolloutBatch, objective: Objective, parts: Sequence[Part], dtype: torch.dtype, *, logits: bool
    ) -> None:
        """Take what `of` found fit."""
        self._rule, self._kl = objective.surrogate, objective.kl_loss
        self._k3_up_to = None if self._kl is None else _k3_up_to(self._kl)
        self._logits, self._has_pi = logits, batch.has("sum_pi_squared")
        self._given = [_Given(part.values) for part in parts]
        self._own = [part.recomputed_N.numpy() for part in parts]
        self._sums = [part.sums for part in parts]
        self._dtype = torch.zeros(0, dtype=dtype).numpy().dtype
        self._buffers: dict[str, Floats] = {"kl": np.empty(min(batch.tokens, _PIECE), self._dtype)}
        # No part of a long block has more, unless one of its rows is long: see `parts_of`.
        self._room = min(batch.tokens, PART_TOKENS * 5 // 4)
        self._views: dict[tuple[int, str], Floats] = {}
        self._seen: _Seen | None = None
        counted = ("clipped_N", "capped_N") if self._rule.kind == "ppo_dual_clip" else ()
        self._counted = counted[: 1 if self._rule.cap is None else 2]

    @classmethod
    def of(
        cls,
        batch: RolloutBatch,
        objective: Objective,
        parts: Sequence[Part],
        dtype: torch.dtype,
        *,
        logits: bool,
    ) -> "ClippedCpuEvaluator | None":
        """Prepare for the blocks of a step; None if there is no free range, or a value of a row is not finite.

        Args:
            batch: the step, on the CPU.
            objective: `covered.is_covered`; it says what becomes of a token.
            parts: of each objective; the first is the reference: the others are compared with its derivative.
            dtype: of the values per token.
            logits: whether the derivative by the logits is wanted of the reference.
        """
        found = cls(batch, objective, parts, dtype, logits=logits)
        is_finite = all(_is_finite(x_N) for each in found._given for x_N in (each.ratio_N, each.slope_N))
        return found if is_finite and free_range(objective.surrogate)[1] > 0 else None

    def add(self, block: AdjacentRows) -> bool:
        """Add a block of the step.

        Returns: False if it is left to the general way, because something is not finite or beyond the bound of the
        log-ratio.
        """
        with np.errstate(all="ignore"):
            seen = self._reference(block)
            if seen is not None:
                for number in range(1, len(self._own)):
                    self._other(number, seen, self._own[number][block.rows])
        self._seen = seen
        return seen is not None

    def compare(self, other: "ClippedCpuEvaluator") -> None:
        """Compare the reference of another, which has added the same block, with this one's."""
        seen, theirs = self._seen, other._seen
        assert seen is not None  # both have added it
        assert theirs is not None
        with np.errstate(all="ignore"):
            for name, sums_n in seen.versus(theirs.wide_T, self._buffer("other", len(seen.wide_T), np.float64)).items():
                other._of(0, name)[seen.rows] = sums_n

    def _reference(self, block: AdjacentRows) -> _Seen | None:
        here, sums = block.whole_rows(), dict[str, Floats]()
        seen = self._look(block, here, sums)
        if seen is None:
            return None
        turned_P = self._policy(self._given[0], seen, sums)
        seen.wide_T, square_T = self._derivative(self._given[0], seen, turned_P, sums, "reference")
        if self._logits:
            self._by_logits(here.column, seen, square_T, sums)
        if not (_is_finite(sums["grad_l1_N"]) and _is_finite(sums.get("logits_low_sq_N", sums["grad_l1_N"]))):
            return None
        for name, sums_n in sums.items():
            self._of(0, name)[seen.rows] = sums_n
        return seen

    def _other(self, number: int, seen: _Seen, own_n: Bools) -> None:
        """Add the rows of another objective that it does not share with the reference, ``[n]`` bool."""
        if not own_n.any():
            return
        given, rows = self._given[number], seen.rows
        assert isinstance(rows, slice)
        sums: Sums = {}
        turned_P = self._policy(given, seen, sums)
        # A row without a derivative is as far from the reference as that is from 0.
        sums |= {"versus_l1_N": self._of(0, "grad_l1_N")[rows], **dict.fromkeys(_OF_DERIVATIVE, np.zeros(1))}
        if self._counted:
            sums["drift_N"] = self._of(0, "drift_N")[rows]
        for name, sums_n in sums.items():
            np.copyto(self._of(number, name)[rows], sums_n, where=own_n)
        moves_n = own_n & given.moves_N[rows]
        if seen.left_out_n is not None:
            moves_n &= ~seen.left_out_n
        if not moves_n.any():
            return
        part, sums = seen.some(rows.start + np.flatnonzero(moves_n), moves_n), {}
        wide_T, other_T = self._derivative(given, part, turned_P[moves_n[seen.row_P]], sums, "other")
        for name, sums_n in (sums | part.versus(wide_T, other_T)).items():
            self._of(number, name)[part.rows] = sums_n

    def _look(self, block: AdjacentRows, here: WholeRows, sums: Sums) -> _Seen | None:
        """What a block gives to every objective, and the sums that no value of a row enters."""
        (runs, left_out_n, column), rule, term = here, self._rule, self._kl
        count, none = int(runs.cuts[-1]), np.zeros(0, np.int64)
        ratio_T, wide_T = self._buffer("ratio", count, self._dtype), self._buffer("square", count, np.float64)
        same_T = torch.from_numpy(ratio_T)
        seen = _Seen(block.rows, runs, left_out_n, ratio_T, ratio_T, None, ratio_T, none, none, ratio_T[:0])
        np.subtract(column("policy_log_probs").numpy(), column(rule.old).numpy(), out=ratio_T)
        bound = rule.log_ratio_bound
        if not count or (bound is not None and el.outside(same_T, -bound, bound) is not None):
            return None
        if self._counted:
            np.copyto(wide_T, ratio_T)
            sums["drift_N"] = -seen.total(wide_T)
        same_T.exp_()
        if term is not None:
            seen.slope_T = self._buffer("slope", count, self._dtype)
            self._by_reference(column, same_T, wide_T, seen.slope_T)
            sums["kl_N"] = seen.total(wide_T)
        place_P = el.outside(same_T, *free_range(rule))
        if place_P is not None:
            seen.set_apart(place_P.numpy())
            sums["low_clipped_N"] = seen.count(seen.ratio_P < 1 - rule.clip_low)
            sums["high_clipped_N"] = seen.count(seen.ratio_P > 1 + rule.clip_high)
        np.copyto(wide_T, ratio_T)
        seen.ratio_n = seen.total(wide_T)
        return seen if all(map(_is_finite, (seen.ratio_n, seen.ratio_P, sums.get("kl_N", seen.ratio_n)))) else None

    def _by_reference(self, column: Callable[[str], Tensor], ratio_T: Tensor, kl_T: Floats, slope_T: Floats) -> None:
        """Fill in the KL and its derivative, some tokens at a time."""
        term = self._kl
        assert term is not None
        policy_T, reference_T = column(term.log_probs), column("ref_log_probs")
        of_kl_T = torch.from_numpy(slope_T)
        for start in range(0, len(kl_T), _PIECE):
            here = slice(start, start + _PIECE)
            policy_P, reference_P = policy_T[here], reference_T[here]
            if self._k3_up_to is not None:
                room_P = self._buffer("kl", len(policy_P), self._dtype)
                kl.k3_into(policy_P, reference_P, torch.from_numpy(room_P), of_kl_T[here])
                if room_P.max() <= self._k3_up_to:
                    np.copyto(kl_T[here], room_P)
                    continue
            kl_P, slope_P = kl.term(
                term.estimator,
                policy_P - reference_P,
                ratio_T[here] if term.ratio_weighted else None,
                straight_through=term.straight_through,
                clamp=term.clamp,
            )
            np.copyto(kl_T[here], kl_P.numpy())
            np.copyto(slope_T[here], slope_P.numpy())

    def _policy(self, given: _Given, seen: _Seen, sums: Sums) -> Floats:
        """Add the policy term of rows, and return its derivative at the tokens set apart, ``[P]``."""
        advantage_n, row_P = given.advantage_N[seen.rows], seen.row_P
        sums["policy_N"] = 0.0 - advantage_n * seen.ratio_n
        sums |= {name: np.zeros(len(advantage_n)) for name in self._counted}
        turned_P = seen.ratio_P
        if len(row_P):
            advantage_P, weight_P = advantage_n[row_P], given.weight_N[seen.rows][row_P]
            bounds, ratio_P = BOUNDS[self._rule.kind], torch.from_numpy(seen.ratio_P)
            value_P, flows_P, *counts_P = bounds(ratio_P, torch.from_numpy(advantage_P), self._rule)
            sums["policy_N"] += np.bincount(row_P, value_P.numpy(), len(advantage_n))
            turned_P = np.where(weight_P != 0, weight_P * (-advantage_P * seen.ratio_P * flows_P.numpy()), 0)
            sums |= {name: seen.count(is_it_P.numpy()) for name, is_it_P in zip(self._counted, counts_P, strict=False)}
        return turned_P

    def _derivative(self, given: _Given, seen: _Seen, turned_P: Floats, sums: Sums, name: str) -> tuple[Floats, Floats]:
        """Add the sums of a derivative, and return it and its square, float64."""
        count = len(seen.ratio_T)
        grad_T, wide_T = self._buffer("derivative", count, self._dtype), self._buffer(name, count, np.float64)
        square_T = self._buffer("square", count, np.float64)
        np.multiply(seen.runs.spread(given.ratio_N[seen.rows]), seen.ratio_T, out=grad_T)
        if seen.slope_T is not None:
            of_kl_T = seen.runs.spread(given.slope_N[seen.rows])
            of_kl_T *= seen.slope_T
            grad_T += of_kl_T
        grad_T[seen.place_P] += turned_P
        np.copyto(wide_T, grad_T)
        sums["grad_l1_N"] = seen.total(np.abs(wide_T, out=square_T))
        sums["grad_sq_N"] = seen.total(np.multiply(wide_T, wide_T, out=square_T))
        return wide_T, square_T

    def _by_logits(self, column: Callable[[str], Tensor], seen: _Seen, square_T: Floats, sums: Sums) -> None:
        """Add the bounds on the derivative by the logits; `square_T` is that by the log-prob, squared."""
        policy_T, low_T = column("policy_log_probs"), self._buffer("other", len(square_T), np.float64)
        # (1 - p)^2, where 1 - p has the precision of the log-probs, as elsewhere.
        np.copyto(low_T, np.expm1(policy_T.numpy(), out=self._buffer("derivative", len(square_T), self._dtype)))
        low_T *= low_T
        low_T *= square_T
        sums["logits_low_sq_N"] = seen.total(low_T)
        if self._has_pi:
            spread_T = 1 - 2 * policy_T.double().exp()
            spread_T += column("sum_pi_squared")
            # Never below (1 - p)^2, but rounding of the column gets there where p is about one.
            sums["logits_sq_N"] = seen.total(np.maximum(square_T * spread_T.numpy(), low_T))

    def _of(self, number: int, name: str) -> Floats:
        """A sum of an objective, ``[N]``."""
        found = self._views.get((number, name))
        if found is None:
            zero_N = torch.zeros(len(self._given[0].advantage_N), dtype=torch.float64)
            found = self._views[number, name] = self._sums[number].setdefault(name, zero_N).numpy()
        return found

    def _buffer(self, name: str, count: int, dtype: "np.dtype[Any] | type[np.float64]") -> Floats:
        """Memory for a value per token, the same for every block."""
        held = self._buffers.get(name)
        if held is None or len(held) < count:
            held = self._buffers[name] = np.empty(max(count, self._room), dtype)
        return held[:count]


def _k3_up_to(term: KlTerm) -> float | None:
    """The largest value up to which a term is `k3` and nothing else; None if it never is."""
    if term.estimator not in kl.K3_UP_TO or term.ratio_weighted or term.straight_through:
        return None
    return min(kl.K3_UP_TO[term.estimator], math.inf if term.clamp is None else term.clamp)


def _is_finite(x: Floats) -> bool:
    # The sum is finite if every value is, unless it overflows: then nothing is lost but time.
    return bool(np.isfinite(x.sum(dtype=np.float64)))
