"""Lines of JSON give what Python's `json` gives, to the bit, whichever parser reads them."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importers.importing import DATA, bytes_of, in_small_pieces

from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.results.errors import InputError, RolloutDoctorError

COLUMNS = {"reward": "info.score", "step": "step", "group_id": "g", "old_log_probs": "lp", "response_ids": "ids"}
COLUMNS |= {"response_mask": "mask", "rewards": "rewards", "response": "out", "status": "status"}


def outcome(folder, raw, chunk_bytes, by_orjson, **options):
    """Rows as written, in bytes of Arrow, or the message of the error."""
    (folder / "1.jsonl").write_bytes(raw)
    with in_small_pieces(chunk_bytes, by_orjson=by_orjson):
        target = folder / "run.parquet"
        chosen = ConvertOptions(**options)
        try:
            sink = convert(detect_dump([str(folder / "1.jsonl")], chosen), target, chosen)
        except RolloutDoctorError as error:
            return str(error)
    found = bytes_of(target)
    for each in folder.glob("run.*"):
        each.unlink()
    return (*found, sink.notes)


def same(raw, chunk_bytes=64, **options):
    """Compare both parsers, and return the outcome."""
    with tempfile.TemporaryDirectory() as scratch:
        slow = outcome(Path(scratch), raw, chunk_bytes, False, **options)
        fast = outcome(Path(scratch), raw, chunk_bytes, True, **options)
    assert fast == slow
    return fast


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


@pytest.mark.slow
@settings(max_examples=400)
@given(raw=files, chunk_bytes=st.sampled_from([32, 300, 1000]))
def test_mapped_lines_of_any_kind(raw, chunk_bytes):
    same(raw, chunk_bytes, importer="mapped", columns=COLUMNS)


@pytest.mark.slow(every=True)
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
    "changes",
    [
        {},
        {"z": {"deep": [1, 2, None]}},
        {"info": None},
        {"out": None},
        {"info": {"score": float("nan")}},
        {"out": "\ud800"},
        {"info": {"score": True}},
        {"info": {"score": 10**400}},
        {"info.score": None},
        {"g": 7},
        {"lp": [-0.5, True]},
        {"rewards": {"a": 1.0, "c": None}},
        {"z": json.loads("[" * 65 + "]" * 65)},
        {"step": -1},
        {"ids": [1, 2**40]},
    ],
)
def test_a_line_that_differs_from_those_around_it(changes):
    same(rows_with(**changes), 64, importer="mapped", columns=COLUMNS)


def test_what_comes_after_the_first_lines_of_the_first_chunk_belongs_to_the_file():
    rows = [PLAIN] * 6 + [{**PLAIN, "rewards": {"a": 1.0, "b": 2, "c": 0.5}}] + [PLAIN] * 40
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    names, _, notes = same(raw, 2000, importer="mapped", columns=COLUMNS)
    assert "rewards" in names
    assert not notes


@pytest.mark.slow(every=True)
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


def parsed(raw):
    """What a line holds, with types, signs and every digit; None if it is no object."""
    return repr(lines.parse(raw))


@pytest.mark.slow(every=True)
@settings(max_examples=1000)
@given(line=some_line | value.map(lambda cell: f'{{"a": {cell}, "b": [0, {cell}]}}'), flip=st.none() | st.integers(0))
def test_any_line_is_what_python_reads(line, flip):
    raw = bytearray(line.encode("utf-8", "surrogatepass"))
    if flip is not None and raw:
        raw[flip % len(raw)] = flip // len(raw) % 256
    with in_small_pieces(64, by_orjson=False):
        expected = parsed(bytes(raw))
    assert parsed(bytes(raw)) == expected


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("before", ["", " ", "\t", "\n", "\r", "[", "[0,", "[0, "])
@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64, 10**18, 10**19, 10**40])
def test_integers_of_any_size_are_integers(sign, before, number):
    raw = f'{{"a":{before}{sign}{number}{"]" * before.count("[")}}}'.encode()
    (found,) = lines.parse(raw).values()
    found = found[-1] if isinstance(found, list) else found
    assert isinstance(found, int)
    assert found == int(f"{sign}{number}")


@pytest.mark.parametrize(
    ("line", "is_plain"),
    [
        ('{"a": [0.5, 1, null, true], "b": "caf\\u00e9"}', True),
        ('{"a": -0.00012345678901234567, "b": 999999999999999999}', True),
        ('{"a": NaN}', False),
        ('{"a": 1e400}', False),
        ('{"a": "\\ud800"}', False),
        ('{"a": 18446744073709551616}', False),
        ('{"a": 1, "a": 1}', False),
    ],
)
def test_python_reads_only_what_the_fast_parser_reads_otherwise(monkeypatch, line, is_plain):
    loaded = []
    monkeypatch.setattr(json, "loads", lambda raw, **_: loaded.append(raw) or {})
    lines.parse(line.encode())
    assert loaded == ([] if is_plain else [line.encode()])


@pytest.mark.parametrize(
    ("inner", "count", "is_read"), [("[],", 2**20 - 10, True), ("[],", 2**20 + 10, False), ("[12,0.5],", 2**21, True)]
)
def test_a_document_of_brackets_alone_is_none(inner, count, is_read, monkeypatch):
    monkeypatch.setattr(lines, "_loaded", lambda raw: {"parsed": 1})
    raw = b'{"x": [' + inner.encode() * count + b"[]]}"
    assert (lines.parse(raw) is not None) == (lines.document(raw) is not None) == is_read


@pytest.mark.parametrize("raw", [b"", b"\n", b" \t\r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\n  "])
def test_lines_of_nothing_are_left_out(tmp_path, raw):
    (tmp_path / "x.jsonl").write_bytes(raw)
    assert list(lines.objects(Source.of(str(tmp_path / "x.jsonl")))) == []


def test_chunks_of_files_follow_each_other(tmp_path):
    files = []
    for name in "abc":
        path = tmp_path / name
        path.write_text(f'{{"a": "{name}"}}\n' * 3)
        files.append(Source.of(str(path)))
    coming = lines.chunks([*files, Source.of(str(tmp_path / "none"))])
    for number, file in enumerate(files, start=1):
        chunk = next(coming)
        assert (chunk.file, chunk.first, chunk.bytes_read) == (file, 1, number * 33)
        assert [line.body for line in lines.objects_of(chunk)] == [{"a": file.path[-1]}] * 3
    with pytest.raises(InputError, match=r"none: no such file"):
        next(coming)


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_real_verl_dumps(layout):
    for path in sorted((DATA / "verl" / layout).glob("*.jsonl")):
        same(path.read_bytes(), 700, importer="verl")
