"""``rolloutdoctor why``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import groups, states, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target, write_whole

EPILOG = (
    "Metrics: reward, response_length, entropy, kl, grad_norm (of log-probs), loss, clip_fraction; from a log alone "
    "any that it holds. Lines and remainder sum to the change; docs/compare.md has the order of the lines. "
    "Examples: rolloutdoctor why run.parquet --metric reward --at 160; rolloutdoctor why run.parquet --metric entropy "
    "--at 160 --before 10 --after 10 -o why.png; rolloutdoctor why train.log --metric loss"
)

MetricOption = Annotated[
    str, typer.Option("--metric", metavar="NAME", help="Explain this quantity, or metric of the log.")
]
AtOption = Annotated[
    int | None,
    typer.Option(
        "--at", metavar="STEP", help="First step of the window after; without it: the changes that stand out."
    ),
]
BeforeOption = Annotated[int, typer.Option("--before", metavar="N", min=1, help="Steps of the window before.")]
AfterOption = Annotated[int, typer.Option("--after", metavar="N", min=1, help="Steps of the window after.")]


@guarded
@groups.grouped
def why(
    context: typer.Context,
    *,
    paths: opt.Paths,
    metric: MetricOption = "reward",
    at: AtOption = None,
    before: BeforeOption = 20,
    after: AfterOption = 20,
    source: groups.Source,
    steps: opt.StepsOption = None,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.float32,
    format_: Annotated[opt.DiffFormat, typer.Option("--format", help="Format of the answer.")] = opt.DiffFormat.full,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Also draw it: PNG, SVG or PDF.")
    ] = None,
    output_file: opt.OutputOption = None,
    scale: verdict.Saved,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show parts and rows of every line.")] = False,
) -> None:
    """Explain the change of a metric, in lines that add up to it, each with its rows."""
    from dataclasses import replace

    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.why.query import Question
    from rolloutdoctor.commands.why.query import why as explain
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.views.why import RENDERERS

    question = Question(metric, at, before, after)
    options = groups.read_options(CheckOptions, source, groups.Computed(steps=steps, device=device, dtype=dtype))
    run, executor = states.opened(context, paths, source, scale, quiet=quiet, logs_alone=True)
    check_target(output_file, "--output-file")
    check_target(output)
    form = None
    if output is not None:
        from rolloutdoctor.pictures.table import format_for

        form = format_for(output)
    with progress_bar(run.unit, quiet=quiet, hint=verdict.faster(scale.engine, scale.workers)) as progress:
        explanation = explain(run, options, question, progress, executor)
    style = opt.style_of(color, to_file=output_file is not None, verbose=verbose)
    if output is not None and form is not None:
        from rolloutdoctor.pictures.table import drawn_file, figure_of

        write_whole(drawn_file(figure_of("why", explanation), "why", form), output)
    opt.deliver(RENDERERS[format_.value](explanation, replace(style, quiet=quiet)), output_file, colored=style.color)
    opt.warn_of_partial(run, quiet=quiet)
