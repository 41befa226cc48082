"""Rows that Arrow reads give what Python's give, whichever way the lines look; or Python reads them."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers.importing import DATA, bytes_of, in_small_pieces

from rolloutdoctor.commands.convert import ConvertOptions, convert, detect_dump
from rolloutdoctor.importers import arrow_rows
from rolloutdoctor.importers.arrow_cells import Layout
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError, RolloutDoctorError

DUMPS = {
    "nemo-rl": ("nemo_rl/grpo", "train_data_step1.jsonl"),
    "nemo-rl, dynamic": ("nemo_rl/dynamic", "train_data_step1.jsonl"),
    "prime-rl-tokens": ("prime_rl/token_exports", "step_1/rank_0.jsonl"),
    "prime-rl-traces": ("prime_rl/rollouts", "step_1/train/effective/traces.jsonl"),
    "open-instruct": ("open_instruct", "run_rollouts_000000.jsonl"),
}


def outcome(source, importer, target, fast, chunk_bytes):
    """Rows as written, in bytes of Arrow, with metrics and notes; or the message of the error. And what Python read."""
    with in_small_pieces(fast=fast, chunk_bytes=chunk_bytes, block=61) as read:
        try:
            options = ConvertOptions(importer=importer)
            sink = convert(detect_dump([str(source)], options), target, options)
        except RolloutDoctorError as error:
            assert not target.exists()
            return str(error), read
    metrics = target.with_name(f"{target.stem}.metrics.parquet")
    logged = pq.read_table(metrics).to_pylist() if metrics.exists() else None
    return (*bytes_of(target), sink.notes, logged), read


def same(dump, change, chunk_bytes=700):
    """Convert a dump, of which the lines of one file were changed, both ways; which chunks Python read in the fast."""
    folder, file = DUMPS[dump]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "dump"
        shutil.copytree(DATA / folder, source)
        changed = source / file
        changed.write_bytes(change(changed.read_bytes()))
        slow, _ = outcome(source, dump.partition(",")[0], Path(scratch) / "run.parquet", False, chunk_bytes)
        shutil.rmtree(Path(scratch), ignore_errors=True)
        source.parent.mkdir(exist_ok=True)
        shutil.copytree(DATA / folder, source)
        changed.write_bytes(change((DATA / folder / file).read_bytes()))
        fast, read = outcome(source, dump.partition(",")[0], Path(scratch) / "run.parquet", True, chunk_bytes)
    assert fast == slow
    return read


@pytest.mark.parametrize("chunk_bytes", [700, 2**23])
@pytest.mark.parametrize("dump", DUMPS)
def test_real_dumps(dump, chunk_bytes):
    assert same(dump, lambda raw: raw, chunk_bytes) == []


SCALARS = st.sampled_from(["null", "0", "1", "-1", "0.0", "-0.0", "-0", "1.5", "true", "false", "NaN", "Inf", "1e400"])
SCALARS |= st.sampled_from([str(2**63), str(2**70), '""', '"stop"', '"\\ud800"', "Infinity", "{}", "[]"])
VALUES = SCALARS | st.lists(SCALARS, max_size=4).map(lambda cells: f"[{', '.join(cells)}]")
VALUES |= VALUES.map(lambda cell: f"[{cell}]")


def holders(body):
    """Every object and list in an object."""
    found = [body]
    for inner in body.values() if isinstance(body, dict) else body:
        if isinstance(inner, (dict, list)):
            found += holders(inner)
    return found


@st.composite
def changes(draw):
    """What is done to one line: a value anywhere that is other, gone, new or there twice; or a torn end."""
    line, place, at = draw(st.tuples(*[st.integers(0, 10**6)] * 3))
    kind = draw(st.sampled_from(["value", "value", "gone", "twice", "new", "torn"]))
    value = draw(VALUES)
    new = draw(st.sampled_from(["filtered_rewards", "rl_weights", "logprobs", "rewards", "start", "a\\u0062"]))

    def change(raw):
        found = raw.decode().splitlines()
        if kind == "torn":
            return raw[: len(raw) - 1 - place % 60]
        here = line % len(found)
        body = json.loads(found[here])
        every = holders(body)
        # Half of the time near the top.
        holder = every[place % len(every) if place % 2 else place % min(len(every), 3)]
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = keys[at % len(keys)] if keys else None
        if kind == "value" and keys:
            holder[key] = "MARK"
        elif kind == "gone" and keys:
            del holder[key]
        elif isinstance(holder, dict):
            holder["TWIN" if kind == "twice" and keys else new] = "MARK"
        text = json.dumps(body).replace("TWIN", str(key)).replace('"MARK"', value).replace("\\\\u0062", "\\u0062")
        return "".join(line + "\n" for line in [*found[:here], text, *found[here + 1 :]]).encode()

    return change


@pytest.mark.parametrize("dump", DUMPS)
def test_changed_lines(dump):
    @settings(max_examples=60)
    @given(change=changes())
    def each(change):
        same(dump, change)

    each()


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ({"a": 1, "b": [1, None], "c": [None]}, None),
        ({"a": 1, "b": [], "c": None, "d": "x"}, None),
        ({"a": 1, "b": [0.5]}, None),
        ({"a": None, "b": [2]}, {"a": None, "b": [2]}),
        ({"b": [2]}, {"b": [2]}),
        ({"a": 1, "b": None}, {"a": 1, "b": None}),
        ({"a": 1, "b": [2], "c": [None, 1]}, {"a": 1, "b": [2], "c": [None, 1]}),
        ({"a": 1, "b": [2], "e": [1, None]}, {"a": 1, "b": [2], "e": [1, None]}),
        ({"a": 1, "b": [2], "e": [True]}, {"a": 1, "b": [2], "e": [True]}),
    ],
)
def test_a_row_that_lacks_something_is_as_python_reads_it(tmp_path, line, body):
    numbers = pa.list_(pa.float64())
    fields = pa.schema([("a", pa.int64()), ("b", numbers), ("c", numbers), ("d", pa.string()), ("e", numbers)])
    layout = Layout(fields, optional=("d", "e"), gaps=("b",), blank=("c",))
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"a": 7, "b": []}) + "\n" + json.dumps(line) + "\n")
    (part,) = arrow_rows.parts([Source.of(str(path))], lambda first: layout)
    rows = list(part.rows)
    assert [row.where.partition(", ")[2] for row in rows] == ["line 1", "line 2"]
    if body is not None:
        assert rows[1].body == body
    else:
        found = rows[1].body
        assert rows[1].plain() == line
        assert (found["a"], found["c"], found["d"]) == (line["a"], None, line.get("d"))
        np.testing.assert_array_equal(found["b"], np.array(line["b"], float))


def test_files_follow_each_other(tmp_path):
    files = []
    for name in "abc":
        path = tmp_path / name
        path.write_text(f'{{"a": "{name}"}}\n' * 3)
        files.append(Source.of(str(path)))
    missing = Source.of(str(tmp_path / "none"))
    layout = Layout(pa.schema([("a", pa.string())]))
    coming = arrow_rows.parts([*files, missing], lambda first: layout)
    for number, file in enumerate(files, start=1):
        part = next(coming)
        assert (part.file, part.bytes_read) == (file, number * 33)
        assert [row.body for row in part.rows] == [{"a": file.path[-1]}] * 3
    with pytest.raises(InputError, match=r"none: no such file"):
        next(coming)


def every_trace(change):
    """Change the first trace of every episode."""

    def each(raw):
        episodes = [json.loads(line) for line in raw.splitlines()]
        for episode in episodes:
            change(episode, episode["traces"][0])
        return "".join(json.dumps(episode) + "\n" for episode in episodes).encode()

    return each


def swapped(_, trace):
    trace["rewards"] = dict(reversed(trace["rewards"].items()))


@pytest.mark.parametrize(
    ("change", "by_python"),
    [
        (swapped, False),
        (lambda episode, trace: trace["rewards"].update(more={"score": 0.1}, none=None), False),
        (lambda episode, trace: trace["rewards"].update(more={"score": 0.1, "weight": 10**20}), False),
        (lambda episode, trace: trace["rewards"].clear(), False),
        (lambda episode, trace: trace["nodes"][1].update(logprobs=None), False),
        (lambda episode, trace: trace["nodes"][0].update(message={"content": '"rewards": {"a": 1}'}), False),
        (lambda episode, trace: trace["nodes"][0].update(message={"content": [1, "x", {}]}), False),
        (lambda episode, trace: trace["nodes"][0].pop("mask"), False),
        (lambda episode, trace: episode.pop("run"), True),
        (lambda episode, trace: episode["run"]["work"]["policy"].pop("start"), True),
        (lambda episode, trace: trace.pop("rewards"), True),
        (lambda episode, trace: trace.update(rewards=None), True),
        (lambda episode, trace: trace.update(info={"rewards": {"other": {"score": 3}}}), True),
        (lambda episode, trace: trace.update(info={"rewards": trace.pop("rewards")}), True),
        (lambda episode, trace: trace.update(nodes=trace["nodes"][:1]), False),
        (lambda episode, trace: trace.update(info="\x7f"), True),
    ],
)
def test_changed_traces(change, by_python):
    read = same("prime-rl-traces", every_trace(change), 2**20)
    # The first of them is that of the file that was changed.
    assert bool(read) == by_python
