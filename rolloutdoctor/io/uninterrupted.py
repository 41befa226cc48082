"""Calls that an interrupt does not cut in two."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def uninterrupted(call: Callable[[], T]) -> T:
    """Return what a function returns that runs in a thread; an interrupt that comes meanwhile is raised after it.

    Python raises interrupts in the main thread, whatever signals that blocks: another thread may take the signal.
    """
    done: Future[T] = Future()

    def work() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

    try:
        # An interrupt may end this before the thread is known to run: then it either begins or never does anything.
        Thread(target=work).start()
        return done.result()
    finally:
        if not done.cancel():
            wait([done])
