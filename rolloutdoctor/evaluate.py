"""`evaluate(batch, objective)`: the whole physics of a step.

Two passes. The first is over rows: scores, votes, advantages and the weight of each row's tokens in the loss. The
second is over tokens, in blocks of whole rows that fit the cache: policy term, KL, ratio and the exact derivative of
the loss with respect to every logged log-prob, reduced to one float64 sum per row. Nothing is padded, and nothing
is kept per token unless the caller asks.

The derivative lives in log-prob space: it is ``dLoss / d policy_log_probs``, not a gradient of parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor import kl
from rolloutdoctor.advantages.float32 import trl_flags
from rolloutdoctor.advantages.gae import gae, token_rewards
from rolloutdoctor.advantages.scores import Scores
from rolloutdoctor.advantages.table import ESTIMATORS
from rolloutdoctor.batch import TRAIN, Groups, RolloutBatch
from rolloutdoctor.losses.aggregation import Layout, row_weights
from rolloutdoctor.losses.surrogates import SURROGATES
from rolloutdoctor.needs import LAYOUT_COLUMNS, advantage_columns, loss_columns, reward_kl_columns
from rolloutdoctor.objective import KlBuffer, KlTerm, Objective, RowSet, Scope
from rolloutdoctor.ops import segments as seg

BLOCK_TOKENS = 131_072
"""Tokens that are worked on at a time: their temporaries stay in the cache."""


@dataclass(frozen=True, eq=False)
class RowPart:
    """The first pass: everything that has one value per row.

    Attributes:
        objective: what was evaluated.
        score_N: ``[N]`` float64, the reward that the estimator sees.
        vote_N: ``[N]`` bool, rows that enter baselines and scales.
        length_N: ``[N]`` float64, trained tokens; None without a mask.
        rejected_N: ``[N]`` bool, rows without a trained token; None without a mask.
        zero_std_N: ``[N]`` bool, `RowSet.ZERO_STD`.
        advantage_N: ``[N]`` float64; None for estimators with a time axis.
        baseline_N: ``[N]`` float64, what was subtracted from the score; None like `advantage_N`.
        advantage_T: ``[T]`` advantages for estimators with a time axis, else None.
    """

    objective: Objective
    score_N: Tensor
    vote_N: Tensor
    length_N: Tensor | None
    rejected_N: Tensor | None
    zero_std_N: Tensor
    advantage_N: Tensor | None
    baseline_N: Tensor | None
    advantage_T: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenPart:
    """The second pass, reduced to float64 sums per row; masked tokens are left out unless said.

    Attributes:
        layout: how the step was cut up.
        weight_N: weight of a token of the row in the loss of the step.
        policy_N: policy terms of the rows that carry one, before the weight.
        advantage_N: advantages of the tokens; at ratio one the policy term is minus this.
        kl_N: KL of the row, before coefficient, weight and scope.
        kl_loss_N: KL of the rows that carry the KL term, times the coefficient, before the weight.
        low_clipped_N: tokens with negative advantage and a ratio below the clip range.
        high_clipped_N: tokens with positive advantage and a ratio above it.
        log_ratio_N: policy minus old log-probs.
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
    policy_N: Tensor
    advantage_N: Tensor
    kl_N: Tensor
    kl_loss_N: Tensor
    low_clipped_N: Tensor
    high_clipped_N: Tensor
    log_ratio_N: Tensor
    grad_l1_N: Tensor
    grad_sq_N: Tensor
    logits_low_sq_N: Tensor
    logits_sq_N: Tensor | None
    versus_l1_N: Tensor
    versus_dot_N: Tensor


