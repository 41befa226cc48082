"""``rolloutdoctor measure``."""

from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.terminal import say

if TYPE_CHECKING:
    from rolloutdoctor.commands.convert import ConvertOptions

EPILOG = (
    "Writes rows.parquet (one line a response), tokens.parquet (a sample of the tokens), metrics.parquet (logged "
    "against recomputed) and _measured.json; docs/tables.md lists the columns. check DIR and merge DIR... judge such "
    "folders without reading the run again. "
    "Examples: rolloutdoctor measure run.parquet -o tables/; rolloutdoctor check tables/"
)


@guarded
@dumps.takes_dumps
def measure(
    context: typer.Context,
    paths: opt.Paths,
    dump: "ConvertOptions",
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIR", help="Write the tables to this folder.", show_default=False),
    ],
    trainer: opt.TrainerOption = None,
    settings: opt.SetOption = None,
    trainer_config: opt.TrainerConfigOption = None,
    fix: opt.CompareFixOption = None,
    steps: opt.StepsOption = None,
    split: opt.SplitOption = None,
    device: opt.DeviceOption = opt.Device.auto,
    dtype: opt.DtypeOption = opt.Dtype.float32,
    quiet: opt.QuietOption = False,
) -> None:
    """Measure a run into tables of rows, tokens and metrics."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    fixes = tuple(choose(text) for text in fix or [])
    step_range = opt.step_range(steps)
    layers = opt.layers(context, settings, trainer_config)
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.measure import measure as run_measure
    from rolloutdoctor.commands.measure import prepare_folder
    from rolloutdoctor.engine.options import CheckOptions

    run = dumps.opened(paths, trainer, dump, quiet=quiet)
    prepare_folder(output, run)
    options = CheckOptions(
        trainer=trainer,
        layers=layers,
        steps=step_range,
        split=split.value if split else None,
        device=device.value,
        dtype=dtype.value,
    )
    with progress_bar(run.unit, quiet=quiet) as progress:
        measured = run_measure(run, options, fixes, progress)
    measured.write(output)
    opt.warn_of_partial(run, quiet=quiet)
    if not quiet:
        say(f"wrote {len(measured.rows):,} rows, {len(measured.tokens):,} tokens and {len(measured.metrics):,} metrics")
