"""Whatever a dump holds: rows that can be read again, or one sentence; nothing else, and nothing half-written."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from fuzz.examples import JSON_DUMPS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from importers.importing import DATA, slime_dump

from rolloutdoctor.importers.logs.table import read_log
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.run import open_run
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.results.errors import RolloutDoctorError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["train", "eval", "p_0_0", "1e999", ""])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("input", "output", "score", "step", "uid", "reward", "group_id", "advantage", "rewards", "loss_mask")
FIELDS += ("response_ids", "old_log_probs", "split", "sample_id", "data", "name", "value", "train/global_step")
row = st.dictionaries(st.sampled_from(FIELDS), anything, max_size=8)
verl_row = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries(
        {"input": st.text(max_size=5), "output": scalars, "score": st.floats(), "step": st.integers(0, 3)}
    ),
    row,
)


def one_sentence(error):
    assert len(str(error).splitlines()) == 1, error


def survives(folder, name, **options):
    """Convert what is in a folder; return the number of rows, or None where it was refused."""
    target = folder / "out" / "run.parquet"
    target.parent.mkdir()
    chosen = ConvertOptions(**options)
    try:
        found = detect_dump([str(folder / name)], chosen)
        if found is None:
            return None
        convert(found, target, chosen)
    except RolloutDoctorError as error:
        one_sentence(error)
        assert list(target.parent.iterdir()) == []
        return None
    try:
        run = open_run([str(target)])
        for _ in run.batches(run.columns):
            pass
    except RolloutDoctorError as error:
        one_sentence(error)
    return run.rows


def lines_survive(rows, cut, name, **options):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / name).write_text(text[: len(text) - cut], encoding="utf-8", errors="surrogatepass")
        return survives(folder, name, **options)


@pytest.mark.slow
@given(rows=st.lists(verl_row, max_size=5), cut=st.integers(0, 3))
def test_verl_rows(rows, cut):
    lines_survive(rows, cut, "1.jsonl", importer="verl")


@pytest.mark.slow(every=True)
@given(rows=st.lists(row, max_size=5), cut=st.integers(0, 3))
@example(rows=[{"input": [{"": False}]}], cut=0)
def test_rows_of_any_kind(rows, cut):
    lines_survive(rows, cut, "some.jsonl")
    lines_survive(rows, cut, "some.jsonl", importer="mapped", columns={"reward": "score", "step": "step"})


@given(
    body=st.binary(max_size=300), name=st.sampled_from(["1.jsonl", "0.pt", "a.csv", "trainer_state.json", "a.parquet"])
)
def test_bytes(body, name):
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / name).write_bytes(body)
        survives(Path(scratch), name)


@pytest.mark.slow(every=True)
@settings(max_examples=15)
@given(
    train=st.dictionaries(
        st.sampled_from(["tokens", "loss_masks", "log_probs", "response_lengths", "rollout_position", "truncated"]),
        anything | st.builds(torch.zeros, st.integers(0, 4)) | st.builds(torch.zeros, st.just((2, 2))),
        max_size=3,
    ),
    rollout=st.dictionaries(
        st.sampled_from(["group_index", "reward", "loss_mask", "tokens", "response_length", "status"]),
        anything,
        max_size=3,
    ),
)
def test_slime_samples(train, rollout):
    with tempfile.TemporaryDirectory() as scratch:
        slime_dump(Path(scratch) / "dump", rollouts=(0,), train=train, rollout=rollout)
        survives(Path(scratch), "dump")


def files_of(kind, folder):
    if kind == "slime-layout":
        slime_dump(folder / "dump", rollouts=(0,))
    else:
        shutil.copytree(DATA / kind, folder / "dump")
    return sorted(path for path in (folder / "dump").rglob("*") if path.is_file() and path.stat().st_size)


def places(body, path=()):
    """Every place of a JSON object, inner ones too."""
    found = [path] if path else []
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return found + [place for key, value in inner for place in places(value, (*path, key))]


def replaced(body, path, value):
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


@pytest.mark.slow(every=True)
@settings(max_examples=60)
@given(
    importer=st.sampled_from(sorted(JSON_DUMPS)),
    edits=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 10**6), anything), min_size=1, max_size=3),
    cut=st.integers(0, 2),
)
def test_real_rows_with_anything_in_some_places(importer, edits, cut):
    """Rows of a real dump of which some fields, or values inside of them, are replaced."""
    name = Path(JSON_DUMPS[importer])
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()[:8]]
    for row, place, value in edits:
        row %= len(rows)
        found = places(rows[row])
        if found:
            rows[row] = replaced(rows[row], found[place % len(found)], value)
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / name
        target.parent.mkdir(parents=True)
        text = "".join(json.dumps(each) + "\n" for each in rows)
        target.write_text(text[: len(text) - cut], encoding="utf-8", errors="surrogatepass")
        survives(Path(scratch), str(name), importer=importer)


@pytest.mark.slow(every=True)
@settings(max_examples=20)
@given(
    key=st.sampled_from(["partition", "num_microbatches", "micro_batch_indices", None]),
    value=anything
    | st.lists(st.integers(-1, 12), max_size=12)
    | st.lists(st.lists(st.integers(-1, 6), max_size=3), max_size=6),
)
def test_slime_cuts(key, value):
    body = torch.load(DATA / "slime" / "train_data" / "0.pt", weights_only=True)
    if key is None:
        body["dp_shards"] = value
    else:
        body["dp_shards"][0][key] = value
    with tempfile.TemporaryDirectory() as scratch:
        torch.save(body, Path(scratch) / "0.pt")
        assert survives(Path(scratch), "0.pt") == 12


def tensorboard_file(folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(4):
            writer.add_scalar("actor/kl_loss", 0.5, step)
    return next(folder.iterdir())


@settings(max_examples=15)
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    cut=st.floats(0, 1, exclude_max=True),
)
def test_damaged_event_files(edits, cut):
    pytest.importorskip("tensorboard")
    with tempfile.TemporaryDirectory() as scratch:
        path = tensorboard_file(Path(scratch))
        body = bytearray(path.read_bytes())
        for place, value in edits:
            body[int(place * len(body))] = value
        path.write_bytes(bytes(body[: len(body) - int(cut * len(body))]))
        try:
            assert all(step >= 0 for step, _, _ in read_log(Source.of(str(path))))
        except RolloutDoctorError as error:
            one_sentence(error)


@pytest.mark.slow(every=True)
@settings(max_examples=15)
# Bytes that are no text, where arrow does not look and Python raises.
@example(kind="trl/mixed", which=0, edits=[(0.0625, 128)], cut=0)
@given(
    kind=st.sampled_from(
        ["slime-layout", "slime", "trl/mixed", "verl/v1", "nemo_rl/grpo", "open_instruct", "prime_rl"]
    ),
    which=st.integers(0, 30),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.just(0) | st.floats(0, 1, exclude_max=True),
)
def test_damaged_files(kind, which, edits, cut):
    with tempfile.TemporaryDirectory() as scratch:
        files = files_of(kind, Path(scratch))
        path = files[which % len(files)]
        body = bytearray(path.read_bytes())
        for place, value in edits:
            body[int(place * len(body))] = value
        path.write_bytes(bytes(body[: len(body) - int(cut * len(body))]))
        survives(Path(scratch), "dump")
