"""What the pictures of sampler and trainer, and of lengths, count."""

import math
from dataclasses import replace

import pytest
from run_files import write

from rolloutdoctor.commands.plot.query import check_and_draw, draw
from rolloutdoctor.engine import run_steps
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.pictures.gather.marks import _fitted
from rolloutdoctor.pictures.gather.tokens import GRID_CELLS
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import Mark, MismatchData


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def columns(steps, old, rollout, **others):
    rows = len(old)
    found = {"step": steps, "reward": [1.0] * rows, "old_log_probs": old, "rollout_log_probs": rollout, **others}
    return found | {"response_mask": [[1] * len(row) for row in old]} if "response_mask" not in found else found


def drawn(kind, **given):
    return draw(open_run([write(**given)]), kind, CheckOptions())


def test_each_token_is_in_its_cell():
    data = drawn(
        "mismatch",
        **columns(
            [0, 0],
            [[-0.01, -1.0, -3.0, -9.0], [0.0]],
            [[-0.02, -1.5, math.nan, -2.0], [0.0]],
            response_mask=[[1, 1, 1, 1], [1]],
        ),
    )
    cells = {(row, place): n for row, line in enumerate(data.counts) for place, n in enumerate(line) if n}
    # Twelve cells to a nat, from -8.
    assert cells == {(95, 95): 2, (78, 84): 1}
    assert (data.tokens, data.outside, data.by_lag, data.compared) == (4, 1, (), "old_log_probs")
    assert len(data.counts) == GRID_CELLS


def test_tokens_that_are_all_but_certain_are_in_the_last_cell():
    """In float32 the sum of -1e-7 and 8 is 8. A log-prob above 0 is none of the grid."""
    near = [-0.0, -1e-12, -1e-8, -1.19e-7, -2.3e-7, -1e-6, -0.08]
    data = drawn("mismatch", **columns([0], [[*near, 1e-3]], [[*near, 1e-3]]))
    assert data.counts[-1][-1] == len(near)
    assert (data.tokens, data.outside) == (len(near) + 1, 1)


@pytest.mark.parametrize("together", [0, run_steps.TOGETHER])
def test_sizes_by_step_position_and_lag(together, monkeypatch):
    """Alike for steps that share a pass: a row lags behind the newest of its own step."""
    monkeypatch.setattr(run_steps, "TOGETHER", together)
    gap, rows = 0.3, 4
    old = [[-2.0] * 200] * rows
    rollout = [[-2.0 - (gap if row % 2 else 0.01)] * 200 for row in range(rows)]
    stamps = {"policy_version_min": [5, 3, 6, 4], "policy_version_max": [5, 3, 6, 4]}
    data = drawn("mismatch", **columns([7, 7, 3, 3], old, rollout, **stamps))
    assert [(one.first, one.tokens) for one in data.by_step] == [(3, 400), (7, 400)]
    assert [(one.first, one.last) for one in data.by_position][:4] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert sum(one.tokens for one in data.by_position) == 800
    assert math.isnan(data.by_position[0].median)
    assert [(one.first, one.tokens) for one in data.by_lag] == [(0, 400), (2, 400)]
    low, high = data.by_lag
    assert low.median == pytest.approx(0.01, rel=0.125)
    assert high.median == pytest.approx(gap, rel=0.125)
    assert data.by_step[0].upper == pytest.approx(gap, rel=0.125)


def test_what_a_rule_found_is_drawn():
    steps = [step for step in range(8) for _ in range(2)]
    old = [[-2.0] * 128] * 16
    rollout = [[-2.0 - (0.3 if step > 3 else 0.01)] * 128 for step in steps]
    data = drawn("mismatch", **columns(steps, old, rollout))
    assert data.marks == (Mark("RDO002", "the gap rises at step 4", step=4),)
    _, gallery = check_and_draw(open_run(["run.parquet"]), ["mismatch", "lengths", "kl"], CheckOptions())
    assert gallery.drawn["mismatch"] == data
    # Neither needs to know the trainer.
    assert set(gallery.left_out) == {"kl"}


def test_the_line_of_a_temperature_goes_through_the_unsure_tokens():
    """Tokens on one line of slope 2: it is found to within a cell; one that is sure does not move it."""
    counts = [[0] * 96 for _ in range(96)]
    for row in (12, 36, 60):
        counts[row][(row + 72) // 2] = 5
    counts[95][0] = 10_000
    data = MismatchData("old_log_probs", -8.0, tuple(map(tuple, counts)), 10_015, 0, (), ())
    mark = Mark("RDO003", "slope 1/T, T = 0.5", 2.0, math.nan)
    wanted = -8 + 12.5 / 12 - 2 * (-8 + 42.5 / 12)
    assert _fitted(mark, data).offset == pytest.approx(wanted)
    assert _fitted(replace(mark, offset=0.105), data).offset == 0.105


def test_medians_lie_within_their_bins():
    """Two steps whose medians share a bin are not drawn at one height."""
    old, rollout = [[-2.0] * 128] * 2, [[-2.0 - x * (1 + n / 128) for n in range(128)] for x in (0.1, 0.104)]
    low, high = (one.median for one in drawn("mismatch", **columns([0, 1], old, rollout)).by_step)
    assert low < high


def test_a_missing_column_is_named():
    write(step=[0], reward=[1.0], old_log_probs=[[-1.0]], response_mask=[[1]])
    with pytest.raises(InputError, match="no picture of mismatch: missing column rollout_log_probs"):
        draw(open_run(["run.parquet"]), "mismatch", CheckOptions())
    write(step=[0], reward=[1.0])
    with pytest.raises(InputError, match="no picture of lengths: no column says how long responses are"):
        draw(open_run(["run.parquet"]), "lengths", CheckOptions())


def test_lengths_by_status():
    sizes = [2, 4, 8, 8]
    ids = [[9] * (size - 1) + [last] for size, last in zip(sizes, [2, 2, 3, 2], strict=True)]
    data = drawn(
        "lengths", step=[1, 1, 0, 0], reward=[1.0] * 4, response_ids=ids, status=["stop", "stop", "length", "stop"]
    )
    assert data.steps == (0, 1)
    # Of an even number of rows the smaller middle one: a length that a row has.
    assert (data.median, data.longest) == ((8.0, 2.0), (8.0, 4.0))
    assert (data.middle, data.truncated_rows) == (4, 1)
    assert data.truncated == (0.5, 0.0)
    assert data.truncated_lengths.total == 1
    assert (data.end_tokens, data.ended) == ((2,), (0.5, 1.0))
    assert data.by_status


def test_a_response_without_a_status_is_neither_truncated_nor_finished():
    ends = ["MAX_LENGTH", None, "stop", None]
    data = drawn("lengths", step=[0, 0, 1, 1], reward=[1.0] * 4, response_ids=[[1]] * 4, status=ends)
    assert (data.truncated, data.truncated_rows) == ((1.0, 0.0), 1)


def test_a_step_whose_responses_have_no_tokens_recorded_has_no_length():
    data = drawn("lengths", step=[0, 1], reward=[1.0] * 2, response_ids=[[1, 2], None], status=["stop"] * 2)
    assert (data.steps, data.median) == ((0,), (2.0,))


def test_lengths_without_status():
    mask = [[1] * size for size in (2, 8, 8, 5)]
    data = drawn("lengths", step=[0, 0, 0, 1], reward=[1.0] * 4, response_mask=mask)
    assert data.truncated == (2 / 3, 0.0)
    assert data.truncated_lengths is None
    assert not data.ended
