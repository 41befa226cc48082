"""Runs the command line in this process on hostile input, and says what is wrong with how it ended."""

import contextlib
import io
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from unittest import mock

from rolloutdoctor.cli import app

_HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST_ERROR = 2500
ENDS = {0, 1, 2, 3}


class Stream(io.TextIOWrapper):
    """A text stream as the interpreter makes it."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self):
        """What was written."""
        return self.buffer.getvalue().decode()


def run(arguments, folder, columns=100):
    """Run a command line in a folder and so many columns: exit code, stdout, stderr, warnings."""
    out, err = Stream(), Stream()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "argv", ["rolloutdoctor", *arguments]),
            mock.patch.dict(os.environ, {"ROLLOUTDOCTOR_DEBUG": "1", "COLUMNS": str(columns)}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            try:
                app.main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
    finally:
        os.chdir(before)
    return code, out.text(), err.text(), warned


def complaint(arguments, folder):
    """What is wrong with how a command ended; None if nothing is."""
    try:
        code, out, err, warned = run(arguments, folder)
    except BaseException as error:  # a traceback is what is looked for
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}\n{traceback.format_exc()[-700:]}"
    if code not in ENDS:
        return f"exit code {code!r}: {err[-500:]}"
    if "internal error" in err or "Traceback" in err:
        return err[-1500:]
    if warned:
        return "; ".join(f"{one.category.__name__}: {one.message} ({one.filename}:{one.lineno})" for one in warned[:3])
    if code == 2 and not err.strip():
        return "exit code 2 without a word"
    if code == 2 and len(err.strip().splitlines()[-1]) > _LONGEST_ERROR:
        return f"a message of {len(err)} characters"
    for name, text in (("stdout", out), ("stderr", err)):
        found = _HIDDEN.search(text)
        if found:
            return f"{name} has {found[0]!r}: {text[max(0, found.start() - 80) : found.start() + 40]!r}"
    return None
