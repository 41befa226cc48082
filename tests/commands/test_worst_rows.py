"""Which rows the page shows, and what it has of them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.commands.plot.query import check_and_gather
from rolloutdoctor.commands.view.worst_rows import MOST_CHARACTERS, MOST_ROWS, MOST_TOKENS, WorstRows
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


def views_of(path, **options):
    chosen = CheckOptions(**options)
    report, _, worst = check_and_gather(open_run([path]), (), chosen, beside=WorstRows)
    return report, worst.views(report.findings, chosen)


@pytest.mark.slow
def test_the_worst_findings_come_first_then_gradient_and_gap():
    report, views = views_of(SAMPLES / "verl_rejected.parquet")
    assert [(view.step, view.sample_id) for view in views] == [(46, "45/0/0"), (40, "39/0/0"), (44, "43/0/7")]
    first, second, third = views
    assert first.why == f"RDA001 rejected-in-baseline: {report.findings[0].examples[0].note}"
    # One row is there once, whatever speaks for it.
    assert second.why.startswith("RDA002 singleton-group: ")
    assert second.why.endswith("the largest gradient of the run: 52.9 % of step 40's")
    assert third.why.startswith("sampler and trainer differ most here: ")
    assert sum(map(abs, third.gap)) == pytest.approx(1.674, abs=1e-3)
    stored = pq.read_table(SAMPLES / "verl_rejected.parquet").to_pylist()
    row = next(one for one in stored if (one["step"], one["sample_id"]) == (46, "45/0/0"))
    assert (first.prompt, first.response, first.prompt_ids) == (
        row["prompt"],
        row["response"],
        tuple(row["prompt_ids"]),
    )
    assert (first.ids, first.trained, first.reward) == (
        tuple(row["response_ids"]),
        tuple(map(bool, row["response_mask"])),
        row["reward"],
    )
    group = [one for one in stored if (one["step"], one["group_id"]) == (46, row["group_id"])]
    assert [(one.sample_id, one.reward, one.response, one.length) for one in first.group] == [
        (one["sample_id"], one["reward"], one["response"], len(one["response_ids"])) for one in group
    ]
    assert [one.advantage for one in first.group if one.sample_id == first.sample_id] == [first.advantage]
    # A negative advantage on-policy: the derivative of the loss is positive.
    assert all(value > 0 for value in first.gradient)
    assert first.gradient_kept == pytest.approx(1)


@pytest.mark.slow
def test_where_only_ids_are_there_are_ids():
    _, views = views_of(SAMPLES / "slime_ppo.parquet")
    assert views
    assert all(view.prompt is None and view.response is None and view.prompt_ids and view.ids for view in views)
    assert not any(view.gap for view in views)


def test_where_only_text_is_there_is_text_of_the_largest_advantage(tmp_path):
    rows = [
        {"step": step, "group_id": "g", "sample_id": f"{step}/{n}", "reward": float(n), "advantage": value, **texts}
        for step in (0, 1)
        for n, value in enumerate((0.5, -3.0 * step, None))
        for texts in [{"prompt": [{"role": "user", "content": f"say {n}"}], "response": "x" * 200_000}]
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "text.parquet")
    _, views = views_of(tmp_path / "text.parquet")
    view = views[-1]
    assert (view.sample_id, view.advantage) == ("1/1", -3.0)
    assert view.why.endswith("the largest logged advantage of the run: 3 in size")
    assert [(one.sample_id, one.advantage) for one in view.group][:2] == [("1/0", 0.5), ("1/1", -3.0)]
    assert (view.prompt, len(view.response), view.ids, view.gradient) == ("user: say 1", MOST_CHARACTERS, (), ())


def test_of_a_long_row_the_tokens_around_the_heaviest_are_kept(tmp_path):
    length, heavy = 5000, 4000
    old = [-1.0] * length
    sampler = [-1.0] * heavy + [-3.0] + [-1.0] * (length - heavy - 1)
    cells = {
        "response_ids": [list(range(length))] * 2,
        "response_mask": [[True] * length] * 2,
        "old_log_probs": [old, old],
        "rollout_log_probs": [old, sampler],
    }
    table = pa.table({"step": [0, 0], "group_id": ["g", "g"], "reward": [0.0, 1.0]} | cells)
    pq.write_table(table, tmp_path / "long.parquet")
    _, views = views_of(tmp_path / "long.parquet", trainer=None)
    (view,) = views
    assert (view.length, len(view.ids), view.ids[0], view.first) == (length, MOST_TOKENS, view.first, view.first)
    assert heavy in view.ids
    assert view.gap[heavy - view.first] == pytest.approx(2)


@pytest.mark.slow
def test_never_more_rows_than_some_and_none_of_a_log():
    assert len(views_of(SAMPLES / "run.parquet")[1]) <= MOST_ROWS
    from rolloutdoctor.opening.dumps import ConvertOptions
    from rolloutdoctor.opening.open_any import open_any

    path = [str(SAMPLES / "run.metrics.parquet")]
    with open_any(path, trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        report, _, worst = check_and_gather(run, (), CheckOptions(), beside=WorstRows)
        assert worst.views(report.findings, CheckOptions()) == []
