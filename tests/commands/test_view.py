"""`view`: what the page is told of a run, a step and a group."""

import json
from dataclasses import replace
from pathlib import Path

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.harness import run as command
from run_files import FLOATS, MASK, write

import rolloutdoctor
from rolloutdoctor.commands.view.query import MOST_TOKENS, Inspector, against, judge, shared
from rolloutdoctor.commands.view.trajectories import MOST_TURNS
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.findings import Example

SAMPLE = "sample_data/verl_rejected.parquet"
STEP = StepKey(46, "train")
HOSTILE = "</script><script>document.title='owned'</script>\u202e<img src=x onerror=alert(1)>"


TRL = RunMetadata(trainer="trl", trainer_version="1.16.0", config={"beta": 0.0, "num_generations": 2})


def two_rows(length=2, **more):
    """Columns of a step with one group of a wrong and a right response."""
    return {
        "step": [1, 1],
        "group_id": ["a", "a"],
        "sample_id": ["0", "1"],
        "reward": [0.0, 1.0],
        "response_mask": pa.array([[1] * length] * 2, MASK),
        "old_log_probs": pa.array([[-0.5] * length] * 2, FLOATS),
        **more,
    }


def inspected(path=SAMPLE, **options):
    return Inspector(rolloutdoctor.open(path), CheckOptions(**options), [str(path)])


def test_the_overview_needs_no_row():
    found = inspected().overview()
    assert len(found.steps) == 100
    assert found.steps[45] == (46, "train", 16)
    assert [one.name for one in found.vitals][:2] == ["reward", "kl"]
    assert found.fixes == (
        *("zero-std", "rejected-rows", "mask-truncated-vote"),
        *("zero-length-reward", "padding-rows"),
    )
    assert found.trainer == "verl 0.9.1"


def test_a_group_is_what_recompute_writes(tmp_path):
    target = tmp_path / "re.parquet"
    options = {"fixes": ["rejected-rows"], "steps": "46:47", "dtype": "float32"}
    rolloutdoctor.recompute(SAMPLE, target, **options)
    table = {row["sample_id"]: row for row in pl.read_parquet(target).iter_rows(named=True)}
    inspector = inspected()
    for line in inspector.step(STEP, "rejected-rows").groups:
        for one in inspector.group(STEP, line.group_id, "rejected-rows").completions:
            row = table[one.sample_id]
            for name, column in {
                "gradient": "grad_re",
                "gradient with the fix": "grad_re_fixed",
                "ratio": "ratio_re",
                "advantage with the fix": "advantages_re_fixed",
            }.items():
                assert list(one.values[name]) == pytest.approx(row[column], rel=1e-6, abs=1e-9)
            assert one.trained == tuple(weight != 0 for weight in row["ratio_re"]) or not any(one.trained)


def test_shares_of_groups_add_up_and_flags_say_what_is_special():
    page = inspected().step(STEP, "rejected-rows")
    assert sum(line.gradient for line in page.groups) == pytest.approx(1, abs=1e-12)
    assert [line.flags for line in page.groups] == [("2 fully masked",), ()]
    assert page.groups[0].change > 0
    assert page.groups[1].change == 0
    assert {one.name for one in page.metrics if one.recomputed is not None} >= {"actor/pg_loss", "rollout_corr/kl"}


def test_an_advantage_differs_where_it_is_farther_than_rounding(tmp_path):
    columns = two_rows(advantage=[-1.0, 0.5])
    inspector = inspected(write(tmp_path / "run.parquet", metadata=TRL, **columns))
    completions = inspector.group(StepKey(1, "train"), "a").completions
    assert [one.differs for one in completions] == [True, True]
    exact = 0.5 / (0.5**0.5 + 1e-4)
    columns = two_rows(advantage=[-exact, exact])
    inspector = inspected(write(tmp_path / "right.parquet", metadata=TRL, **columns))
    assert [one.differs for one in inspector.group(StepKey(1, "train"), "a").completions] == [False, False]
    assert [one.differs for one in inspected().group(STEP, "45/0").completions if one.logged is not None] == [False] * 6


def test_what_is_not_there_is_a_sentence():
    inspector = inspected()
    with pytest.raises(InputError, match="no step 4600"):
        inspector.step(StepKey(4600, "train"))
    with pytest.raises(InputError, match="has no group '45/9'"):
        inspector.group(STEP, "45/9")
    with pytest.raises(UsageError, match="no fix 'zero'"):
        inspector.step(STEP, "zero")


