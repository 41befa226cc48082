"""Error handling of commands: one sentence on stderr and an exit code, never a traceback."""

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ParamSpec, TextIO, TypeVar

from rolloutdoctor.cli import inputs
from rolloutdoctor.cli.signals import Stopped, Stopping
from rolloutdoctor.cli.streams import silence
from rolloutdoctor.cli.terminal import say, show
from rolloutdoctor.results.errors import DeviceWarning, RolloutDoctorError

P = ParamSpec("P")
T = TypeVar("T")

FINDINGS = 1
ABNORMAL = 2
NOTHING_CHECKED = 3
INTERRUPTED = 130
BROKEN_PIPE = 141


def fail(message: str, code: int) -> int:
    """Print one sentence to stderr and return the exit code."""
    say(message)
    return code


_STACKS: list[ExitStack] = []
"""Resources that the running command keeps open."""


def until_the_end(opened: "AbstractContextManager[T]") -> T:
    """Enter a context that lasts until the command ends, however it ends."""
    return _STACKS[-1].enter_context(opened)


@contextmanager
def _device_warnings() -> Iterator[None]:
    """Say in a sentence that the CPU computes what was begun on a GPU; other warnings are as they were."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DeviceWarning)
        others = warnings.showwarning

        def shown(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, DeviceWarning):
                say(str(message))
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = shown
        yield


_WITH_EXITS = ("rolloutdoctor", "click", "typer")
"""Packages that end a command by an exit that is meant."""


def _origin(stop: BaseException) -> str:
    """Return the module that raised something."""
    trace = stop.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def _is_own(stop: SystemExit) -> bool:
    """Tell an exit of a command from one of a library or a plug-in, which would pass for a result."""
    return _origin(stop).partition(".")[0] in _WITH_EXITS


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what a command raises into a sentence and an exit code.

    A fault of this program is distinguished from a fault of its input, and shows its traceback with
    ``ROLLOUTDOCTOR_DEBUG=1``.
    """

    @functools.wraps(command)
    def inner(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with Stopping(), inputs.command(), _device_warnings(), ExitStack() as stack:
                _STACKS.append(stack)
                try:
                    command(*args, **kwargs)
                finally:
                    _STACKS.pop()
            show("")
        except RolloutDoctorError as error:
            raise SystemExit(fail(str(error), error.exit_code)) from None
        except Stopped as stop:
            raise SystemExit(fail(stop.said(), stop.exit_code)) from None
        except KeyboardInterrupt:
            raise SystemExit(fail("interrupted; nothing was written", INTERRUPTED)) from None
        except BrokenPipeError:
            # Whoever read our output has gone: say nothing, and keep the interpreter from flushing into the void.
            silence(sys.stdout)
            raise SystemExit(BROKEN_PIPE) from None
        except MemoryError:
            raise SystemExit(fail("out of memory; select fewer steps with --steps", ABNORMAL)) from None
        except ImportError as error:
            if os.environ.get("ROLLOUTDOCTOR_DEBUG"):
                raise
            if not _UNMAPPED.search(str(error)):
                raise _internal(error) from None
            message = f"out of memory: a library cannot be loaded ({error}); allow the process more (ulimit -v)"
            raise SystemExit(fail(message, ABNORMAL)) from None
        except SystemExit as stop:
            if _is_own(stop):
                raise
            where = _origin(stop)
            message = f"{where} ended the command by an exit ({stop.code!r}); update or uninstall the package it is of"
            raise SystemExit(fail(message, ABNORMAL)) from None
        except BaseException as error:
            if os.environ.get("ROLLOUTDOCTOR_DEBUG"):
                raise
            raise _internal(error) from None

    return inner


_UNMAPPED = re.compile("failed to map segment|cannot allocate memory|cannot enable executable stack", re.IGNORECASE)
"""What the loader of libraries says where the process may have no more memory."""


def _internal(error: BaseException) -> SystemExit:
    """Say that this program is at fault, or the package of another one, and return the exit."""
    from rolloutdoctor.plugins import offers_of  # a command that ends well needs none of it

    which = offers_of(_origin(error))
    if which is not None:
        failed = f"{which}, which failed ({type(error).__name__}: {error}); update or uninstall it"
        return SystemExit(fail(failed, ABNORMAL))
    message = f"internal error: {type(error).__name__}: {error}; set ROLLOUTDOCTOR_DEBUG=1 for the traceback"
    return SystemExit(fail(message, ABNORMAL))
