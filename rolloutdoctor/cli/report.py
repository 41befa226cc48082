"""``rolloutdoctor report``."""

import inspect
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.border import guarded
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.commands.convert import ConvertOptions

EPILOG = (
    "The page holds the verdict, the findings with their evidence, plots, a table of steps, the configuration with the "
    "origin of every value, the skipped rules, and the definition of each number. It needs no network and no script. "
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
    kernel: opt.KernelOption = opt.Kernel.torch,
    quiet: opt.QuietOption = False,
) -> None:
    """Write a self-contained HTML report of a run."""
    from rolloutdoctor.hypotheses.fixes import choose

    if PurePath(output).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output or repr(output)}: a report is a page; name it FILE.html")
    fixes = tuple(choose(text) for text in fix or [])
    step_range = opt.step_range(steps)
    layers = opt.layers(context, settings, trainer_config)
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.plot import check_and_draw
    from rolloutdoctor.report.html import Drawing, Page, render
    from rolloutdoctor.report.plots.inline import inline_svg
    from rolloutdoctor.report.plots.style import words_alone
    from rolloutdoctor.report.plots.table import PICTURES, figure_of
    from rolloutdoctor.results.figures import KINDS
    from rolloutdoctor.rules.table import RULES

    run = dumps.opened(paths, trainer, dump, quiet=quiet)
    check_target(output)
    options = opt.check_options(trainer, layers, step_range, split, device, dtype, kernel)
    with progress_bar(run.rows, quiet=quiet) as progress:
        found, gallery = check_and_draw(run, KINDS, options, fixes, progress)
    drawings = []
    for kind, data in gallery.drawn.items():
        title = PICTURES[kind].title(data)
        figure = figure_of(kind, data)
        note, nothing = figure.get_supxlabel().replace("\n", " "), words_alone(figure)
        svg = inline_svg(figure, kind, f"{kind}: {title}") if nothing is None else None
        drawings.append(Drawing(kind, title, nothing or note, svg))
    names = [PurePath(name).name for name in run.files]
    page = Page(
        name=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more",
        report=found,
        drawings=drawings,
        gallery=gallery,
        definitions={rule.code: inspect.getdoc(type(rule)) or "" for rule in RULES},
    )
    write_whole(render(page).encode(), output)
    opt.warn_of_partial(run, quiet=quiet)
