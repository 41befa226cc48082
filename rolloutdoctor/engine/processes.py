"""Several processes over one run: each measures ranges of whole steps, whose states add up to that of one process."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess

from rolloutdoctor.engine.parts import Part, Work, plan_parts
from rolloutdoctor.engine.stored import State
from rolloutdoctor.io.child_processes import without_working_folder
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.io.uninterrupted import uninterrupted
from rolloutdoctor.results.errors import InputError

PARTS_PER_WORKER = 4
"""Parts are submitted one by one as workers become free, so that steps of unequal size even out."""

PROGRESS_SECONDS = 0.1
"""Time between two looks at how far the workers are."""

START = "spawn"
"""Start method of workers: a fork would copy locks that threads of arrow and torch hold."""

DEATH_SECONDS = 60
"""Longest wait for the process that died: the pool may see its pipe close before the system says whose end it was."""

_FOR_THE_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

_Done = ctypes.Array[ctypes.c_longlong]
_done: _Done


@dataclass(frozen=True)
class Processes:
    """Measures parts in several processes with one torch thread each.

    Attributes:
        workers: how many; one measures the run as one part, in this process.
    """

    workers: int

    def measure(
        self,
        work: Work[State],
        run: Run,
        steps: StepRange | None = None,
        split: str | None = None,
        progress: Progress | None = None,
    ) -> list[State]:
        """Measure the parts: ranges of steps with about equally many rows.

        Raises:
            UsageError: if an option cannot be used.
            InputError: if a file cannot be read or breaks the contract, or a process died.
        """
        if self.workers == 1:
            return [work.measure(Part(0, steps or StepRange(), run), progress)]
        parts = plan_parts(run, steps, split, self.workers * PARTS_PER_WORKER)
        work = work.among(len(parts))
        context = multiprocessing.get_context(START)
        done = context.RawArray(ctypes.c_longlong, len(parts))
        # Its locks start Python's tracker of resources.
        with without_working_folder():
            pool = ProcessPoolExecutor(min(self.workers, len(parts)), context, initializer=_begin, initargs=(done,))
        started: list[BaseProcess] = []
        dead: list[BaseProcess] = []
        try:
            # Between the start of a process and its entry in `started`, nobody could end it.
            futures = uninterrupted(lambda: _submit(pool, work, parts, started))
            size = run.size(steps, split)
            # A row group in which one part ends and the next begins counts in both.
            _follow(futures, started, lambda: progress and progress(min(sum(done), size), size))
            return [future.result() for future in futures]
        except BrokenProcessPool:
            ended = connection.wait([process.sentinel for process in started], DEATH_SECONDS)
            dead = [process for process in started if process.sentinel in ended]
            if not dead:
                raise
        finally:
            # One that is left would keep the pool, and so this process, from ending.
            uninterrupted(lambda: _end(pool, started))
        raise InputError(
            f"a worker process died (exit code {dead[0].exitcode}), probably out of memory; use fewer --workers"
        )


def _submit(
    pool: ProcessPoolExecutor, work: Work[State], parts: Sequence[Part], started: list[BaseProcess]
) -> list[Future[State]]:
    """Submit every part, which starts the processes, and add these to `started`, in a thread that then ends."""
    with without_working_folder():
        # The first start brings up Python's tracker, which leaves SIGINT unblocked: so before the mask is set below.
        resource_tracker.ensure_running()
        # A terminal sends Ctrl-C, or that it has closed, to every process. A blocked signal stays blocked in a process
        # that is started: this one kills the others, and none of them has anything to say about it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
        try:
            # The run goes with each part, not with the start of a process, which would wait until the process before
            # has imported torch and can read it.
            futures = [pool.submit(_measured, work, part) for part in parts]
        finally:
            # Those that have died since are no active children any more, and nobody would see that they did.
            started += (pool._processes or {}).values()
    # The pool's thread waits for the rest of a result for ever if a worker is killed while it sends it, unless that was
    # the last process that could send any.
    pool._result_queue._writer.close()  # type: ignore[attr-defined]
    return futures


def _end(pool: ProcessPoolExecutor, started: Sequence[BaseProcess]) -> None:
    """Kill every process, also when all is done: taking apart what it imported takes one long, and the pool waits."""
    for process in started:
        process.kill()
    pool.shutdown(cancel_futures=True)


def _follow(futures: Sequence[Future[State]], started: Sequence[BaseProcess], tell: Callable[[], object]) -> None:
    """Wait for every part up to the first one that fails, which is the error to raise.

    Raises:
        BrokenProcessPool: if a process died. The pool does not notice while it waits for the rest of a result.
    """
    pending = set(futures)
    while pending:
        _, pending = wait(pending, PROGRESS_SECONDS, FIRST_COMPLETED)
        failed = [future.done() and not future.cancelled() and future.exception() is not None for future in futures]
        if any(failed):
            for later in futures[failed.index(True) + 1 :]:
                later.cancel()
        if pending and connection.wait([process.sentinel for process in started], 0):
            raise BrokenProcessPool
        tell()


def _begin(done: _Done) -> None:
    """Prepare a worker process."""
    global _done
    _done = done
    # As in the process that started this one: what a library warns of says nothing to a user.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    # The pool's own processes wait for work for ever when the one that started them is killed.
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _measured(work: Work[State], part: Part) -> State:
    """Measure a part in a worker process."""

    def tell(done: int, total: int) -> None:
        _done[part.number] = done

    return work.measure(part, tell)
