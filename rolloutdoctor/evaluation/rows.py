"""The first pass of an evaluation: scores, baseline rows and advantages, everything with one value per row."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import FAILED, PROMPT_LENGTH, TRUNCATED
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.drawn_rows import as_estimated, drawn_advantages
from rolloutdoctor.evaluation.layouts import layout_of
from rolloutdoctor.evaluation.padding_rows import logged_size, padding_rows
from rolloutdoctor.evaluation.response_ends import has_status
from rolloutdoctor.evaluation.scores import (
    ends_masked,
    first_of_trajectory,
    named_scores,
    response_scores,
    reward_kl_tokens,
    reward_penalty,
    rollout_weights,
    task_scores,
    token_scores,
    whitening_population,
)
from rolloutdoctor.formulas.advantages.float32 import (
    centred,
    centred_by_weight,
    normalised_sums,
    one_pass_scores,
    standard_scores,
    zero_std_flags,
)
from rolloutdoctor.formulas.advantages.group_ids import by_number
from rolloutdoctor.formulas.advantages.length_terms import Lengths, shaped, spans
from rolloutdoctor.formulas.advantages.levels import Normalised, alone, normalised
from rolloutdoctor.formulas.advantages.normalised import normalised_rows
from rolloutdoctor.formulas.advantages.response_tokens import token_rewards
from rolloutdoctor.formulas.advantages.scores import Scores
from rolloutdoctor.formulas.advantages.table import ESTIMATORS, RESPONSE_ESTIMATORS, TOKEN_ESTIMATORS
from rolloutdoctor.formulas.advantages.whitening import Population, whiten_every_token
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, KlBuffer, Objective, RowSet, Scope
from rolloutdoctor.objective.required_columns import advantage_columns, reward_kl_columns
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.rounding import Radius
from rolloutdoctor.results.errors import CannotComputeError, naming


@dataclass(frozen=True, eq=False)
class RowResult:
    """The first pass: everything that has one value per row.

    Attributes:
        objective: what was evaluated.
        score_N: ``[N]`` float64, the reward that the estimator sees, any KL penalty included.
        in_baseline_N: ``[N]`` bool, rows that enter baselines and scales.
        length_N: ``[N]`` float64, trained tokens; None without a mask.
        rejected_N: ``[N]`` bool, rows without a trained token; None without a mask.
        zero_std_N: ``[N]`` bool, `RowSet.ZERO_STD`.
        advantage_N: ``[N]`` float64; None for estimators with a time axis.
        baseline_N: ``[N]`` float64, what was subtracted from the score; None like `advantage_N`.
        advantage_T: ``[T]`` advantages for estimators with a time axis, else None.
        weight_T: ``[T]`` importance weights of the rollout correction; None without any, or without their columns.
        edited_radius: radius of `advantage_N`, ``[N]``, where that was edited; None: that of the estimator.
    """

    objective: Objective
    score_N: Tensor
    in_baseline_N: Tensor
    length_N: Tensor | None
    rejected_N: Tensor | None
    zero_std_N: Tensor
    advantage_N: Tensor | None
    baseline_N: Tensor | None
    advantage_T: Tensor | None = None
    weight_T: Tensor | None = None
    edited_radius: Radius | None = None

    def voting_N(self, x_N: Tensor) -> Tensor:
        """`x_N` for baseline rows, NaN for the rest."""
        return torch.where(self.in_baseline_N, x_N, torch.nan)


def row_parts(
    batch: RolloutBatch, objectives: Mapping[str, Objective], dtype: torch.dtype
) -> dict[str, RowResult | None]:
    """Run the first pass for several objectives; once for those that differ only in which rows carry which term."""
    alike: list[Objective] = []
    parts: list[RowResult | None] = []
    by_name = {}
    for name, objective in objectives.items():
        bare = replace(objective, policy=Scope(), kl=Scope(), denominator=Scope(), metric=Scope())
        if bare not in alike:
            same = next((part for other, part in zip(alike, parts, strict=True) if _is_same(bare, other, part)), None)
            alike.append(bare)
            parts.append(evaluate_rows(batch, objective, dtype) if same is None else same)
        part = parts[alike.index(bare)]
        by_name[name] = None if part is None else replace(part, objective=objective)
    return by_name


def _is_same(objective: Objective, other: Objective, part: RowResult | None) -> bool:
    """True if an objective gives what another gave: they differ in rows left out of baselines, and there are none."""
    if part is None or part.rejected_N is None:
        return False
    if replace(objective, baseline_rows=other.baseline_rows) != other:
        return False
    without = objective.baseline_rows.without ^ other.baseline_rows.without
    return not (bool(part.rejected_N.any()) or bool(part.score_N.isnan().any()) or without - _UNUSUAL)


_UNUSUAL = {RowSet.REJECTED, RowSet.TRUNCATED, RowSet.UNSCORED}
"""Rows that most steps have none of."""


def evaluate_rows(batch: RolloutBatch, objective: Objective, dtype: torch.dtype = torch.float32) -> RowResult | None:
    """Run the first pass; None if a column that the advantages need is missing."""
    with naming(objective.trainer):
        return _rows(batch, objective, dtype)


def _rows(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> RowResult | None:
    if not batch.has(*advantage_columns(objective)):
        return None
    batch = _as_compared(batch, objective)
    score_N = _penalised(batch, objective, dtype)
    weight_T = rollout_weights(batch, objective, dtype)
    length_N = rejected_N = None
    if "response_mask" in batch.per_token:
        length_N = batch.trained.diff().double()
        rejected_N = length_N == 0
    in_baseline_N = _counted(batch, objective.baseline_rows.without, score_N, rejected_N)
    rule = objective.advantage
    if rule.groups_of is not None:
        refuse_other_sizes(batch, rule.groups_of)
    if rule.length_term is not None:
        score_N = shaped_by_length(batch, objective, score_N, in_baseline_N, dtype)
    if rule.spec.axis is not Axis.ROWS:
        nobody_N = torch.zeros_like(in_baseline_N)
        advantage_T = _token_advantages(batch, objective, score_N, in_baseline_N, weight_T, dtype)
        return RowResult(
            objective, score_N, in_baseline_N, length_N, rejected_N, nobody_N, None, None, advantage_T, weight_T
        )
    groups = compared_groups(batch, objective)
    first_N = first_of_trajectory(batch, objective, groups, score_N, in_baseline_N)
    if first_N is not None:
        in_baseline_N &= first_N == torch.arange(len(first_N), device=first_N.device)
    clean_N = torch.where(in_baseline_N, score_N, 0.0)
    named = named_scores(batch, objective, dtype)
    counted_N = torch.zeros_like(score_N) if length_N is None else length_N
    if rule.weighs_masked:
        counted_N = batch.rows.diff().double()
    clean = {key: torch.where(in_baseline_N, x, 0.0) for key, x in named.items()}
    over = whitening_population(batch, rule)
    scores = Scores(clean_N, in_baseline_N, counted_N, groups, clean, _scaled_together(batch, objective), over, first_N)
    advantages = scores.shared(ESTIMATORS[rule.estimator](scores, rule))
    value_N = _without_masked_ends(batch, advantages.value_N, rule)
    if rule.whitened:
        value_N = _whitened(value_N, counted_N, over, rule)
    if rule.token_levels is not None:
        value_N = normalised(value_N, counted_N, groups.index_N, alone(groups), rule.token_levels).value
    equal_N = zero_std_rows(
        batch, list(named.values()) or [clean_N], scores.stats, partial=rule.spec.rewards == "every"
    )
    part = RowResult(
        objective=objective,
        score_N=score_N,
        in_baseline_N=in_baseline_N,
        length_N=length_N,
        rejected_N=rejected_N,
        zero_std_N=equal_N,
        advantage_N=value_N,
        baseline_N=advantages.baseline_N,
        weight_T=weight_T,
    )
    if rule.single:
        own_N = _in_single(batch, part)
        value_N = _without_masked_ends(batch, own_N if first_N is None else own_N[first_N], rule)
    return replace(part, advantage_N=_bounded(batch, value_N, equal_N, objective))


def _penalised(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> Tensor:
    """Scores of the rows without what their tokens are charged, ``[N]``."""
    score_N, penalty_T = task_scores(batch, objective, dtype), reward_penalty(batch, objective, dtype)
    return score_N if penalty_T is None else score_N - seg.total(penalty_T, batch.rows)


def _without_masked_ends(batch: RolloutBatch, value_N: Tensor, rule: AdvantageRule) -> Tensor:
    """Advantages, 0 where they are given to a last token that is masked, and so lost."""
    return torch.where(ends_masked(batch), 0.0, value_N) if rule.masked_end == "lost" else value_N


def _bounded(batch: RolloutBatch, value_N: Tensor, equal_N: Tensor, objective: Objective) -> Tensor:
    """Advantages as the rule bounds them: 0 of equal rewards, where it says so, and of rows that failed."""
    rule, failed_N = objective.advantage, failed_rows(batch, objective.baseline_rows.without)
    if rule.exact_zero:
        value_N = value_N.masked_fill(equal_N, 0.0)
    if failed_N is not None:
        # What failed says nothing of its response.
        value_N = value_N.masked_fill(failed_N, 0.0)
    return value_N if rule.bounds is None else value_N.clamp(*rule.bounds)


def _counted(batch: RolloutBatch, without: Container[RowSet], score_N: Tensor, rejected_N: Tensor | None) -> Tensor:
    """Tell which rows count in the baseline of their group, ``[N]`` bool."""
    counted_N = torch.ones_like(score_N, dtype=torch.bool)
    if RowSet.UNSCORED in without:
        counted_N &= ~score_N.isnan()
    if RowSet.PADDING in without:
        counted_N &= ~padding_rows(batch)
    failed_N = failed_rows(batch, without)
    if failed_N is not None:
        counted_N &= ~failed_N
    if rejected_N is not None and RowSet.REJECTED in without:
        counted_N &= ~rejected_N
    if rejected_N is not None and RowSet.TRUNCATED in without:
        counted_N &= ~(rejected_N & has_status(batch.statuses, TRUNCATED, batch.device))
    return counted_N


def failed_rows(batch: RolloutBatch, without: Container[RowSet]) -> Tensor | None:
    """Rows of rollouts that failed, of which a baseline leaves out some, ``[N]`` bool; None where it does not."""
    if RowSet.ERRORED in without:
        return has_status(batch.errors, None, batch.device)
    return has_status(batch.statuses, FAILED, batch.device) if RowSet.FAILED in without else None


def shaped_by_length(
    batch: RolloutBatch, objective: Objective, score_N: Tensor, in_baseline_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """Scores with what the lengths of the responses do to them, ``[N]`` float64: those of other rows are as before."""
    term, mask_T = objective.advantage.length_term, batch.column("response_mask")
    assert term is not None  # of the rule
    prompt_N = None
    if term.input:
        prompt_N = batch.column(PROMPT_LENGTH).to(dtype)
        # A prompt that is null is of unknown length, and so is what its group loses.
        prompt_N = torch.where(prompt_N < 0, torch.nan, prompt_N)
    lengths = Lengths(
        response_N=batch.rows.diff().to(dtype),
        trained_N=batch.trained.diff().to(dtype),
        prompt_N=prompt_N,
        turns_N=seg.total(spans(mask_T, batch.rows), batch.rows).to(dtype),
    )
    stats = GroupStats(compared_groups(batch, objective), in_baseline_N)
    clean_N = torch.where(in_baseline_N, score_N, 0.0).to(dtype)
    return torch.where(in_baseline_N, shaped(clean_N, lengths, stats, term).double(), score_N)


def _whitened(x: Tensor, tokens: Tensor, population: Population | None, rule: AdvantageRule) -> Tensor:
    """Whiten values over the trained tokens, as a rule does, ``[n]``."""
    epsilon = rule.whitening_epsilon
    return whiten_every_token(
        x, tokens, population, floor=rule.variance_floor, epsilon=epsilon, centres_only=rule.centres_only
    )


def token_levels(batch: RolloutBatch, value_V: Tensor, rule: AdvantageRule) -> Normalised:
    """Advantages of the trained tokens, normalised by level, ``[V]``; without groups they are all of one."""
    assert rule.token_levels is not None  # of the rule
    groups = batch.groups
    if groups is None:
        groups = Groups.of(torch.zeros(len(batch), dtype=torch.int64, device=batch.device))
    length_N = batch.trained.diff()
    group_V, single_V = (x_N.repeat_interleave(length_N) for x_N in (groups.index_N, alone(groups)))
    return normalised(value_V, torch.ones_like(value_V), group_V, single_V, rule.token_levels)


def in_separate_batches(batch: RolloutBatch, objective: Objective) -> bool:
    """True if every micro-batch of the step is generated, normalised and taken as a loss by itself (evaluation)."""
    return batch.split != TRAIN and objective.aggregation.eval_batches


def _scaled_together(batch: RolloutBatch, objective: Objective) -> Groups | None:
    """Rows that a scale over the batch is taken over; None: all of them."""
    if in_separate_batches(batch, objective):
        # The rewards of all ranks are gathered before they are normalised.
        return Groups.of(layout_of(batch, separate=True).forward_N)
    if "generation_id" in batch.per_row and objective.aggregation.eval_batches:
        return Groups.of(layout_of(batch, separate=False).generation_N)
    return None


def _token_advantages(
    batch: RolloutBatch,
    objective: Objective,
    score_N: Tensor,
    in_baseline_N: Tensor,
    weight_T: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Advantages with one value per token, ``[T]`` float64."""
    rule, mask_T = objective.advantage, batch.column("response_mask")
    if rule.spec.axis is Axis.TRAINED_TOKENS:
        advantage_T = torch.zeros(batch.tokens, dtype=torch.float64, device=batch.device)
        at_end_N = None
        if rule.spec.at_end:
            clean_N = torch.where(in_baseline_N, task_scores(batch, objective, dtype), 0.0)
            scores = Scores(clean_N, in_baseline_N, torch.zeros_like(clean_N), compared_groups(batch, objective))
            at_end_N = ESTIMATORS[rule.of_group or "grpo"](scores, rule).value_N
        estimated = as_estimated(batch, rule)
        trained = token_scores(estimated, objective, in_baseline_N, weight_T, dtype, at_end_N)
        value_V = TOKEN_ESTIMATORS[rule.estimator].advantages(trained, rule)
        if rule.whitened:
            over = whitening_population(batch, rule) if rule.whitened_over == "context-slice" else None
            value_V = _whitened(value_V, torch.ones_like(value_V), over, rule)
        if rule.token_levels is not None:
            value_V = token_levels(batch, value_V, rule).value
        if rule.drawn:
            return drawn_advantages(batch, trained, value_V, rule)[0]
        advantage_T[mask_T] = value_V
        return advantage_T if rule.bounds is None else advantage_T.clamp(*rule.bounds)
    groups = compared_groups(batch, objective) if rule.spec.has_groups else None
    per_response = response_scores(batch, objective, score_N, in_baseline_N, groups, dtype)
    advantage_T = RESPONSE_ESTIMATORS[rule.estimator](per_response, rule)
    if rule.whitened:
        population = whitening_population(batch, rule)
        advantage_T = whiten_every_token(
            advantage_T, mask_T, population, floor=rule.variance_floor, centres_only=rule.centres_only
        )
    return advantage_T if rule.bounds is None else advantage_T.clamp(*rule.bounds)


