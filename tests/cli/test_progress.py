"""The progress bar is for people at a terminal, on stderr, for long files."""

import io
import json
import os
import sys

import pytest

from rolloutdoctor.cli import progress, verdict
from rolloutdoctor.cli.progress import bytes_bar
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_command_that_takes_a_while_shows_how_far_it_is(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = iter([0.0, 0.4, 0.5, 0.6])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with progress.progress_bar("tokens", quiet=False) as advance:
        assert advance is not None
        advance(1_000_000, 58_900_000)
        assert terminal.getvalue() == ""
        advance(5_000_000, 58_900_000)
        advance(12_345_678, 58_900_000)
    assert "reading" in terminal.getvalue()
    assert "12.3M/58.9M tokens" in terminal.getvalue()
    assert "left" in terminal.getvalue()


def test_a_run_without_token_columns_is_counted_in_rows(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0)
    with progress.progress_bar("rows", quiet=False) as advance:
        advance(950, 1600)
    assert "950/1,600 rows" in terminal.getvalue()


@pytest.mark.parametrize(
    ("at", "done", "hint", "times"),
    [
        # A tenth in 10 seconds: another 90 to go. It is said once.
        ((10.0, 11.0), (10, 11), "hint: use more", 1),
        # No minute to go, too early to tell, nothing done yet, and nothing to say.
        ((10.0, 11.0), (50, 60), "hint: use more", 0),
        ((5.0, 9.9), (1, 2), "hint: use more", 0),
        ((10.0, 11.0), (0, 0), "hint: use more", 0),
        ((10.0, 11.0), (10, 11), None, 0),
    ],
)
def test_a_long_command_says_once_what_would_be_faster(monkeypatch, at, done, hint, times):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = iter([0.0, *at])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with progress.progress_bar("tokens", quiet=False, hint=hint) as advance:
        for count in done:
            advance(count, 100)
    assert terminal.getvalue().count("use more") == times


def test_several_processes_are_suggested_where_there_are_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert verdict.faster(None, 1) == "--workers 8 would use all 8 cores of this machine"
    assert verdict.faster("ray", 1) is None
    assert verdict.faster(None, 2) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert verdict.faster(None, 1) is None


@pytest.mark.parametrize(("quiet", "stream"), [(True, Terminal()), (False, io.StringIO())])
def test_nobody_else_sees_one(monkeypatch, quiet, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.progress_bar("rows", quiet=quiet) as advance:
        assert advance is None
    assert stream.getvalue() == ""


def test_a_conversion_at_a_terminal_shows_bytes(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with bytes_bar(quiet=False) as advance:
        assert advance is not None
        advance(500_000, 2_000_000)
    assert "converting" in terminal.getvalue()
    assert "0.5/2.0 MB" in terminal.getvalue()


@pytest.mark.parametrize(("quiet", "stream"), [(True, Terminal()), (False, io.StringIO())])
def test_nobody_else_sees_a_conversion(monkeypatch, quiet, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with bytes_bar(quiet=quiet) as advance:
        assert advance is None
    assert stream.getvalue() == ""


def test_importers_say_how_far_they_are(tmp_path):
    row = {"input": "a", "output": "b" * 1000, "score": 1.0, "step": 1, "uid": "a_0_0"}
    (tmp_path / "1.jsonl").write_text((json.dumps(row) + "\n") * 200)
    size = (tmp_path / "1.jsonl").stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", 50_000)
        for importer in ("verl", "mapped"):
            seen = []
            options = ConvertOptions(importer=importer)
            found = detect_dump([str(tmp_path / "1.jsonl")], options)
            convert(found, tmp_path / "run.parquet", options, lambda done, total, seen=seen: seen.append((done, total)))
            assert len(seen) > 3
            assert seen == sorted(seen)
            assert seen[-1] == (size, size)
