"""Text of any origin leaves the process escaped, in every format and in every message, and what is quoted is cut."""

import io
import json
import re
import sys
import time
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.harness import run

from rolloutdoctor.cli import process, terminal
from rolloutdoctor.commands.diff import formats as diff_table
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.escapes import LONGEST_QUOTE, json_text, sentence, visible, visible_lines
from rolloutdoctor.results.exact import mean, total
from rolloutdoctor.views import table
from rolloutdoctor.views.markup import inert

HIDDEN = [
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800\udfff",
]
SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202eevil\u2066\r\nnext"
FLOATS, MASK = pa.list_(pa.float32()), pa.list_(pa.uint8())


@pytest.mark.parametrize("letter", HIDDEN, ids=lambda letter: f"{ord(letter):04x}")
def test_every_hidden_character_is_shown(letter):
    text = f"a{letter}b"
    assert not SHOWN.search(visible(text))
    assert not SHOWN.search(sentence(text))
    assert not SHOWN.search(visible_lines(text).replace("\n", ""))
    written = json_text({text: [text]})
    assert not SHOWN.search(written)
    assert json.loads(written) == {text: [text]}
    # What is escaped once stays as it is.
    assert visible(visible(text)) == visible(text)


def test_other_text_stays_as_it_is():
    text = "Grüße, 你好 \U0001f600 #1 \\ 'x'"
    assert visible(text) == visible_lines(text) == sentence(text) == text
    assert json.loads(json_text(text)) == text
    assert "你好" in json_text(text)
    assert json_text(text, ascii_only=True).isascii()


def test_colours_of_our_own_pass_and_nothing_else():
    assert visible_lines("\x1b[1;31mred\x1b[0m\x1b[2J", colored=True) == "\x1b[1;31mred\x1b[0m\\x1b[2J"
    assert visible_lines("\x1b[31m") == "\\x1b[31m"


@pytest.mark.parametrize("value", ["x" * 100_000, "x y " * 25_000, "\x1b" * 100_000])
def test_a_message_quotes_little_and_says_how_much_was_cut(value):
    message = sentence(f"run.parquet: column {value} is int where text was expected; write it again")
    assert len(message) < 6_000
    assert message.startswith("run.parquet: column ")
    assert message.endswith("write it again")
    assert re.search(r"\(9\d,\d{3} more characters\)", message)
    assert LONGEST_QUOTE == 200


def test_numbers_that_json_has_no_word_for_are_null():
    assert json.loads(json_text({"a": [float("nan"), float("inf"), 1.5]})) == {"a": [None, None, 1.5]}


@pytest.mark.parametrize(
    "text",
    [
        "https://evil.example/x",
        "see HTTP://x.y",
        "www.evil.example",
        "@everyone look",
        "a@b.c",
        "#12",
        "org/repo#3",
        "GH-7",
    ],
)
def test_markdown_links_nothing_of_a_text(text):
    words = inert(text)
    assert not re.search(r"://|@\w|www\.|#\d|GH-\d", words, re.IGNORECASE)
    assert words.replace("\u2060", "").replace("\\", "") == text


