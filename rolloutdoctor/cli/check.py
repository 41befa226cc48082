"""``rolloutdoctor check``."""

from dataclasses import replace
from typing import Annotated

import typer

from rolloutdoctor.cli import dumps
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.border import FINDINGS, NOTHING_CHECKED, guarded

EPILOG = (
    "Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 usage, unreadable input or internal error, "
    "3 nothing could be checked. "
    "Examples: rolloutdoctor check run.parquet; rolloutdoctor check 'runs/*.parquet' --trainer verl@0.9.1 "
    "--set algorithm.adv_estimator=rloo --steps 100:200 --format json"
)


@guarded
def check(
    context: typer.Context,
    paths: opt.Paths,
    trainer: opt.TrainerOption = None,
    settings: opt.SetOption = None,
    trainer_config: opt.TrainerConfigOption = None,
    fix: opt.FixOption = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="CODE", envvar="ROLLOUTDOCTOR_SELECT", help="Only these rules or families."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", envvar="ROLLOUTDOCTOR_IGNORE", help="Not these rules or families."),
    ] = None,
    importer: dumps.FromOption = None,
    columns: dumps.MapOption = None,
    map_file: dumps.MapFileOption = None,
    allow_pickle: dumps.AllowPickleOption = False,
    steps: opt.StepsOption = None,
    split: opt.SplitOption = None,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.float32,
    format_: Annotated[
        opt.Format, typer.Option("--format", envvar="ROLLOUTDOCTOR_FORMAT", help="Format of the report.")
    ] = opt.Format.full,
    output_file: opt.OutputOption = None,
    fail_on: Annotated[
        opt.FailOn,
        typer.Option("--fail-on", envvar="ROLLOUTDOCTOR_FAIL_ON", help="Lowest severity that makes the exit code 1."),
    ] = opt.FailOn.error,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", envvar="ROLLOUTDOCTOR_EXIT_ZERO", help="Findings never change the exit code.")
    ] = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All examples, references and histograms.")] = False,
) -> None:
    """Run the rules on a run, and print what they found."""
    from rolloutdoctor.findings import Severity
    from rolloutdoctor.fixes import choose
    from rolloutdoctor.rules.table import pick

    rules = pick(_words(select), _words(ignore))
    step_range = opt.step_range(steps)
    layers = opt.layers(context, settings, trainer_config)
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.engine.check import CheckOptions
    from rolloutdoctor.engine.check import check as run_check
    from rolloutdoctor.engine.pictures import check_and_draw
    from rolloutdoctor.pictures import Gallery
    from rolloutdoctor.report.histogram import histograms
    from rolloutdoctor.report.table import RENDERERS

    dump = dumps.convert_options(importer, columns, map_file, allow_pickle=allow_pickle)
    run = dumps.opened(paths, trainer, dump, quiet=quiet)
    options = CheckOptions(
        rules=rules,
        trainer=trainer,
        layers=layers,
        fixes=tuple(choose(text) for text in fix or []),
        steps=step_range,
        split=split.value if split else None,
        device=device.value,
        dtype=dtype.value,
    )
    with progress_bar(run.rows, quiet=quiet) as progress:
        if verbose and format_ is opt.Format.full:
            report, gallery = check_and_draw(run, ("advantages", "kl", "ratio"), options, progress=progress)
        else:
            report, gallery = run_check(run, options, progress), Gallery({}, {})
    fails = None if fail_on is opt.FailOn.never else Severity[fail_on.value.upper()]
    style = replace(opt.style_of(color, to_file=output_file is not None, verbose=verbose), fail_at=fails)
    opt.deliver(RENDERERS[format_.value](report, style) + histograms(gallery, style), output_file)
    opt.warn_of_partial(run, quiet=quiet)
    raise typer.Exit(_exit_code(report.worst(), report.nothing_checked, fail_on, exit_zero))


def _words(texts: list[str] | None) -> list[str]:
    """Codes may be repeated, or separated by commas."""
    return [word for text in texts or [] for word in text.replace(",", " ").split()]


def _exit_code(worst: int | None, nothing_checked: bool, fail_on: opt.FailOn, exit_zero: bool) -> int:
    from rolloutdoctor.findings import Severity

    if nothing_checked:
        return NOTHING_CHECKED
    if exit_zero or fail_on is opt.FailOn.never or worst is None:
        return 0
    return FINDINGS if worst >= Severity[fail_on.value.upper()] else 0
