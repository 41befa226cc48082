"""`check --each`: several runs, one line each."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from rolloutdoctor.cli import dumps, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import ABNORMAL, FINDINGS, NOTHING_CHECKED
from rolloutdoctor.cli.groups import Source
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.cli.terminal import say, show
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.escapes import visible_lines

if TYPE_CHECKING:
    from rolloutdoctor.commands.check.each import NamedRun
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.opening.dumps import ConvertOptions
    from rolloutdoctor.results.several import CheckedRun

_WORST_FIRST = (ABNORMAL, FINDINGS, NOTHING_CHECKED, 0)


def runs_at(paths: list[str], dump: "ConvertOptions") -> "list[NamedRun]":
    """Find the runs that the paths name.

    Raises:
        InputError: if there is none.
    """
    from rolloutdoctor.commands.check.each import find_runs

    return find_runs(paths, as_dump=dump.asked_for)


def check_several(
    paths: list[str], source: Source, options: "CheckOptions", judging: verdict.Judging, must_test: frozenset[str]
) -> int:
    """Check every run that the paths name, print one line for each, and return the worst exit code.

    Raises:
        UsageError: if a format has no form for several runs.
        InputError: if there is no run.
    """
    from rolloutdoctor.commands.check.each import check_each
    from rolloutdoctor.commands.check.several import RENDERERS

    form, output_file, style = judging.format_, judging.output_file, judging.style()
    if form.value not in RENDERERS:
        raise UsageError(f"--each has no format {form.value} (known: {', '.join(RENDERERS)})")
    check_target(output_file, "--output-file")

    def opening(run_paths: list[str]) -> "AbstractContextManager[Run]":
        return dumps.opening(run_paths, source, quiet=True, logs_alone=True)

    def code(run: "CheckedRun") -> int:
        return ABNORMAL if run.report is None else judging.exit_code(run.report, must_test)

    runs = runs_at(paths, source.dump)
    codes: set[int] = set()

    def coded() -> "Iterator[tuple[CheckedRun, int]]":
        for run in check_each(runs, opening, options):
            codes.add(code(run))
            yield run, code(run)
            del run

    pieces = RENDERERS[form.value](coded(), [run.name for run in runs], style)
    if output_file is None and form is not opt.Format.json:
        for piece in pieces:
            show(piece, colored=style.color)
    else:
        _deliver_whole(pieces, output_file, colored=style.color)
    if ABNORMAL in codes:
        say("a run could not be read: its line says why")
    return worst(codes)


def _deliver_whole(pieces: "Iterable[str]", path: str | None, *, colored: bool) -> None:
    """Print or write pieces once the last one is there; until then they are on the disk, for there may be many."""
    with TemporaryFile("w+", encoding="utf-8", errors="surrogatepass", newline="\n") as spool:
        spool.writelines(pieces)
        spool.seek(0)
        if path is None:
            for line in spool:
                show(line, colored=colored)
        else:
            write_whole((visible_lines(line, colored=colored).encode() for line in spool), path, "--output-file")


def worst(codes: Iterable[int]) -> int:
    """The worst of some exit codes: unreadable, then findings, then nothing checked.

    >>> worst([0, 3, 1]), worst([1, 2])
    (1, 2)
    """
    return min(codes, key=_WORST_FIRST.index, default=0)
