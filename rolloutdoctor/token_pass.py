"""The second pass of an evaluation: the terms of every token and their derivative, reduced to sums per row.

Blocks of whole rows go through in turn, so that the temporaries of a block stay in the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor import kl
from rolloutdoctor.batch import TRAIN, RolloutBatch
from rolloutdoctor.corrections.inside import inside_the_loss
from rolloutdoctor.corrections.masked import LogRatios
from rolloutdoctor.losses.aggregation import Layout, row_weights
from rolloutdoctor.losses.gates import high_entropy, importance_of_rows, product
from rolloutdoctor.losses.levels import row_mean
from rolloutdoctor.losses.selections import SELECTIONS
from rolloutdoctor.losses.surrogates import SURROGATES
from rolloutdoctor.losses.terms import TokenInputs
from rolloutdoctor.needs import LAYOUT_COLUMNS
from rolloutdoctor.objective import Aggregation, KlTerm
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.row_pass import RowPart, in_scope

BLOCK_TOKENS = 131_072
"""Tokens that are worked on at a time: their temporaries stay in the cache."""


@dataclass(frozen=True, eq=False)
class TokenPart:
    """The second pass, reduced to float64 sums per row; masked tokens are left out unless said.

    Attributes:
        layout: how the step was cut up.
        weight_N: weight of a token of the row in the loss of the step.
        policy_weight_N: the same in the policy part, where the trainer aggregates that in another way.
        counted_N: tokens of the row that enter the metrics of the policy term.
        policy_N: policy terms of the rows that carry one, before the weight.
        at_one_N: what the policy terms would be if policy and old log-probs were equal.
        kl_N: KL of the row, before coefficient, weight and scope.
        kl_loss_N: KL of the rows that carry the KL term, times the coefficient, before the weight.
        low_clipped_N: tokens with negative advantage and a ratio below the clip range.
        high_clipped_N: tokens with positive advantage and a ratio above it.
        drift_N: what the trainer logs as KL from the old policy; None: it logs none.
        clipped_N: tokens that the trainer's metric counts as clipped; None: it logs none.
        capped_N: tokens that its second such metric counts; None: it logs none.
        logged_N: a further value that the trainer logs; None: it logs none.
        grad_l1_N: absolute values of the derivative.
        grad_sq_N: squares of the derivative.
        logits_low_sq_N: squares of the derivative times ``(1 - p)^2``: the squared norm of the gradient with respect
            to the logits is between this and twice this.
        logits_sq_N: the exact squared norm with respect to the logits; None without `sum_pi_squared`.
        versus_l1_N: absolute differences from the reference evaluation's derivative.
        versus_dot_N: products with the reference evaluation's derivative.
    """

    layout: Layout
    weight_N: Tensor
    policy_weight_N: Tensor
    counted_N: Tensor
    policy_N: Tensor
    at_one_N: Tensor
    kl_N: Tensor
    kl_loss_N: Tensor
    low_clipped_N: Tensor
    high_clipped_N: Tensor
    drift_N: Tensor | None
    clipped_N: Tensor | None
    capped_N: Tensor | None
    logged_N: Tensor | None
    grad_l1_N: Tensor
    grad_sq_N: Tensor
    logits_low_sq_N: Tensor
    logits_sq_N: Tensor | None
    versus_l1_N: Tensor
    versus_dot_N: Tensor


_OPTIONAL = ("drift_N", "clipped_N", "capped_N", "logged_N", "logits_sq_N")
_NOT_SUMMED = ("layout", "weight_N", "policy_weight_N", "counted_N", "kl_loss_N", *_OPTIONAL)


@dataclass(frozen=True, eq=False)
class PerToken:
    """What `recompute` writes, ``[T]`` each, 0 where the mask is 0."""

    advantage_T: Tensor
    kl_T: Tensor
    ratio_T: Tensor
    loss_T: Tensor
    grad_T: Tensor


def token_pass(
    batch: RolloutBatch, parts: Mapping[str, RowPart], dtype: torch.dtype, per_token: bool
) -> dict[str, tuple[TokenPart, PerToken | None]]:
    """Run the second pass for all objectives, block by block."""
    passes = {name: _Pass(batch, part, dtype, per_token) for name, part in parts.items()}
    for rows, tokens in batch.blocks(BLOCK_TOKENS):
        block = _Block(batch, rows, tokens, dtype)
        reference: Tensor | None = None
        for each in passes.values():
            grad_T = each.add(block, reference)
            reference = grad_T if reference is None else reference
    return {name: each.result() for name, each in passes.items()}


class _Block:
    """The columns of some whole rows, masked tokens set to zero so that nothing of them leaks."""

    def __init__(self, batch: RolloutBatch, rows: slice, tokens: slice, dtype: torch.dtype) -> None:
        self.rows, self.tokens = rows, tokens
        self.offsets = batch.rows[rows.start : rows.stop + 1] - batch.rows[rows.start]
        self.mask_T = batch.column("response_mask")[tokens]
        self.dtype = dtype
        self._batch = batch
        self._columns: dict[str, Tensor] = {}

    def column(self, name: str) -> Tensor:
        """A token column of the block, ``[t]``, 0 at masked tokens."""
        if name not in self._columns:
            values_T = self._batch.column(name)[self.tokens].to(self.dtype)
            self._columns[name] = torch.where(self.mask_T, values_T, 0.0)
        return self._columns[name]

    def per_row(self, x_T: Tensor) -> Tensor:
        """Sum over the trained tokens of each row of the block, float64."""
        return seg.total(x_T * self.mask_T, self.offsets)

    def expand(self, x_N: Tensor) -> Tensor:
        """Give the block's share of a row value to its tokens."""
        return seg.expand(x_N[self.rows], self.offsets)


