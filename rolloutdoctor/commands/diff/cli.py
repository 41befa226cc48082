"""``rolloutdoctor diff``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import groups, states, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, guarded
from rolloutdoctor.cli.output import check_target

if TYPE_CHECKING:
    from rolloutdoctor.commands.diff.sides import DiffOptions

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


@dataclass(frozen=True, kw_only=True)
class Versus:
    """Options about what a run is compared with."""

    fix: opt.CompareFixOption = None
    all_fixes: Annotated[
        bool,
        typer.Option(
            "--all-fixes", help="Compare with every fix in each variant, each by itself, in one table: the default."
        ),
    ] = False
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="KEY=VALUE", help="Compare with this trainer option; repeatable."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Places:
    """Options about which rows and tokens the numbers are of, and which are left out."""

    by: Annotated[opt.Parts | None, typer.Option("--by", help="Break the numbers down by this.")] = None
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="ROWS",
            help="Leave out rows: SAMPLE, STEP/GROUP/SAMPLE, or a file of them; repeatable.",
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            metavar="N",
            min=0,
            help="With --fix, --against or --without: list so many groups (default: 3). Alone: leave out the N rows of "
            "each step that carry most of the gradient.",
        ),
    ] = None
    top_tokens: Annotated[
        int,
        typer.Option(
            "--top-tokens",
            metavar="N",
            min=0,
            help="Leave out the N tokens of each step that carry most of the gradient.",
        ),
    ] = 0
    afresh: Annotated[bool, typer.Option("--afresh", help="Recompute advantages and denominators without them.")] = (
        False
    )
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Do not read the prompts and responses of these groups.")
    ] = False


@guarded
@groups.grouped
def diff(
    context: typer.Context,
    *,
    paths: opt.Paths,
    versus: Versus,
    source: groups.Source,
    places: Places,
    part: OneSplit,
    format_: Annotated[
        opt.DiffFormat, typer.Option("--format", help="Format of the comparison.")
    ] = opt.DiffFormat.full,
    output_file: opt.OutputOption = None,
    scale: verdict.Saved,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every option and its origin.")] = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
) -> None:
    """Compare a run with and without fixes, rows or tokens, or under other trainer options."""
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.diff.formats import RENDERERS
    from rolloutdoctor.commands.diff.query import diff as run_diff

    options = _options(versus, places, source, part, full=format_ is opt.DiffFormat.full)
    run, executor = states.opened(context, paths, source, scale, quiet=quiet, text=options.top > 0 and options.text)
    check_target(output_file, "--output-file")
    with progress_bar(run.unit, quiet=quiet, hint=verdict.faster(scale.engine, scale.workers)) as progress:
        result = run_diff(run, options, progress, executor)
    style = opt.style_of(color, to_file=output_file is not None, verbose=verbose)
    opt.deliver(RENDERERS[format_.value](result, style), output_file, colored=style.color)
    opt.warn_of_partial(run, quiet=quiet)
    if exit_code and result.differs:
        raise SystemExit(FINDINGS)


def _options(versus: Versus, places: Places, source: groups.Source, part: OneSplit, *, full: bool) -> "DiffOptions":
    """Read the options; without any, every fix is compared."""
    from rolloutdoctor.commands.diff.ablation import LeftOut, read_names
    from rolloutdoctor.commands.diff.sides import DiffOptions
    from rolloutdoctor.search.hypotheses.fixes import choose

    top, against = places.top, tuple(versus.against or ())
    is_alone = not (versus.fix or against or places.without or versus.all_fixes)
    all_fixes = versus.all_fixes or (is_alone and not top and not places.top_tokens)
    is_alone = is_alone and not all_fixes
    top = 0 if all_fixes and top is None else top
    heaviest, top = (top or 0, 3) if is_alone else (0, 3 if top is None else top)
    return groups.read_options(
        DiffOptions,
        source,
        part,
        fixes=tuple(choose(text) for text in versus.fix or []),
        all_fixes=all_fixes,
        against=against,
        by=places.by.value if places.by else None,
        top=top,
        text=not places.no_text,
        distribution=full and not all_fixes,
        without=LeftOut(read_names(tuple(places.without or ())), heaviest, places.top_tokens, places.afresh),
    )
