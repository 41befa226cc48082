"""Several processes over one run: each is dealt whole steps, and their states add up to that of one process."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from rolloutdoctor.engine.accumulate import RunState
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.serial import measure
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.results.errors import InputError

_FOR_THE_FIRST = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

PARTS_PER_WORKER = 4
"""Parts are dealt out as workers become free, so that steps of unequal size even out."""


def measure_in(workers: int, prepared: PreparedRun, progress: Callable[[int, int], None] | None = None) -> RunState:
    """Measure a run in this process, or in several with one torch thread each.

    The parts are ranges of steps with about equally many rows. States are added up in the order of their steps, so
    that nothing depends on which process was faster.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read or breaks the contract, or a process died.
    """
    if workers == 1:
        return measure(prepared, progress)
    run, options = prepared.run, prepared.options
    parts = run.step_ranges(options.steps, options.split, workers * PARTS_PER_WORKER)
    pool = _Pool(parts, run.rows)
    try:
        pool.start(run, options, min(workers, len(parts)))
        found = pool.run(progress)
    finally:
        pool.end()
    total = RunState()
    for state in found:
        total = total + state
    return total


class _Pool:
    """Processes that work through parts; each is at the other end of a pipe."""

    def __init__(self, parts: Sequence[StepRange], rows: int) -> None:
        self._parts, self._rows = parts, rows
        self._next, self._done = 0, [0] * len(parts)
        self._found: dict[int, RunState | Exception] = {}
        self._busy: dict[Connection, BaseProcess] = {}

    def start(self, run: Run, options: CheckOptions, workers: int) -> None:
        """Start processes, and give each its first part."""
        # Spawned: a fork would copy locks that threads of arrow and torch hold.
        context = multiprocessing.get_context("spawn")
        # The first start brings up Python's tracker, which leaves SIGINT unblocked: so before the mask is set below.
        resource_tracker.ensure_running()
        for _ in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            # A terminal sends Ctrl-C, or that it has closed, to every process. A blocked signal stays blocked in a
            # process that is started: this one ends the others, and none of them has anything to say about it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_FIRST)
            try:
                process.start()
                self._busy[mine] = process
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        for pipe in list(self._busy):
            pipe.send((run, options))
            self._deal(pipe)

    def run(self, progress: Callable[[int, int], None] | None) -> list[RunState]:
        """The state of every part, in their order; what the first part that failed raised is raised."""
        while self._busy:
            for pipe in wait(list(self._busy)):
                assert isinstance(pipe, Connection)
                try:
                    kind, part, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._busy[pipe].join()
                    code = self._busy[pipe].exitcode
                    raise InputError(
                        f"a worker process ended without a word (exit code {code}), for want of memory perhaps; "
                        "use fewer --workers"
                    ) from None
                if kind == "rows":
                    self._done[part] = value
                    if progress is not None:
                        progress(min(sum(self._done), self._rows), self._rows)
                    continue
                self._found[part] = value
                if isinstance(value, Exception):
                    # Parts before this one are still finished: the first error in step order is the one to tell.
                    self._next = len(self._parts)
                self._deal(pipe)
        states: list[RunState] = []
        for _, state in sorted(self._found.items(), key=lambda entry: entry[0]):
            if isinstance(state, Exception):
                raise state
            states.append(state)
        return states

    def _deal(self, pipe: Connection) -> None:
        if self._next < len(self._parts):
            pipe.send((self._next, self._parts[self._next]))
            self._next += 1
            return
        pipe.send(None)
        self._busy.pop(pipe).join()
        pipe.close()

    def end(self) -> None:
        """End the processes that are still at work."""
        for pipe, process in self._busy.items():
            process.kill()
            process.join()
            pipe.close()
        self._busy.clear()


def _work(pipe: Connection) -> None:
    """What a worker process does: measure parts until there are no more."""
    # As in the process that started this one: what a library warns of says nothing to a user.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    # Whoever would read the answers is gone: so is the reason to work.
    with suppress(BrokenPipeError, EOFError):
        run, options = pipe.recv()
        while (dealt := pipe.recv()) is not None:
            number, steps = dealt
            pipe.send(("state", number, _measured(run, replace(options, steps=steps), _teller(pipe, number))))
    # Nothing is left to do but to take apart what was imported, for which the other end would wait.
    os._exit(0)


def _end_with_the_first() -> None:
    """Wait until the process that deals out the work is gone, killed perhaps, and end at once."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os._exit(0)


def _measured(run: Run, options: CheckOptions, progress: Callable[[int, int], None]) -> RunState | Exception:
    try:
        return measure(prepare(run, options), progress)
    except BrokenPipeError:
        raise
    except Exception as error:
        try:
            pickle.dumps(error)
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error


def _teller(pipe: Connection, number: int) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        pipe.send(("rows", number, done))

    return tell
