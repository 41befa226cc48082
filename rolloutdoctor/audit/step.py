"""Audit one step: every logged quantity that the trainer defines, against the value that the rows give."""

from collections.abc import Collection, Iterator, Mapping
from math import isfinite, nan

import torch
from torch import Tensor

from rolloutdoctor.audit.doubts import Doubts, LayoutDoubt, Unjoined, doubts_of
from rolloutdoctor.audit.logged import LoggedStep
from rolloutdoctor.audit.row_tally import ComparedRows, Rows
from rolloutdoctor.audit.stored_digits import advantage_stored_radius, coarse_log_probs, stored_radius
from rolloutdoctor.audit.tally import ComparedValue, QuantityTally
from rolloutdoctor.audit.windows import StepValue
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.evaluate import Evaluation, stored_kl
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius, token_kl_radius
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.ops.logged_digits import rounding_of
from rolloutdoctor.trainers.options import Config
from rolloutdoctor.trainers.spec import Trainer

_STAGE = {
    "advantages": "advantages",
    "kl": "kl",
    "kl_loss": "kl",
    "reward_kl": "kl",
    "stored_kl": "kl",
    "loss": "loss",
    "policy_loss": "loss",
    "token_weighted_kl": "kl",
    "token_weighted_loss": "loss",
    "drift": "loss",
}
"""Kind of a metric (`radii.metrics.METRICS`) to its stage; the others are of the last one."""

_AT_LOSS = (
    *("kl", "kl_loss", "loss", "policy_loss", "drift", "sampler_k3", "chosen_k3", "row_share"),
    *("token_weighted_kl", "token_weighted_loss"),
)
"""Kinds of metrics that are made while the policy is updated."""


def stage_of(trainer: Trainer, metric: str) -> str:
    """Return the stage of a metric."""
    return _STAGE.get(trainer.log.kind_of(metric), STAGES[-1])


def compare_step(
    logged: LoggedStep,
    evaluation: Evaluation,
    trainer: Trainer,
    config: Config | None,
    metrics: Mapping[str, float],
    *,
    in_doubt: bool = False,
    stages: Collection[str] = STAGES,
) -> dict[str, ComparedRows | ComparedValue]:
    """Put what was logged at a step beside an evaluation of it.

    Args:
        logged: what was logged.
        evaluation: of the step, or of what a hypothesis makes of it, row by row the same.
        trainer: who made the run.
        config: its options.
        metrics: its metrics, recomputed from the evaluation.
        in_doubt: count disagreements, too, that prove nothing because rows or columns are missing.
        stages: the stages to compare.

    Returns:
        Name of each quantity that was logged and can be recomputed to its values.
    """
    if evaluation.rows is None or not len(logged.batch):
        return {}
    if in_doubt:
        none_N = torch.zeros(len(logged.batch), dtype=torch.bool, device=logged.batch.device)
        doubts = Doubts("", none_N, "")
    else:
        doubts = doubts_of(logged.batch, trainer, config, omits_rows=logged.omits_rows)
    # Some metrics take longer than the loss, and are made where they are asked for: only what was logged is.
    names = [name for name in logged.metrics if stage_of(trainer, name) in stages and name in metrics]
    metrics = {name: metrics[name] for name in sorted(names)}
    layout = None if in_doubt else LayoutDoubt(evaluation, trainer)
    compared: dict[str, ComparedRows | ComparedValue] = dict(_columns(logged, evaluation, doubts, stages))
    compared |= _metrics(logged, evaluation, trainer, metrics, doubts, layout)
    return {quantity_of(logged.batch, name): comparison for name, comparison in compared.items()}


def tallies_of(compared: Mapping[str, ComparedRows | ComparedValue]) -> dict[str, QuantityTally]:
    """Compare the values of every quantity (`compare_step`); return name of each that can be to its tally."""
    tallies = {name: comparison.tally() for name, comparison in compared.items()}
    # Of values whose radius has no end nothing can be said.
    return {name: tally for name, tally in tallies.items() if tally.compared or tally.not_compared}


