"""The page of a run in a file: what `report` writes, and `view -o`."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.engine.parts import Executor
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.search.hypotheses.fixes import ChosenFix


def refuse_other_suffixes(output: str) -> None:
    """Refuse a name that is none of a page.

    Raises:
        UsageError: if it is none.
    """
    if PurePath(output).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output or repr(output)}: a report is a page; name it FILE.html")


def write_page(
    run: "Run",
    executor: "Executor | None",
    options: "CheckOptions",
    output: str,
    fixes: "Sequence[ChosenFix]" = (),
    *,
    groups: int,
    hint: str | None,
    quiet: bool,
) -> None:
    """Check a run, draw its pictures, and write both as a page.

    Args:
        run: what to report on.
        executor: where parts of it are measured; None: in this process.
        options: what to check, and how.
        output: where to write the page.
        fixes: the pictures are drawn with and without these.
        groups: as many groups that findings point at are in the page, token by token.
        hint: what would make it faster, or None.
        quiet: True to say nothing.

    Raises:
        UsageError: if an option cannot be used, or the page cannot be written.
        InputError: if a file cannot be read, or breaks the contract.
    """
    refuse_other_suffixes(output)
    from rolloutdoctor.cli.progress import progress_bar, slow_work
    from rolloutdoctor.commands.view.page import page_of

    check_target(output)
    with progress_bar(run.unit, quiet=quiet, hint=hint) as progress, slow_work(quiet=quiet) as tell:
        page = page_of(run, options, fixes, progress, tell, groups, executor)
    write_whole(page.encode(), output)
    opt.warn_of_partial(run, quiet=quiet)
