"""Relations of rewards to rows, added up over the steps of a run."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import BLOCK, STEP_KEY, RunTables

RELATION = ("tested", "bits", "kept")
"""Of a relation in a step: rows that it says something about, how unlikely it is that rewards of other rows keep it in
all of these, in bits, and the rows that keep it; `moved`: those that do with the rewards in another order."""

COPIES = ("copies", "differing", "apart", "by_chance", "less", "squares")
"""Of responses of a step that repeat an earlier one of their group: how many there are, how many of them have another
reward, the sum of their rewards' squared distances from the first one's and that of the mean squared distances from
the other rewards of their group, of the squared differences of the two, and of the squares of the second."""

_ROWS = {"step": pl.Int64, "split": pl.String, "subject": pl.String, "row": pl.Int64, "value": pl.Float64}


def relation_sums(run: RunTables, most: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return sums over blocks of steps, by whether a step breaks the relation, and the rows that break one.

    Args:
        run: metrics are ``NAME/SUBJECT``; rows, ``row`` and ``worst`` of them, have subjects of their own.
        most: rows that are kept, the largest by `value`; None: all.

    Returns:
        ``subject, broken, steps``, null where a step has no such value, and `RELATION`, ``moved`` and `COPIES`; and
        ``step, split, subject, row, value``.
    """
    summed = (*RELATION, "moved", *COPIES)
    value = {name: pl.col("value").filter(pl.col("name") == name).first() for name in ("row", "worst", *summed)}
    parts = pl.col("metric").str.splitn("/", 2).struct.rename_fields(["name", "subject"])
    of_block = {"block": pl.col("step") // BLOCK, "broken": pl.col("kept") < pl.col("tested")}
    sums = [pl.when(pl.col(name).count() > 0).then(pl.sum(name)) for name in summed]
    rows, added_up = pl.DataFrame(schema=_ROWS), []
    for metrics in run.metric_ranges():
        named = metrics.select(*STEP_KEY, parts, value="logged").unnest("metric")
        lines = named.group_by(*STEP_KEY, "subject", maintain_order=True).agg(**value)
        added_up.append(lines.group_by("subject", **of_block, maintain_order=True).agg(*sums, steps=pl.len()))
        relations = lines.drop_nulls("row").select(*STEP_KEY, "subject", pl.col("row").cast(pl.Int64), value="worst")
        rows = pl.concat([rows, relations])
        if most is not None:
            largest = rows.sort("value", "step", "row", descending=[True, False, False], maintain_order=True)
            rows = largest.head(most)
    return pl.concat(added_up, rechunk=True).drop("block"), rows
