"""Hold the options of a run against the names and values in its log, before any row is read."""

from collections.abc import Iterator

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.ops.logged_digits import rounding_of
from rolloutdoctor.results.audit import Refuted
from rolloutdoctor.results.identification import shown

_DIGIT = 1e-4
"""Unit of the last digit where a loss is rounded to four."""

_STEPS = 3
"""Fewer losses of exactly 0 may be chance."""


def find_refuted(configured: Configured | None, metrics: LoggedMetrics) -> tuple[Refuted, ...]:
    """Return the options that the log contradicts; of a release that was not read, none that is stated.

    What such a release logs under an option is unknown: older ones of TRL and Unsloth log a KL whatever beta is.
    """
    if configured is None:
        return ()
    refuted = (*_by_traces(configured, metrics), *_by_rounded_losses(configured, metrics))
    return tuple(refutation for refutation in refuted if refutation.assumed or not configured.release.words)


def has_traces(configured: Configured | None, metrics: LoggedMetrics) -> bool:
    """Return True if the log holds a metric that could refute an option that is stated."""
    if configured is None or configured.release.words:
        return False
    names, settings = metrics.names(), configured.config.settings
    return any(
        trace.metric in names and not settings[trace.option].assumed
        for trace in configured.trainer.log.traces
        if trace.tells_at(configured.config.version)
    )


def _by_traces(configured: Configured, metrics: LoggedMetrics) -> Iterator[Refuted]:
    """Metrics that the trainer would not have logged."""
    settings, reported = configured.config.settings, set()
    for trace in configured.trainer.log.traces:
        setting = settings[trace.option]
        if trace.option in reported or trace.fits(setting.value) or not trace.tells_at(configured.config.version):
            continue
        values = [
            (key.step, metrics.at(key)[trace.metric]) for key in metrics.steps() if trace.metric in metrics.at(key)
        ]
        values = [(step, value) for step, value in values if value != 0 or not trace.nonzero]
        if not values:
            continue
        reported.add(trace.option)
        step, value = values[0]
        yield Refuted(
            option=trace.option,
            value=shown(setting.value),
            assumed=setting.assumed,
            words=_asked(f"{trace.metric} is logged {trace.words}", trace.option)
            if setting.assumed
            else f"{trace.metric} is logged {trace.words}, and {trace.option} is {shown(setting.value)} "
            f"({setting.origin})",
            evidence=f"{trace.metric} was logged {len(values):,} times, first at step {step} with {value:.6g}",
        )


def _by_rounded_losses(configured: Configured, metrics: LoggedMetrics) -> Iterator[Refuted]:
    """Losses of exactly 0 in every step, where the KL term alone would round to more."""
    trainer, term = configured.trainer, configured.objective.kl_loss
    option = trainer.roles.kl
    if term is None or option is None or not trainer.log.loss_is_whole or term.coef <= 0:
        return
    if configured.objective.entropy_bonus is not None or configured.objective.unknown_loss:
        return
    logged = [metrics.at(key) for key in metrics.steps() if key.split == TRAIN]
    losses = [step_metrics[trainer.log.loss] for step_metrics in logged if trainer.log.loss in step_metrics]
    kls = [step_metrics[name] for step_metrics in logged for name in trainer.log.kl if name in step_metrics]
    hidden = max(_DIGIT / 2, rounding_of(metrics.digits(), trainer.log.loss, 0.0))
    if len(losses) < _STEPS or any(losses) or not kls or not term.coef * min(kls) > hidden:
        return
    setting = configured.config.settings[option]
    yield Refuted(
        option=option,
        value=shown(setting.value),
        assumed=setting.assumed,
        words=_asked(f"every logged {trainer.log.loss} is 0 beside a KL that is not", option)
        if setting.assumed
        else f"every logged {trainer.log.loss} is 0, and {option} = {shown(setting.value)} times the logged KL is "
        f"{term.coef * min(kls):.3g} at least, which its digits would show",
        evidence=f"{len(losses):,} losses of 0; least KL {min(kls):.4g}",
    )


def _asked(observation: str, option: str) -> str:
    """A question after an option that nobody stated, and of which the log shows that it is not the default."""
    return f"{observation}, and nothing states {option}: pass it with --set {option}=VALUE"
