"""The program as a process of its own, without the second and a half that its imports take.

A server imports everything once, and each command line is run in a fork of it. Such a process has its own streams,
folder, environment, signals and exit code, as one that a shell starts has; only its imports are done and its parser is
made already, so that what is about starting or importing needs a real start.
"""

import atexit
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import redirect_stderr, suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOSED = "closed"
"""Stands for a standard stream that is closed."""
_MESSAGE = 20
CPU_SECONDS, MEMORY = 20, 2 * 2**30
"""What a hostile input may take; memory beside what is shared with the server."""


class Program:
    """A command line that runs; much as `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, pipes: dict[str, int]):
        self._connection, self._pipes = connection, pipes
        self.returncode = None
        self.pid = self._told()

    def _told(self) -> int:
        return int(self._connection.recv(_MESSAGE, socket.MSG_WAITALL))

    def wait(self, timeout: float = 300) -> int:
        """The exit code, negative if a signal ended it; a program that takes too long is killed, and fails the test."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(self._told())
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                raise
            self._connection.close()
        return self.returncode

    def pipe(self, name: str) -> int:
        """The descriptor of what it writes to stdout or stderr."""
        return self._pipes[name]

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end: what it wrote to the streams that are pipes."""
        written = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            with os.fdopen(self._pipes[name], encoding="utf-8") as pipe:
                written[name] = pipe.read()

        readers = [threading.Thread(target=read, args=[name], daemon=True) for name in self._pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return written["stdout"], written["stderr"]

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Server:
    """Has everything imported, and starts programs."""

    def __init__(self):
        self._socket, its = socket.socketpair()
        with its:
            command = [sys.executable, __file__, str(its.fileno())]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()], cwd=ROOT, env=environment)

    def start(
        self, *words, cwd=None, env=(), stdin=None, stdout=None, stderr=None, file_size=None, ignored=None, report=None
    ):
        """Run a command line.

        Args:
            words: those after ``rolloutdoctor``.
            cwd: its working directory.
            env: variables beside those of this process.
            stdin: an open file or its number, or `CLOSED`; by default it is empty.
            stdout: the same; by default a pipe, which `Program.communicate` reads.
            stderr: as `stdout`.
            file_size: the bytes beyond which no file can be written.
            ignored: a signal that is ignored, as under nohup.
            report: a path; the program has `CPU_SECONDS` and `MEMORY`, and what it took is written there (`taken`).
        """
        streams, pipes, own = [stdin, stdout, stderr], {}, []
        for place, name in enumerate(("stdin", "stdout", "stderr")):
            if streams[place] is None:
                if place == 0:
                    streams[place] = os.open(os.devnull, os.O_RDONLY)
                else:
                    pipes[name], streams[place] = os.pipe()
                own.append(streams[place])
        request = {
            "words": [str(word) for word in words],
            "cwd": str(cwd or Path.cwd()),
            "env": {**os.environ, "PYTHONPATH": str(ROOT), **dict(env)},
            "open": [stream != CLOSED for stream in streams],
            "file_size": file_size,
            "ignored": ignored,
            "report": None if report is None else str(report),
        }
        numbers = [each if isinstance(each, int) else each.fileno() for each in streams if each != CLOSED]
        ours, its = socket.socketpair()
        with its:
            body = json.dumps(request).encode()
            self._socket.sendall(len(body).to_bytes(4, "big"))
            socket.send_fds(self._socket, [body[:1]], [its.fileno(), *numbers])
            self._socket.sendall(body[1:])
        for number in own:
            os.close(number)
        return Program(ours, pipes)

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait(60)


def _import_everything() -> None:
    """Import what commands import where they need it; nothing of it may start a thread, which a fork would lack."""
    importlib.import_module("rolloutdoctor.cli.process").prepare_process()
    names = ["torch", "pyarrow.compute", "pyarrow.parquet", "rolloutdoctor.cli.app"]
    for room in ("commands", "engine", "importers", "views"):
        package = importlib.import_module(f"rolloutdoctor.{room}")
        names += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        importlib.import_module(name)


def make_parser() -> None:
    """Make the parser of the command line, which is the same for each, and have it import what it reads values with."""
    typer = importlib.import_module("typer.main")
    typer.get_command = cache(typer.get_command)
    sys.argv = ["rolloutdoctor", "check", "no such file"]
    with suppress(SystemExit), redirect_stderr(io.StringIO()):
        importlib.import_module("rolloutdoctor.cli").main()


def _serve(connection: socket.socket) -> None:
    """Fork for each request; what returns is the process that was asked for."""
    while header := connection.recv(4, socket.MSG_WAITALL):
        first, numbers, *_ = socket.recv_fds(connection, 1, 4)
        body = first + connection.recv(int.from_bytes(header, "big") - 1, socket.MSG_WAITALL)
        # The first fork tells how the second ends.
        if os.fork() == 0:
            answer, *streams = numbers
            child = os.fork()
            if child == 0:
                connection.close()
                os.close(answer)
                _become(json.loads(body), streams)
                return
            os.write(answer, str(child).encode().ljust(_MESSAGE))
            for number in streams:
                os.close(number)
            _, ended, usage = os.wait4(child, 0)
            report = json.loads(body)["report"]
            if report is not None:
                Path(report).write_text(f"{usage.ru_utime + usage.ru_stime} {usage.ru_maxrss * 1024}")
            os.write(answer, str(ended).encode().ljust(_MESSAGE))
            os._exit(0)
        for number in numbers:
            os.close(number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def taken(report: Path) -> tuple[float, int, float]:
    """What a program took: CPU seconds, bytes of memory at most, and CPU seconds in which it heeded no signal."""
    seconds, memory = report.read_text().split()
    deaf = Path(f"{report}.deaf")
    return float(seconds), int(memory), float(deaf.read_text()) if deaf.exists() else 0.0


def _limit(report: str) -> None:
    """Limit this process, and note for how long no signal was heeded: for how long one waits that always comes."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    longest, before = 0.0, time.process_time()

    def heed(number: int, frame: object) -> None:
        nonlocal longest, before
        now = time.process_time()
        if now - before > max(longest, 0.2):
            longest = now - before
            Path(f"{report}.deaf").write_text(str(longest))
        before = now

    signal.signal(signal.SIGPROF, heed)
    # A call that a signal interrupts goes on by itself.
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, 0.05, 0.05)
    # An interpreter that ends forgets its handlers first, and the signal would kill it.
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)
    warnings.simplefilter("always")


def _become(request: dict, streams: list[int]) -> None:
    """Be the process that was asked for."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # It was found while everything was imported.
    tempfile.tempdir = None
    given = iter(streams)
    for number, is_open in enumerate(request["open"]):
        if is_open:
            os.dup2(next(given), number)
        else:
            os.close(number)
    for number in streams:
        os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", closefd=False) if is_open else None
        for number, (mode, is_open) in enumerate(zip("rww", request["open"], strict=True))
    )
    if request["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"],) * 2)
    for number in HEEDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if request["report"] is not None:
        _limit(request["report"])
    if request["ignored"] is not None:
        signal.signal(request["ignored"], signal.SIG_IGN)
    sys.argv = ["rolloutdoctor", *request["words"]]


if __name__ == "__main__":
    server = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    make_parser()
    _serve(server)
    runpy.run_module("rolloutdoctor", run_name="__main__", alter_sys=True)
