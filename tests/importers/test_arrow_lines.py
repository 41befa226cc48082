"""Lines that Arrow reads many at a time give what Python gives one by one, to the bit; or Python reads them."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers.importing import DATA, bytes_of, in_small_pieces

from rolloutdoctor.commands.convert import ConvertOptions, convert, detect_dump
from rolloutdoctor.importers import json_bytes, mapped_lines
from rolloutdoctor.results.errors import RolloutDoctorError

COLUMNS = {"reward": "info.score", "step": "step", "group_id": "g", "old_log_probs": "lp", "response_ids": "ids"}
COLUMNS |= {"response_mask": "mask", "rewards": "rewards", "response": "out", "status": "status"}


def outcome(folder, raw, chunk_bytes, fast, **options):
    """Rows as written, in bytes of Arrow, or the message of the error; and the first lines of what Python read."""
    (folder / "1.jsonl").write_bytes(raw)
    with in_small_pieces(fast=fast, chunk_bytes=chunk_bytes, block=5) as read, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_lines, "_SAMPLE_BYTES", chunk_bytes // 4)
        target = folder / "run.parquet"
        chosen = ConvertOptions(**options)
        try:
            sink = convert(detect_dump([str(folder / "1.jsonl")], chosen), target, chosen)
        except RolloutDoctorError as error:
            return str(error), read
    found = bytes_of(target)
    for each in folder.glob("run.*"):
        each.unlink()
    return (*found, sink.notes), read


def same(raw, chunk_bytes=64, **options):
    """Compare both ways; return the first lines of the chunks that were left to Python."""
    with tempfile.TemporaryDirectory() as scratch:
        slow, _ = outcome(Path(scratch), raw, chunk_bytes, fast=False, **options)
        fast, read = outcome(Path(scratch), raw, chunk_bytes, fast=True, **options)
    assert fast == slow
    return read


HOSTILE_NUMBERS = [
    "1",
    "0",
    "-0",
    "-0.0",
    "0.1",
    "1e5",
    "1E+2",
    "9007199254740993",
    "18446744073709551616",
    "-7",
    "1e400",
]
HOSTILE_NUMBERS += ["NaN", "Infinity", "-Infinity", "Inf", "-Inf", "-NaN", "nan", "01", "1.", ".5", "+1", "1.0", "true"]
HOSTILE_NUMBERS += [
    "null",
    "0.30000000000000004",
    "5e-324",
    "2.2250738585072014e-308",
    "123456789012345678901234567890",
]
HOSTILE_STRINGS = [
    '""',
    '"a"',
    '"\\ud800"',
    '"\\udc00"',
    '"\\ud83d\\ude00"',
    '"é"',
    '"Inf"',
    '"[[[{{"',
    '"\\u0000"',
    '"\\u0061"',
]
HOSTILE_STRINGS += ['"x\\"}\\n{"', '"-0"', '"NaN"', '"2024-01-01T00:00:00Z"', '"\x01"', '"\x7f"', '"\\q"', "'a'"]
number = st.sampled_from(HOSTILE_NUMBERS) | st.floats(width=64).map(json.dumps) | st.integers(-(2**70), 2**70).map(str)
text = st.sampled_from(HOSTILE_STRINGS) | st.text(max_size=6).map(json.dumps)
nested = st.sampled_from(
    ["{}", "[]", '{"score": 1}', '{"score": null}', "[1]", '{"a": {"b": [1]}}', "[" * 70 + "]" * 70]
)
value = number | text | nested
plain_row = st.fixed_dictionaries(
    {
        "step": st.integers(0, 3).map(str),
        "g": st.sampled_from(['"a"', '"b"']),
        "info": st.sampled_from(['{"score": 0.5}', '{"score": 1}', '{"score": -0.0}', "null"]),
        "lp": st.sampled_from(["[-0.5, -1e-3]", "[-0.25, null]", "[0, -1]", "[NaN, -Infinity]", "null"]),
        "ids": st.sampled_from(["[1, 2]", "[3, 50000]"]),
        "mask": st.sampled_from(["[1, 0]", "[1, 1]"]),
        "rewards": st.sampled_from(['{"a": 1, "b": 0.5}', '{"a": null}', '{"b": 2}', "null"]),
        "out": text,
        "status": st.just('"stop"'),
    }
)
odd = st.dictionaries(
    st.sampled_from(["step", "g", "info", "lp", "ids", "mask", "rewards", "out", "status", "z", "info.score"]),
    value,
    max_size=2,
)
junk = st.sampled_from(["", " ", "null", "[]", "{}", '{"step": 1', "}", "\ufeff", '{"a":1} {"b":2}', "\x00"])


def line_of(row, tail=""):
    return "{" + ", ".join(f'"{name}": {cell}' for name, cell in row.items()) + tail + "}"


whole_line = st.builds(lambda row, more: line_of({**row, **more}), plain_row, odd)
doubled_line = st.builds(lambda row, more: line_of(row, f', "step": {more}'), plain_row, number)
some_line = st.builds(line_of, plain_row) | whole_line | doubled_line | junk


def joined(first, rest, end):
    return ("\n".join([line_of(first), *rest]) + end).encode("utf-8", "surrogatepass")


files = st.builds(joined, plain_row, st.lists(some_line, max_size=6), st.sampled_from(["\n", "", "\r\n"]))


@settings(max_examples=400)
@given(raw=files, chunk_bytes=st.sampled_from([32, 300, 1000]))
def test_mapped_lines_of_any_kind(raw, chunk_bytes):
    same(raw, chunk_bytes, importer="mapped", columns=COLUMNS)


@settings(max_examples=100)
@given(
    raw=st.builds(joined, plain_row, st.lists(st.builds(line_of, plain_row), max_size=8), st.just("\n")),
    cut=st.integers(0, 4),
    flip=st.none() | st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)),
)
def test_damaged_bytes(raw, cut, flip):
    raw = bytearray(raw[: len(raw) - cut])
    if flip is not None and raw:
        raw[int(flip[0] * len(raw))] = flip[1]
    same(bytes(raw), importer="mapped", columns=COLUMNS)


PLAIN = {
    "step": 1,
    "g": "a",
    "info": {"score": 0.5, "why": "x"},
    "lp": [-0.5, None],
    "ids": [1, 2],
    "mask": [True, False],
    "rewards": {"a": 1.0, "b": 2},
    "out": "\U0001f600 \\frac{1}{2}",
    "status": "stop",
}


def rows_with(**changes):
    rows = [PLAIN, PLAIN, {**PLAIN, **changes}, PLAIN, PLAIN]
    return ("\n".join(map(json.dumps, rows)) + "\n").encode()


@pytest.mark.parametrize(
    ("changes", "left_to_python"),
    [
        ({}, 0),
        ({"z": {"deep": [1, 2, None]}}, 0),
        ({"info": None}, 0),
        ({"out": None}, 0),
        ({"info": {"score": float("nan")}}, 0),
        ({"out": "\ud800"}, 1),
        ({"info": {"score": True}}, 1),
        ({"info": {"score": 10**400}}, 1),
        ({"info.score": None}, 1),
        ({"g": 7}, 1),
        ({"lp": [-0.5, True]}, 1),
        ({"rewards": {"a": 1.0, "c": None}}, 1),
        ({"z": json.loads("[" * 65 + "]" * 65)}, 1),
        ({"step": -1}, 1),
        ({"ids": [1, 2**40]}, 1),
    ],
)
def test_only_what_drifts_is_left_to_python(changes, left_to_python):
    # One line a chunk. Python reads the first, to know what to expect, and what a line that it read says of the next.
    read = same(rows_with(**changes), 64, importer="mapped", columns=COLUMNS)
    assert set(read) == ({1, 3} if left_to_python else {1})


def test_what_comes_after_the_first_lines_of_the_first_chunk_belongs_to_the_file():
    rows = [PLAIN] * 6 + [{**PLAIN, "rewards": {"a": 1.0, "b": 2, "c": 0.5}}] + [PLAIN] * 40
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with tempfile.TemporaryDirectory() as scratch:
        (names, _, notes), read = outcome(Path(scratch), raw, 2000, True, importer="mapped", columns=COLUMNS)
    assert "rewards" in names
    assert notes == []
    # The first line, the first lines, and all of the first chunk.
    assert read == [1, 1, 1]
    assert same(raw, 2000, importer="mapped", columns=COLUMNS) == read


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"input": text, "output": text, "score": number, "step": st.sampled_from(["0", "1", "2.0"])},
            optional={"uid": st.sampled_from(['"p_1_0_0"', '"p_1"', '"p"', '"p_1\\n_0_2"', "null", "7"]), "acc": value},
        ).map(line_of)
        | junk,
        max_size=8,
    ),
    first=st.sampled_from(['"uid": "a_b_0_1", ', ""]),
    end=st.sampled_from(["\n", ""]),
    text_too=st.booleans(),
)
def test_verl_lines_of_any_kind(rows, first, end, text_too):
    start = '{"input": "a", "output": "b", ' + first + '"score": 1, "step": 1}'
    same(("\n".join([start, *rows]) + end).encode("utf-8", "surrogatepass"), 64, importer="verl", text=text_too)


@pytest.mark.parametrize(
    ("line", "is_plain"),
    [
        ('{"a": Infinity, "b": "-Na Inf. NaN"}', True),
        ('{"a": Inf}', False),
        ('{"a": -Inf }', False),
        ('{"a": -NaN}', False),
        ('{"a": "\0"}', False),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", False),
        ('{"a": ' + "[" * 63 + "]" * 63 + "}", True),
        ('{"a": "' + "[," * 200 + '"}', True),
        (' {"a": 1}', False),
        ('{"a": 1} ', False),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 64, 2**17])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_doubtful_bytes_are_seen_wherever_they_lie(monkeypatch, line, is_plain, block, before):
    monkeypatch.setattr(json_bytes, "_BLOCK", block)
    raw = ("{}\n" * before + line + "\n{}\n").encode()
    found = json_bytes.line_ends(raw)
    if is_plain:
        assert found.tolist() == [at for at, byte in enumerate(raw) if byte == ord("\n")]
    else:
        assert found is None


def test_bytes_that_are_no_text_are_seen():
    assert json_bytes.line_ends('{"a": "é"}\n'.encode("latin-1")) is None
    assert json_bytes.line_ends(b"\n") is None
    assert json_bytes.line_ends(b"{}\n").tolist() == [2]


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_real_verl_dumps(layout):
    for path in sorted((DATA / "verl" / layout).glob("*.jsonl")):
        assert same(path.read_bytes(), 700, importer="verl") == []