def test_without_a_trainer_rows_are_shown_and_the_reason_is_said(tmp_path):
    inspector = inspected(write(tmp_path / "run.parquet", **two_rows()))
    key = StepKey(1, "train")
    page = inspector.step(key)
    assert page.problem
    assert [line.rewards for line in page.groups] == [(0.0, 1.0)]
    assert all(line.gradient is None for line in page.groups)
    group = inspector.group(key, "a")
    assert all(one.recomputed is None and "gradient" not in one.values for one in group.completions)


@pytest.mark.slow
def test_judging_compares_logged_with_recomputed(tmp_path):
    path = tmp_path / "run.parquet"
    path.write_bytes(Path("sample_data/slime_ppo.parquet").read_bytes())
    metrics = pl.read_parquet("sample_data/slime_ppo.metrics.parquet")
    wrong = (pl.col("name") == "train/loss") & (pl.col("step") == 7)
    changed = metrics.with_columns(pl.when(wrong).then(pl.col("value") + 1).otherwise("value").alias("value"))
    changed.write_parquet(tmp_path / "run.metrics.parquet")
    found = judge(rolloutdoctor.open(path), CheckOptions())
    first = found.compared[0]
    assert first.metric == "train/loss"
    assert [step for step, agrees in zip(first.steps, first.agrees, strict=True) if not agrees] == [7]
    assert first.logged[6] - first.recomputed[6] == pytest.approx(1, abs=1e-4)
    assert all(all(one.agrees) for one in found.compared[1:])


@pytest.mark.slow
def test_a_shared_page_holds_the_groups_that_findings_point_at():
    run = rolloutdoctor.open(SAMPLE)
    report = rolloutdoctor.check(run, steps="40:50")
    found = shared(inspected(), report, 3)
    groups = [name for name in found if name.startswith("group?")]
    assert groups[0] == "group?step=46&split=train&group=45%2F0"
    assert len(groups) == 3
    assert json.loads(orjson.dumps(found))["overview"]["steps"][0][1] == "train"


@pytest.mark.slow
def test_a_shared_page_holds_groups_of_steps_with_rows_of_both_splits():
    """Step 90 was evaluated and trained; the groups that findings point at are of either."""
    run = rolloutdoctor.open("sample_data/run.parquet")
    report = rolloutdoctor.check(run, steps="89:91")
    inspector = Inspector(run, CheckOptions(), ["run.parquet"])
    groups = {split: inspector.step(StepKey(90, split)).groups[0].group_id for split in ("train", "eval")}
    places = tuple(Example(90, group, None) for group in groups.values())
    report = replace(report, findings=(replace(report.findings[0], examples=places),))
    found = shared(inspector, report, 50)
    names = [name.partition("&group=")[0] for name in found if name.startswith("group?")]
    assert names == ["group?step=90&split=train", "group?step=90&split=eval"]
    held = {tuple(step[:2]) for step in json.loads(orjson.dumps(found))["overview"]["steps"]}
    assert {f"step?step={step}&split={split}" for step, split in held} == {x for x in found if x.startswith("step?")}


def beside(tmp_path):
    """Two runs of a step: sample 0 is equal, 1 differs and is of another group in B, 2 is of A alone, 3 of B alone."""
    many = {
        "step": [1] * 3,
        "response_mask": pa.array([[1, 1]] * 3, MASK),
        "old_log_probs": pa.array([[-0.5] * 2] * 3, FLOATS),
        "prompt": ["1+1=", HOSTILE, "1+1="],
    }
    a = {"group_id": ["a"] * 3, "sample_id": ["0", "1", "2"], "reward": [0.0, 1.0, 1.0], "response": ["3", "2", "2"]}
    b = {"group_id": ["a", "b", "a"], "sample_id": ["3", "1", "0"], "reward": [0.5, 0.0, 0.0]}
    paths = [
        write(tmp_path / "a.parquet", metadata=TRL, **many, **a),
        write(tmp_path / "b.parquet", metadata=TRL, **many, **b, response=[HOSTILE, "4", "3"]),
    ]
    return [inspected(path) for path in paths]


