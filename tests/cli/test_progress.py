"""The progress bar is for people at a terminal, on stderr, for long files."""

import io
import sys

import pytest

from rolloutdoctor.cli.progress import LONG_RUN_ROWS, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_run_at_a_terminal_shows_how_far_it_is(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(LONG_RUN_ROWS, quiet=False) as advance:
        assert advance is not None
        advance(LONG_RUN_ROWS // 2, LONG_RUN_ROWS)
    assert "reading" in terminal.getvalue()


@pytest.mark.parametrize(
    ("rows", "quiet", "stream"),
    [
        (LONG_RUN_ROWS - 1, False, Terminal()),
        (LONG_RUN_ROWS, True, Terminal()),
        (LONG_RUN_ROWS, False, io.StringIO()),
    ],
)
def test_nobody_else_sees_one(monkeypatch, rows, quiet, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(rows, quiet=quiet) as advance:
        assert advance is None
    assert stream.getvalue() == ""
