"""A progress bar on stderr for files that take a while."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

DELAY_SECONDS = 0.5
"""A command that is done sooner shows no bar."""


@contextmanager
def progress_bar(rows: int, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that takes rows done and rows to do; None where no bar is wanted.

    The bar appears once the command has taken half a second, however few the rows are: they may be long.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    began = monotonic()
    with ExitStack() as stack:
        bars: list[Callable[[int], None]] = []

        def advance(done: int, total: int) -> None:
            if not bars and monotonic() - began >= DELAY_SECONDS:
                bars.append(stack.enter_context(_rows_bar(rows)))
            for update in bars:
                update(done)

        yield advance


@contextmanager
def _rows_bar(rows: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=rows)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def bytes_bar(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that takes bytes read and bytes to read; None where no bar is wanted."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("bytes", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