def window_values(
    logged: LoggedStep,
    evaluation: Evaluation,
    trainer: Trainer,
    config: Config | None,
    metrics: Mapping[str, float],
    *,
    in_doubt: bool = False,
) -> dict[str, StepValue]:
    """Return what a step adds to metrics that were logged as means over several steps.

    Args:
        logged: what was logged; its metrics are not looked at.
        evaluation: of the step, or of what a hypothesis makes of it.
        trainer: who made the run.
        config: its options.
        metrics: those of its metrics that were logged as means, recomputed from the evaluation.
        in_doubt: leave the doubts out.
    """
    if evaluation.rows is None or not len(logged.batch) or logged.batch.split != TRAIN:
        return {}
    doubts = doubts_of(logged.batch, trainer, config, omits_rows=logged.omits_rows)
    step_values = {}
    unjoined = Unjoined(logged.batch, trainer, config)
    for name, value in metrics.items():
        if unjoined.why(name):
            continue
        kind = trainer.log.kind_of(name)
        if kind == "clip_extreme" and evaluation.rows.rejected_N is not None and bool(evaluation.rows.rejected_N.any()):
            # A micro-batch without a trained token has no extreme, and leaves the mean over the window.
            continue
        radius = float(metric_radius(evaluation, kind, value))
        if not isfinite(radius):
            continue
        doubt = doubts.rows
        if kind in _AT_LOSS:
            doubt = doubt or doubts.update or (doubts.release if kind == "loss" else "")
            if not doubt and "micro_batch_id" not in logged.batch.per_row and len(logged.batch) > 1:
                doubt = LayoutDoubt.reason
        elif not doubt and config is not None:
            doubt = trainer.updates.reuse(config)
        step_values[name] = StepValue(stage_of(trainer, name), value, radius, "" if in_doubt else doubt)
    return step_values


def quantity_of(batch: RolloutBatch, name: str) -> str:
    """Return what the audit calls a column or metric of a step: evaluation is marked."""
    return name if batch.split == TRAIN else f"{name} (eval)"


def _columns(
    logged: LoggedStep, evaluation: Evaluation, doubts: Doubts, stages: Collection[str]
) -> Iterator[tuple[str, ComparedRows]]:
    """Advantages and KL that the trainer stored."""
    if "advantages" in stages:
        yield from _advantages(logged, evaluation, doubts)
    if "kl" in stages and "kl" in logged.batch.per_token:
        kl_T = stored_kl(logged.batch, evaluation.objective, evaluation.dtype)
        if kl_T is not None:
            radius_T = token_kl_radius(evaluation, kl_T).likely
            everywhere_T = torch.ones(logged.batch.tokens, dtype=torch.bool, device=logged.batch.device)
            yield "kl", _tokens(logged, "kl", "kl", kl_T.double(), radius_T, everywhere_T, "")


def _advantages(logged: LoggedStep, evaluation: Evaluation, doubts: Doubts) -> Iterator[tuple[str, ComparedRows]]:
    batch, rows = logged.batch, evaluation.rows
    assert rows is not None
    if evaluation.objective.advantage.spec.rewards == "none":
        return  # these are the logged ones
    if rows.advantage_N is not None:
        values_N = _row_values(logged, rows.advantage_N)
        if values_N is not None:
            radius_N = advantage_radius(evaluation).likely
            if _differ(values_N, rows.advantage_N, radius_N):
                is_column = "advantage" in batch.per_row
                radius_N = _widened(radius_N, advantage_stored_radius(batch) if is_column else stored_radius(values_N))
            doubt = doubts.rows or _doubt_of_penalty(evaluation, values_N, rows.advantage_N, radius_N)
            # Where the radius has no end, the trainer's own value is rounding.
            is_told_N = ~values_N.isnan() & radius_N.isfinite()
            if rows.rejected_N is not None:
                # What a mask leaves of any advantage of a fully masked response is 0.
                is_told_N &= ~(rows.rejected_N & (values_N == 0))
            yield (
                "advantages",
                ComparedRows(
                    "advantages",
                    batch.step,
                    (values_N, rows.advantage_N, radius_N),
                    is_told_N,
                    doubts.odd_N
                    | bool(doubts.rows and evaluation.objective.advantage.scale == "batch")
                    | bool(doubt and not doubts.rows),
                    doubt,
                    Rows(batch, lambda places: places),
                ),
            )
    elif rows.advantage_T is not None and "advantages" in batch.per_token:
        yield (
            "advantages",
            _tokens(
                logged,
                "advantages",
                "advantages",
                rows.advantage_T.double(),
                token_advantage_radius(evaluation).likely.expand(batch.tokens),
                batch.column("response_mask"),
                doubts.rows,
            ),
        )


