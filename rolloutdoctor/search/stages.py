"""The candidates of each stage: settings of trainers, recipes that no trainer has, and a coefficient to be solved."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.aggregation import AGGREGATIONS
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, KlTerm, Objective
from rolloutdoctor.objective.stages import essence
from rolloutdoctor.search.candidates import Candidate, Known, limited, of_trainer, recipe, recipes
from rolloutdoctor.search.centred import CentredScores, has_row_values
from rolloutdoctor.search.coefficient import bounds, least_squares, shortest, solve
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis
from rolloutdoctor.search.hypotheses.loss_terms import LOSS_TERMS
from rolloutdoctor.search.hypotheses.metric_definitions import METRIC_DEFINITIONS
from rolloutdoctor.search.hypotheses.partitions import PARTITIONS
from rolloutdoctor.search.solved_advantages import solved_advantages
from rolloutdoctor.search.step import Step
from rolloutdoctor.search.trials import Trial, or_else, try_on
from rolloutdoctor.search.words import whose
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.spec import Trainer

_KL_WORDS = {
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "abs": "absolute log-ratio",
    "k3_clamped": "k3 of a clamped log-ratio, clamped to 10",
}


LEAST = 1e-4
"""Coefficients of a KL term below this are taken for 0, where the log cannot distinguish them."""


def advantage_candidates(steps: Sequence[Step], premises: Known) -> list[Candidate]:
    """Return the ways to compute advantages without a KL penalty: of trainers, and those that no trainer has."""
    candidates = _of_trainers(premises)
    return candidates + _within_scale(steps, _recipes_beside(candidates, premises))


def _recipes_beside(candidates: Sequence[Candidate], premises: Known) -> list[Candidate]:
    have = {essence(candidate.objective) for candidate in candidates}
    others = []
    for candidate in recipes((premises.recorded or candidates[0]).objective):
        core = essence(candidate.objective)
        if core not in have:
            have.add(core)
            others.append(candidate)
    return others


def _within_scale(steps: Sequence[Step], candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that some scale could bring to the logged advantages of the first steps; all have one for each row."""
    remaining = list(candidates)
    for step in steps[:2]:
        if remaining and not has_row_values(step, remaining[0].objective):
            return []
        centred = CentredScores(step)
        remaining = [candidate for candidate in remaining if centred.fits(candidate)]
    return remaining


def _of_trainers(premises: Known) -> list[Candidate]:
    candidates = [] if premises.recorded is None else [limited(premises.recorded, "advantage")]
    for trainer, version in premises.trainers:
        candidates += of_trainer(trainer, version, trainer.choices.advantage, premises.layers.get(trainer.name, ()))
    return candidates


def try_advantages(steps: Sequence[Step], premises: Known) -> Trial:
    """Find the ways to compute advantages that some steps leave.

    Penalties in the reward and other groups are tried where nothing else gives all values.
    """
    trial = try_on(steps, advantage_candidates(steps, premises), Step.advantages)
    is_compared = trial.fitting or trial.excluded
    if not is_compared or any(not candidate.is_recorded for candidate in trial.fitting):
        return trial
    other = try_on(steps, _penalised(steps, premises), Step.advantages)
    if other.fitting or trial.fitting:
        excluded = (*other.excluded, *trial.excluded)
        return Trial((*trial.fitting, *other.fitting), trial.nearest, excluded)
    solved = try_on(steps, solved_advantages(steps, _of_trainers(premises), premises), Step.advantages)
    if solved.fitting:
        return replace(solved, excluded=(*solved.excluded, *trial.excluded))
    regrouped = _within_scale(steps, _regrouped(_recipes_beside(_of_trainers(premises), premises)))
    return or_else(steps, trial, regrouped, Step.advantages)