@dataclass(frozen=True, eq=False)
class PerToken:
    """What `recompute` writes, ``[T]`` each, 0 where the mask is 0."""

    advantage_T: Tensor
    kl_T: Tensor
    ratio_T: Tensor
    loss_T: Tensor
    grad_T: Tensor


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A step under an objective.

    Attributes:
        batch: the step.
        objective: what was evaluated.
        rows: the first pass; None if a column that the advantages need is missing.
        tokens: the second pass; None if a column that the loss needs is missing.
        dtype: of the token values.
        per_token: the token values, if they were asked for.
    """

    batch: RolloutBatch
    objective: Objective
    rows: RowPart | None
    tokens: TokenPart | None
    dtype: torch.dtype = torch.float32
    per_token: PerToken | None = None

    @property
    def policy_loss(self) -> float:
        """The policy part of the step's loss."""
        return self._weighted("policy_N")

    @property
    def kl_loss(self) -> float:
        """The KL part of the step's loss, coefficient included."""
        return self._weighted("kl_loss_N")

    @property
    def loss(self) -> float:
        """The step's loss: the mean of the losses of its optimiser steps."""
        return self.policy_loss + self.kl_loss

    @property
    def loss_at_ratio_one(self) -> float:
        """What the loss would be if policy and old log-probs were equal, the KL part as it is.

        At ratio one a clipped surrogate is minus the advantage, so this is where the aggregation mode shows: row
        means of centred advantages cancel, token means do not if length goes with reward.
        """
        return self.kl_loss - self._weighted("advantage_N")

    @property
    def grad_l1(self) -> float:
        """Sum of the absolute derivatives over the step's tokens."""
        return self._total("grad_l1_N")

    @property
    def grad_l2(self) -> float:
        """Euclidean norm of the derivatives over the step's tokens."""
        return math.sqrt(self._total("grad_sq_N"))

    def in_scope(self, scope: Scope) -> Tensor:
        """Rows of a scope, ``[N]`` bool."""
        assert self.rows is not None
        return _in_scope(self.batch, self.rows, scope)

    def _total(self, name: str) -> float:
        return float(self._sums(name).sum())

    def _weighted(self, name: str) -> float:
        return float((self._sums(name) * self._part().weight_N).sum())

    def _sums(self, name: str) -> Tensor:
        sums: Tensor = getattr(self._part(), name)
        return sums

    def _part(self) -> TokenPart:
        if self.tokens is None:
            raise ValueError("the loss was not evaluated: a column it needs is missing")
        return self.tokens


def evaluate(
    batch: RolloutBatch,
    objective: Objective,
    *,
    dtype: torch.dtype = torch.float32,
    per_token: bool = False,
) -> Evaluation:
    """Evaluate one objective on one step.

    Args:
        batch: the step; the evaluation runs on its device.
        objective: what the trainer computes.
        dtype: of the token values; sums are float64.
        per_token: keep the token values too.

    Raises:
        CannotComputeError: where the trainer itself fails.
    """
    return evaluate_all(batch, {"": objective}, dtype=dtype, per_token=per_token)[""]


def evaluate_all(
    batch: RolloutBatch,
    objectives: Mapping[str, Objective],
    *,
    dtype: torch.dtype = torch.float32,
    per_token: bool = False,
) -> dict[str, Evaluation]:
    """Evaluate several objectives in one pass over the tokens.

    The first is the reference: the others' `versus_*` sums compare their derivatives with its derivative.
    """
    row_parts = {name: evaluate_rows(batch, objective, dtype) for name, objective in objectives.items()}
    able = {
        name: part
        for name, part in row_parts.items()
        if part is not None and batch.has(*loss_columns(objectives[name]))
    }
    passes = _token_pass(batch, able, dtype, per_token) if able else {}
    found = {}
    for name, objective in objectives.items():
        tokens, kept = passes.get(name, (None, None))
        found[name] = Evaluation(batch, objective, row_parts[name], tokens, dtype, kept)
    return found


def evaluate_rows(batch: RolloutBatch, objective: Objective, dtype: torch.dtype = torch.float32) -> RowPart | None:
    """Run the first pass; None if a column that the advantages need is missing."""
    if not batch.has(*advantage_columns(objective)):
        return None
    # The trainers hold rewards in float32; the statistics of these values are float64.
    score_N = batch.column("reward").to(dtype).double()
    length_N = rejected_N = None
    if "response_mask" in batch.per_token:
        length_N = seg.total(batch.column("response_mask"), batch.rows)
        rejected_N = length_N == 0
    vote_N = torch.ones_like(score_N, dtype=torch.bool)
    if RowSet.UNSCORED in objective.vote.without:
        vote_N &= ~score_N.isnan()
    if RowSet.REJECTED in objective.vote.without and rejected_N is not None:
        vote_N &= ~rejected_N
    if objective.advantage.estimator == "gae":
        nobody_N = torch.zeros_like(vote_N)
        advantage_T = gae(batch, objective, reward_kl_tokens(batch, objective, dtype), score_N)
        return RowPart(objective, score_N, vote_N, length_N, rejected_N, nobody_N, None, None, advantage_T)
    assert batch.groups is not None  # advantage_columns asked for it
    groups = compared_groups(batch.groups, objective)
    clean_N = torch.where(vote_N, score_N, 0.0)
    scores = Scores(clean_N, vote_N, torch.zeros_like(score_N) if length_N is None else length_N, groups)
    found = ESTIMATORS[objective.advantage.estimator](scores, objective.advantage)
    return RowPart(
        objective=objective,
        score_N=score_N,
        vote_N=vote_N,
        length_N=length_N,
        rejected_N=rejected_N,
        zero_std_N=zero_std_rows(batch, clean_N, vote_N, groups),
        advantage_N=found.value_N,
        baseline_N=found.baseline_N,
    )


