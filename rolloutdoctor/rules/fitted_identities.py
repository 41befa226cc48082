"""Identities between logged metrics whose coefficients nobody states: least squares over all lines finds them."""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.metric_names.sums import LOSS_PARTS, WEIGHTED_REWARDS
from rolloutdoctor.metric_names.table import SAME, functions, is_bookkeeping, is_named, whose
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.identity_sides import EMPTY_LINES, radius_of


@dataclass(frozen=True)
class Sum:
    """A metric that is a sum of others, each with one coefficient for the whole run.

    Attributes:
        total: the metric.
        terms: the metrics that are added.
        cancels: size of what cancels in them, by which rounding in float32 goes.
        words: the identity in words.
    """

    total: str
    terms: tuple[str, ...]
    words: str
    cancels: float = 0.0


_SPARE = 5
"""Lines that a fit takes beyond its coefficients."""


def fitted_metrics(context: Context) -> frozenset[str]:
    """Return the metrics that stand in such a sum."""
    return frozenset(name for total in _sums(context) for name in (total.total, *total.terms))


def fitted_lines(wide: pl.DataFrame, context: Context) -> pl.DataFrame:
    """Return one line for each sum and step: both sides, and how far they are apart in bounds of their rounding.

    Where the sum holds for some coefficients, the least squares have a residual no longer than the rounding of all
    lines together, ``||r||_2``, and so has every line.

    Args:
        wide: step, split, and a column for each of the `fitted_metrics`.
        context: what is known of the run.
    """
    import numpy as np

    frames = [EMPTY_LINES]
    for total in _sums(context):
        lines = wide.filter(pl.all_horizontal(pl.col(total.total, *total.terms).is_finite()))
        if len(lines) < len(total.terms) + _SPARE:
            continue
        sizes = lines.select(
            **{name: radius_of(pl.col(name), context.digits.get(name, ())) for name in (total.total, *total.terms)}
        ).to_numpy()
        left, parts = lines[total.total].to_numpy(), lines.select(total.terms).to_numpy()
        weights, *_ = np.linalg.lstsq(parts, left, rcond=None)
        right = np.sum(parts * weights, axis=1)
        bound = float(np.sqrt(np.sum((np.sum(sizes * np.abs((1.0, *weights)), axis=1) + total.cancels) ** 2)))
        beyond = np.abs(left - right) / bound if bound > 0 else np.zeros(len(left))
        sides = {"left": left, "right": right, "beyond": beyond}
        frames.append(
            lines.select(
                *STEP_KEY,
                identity=pl.lit(total.words),
                exact=pl.lit(value=False),
                # The last digits are the library's.
                **{name: pl.Series(values).round_sig_figs(6) for name, values in sides.items()},
            )
        )
    return pl.concat(frames, how="vertical_relaxed")


def _sums(context: Context) -> Iterator[Sum]:
    """Yield the sums whose metrics the log has and whose coefficients no option states."""
    trainer_name = whose(context.metrics) if context.writer is None else context.writer.name
    trainer = SAME.get(trainer_name or "", trainer_name or "")
    logged = context.metrics
    # A loop of one's own has names of a trainer, and terms in its loss that the trainer has not.
    is_own = context.writer is None and any(not is_named(name) and not is_bookkeeping(name) for name in logged)
    if trainer in LOSS_PARTS and not is_own:
        total, parts = LOSS_PARTS[trainer]
        if total in logged and logged >= {*parts}:
            yield Sum(total, parts, f"{total} = a sum of {', '.join(parts)}", cancels=2.0**-18)
    means = tuple(mean for mean, _ in functions(logged).values())
    settings = {} if context.config is None else context.config.settings
    weights = settings.get("reward_weights")
    is_stated = weights is not None and weights.is_stated
    if trainer in WEIGHTED_REWARDS and "reward" in logged and len(means) > 1 and not is_stated:
        yield Sum("reward", means, "reward = a weighted sum of its functions, with any weights")
