"""How the responses of each step ended, by a log: its share of truncated ones, and what lengths say of it."""

import polars as pl

LEAST = 16
"""Tokens of a mean length that may be a limit: answers of a few tokens are of one length by themselves."""


def logged_ends(lines: pl.DataFrame, long: int) -> pl.DataFrame:
    """Return the lines that say how responses ended.

    Args:
        lines: in the order of steps: the logged `share` of truncated responses, and their lengths, the `least`, the
            `most` and the `mean`, and their end-of-sequence tokens `ends`; null where not logged.
        long: lines of one mean length from which on it is that of every response.

    Returns:
        `share`, of responses truncated at the largest length, `counted`, as it was logged, `is_whole`, where it is all
        of them, and `is_late`, true of a run that comes to one length at its end.
    """
    share, least, most = pl.col("share"), pl.col("least"), pl.col("most")
    of_tokens = lines.drop_nulls("ends")
    if len(of_tokens) and lines.select(share.is_null().all() & (pl.col("ends") == 0).all()).item():
        # Without a single such token none has ended, wherever it was cut.
        return of_tokens.with_columns(share=0.0, counted=1.0, is_whole=False, is_late=False)
    # Mean lengths of many responses are one integer only where each of them has that length.
    means, largest, last = pl.col("mean"), pl.col("mean").max(), pl.col("mean").drop_nulls().last()
    at_limit, is_longest = means == largest, most.max().fill_null(largest) == largest
    is_limit = is_longest & share.is_null().all() & (largest % 1 == 0) & (largest >= LEAST)
    differs = (means != last).fill_null(value=False)
    at_end = means.is_not_null() & (differs.cum_sum(reverse=True) == 0)
    is_pinned = is_limit & (last == largest) & (at_end.sum() >= pl.max_horizontal(at_limit.sum() / 2, long))
    # Lines before such an end have no share; without one, lines of another mean have none truncated at least.
    of_lines = (at_limit & is_limit & (at_limit.sum() >= long)).cast(pl.Float64)
    of_share = pl.when(is_pinned).then(pl.when(at_end).then(1.0)).when(share.is_null().all()).then(of_lines)
    # Responses that were cut at one length are at the largest one: fewer show in the mean.
    # A log without lengths counts what its share says.
    at_cap = (means >= share * most * (1 - 1e-6)).fill_null(value=True)
    is_odd = ((least <= 0) | (least > most) | most.is_nan()).fill_null(value=False)
    return (
        lines.with_columns(share=pl.coalesce("share", of_share), is_late=is_pinned & differs.any())
        .with_columns(pl.coalesce(name, pl.when(share == 1).then("mean")) for name in ("least", "most"))
        .filter(share.is_between(0, 1), ~is_odd)
        .with_columns(
            share=pl.when(at_cap).then(share).otherwise(0.0),
            counted=share,
            is_whole=(share == 1) & (least == most).fill_null(value=True),
        )
    )