def compared_groups(groups: Groups, objective: Objective) -> Groups:
    """Rows that are compared with each other: the groups, or all rows where the trainer falls back to the batch."""
    if objective.advantage.batch_if_unequal and len(groups) and int(groups.size_G.max()) != int(groups.size_G.min()):
        return Groups.of(torch.zeros_like(groups.index_N))
    return groups


def zero_std_rows(batch: RolloutBatch, score_N: Tensor, vote_N: Tensor, groups: Groups) -> Tensor:
    """Rows of groups whose voters' rewards are all equal, ``[N]`` bool.

    Never eval rows, and never groups with fewer than two voters.
    """
    if batch.split != TRAIN:
        return torch.zeros_like(vote_N)
    equal_G = (seg.group_spread(score_N, groups, vote_N) == 0) & (seg.group_total(vote_N, groups) > 1)
    return equal_G[groups.index_N]


def reward_kl_tokens(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> Tensor | None:
    """Per-token KL of the penalty inside the reward, ``[T]``, masked tokens included; zeros if its coefficient is 0.

    None if there is no such penalty.
    """
    term = objective.kl_reward
    if term is None:
        return None
    if term.coef == 0:
        return torch.zeros(batch.tokens, dtype=dtype, device=batch.device)
    policy_T, ref_T = batch.column(term.log_probs).to(dtype), batch.column("ref_log_probs").to(dtype)
    return kl.term(term.estimator, policy_T - ref_T, clamp=term.clamp)[0]


def stored_kl(batch: RolloutBatch, objective: Objective, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Per-token KL as the trainer stores it for its metric, ``[T]``, masked tokens included.

    None if the trainer stores none, or a column it needs is missing.
    """
    if objective.kl_reward is None or not batch.has(*reward_kl_columns(objective)):
        return None
    kl_T = reward_kl_tokens(batch, objective, dtype)
    if objective.kl_buffer is KlBuffer.COPY:
        return kl_T
    if not batch.has("reward"):
        return None
    return token_rewards(batch, objective, kl_T, batch.column("reward").to(dtype).double())


def _in_scope(batch: RolloutBatch, part: RowPart, scope: Scope) -> Tensor:
    """Rows of a scope, ``[N]`` bool."""
    inside_N = torch.ones_like(part.vote_N)
    for rows in scope.without:
        inside_N &= ~_row_set(batch, part, rows)
    return inside_N


def _row_set(batch: RolloutBatch, part: RowPart, rows: RowSet) -> Tensor:
    match rows:
        case RowSet.ZERO_STD:
            return part.zero_std_N
        case RowSet.UNSCORED:
            return part.score_N.isnan()
        case RowSet.REJECTED:
            assert part.rejected_N is not None  # scopes other than the vote are read only with a mask at hand
            return part.rejected_N
        case RowSet.STD_FLAGGED:
            assert batch.groups is not None
            return trl_flags(part.score_N, batch.groups, part.objective.advantage.scale)


def _token_pass(
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


class _Pass:
    """The second pass for one objective: per-row sums that grow block by block."""

    def __init__(self, batch: RolloutBatch, part: RowPart, dtype: torch.dtype, per_token: bool) -> None:
        objective = part.objective
        assert part.length_N is not None  # loss_columns asked for the mask
        counted_N = part.length_N
        if objective.aggregation.counted_before_rejection:
            counted_N = seg.total(batch.column("response_mask_pre"), batch.rows)
        in_count_N = _in_scope(batch, part, objective.denominator)
        counted_N = torch.where(in_count_N, counted_N, 0.0)
        layout_columns = [batch.per_row.get(name) for name in LAYOUT_COLUMNS]
        separate = batch.split != TRAIN and objective.aggregation.eval_batches
        self.layout = Layout.of(batch.rows, *layout_columns, separate=separate)
        # A row that no denominator counts has no weight, and a mean over its own tokens no meaning.
        self.weight_N = torch.where(in_count_N, row_weights(counted_N, self.layout, objective.aggregation), 0.0)
        self.objective, self.part, self.batch = objective, part, batch
        self.policy_N = _in_scope(batch, part, objective.policy)
        self.kl_N = _in_scope(batch, part, objective.kl)
        self.coef = objective.kl_loss.coef if objective.kl_loss else 0.0
        self.on_policy = batch.column(objective.surrogate.old) is batch.column("policy_log_probs")
        self.policy_weight_N = (self.weight_N * self.policy_N).to(dtype)
        self.kl_weight_N = (self.weight_N * self.kl_N * self.coef).to(dtype)
        self.advantage_N = None if part.advantage_N is None else part.advantage_N.to(dtype)
        self.has_logits = "sum_pi_squared" in batch.per_token
        self.sums: dict[str, list[Tensor]] = {}
        self.kept: list[tuple[Tensor, ...]] | None = [] if per_token else None

    def add(self, block: _Block, reference_T: Tensor | None) -> Tensor:
        """Add a block and return its derivative, ``[t]``."""
        rule = self.objective.surrogate
        policy_T = block.column("policy_log_probs")
        # Of one column with itself this is 0, or NaN where the trainer gets NaN too.
        log_ratio_T = policy_T - (policy_T if self.on_policy else block.column(rule.old))
        if self.advantage_N is not None:
            advantage_T = block.expand(self.advantage_N)
        else:
            assert self.part.advantage_T is not None
            advantage_T = self.part.advantage_T[block.tokens].to(policy_T.dtype)
        advantage_T = torch.where(block.mask_T, advantage_T, 0.0)
        value_T, slope_T, ratio_T = SURROGATES[rule.kind](log_ratio_T, advantage_T, rule)
        policy_weight_T = block.expand(self.policy_weight_N)
        grad_T = policy_weight_T * slope_T
        loss_T = policy_weight_T * value_T
        kl_T = torch.zeros_like(policy_T)
        if self.objective.kl_loss is not None:
            kl_T, kl_slope_T = self._kl(block, self.objective.kl_loss, log_ratio_T)
            kl_weight_T = block.expand(self.kl_weight_N)
            grad_T = grad_T + kl_weight_T * kl_slope_T
            loss_T = loss_T + kl_weight_T * kl_T
        grad_T = torch.where(block.mask_T, grad_T, 0.0)
        square_T = grad_T.double() ** 2
        miss_T = (1 - policy_T.double().exp()) ** 2
        self._sum(block, "policy_N", value_T)
        self._sum(block, "advantage_N", advantage_T)
        self._sum(block, "kl_N", kl_T)
        self._sum(block, "low_clipped_N", (ratio_T < 1 - rule.clip_low) & (advantage_T < 0))
        self._sum(block, "high_clipped_N", (ratio_T > 1 + rule.clip_high) & (advantage_T > 0))
        self._sum(block, "log_ratio_N", log_ratio_T)
        self._sum(block, "grad_l1_N", grad_T.abs())
        self._sum(block, "grad_sq_N", square_T)
        self._sum(block, "logits_low_sq_N", square_T * miss_T)
        if self.has_logits:
            spread_T = 1 - 2 * policy_T.double().exp() + block.column("sum_pi_squared").double()
            self._sum(block, "logits_sq_N", square_T * spread_T)
        other_T = grad_T if reference_T is None else reference_T
        self._sum(block, "versus_l1_N", (grad_T - other_T).abs())
        self._sum(block, "versus_dot_N", grad_T.double() * other_T)
        if self.kept is not None:
            mask_T = block.mask_T
            kept = (advantage_T, kl_T, torch.where(mask_T, ratio_T, 0.0), torch.where(mask_T, loss_T, 0.0), grad_T)
            self.kept.append(kept)
        return grad_T

    def _kl(self, block: _Block, term: KlTerm, log_ratio_T: Tensor) -> kl.Term:
        u_T = block.column(term.log_probs) - block.column("ref_log_probs")
        ratio_T = log_ratio_T.exp() if term.ratio_weighted else None
        return kl.term(term.estimator, u_T, ratio_T, straight_through=term.straight_through, clamp=term.clamp)

    def _sum(self, block: _Block, name: str, x_T: Tensor) -> None:
        self.sums.setdefault(name, []).append(block.per_row(x_T))

    def result(self) -> tuple[TokenPart, PerToken | None]:
        """Put the blocks together."""
        empty = torch.zeros(0, dtype=torch.float64, device=self.batch.device)
        names = [name for name in TokenPart.__dataclass_fields__ if name not in ("layout", "weight_N", "kl_loss_N")]
        sums = {name: torch.cat(self.sums[name]) if name in self.sums else empty for name in names}
        kl_loss_N = sums["kl_N"] * self.coef * self.kl_N
        sums["policy_N"] = sums["policy_N"] * self.policy_N
        sums["advantage_N"] = sums["advantage_N"] * self.policy_N
        logits = sums.pop("logits_sq_N") if self.has_logits else None
        sums.pop("logits_sq_N", None)
        tokens = TokenPart(layout=self.layout, weight_N=self.weight_N, kl_loss_N=kl_loss_N, logits_sq_N=logits, **sums)
        if self.kept is None:
            return tokens, None
        columns = [torch.cat(column) for column in zip(*self.kept, strict=True)] or [empty] * 5
        return tokens, PerToken(*columns)
