"""One odd line, cell or byte costs itself, and a note says so; the rest of the log is read."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.printed import pairs
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.io.locations.paths import Source

LINE = "step:{} - actor/pg_loss:0.0{} - actor/grad_norm:0.3 - critic/score/mean:0.{} - response_length/mean:100.5\n"


def steps(path):
    return rd.check(path).input.steps


@pytest.mark.slow
@pytest.mark.parametrize("odd", [b"\xff\xfe\x80", b"\x00\x00", b"\xef\xbb\xbf", b"\x1b[36m", b"\xe2\x96"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_byte_that_is_no_text_costs_no_line(tmp_path, odd, at):
    text = "".join(LINE.format(step, step, step) for step in range(1, 7)).encode()
    (tmp_path / "train.log").write_bytes(text.replace(b"step:%d" % at, odd + b"step:%d" % at))
    assert steps(tmp_path / "train.log") == 6


@pytest.mark.parametrize(("zeros", "said"), [(1023, 0), (1024, 1024), (3 * 2**20, 3 * 2**20)])
@pytest.mark.parametrize("at", [0, 3])
def test_a_stretch_where_nothing_was_written_is_skipped_and_said(tmp_path, zeros, said, at):
    lines = [LINE.format(step, step, step).encode() for step in range(1, 700)]
    (tmp_path / "train.log").write_bytes(b"".join([*lines[:at], b"\0" * zeros, *lines[at:]]))
    told = []
    assert len([*read_log(Source.of(str(tmp_path / "train.log")), LogNotes(told.append))]) == 699
    assert any(f"{said:,} NUL bytes" in note for note in told) is bool(said)


def test_nothing_but_zeros_is_no_text(tmp_path):
    (tmp_path / "train.log").write_bytes(b"\0" * 5000)
    assert kind_of(tmp_path / "train.log") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step,loss,reward\n1,0.1,0.5\n...\n9,0.4,0.7\n# later\n10,0.4,0.8\n", 3),
        ("Step,loss,reward\n1,0.1,0.5\n,,\n9,0.4,0.7\n", 2),
        ("epoch,reward,kl\n0,0.1,0.01\n1,0.2,0.02\n", 2),
        ("step,loss,reward\n1,0.1\n2,0.2,0.6,0.7\n3,0.3,0.9\n", 2),
        ("step,loss\n1/30,0.1\n2/30,0.2\n", 2),
        # The last row of a run may be of its end: which numbers it has, no name says.
        ("step,loss,reward\n1,0.1,0.5\n2,0.2,0.6\n3,99.0\n", 2),
        ("step,loss,reward\n1,0.1,0.5\n2,0.2\n3,99.0\n", 3),
    ],
)
def test_a_table_with_an_odd_row_is_read(tmp_path, text, expected):
    (tmp_path / "log.csv").write_text(text)
    assert steps(tmp_path / "log.csv") == expected


@pytest.mark.parametrize(
    "text", ["step;loss;reward\n1;0,5;0,25\n2;0,5;0,75\n", "step\tloss\treward\n1\t0.5\t0.25\n2\t0.5\t0.75\n"]
)
def test_a_table_with_other_separators_is_read(tmp_path, text):
    (tmp_path / "log.csv").write_text(text)
    report = rd.check(tmp_path / "log.csv")
    assert next(list(vital.series) for vital in report.vitals if vital.name == "reward") == [0.25, 0.75]


@pytest.mark.parametrize("level", ["INFO ", "[INFO] ", "WARNING: ", "DEBUG "])
def test_the_level_of_a_logger_is_no_part_of_a_name(tmp_path, level):
    lines = [f"{level}step={step} loss=0.{step} reward=0.5 kl=0.01\n" for step in range(1, 7)]
    (tmp_path / "train.log").write_text("".join(lines))
    report = rd.check(tmp_path / "train.log")
    assert (report.input.steps, [note for note in report.notes if "not recognised" in note]) == (6, [])


def test_a_step_as_text_is_a_step(tmp_path):
    rows = [{"step": "7", "loss": 0.1, "kl": 0.01}, {"step": 8, "loss": 0.2, "kl": 0.01}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert steps(tmp_path / "log.jsonl") == 2


@pytest.mark.parametrize("values", [(1e308, -1e308, 0.5), (float("inf"), 1e308, -1e308), (3e38, -3e38, 1e38)])
def test_numbers_at_the_end_of_their_range_are_no_internal_error(tmp_path, values, recwarn):
    rows = [
        {"step": step, "loss": 0.1, "kl": values[step % 3], "grad_norm": abs(values[step % 3])} for step in range(30)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = rd.check(tmp_path / "log.jsonl")
    assert report.coverage.rules
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]
    assert str(report)


def test_a_number_beyond_float32_is_infinite(tmp_path):
    rows = [{"step": step, "loss": 0.1, "grad_norm": norm} for step, norm in ((1, 3.4e38), (2, 3.5e38))]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = [one for one in rd.check(tmp_path / "log.jsonl").findings if one.code == "RDM003"]
    assert found.headline == "grad_norm is infinite in step 2 (3.4e+38 before)"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("number of nan iterations:   1 | loss: 0.5", [("number of nan iterations", "1"), ("loss", "0.5")]),
        ("loss nan grad_norm inf reward 0.5", [("loss", "nan"), ("grad_norm", "inf"), ("reward", "0.5")]),
        ("loss nan | kl: 0.1", [("loss", "nan"), ("kl", "0.1")]),
    ],
)
def test_nan_as_a_word_of_a_name_is_no_value(line, expected):
    assert list(pairs(line)) == expected
