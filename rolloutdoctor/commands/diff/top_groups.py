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
    return most_moved(EMPTY, 0)


def moved_groups(run: Run, rows: pl.DataFrame, *, text: bool) -> tuple[MovedGroup, ...]:
    """Return the groups of `most_moved`, with the texts of their rows where these are asked for and there."""
    wanted: dict[StepKey, set[int]] = {}
    for step, split, row in rows.select("step", "split", "row").iter_rows():
        wanted.setdefault(StepKey(step, split), set()).add(row)
    texts = run.texts(wanted) if text else {}
    found = []
    for (step, split, name), own in rows.group_by(_GROUP, maintain_order=True):
        key = StepKey(step, split)
        moved_rows = [
            MovedRow(
                sample_id=line["sample_id"],
                reward=line["reward"],
                advantage=Pair(line["advantage"], line["advantage_after"]),
                prompt=_words(texts.get((key, line["row"]), {}).get("prompt")),
                response=_words(texts.get((key, line["row"]), {}).get("response")),
                gradient=Pair(line["grad_l1"], line["grad_l1_after"]),
            )
            for line in own.iter_rows(named=True)
        ]
        found.append(MovedGroup(step, split, name, own["group_moved"][0], own["size"][0], tuple(moved_rows)))
    return tuple(found)


def _words(cell: object) -> str | None:
    """A text, or the contents of messages one after another."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        contents = [part.get("content") if isinstance(part, dict) else part for part in cell]
        return "\n".join(str(content) for content in contents if content is not None)
    return str(cell)
