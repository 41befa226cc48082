"""What two readers would read differently is refused, and nothing that is read takes the square of its size."""

import json
import time

import pytest
from importers.importing import DATA

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.step_lines import SLIME, VERL
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metrics import read_metrics
from rolloutdoctor.results.errors import InputError

TRL = "{'loss': 0.1, 'grad_norm': 0.2, 'epoch': 0.1}\n"


def read(path, tell=lambda sentence: None):
    return list(read_log(Source.of(str(path)), LogNotes(tell)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["1" * 100_000, "1/" * 50_000, " step 1: {" * 100_000, " step 1: {'a/b': 1" * 50_000 + "}", "step:1 - " * 100_000],
    ids=["digits", "bars", "slime", "slime with an end", "verl"],
)
def test_console_logs_take_the_time_of_reading_them(tmp_path, line):
    path = tmp_path / "t.log"
    path.write_text(TRL + line)
    begin = time.process_time()
    assert [values for _, _, values in read(path)] == [{"loss": 0.1, "grad_norm": 0.2, "epoch": 0.1}]
    assert [[*form.records(path.read_text().split("\n"))] for form in (VERL, SLIME)] == [[], []]
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("digits", [19, 5000])
def test_steps_of_more_digits_than_any_are_no_steps(tmp_path, digits):
    path = tmp_path / "t.log"
    many = "9" * digits
    path.write_text(f"step:{many} - a/b:1\nstep {many}: {{'a/b': 1}}\n{many}/{many} [\n{TRL}2/2 [\n")
    assert kind_of(path) == "the console log of the transformers Trainer"
    assert read(path) == [(2, "train", {"loss": 0.1, "grad_norm": 0.2, "epoch": 0.1})]


def test_numbers_are_ascii_and_plain(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,kl,reward\n1,1_000,\u0661,0.5\n2, 7 ,1e-3,-2\n")
    assert read(path) == [(1, "train", {"reward": 0.5}), (2, "train", {"loss": 7.0, "kl": 0.001, "reward": -2.0})]
    path = tmp_path / "verl.log"
    path.write_text("step:1 - a/b:1_000 - a/c:\u0661 - a/d:0.5\n")
    assert read(path) == [(1, "train", {"a/d": 0.5})]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("step,loss,loss\n1,2,3\n", "log.csv: two columns are called loss; keep one of them"),
        ("step,loss\n1,2,3\n", "log.csv, line 2: no row has as many cells as the first line has names"),
        ("step,loss\n1.0e16,2\n", "where an integer of 0 or more was expected"),
    ],
)
def test_a_csv_that_can_be_read_in_two_ways(tmp_path, monkeypatch, text, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(InputError, match=why):
        read("log.csv")


def test_lines_without_a_step_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("step,loss\n1,2\n,3\n,\n")
    said = []
    assert read("log.csv", said.append) == [(1, "train", {"loss": 2.0})]
    assert said == ["log.csv: 2 lines have no step and are left out (line 3)"]


@pytest.mark.parametrize("spaces", ["", " ", "\t"])
def test_a_key_that_is_there_twice(tmp_path, spaces):
    twice = f'{{"step": 1, "actor/loss"{spaces}: 0.5, "text": "a\\": b", "actor/loss": 1.5}}'
    assert lines.parse(twice.encode()) is None
    assert lines.parse(twice.replace('"actor/loss": 1.5', '"a": [{"a": 1}, {"a": 2}]').encode())["a"] == [
        {"a": 1},
        {"a": 2},
    ]
    assert lines.parse(b'{"a": [1, {"b": 1, "b": 2}]}') is None
    text = '{"step": 0, "name": "a/b", "value": 1}\n{"step": 1, "name": "a/b", "value": 1, "value": 2}\n'
    (tmp_path / "run.metrics.jsonl").write_text(text)
    with pytest.raises(InputError, match="line 2: not a JSON object, or one with a key twice"):
        read_metrics([Source.of(str(tmp_path / "run.metrics.jsonl"))])
    (tmp_path / "log.jsonl").write_text(text)
    told = []
    assert read(tmp_path / "log.jsonl", told.append) == [(0, "train", {"a/b": 1.0})]
    assert "value is there twice with two values in line 2, and left out there" in told[0]


def test_a_step_that_a_float_cannot_hold(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 9007199254740993.0, "actor/loss": 1}\n')
    with pytest.raises(InputError, match=r"step is 9007199254740992\.0 where an integer"):
        read(path)
    path.write_text('{"step": 3.0, "actor/loss": 1}\n')
    assert read(path) == [(3, "train", {"actor/loss": 1.0})]


def test_sound_dumps_are_read_by_the_fast_parser(monkeypatch):
    """The count of keys is right for what trainers write; to look twice takes several times as long."""
    slow = []
    monkeypatch.setattr(lines.json, "loads", lambda *a, **k: slow.append(a) or json.JSONDecoder().decode(a[0].decode()))
    for path in (
        DATA / "nemo_rl/dynamic_sync/train_data_step1.jsonl",
        DATA / "prime_rl/rollouts/step_1/train/effective/traces.jsonl",
    ):
        count = len(list(lines.objects(Source.of(str(path)))))
        assert len(slow) <= count // 4, (path, len(slow), count)
        slow.clear()
    assert kind_of(DATA / "nemo_rl") is None
