"""Rows that are parts of a step, counts of groups, and rows of episodes: what a loop of one's own may log."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.unknown import not_understood
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.table import understood
from rolloutdoctor.opening.counted_shares import with_shares
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.logs import read_logs
from rolloutdoctor.opening.open_any import open_any


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


def test_rows_of_an_evaluation_are_its_mean(tmp_path):
    """Among training steps of one row each: an answer of several is no evaluation."""
    training = [{"log_type": "train", "step": n, "final_reward": 0.1 * n, "loss": 0.5} for n in range(40)]
    held_out = [
        {"log_type": "eval", "step": n, "final_reward": float(part), "loss": -1.0}
        for n in range(0, 40, 4)
        for part in range(3)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in [*training, *held_out]))
    vitals = {vital.name: vital for vital in rd.check(log).vitals}
    assert set(vitals["held_out_reward"].series) == {1.0}
    assert vitals["reward"].last == pytest.approx(3.9)


@pytest.mark.parametrize(
    "rows",
    [PARTS[:3], PARTS[::3] + PARTS[4::3], [*PARTS[::3], PARTS[10]], [*PARTS[:2], *PARTS[3:5], *PARTS[6::3]]],
    ids=["one step", "a run that was resumed", "a step that was written twice", "two of four steps"],
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
    assert shares_of(tmp_path, json.dumps(rows), "degenerate_ratio") == (shares or [None] * len(rows), bool(shares))


def shares_of(tmp_path, text, name):
    """The share at each step of a log, and whether it was told how it was read."""
    log, told = tmp_path / "log.json", []
    log.write_text(text)
    metrics = with_shares(read_logs([Source.of(str(log))]), None, told.append)
    return [metrics.at(key).get(name) for key in metrics.steps()], bool(told)


def test_counts_of_groups_on_a_console_are_shares(tmp_path):
    lines = "".join(f"step {n} | loss 0.{n} | reward 0.5 | n_degenerate {n} | n_groups 8\n" for n in (1, 2, 3, 4))
    assert shares_of(tmp_path, lines, "degenerate_ratio") == ([0.125, 0.25, 0.375, 0.5], True)


@pytest.mark.parametrize(
    ("counts", "shares"),
    [
        ([{"truncated_count": n, "rollout_count": 8} for n in (0, 2, 8)], [0, 0.25, 1]),
        ([{"n_truncated": 1, "num_responses": of} for of in (2, 4, 8)], [0.5, 0.25, 0.125]),
        ([{"truncated_count": n, "rollout_count": 8} for n in (0, 2, 9)], None),
        ([{"truncated_count": n, "rollout_count": 8} for n in (0, 2, 0.5)], None),
        ([{"truncated_count": n} for n in (0, 2, 4)], None),
        ([{"truncated_count": 1, "rollout_count": 8, "num_responses": 4}] * 3, None),
        ([{"truncated_count": 1, "rollout_count": 8, "completions/clipped_ratio": 0.5}] * 3, None),
    ],
)
def test_a_count_of_truncated_responses_is_a_share_of_those_counted(tmp_path, counts, shares):
    rows = [{"step": n, "loss": 0.5, "reward": 0.5, **more} for n, more in enumerate(counts, start=1)]
    assert shares_of(tmp_path, json.dumps(rows), "truncated_rate") == (shares or [None] * 3, bool(shares))


SUMS = {"total_num": 4, "total_reward": 1.0, "total_format_reward": 3.0}


@pytest.mark.parametrize(
    ("row", "mean"),
    [
        (SUMS, 0.25),
        ({**SUMS, "total_num": 0}, None),
        ({**SUMS, "total_num": 4.5}, None),
        ({**SUMS, "reward": 0.5}, 0.5),
        ({"total_num": 4, "total_reward": 1.0}, None),
        ({"total_reward": 1.0, "total_format_reward": 3.0}, None),
    ],
)
def test_a_sum_of_rewards_is_a_mean_of_as_many_as_are_counted(tmp_path, row, mean):
    rows = json.dumps([{"step": n, "loss": 0.5, **row} for n in (1, 2, 3)])
    assert shares_of(tmp_path, rows, "reward") == ([mean] * 3, row == SUMS)


def test_the_mean_of_summed_rewards_is_the_reward_of_a_line(tmp_path):
    sums = "'total_reward': 1.0, 'total_a_reward': 2.0"
    lines = "".join(f"step {n}, loss: 0.5, data: {{'total_num': {n}, {sums}}}\n" for n in (1, 2, 4))
    (tmp_path / "log.txt").write_text(lines)
    paths = [str(tmp_path / "log.txt")]
    with open_any(paths, trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        assert [run.metrics.at(key)["reward"] for key in run.metrics.steps()] == [1.0, 0.5, 0.25]
        assert understood(run.metrics.names())["reward"][0] == "reward"


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


def told_and_steps(tmp_path, rows, name="log.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = []
    found = {step: dict(row) for step, _, row in read_log(Source.of(str(path)), LogNotes(told.append))}
    return found, told


def test_a_third_of_the_steps_has_several_updates(tmp_path):
    rows = [
        {"step": step, "loss": float(part), "reward": 0.5}
        for step in range(9)
        for part in range(4 if step % 3 == 0 else 1)
    ]
    found, told = told_and_steps(tmp_path, rows)
    assert [found[step]["loss"] for step in range(4)] == [1.5, 0.0, 0.0, 1.5]
    assert [sentence.rpartition(": ")[0].rpartition(": ")[2] for sentence in told] == [
        "1 to 4 rows are of one step each"
    ]


def test_updates_of_which_the_last_has_more_names(tmp_path):
    rows = [
        {"step": step, "loss": float(part), "kl": 0.1, "lr": 0.5} | ({"reward": 2.0} if part else {})
        for step in range(4)
        for part in range(2)
    ]
    found, _ = told_and_steps(tmp_path, rows)
    assert found[3] == {"loss": 0.5, "kl": 0.1, "lr": 0.5, "reward": 2.0}


def test_rows_of_a_step_with_other_names_are_put_together(tmp_path):
    rows = [row for step in range(4) for row in ({"step": step, "reward": 0.5}, {"step": step, "loss": 0.1, "kl": 0.2})]
    values, told = read(tmp_path / "log.json", rows)
    assert values == {step: [{"reward": 0.5}, {"loss": 0.1, "kl": 0.2}] for step in range(4)}
    assert not told


def test_a_tracker_with_a_row_for_each_update(tmp_path):
    rows = [
        {
            "_step": 4 * step + part,
            "_timestamp": 1.0,
            "global_step": step,
            "train/loss": float(part),
            "train/reward": 0.5,
        }
        for step in range(5)
        for part in range(4)
    ]
    found, told = told_and_steps(tmp_path, rows)
    assert {step: row["loss"] for step, row in found.items()} == dict.fromkeys(range(5), 1.5)
    assert told == [f"{tmp_path / 'log.jsonl'}: 4 rows are of one step each: their means are read"]


def test_epochs_of_an_update_are_no_epochs_of_the_run(tmp_path):
    rows = [{"step": step, "epoch": epoch, "loss": float(epoch)} for step in range(6) for epoch in range(2)]
    found, _ = told_and_steps(tmp_path, rows)
    assert {step: row["loss"] for step, row in found.items()} == dict.fromkeys(range(6), 0.5)


def samples(per_step, **more):
    shown = {"completion_preview": "a b c " * 30, "level": "easy", "parts": {"format": 0.5}}
    return [
        {"global_step": place // per_step, "prompt_idx": place // 4, "reward": float(place % 4), **shown, **more}
        for place in range(40)
    ]


@pytest.mark.parametrize("write", [json.dumps, lambda rows: "".join(json.dumps(row) + "\n" for row in rows)])
def test_samples_that_show_the_beginning_of_a_response(tmp_path, write):
    path = tmp_path / "log.json"
    path.write_text(write(samples(4)))
    told = []
    found = [row["reward"] for _, _, row in read_log(Source.of(str(path)), LogNotes(told.append))]
    assert found == [1.5] * 10
    assert told == [f"{path}: 4 rows are of one step each: their means are read"]


@pytest.mark.parametrize("write", [json.dumps, lambda rows: "".join(json.dumps(row) + "\n" for row in rows)])
@pytest.mark.parametrize(
    ("more", "came"),
    [
        (0.0, "their mean has not moved: 1.38 in the first third, 1.62 in the last (change of -0.71 to +1.2); "),
        (0.1, "their mean rose: 1.98 in the first third, 4.92 in the last (change of +1."),
        (-0.1, "their mean fell: 0.785 in the first third, -1.68 in the last (change of -3."),
    ],
)
def test_samples_that_are_counted_one_by_one_are_no_steps(tmp_path, write, more, came):
    path = tmp_path / "log.json"
    rows = [{**row, "reward": row["reward"] + more * place} for place, row in enumerate(samples(1))]
    path.write_text(write(rows))
    assert kind_of(path) is None
    assert (not_understood(path) or "").startswith(
        f"40 rewards of one response each, of which nothing says the step of the training: {came}"
    )
    # One that is left out, or the whole responses.
    for others in (rows[:20] + rows[21:], [{**row, "response": "a b c"} for row in rows]):
        path.write_text(write(others))
        assert not (not_understood(path) or "").startswith("40 rewards")


def test_samples_with_all_of_a_response_are_no_log(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(samples(4, response="a b c")))
    assert kind_of(path) is None