def _differ(logged: Tensor, recomputed: Tensor, radius: Tensor) -> bool:
    """True if a value differs by more than its radius."""
    return bool(((logged - recomputed).abs() > radius).any())


def _widened(radius: Tensor, stored: Tensor | None) -> Tensor:
    """The radius of values with how far storing may have moved them, if it did."""
    return radius if stored is None else radius + stored


def _holds_log_probs(evaluation: Evaluation, kind: str) -> bool:
    """True unless no log-prob enters a metric of some kind."""
    penalty = evaluation.objective.kl_reward
    return kind not in ("rewards", "values") and (kind != "advantages" or (penalty is not None and penalty.coef != 0))


def _doubt_of_penalty(evaluation: Evaluation, logged: Tensor, recomputed: Tensor, radius: Tensor) -> str:
    """Explain why a mismatch of advantages is inconclusive, where a KL penalty of coarse log-probs is in them."""
    if not _holds_log_probs(evaluation, "advantages") or not _differ(logged, recomputed, radius):
        return ""
    return coarse_log_probs(evaluation.batch)


def _row_values(logged: LoggedStep, recomputed_N: Tensor) -> Tensor | None:
    """Logged advantage of each row, ``[N]`` float64: of its tokens the one farthest off; NaN where there is none."""
    batch = logged.batch
    if "advantage" in batch.per_row:
        return batch.column("advantage").double()
    if logged.advantage_range is None:
        return None
    low_N, high_N = logged.advantage_range
    farthest_N = torch.where((low_N - recomputed_N).abs() > (high_N - recomputed_N).abs(), low_N, high_N)
    return torch.where(low_N > high_N, torch.nan, farthest_N)


def _tokens(
    logged: LoggedStep,
    column: str,
    stage: str,
    recomputed_T: Tensor,
    radius_T: Tensor,
    compared_T: Tensor,
    doubt: str,
) -> ComparedRows:
    batch = logged.batch
    logged_T = batch.column(column).double()
    if _differ(logged_T, recomputed_T, radius_T):
        radius_T = _widened(radius_T, stored_radius(logged_T))
    if not doubt and _differ(logged_T, recomputed_T, radius_T):
        doubt = coarse_log_probs(batch)

    def row_of(tokens: Tensor) -> Tensor:
        return torch.searchsorted(batch.rows, tokens, right=True) - 1

    doubted_T = torch.full((), bool(doubt), device=batch.device).expand(batch.tokens)
    values = (logged_T, recomputed_T, radius_T)
    # Where the radius has no end, the trainer's own value is rounding.
    compared_T = compared_T & ~logged_T.isnan() & radius_T.isfinite()
    return ComparedRows(stage, batch.step, values, compared_T, doubted_T, doubt, Rows(batch, row_of))


def _metrics(
    logged: LoggedStep,
    evaluation: Evaluation,
    trainer: Trainer,
    metrics: Mapping[str, float],
    doubts: Doubts,
    layout: LayoutDoubt | None,
) -> dict[str, ComparedValue]:
    compared = {}
    for name, recomputed in metrics.items():
        kind, value = trainer.log.kind_of(name), logged.metrics[name]
        radius = float(metric_radius(evaluation, kind, recomputed))
        rounding = rounding_of(logged.digits, name, value)
        radius += rounding
        if not isfinite(radius):
            continue
        doubt = doubts.rows or (doubts.update if kind in _AT_LOSS else "") or (doubts.release if kind == "loss" else "")
        if not doubt and trainer.log.is_share(name) and 0 < value / (recomputed or nan) < 1:
            doubt = "ranks without a row have micro-batches too, and how many there are is not recorded"
        if not doubt and layout is not None and not abs(value - recomputed) <= radius:
            of_tokens = coarse_log_probs(logged.batch) if _holds_log_probs(evaluation, kind) else ""
            doubt = of_tokens or layout.about(name, abs(value - recomputed), recomputed, radius)
        stage = stage_of(trainer, name)
        compared[name] = ComparedValue(stage, logged.batch.step, value, recomputed, radius, doubt, rounding)
    return compared
