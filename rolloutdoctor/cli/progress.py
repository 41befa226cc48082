"""A progress bar on stderr for files that take a while."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG_RUN_ROWS = 20_000


@contextmanager
def progress_bar(rows: int, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that takes rows done and rows to do; None where no bar is wanted."""
    if quiet or rows < LONG_RUN_ROWS or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=rows)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


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