def _regrouped(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    names = ("groups-by-position", "groups-tiled", "group-is-batch")
    edits = [partition for partition in PARTITIONS if partition.name in names]
    for candidate, edit in product(candidates, edits):
        if candidate.objective.advantage.spec.has_groups:
            regrouped = recipe(candidate.objective, edit)
            yield replace(regrouped, parts={**regrouped.parts, "groups": edit.words}, edits=(edit,))


def _penalised(steps: Sequence[Step], premises: Known) -> Iterator[Candidate]:
    """Candidates with a KL penalty in the reward, its coefficient solved on the first step."""
    for trainer, version in premises.trainers:
        option, layers = trainer.choices.penalty_option, premises.layers.get(trainer.name, ())
        if option is None or not steps or not steps[0].batch.has("ref_log_probs"):
            continue
        for choice in trainer.choices.penalty:
            guess = {**choice, option: 0.01}
            start = next(of_trainer(trainer, version, [guess], layers), None)
            coef = None if start is None or not _on_axis(steps[0], start) else _solved(steps[0], start)
            if coef is not None:
                yield from of_trainer(trainer, version, [{**choice, option: coef}], layers)


def _on_axis(step: Step, candidate: Candidate) -> bool:
    """False if a configuration gives tokens of a row different advantages and the log does not, or the reverse."""
    by_row = candidate.objective.advantage.spec.axis is Axis.ROWS
    if step.by_row:
        return by_row
    # A penalty makes the advantages of tokens differ wherever they have a time axis.
    return has_row_values(step, replace(candidate.objective, advantage=_ROW_RULE)) == by_row


_ROW_RULE = AdvantageRule(estimator="grpo")


def _solved(step: Step, start: Candidate) -> float | None:
    logged = _logged_advantages(step)
    term = start.objective.kl_reward
    if logged is None or term is None:
        return None
    index, value = logged

    def values(coef: float) -> Tensor | None:
        objective = replace(start.objective, kl_reward=replace(term, coef=coef))
        evaluation = step.rows(replace(start, objective=objective))
        if evaluation is None or evaluation.rows is None:
            return None
        rows = evaluation.rows
        if rows.advantage_N is not None:
            return rows.advantage_N[index] if step.by_row else _each_token(step, rows.advantage_N)[index]
        return rows.advantage_T[index] if rows.advantage_T is not None and not step.by_row else None

    return solve(values, value)


def _each_token(step: Step, value_N: Tensor) -> Tensor:
    return torch.repeat_interleave(value_N, step.batch.rows.diff())


def _logged_advantages(step: Step) -> tuple[Tensor, Tensor] | None:
    """Places and values of the logged advantages of trained tokens or of rows."""
    batch = step.batch
    if step.by_row:
        value = batch.column("advantage").double()
        index = (~value.isnan()).nonzero()[:, 0]
    elif "advantages" in batch.per_token and "response_mask" in batch.per_token:
        value = batch.column("advantages").double()
        index = (batch.column("response_mask") & ~value.isnan()).nonzero()[:, 0]
    else:
        return None
    return index, value[index]


def kl_candidates(premises: Known, advantage: Candidate) -> list[Candidate]:
    """Return the KL terms of the loss, and the averages of their metric, given how advantages are computed."""
    candidates = []
    for trainer, version, layers in _after(premises, advantage):
        unit = {} if trainer.roles.kl is None else {trainer.roles.kl: 1.0}
        choices = [{**choice, **unit} for choice in trainer.choices.kl]
        candidates += [
            replace(
                candidate,
                objective=_with_advantage(candidate.objective, advantage),
                options={name: value for name, value in candidate.options.items() if name not in unit},
                parts=kl_parts(candidate.objective),
            )
            for candidate in of_trainer(trainer, version, choices, layers)
        ]
    if not candidates and advantage.objective.kl_reward is not None:
        candidates = [replace(advantage, parts=kl_parts(advantage.objective), options={})]
    if premises.recorded is not None:
        candidates.insert(0, replace(limited(premises.recorded, "kl"), parts=kl_parts(premises.recorded.objective)))
    return candidates


def try_kl(steps: Sequence[Step], premises: Known, advantage: Candidate) -> Trial:
    """Find the KL terms and the averages of their metric that some steps leave.

    Other averages than a trainer's own are tried where that gives not all values.
    """
    candidates = kl_candidates(premises, advantage)
    trial = try_on(steps, candidates, Step.kl)
    like = next((candidate for candidate in candidates if candidate.objective.kl_loss is not None), None)
    if trial.fitting or not trial.excluded or like is None:
        return trial
    return or_else(steps, trial, _kl_recipes(like), Step.kl)


_LOG_PROBS: tuple[Literal["policy_log_probs", "old_log_probs", "rollout_log_probs"], ...] = (
    "policy_log_probs",
    "old_log_probs",
    "rollout_log_probs",
)


def _kl_recipes(like: Candidate) -> Iterator[Candidate]:
    averages = [definition for definition in METRIC_DEFINITIONS if definition.code == "RDM005"]
    for name, column in product(_KL_WORDS, _LOG_PROBS):
        term = KlTerm(estimator=name, coef=1.0, log_probs=column)
        objective = replace(like.objective, kl_loss=term)
        for edit in averages:
            parts = {"kl": kl_parts(objective)["kl"], "average": edit.words.removeprefix("the metric is ")}
            yield Candidate(objective, None, dict(parts), parts, (edit,))


def kl_parts(objective: Objective) -> dict[str, str]:
    """Return the KL of an objective in words."""
    term = objective.kl_loss or objective.kl_reward
    if term is None:
        return {"kl": "no KL term"}
    clamp = f", clamped to {term.clamp:g}" if term.clamp else ""
    parts = {"kl": f"{_KL_WORDS[term.estimator]} of {whose(term.log_probs)} and reference{clamp}"}
    if term.ratio_weighted:
        to = {"policy_log_probs": "a ratio of 1 with a gradient", "rollout_log_probs": "the ratio to the sampler"}
        parts["surrogate"] = f"weighted by {to.get(term.ratio_to or '', 'the importance ratio')}"
    if term.input_bound is not None:
        parts["kl"] += f", the log-ratio clamped to {term.input_bound:g}"
    if objective.kl_loss is None:
        parts["average"] = "in the reward"
    return parts


def try_losses(
    steps: Sequence[Step], premises: Known, advantage: Candidate, terms: Sequence[Candidate | None]
) -> Trial:
    """Find the losses that some steps leave, given advantages and KL; the coefficient of the KL term is solved.

    Other aggregations and scales than a trainer's own are tried where these give not all values.

    Args:
        steps: to hold them against.
        premises: what is known before the first row.
        advantage: how advantages are computed.
        terms: the KL terms to try, one at least; None is none.
    """
    plain = [(candidate, kl) for kl in terms for candidate in _plain_losses(premises, advantage, kl)]
    recorded = []
    if premises.recorded is not None:
        recorded = [replace(limited(premises.recorded, "loss"), parts=loss_parts(premises.recorded.objective))]
    solved = (_with_coefficient(steps, candidate, kl) for candidate, kl in plain)
    trial = try_on(steps, (*recorded, *solved), Step.loss)
    if trial.fitting or not trial.excluded or not plain:
        return trial
    others = (_with_coefficient(steps, candidate, kl) for kl in terms for candidate in _loss_recipes(plain[0][0]))
    return or_else(steps, trial, others, Step.loss)


def _plain_losses(premises: Known, advantage: Candidate, kl: Candidate | None) -> Iterator[Candidate]:
    """Yield the losses that settings of trainers make."""
    for trainer, version, layers in _after(premises, advantage):
        if kl is not None and kl.trainer is not None and kl.trainer.name == trainer.name:
            layers = (Layer("identified", kl.options), *layers)
        candidates = list(of_trainer(trainer, version, trainer.choices.loss, layers))
        if kl is None and trainer.roles.kl is not None:
            # Whatever states a KL term, the log has no sign of one.
            without = [
                {**candidate.options, trainer.roles.kl: 0.0}
                for candidate in candidates
                if candidate.objective.kl_loss is not None
            ]
            candidates = [candidate for candidate in candidates if candidate.objective.kl_loss is None]
            candidates += of_trainer(trainer, version, without, layers)
        for candidate in candidates:
            objective = _with_advantage(candidate.objective, advantage)
            yield replace(candidate, objective=objective, parts=loss_parts(objective))


def _loss_recipes(like: Candidate) -> Iterator[Candidate]:
    scales: list[Hypothesis | None] = [None, *(term for term in LOSS_TERMS if term.metrics is not None)]
    modes = [name for name in AGGREGATIONS if not name.endswith(("fixed-length", "-norm"))]
    for mode in modes:
        rule = replace(like.objective.aggregation, mode=mode)
        objective = replace(like.objective, aggregation=rule, policy_aggregation=None)
        for scale in scales:
            parts = {**loss_parts(objective), "scale": "" if scale is None else scale.words}
            edits = () if scale is None else (scale,)
            yield Candidate(objective, None, dict(parts), parts, edits)


def loss_parts(objective: Objective) -> dict[str, str]:
    """Return the loss of an objective in words."""
    surrogate, term = objective.surrogate, objective.kl_loss
    aggregation = objective.policy_aggregation or objective.aggregation
    counted = ", rejected tokens counted" if aggregation.counted_before_rejection else ""
    clip = f"clipped {surrogate.clip_low:g} below and {surrogate.clip_high:g} above 1"
    if surrogate.bounds_probabilities:
        clip = f"of probabilities that fall by {surrogate.clip_low:g} or rise by {surrogate.clip_high:g} at most"
    parts = {
        "aggregation": aggregation.mode + counted,
        "surrogate": f"{surrogate.kind.replace('_', ' ')} of {surrogate.level} ratios, {clip}",
    }
    if term is not None and term.coef:
        parts["coefficient"] = f"{term.coef:+.4g} KL"
    return parts


def _with_coefficient(steps: Sequence[Step], candidate: Candidate, kl: Candidate | None) -> Candidate:
    """Solve for the coefficient of the KL term of the loss, one number over the steps."""
    objective, trainer = candidate.objective, candidate.trainer
    if objective.kl_loss is not None and objective.kl_loss.reference != "ref_log_probs":
        # No KL that is logged or identified is to another column: the term is as the options have it.
        return candidate
    if kl is None or kl.objective.kl_loss is None:
        bare = replace(objective, kl_loss=None) if objective.kl_loss is not None and kl is None else objective
        return replace(candidate, objective=bare, parts={**candidate.parts, **loss_parts(bare)})
    objective = replace(objective, kl_loss=replace(kl.objective.kl_loss, coef=1.0))
    unit = replace(candidate, objective=objective)
    parts = [part for step in steps if (part := step.loss_residual(unit)) is not None]
    equations = torch.tensor(parts, dtype=torch.float64).reshape(-1, 3).T
    coef = least_squares(*equations)
    if coef is None:
        # No logged number holds the KL term: the policy's part is compared alone.
        return candidate
    if all(abs(residual) <= radius for residual, _, radius in parts):
        # Whatever would be solved for is rounding: 0, or any coefficient that the radii allow.
        ends = ((abs(residual) + radius) / abs(slope) for residual, slope, radius in parts if slope)
        if min(ends, default=0) > LEAST:
            return candidate
        coef = 0.0
    if coef > 0:
        coef = shortest(coef, *bounds(*equations))
    objective = replace(objective, kl_loss=replace(kl.objective.kl_loss, coef=coef))
    options = dict(candidate.options)
    if trainer is not None and trainer.roles.kl is not None:
        options[trainer.roles.kl] = coef
    axes = {**loss_parts(objective), **({"scale": candidate.parts["scale"]} if candidate.parts.get("scale") else {})}
    return replace(candidate, objective=objective, options=options if trainer is not None else dict(axes), parts=axes)


def _after(premises: Known, advantage: Candidate) -> Iterator[tuple[Trainer, tuple[int, ...], tuple[Layer, ...]]]:
    """The trainers to go on with, and the options that are known or found already.

    That is the trainer whose advantages they are, or the likeliest where no trainer has them.
    """
    for trainer, version in premises.trainers[:1] if advantage.trainer is None else premises.trainers:
        layers = tuple(premises.layers.get(trainer.name, ()))
        if advantage.trainer is None:
            yield trainer, version, (*layers, Layer("a common configuration", trainer.roles.must_state))
        elif trainer.name == advantage.trainer_name:
            yield trainer, version, (Layer("identified", advantage.options), *layers)


def _with_advantage(objective: Objective, advantage: Candidate) -> Objective:
    source = advantage.objective
    return replace(
        objective, advantage=source.advantage, baseline_rows=source.baseline_rows, kl_reward=source.kl_reward
    )
