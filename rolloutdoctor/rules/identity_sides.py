"""Both sides of an identity between logged metrics, as polars expressions, and how far rounding may move them."""

from collections.abc import Iterator

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.metric_names.identities import IDENTITIES, Identity, Relation, Term, terms_of
from rolloutdoctor.metric_names.table import DIALECTS, SAME, whose
from rolloutdoctor.ops.logged_digits import Digits
from rolloutdoctor.rules.base import Context

_SINGLE = 2.0**-18
"""Bound on the relative error of a mean of up to 2^30 numbers that are added in pairs in float32, and of its parts."""


EMPTY_LINES = pl.DataFrame(
    schema=dict.fromkeys(("step",), pl.Int64)
    | dict.fromkeys(("split", "identity"), pl.String)
    | {"exact": pl.Boolean, "left": pl.Float64, "right": pl.Float64, "beyond": pl.Float64}
)


def related_metrics(context: Context) -> frozenset[str]:
    """Return the metrics that stand in an identity."""
    sides = [(*relation.terms, *terms_of(identity.cancels)) for identity, relation in relations_of(context)]
    return frozenset(term.metric for terms in sides for term in terms if term.metric)


def relation_lines(wide: pl.DataFrame, context: Context) -> pl.DataFrame:
    """Return one line for each identity and step: its sides, and how many rounding radii they are too far apart.

    Args:
        wide: step, split, and a column for each of the `related_metrics`.
        context: the options, what is logged and how it was rounded.
    """
    frames = [EMPTY_LINES]
    for identity, relation in relations_of(context):
        sides = compared(relation, terms_of(identity.cancels), context)
        lines = wide.select(*STEP_KEY, identity=pl.lit(relation.words), exact=pl.lit(identity.exact), **sides)
        frames.append(lines.filter(pl.col("left").is_finite(), pl.col("right").is_finite()))
    return pl.concat(frames, how="vertical_relaxed").sort("step", maintain_order=True)


def relations_of(context: Context) -> Iterator[tuple[Identity, Relation]]:
    """Yield the identities of the trainer and its release whose metrics and options are there."""
    trainer_name = whose(context.metrics)
    trainer = trainer_name if context.writer is None or trainer_name in DIALECTS else context.writer.name
    config = context.config if context.version_stated else None
    release = None if config is None else ".".join(map(str, config.version))
    for identity in IDENTITIES.get(SAME.get(trainer or "", trainer or ""), ()):
        holds = all(_is_stated_as(context, name, value) for name, value in identity.when.items())
        if holds and identity.holds_at(release) and (not identity.each_step or _logs_each_step(context)):
            for relation in identity.relations_in(context.metrics):
                if all(_factors(context, term) for term in relation.terms) and _has_own_names(
                    context, identity, relation
                ):
                    yield identity, relation


def _has_own_names(context: Context, identity: Identity, relation: Relation) -> bool:
    """Tell whether each reward function has a metric of its own: TRL averages those of functions with one name.

    There are as many functions as weights. Without weights the log of one metric may show it (`compared`).
    """
    weighted = [term for term in relation.terms if "|" in term.option]
    weights = _option(context, weighted[0].option) if weighted else None
    if isinstance(weights, tuple):
        return len(weights) == len(weighted)
    return not weighted or identity.alone


_SHOWN = 2
"""Lines of a reward that is not 0 and is its only metric, which show that no functions share that name."""


def _logs_each_step(context: Context) -> bool:
    """Tell whether each line is stated to be of one step."""
    option = None if context.trainer is None else context.trainer.roles.window
    return option is not None and _option(context, option) == 1


def _is_stated_as(context: Context, name: str, value: object) -> bool:
    """Tell whether an option is stated to have a value, or that of ``{another option}``."""
    if isinstance(value, str) and value.startswith("{"):
        value = _option(context, value.strip("{}"))
    return value is not None and _option(context, name) == value


