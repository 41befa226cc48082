"""The quantities of a trainer's log that its first screen shows, with the steps at which findings about them begin."""

from collections.abc import Sequence
from math import inf

import polars as pl

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.results.findings import Finding, Severity
from rolloutdoctor.results.vitals import Trend, Vital
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.series import errors_of_ends, rank_with_time, thirds
from rolloutdoctor.rules.table import AnyRule, find

SHOWN = (
    "reward",
    "penalised_reward",
    "gold_reward",
    "held_out_reward",
    "correctness",
    "accuracy",
    "zero_variance_share",
    "entropy",
    "kl",
    "response_kl",
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

WITHOUT_REWARD = ("loss", "return", *SHOWN)
"""The same for a log that has no reward."""

APART = 2.0
"""Standard errors of a change from which on the reward and that less its penalty go different ways."""

KEEP = 512
"""Values of a quantity that are kept, evenly spread."""


_TOLD = frozenset(
    {"reward", "penalised_reward", "gold_reward", "held_out_reward", "correctness", "accuracy", "response_length"}
    | {"entropy", "grad_norm"}
)
"""Quantities of which the first sentence says where they go."""


_FEWEST_OF_THIRDS = 6
"""Values of whose thirds the deviations are known."""


def metrics_read(rules: Sequence[AnyRule], context: Context) -> frozenset[str]:
    """Return the logged metrics that rules query, and those of these quantities."""
    vital = frozenset(context.column_of(context.quantities[of][0]) for _, of, _ in _shown(context))
    return vital.union(*(rule.metrics(context) for rule in rules))


def vitals_of(run: RunTables, context: Context, findings: Sequence[Finding]) -> tuple[Vital, ...]:
    """Return what was logged of these quantities; none that was never computed.

    Args:
        run: the tables of the run.
        context: what is known of the run.
        findings: of the run.
    """
    vitals = []
    shown = _shown(context)
    columns = {context.column_of(context.quantities[of][0]) for _, of, _ in shown}
    logged = run.lines("metrics", pl.col("metric").is_in(columns) & pl.col("logged").is_finite())
    for name, of, split in shown:
        metric, meaning = context.quantities[of]
        points = logged.filter(pl.col("split") == split, pl.col("metric") == context.column_of(metric))
        if not len(points) or (meaning.zero_when_off and not (points["logged"] != 0).any()):
            continue
        # The last value is that of the run's end.
        thinned = points.reverse().gather_every(-(-len(points) // KEEP)).reverse()
        series = tuple(map(meaning.canonical, thinned["logged"]))
        quantity, marks = BY_NAME[name], _marks(name, findings)
        trend = _trend(series) if name in _TOLD else None
        steps = tuple(thinned["step"])
        vitals.append(Vital(name, quantity.title, metric, quantity.unit, steps, series, marks, trend, len(points)))
    return tuple(vital for vital in vitals if vital.name != "penalised_reward" or _goes_another_way(vital, vitals[0]))


def _goes_another_way(penalised: Vital, reward: Vital) -> bool:
    """Tell whether what is optimised goes the other way than the reward before its penalty: both are one curve else."""
    if penalised.trend is None or reward.trend is None:
        return False
    sign = APART if reward.trend.change > 0 else -APART
    return reward.trend.exceeds(sign) and penalised.trend.exceeds(-sign)


def _shown(context: Context) -> list[tuple[str, str, str]]:
    """The quantities of the screen that the log has, each with that whose metric it is, and in which split."""
    names = SHOWN if "reward" in context.quantities else WITHOUT_REWARD
    quantities = context.quantities
    # A penalised reward may stand for the reward.
    same = quantities.get("penalised_reward") == quantities.get("reward")
    of = {"held_out_reward": ("reward", EVAL)} if "reward" in quantities else {}
    of |= {name: (name, TRAIN) for name in quantities}
    return [(name, *of[name]) for name in names if name in of and not (same and name == "penalised_reward")]


def _trend(series: Sequence[float]) -> Trend:
    """Compare the first third of a series with its last."""
    import numpy as np

    values, count = np.asarray(series), len(series)
    few = (float(values[0]), float(values[-1]), 0.0, inf)
    first, last, _, error = thirds(values) if count >= _FEWEST_OF_THIRDS else few
    return Trend(count, first, last, error, rank_with_time(values), errors_of_ends(values))


def _named(rule: NumbersRule, finding: Finding) -> str | None:
    """Return that of several quantities which the headline names first, else the first measure."""
    places = [(finding.headline.find(BY_NAME[name].title), name) for name in rule.beside]
    first = next(iter(finding.measures), None)
    return min((each for each in places if each[0] >= 0), default=(0, first if first in rule.beside else None))[1]


def _marks(name: str, findings: Sequence[Finding]) -> tuple[tuple[int, str], ...]:
    """Return where findings about a quantity begin: of a rule about one of several, the one that the finding names."""
    marks = []
    for finding in findings:
        rule = find(finding.code)
        if not isinstance(rule, NumbersRule) or finding.severity <= Severity.INFO:
            continue
        if name in (rule.about or (_named(rule, finding),)):
            begun = finding.examples[0].step if finding.onset is None and finding.examples else finding.onset
            marks += [] if begun is None else [(int(begun), finding.code)]
    return tuple(sorted(marks))
