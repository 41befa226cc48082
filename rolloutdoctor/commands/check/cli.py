"""``rolloutdoctor check``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import complete, dumps, groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.commands.check import baseline as base
from rolloutdoctor.commands.check.each_cli import check_several, runs_at
from rolloutdoctor.commands.check.listing import list_rule, one_rule
from rolloutdoctor.commands.follow import cli as following
from rolloutdoctor.commands.merge.cli import judge_saved
from rolloutdoctor.results.errors import SeveralRunsError, UsageError

if TYPE_CHECKING:
    from rolloutdoctor.engine.state_file import SavedState
    from rolloutdoctor.results.findings import Report

EPILOG = (
    "Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 usage, unreadable input or internal error, "
    "3 no rule could be tested, or one of --require was skipped. "
    "Examples: rolloutdoctor check run.parquet; rolloutdoctor check 'runs/*.parquet' --trainer verl@0.9.1 "
    "--set algorithm.adv_estimator=rloo --steps 100:200 --format json"
)


@guarded
@groups.grouped
def check(
    context: typer.Context,
    *,
    paths: opt.Paths,
    source: groups.Source,
    fix: opt.FixOption = None,
    select: verdict.SelectOption = None,
    ignore: verdict.IgnoreOption = None,
    require: verdict.RequireOption = None,
    part: groups.Computed,
    format_: verdict.FormatOption = opt.Format.full,
    output_file: opt.OutputOption = None,
    fail_on: verdict.FailOnOption = opt.FailOn.error,
    exit_zero: verdict.ExitZeroOption = False,
    each: Annotated[
        bool, typer.Option("--each", help="Check several runs: one line for each, with its worst finding.")
    ] = False,
    list_: Annotated[
        str | None,
        typer.Option(
            "--list",
            metavar="CODE",
            help="List every row, group or step that this rule points at, and nothing else.",
            autocompletion=complete.codes,
        ),
    ] = None,
    workers: verdict.WorkersOption = 1,
    engine: verdict.EngineOption = None,
    state_dir: verdict.StateDirOption = None,
    save_state: Annotated[
        str | None,
        typer.Option("--save-state", metavar="FILE", help="Also save the state of this check, for merge."),
    ] = None,
    follow: following.FollowOption = False,
    state_file: following.StateOption = None,
    on_finding: following.OnFindingOption = None,
    until_idle: following.UntilIdleOption = None,
    every: following.EveryOption = None,
    baseline: base.BaselineOption = None,
    write_baseline: base.WriteBaselineOption = None,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show measures, places, options and histograms.")
    ] = False,
) -> None:
    """Run the rules on a run and print the findings."""
    # Histograms take one process, and are not part of a state.
    draws = verbose and format_ is opt.Format.full and workers == 1 and engine is None and save_state is None
    from rolloutdoctor.engine.state_file import is_measured
    from rolloutdoctor.results.findings import Severity
    from rolloutdoctor.rules.table import pick
    from rolloutdoctor.search.hypotheses.fixes import choose

    if any(map(is_measured, paths)):
        _refuse_beside(f"{paths[0]} holds measured tables, and the options they were measured with", _unused(context))
        raise SystemExit(
            judge_saved(
                paths,
                select=select,
                ignore=ignore,
                require=require,
                format_=format_,
                output_file=output_file,
                fail_on=fail_on,
                exit_zero=exit_zero,
                color=color,
                quiet=quiet,
                verbose=verbose,
            )
        )
    where = verdict.executor(engine, workers, state_dir)
    rules = pick(verdict.words(select), verdict.words(ignore))
    must_test = verdict.required(require, rules)
    from rolloutdoctor.engine.options import CheckOptions

    options = groups.read_options(CheckOptions, source, part, rules=rules)
    from rolloutdoctor.cli.output import check_target, write_whole
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.engine.check import check_in_parts
    from rolloutdoctor.results.figures import Gallery
    from rolloutdoctor.views.table import RENDERERS

    _refuse_beside(
        "--each checks one run after the other" if each else "--list prints the places of one rule" if list_ else "",
        {
            "--follow": follow,
            "--save-state": save_state is not None,
            "--workers": workers > 1,
            "--engine": engine is not None,
            "--baseline": baseline is not None,
            "--write-baseline": write_baseline is not None,
            "--list": each and list_ is not None,
        },
    )
    if not follow:
        following.refuse_unless_followed(state=state_file, on_finding=on_finding, until_idle=until_idle, every=every)
    elif workers > 1 or engine is not None:
        raise UsageError("--follow takes one process; leave --workers and --engine out")
    alone = list_ or save_state or engine or baseline or write_baseline or workers > 1
    try:
        run = None
        if not follow and not each:
            says_notes = list_ is not None or format_ in _WITHOUT_NOTES
            run = dumps.opened(paths, source, quiet=quiet, text=True, logs_alone=True, says_notes=says_notes)
    except SeveralRunsError as error:
        from rolloutdoctor.commands.check.several import RENDERERS as FORMATS

        if alone or format_.value not in FORMATS or not 2 <= len(runs_at(paths, source.dump)) <= _MOST_RUNS:
            raise
        run, each = None, True
        if not quiet:
            say(f"{str(error).partition(';')[0]}: one line for each run")
    options = replace(options, fixes=tuple(choose(text) for text in fix or []))
    fails = None if fail_on is opt.FailOn.never else Severity[fail_on.value.upper()]
    style = replace(opt.style_of(color, to_file=output_file is not None, verbose=verbose), fail_at=fails, quiet=quiet)
    if each:
        code = check_several(
            paths,
            source,
            options,
            format_=format_,
            output_file=output_file,
            fail_on=fail_on,
            exit_zero=exit_zero,
            must_test=must_test,
            style=style,
        )
        raise SystemExit(code)
    if list_ is not None and run is not None:
        raise SystemExit(list_rule(run, one_rule(list_), options, format_, output_file))
    check_target(output_file, "--output-file")
    check_target(save_state)
    check_target(write_baseline)
    known = () if baseline is None else base.read(baseline)

    def finish(report: "Report", gallery: Gallery | None = None) -> int:
        report, new = base.compared_with_baseline(report, known)
        text = RENDERERS[format_.value](report, style)
        if gallery is not None:
            from rolloutdoctor.views.histogram import histograms

            text += histograms(gallery, style)
        opt.deliver(text, output_file, colored=style.color)
        if write_baseline is not None:
            write_whole(base.written(report), write_baseline)
        return verdict.exit_code(new, fail_on, exit_zero=exit_zero, must_test=must_test)

    if run is None:
        reads = format_ not in (opt.Format.full, opt.Format.concise) and output_file is None
        how = following.FollowOptions(state_file, on_finding, until_idle, every, lines_on_stderr=reads, quiet=quiet)
        report, kept = following.follow(paths, replace(source.dump, text=True), options, how, finish)
        if save_state is not None and kept.saved is not None:
            _save(kept.saved, save_state)
        raise SystemExit(finish(report))
    with progress_bar(run.unit, quiet=quiet, hint=verdict.faster(engine, workers)) as progress:
        # A log alone has no rows to draw.
        if draws and not run.metrics_only:
            from rolloutdoctor.commands.plot.query import check_and_draw

            report, gallery = check_and_draw(run, ("advantages", "kl", "ratio"), options, progress=progress)
        else:
            checked = check_in_parts(run, options, progress, where)
            report, gallery = checked.report, Gallery({}, {})
            if save_state is not None:
                from rolloutdoctor.engine.merged import saved_state

                _save(saved_state(checked.prepared, checked.state), save_state)
    code = finish(report, gallery)
    opt.warn_of_partial(run, quiet=quiet)
    raise SystemExit(code)


def _save(saved: "SavedState", path: str) -> None:
    from rolloutdoctor.cli.output import write_whole
    from rolloutdoctor.engine.stored import members_of
    from rolloutdoctor.io.archives import archived

    write_whole(archived(members_of(saved)), path)


_MOST_RUNS = 50
"""Runs of a project that are checked though nobody asked for each."""

_WITHOUT_NOTES = (opt.Format.concise, opt.Format.junit, opt.Format.github)
"""Formats with a place for rules alone: what readers noted goes to stderr."""

_OF_MEASURED = frozenset(
    {
        "paths",
        "select",
        "ignore",
        "require",
        "format_",
        "output_file",
        "fail_on",
        "exit_zero",
        "color",
        "quiet",
        "verbose",
    }
)
"""Options that judge what was measured."""


def _unused(context: typer.Context) -> dict[str, bool]:
    """Options that judging what was measured does not use, and whether they are on the command line."""
    others = [option for option in context.command.params if option.name not in _OF_MEASURED]
    sources = {option.opts[0]: context.get_parameter_source(option.name or "") for option in others}
    return {name: source is not None and source.name == "COMMANDLINE" for name, source in sources.items()}


def _refuse_beside(what: str, given: Mapping[str, bool]) -> None:
    """Refuse options that say nothing beside another one.

    Raises:
        UsageError: if one of them is given.
    """
    names = [name for name, is_given in given.items() if is_given]
    if what and names:
        raise UsageError(f"{what}: leave {' and '.join(names)} out")
