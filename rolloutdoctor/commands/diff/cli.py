"""``rolloutdoctor diff``."""

from dataclasses import dataclass
from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, guarded
from rolloutdoctor.cli.output import check_target

EPILOG = (
    "Exit codes: 0, with --exit-code 1 if anything differs; 2 usage, unreadable input or internal error. "
    "Examples: rolloutdoctor diff run.parquet --fix zero-std; rolloutdoctor diff run.parquet --fix zero-std "
    "--fix rejected-rows --by reward; rolloutdoctor diff run.parquet --against beta=0 --format markdown; "
    "rolloutdoctor diff run.parquet --steps 46:47 --top 8; rolloutdoctor diff run.parquet --all-fixes"
)


@dataclass(frozen=True, kw_only=True)
class OneSplit(groups.Computed):
    """The same of one split."""

    split: Annotated[
        opt.Split,
        typer.Option(
            "--split", envvar="ROLLOUTDOCTOR_SPLIT", help="Training or evaluation rows; they are never mixed."
        ),
    ] = opt.Split.train


@guarded
@groups.grouped
def diff(
    *,
    paths: opt.Paths,
    fix: opt.CompareFixOption = None,
    all_fixes: Annotated[
        bool,
        typer.Option(
            "--all-fixes", help="Compare with every fix in each variant, each by itself, in one table: the default."
        ),
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="KEY=VALUE", help="Compare with this trainer option; repeatable."),
    ] = None,
    source: groups.Source,
    by: Annotated[opt.Parts | None, typer.Option("--by", help="Break the numbers down by this.")] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="ROWS",
            help="Leave out rows: SAMPLE, STEP/GROUP/SAMPLE, or a file of them; repeatable.",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            metavar="N",
            min=0,
            help="With --fix, --against or --without: list so many groups (default: 3). Alone: leave out the N rows of "
            "each step that carry most of the gradient.",
        ),
    ] = None,
    top_tokens: Annotated[
        int,
        typer.Option(
            "--top-tokens",
            metavar="N",
            min=0,
            help="Leave out the N tokens of each step that carry most of the gradient.",
        ),
    ] = 0,
    afresh: Annotated[
        bool, typer.Option("--afresh", help="Recompute advantages and denominators without them.")
    ] = False,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Do not read the prompts and responses of these groups.")
    ] = False,
    part: OneSplit,
    format_: Annotated[
        opt.DiffFormat, typer.Option("--format", help="Format of the comparison.")
    ] = opt.DiffFormat.full,
    output_file: opt.OutputOption = None,
    workers: verdict.WorkersOption = 1,
    engine: verdict.EngineOption = None,
    state_dir: verdict.StateDirOption = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every option and its origin.")] = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
) -> None:
    """Compare a run with and without fixes, rows or tokens, or under other trainer options."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    is_alone = not (fix or against or without or all_fixes)
    all_fixes = all_fixes or (is_alone and not top and not top_tokens)
    is_alone = is_alone and not all_fixes
    top = 0 if all_fixes and top is None else top
    heaviest, top = (top or 0, 3) if is_alone else (0, 3 if top is None else top)
    where = verdict.executor(engine, workers, state_dir)
    fixes = tuple(choose(text) for text in fix or [])
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.diff.formats import RENDERERS
    from rolloutdoctor.commands.diff.parts import DiffOptions
    from rolloutdoctor.commands.diff.query import diff as run_diff
    from rolloutdoctor.commands.diff.without import LeftOut, read_names

    options = groups.read_options(
        DiffOptions,
        source,
        part,
        fixes=fixes,
        all_fixes=all_fixes,
        against=tuple(against or ()),
        by=by.value if by else None,
        top=top,
        text=not no_text,
        distribution=format_ is opt.DiffFormat.full and not all_fixes,
        without=LeftOut(read_names(tuple(without or ())), heaviest, top_tokens, afresh),
    )
    run = dumps.opened(paths, source, quiet=quiet, text=top > 0 and not no_text)
    check_target(output_file, "--output-file")
    with progress_bar(run.unit, quiet=quiet, hint=verdict.faster(engine, workers)) as progress:
        result = run_diff(run, options, progress, where)
    style = opt.style_of(color, to_file=output_file is not None, verbose=verbose)
    opt.deliver(RENDERERS[format_.value](result, style), output_file, colored=style.color)
    opt.warn_of_partial(run, quiet=quiet)
    if exit_code and result.differs:
        raise SystemExit(FINDINGS)
