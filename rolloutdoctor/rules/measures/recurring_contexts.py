"""Contexts at the first tokens of responses, of which some recur in other steps of a run."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.rules.table_rule import of_smallest

TOKENS = 4
"""First tokens of each row that are looked at: contexts further on seldom recur."""

CONTEXTS = 128
"""Contexts that are compared, at each of these tokens."""

ADDS = tuple(f"{name}_{place}" for name in ("context", "sampler", "trainer") for place in range(TOKENS))
"""What `first_tokens.contexts_of` adds to the rows."""


def contexts_at(rows: pl.DataFrame, *is_kept: pl.Expr, **more: pl.Expr) -> pl.DataFrame:
    """One line for each row and `place` whose context may be among those of the run.

    Args:
        rows: with `ADDS`, and a hash of the `prompt`, 0 where unknown.
        is_kept: which lines, by ``context, sampler, trainer`` at the place and `more`.
        more: columns beside these.
    """
    names, prompted = ("context", "sampler", "trainer"), rows.filter(pl.col("prompt") != 0)
    at = [{"place": pl.lit(place)} | {name: pl.col(f"{name}_{place}") for name in names} for place in range(TOKENS)]
    return smallest(pl.concat(prompted.select(*STEP_KEY, **columns, **more).filter(*is_kept) for columns in at))


def smallest(lines: pl.DataFrame) -> pl.DataFrame:
    """Keep the contexts of the smallest hashes at each place: of all steps of a run, those that are compared."""
    return pl.concat(of_smallest("context", CONTEXTS, lines.filter(place=place)) for place in range(TOKENS))


def is_bf16(x: pl.Series) -> bool:
    """True if all values are bf16 numbers; below 2^-12 these are closer than 2^-20."""
    bits = x.filter(x.abs() >= 2.0**-12).cast(pl.Float32).to_numpy().view("uint32")
    return not (bits & 0xFFFF).any()
