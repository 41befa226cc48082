"""The groups that move most between two evaluations, with their rows and, if asked for, their texts."""

import polars as pl

from rolloutdoctor.commands.diff.rows import EMPTY
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.comparison import MovedGroup, MovedRow, Pair

MOST_ROWS = 8
"""Rows kept of a group that moved."""

_GROUP = ("step", "split", "group_id")


def most_moved(rows: pl.DataFrame, keep: int) -> pl.DataFrame:
    """Return the rows of the `keep` groups that moved most, most first, the earlier of equals first.

    Args:
        rows: of one changed side, as `side_rows` gives them, or as this returns them.
        keep: how many groups.
    """
    if "moved" not in rows.columns:
        moved = pl.coalesce("versus_l1", "shift") if "shift" in rows.columns else pl.col("versus_l1")
        rows = rows.with_columns(moved=moved).with_columns(
            group_moved=pl.sum("moved").over(_GROUP), size=pl.len().over(_GROUP).cast(pl.Int64)
        )
        rows = rows.filter(pl.col("group").is_not_null(), pl.col("group_moved").is_finite(), pl.col("group_moved") > 0)
        order = pl.struct(-pl.col("moved").fill_nan(0.0), "row").rank("ordinal").over(_GROUP)
        rows = rows.with_columns(order=order.cast(pl.Int64)).filter(pl.col("order") <= MOST_ROWS)
    ordered = rows.sort("group_moved", *_GROUP, "order", descending=[True, False, False, False, False])
    first = ordered.select(_GROUP).unique(maintain_order=True).head(keep)
    return ordered.join(first, on=_GROUP, how="semi", maintain_order="left")


def no_groups() -> pl.DataFrame:
    """Return the rows of no groups."""
    return most_moved(EMPTY, 0).with_columns(prompt=pl.lit(None, pl.String), response=pl.lit(None, pl.String))


def with_texts(run: Run, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `most_moved` with their prompts and responses, where the run has them."""
    places = [(StepKey(step, split), row) for step, split, row in rows.select("step", "split", "row").iter_rows()]
    texts = run.texts({key: {row for other, row in places if other == key} for key, _ in places})
    cells = {name: [_words(texts.get(place, {}).get(name)) for place in places] for name in ("prompt", "response")}
    return rows.with_columns(pl.Series(name, words, pl.String) for name, words in cells.items())


def moved_groups(rows: pl.DataFrame) -> tuple[MovedGroup, ...]:
    """Return the groups of `most_moved`, with what texts their rows have."""
    groups = []
    for (step, split, name), members in rows.group_by(_GROUP, maintain_order=True):
        moved_rows = [
            MovedRow(
                sample_id=line["sample_id"],
                reward=line["reward"],
                advantage=Pair(line["advantage"], line["advantage_after"]),
                prompt=line["prompt"],
                response=line["response"],
                gradient=Pair(line["grad_l1"], line["grad_l1_after"]),
            )
            for line in members.iter_rows(named=True)
        ]
        groups.append(MovedGroup(step, split, name, members["group_moved"][0], members["size"][0], tuple(moved_rows)))
    return tuple(groups)


def _words(cell: object) -> str | None:
    """A text, or the contents of messages one after another."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        contents = [part.get("content") if isinstance(part, dict) else part for part in cell]
        return "\n".join(str(content) for content in contents if content is not None)
    return str(cell)