def compared_groups(batch: RolloutBatch, objective: Objective) -> Groups:
    """Rows that are compared with each other: the groups, or what the trainer makes of them.

    All rows where it falls back to the batch; groups whose ids are one number where it reads them as numbers.

    Raises:
        CannotComputeError: if such a number is one that the trainer fails on.
    """
    groups = batch.groups
    assert groups is not None  # advantage_columns asked for it
    rule = objective.advantage
    if rule.by_task:
        return _of_tasks(batch)
    if rule.batch_if_unequal and len(groups.sizes) > 1:
        return Groups.of(torch.zeros_like(groups.index_N))
    return by_number(groups, batch.group_ids) if rule.numeric_ids == "always" else groups


def _as_compared(batch: RolloutBatch, objective: Objective) -> RolloutBatch:
    """The rows in the groups in which an objective compares them, where these are not their own."""
    return replace(batch, groups=_of_tasks(batch), group_ids=()) if objective.advantage.by_task else batch


def _of_tasks(batch: RolloutBatch) -> Groups:
    """Rows of one task of a step; those of which no task is known stay in their group."""
    assert batch.groups is not None  # advantage_columns asked for it
    task_N, group_N = batch.per_row["task_id"], batch.groups.index_N
    own_N = torch.stack([batch.number_N.to(task_N.device), task_N, torch.where(task_N == 0, group_N, 0)])
    return Groups.of(torch.unique(own_N, dim=1, return_inverse=True)[1])


