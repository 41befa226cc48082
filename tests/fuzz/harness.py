"""Runs command lines on hostile input in limited processes, and says what is wrong with how they ended."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

from forked import CPU_SECONDS, MEMORY, ROOT, taken

from rolloutdoctor.cli import app

PLUGIN = "@plugin"
"""First word of a command line that is started with the packages of the folder `site`."""

_HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_WARNING = re.compile(r"^\S*\.py:\d+: \w*Warning: .*$", re.MULTILINE)
_LONGEST_ERROR = 2500
_LONGEST_DEAF = 1.0
"""CPU seconds in which no signal is heeded."""

ENDS = {0, 1, 2, 3}


class Stream(io.TextIOWrapper):
    """A text stream as the interpreter makes it."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self):
        """What was written."""
        return self.buffer.getvalue().decode()


def run(arguments, folder, columns=100):
    """Run a command line in this process, a folder and so many columns: exit code, stdout, stderr, warnings."""
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


def complaint(start, words, folder, spent=None):
    """What is wrong with how a command ended; None if nothing is.

    Args:
        start: of a `forked.Server`.
        words: of the command line.
        folder: to run it in.
        spent: takes the CPU seconds, where it is a list.
    """
    folder = Path(folder)
    report = folder.parent / f"{folder.name}.report"
    if words[0] == PLUGIN:
        code, out, err, seconds = _with_packages(words[1:], folder)
        deaf = 0.0
    else:
        program = start(*words, cwd=folder, report=report, env={"COLUMNS": "100"})
        trouble = _ask(program, folder) if words[0] == "view" else None
        out, err = program.communicate(timeout=1200)
        code = program.wait()
        seconds, _, deaf = taken(report)
        for path in (report, Path(f"{report}.deaf")):
            path.unlink(missing_ok=True)
        if trouble is not None:
            return trouble
        if words[0] == "view" and code == 130:
            code = 0
    if spent is not None:
        spent.append(seconds)
    if seconds >= CPU_SECONDS or code == -signal.SIGXCPU:
        return f"it hangs: {seconds:.1f} s of CPU; {err[-300:]}"
    if deaf >= _LONGEST_DEAF:
        return f"it heeds no signal for {deaf:.1f} s of CPU"
    return wrong(code, out, err)


def wrong(code, out, err):
    """What is wrong with an exit code and what was printed; None if nothing is."""
    if code not in ENDS:
        return f"exit code {code!r}: {err[-1500:]}"
    if "internal error" in err or "Traceback" in err:
        return err[-1500:]
    if "out of memory" in err:
        return f"it needs {MEMORY:,} bytes or more: {err[-300:]}"
    warned = _WARNING.findall(err)
    if warned:
        return "; ".join(warned[:3])
    if code == 2 and not err.strip():
        return "exit code 2 without a word"
    if code == 2 and len(err.strip().splitlines()[-1]) > _LONGEST_ERROR:
        return f"a message of {len(err)} characters"
    for name, text in (("stdout", out), ("stderr", err)):
        found = _HIDDEN.search(text)
        if found:
            return f"{name} has {found[0]!r}: {text[max(0, found.start() - 80) : found.start() + 40]!r}"
    return None


def _with_packages(words, folder):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))

    done = subprocess.run(
        [sys.executable, "-m", "rolloutdoctor", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")]), "COLUMNS": "100"},
        capture_output=True,
        check=False,
        timeout=600,
        preexec_fn=limit,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    err = done.stderr.decode("utf-8", "backslashreplace")
    # A plug-in may print what it likes, and may be no Python.
    return done.returncode, "", err, seconds


def _ask(program, folder):
    """Put the questions of a file to a page, and end it; what is wrong with an answer."""
    deadline = time.monotonic() + 300
    with os.fdopen(os.dup(program.pipe("stdout")), encoding="utf-8") as pipe:
        address = urlsplit(pipe.readline().strip())
    if not address.port:
        return None
    trouble = None
    for text in json.loads((folder / "asked.json").read_text()):
        request = text.replace("{prefix}", address.path).replace("{host}", address.netloc)
        is_whole = len(request.split("\r\n")[0].split()) == 3
        with socket.create_connection((address.hostname, address.port), timeout=300) as connection:
            connection.sendall(request.encode("latin1", "replace"))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while time.monotonic() < deadline and (block := connection.recv(2**20)):
                answer += block
        if b" 500 " in answer[:40] or (not answer and request.startswith("GET") and is_whole):
            trouble = f"{request[:200]!r}: {answer[:300]!r}"
    program.send_signal(2)
    return trouble
