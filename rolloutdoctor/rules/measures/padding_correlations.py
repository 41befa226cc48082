"""How the gap of rows goes with their left padding, beside the lengths of prompt and response."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY

MOMENTS = {"20": (2, 0), "11": (1, 1), "22": (2, 2), "31": (3, 1), "40": (4, 0)}
"""Powers of padding and of gap, less what a line in the lengths of prompt and response gives, that are added up."""


def padding_correlations(rows: pl.DataFrame) -> pl.DataFrame:
    """Correlate the mean gap of the rows of each step with their padding.

    `gap` and `gap_padded` are the medians of rows without padding and of the more padded half of the others, whose
    median `padding` it is; `freedom` counts the degrees of freedom that are left to the moments.
    """
    gap, padding = pl.col("gap"), pl.col("padding")
    much = padding >= padding.filter(padding > 0).median()
    moments = {name: (pl.col("p") ** i * pl.col("g") ** j).sum() for name, (i, j) in MOMENTS.items()}
    return (
        rows.with_columns(r=_centred("tokens"), q=_centred("prompt_tokens"), p=_centred("padding"), g=_centred("gap"))
        .with_columns(_without(name, "r") for name in ("q", "p", "g"))
        .with_columns(_without(name, "q") for name in ("p", "g"))
        # In a single micro-batch the padding is a line in the prompt.
        .with_columns(p=pl.col("p") * (_product("p", "p") > 1e-9 * _product("padding", "padding")))
        .group_by(STEP_KEY, maintain_order=True)
        .agg(
            rows=pl.len(),
            padded=(padding > 0).sum(),
            correlation=_spearman("gap", "padding"),
            less_response=_partial("tokens"),
            less_prompt=_partial("prompt_tokens"),
            gap=gap.filter(padding == 0).median(),
            gap_padded=gap.filter(much).median(),
            padding=padding.filter(much).median(),
            freedom=(pl.len().cast(pl.Int64) - 4).clip(lower_bound=0),
            **moments,
        )
    )


def _product(left: str, right: str) -> pl.Expr:
    return (pl.col(left).cast(pl.Float64) * pl.col(right)).sum().over(STEP_KEY)


def _centred(name: str) -> pl.Expr:
    return pl.col(name) - pl.col(name).mean().over(STEP_KEY)


def _without(name: str, other: str) -> pl.Expr:
    """A column less its projection on another one, within each step."""
    square = _product(other, other)
    return pl.col(name) - pl.col(other) * pl.when(square > 1e-9).then(_product(name, other) / square).otherwise(0.0)


def _spearman(left: str, right: str) -> pl.Expr:
    """Rank correlation; 0 where one does not vary."""
    return pl.corr(left, right, method="spearman").fill_nan(0.0)


def _partial(third: str) -> pl.Expr:
    """Rank correlation of gap and padding with a third column partialled out."""
    overall, first, second = _spearman("gap", "padding"), _spearman("gap", third), _spearman("padding", third)
    rest = (1 - first**2) * (1 - second**2)
    return pl.when(rest > 1e-9).then((overall - first * second) / rest.sqrt()).otherwise(0.0)
