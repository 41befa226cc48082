"""Prefixes that different responses of one prompt share, and that no two share by chance."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY

BEYOND = 50
"""Nats of a prefix from which on no two responses share it by chance: of 10^8 pairs, at seven lengths, 1e-13."""

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the prefixes that are compared."""


def is_first(keys: tuple[str, ...]) -> pl.Expr:
    """The first row of some keys."""
    return pl.struct(keys).is_first_distinct()


def shared_prefixes(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that share an unlikely prefix with a different response of their prompt.

    A prefix that groups of different prompts share was forced, and is no copy. The shortest unlikely prefix that a row
    shares says with whom: longer ones gather fewer rows. A response that is there several times counts once.
    """
    # Rows that share a prefix share its beginning: mostly there are none.
    short = (*STEP_KEY, f"prefix_{LENGTHS[0]}")
    some = rows.filter(pl.col("tokens") > LENGTHS[0]).filter(pl.len().over(short) > 1)
    each = pl.concat(
        some.filter(pl.col("tokens") > length, pl.col(f"nats_{length}") >= BEYOND).select(
            *(*STEP_KEY, "row", "group", "response", "seed"),
            length=pl.lit(length),
            prefix=f"prefix_{length}",
            nats=f"nats_{length}",
        )
        for length in LENGTHS
    )
    key = (*STEP_KEY, "length", "prefix")
    of_group, of_response = (*key, "group"), (*key, "group", "response")
    return (
        each.filter(pl.n_unique("seed").over(key) == 1, pl.n_unique("response").over(key) > 1)
        .group_by(*STEP_KEY, "row", maintain_order=True)
        .agg(pl.first("group", "response", "length", "prefix"), longest=pl.max("length"), shared_nats=pl.max("nats"))
        .sort(*STEP_KEY, "row")
        .select(
            *(*STEP_KEY, "row", "longest", "shared_nats"),
            prefixed=is_first(of_response) & ~is_first(of_group),
            prefixed_across=is_first(of_group) & ~is_first(key),
        )
    )