def _inside(block: _Block, rows_N: Tensor, x_T: Tensor) -> Tensor:
    """`x_T` at rows of a scope and 0 elsewhere: nothing of a row outside enters, NaN included."""
    here_N = rows_N[block.rows]
    return x_T if bool(here_N.all()) else torch.where(seg.expand(here_N, block.offsets), x_T, 0.0)


class _Pass:
    """The second pass for one objective: per-row sums that grow block by block."""

    def __init__(self, batch: RolloutBatch, part: RowPart, dtype: torch.dtype, per_token: bool) -> None:
        objective = part.objective
        assert part.length_N is not None  # loss_columns asked for the mask
        layout_columns = [batch.per_row.get(name) for name in LAYOUT_COLUMNS]
        separate = batch.split != TRAIN and objective.aggregation.eval_batches
        self.layout = Layout.of(batch.rows, *layout_columns, separate=separate)
        self.objective, self.part, self.batch = objective, part, batch
        self.counted_N, self.kept_T, self.inner_T = part.length_N, None, None
        if objective.policy_correction is not None:
            trainer_T, sampler_T = (
                batch.column(name).to(dtype) for name in ("policy_log_probs", objective.surrogate.old)
            )
            ratios = LogRatios(trainer_T - sampler_T, batch.column("response_mask"), batch.rows)
            self.kept_T, self.inner_T = inside_the_loss(ratios, objective.policy_correction)
            self.counted_N = seg.total(self.kept_T, batch.rows)
        self.weight_N = self._row_weights(objective.aggregation)
        self.of_policy_N = self.weight_N
        if objective.policy_aggregation is not None:
            self.of_policy_N = self._row_weights(objective.policy_aggregation)
        self.policy_N = in_scope(batch, part, objective.policy)
        self.kl_N = in_scope(batch, part, objective.kl)
        self.coef = objective.kl_loss.coef if objective.kl_loss else 0.0
        self.on_policy = batch.column(objective.surrogate.old) is batch.column("policy_log_probs")
        self.policy_weight_N = (self.of_policy_N * self.policy_N).to(dtype)
        self.kl_weight_N = (self.weight_N * self.kl_N * self.coef).to(dtype)
        self.advantage_N = None if part.advantage_N is None else part.advantage_N.to(dtype)
        self.has_logits = "sum_pi_squared" in batch.per_token
        self.sums: dict[str, list[Tensor]] = {}
        self.kept: list[tuple[Tensor, ...]] | None = [] if per_token else None
        self.chosen_T: Tensor | None = None
        self.open_T = self._open_tokens()
        if objective.surrogate.kind in SELECTIONS:
            step = _Block(batch, slice(0, len(batch)), slice(0, batch.tokens), dtype)
            micro_T = step.expand(self.layout.micro_N)
            self.chosen_T = SELECTIONS[objective.surrogate.kind](self._given(step), micro_T, objective.surrogate)

    def _row_weights(self, rule: Aggregation) -> Tensor:
        """Weight of a token of every row under an aggregation, ``[N]`` float64."""
        counted_N = self.part.length_N
        assert counted_N is not None  # loss_columns asked for the mask
        if rule.counted_in_policy:
            counted_N = self.counted_N
        if rule.counted_before_rejection:
            counted_N = seg.total(self.batch.column("response_mask_pre"), self.batch.rows)
        in_count_N = in_scope(self.batch, self.part, self.objective.denominator)
        counted_N = torch.where(in_count_N, counted_N, 0.0)
        # A row that no denominator counts has no weight, and a mean over its own tokens no meaning.
        return torch.where(in_count_N, row_weights(counted_N, self.layout, rule), 0.0)

    def _given(self, block: _Block) -> TokenInputs:
        """What the policy term sees of a block."""
        policy_T = block.column("policy_log_probs")
        old_T = policy_T if self.on_policy else block.column(self.objective.surrogate.old)
        if self.advantage_N is not None:
            advantage_T = block.expand(self.advantage_N)
        else:
            assert self.part.advantage_T is not None
            advantage_T = self.part.advantage_T[block.tokens].to(policy_T.dtype)
        advantage_T = torch.where(block.mask_T, advantage_T, 0.0)
        chosen_T = None if self.chosen_T is None else self.chosen_T[block.tokens]
        outer_T = self.part.weight_T if self.inner_T is None else self.inner_T
        # Of one column with itself the log-ratio is 0, or NaN where the trainer gets NaN too.
        given = TokenInputs(
            policy_T,
            old_T,
            policy_T - old_T,
            advantage_T,
            block.mask_T,
            block.offsets,
            gate_T=None if outer_T is None else outer_T[block.tokens].to(policy_T.dtype),
            chosen_T=chosen_T,
        )
        return self._gated(given, block) if self.objective.gates else given

    def _gated(self, given: TokenInputs, block: _Block) -> TokenInputs:
        """The same with the multipliers of the policy term."""
        gates = self.objective.gates
        open_T = None if self.open_T is None else self.open_T[block.tokens]
        gate_T = product(gates, given, block.column, open_T)
        inside = [importance_of_rows(given, block.column, gate) for gate in gates if gate.inside]
        return replace(given, gate_T=gate_T, log_weight_N=inside[0] if inside else None)

    def _open_tokens(self) -> Tensor | None:
        """Tokens of high entropy, ``[T]`` bool, where the objective wants no others; None where it takes all."""
        for gate in self.objective.gates:
            if gate.kind == "high_entropy" and gate.high is not None:
                forward_T = seg.expand(self.layout.forward_N, self.batch.rows)
                entropy_T = self.batch.column("entropy")
                return high_entropy(entropy_T, self.batch.column("response_mask"), forward_T, gate.high)
        return None

    def add(self, block: _Block, reference_T: Tensor | None) -> Tensor:
        """Add a block and return its derivative, ``[t]``."""
        rule = self.objective.surrogate
        given = self._given(block)
        policy_T, advantage_T = given.policy_T, given.advantage_T
        term = SURROGATES[rule.kind](given, rule)
        value_T, slope_T, ratio_T = term.value_T, term.slope_T, term.ratio_T
        policy_weight_T = block.expand(self.policy_weight_N)
        grad_T = _inside(block, self.policy_N, policy_weight_T * slope_T)
        loss_T = _inside(block, self.policy_N, policy_weight_T * value_T)
        kl_T = torch.zeros_like(policy_T)
        if self.objective.kl_loss is not None:
            kl_T, kl_slope_T = self._kl(block, self.objective.kl_loss, given)
            kl_weight_T = block.expand(self.kl_weight_N)
            grad_T = grad_T + _inside(block, self.kl_N, kl_weight_T * kl_slope_T)
            loss_T = loss_T + _inside(block, self.kl_N, kl_weight_T * kl_T)
        grad_T = torch.where(block.mask_T, grad_T, 0.0)
        square_T = grad_T.double() ** 2
        miss_T = (1 - policy_T.double().exp()) ** 2
        self._sum(block, "policy_N", value_T)
        self._sum(block, "at_one_N", given.gated(-advantage_T) if term.at_one_T is None else term.at_one_T)
        self._sum(block, "kl_N", kl_T)
        self._sum(block, "low_clipped_N", (ratio_T < 1 - rule.clip_low) & (advantage_T < 0))
        self._sum(block, "high_clipped_N", (ratio_T > 1 + rule.clip_high) & (advantage_T > 0))
        for name in ("drift_N", "clipped_N", "capped_N", "logged_N"):
            x_T = getattr(term, name[:-1] + "T")
            if x_T is not None:
                self._sum(block, name, x_T if self.kept_T is None else x_T * self.kept_T[block.tokens])
        self._sum(block, "grad_l1_N", grad_T.abs())
        self._sum(block, "grad_sq_N", square_T)
        self._sum(block, "logits_low_sq_N", square_T * miss_T)
        if self.has_logits:
            spread_T = 1 - 2 * policy_T.double().exp() + block.column("sum_pi_squared").double()
            # Never below (1 - p)^2, but rounding of the column gets there where p is about one.
            self._sum(block, "logits_sq_N", square_T * spread_T.maximum(miss_T))
        other_T = grad_T if reference_T is None else reference_T
        self._sum(block, "versus_l1_N", (grad_T - other_T).abs())
        self._sum(block, "versus_dot_N", grad_T.double() * other_T)
        if self.kept is not None:
            mask_T = block.mask_T
            kept = (advantage_T, kl_T, torch.where(mask_T, ratio_T, 0.0), torch.where(mask_T, loss_T, 0.0), grad_T)
            self.kept.append(kept)
        return grad_T

    def _kl(self, block: _Block, term: KlTerm, given: TokenInputs) -> kl.Term:
        u_T = block.column(term.log_probs) - block.column("ref_log_probs")
        ratio_T, gather = None, None
        if term.ratio_weighted and term.ratio_level == "token":
            ratio_T = given.log_ratio_T.exp()
        elif term.ratio_weighted:
            # The tokens of a row have one weight in the loss, so the ratio of a row gathers over all of them.
            ratio_T, gather = row_mean(given, given.log_ratio_T).exp(), partial(row_mean, given)
        straight, clamp = term.straight_through, term.clamp
        return kl.term(term.estimator, u_T, ratio_T, straight_through=straight, clamp=clamp, gather=gather)

    def _sum(self, block: _Block, name: str, x_T: Tensor) -> None:
        self.sums.setdefault(name, []).append(block.per_row(x_T))

    def result(self) -> tuple[TokenPart, PerToken | None]:
        """Put the blocks together."""
        empty = torch.zeros(0, dtype=torch.float64, device=self.batch.device)
        names = [name for name in TokenPart.__dataclass_fields__ if name not in _NOT_SUMMED]
        sums = {name: torch.cat(self.sums[name]) if name in self.sums else empty for name in names}
        drift, clipped, capped, logged, logits = (
            torch.cat(self.sums[name]) if name in self.sums else None for name in _OPTIONAL
        )
        kl_loss_N = torch.where(self.kl_N, sums["kl_N"] * self.coef, 0.0)
        if self.objective.surrogate.counts_empty and self.advantage_N is not None:
            # No token carries the term of an empty row.
            assert self.part.length_N is not None  # loss_columns asked for the mask
            bare_N = torch.where(self.part.length_N == 0, -self.advantage_N.double(), 0.0)
            sums["policy_N"], sums["at_one_N"] = sums["policy_N"] + bare_N, sums["at_one_N"] + bare_N
        sums["policy_N"] = torch.where(self.policy_N, sums["policy_N"], 0.0)
        sums["at_one_N"] = torch.where(self.policy_N, sums["at_one_N"], 0.0)
        tokens = TokenPart(
            layout=self.layout,
            weight_N=self.weight_N,
            policy_weight_N=self.of_policy_N,
            counted_N=self.counted_N,
            kl_loss_N=kl_loss_N,
            drift_N=drift,
            clipped_N=clipped,
            capped_N=capped,
            logged_N=logged,
            logits_sq_N=logits,
            **sums,
        )
        if self.kept is None:
            return tokens, None
        columns = [torch.cat(column) for column in zip(*self.kept, strict=True)] or [empty] * 5
        return tokens, PerToken(*columns)
