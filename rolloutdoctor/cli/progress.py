"""A progress bar on stderr for commands that take a while."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from rolloutdoctor.cli.terminal import say

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from rolloutdoctor.io.progress import Progress, Unit

    _Columns = Callable[[], tuple[ProgressColumn, ...]]

DELAY_SECONDS = 0.5
"""A command that is done sooner shows no bar."""

HINT_SECONDS = 10.0
"""A command says what would make it faster when it has taken so long, and can tell how long it will take,"""

HINT_LEFT_SECONDS = 60.0
"""and has at least so long to go."""

SLOW_SECONDS = 20.0
"""A command of several stages says which it is at when it has taken so long."""

_WHOLE = 10_000
"""Smaller numbers are shown in full."""


def progress_bar(unit: "Unit", *, quiet: bool, hint: str | None = None) -> "AbstractContextManager[Progress | None]":
    """Give a function that takes what is done and what there is to do; None where no bar is wanted.

    The bar appears once the command has taken half a second, however little there is to read.

    Args:
        unit: what both are counted in.
        quiet: the user wants no bar.
        hint: what would make it faster, printed once if that is worth a minute and more; None: nothing would.
    """

    def columns() -> "tuple[ProgressColumn, ...]":
        from rich.progress import TextColumn

        return (TextColumn("{task.fields[amounts]} " + unit),)

    return _bar("reading", columns, DELAY_SECONDS, quiet=quiet, hint=hint)


@contextmanager
def slow_work(*, quiet: bool) -> "Iterator[Callable[[str], None]]":
    """Give a function that takes what a command does now; a command that takes long says so from then on.

    Args:
        quiet: the user wants no word.
    """
    from threading import Timer

    doing, began = [""], monotonic()
    timer = Timer(SLOW_SECONDS, lambda: say(f"after {SLOW_SECONDS:g} seconds it {doing[0]}"))
    timer.daemon = True

    def tell(activity: str) -> None:
        doing[0] = activity
        if not quiet and monotonic() - began >= SLOW_SECONDS:
            say(f"it {activity}")

    if not quiet:
        timer.start()
    try:
        yield tell
    finally:
        timer.cancel()


def bytes_bar(*, quiet: bool) -> "AbstractContextManager[Progress | None]":
    """Give a function that takes bytes read and bytes to read; None where no bar is wanted."""

    def columns() -> "tuple[ProgressColumn, ...]":
        from rich.progress import DownloadColumn, TransferSpeedColumn

        return DownloadColumn(), TransferSpeedColumn()

    return _bar("converting", columns, 0, quiet=quiet)


def amounts(done: int, total: int) -> str:
    """Format the amount done and the total.

    >>> amounts(12_345_678, 58_900_000), amounts(950, 1_600), amounts(950, 10_000), amounts(999_960, 2_000_000_000)
    ('12.3M/58.9M', '950/1,600', '950/10.0k', '1.0M/2.0B')
    """
    return f"{_short(done)}/{_short(total)}"


def _short(count: int) -> str:
    if count < _WHOLE:
        return f"{count:,}"
    for size, letter in ((1e3, "k"), (1e6, "M"), (1e9, "B")):
        words = f"{count / size:.1f}"
        if float(words) < 1000:
            return words + letter
    return f"{count / 1e12:,.1f}T"


@contextmanager
def _bar(
    doing: str, columns: "_Columns", delay: float, *, quiet: bool, hint: str | None = None
) -> "Iterator[Progress | None]":
    if quiet or not sys.stderr.isatty():
        yield None
        return
    began = monotonic()
    with ExitStack() as stack:
        bars: list[Callable[[int, int], None]] = []
        hints = [] if hint is None else [hint]

        def advance(done: int, total: int) -> None:
            spent = monotonic() - began
            if not bars and (not delay or spent >= delay):
                bars.append(stack.enter_context(_drawn(doing, columns(), done, total)))
            for update in bars:
                update(done, total)
            is_long = done > 0 and spent >= HINT_SECONDS and spent * (total - done) >= HINT_LEFT_SECONDS * done
            if hints and bars and is_long:
                # Above the bar, which rich draws again.
                say(hints.pop())

        yield advance


@contextmanager
def _drawn(doing: str, columns: "tuple[ProgressColumn, ...]", done: int, total: int) -> "Iterator[Progress]":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    around = (TextColumn(doing), BarColumn(), *columns, TimeRemainingColumn(compact=True), TextColumn("left"))
    with Progress(*around, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, completed=done, total=total, amounts=amounts(done, total))

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, amounts=amounts(done, total))

        yield update
