"""Rows that are parts of a step, counts of groups, and rows of episodes: what a loop of one's own may log."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.io.locations.paths import Source


def read(path, rows):
    """What was logged by step, and what was said."""
    path.write_text(json.dumps(rows))
    told, values = [], {}
    for step, _, row in read_log(Source.of(str(path)), LogNotes(told.append)):
        values.setdefault(step, []).append(row)
    return values, told


PARTS = [{"step": step, "mean_reward": float(part), "loss": 0.5} for step in range(4) for part in range(3)]


def test_rows_of_the_parts_of_a_step_are_its_mean(tmp_path):
    values, told = read(tmp_path / "log.json", PARTS)
    assert values == {step: [{"mean_reward": 1.0, "loss": 0.5}] for step in range(4)}
    assert told == [f"{tmp_path / 'log.json'}: 3 rows are of one step each: their means are read"]


@pytest.mark.parametrize(
    "rows",
    [PARTS[:6], PARTS[::3] + PARTS[4::3], [*PARTS[::3], PARTS[10]]],
    ids=["two steps", "a run that was resumed", "a step that was written twice"],
)
def test_other_rows_of_a_step_stay(tmp_path, rows):
    values, _ = read(tmp_path / "log.json", rows)
    assert sum(map(len, values.values())) == len(rows)


def groups(*counts):
    return [{"step": step, "loss": 0.5, "reward_mean": 0.1 * step, **row} for step, row in enumerate(counts)]


@pytest.mark.parametrize(
    ("rows", "shares"),
    [
        (groups(*({"n_degenerate": count, "n_groups": 8} for count in (2, 6, 4))), [0.25, 0.75, 0.5]),
        (groups(*({"dead_groups": count, "num_groups": 8 - count} for count in (2, 6, 4))), [0.25, 0.75, 0.5]),
        (groups(*({"n_degenerate": count, "n_groups": 2} for count in (0, 2, 4))), None),
        (groups(*({"n_degenerate": count, "n_groups": of} for count, of in ((1, 4), (2, 8), (1, 6)))), None),
        (groups(*({"n_degenerate": count} for count in (2, 6, 4))), None),
        # Groups of which all responses pass or fail, and those of which some do.
        (groups(*({"all_pass": 1, "all_fail": n, "mixed": 3 - n} for n in (0, 1, 2))), [0.25, 0.5, 0.75]),
        (groups(*({"solve_all": 1, "solve_none": n, "n_groups": 4} for n in (0, 1, 2))), [0.25, 0.5, 0.75]),
        (groups(*({"all_pass": 1, "all_fail": n} for n in (0, 1, 2))), None),
        (groups(*({"all_pass": 1, "mixed": 3 - n} for n in (0, 1, 2))), None),
    ],
    ids=[
        "of all groups",
        "beside the others",
        "of something else",
        "of a total that varies",
        "of nothing",
        "mixed ones",
        "all of them",
        "no total",
        "no failed ones",
    ],
)
def test_a_count_of_groups_is_a_share_where_the_total_shows(tmp_path, rows, shares):
    values, told = read(tmp_path / "log.json", rows)
    found = [row.get("degenerate_ratio") for each in values.values() for row in each]
    assert found == (shares or [None] * len(rows))
    assert bool(told) == bool(shares)


EPISODES = [{"episode": place, "reward": 0.5, "level": "easy", "done": True} for place in range(1, 41)]


@pytest.mark.parametrize("write", [json.dumps, lambda rows: "".join(json.dumps(row) + "\n" for row in rows)])
def test_a_row_of_each_episode(tmp_path, write):
    path = tmp_path / "log.jsonl"
    path.write_text(write(EPISODES))
    report = rd.check(path)
    assert [one.headline for one in report.causes] == ["the reward is 0.5 in all 40 logged steps"]


@pytest.mark.parametrize("other", [{"response": "a"}, {"text": "a b c " * 20}, {"reward": "much"}])
def test_rows_of_responses_are_no_log(tmp_path, other):
    path = tmp_path / "log.json"
    path.write_text(json.dumps([{**row, **other} for row in EPISODES]))
    assert kind_of(path) is None
