"""Inputs of the estimators for a step: scores, token rewards, the KL penalty inside them, and importance weights."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import PROMPT_LENGTH
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.advantages.response_tokens import ResponseScores
from rolloutdoctor.formulas.advantages.scores import Scores
from rolloutdoctor.formulas.advantages.tokens import TokenScores
from rolloutdoctor.formulas.advantages.whitening import Population, context_slices
from rolloutdoctor.formulas.corrections.importance import importance_weights
from rolloutdoctor.formulas.corrections.masked import LogRatios
from rolloutdoctor.formulas.corrections.sampler import Corrected, Rows, corrected
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, Objective
from rolloutdoctor.objective.required_columns import weight_columns
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError


def task_scores(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> Tensor:
    """The task's score of each row, before any KL penalty, ``[N]`` float64.

    The unmasked sum of `token_rewards` where the trainer sums them and the batch has them, else `reward`.
    """
    if objective.advantage.spec.rewards == "none":
        return torch.full((len(batch),), torch.nan, dtype=torch.float64, device=batch.device)
    rule = objective.advantage
    if rule.sums_tokens and "token_rewards" in batch.per_token:
        reward_T = batch.column("token_rewards").to(dtype)
        if rule.masked_end == "zero":
            reward_T = torch.where(batch.column("response_mask"), reward_T, 0.0)
        return seg.total(reward_T, batch.rows)
    # The trainers hold rewards in the dtype of the tokens; the statistics of these values are float64.
    score_N = penalised_rewards(batch, rule, dtype)
    if (rule.reward_shift, rule.reward_factor) != (0, 1):
        score_N = (score_N + rule.reward_shift) * rule.reward_factor
    score_N = score_N.double()
    if rule.null_is_zero:
        score_N = score_N.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if rule.empty_is_zero:
        score_N = torch.where(batch.rows.diff() == 0, 0.0, score_N)
    if rule.masked_end == "zero":
        score_N = torch.where(ends_masked(batch), 0.0, score_N)
    return score_N if rule.reward_bounds is None else score_N.clamp(*rule.reward_bounds)


def penalised_rewards(batch: RolloutBatch, rule: AdvantageRule, dtype: torch.dtype) -> Tensor:
    """The reward of each row without what it loses for its length, ``[N]`` in the dtype of the tokens.

    Source: AReaL ``reward_overlong_penalty`` (areal/utils/functional/functional.py); DAPO, arXiv 2503.14476, eq. 13.
    """
    reward_N = batch.column("reward").to(dtype)
    if rule.overlong is None:
        return reward_N
    spare_N = (rule.overlong.start - batch.trained.diff()).to(dtype)
    return reward_N + (spare_N / rule.overlong.span * rule.overlong.factor).clamp(max=0)


def ends_masked(batch: RolloutBatch) -> Tensor:
    """Rows whose last response token is masked, ``[N]`` bool; a row without a token has none."""
    filled_N = batch.rows.diff() > 0
    found_N = torch.zeros_like(filled_N)
    found_N[filled_N] = ~batch.column("response_mask")[batch.rows[1:][filled_N] - 1]
    return found_N


def last_trained(batch: RolloutBatch) -> Tensor:
    """Return the place of the last trained token of each row that has one, among the tokens of the batch, int64."""
    mask_T = batch.column("response_mask")
    place_T = torch.where(mask_T, torch.arange(len(mask_T), device=mask_T.device), -1)
    return seg.high(place_T.double(), batch.rows)[seg.total(mask_T, batch.rows) > 0].long()


def named_scores(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> dict[str, Tensor]:
    """The reward functions that are normalised one by one, ``[N]`` float64 each.

    Raises:
        CannotComputeError: if the run has no reward of such a name, or not as many as there are weights.
    """
    if objective.advantage.spec.rewards == "every":
        return _every_reward(batch, len(objective.advantage.reward_weights), dtype)
    absent = [key for key in objective.advantage.reward_keys if key not in batch.rewards]
    if absent:
        raise CannotComputeError(
            f"column rewards has no {', '.join(absent)} (it has: {', '.join(batch.rewards) or 'none'})"
        )
    return {key: batch.rewards[key].to(dtype).double() for key in objective.advantage.reward_keys}


def _every_reward(batch: RolloutBatch, weights: int, dtype: torch.dtype) -> dict[str, Tensor]:
    if weights not in (0, len(batch.rewards)):
        raise CannotComputeError(
            f"reward_weights has {weights} numbers, and column rewards has {len(batch.rewards)}: "
            f"{', '.join(batch.rewards)}"
        )
    return {key: reward_N.to(dtype).double() for key, reward_N in batch.rewards.items()}


def reward_kl_tokens(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> Tensor | None:
    """Per-token KL of the penalty inside the reward, ``[T]``; zeros if its coefficient is 0.

    Masked tokens are included, unless the penalty leaves them out. None if there is no such penalty.

    Raises:
        CannotComputeError: if the coefficient changes from step to step, and the step's is not known.
    """
    term = objective.kl_reward
    if term is None:
        return None
    term = term.at_step({})
    if term.coef == 0:
        return torch.zeros(batch.tokens, dtype=dtype, device=batch.device)
    u_T = batch.column(term.log_probs).to(dtype)
    if term.reference is not None:
        u_T = u_T - batch.column(term.reference).to(dtype)
    kl_T = kl.term(term.estimator, u_T, input_bound=term.input_bound, clamp=term.clamp, finite=term.finite)[0]
    if not term.masked:
        return kl_T
    mask_T = batch.column("response_mask") if term.of_trained else mask_before(batch)
    return torch.where(mask_T, kl_T, 0.0)


def mask_before(batch: RolloutBatch) -> Tensor:
    """The mask before rejection, ``[T]`` bool: the mask itself where no other was logged."""
    return batch.column("response_mask_pre" if "response_mask_pre" in batch.per_token else "response_mask")


def reward_penalty(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> Tensor | None:
    """Return the KL penalty in every token reward, ``[T]`` float64; None if the trainer subtracts none."""
    if objective.kl_reward is None or not objective.advantage.sums_tokens:
        return None
    kl_T = reward_kl_tokens(batch, objective, dtype)
    return None if kl_T is None else objective.kl_reward.coef * kl_T.double()


def log_ratios(batch: RolloutBatch, dtype: torch.dtype) -> LogRatios:
    """Return the log-ratios of trainer and sampler, on the mask before rejection.

    Raises:
        CannotComputeError: if no token is left, where verl fails.
    """
    value_T = batch.column("old_log_probs").to(dtype) - batch.column("rollout_log_probs").to(dtype)
    return LogRatios(value_T, mask_before(batch), batch.rows)


def ratios_at_loss(batch: RolloutBatch, objective: Objective, micro_N: Tensor, dtype: torch.dtype) -> LogRatios:
    """Log-ratios of the trainer at the loss to the sampler, on the mask of the loss, a part for each micro-batch.

    Args:
        batch: the step.
        objective: whose surrogate says what the log-probs are compared with.
        micro_N: ``[N]`` int64, the row's micro-batch.
        dtype: of the token values.

    Raises:
        CannotComputeError: if a micro-batch has no token, where verl fails.
    """
    value_T = batch.column("policy_log_probs").to(dtype) - batch.column(objective.surrogate.old).to(dtype)
    return LogRatios(value_T, batch.column("response_mask"), batch.rows, micro_N)


def rollout_weights(batch: RolloutBatch, objective: Objective, dtype: torch.dtype) -> Tensor | None:
    """Importance weights of the rollout correction, ``[T]``; None if there are none or a column is missing.

    Raises:
        CannotComputeError: where verl fails.
    """
    rule = objective.correction.weights
    if rule is None or not batch.has(*weight_columns(objective)):
        return None
    return importance_weights(log_ratios(batch, dtype), rule).value_T


def sampler_correction_of(
    batch: RolloutBatch, objective: Objective, micro_N: Tensor, dtype: torch.dtype
) -> Corrected | None:
    """Weights and rejections that the loss itself makes of sampler and trainer differing; None where it makes none.

    Args:
        batch: the step.
        objective: whose `sampler_correction` says what.
        micro_N: ``[N]`` int64, the row's micro-batch.
        dtype: of the token values.
    """
    if objective.sampler_correction is None:
        return None
    mask_T = batch.column("response_mask")
    trainer_T, sampler_T = (
        torch.where(mask_T, batch.column(name).to(dtype), 0.0) for name in ("old_log_probs", "rollout_log_probs")
    )
    return corrected(Rows(trainer_T, sampler_T, mask_T, batch.rows, micro_N), objective.sampler_correction)


def token_scores(
    batch: RolloutBatch,
    objective: Objective,
    in_baseline_N: Tensor,
    weight_T: Tensor | None,
    dtype: torch.dtype,
    at_end_N: Tensor | None = None,
) -> TokenScores:
    """Return the inputs of an estimator with a time axis: the trained tokens alone.

    The reward of a row is at its last token, or at the last one that is trained, unless the batch has `token_rewards`;
    or `at_end_N`, ``[N]``, is.
    """
    if at_end_N is None and "token_rewards" in batch.per_token:
        reward_T = batch.column("token_rewards").to(dtype).double()
    else:
        reward_T = torch.zeros(batch.tokens, dtype=torch.float64, device=batch.device)
        at_end_N = task_scores(batch, objective, dtype) if at_end_N is None else at_end_N
        if objective.advantage.masked_end == "last":
            end_T = last_trained(batch)
            reward_T[end_T] = seg.expand(at_end_N, batch.rows)[end_T]
        else:
            filled_N = batch.rows.diff() > 0
            reward_T[batch.rows[1:][filled_N] - 1] = at_end_N[filled_N]
    penalty_T = reward_penalty(batch, objective, dtype)
    if penalty_T is not None:
        reward_T = reward_T - penalty_T
    mask_T = batch.column("response_mask")
    spec = objective.advantage.spec
    columns: dict[str, Tensor] = {}
    for name in spec.columns - {"group_id"}:
        values = batch.column(name).to(dtype)
        columns[name] = values if name in batch.per_row else values[mask_T]
    if weight_T is not None and spec.takes_weights:
        columns["is_weights"] = weight_T[mask_T]
    start_T = seg.expand(batch.rows[:-1], batch.rows)
    position_T = torch.arange(batch.tokens, device=batch.device) - start_T
    trained_N = seg.total(mask_T, batch.rows).long()
    return TokenScores(
        reward_V=reward_T[mask_T],
        offsets=torch.cat([trained_N.new_zeros(1), trained_N.cumsum(0)]),
        position_V=position_T[mask_T],
        in_baseline_N=in_baseline_N,
        groups=batch.groups if spec.has_groups else None,
        columns=columns,
        population=whitening_population(batch, objective.advantage),
    )


def whitening_population(batch: RolloutBatch, rule: AdvantageRule) -> Population | None:
    """Return the population of the moments of a whitening; None: the trained tokens, or a column is missing.

    Of an estimator over the trained tokens the masked ones count as 0.
    """
    rank_N = batch.per_row.get("rank")
    is_unknown = rule.whitened_over == "rank" and rank_N is None
    if rule.whitened_over == "trained" or is_unknown or "response_mask" not in batch.per_token:
        return None
    axis, trained_N, length_N = rule.spec.axis, batch.trained.diff(), batch.rows.diff()
    if rule.whitened_over == "padded":
        positions = len(batch) * int(length_N.max()) if len(batch) else 0
        return Population(zeros=float(positions - int(trained_N.sum())), moments=rule.whitened_moments)
    if rule.whitened_over == "response":
        if axis is Axis.TRAINED_TOKENS:
            return Population(zeros=float((length_N - trained_N).sum()), moments=rule.whitened_moments)
        masked = length_N - trained_N if axis is Axis.ROWS else ~batch.column("response_mask")
        return Population(masked=masked, moments=rule.whitened_moments)
    if rule.whitened_over == "context-slice":
        if axis is Axis.ROWS:
            return None  # of a row that is cut, each token has an advantage of its own
        part_T = context_parts(batch, rule.context_ranks)
        return Population(part=part_T if axis is Axis.ALL_TOKENS else part_T[batch.column("response_mask")], alone=True)
    part_N = torch.unique(rank_N, return_inverse=True)[1]
    if axis is Axis.ROWS:
        return Population(part=part_N)
    return Population(part=part_N.repeat_interleave(trained_N if axis is Axis.TRAINED_TOKENS else length_N))


def context_parts(batch: RolloutBatch, ranks: int) -> Tensor:
    """Return the rank of context parallelism that has each response token, ``[T]`` int64.

    Raises:
        CannotComputeError: if the tokens of a prompt are not known.
    """
    prompt_N, length_N = batch.per_row[PROMPT_LENGTH], batch.rows.diff()
    if bool((prompt_N < 0).any()):
        raise CannotComputeError("slices of context parallelism need prompt_ids in every row")
    place_T = torch.arange(batch.tokens, device=batch.device) - seg.expand(batch.rows[:-1], batch.rows)
    prompt_T, total_T = (seg.expand(x_N.long(), batch.rows) for x_N in (prompt_N, prompt_N + length_N))
    return context_slices(prompt_T + place_T, total_T, ranks)


def first_of_trajectory(
    batch: RolloutBatch, objective: Objective, groups: Groups, score_N: Tensor, in_baseline_N: Tensor
) -> Tensor | None:
    """The row that counts for each row's trajectory in its group, ``[N]`` int64: the first in the baseline.

    None where every row is its own. Source: miles ``_normalize_rewards_by_rollout``; verl
    ``compute_advantage_for_multi_trajectories`` takes the last row, of which the same is true if the rewards are equal.

    Raises:
        CannotComputeError: if the rows of one have different rewards, where miles fails, or with "last" different
            masks, of which some are empty: verl gives an empty last row, and so all rows, an advantage of 0.
    """
    trajectory_N = batch.per_row.get("trajectory_id")
    if trajectory_N is None or not objective.advantage.one_vote:
        return None
    row_N = torch.arange(len(trajectory_N), device=trajectory_N.device)
    own_N = torch.where(trajectory_N < 0, -1 - row_N, trajectory_N)
    index_N = torch.unique(torch.stack([groups.index_N, own_N]), dim=1, return_inverse=True)[1]
    place_N = torch.where(in_baseline_N, row_N, row_N + len(row_N))
    first_K = place_N.scatter_reduce(0, index_N, place_N, "amin", include_self=False)
    first_N: Tensor = first_K[index_N] % max(len(row_N), 1)
    differs_N = in_baseline_N & (score_N != score_N[first_N])
    if bool(differs_N.any()):
        raise CannotComputeError(
            f"{int(differs_N.sum())} rows have another reward than the first of their trajectory, which counts once"
        )
    if objective.advantage.one_vote == "last" and "response_mask" in batch.per_token:
        empty_N = batch.trained.diff() == 0
        differs_N = empty_N != empty_N[first_N]
        if bool(differs_N.any()):
            raise CannotComputeError(
                f"{int(differs_N.sum())} rows have no trained token or are of a trajectory with such a row: whether "
                "that is its last one, which leaves the others without an advantage, is not in the rows"
            )
    return None if bool((first_N == row_N).all()) else first_N


def response_scores(
    batch: RolloutBatch,
    objective: Objective,
    score_N: Tensor,
    in_baseline_N: Tensor,
    groups: Groups | None,
    dtype: torch.dtype,
) -> ResponseScores:
    """Return the inputs of an estimator over all response tokens.

    Args:
        batch: the step.
        objective: whose estimator it is.
        score_N: ``[N]`` float64 score of each row.
        in_baseline_N: ``[N]`` bool, rows that enter baselines.
        groups: rows that are compared with each other; None for estimators without groups.
        dtype: of the token values.
    """
    kl_T, term = reward_kl_tokens(batch, objective, dtype), objective.kl_reward
    reward_T, row_scores = None, None
    if objective.advantage.sums_tokens:
        # Its scores have the penalty in them.
        score_N = task_scores(batch, objective, dtype)
        if "token_rewards" in batch.per_token:
            reward_T = batch.column("token_rewards").to(dtype).double()
    if objective.advantage.masked_end == "lost" and groups is None:
        score_N = torch.where(ends_masked(batch), 0.0, score_N)
    if groups is not None:
        first_N = first_of_trajectory(batch, objective, groups, score_N, in_baseline_N)
        if first_N is not None:
            in_baseline_N = in_baseline_N & (first_N == torch.arange(len(first_N), device=first_N.device))
        clean_N = torch.where(in_baseline_N, score_N, 0.0)
        row_scores = Scores(clean_N, in_baseline_N, torch.zeros_like(score_N), groups, first_N=first_N)
    return ResponseScores(
        score_N=score_N,
        penalty_T=None if kl_T is None or term is None else term.coef * kl_T.double(),
        mask_T=batch.column("response_mask"),
        offsets=batch.rows,
        row_scores=row_scores,
        columns={name: batch.column(name) for name in objective.advantage.spec.columns - {"group_id"}},
        reward_T=reward_T,
    )