def refuse_other_sizes(batch: RolloutBatch, size: int) -> None:
    """Refuse a step of which groups that are cut by position are not the groups of the rows.

    Args:
        batch: the step.
        size: rows of every group; 0: any number, but the same.

    Raises:
        CannotComputeError: if a group has another size.
    """
    sizes = set() if batch.groups is None else set(batch.groups.sizes)
    if len(sizes) > 1 or (size and sizes - {size}):
        raise CannotComputeError(
            "the batch is cut into groups of one size by position, and the groups of this step have others"
        )


def zero_std_rows(batch: RolloutBatch, scores: Sequence[Tensor], stats: GroupStats, *, partial: bool = False) -> Tensor:
    """Rows of groups whose baseline rows all have equal rewards, in each of some ``[N]`` scores, ``[N]`` bool.

    Never eval rows, and never groups with fewer than two baseline rows. With `partial`, a score that some of them
    do not have (NaN) is compared among those that do.
    """
    if batch.split != TRAIN:
        return torch.zeros_like(stats.in_baseline_N)
    equal_G = stats.count_G > 1
    for score_N in scores:
        having = GroupStats(stats.groups, stats.in_baseline_N & ~score_N.isnan()) if partial else stats
        equal_G &= (having.spread(score_N) == 0) | (having.count_G == 0)
    return stats.per_row(equal_G)