def test_two_runs_are_joined_by_step_and_sample(tmp_path):
    a, b = beside(tmp_path)
    key = StepKey(1, "train")
    page = against(a, b, key, "a")
    found = [tuple(one and (one.sample_id, one.reward, one.text) for one in (pair.a, pair.b)) for pair in page.pairs]
    assert found == [
        (("0", 0.0, "3"), ("0", 0.0, "3")),
        (("1", 1.0, "2"), ("1", 0.0, "4")),
        (("2", 1.0, "2"), None),
        (None, ("3", 0.5, HOSTILE)),
    ]
    assert [pair.same for pair in page.pairs] == [True, False, None, None]
    sides = [
        {
            one.sample_id: one.recomputed
            for line in side.step(key).groups
            for one in side.group(key, line.group_id).completions
        }
        for side in (a, b)
    ]
    for pair in page.pairs:
        for one, side in zip((pair.a, pair.b), sides, strict=True):
            assert one is None or one.recomputed == side[one.sample_id]


def test_a_run_beside_itself_is_the_same():
    page = against(inspected(), inspected(), STEP, "45/0", "rejected-rows")
    assert len(page.pairs) == 8
    for pair in page.pairs:
        assert pair.same
        assert orjson.dumps(pair.a) == orjson.dumps(pair.b)


def test_what_the_run_beside_does_not_have_is_a_sentence(tmp_path):
    a, b = beside(tmp_path)
    with pytest.raises(InputError, match="the run beside it: the run has no step 46"):
        against(inspected(), b, STEP, "45/0")
    with pytest.raises(InputError, match="has no group 'z'"):
        against(a, b, StepKey(1, "train"), "z")
    columns = two_rows()
    del columns["sample_id"]
    nameless = inspected(write(tmp_path / "nameless.parquet", metadata=TRL, **columns))
    with pytest.raises(InputError, match="the run beside it: rows cannot be joined: the run has no column sample_id"):
        against(a, nameless, StepKey(1, "train"), "a")


def test_long_responses_are_cut_and_say_so(tmp_path):
    length = MOST_TOKENS + 5
    columns = two_rows(length=length, response=[HOSTILE, HOSTILE])
    inspector = inspected(write(tmp_path / "run.parquet", metadata=TRL, **columns))
    one = inspector.group(StepKey(1, "train"), "a").completions[0]
    assert one.length == length
    assert len(one.values["gradient"]) == len(one.trained) == MOST_TOKENS
    assert one.text == HOSTILE


def test_tokens_have_their_text_where_the_file_holds_it(tmp_path):
    metadata = replace(TRL, recording={"token_text": {"7": HOSTILE, "x": "no id", "8": 3}})
    columns = two_rows(response_ids=pa.array([[7, 8]] * 2, pa.list_(pa.int32())))
    inspector = inspected(write(tmp_path / "run.parquet", metadata=metadata, **columns))
    assert inspector.group(StepKey(1, "train"), "a").completions[0].pieces == (HOSTILE, "\u27e88\u27e9")


TURNS = [
    [{"author": "model", "start": 0, "stop": 2}, {"author": "tool", "start": 2, "stop": 4, "error": "timeout"}],
    [{"author": "model", "start": 0, "stop": 4, "version": 7, "status": "stop"}],
    [{"author": "model", "start": 0, "stop": 4}],
    [{"author": "model", "start": 1, "stop": 4}],
]


def agent_run(tmp_path, **more):
    """Two groups of two rows; the first row of each is a piece of trajectory 5, the others are trajectories alone."""
    columns = {
        "step": [1] * 4,
        "group_id": ["a", "a", "b", "b"],
        "sample_id": ["0", "1", "2", "3"],
        "reward": [0.0, 1.0, 0.0, 3.0],
        "status": ["error", "stop", "stop", "stop"],
        "response_mask": pa.array([[1, 1, 0, 0], [1] * 4, [1] * 4, [1] * 4], MASK),
        "old_log_probs": pa.array([[-0.5] * 4] * 4, FLOATS),
        **more,
    }
    return write(tmp_path / "run.parquet", metadata=TRL, **columns)


def test_a_trajectory_is_shown_with_all_its_rows_turn_by_turn(tmp_path):
    more = {"trajectory_id": [5, 6, 5, None], "error": ["no answer", None, None, None]}
    path = agent_run(tmp_path, turns=TURNS, **more)
    first, second = inspected(path).group(StepKey(1, "train"), "a").trajectories
    assert (first.trajectory_id, first.rows, first.rewards) == ("5", ("0", "2"), (0.0,))
    assert (first.statuses, first.errors, first.count) == (("error", "stop"), ("no answer",), 3)
    assert [(turn.row, turn.author, turn.start, turn.stop, turn.trained, turn.error) for turn in first.turns] == [
        ("0", "model", 0, 2, 2, None),
        ("0", "tool", 2, 4, 0, "timeout"),
        ("2", "model", 0, 4, 4, None),
    ]
    assert (second.turns[0].version, second.turns[0].status) == (7, "stop")
    table = rolloutdoctor.measure(path).turns
    assert [turn.gradient for turn in first.turns] == table.filter(trajectory_id=5)["grad_l1"].to_list()
    of_group = inspected(path).group(StepKey(1, "train"), "b").trajectories
    assert [(one.trajectory_id, one.rows) for one in of_group] == [("5", ("0", "2")), (None, ("3",))]


