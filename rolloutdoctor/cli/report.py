"""``rolloutdoctor report``."""

from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.commands.convert import ConvertOptions

EPILOG = (
    "The page holds the verdict, the findings with their evidence, plots, tables of steps, the options with the origin "
    "of every value, the skipped rules, and the definition of each number. It needs no network, and no script but for "
    "--groups. "
    "Findings do not change the exit code. "
    "Examples: rolloutdoctor report run.parquet -o report.html; "
    "rolloutdoctor report run.parquet --fix rejected-rows -o report.html"
)


@guarded
@dumps.takes_dumps
def report(
    context: typer.Context,
    paths: opt.Paths,
    dump: "ConvertOptions",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE.html", help="Where to write the page.")],
    trainer: opt.TrainerOption = None,
    settings: opt.SetOption = None,
    trainer_config: opt.TrainerConfigOption = None,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", metavar="NAME[:VARIANT]", help="Draw the plots with and without this fix; repeatable."),
    ] = None,
    steps: opt.StepsOption = None,
    split: opt.SplitOption = None,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.float32,
    groups: Annotated[
        int,
        typer.Option(
            "--groups", metavar="N", min=0, max=200, help="Embed N groups that findings point at, token by token."
        ),
    ] = 0,
    quiet: opt.QuietOption = False,
) -> None:
    """Write a self-contained HTML report of a run."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    if PurePath(output).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output or repr(output)}: a report is a page; name it FILE.html")
    fixes = tuple(choose(text) for text in fix or [])
    step_range = opt.step_range(steps)
    layers = opt.layers(context, settings, trainer_config)
    from rolloutdoctor.cli.progress import progress_bar, slow_work
    from rolloutdoctor.commands.report import page_of

    run = dumps.opened(paths, trainer, dump, quiet=quiet, text=True, logs_alone=True)
    check_target(output)
    options = opt.check_options(trainer, layers, step_range, split, device, dtype)
    with progress_bar(run.unit, quiet=quiet) as progress, slow_work(quiet=quiet) as tell:
        page = page_of(run, options, fixes, progress, tell, groups)
    write_whole(page.encode(), output)
    opt.warn_of_partial(run, quiet=quiet)
