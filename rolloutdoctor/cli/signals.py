"""Signals that ask the program to end: it cleans up, says so in one sentence, and ends with 128 and their number.

Nothing is imported here that takes time: until this is in force, a signal ends the process as it would any other.
"""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "terminal closed"}
_BASE = 128

_received: signal.Signals | None = None
_is_over = False
_is_said = False


class Stopped(BaseException):
    """The process was asked to end. No library takes it for an error of its own, as some do with an interrupt.

    Attributes:
        exit_code: what the process ends with.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.exit_code = _BASE + number

    def said(self) -> str:
        """Return the sentence to be printed; a second signal has nothing to add to it."""
        global _is_said
        _is_said = True
        done = _of_writing("replacing", "placed")
        written = f"{', '.join(done)} was written before" if isinstance(done, tuple) and done else "nothing was written"
        return f"{_WORDS[self.args[0]]}; {written}"


def heed() -> None:
    """Raise `Stopped` for these signals from now on, except for those that the parent process had ignored."""
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _not_lost


def unheed() -> None:
    """Remove what is not finished: the work is done, and from now on a signal ends the process at once."""
    global _is_over
    _is_over = True
    clean_up()


class Stopping:
    """Inside, whatever a signal has led to is taken for it: some libraries raise an error of their own instead."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        if error is not None and not isinstance(error, (Stopped, SystemExit)) and _received is not None:
            raise Stopped(_received) from None


def clean_up() -> None:
    """Remove what this process has not finished."""
    _of_writing("replacing", "remove_unfinished")
    _of_writing("scratch", "remove_scratch")


def report(stop: Stopped) -> None:
    """Say what the process was asked, in one sentence."""
    print(f"rolloutdoctor: {stop.said()}", file=sys.stderr, flush=True)


def _of_writing(name: str, function: str) -> object:
    """Call a function of a writing module; where the module is not fully imported, no file was begun."""
    call = getattr(sys.modules.get(f"rolloutdoctor.io.write.{name}"), function, None)
    return None if call is None else call()


def _stop(number: int, frame: "FrameType | None") -> None:
    global _received
    if _received is not None or _is_over:
        # Cleaning up takes too long for somebody, or nobody is there any more to catch anything, or a library has
        # kept the first one to itself.
        try:
            if not _is_said:
                report(Stopped(_received or signal.Signals(number)))
            clean_up()
        finally:
            os._exit(_BASE + number)
    _received = signal.Signals(number)
    if _is_importing(frame):
        # Torch's C++ aborts the process on an exception out of its import, and other libraries keep it to themselves.
        report(Stopped(_received))
        clean_up()
        os._exit(_BASE + number)
    raise Stopped(_received)


def _is_importing(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _not_lost(unraisable: "sys.UnraisableHookArgs") -> None:
    """Print an exception raised in a finalizer, where it is lost; what a signal raised would be lost again: so end."""
    if isinstance(unraisable.exc_value, Stopped):
        report(unraisable.exc_value)
        clean_up()
        os._exit(unraisable.exc_value.exit_code)
    sys.__unraisablehook__(unraisable)
