"""Candidates with numbers that are solved from logged advantages: weights of reward functions, and the divisor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.search.candidates import Candidate, Known, of_trainer, recipe
from rolloutdoctor.search.hypotheses.advantage_fits import advantages_of, filled_advantages
from rolloutdoctor.search.hypotheses.advantage_lines import DIVISOR
from rolloutdoctor.search.hypotheses.hypothesis import Seen
from rolloutdoctor.search.step import Step


def solved_advantages(steps: Sequence[Step], candidates: Sequence[Candidate], premises: Known) -> Iterator[Candidate]:
    """Yield candidates whose numbers the logged advantages give: of trainers with weights, then of divisors.

    Args:
        steps: informative ones.
        candidates: of trainers, whose own numbers do not give the log.
        premises: the trainers, and their other options.
    """
    versions = {trainer.name: version for trainer, version in premises.trainers}
    for candidate in candidates:
        option = None if candidate.trainer is None else candidate.trainer.choices.weights_option
        if candidate.trainer is None or option is None or candidate.objective.advantage.spec.rewards != "every":
            continue
        for weights in _weights(steps, candidate):
            layers = premises.layers.get(candidate.trainer.name, ())
            yield from of_trainer(
                candidate.trainer, versions[candidate.trainer.name], [{**candidate.options, option: weights}], layers
            )
    tried = set[tuple[object, ...]]()
    for candidate in candidates:
        rule = candidate.objective.advantage
        key = (rule.estimator, rule.scale, candidate.objective.baseline_rows)
        if key in tried or not DIVISOR.applies(candidate.objective):
            continue
        tried.add(key)
        for hypothesis in DIVISOR.solve([_seen(steps, candidate)]):
            if hypothesis.objective is not None:
                yield recipe(hypothesis.objective(candidate.objective))


def _seen(steps: Sequence[Step], candidate: Candidate) -> list[Seen]:
    evaluations = ((step, step.evaluated(candidate, rows_only=True)) for step in steps)
    return [
        Seen(evaluation, step.advantage_N(candidate.objective), step.metrics, step.names)
        for step, evaluation in evaluations
        if evaluation is not None
    ]


def _weights(steps: Sequence[Step], candidate: Candidate) -> Iterator[tuple[float, ...]]:
    """Yield weights of the reward functions.

    In each step the logged advantages are a sum of those of each function among its group, times its weight over the
    deviation of that sum plus epsilon. Of their scale epsilon alone tells: a weight is 1, or the scale is solved.
    """
    epsilon = candidate.objective.advantage.epsilon
    factors = [factor for seen in _seen(steps, candidate) if (factor := _factors(seen, candidate)) is not None]
    for place in range(len(factors[0][1]) if factors else 0):
        telling = [(made_NF, factor_F) for made_NF, factor_F in factors if float(factor_F[place].abs()) > 1e-6]
        if not telling:
            continue
        relative_F = torch.stack([factor_F / factor_F[place] for _, factor_F in telling]).median(0).values
        yield _rounded(relative_F, 3)
        # The factor is w / (w s + epsilon), s being the deviation of the sum whose weight at this place is 1.
        over = [float(1 / factor_F[place] - (made_NF * relative_F).sum(1).std()) for made_NF, factor_F in telling]
        scale = epsilon / median(over) if median(over) else 0.0
        if scale > 0:
            yield from (_rounded(scale * relative_F, digits) for digits in (1, 2, 3))


def _rounded(weight_F: Tensor, digits: int) -> tuple[float, ...]:
    return tuple(float(f"{weight:.{digits}g}") for weight in weight_F.tolist())


def _factors(seen: Seen, candidate: Candidate) -> tuple[Tensor, Tensor] | None:
    """Return the advantages of each reward function, ``[N, F]``, and what the logged ones have of each, ``[F]``."""
    evaluation, rows = seen.evaluation, seen.evaluation.rows
    if rows is None or rows.advantage_N is None or seen.advantage_N is None:
        return None
    rule = AdvantageRule(estimator="grpo", epsilon=candidate.objective.advantage.epsilon)
    objective = replace(evaluation.objective, advantage=rule, kl_reward=None)
    batch, logged_N = evaluation.batch, filled_advantages(evaluation, seen.advantage_N)
    of_functions = [
        advantages_of(evaluation, replace(batch, per_row={**batch.per_row, "reward": reward_N}), objective)
        for reward_N in batch.rewards.values()
    ]
    rewards = [x_N for x_N in of_functions if x_N is not None]
    if len(rewards) < 2 or len(rewards) < len(of_functions):
        return None
    able_N = torch.stack([*rewards, logged_N]).isfinite().all(0)
    made_NF = torch.stack(rewards, dim=1).double()[able_N]
    if len(made_NF) <= made_NF.shape[1]:
        return None
    return made_NF, torch.linalg.lstsq(made_NF, logged_N.double()[able_N, None]).solution[:, 0]