def test_a_stream_of_another_encoding_gets_what_it_can_write(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    terminal.say("Grüße\ud800")
    assert stream.buffer.getvalue() == b"rolloutdoctor: Gr\\xfc\\xdfe\\ud800\n"


# Through the command line


def a_run(folder, *, text=EVIL, metadata=None, **more):
    rows = 8
    columns = {
        "step": [row // 4 for row in range(rows)],
        "group_id": [f"{row // 2}{text}" for row in range(rows)],
        "sample_id": [f"{row}{text}" for row in range(rows)],
        "response": [text] * rows,
        "prompt": [text] * rows,
        "reward": [1.0, 1.0, 0.0, 1.0] * 2,
        "rewards": [{text: 1.0}] * rows,
        "advantage": [0.5, -0.5] * 4,
        "response_mask": pa.array([[1, row % 2] for row in range(rows)], MASK),
        "old_log_probs": pa.array([[-0.5, float("nan")]] * rows, FLOATS),
        "ref_log_probs": pa.array([[-0.75, -0.25]] * rows, FLOATS),
    } | more
    found = metadata or RunMetadata(
        "trl",
        "1.16.0",
        {"beta": 0.04, "num_generations": 2},
        recording={"dropped_steps": [[9, f"train{text}"]]},
    )
    pq.write_table(pa.table(columns).replace_schema_metadata(found.encode()), folder / "run.parquet")
    lines = [{"step": 0, "split": "train", "name": f"kl{text}", "value": 0.5}]
    (folder / "run.metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "run.parquet"


COMMANDS = [
    *(
        ["check", "run.parquet", "--format", name]
        for name in ("full", "concise", "json", "jsonl", "github", "junit", "markdown")
    ),
    ["check", "run.parquet", "--color", "always", "-v"],
    *(
        ["diff", "run.parquet", "--fix", "zero-std", "--format", name]
        for name in ("full", "concise", "json", "jsonl", "markdown")
    ),
    ["diff", "run.parquet", "--fix", "zero-std", "--by", "group", "--color", "always"],
    ["info", "run.parquet"],
    ["info", "run.parquet", "--format", "json"],
    ["export", "--what", "tokens", "run.parquet", "--format", "json"],
    ["export", "--what", "tokens", "run.parquet", "-o", "out.parquet"],
]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("text", "words"),
    [(EVIL, words) for words in COMMANDS] + [("\u200f\u2069", words) for words in COMMANDS if "--format" not in words],
    ids=lambda each: " ".join(each) if isinstance(each, list) else ascii(each),
)
def test_no_command_sends_what_a_file_holds(tmp_path, words, text):
    a_run(tmp_path, text=text)
    code, out, err, warned = run(words, tmp_path)
    assert code in (0, 1), err
    own = re.sub(r"\x1b\[[0-9;]*m", "", out) if "--color" in words else out
    assert not SHOWN.search(own.replace("\n", ""))
    assert not SHOWN.search(err.replace("\n", ""))
    assert not warned
    if "json" in words:
        json.loads(out)
    if words[0] == "info":
        assert "001b" in out or "x1b" in out or "200f" in out


@pytest.mark.parametrize("value", [EVIL, "x" * 100_000, "\udcff"])
@pytest.mark.parametrize(
    "words",
    [
        ["check", "run.parquet", "--set", "{}"],
        ["check", "run.parquet", "--set", "{}=1"],
        ["check", "run.parquet", "--set", "beta={}"],
        ["check", "run.parquet", "--trainer", "{}"],
        ["check", "run.parquet", "--trainer", "trl@{}"],
        ["check", "run.parquet", "--steps", "{}"],
        ["check", "run.parquet", "--select", "{}"],
        ["check", "run.parquet", "--format", "{}"],
        ["check", "run.parquet", "--from", "{}"],
        ["check", "run.parquet", "--map", "{}"],
        ["check", "run.parquet", "--{}"],
        ["diff", "run.parquet", "--fix", "{}"],
        ["{}"],
        ["explain", "{}"],
        ["explain", "trainers", "{}"],
    ],
    ids=" ".join,
)
def test_no_option_comes_back_as_it_was_given(tmp_path, words, value):
    a_run(tmp_path)
    code, out, err, _ = run([word.replace("{}", value) for word in words], tmp_path)
    assert code == 2
    assert not out
    assert err.strip()
    assert not SHOWN.search(err.replace("\n", ""))
    assert len(err) < 6_000


@pytest.mark.parametrize("value", [EVIL, "x" * 100_000])
def test_names_in_a_file_are_quoted_cut(tmp_path, value):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a_run(tmp_path / "a", metadata=RunMetadata(value))
    a_run(tmp_path / "b", rewards=[{value: "text"}] * 8)
    for folder in ("a", "b"):
        _, out, err, _ = run(["check", "run.parquet"], tmp_path / folder)
        assert not SHOWN.search((out + err).replace("\n", ""))
        assert len(err) < 6_000


# Warnings, sums and size


def test_warnings_are_for_who_asks_for_them(monkeypatch):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        monkeypatch.setattr(sys, "warnoptions", [])
        process.prepare_process()
        warnings.warn("stray", RuntimeWarning, stacklevel=1)
        assert not warned
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        monkeypatch.setattr(sys, "warnoptions", ["default"])
        process.prepare_process()
        warnings.warn("asked for", RuntimeWarning, stacklevel=1)
        assert len(warned) == 1


HOSTILE = [0.0, 1e308, -1e308, float("inf"), -float("inf"), float("nan"), 1e-320]


@pytest.fixture
def every_format(monkeypatch):
    """Render what is rendered as `full` in every other format too: measured is it once."""

    def renders_all(renderers):
        kept = tuple(renderers.values())
        monkeypatch.setitem(renderers, "full", lambda *given: "".join(render(*given) for render in kept))

    renders_all(table.RENDERERS)
    renders_all(diff_table.RENDERERS)


MEASURING = [
    ["check", "run.parquet", "--color", "always", "-v"],
    ["diff", "run.parquet", "--fix", "zero-std", "--by", "group", "--color", "always"],
    ["export", "--what", "tokens", "run.parquet", "--format", "json"],
    ["export", "--what", "tokens", "run.parquet", "-o", "out.parquet"],
]


@pytest.mark.slow(every=True)
@pytest.mark.usefixtures("every_format")
@pytest.mark.parametrize("words", MEASURING, ids=" ".join)
@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("masked", [False, True])
def test_no_value_warns_or_overflows(tmp_path, words, value, masked):
    lists = pa.array([[value, -0.5]] * 8, pa.list_(pa.float64()))
    a_run(
        tmp_path,
        text="",
        reward=[value, 0.0] * 4,
        advantage=[value] * 8,
        old_log_probs=lists,
        ref_log_probs=lists,
        response_mask=pa.array([[int(not masked)] * 2] * 8, MASK),
    )
    (tmp_path / "run.metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "split": "train", "name": "kl", "value": value}) + "\n" for step in (0, 1))
    )
    # What overflows in the one need not in the other, and whether tokens are masked does not depend on it.
    code, _, err, warned = run([*words, "--dtype", "float64" if masked else "float32"], tmp_path)
    assert code in (0, 1, 2, 3), err
    assert code != 2 or "out.parquet" not in {path.name for path in tmp_path.iterdir()}
    assert not warned


def test_sums_beyond_a_float():
    assert total([1.7e308, 1.7e308]) == float("inf")
    assert total([1e308, 1e308, -1e308]) == 1e308
    assert mean([1.7e308] * 3) == pytest.approx(1.7e308, rel=1e-15)
    assert str(total([float("inf"), -float("inf")])) == "nan"
    assert total([0.1] * 10) == 1.0


@pytest.mark.slow
def test_a_page_of_large_texts_is_small_and_quick(tmp_path):
    large = "x<b>" * 250_000
    a_run(tmp_path, text=large, rewards=[{"a": 1.0}] * 8)
    (tmp_path / "run.metrics.jsonl").unlink()
    before = time.process_time()
    code, _, err, _ = run(["report", "run.parquet", "-o", "page.html"], tmp_path)
    assert code == 0, err
    assert time.process_time() - before < 10
    assert (tmp_path / "page.html").stat().st_size < 2**20
    assert "<b>x" not in (tmp_path / "page.html").read_text(encoding="utf-8")
