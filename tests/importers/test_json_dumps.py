"""Dumps of JSON Lines, changed in any way, give what they give if Python's `json` reads every line."""

import json
import shutil
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers.importing import DATA, bytes_of, in_small_pieces

from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.results.errors import RolloutDoctorError

DUMPS = {
    "nemo-rl": ("nemo_rl/grpo", "train_data_step1.jsonl"),
    "nemo-rl, dynamic": ("nemo_rl/dynamic", "train_data_step1.jsonl"),
    "prime-rl-tokens": ("prime_rl/token_exports", "step_1/rank_0.jsonl"),
    "prime-rl-traces": ("prime_rl/rollouts", "step_1/train/effective/traces.jsonl"),
    "open-instruct": ("open_instruct", "run_rollouts_000000.jsonl"),
    "tinker-cookbook": ("tinker_cookbook", "iteration_000001/train_rollout_summaries.jsonl"),
    "areal": ("areal/rollout", "1/4.jsonl"),
}


def outcome(source, importer, target, by_orjson, chunk_bytes):
    """Rows as written, in bytes of Arrow, with metrics and notes; or the message of the error."""
    with in_small_pieces(chunk_bytes, by_orjson=by_orjson):
        try:
            options = ConvertOptions(importer=importer)
            sink = convert(detect_dump([str(source)], options), target, options)
        except RolloutDoctorError as error:
            assert not target.exists()
            return str(error)
    metrics = target.with_name(f"{target.stem}.metrics.parquet")
    logged = pq.read_table(metrics).to_pylist() if metrics.exists() else None
    return (*bytes_of(target), sink.notes, logged)


def same(dump, change, chunk_bytes=700):
    """Convert a dump, of which the lines of one file were changed, with both parsers."""
    folder, file = DUMPS[dump]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for by_orjson in (False, True):
            # The same names twice, since notes and messages have them.
            shutil.rmtree(scratch)
            source = Path(scratch) / "dump"
            shutil.copytree(DATA / folder, source)
            changed = source / file
            changed.write_bytes(change(changed.read_bytes()))
            target = Path(scratch) / "run.parquet"
            found.append(outcome(source, dump.partition(",")[0], target, by_orjson, chunk_bytes))
    slow, fast = found
    assert fast == slow


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [700, 2**23])
@pytest.mark.parametrize("dump", DUMPS)
def test_real_dumps(dump, chunk_bytes):
    same(dump, lambda raw: raw, chunk_bytes)


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


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dump", DUMPS)
def test_changed_lines(dump):
    @settings(max_examples=30)
    @given(change=changes())
    def each(change):
        same(dump, change)

    each()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        swapped,
        lambda episode, trace: trace["rewards"].update(more={"score": 0.1}, none=None),
        lambda episode, trace: trace["rewards"].update(more={"score": 0.1, "weight": 10**20}),
        lambda episode, trace: trace["rewards"].clear(),
        lambda episode, trace: trace["nodes"][1].update(logprobs=None),
        lambda episode, trace: trace["nodes"][0].update(message={"content": '"rewards": {"a": 1}'}),
        lambda episode, trace: trace["nodes"][0].update(message={"content": [1, "x", {}]}),
        lambda episode, trace: trace["nodes"][0].pop("mask"),
        lambda episode, trace: episode.pop("run"),
        lambda episode, trace: episode["run"]["work"]["policy"].pop("start"),
        lambda episode, trace: trace.pop("rewards"),
        lambda episode, trace: trace.update(rewards=None),
        lambda episode, trace: trace.update(info={"rewards": {"other": {"score": 3}}}),
        lambda episode, trace: trace.update(info={"rewards": trace.pop("rewards")}),
        lambda episode, trace: trace.update(nodes=trace["nodes"][:1]),
        lambda episode, trace: trace.update(info="\x7f"),
    ],
)
def test_changed_traces(change):
    same("prime-rl-traces", every_trace(change), 2**20)
