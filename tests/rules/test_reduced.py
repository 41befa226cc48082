"""What a rule makes of the rows of some steps is the same whatever steps are read together."""

import numpy as np
import polars as pl
import pytest
from objectives import objective_of
from polars.testing import assert_frame_equal

from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS
from rolloutdoctor.evaluation.run_tables import EMPTY_ROWS, STEP_KEY, RunTables
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.rules.table_rule import Rule, with_places, with_sums

OBJECTIVE = objective_of("trl", use_vllm=True, vllm_importance_sampling_mode="sequence_mask")
"""It has bounds on the weights of sequences."""

REDUCING = [rule for rule in RULES if type(rule).reduced is not Rule.reduced]


def rows_for(rule, *, seed=0, steps=6, size=96):
    """Rows of some steps with every column that a rule reads, most of them small numbers, so that many are equal."""
    draw, count = np.random.default_rng(seed), steps * size
    row = np.tile(np.arange(size), steps)
    names = {
        "step": np.repeat(np.arange(steps), size),
        "split": ["train"] * count,
        "row": row,
        "group": row // 4,
        "group_id": [str(group) for group in row // 4],
        "sample_id": [f"row {each}" for each in range(count)],
        "status": draw.choice(["stop", "length", "aborted"], count).tolist(),
        "error": ["", "timeout"] * (count // 2),
    }
    frame = pl.DataFrame(names, schema=EMPTY_ROWS.schema)
    functions = ["rewards/a", "rewards/b"] if "rewards" in rule.reads else []
    for name in (*(name for name in rule.reads if name != "rewards"), *functions, *rule.adds):
        kind = ROW_COLUMNS[name].dtype if name in ROW_COLUMNS else pl.Float64
        kind = pl.Boolean if name.startswith("is_") else kind
        frame = frame.with_columns(pl.Series(name, draw.integers(0, 6, count)).cast(kind))
    # Some trajectories have two rows, and most have one.
    frame = frame.with_columns(
        pl.lit(row - (row % 3 == 2)).alias(name) for name in frame.columns if name == "trajectory_id"
    )
    # All of these have rows of a size that is looked at.
    return frame.with_columns(
        pl.col("^(near_tokens|unsure|trained_tokens)$") * 30, pl.col("^(ngrams|prompt_tokens)$") * 60
    )


@pytest.mark.parametrize("rule", REDUCING, ids=lambda rule: rule.code)
def test_steps_together_as_alone(rule):
    rows, context = rows_for(rule), Context(frozenset(), objective=OBJECTIVE)
    steps = rows.select(STEP_KEY).unique(maintain_order=True)
    together = rule.thinned(rule.reduced(rows, context))
    alone = together.clear()
    for part in rows.partition_by(STEP_KEY, maintain_order=True):
        alone = rule.thinned(pl.concat([alone, rule.reduced(part, context)], how="vertical_relaxed"))
    tables = [rule.table(RunTables(each, steps=steps), context) for each in (together, alone)]
    assert len(together)
    assert_frame_equal(*tables, check_exact=True)


def places(count):
    """Rows of one step, of which the later ones are larger, and two of the largest are equal."""
    value = np.minimum(np.arange(count, dtype=float), count - 2)
    return pl.DataFrame({"step": [3] * count, "split": ["train"] * count, "row": np.arange(count), "value": value})


@pytest.mark.parametrize(("count", "kept"), [(6, [4, 5, 3, 2, 1]), (7, [5, 6, 4, 3, 2])])
def test_of_a_step_the_largest_places_are_kept_unless_all_are_listed(count, kept):
    sums = pl.DataFrame({"step": [3], "split": ["train"], "rows": [count]})
    some = with_places(sums, places(count), Context(frozenset()))
    assert some["row"].to_list() == [None, *kept]
    assert some["rows"].to_list() == [count, *[None] * 5]
    every = with_places(sums, places(count), Context(frozenset(), lists_places=True))
    # A value of 0 is no place.
    assert sorted(every["row"].drop_nulls()) == list(range(1, count))


def test_what_is_not_kept_is_added_up():
    lines = pl.DataFrame(
        {"step": [0, 0, 0, 1], "split": ["train"] * 4, "bad": [1, None, 0, 0], "x": [1.0, 2.0, 4.0, 8.0]}
    )
    found = with_sums(lines.with_columns(y=pl.lit(None, pl.Float64)), pl.col("bad") > 0, "x", "y", most=pl.max("x"))
    assert found["x"].to_list() == [1.0, 6.0, 8.0]
    assert found["most"].to_list() == [None, 4.0, 8.0]
    assert found["bad"].to_list() == [1, None, None]
    # Of nulls alone there is no sum.
    assert found["y"].null_count() == 3
