"""``rolloutdoctor verify``."""

from dataclasses import dataclass
from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, NOTHING_CHECKED, guarded
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.results.errors import UsageError

EPILOG = (
    "Exit codes: 0 every required stage follows, 1 one does not, 2 usage, unreadable input or internal error, 3 one "
    "cannot be told. "
    "Examples: rolloutdoctor verify run.parquet --trainer verl@0.9.1 --require advantages,kl,loss; rolloutdoctor "
    "verify --write tests/test_advantages_exact.py --trainer verl@0.9.1 --set adv_estimator=grpo"
)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Options about a test file that is written."""

    write: Annotated[
        str | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write a pytest file with cases and expected numbers, which needs only pytest, numpy and torch.",
            show_default=False,
        ),
    ] = None
    function: Annotated[
        str,
        typer.Option("--function", metavar="MODULE:NAME", help="With --write, the function that the file tests."),
    ] = ""


@guarded
@groups.grouped
def verify(
    *,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATHS]...", help="Run files, directories or dumps: two small steps are enough."),
    ] = None,
    require: Annotated[
        str,
        typer.Option("--require", metavar="STAGES", help="Stages that have to follow: advantages, kl, loss, metrics."),
    ] = "advantages,kl,loss",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", metavar="CODE", help="Accept this known fault of the release; repeatable.", show_default=False
        ),
    ] = None,
    written: Written,
    source: groups.Source,
    part: groups.Measured,
    format_: Annotated[
        opt.PageFormat, typer.Option("--format", help="Text, or JSON for programs.")
    ] = opt.PageFormat.full,
    output_file: opt.OutputOption = None,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
) -> None:
    """Verify that logged advantages, KL and loss follow from the options: for a trainer's own tests."""
    if written.write is not None:
        if paths:
            raise UsageError("--write takes no run: the cases are built in")
        _write_test(written.write, source, written.function, quiet=quiet)
        return
    if not paths:
        raise UsageError("give a run to verify, or --write FILE for a test file")
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.verify.query import verify as run_verify
    from rolloutdoctor.commands.verify.words import RENDERERS
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.results.verification import DIFFERS, FOLLOWS

    options = groups.read_options(CheckOptions, source, part)
    run = dumps.opened(paths, source, quiet=quiet)
    check_target(output_file, "--output-file")
    required = [stage.strip() for stage in require.split(",") if stage.strip()]
    with progress_bar(run.unit, quiet=quiet) as progress:
        verification = run_verify(run, options, required, tuple(allow or ()), progress)
    style = opt.style_of(color, to_file=output_file is not None, verbose=False)
    opt.deliver(RENDERERS[format_.value](verification, style), output_file)
    opt.warn_of_partial(run, quiet=quiet)
    if verification.worst() != FOLLOWS:
        raise SystemExit(FINDINGS if verification.worst() == DIFFERS else NOTHING_CHECKED)


def _write_test(target: str, source: groups.Source, function: str, *, quiet: bool) -> None:
    from rolloutdoctor.commands.verify.written import written_test

    check_target(target, "--write")
    layers = opt.layers(source.settings, source.trainer_config)
    write_whole(written_test(source.trainer or "", layers, function).encode(), target)
    if not quiet:
        say(f"wrote {target}; run it with pytest")