def _option(context: Context, name: str) -> object:
    """Value of an option that the run states; None of any other, and what stands after a bar for null."""
    name, _, null = name.partition("|")
    setting = None if context.config is None else context.config.settings.get(name)
    if setting is None or not setting.is_stated:
        return None
    return float(null) if null and setting.value is None else setting.value


def _factors(context: Context, term: Term) -> tuple[float, ...]:
    """Return what the metric of a term may be multiplied by; nothing if an option of it is not stated."""
    values = [_option(context, name) for name in term.option.split("/")] if term.option else [1.0]
    if isinstance(values[0], tuple):
        return tuple(sorted({term.factor * number for number in values[0]}))
    numbers = [float(number) for number in values if isinstance(number, int | float)]
    is_known = len(numbers) == len(values) and all(numbers[1:])
    return (term.factor * numbers[0] / (numbers[1] if len(numbers) > 1 else 1.0),) if is_known else ()


def compared(relation: Relation, cancels: tuple[Term, ...], context: Context) -> dict[str, pl.Expr]:
    """Return the two sides of an identity, and how many rounding radii they are too far apart.

    Args:
        relation: the identity, between columns of a table.
        cancels: sizes of what cancels in it.
        context: the options, what is logged and how it was rounded.

    Returns:
        `left`, `right` and `beyond`, which is above 1 where the identity fails; `left` is null where several functions
        may share the name of the only reward.
    """
    factors = {term: _factors(context, term) for term in relation.terms}
    values = {term: _value(term, context) for term in relation.terms}
    parts = {term: [factor * values[term] for factor in factors[term]] for term in relation.terms}
    left = pl.sum_horizontal([parts[term][0] for term in relation.left], ignore_nulls=False)
    match relation.sign:
        case "whole":
            right = left.round()
        case "within":
            low = pl.sum_horizontal([pl.min_horizontal(0.0, *parts[term]) for term in relation.right])
            high = pl.sum_horizontal([pl.max_horizontal(0.0, *parts[term]) for term in relation.right])
            right = left.clip(low, high)
        case _:
            right = pl.sum_horizontal([parts[term][0] for term in relation.right], ignore_nulls=False)
    apart = left - right if relation.sign == "<=" else (left - right).abs()
    radius = pl.sum_horizontal(
        [
            max(map(abs, factors[term])) * radius_of(values[term], context.digits.get(term.metric, ()))
            for term in relation.terms
            if term.metric
        ]
        + [_SINGLE * _value(term, context).abs() for term in cancels]
    )
    beyond = pl.when(apart > 0).then(apart / radius).otherwise(0.0).clip(0, 1e9)
    if any("|" in term.option and not isinstance(_option(context, term.option), tuple) for term in relation.terms):
        is_shown = ((beyond <= 1) & left.is_finite() & (left != 0)).sum() >= _SHOWN
        left = pl.when(is_shown).then(left)
    return {"left": left, "right": right, "beyond": beyond}


def _value(term: Term, context: Context) -> pl.Expr:
    """The metric of a term, 1 of a constant; 0 where it is not logged."""
    if not term.metric:
        return pl.lit(1.0)
    return pl.col(term.metric) if term.metric in context.metrics else pl.lit(0.0)


def radius_of(value: pl.Expr, digits: tuple[Digits, ...]) -> pl.Expr:
    """How far the rounding of the log and float32 may have moved values: `Digits.radius` of a column, and `_SINGLE`."""
    size, radii = value.abs(), [pl.lit(0.0)]
    for form in digits:
        # A hair up, so that the logarithm of a power of ten is not below its exponent.
        exponent = size.log(2.0 if form.kind == "bits" else 10.0).add(1e-9).floor()
        spacing = 2.0 ** (exponent + 1) if form.kind == "bits" else 10.0 ** (exponent + 1)
        base = 2.0 if form.kind == "bits" else 10.0
        radii.append(pl.lit(form.radius(1.0)) if form.kind == "decimals" else spacing * base**-form.kept / 2)
    return pl.max_horizontal(radii) + _SINGLE * size
