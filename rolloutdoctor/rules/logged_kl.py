"""The logged KL of a step against the KL that its log-probs give, and against the reward buffer that overwrote it."""

from collections.abc import Mapping
from math import isnan

from torch import Tensor

from rolloutdoctor.audit.step import quantity_of
from rolloutdoctor.objective.objective import KlBuffer
from rolloutdoctor.rules.step import StepView


def logged_kl(step: StepView) -> Mapping[str, float | None]:
    """Compare the logged KL of a step with the KL and with the reward buffer, in nats; nothing if none is usable.

    Returns:
        `logged`, `recomputed`, their `gap`, whether it `fits_kl` within rounding, and whether the logged loss, which
        holds the KL, agrees (`beside_loss`). Where a trainer stores the KL by token: `buffer`, the mean of the reward
        buffer, whether that `differs` from the KL, `fits_reward`, `buffer_gap`, the parts of the buffer, and
        `inverted`, the KL recovered from it. Of stored tokens how many there are, equal the buffer, and tell one from
        the other.
    """
    evaluation, trainer = step.evaluation, step.trainer
    if evaluation is None or trainer is None or not len(step.batch):
        return {}
    stored = _stored(step)
    tokens = evaluation.tokens
    if "recomputed" in stored or tokens is None or bool((tokens.layout.steps_N > 1).any()):
        return stored
    recomputed = step.metrics
    for name in trainer.log.kl:
        if name in step.logged and name in recomputed:
            logged, true = step.logged[name], recomputed[name]
            gap, fits = abs(logged - true), _fits(logged, true, step.radius(name, true))
            # Where the audit doubts that the two are of the same tokens, nothing is proven.
            audited = step.audit.get(quantity_of(step.batch, name))
            is_off = not fits and audited is not None and audited.disagree > 0
            beside_loss = trainer.log.kind_of(name) in ("kl", "kl_loss") and is_off and _is_beside_loss(step, gap)
            compared = {"logged": logged, "recomputed": true, "gap": gap, "fits_kl": fits, "beside_loss": beside_loss}
            return {**stored, **compared}
    return stored


def _stored(step: StepView) -> Mapping[str, float | None]:
    """The metric and the tokens of a stored KL: the copy and the reward buffer predict different values."""
    evaluation, batch = step.evaluation, step.batch
    metric = None if step.trainer is None else step.trainer.stored_kl
    assert evaluation is not None
    objective = evaluation.objective
    kl_T = step.stored_kl(objective, KlBuffer.COPY)
    buffer_T = step.stored_kl(objective, KlBuffer.REWARD)
    if kl_T is None or buffer_T is None:
        return {}
    of_tokens = _of_tokens(step, kl_T, buffer_T) if "kl" in batch.per_token else {}
    if objective.kl_reward is None or metric is None or not batch.tokens:
        return of_tokens
    logged = step.logged.get(metric.metric) if objective.context_slices == 1 else None
    if logged is None and "kl" in batch.per_token:
        logged = metric.reduce(batch, batch.column("kl"))
    true, buffer, coef = metric.reduce(batch, kl_T), metric.reduce(batch, buffer_T), objective.kl_reward.coef
    radius, buffer_radius = step.stored_mean_radius(kl_T), step.stored_mean_radius(buffer_T)
    if logged is None:
        if objective.kl_buffer is not KlBuffer.REWARD:
            return of_tokens
        differs = not _fits(buffer, true, radius + buffer_radius)
        return {**of_tokens, "recomputed": true, "buffer": buffer, "differs": differs}
    fits_kl = _fits(logged, true, radius)
    of_tokens = {**of_tokens, "logged": logged, "recomputed": true, "gap": abs(logged - true), "fits_kl": fits_kl}
    if fits_kl or not _fits(logged, buffer, buffer_radius):
        return of_tokens
    part = buffer + coef * true
    parts = {"fits_reward": True, "buffer_gap": abs(logged - buffer), "reward_part": part, "kl_part": coef * true}
    return {**of_tokens, **parts, "inverted": (part - logged) / coef if coef > 0 else None}


def _of_tokens(step: StepView, kl_T: Tensor, buffer_T: Tensor) -> dict[str, float]:
    """Stored token values against the copy and the reward buffer."""
    stored_T = step.batch.column("kl")
    kl_radius_T, buffer_radius_T = step.stored_radius(kl_T), step.stored_radius(buffer_T)
    fits_kl_T = (stored_T.double() - kl_T.double()).abs() <= kl_radius_T
    fits_reward_T = (stored_T.double() - buffer_T.double()).abs() <= buffer_radius_T
    # Where the KL is about 0 both predict the same, and the token tells nothing.
    telling_T = (kl_T.double() - buffer_T.double()).abs() > kl_radius_T + buffer_radius_T
    kinds = {
        "fit_reward": fits_reward_T,
        "telling": telling_T,
        "telling_fit_kl": fits_kl_T & telling_T,
        "telling_fit_reward": fits_reward_T & telling_T,
    }
    return {"tokens": step.batch.tokens, **{name: int(x_T.sum()) for name, x_T in kinds.items()}}


def _fits(logged: float, predicted: float, radius: float) -> bool:
    return (isnan(logged) and isnan(predicted)) or abs(logged - predicted) <= radius


def _is_beside_loss(step: StepView, gap: float) -> bool:
    """True if the logged loss agrees, which a KL that is off by a gap would have moved beyond its radius."""
    evaluation, trainer = step.evaluation, step.trainer
    term = None if evaluation is None else evaluation.objective.kl_loss
    if term is None or trainer is None:
        return False
    losses = [tally for name, tally in step.audit.items() if trainer.log.kind_of(name) == "loss" and tally.compared]
    return any(not tally.disagree and abs(term.coef) * gap > 2 * tally.radius for tally in losses)