def stored_kl(batch: RolloutBatch, objective: Objective, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Per-token KL as the trainer stores it for its metric, ``[T]``, masked tokens included.

    None if the trainer stores none, or a column it needs is missing.
    """
    if objective.kl_reward is None or not objective.stores_kl or not batch.has(*reward_kl_columns(objective)):
        return None
    kl_T = reward_kl_tokens(batch, objective, dtype)
    if objective.kl_buffer is KlBuffer.COPY:
        return kl_T
    if not batch.has("reward"):
        return None
    penalty_T = None if kl_T is None else objective.kl_reward.coef * kl_T.double()
    return token_rewards(batch.column("reward").to(dtype).double(), penalty_T, batch.rows)


def std_flagged(batch: RolloutBatch, part: RowResult) -> Tensor:
    """Rows that the trainer flags as zero-std, ``[N]`` bool, by float32 statistics of the baseline rows."""
    assert batch.groups is not None  # advantage_columns asked for it
    rule, batches = part.objective.advantage, _scaled_together(batch, part.objective)
    if rule.spec.rewards != "every":
        return zero_std_flags(part.voting_N(part.score_N), batch.groups, rule.scale, batches)
    return zero_std_flags(_sums_in_single(batch, part), batch.groups, "batch", batches)


def zero_advantages(batch: RolloutBatch, part: RowResult) -> Tensor:
    """Rows whose advantage is exactly 0 in float32, ``[N]`` bool: the mean of equal rewards need not be their value.

    Where it is 0 to rounding, the logged one says whether it is 0, and without any the float32 mean of the group.
    """
    logged_N = logged_size(batch)
    if part.advantage_N is None:
        assert part.advantage_T is not None  # a first pass has one of the two
        size_T = torch.where(batch.column("response_mask"), part.advantage_T.abs(), 0.0)
        return seg.high(size_T, batch.rows).clamp(min=0) == 0
    assert batch.groups is not None  # estimators with one advantage for each row ask for group_id
    if logged_N is None:
        votes_N = part.in_baseline_N
        if part.objective.advantage.spec.relative and part.baseline_N is not None:
            votes_N = votes_N & (part.baseline_N > 0)
        logged_N = torch.where(votes_N, _centred_in_single(batch, part).abs(), 0.0)
    stats = GroupStats(batch.groups, part.in_baseline_N)
    size_N = stats.per_row(stats.high(part.score_N.abs())).clamp(min=0)
    # A value that was edited, and is none of the logged ones, is no rounding.
    residue_N = part.advantage_N.abs() <= _RESIDUE * size_N
    return ~part.in_baseline_N | (residue_N & (logged_N == 0))


def _centred_in_single(batch: RolloutBatch, part: RowResult) -> Tensor:
    """Scores less the float32 mean of their group, weighted where the estimator weighs them, ``[N]`` float32."""
    assert batch.groups is not None  # advantage_columns asked for it
    score_N = part.voting_N(part.score_N)
    if not part.objective.advantage.spec.weighs_lengths:
        return centred(score_N, batch.groups)
    assert part.length_N is not None  # such an estimator asks for the mask
    length_N = batch.rows.diff() if part.objective.advantage.weighs_masked else part.length_N
    return centred_by_weight(score_N, torch.where(part.in_baseline_N, length_N.float(), 0.0), batch.groups)


_RESIDUE = 64 * 2.0**-24
"""Largest residue of a float32 mean, in units of the largest score; for groups of a thousand it is far smaller."""


def _in_single(batch: RolloutBatch, part: RowResult) -> Tensor:
    """Advantages with the trainer's own float32 statistics, ``[N]`` float64."""
    assert batch.groups is not None  # advantage_columns asked for it
    rule, batches = part.objective.advantage, _scaled_together(batch, part.objective)
    if rule.one_pass:
        return _in_one_pass(batch, part)
    score_N, groups, scale = part.voting_N(part.score_N), batch.groups, rule.scale
    if rule.spec.rewards == "every":
        score_N, scale = _sums_in_single(batch, part), "batch"
        groups = Groups.of(torch.zeros_like(groups.index_N)) if batches is None else batches
    return standard_scores(score_N, groups, scale, rule.epsilon, batches).double()


def _in_one_pass(batch: RolloutBatch, part: RowResult) -> Tensor:
    """Advantages whose deviation is the root of a difference of two float32 means, ``[N]`` float64."""
    assert batch.groups is not None  # advantage_columns asked for it
    rule, votes_N = part.objective.advantage, part.in_baseline_N
    chosen_B = votes_N.nonzero().squeeze(1)
    groups = Groups.of(batch.groups.index_N[chosen_B])
    parts = [batch.rewards[name] for name in sorted(batch.rewards)] if rule.spec.rewards == "every" else [part.score_N]
    sum_N = torch.zeros(len(batch), dtype=torch.float32, device=batch.device)
    for weight, score_N in zip(rule.reward_weights or (1.0,) * len(parts), parts, strict=True):
        found_B = one_pass_scores(score_N[chosen_B], groups, rule.epsilon, others=rule.spec.of_others)
        sum_N[chosen_B] += weight * found_B
    return (normalised_rows(sum_N, votes_N) if rule.spec.rewards == "every" else sum_N).double()


def _sums_in_single(batch: RolloutBatch, part: RowResult) -> Tensor:
    """Weighted sums of rewards that are normalised one by one, ``[N]`` float32."""
    assert batch.groups is not None  # advantage_columns asked for it
    rule = part.objective.advantage
    parts = [part.voting_N(x_N) for x_N in batch.rewards.values()] or [part.voting_N(part.score_N)]
    return normalised_sums(parts, rule.reward_weights or (1.0,) * len(parts), batch.groups, rule.epsilon)


def in_scope(batch: RolloutBatch, part: RowResult, scope: Scope) -> Tensor:
    """Rows of a scope, ``[N]`` bool."""
    inside_N = torch.ones_like(part.in_baseline_N)
    for rows in scope.without:
        inside_N &= ~_row_set(batch, part, rows)
    return inside_N


def _row_set(batch: RolloutBatch, part: RowResult, rows: RowSet) -> Tensor:
    match rows:
        case RowSet.ZERO_STD:
            return part.zero_std_N
        case RowSet.UNSCORED:
            return part.score_N.isnan()
        case RowSet.REJECTED:
            assert part.rejected_N is not None  # scopes other than the baseline are read only with a mask at hand
            return part.rejected_N
        case RowSet.TRUNCATED:
            assert part.rejected_N is not None
            return part.rejected_N & has_status(batch.statuses, TRUNCATED, batch.device)
        case RowSet.STD_FLAGGED:
            return std_flagged(batch, part)
        case RowSet.PADDING:
            return padding_rows(batch)
        case RowSet.ERRORED | RowSet.FAILED:
            failed_N = failed_rows(batch, {rows})
            assert failed_N is not None
            return failed_N
        case RowSet.ZERO_ADVANTAGE:
            return zero_advantages(batch, part)
