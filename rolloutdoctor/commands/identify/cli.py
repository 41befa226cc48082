"""``rolloutdoctor identify``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, NOTHING_CHECKED, guarded
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say

EPILOG = (
    "Exit codes: 0 identified, 1 the log contradicts the recorded options, 2 usage, unreadable input or internal "
    "error, 3 nothing could be identified. "
    "Examples: rolloutdoctor identify run.parquet; rolloutdoctor identify 'runs/*.parquet' --steps 100:200 "
    "--format json"
)


@guarded
@groups.grouped
def identify(
    *,
    paths: opt.Paths,
    source: groups.Source,
    part: groups.Part,
    format_: Annotated[
        opt.PageFormat, typer.Option("--format", help="Text, or JSON for programs.")
    ] = opt.PageFormat.full,
    output_file: opt.OutputOption = None,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
) -> None:
    """Find the options that produced the logged advantages, KL and loss of a run, whatever it states.

    Tests every configuration of the known trainers, and formulas that no trainer has, against the log, and names the
    options that reproduce all values within float32 rounding.
    """
    from rolloutdoctor.commands.identify.query import identify as find
    from rolloutdoctor.commands.identify.words import RENDERERS
    from rolloutdoctor.engine.options import ReadOptions

    opt.warn_of_device(quiet=quiet)
    options = groups.read_options(ReadOptions, source, part, device="cpu")
    run = dumps.opened(paths, source, quiet=quiet, logs_alone=True)
    check_target(output_file, "--output-file")
    identification = find(run, options)
    style = opt.style_of(color, to_file=output_file is not None, verbose=False)
    opt.deliver(RENDERERS[format_.value](identification, style), output_file)
    opt.warn_of_partial(run, quiet=quiet)
    if identification.nothing_identified:
        first = identification.stages[0]
        how = f": {first.remedy}" if first.remedy else ""
        why = first.reason or "no configuration gives the logged values"
        say(f"nothing was identified: {why}{how}")
        raise SystemExit(NOTHING_CHECKED)
    raise SystemExit(FINDINGS if identification.recorded == "contradicts" else 0)
