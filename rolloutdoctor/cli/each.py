"""`check --each`: several runs, one line each."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rolloutdoctor.cli import dumps, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.border import ABNORMAL, FINDINGS, NOTHING_CHECKED
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.commands.convert import ConvertOptions
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.results.several import CheckedRun
    from rolloutdoctor.views.style import Style

_WORST_FIRST = (ABNORMAL, FINDINGS, NOTHING_CHECKED, 0)


def check_several(
    paths: list[str],
    dump: "ConvertOptions",
    options: "CheckOptions",
    *,
    format_: opt.Format,
    output_file: str | None,
    fail_on: opt.FailOn,
    exit_zero: bool,
    must_test: frozenset[str],
    style: "Style",
) -> int:
    """Check every run that the paths name, print one line for each, and return the worst exit code.

    Raises:
        UsageError: if a format has no form for several runs.
        InputError: if there is no run.
    """
    from rolloutdoctor.commands.each import check_each, find_runs
    from rolloutdoctor.views.several import RENDERERS

    if format_.value not in RENDERERS:
        raise UsageError(f"--each has no format {format_.value} (known: {', '.join(RENDERERS)})")
    check_target(output_file, "--output-file")

    def opening(found: list[str]) -> "AbstractContextManager[Run]":
        return dumps.opening(found, options.trainer, dump, quiet=True, logs_alone=True)

    def code(run: "CheckedRun") -> int:
        if run.report is None:
            return ABNORMAL
        return verdict.exit_code(run.report, fail_on, exit_zero=exit_zero, must_test=must_test)

    found = find_runs(paths, as_dump=dump.asked_for)
    runs = [(run, code(run)) for run in check_each(found, opening, options)]
    opt.deliver(RENDERERS[format_.value](runs, style), output_file, colored=style.color)
    return worst([number for _, number in runs])


def worst(codes: Sequence[int]) -> int:
    """The worst of some exit codes: unreadable, then findings, then nothing checked.

    >>> worst([0, 3, 1]), worst([1, 2])
    (1, 2)
    """
    return min(codes, key=_WORST_FIRST.index, default=0)