def test_shares_of_turns_add_up_to_those_of_trajectories_and_of_the_step(tmp_path):
    inspector = inspected(agent_run(tmp_path, turns=TURNS))
    found = [one for group in "ab" for one in inspector.group(StepKey(1, "train"), group).trajectories]
    assert [one.trajectory_id for one in found] == [None] * 4
    for one in found:
        assert sum(turn.share for turn in one.turns) == pytest.approx(one.share, abs=1e-12)
    # A token of the last row is in no turn.
    rows = rolloutdoctor.measure(agent_run(tmp_path, turns=TURNS)).rows["grad_l1"]
    assert sum(one.share for one in found) == pytest.approx(1 - rows[3] / 4 / rows.sum(), abs=1e-12)


def test_turns_that_a_mask_gives_are_derived_and_without_any_there_is_no_trajectory(tmp_path):
    masks = pa.array([[1, 0, 0, 1], [1] * 4, [1] * 4, [1] * 4], MASK)
    [first, *_] = inspected(agent_run(tmp_path, response_mask=masks)).group(StepKey(1, "train"), "a").trajectories
    assert [turn.author for turn in first.turns] == ["model", "tool", "model"]
    assert all(turn.derived for turn in first.turns)
    assert inspected(agent_run(tmp_path)).group(StepKey(1, "train"), "a").trajectories == ()


def test_a_trajectory_of_very_many_turns_is_cut_and_counted(tmp_path):
    spans = [{"author": "model", "start": 0, "stop": 0} for _ in range(MOST_TURNS + 1)]
    found = inspected(agent_run(tmp_path, turns=[spans, *TURNS[1:]])).group(StepKey(1, "train"), "a").trajectories[0]
    assert (len(found.turns), found.count) == (MOST_TURNS, MOST_TURNS + 1)


def test_without_a_loss_turns_have_no_gradient(tmp_path):
    path = agent_run(tmp_path, turns=TURNS)
    table = pq.read_table(path).replace_schema_metadata(None)
    pq.write_table(table, path)
    [first, _] = inspected(path).group(StepKey(1, "train"), "a").trajectories
    assert (first.gradient, first.share, first.turns[0].gradient, first.turns[0].share) == (None,) * 4
    assert first.turns[0].trained == 2


def printed(path, place):
    code, out, err, _ = command(["view", str(path), "--group", place], path.parent)
    return code, out, err


def test_a_group_in_the_terminal(tmp_path):
    more = {"trajectory_id": [5, 6, 5, None], "error": ["no \x1b[31manswer", None, None, None]}
    code, out, _ = printed(agent_run(tmp_path, turns=TURNS, **more), "1/a")
    assert not code
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "trajectory 5: 3 turns in 2 rows; reward 0; ended error, stop; 42.9 % of the step's |gradient|" in lines
    assert r"error: no \x1b[31manswer" in lines
    assert "1 tool timeout 2 masked 0 0 %" in lines
    assert "derived" not in out
    masks = pa.array([[1, 0, 0, 1], [1] * 4, [1] * 4, [1] * 4], MASK)
    _, out, _ = printed(agent_run(tmp_path, response_mask=masks), "1/a")
    assert "tool (derived)" in out
    assert "it is read off the mask" in out
    _, out, _ = printed(agent_run(tmp_path), "1/b")
    assert [line.split()[0] for line in out.splitlines()] == ["step", "response", "2", "3"]


@pytest.mark.parametrize(
    ("place", "said"), [("1", "step 1 (train) has no group ''"), ("x/a", "'x' is not the number"), ("9/a", "no step 9")]
)
def test_a_group_that_is_not_there_is_a_sentence(tmp_path, place, said):
    code, _, err = printed(agent_run(tmp_path, turns=TURNS), place)
    assert (code, said in err, "Traceback" in err) == (2, True, False)
