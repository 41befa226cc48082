"""``rolloutdoctor identify``."""

from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, NOTHING_CHECKED, guarded
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say

if TYPE_CHECKING:
    from rolloutdoctor.commands.convert import ConvertOptions

EPILOG = (
    "Exit codes: 0 identified, 1 the log contradicts the recorded options, 2 usage, unreadable input or internal "
    "error, 3 nothing could be identified. "
    "Examples: rolloutdoctor identify run.parquet; rolloutdoctor identify 'runs/*.parquet' --steps 100:200 "
    "--format json"
)


@guarded
@dumps.takes_dumps
def identify(
    context: typer.Context,
    paths: opt.Paths,
    dump: "ConvertOptions",
    trainer: opt.TrainerOption = None,
    settings: opt.SetOption = None,
    trainer_config: opt.TrainerConfigOption = None,
    steps: opt.StepsOption = None,
    split: opt.SplitOption = None,
    format_: Annotated[
        opt.PageFormat, typer.Option("--format", help="Text, or JSON for programs.")
    ] = opt.PageFormat.full,
    output_file: opt.OutputOption = None,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
) -> None:
    """Find out which objective made the logged advantages, KL and loss of a run, whatever its options say.

    Every configuration of the known trainers is tested against the log, and recipes that none of them has. What gives
    all values within float32 rounding is named, with the options that state it.
    """
    step_range = opt.step_range(steps)
    layers = opt.layers(context, settings, trainer_config)
    from rolloutdoctor.commands.identify import identify as find
    from rolloutdoctor.engine.options import ReadOptions
    from rolloutdoctor.views.identification import RENDERERS

    run = dumps.opened(paths, trainer, dump, quiet=quiet, logs_alone=True)
    check_target(output_file, "--output-file")
    options = ReadOptions(
        trainer=trainer, layers=layers, steps=step_range, split=split.value if split else None, device="cpu"
    )
    found = find(run, options)
    style = opt.style_of(color, to_file=output_file is not None, verbose=False)
    opt.deliver(RENDERERS[format_.value](found, style), output_file)
    opt.warn_of_partial(run, quiet=quiet)
    if found.nothing_identified:
        first = found.stages[0]
        how = f": {first.remedy}" if first.remedy else ""
        why = first.reason or "no configuration gives the logged values"
        say(f"nothing was identified: {why}{how}")
        raise SystemExit(NOTHING_CHECKED)
    raise SystemExit(FINDINGS if found.recorded == "contradicts" else 0)
