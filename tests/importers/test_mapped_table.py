"""Any JSON Lines and Parquet, and logs of numbers."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from importers.importing import DATA, converted, findings, findings_of_run

from rolloutdoctor.importers.mapped import advice
from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError, SchemaError, UsageError

ROWS = [
    {"it": 0, "uid": "a", "info": {"score": 1.0}, "tokens_mask": [1, 1], "logp": [-0.5, None]},
    {"it": 0, "uid": "a", "info": {"score": None}, "tokens_mask": [1], "logp": [-2]},
]
COLUMNS = {"step": "it", "reward": "info.score", "response_mask": "tokens_mask", "policy_log_probs": "logp"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mapped_json_lines(tmp_path):
    path = write(tmp_path / "mine.jsonl", ROWS)
    rows, _ = converted(tmp_path / "run.parquet", path, columns=COLUMNS)
    assert rows[0]["group_id"] == "a"  # by its alias
    assert [row["reward"] for row in rows] == [1.0, None]
    assert rows[0]["policy_log_probs"][1] != rows[0]["policy_log_probs"][1]  # unknown is NaN
    assert rows[1]["response_mask"] == [1]


def test_mapped_parquet_is_the_same(tmp_path):
    flat = [row | {"info": row["info"]["score"]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(flat), tmp_path / "mine.parquet")
    write(tmp_path / "mine.jsonl", flat)
    columns = COLUMNS | {"reward": "info"}
    converted(tmp_path / "one.parquet", tmp_path / "mine.parquet", columns=columns)
    converted(tmp_path / "two.parquet", tmp_path / "mine.jsonl", columns=columns)
    assert pq.read_table(tmp_path / "one.parquet").select(["step", "reward", "group_id"]) == pq.read_table(
        tmp_path / "two.parquet"
    ).select(["step", "reward", "group_id"])
    assert findings_of_run(tmp_path / "one.parquet") == findings_of_run(tmp_path / "two.parquet")


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        (["p", "q", "p", "q", "q", "q", "r", "r"], [{2, 0}, {3, 1}, {4, 5}, {6, 7}]),
        # Two groups may share a prompt; prompts of one response each are no groups; one prompt may be of all.
        (["p", "p", "q", "p", "p", "q", "q", "q"], []),
        (["p", "q", "r", "s", "p", "q", "r", "s"], []),
        (["p"] * 8, []),
    ],
)
def test_responses_of_a_step_to_one_prompt_are_a_group(tmp_path, prompts, groups):
    """Where all prompts have as many, and no field says the group."""
    lines = [{"step": n // 4, "prompt": p, "response": "a", "reward": n % 2} for n, p in enumerate(prompts)]
    rows, sink = converted(tmp_path / "run.parquet", write(tmp_path / "mine.jsonl", lines), text=False)
    read = {}
    for place, row in enumerate(rows):
        read.setdefault((row["step"], row.get("group_id")), set()).add(place)
    assert (sorted(map(sorted, read.values())) == sorted(map(sorted, groups))) == bool(groups)
    told = "no field says the group: the 2 responses of a step to one prompt are read as a group"
    assert sink.notes == ((told,) if groups else ())
    assert ("group_id" in rows[0]) == bool(groups)


def test_known_names_need_no_map(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"global_step": 3, "score": 0.5, "prompt_idx": 1}])
    rows, _ = converted(tmp_path / "run.parquet", path)
    assert rows == [{"step": 3, "group_id": "1", "reward": 0.5}]
    assert findings(path) == findings_of_run(tmp_path / "run.parquet")


@pytest.mark.parametrize(
    ("row", "advised"),
    [
        # A total of a reward is read without a map.
        ({"reward": {"correctness": 0.0, "format": 1.0, "total": 0.1}}, None),
        ({"rewards": {"format": 1.0, "length": -0.1, "overall": 0.9}}, None),
        ({"info": {"scores": {"format": 1.0, "final_score": 0.5}}}, "info.scores.final_score"),
        ({"reward": {"correctness": 0.0, "format": 1.0}}, None),
    ],
)
def test_a_part_of_a_reward_is_not_advised_for_the_whole(row, advised):
    words = advice({"task_id": "a", **row}).partition(" (it has")[0]
    assert words.endswith(f"--map reward={advised}" if advised else "--map group_id=task_id")


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"reward": "info.scor"}, SchemaError, "--map reward=info.scor: no such field"),
        ({"rewrad": "info"}, UsageError, "no column is called 'rewrad'; did you mean 'reward'"),
        ({"reward": "uid"}, SchemaError, r"no step; say where the columns are, such as --map step=0 \(it has"),
        ({"step": "uid"}, DataError, "line 1: uid is 'a' where an integer"),
        ({"step": "it", "reward": "tokens_mask"}, DataError, "line 1: tokens_mask is"),
        ({"step": "it", "kl": "info"}, DataError, "line 1: info is .* where a list was expected"),
    ],
)
def test_a_wrong_map_is_one_sentence(tmp_path, columns, error, message):
    path = write(tmp_path / "mine.jsonl", ROWS)
    with pytest.raises(error, match=message):
        converted(tmp_path / "run.parquet", path, columns=columns)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.jsonl"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.jsonl", '{"step": 2, "name": "kl", "value": 0.5}\n'),
        ("log.jsonl", '{"step": 2, "data": {"kl": 0.5, "note": "x"}}\n'),
        ("log.jsonl", '{"train/global_step": 2, "train/kl": 0.5, "_runtime": 3}\n'),
        ("log.csv", "step,kl,note\n2,0.5,x\n"),
        ("trainer_state.json", '{"log_history": [{"step": 2, "kl": 0.5}]}'),
    ],
)
def test_logs_of_numbers(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    converted(tmp_path / "run.parquet", DATA / "verl" / "v1", tmp_path / name)
    found = pq.read_table(tmp_path / "run.metrics.parquet").to_pylist()
    assert found == [{"step": 2, "split": "train", "name": "kl", "value": 0.5}]


def test_eval_of_a_transformers_log(tmp_path):
    (tmp_path / "wandb.csv").write_text("train/global_step,train/kl,eval/kl\n2,0.5,\n2,,0.75\n")
    converted(tmp_path / "run.parquet", DATA / "verl" / "v1", tmp_path / "wandb.csv")
    rows = pq.read_table(tmp_path / "run.metrics.parquet").to_pylist()
    assert {(row["split"], row["value"]) for row in rows} == {("train", 0.5), ("eval", 0.75)}


def test_logs_alone_are_no_rollouts(tmp_path):
    (tmp_path / "log.csv").write_text("step,kl\n2,0.5\n")
    with pytest.raises(InputError, match=r"log\.csv: logged metrics, not rollouts"):
        converted(tmp_path / "run.parquet", tmp_path / "log.csv")


def test_a_stale_metrics_table_does_not_stay(tmp_path):
    converted(tmp_path / "run.parquet", DATA / "verl" / "v1", DATA / "verl" / "file_logger.jsonl")
    converted(tmp_path / "run.parquet", DATA / "verl" / "v1")
    assert pq.read_table(tmp_path / "run.metrics.parquet").num_rows == 0


def test_the_output_never_replaces_the_input(tmp_path):
    write(tmp_path / "run.parquet", ROWS)
    with pytest.raises(UsageError, match="is an input; name another file"):
        converted(tmp_path / "run.parquet", tmp_path / "run.parquet", importer="mapped", columns=COLUMNS)


def test_run_files_are_no_dumps(tmp_path):
    converted(tmp_path / "run.parquet", DATA / "trl" / "mixed")
    assert detect_dump([str(tmp_path / "run.parquet")], ConvertOptions()) is None
    assert detect_dump([str(tmp_path)], ConvertOptions()) is None
    assert detect_dump([str(tmp_path / "run*.parquet")], ConvertOptions()) is None


def test_dumps_of_two_kinds(tmp_path):
    with pytest.raises(InputError, match=r"different kinds \(trl, verl\)"):
        detect_dump([str(DATA / "trl" / "mixed"), str(DATA / "verl" / "v1")], ConvertOptions())


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        b"[" * 10**6,
        b'{"step": 1, "score": ' + b"[" * 10**6 + b"]" * 10**6 + b"}",
        b'{"step": 1, "score": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}",
        b'{"step": 1, "score": 1' + b"0" * 5000 + b"}",
    ],
)
def test_absurd_json_is_one_sentence(tmp_path, line):
    path = tmp_path / "1.jsonl"
    path.write_bytes(b'{"input": "a", "output": "b", "score": 1, "step": 1, "uid": "a_0_0"}\n' + line + b"\n")
    with pytest.raises(DataError, match="line 2: ") as error:
        converted(tmp_path / "run.parquet", path)
    assert len(str(error.value)) < 300


@pytest.mark.slow
def test_a_line_without_an_end(tmp_path):
    path = tmp_path / "1.jsonl"
    with path.open("wb") as file:
        file.write(b'{"input": "a", "output": "b", "score": 1, "step": 1, "uid": "a_0_0"}\n{"input": "')
        file.truncate(2**30)
    with pytest.raises(DataError, match="line 2: longer than 32 MiB"):
        converted(tmp_path / "run.parquet", path)


def test_a_token_id_beyond_int64_is_not_wrapped(tmp_path):
    row = {"step": 1, "group_id": "a", "reward": 1.0, "response_ids": [2**64 - 1]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="line 1: response_ids holds something that is not an integer"):
        converted(tmp_path / "run.parquet", tmp_path / "mine.jsonl")
