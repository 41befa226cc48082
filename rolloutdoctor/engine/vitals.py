"""The quantities of a trainer's log that its first screen shows, with the steps at which findings about them begin."""

from collections.abc import Sequence
from math import isfinite

from rolloutdoctor.data.batch import TRAIN
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.results.findings import Finding, Severity
from rolloutdoctor.results.vitals import Vital
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import find

SHOWN = (
    "reward",
    "zero_variance_share",
    "entropy",
    "kl",
    "response_length",
    "truncated_share",
    "clip_fraction",
    "grad_norm",
    "sampler_pearson",
    "sampler_gap",
    "sampler_logp_gap",
    "learning_rate",
    "step_time",
)
"""Canonical quantities, in the order of the screen."""

KEEP = 512
"""Values of a quantity that are kept, evenly spread."""


def vitals_of(metrics: LoggedMetrics, context: Context, findings: Sequence[Finding]) -> tuple[Vital, ...]:
    """Return what a log has of these quantities in training steps; none where it has two values or fewer."""
    found = []
    for name in SHOWN:
        if name not in context.quantities:
            continue
        metric, meaning = context.quantities[name]
        logged = [(key.step, metrics.at(key).get(metric)) for key in metrics.steps() if key.split == TRAIN]
        values = [(step, meaning.canonical(value)) for step, value in logged if value is not None and isfinite(value)]
        if len(values) < 3 or (meaning.zero_when_off and not any(value for _, value in values)):
            continue
        every = -(-len(values) // KEEP)
        # The last value is that of the run's end.
        kept = values[::-every][::-1]
        steps, series = zip(*kept, strict=True)
        found.append(
            Vital(name, BY_NAME[name].title, metric, BY_NAME[name].unit, steps, series, _marks(name, findings))
        )
    return tuple(found)


def _marks(name: str, findings: Sequence[Finding]) -> tuple[tuple[int, str], ...]:
    """Return where findings about a quantity begin."""
    marks = []
    for one in findings:
        rule = find(one.code)
        if isinstance(rule, NumbersRule) and name in (rule.about or rule.beside) and one.severity > Severity.INFO:
            onset = one.measures.get("onset")
            begun = None if onset is None else onset.value
            marks.append((int(begun) if begun is not None else one.examples[0].step if one.examples else 0, one.code))
    return tuple(sorted(marks))
