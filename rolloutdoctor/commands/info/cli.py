"""``rolloutdoctor info``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target


@guarded
@groups.grouped
def info(
    *,
    paths: opt.Paths,
    source: groups.Source,
    part: groups.Part,
    format_: Annotated[
        opt.PageFormat, typer.Option("--format", help="Text, or JSON for programs.")
    ] = opt.PageFormat.full,
    output_file: opt.OutputOption = None,
) -> None:
    """Show what a run contains, which rules can run, and what to record for the others."""
    from rolloutdoctor.commands.info.query import describe
    from rolloutdoctor.commands.info.words import as_text
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.views.structured import as_json

    options = groups.read_options(CheckOptions, source, part)
    run = dumps.opened(paths, source, logs_alone=True, says_notes=format_ is opt.PageFormat.full)
    check_target(output_file, "--output-file")
    info = describe(run, options)
    style = opt.style_of(opt.Color.never, to_file=output_file is not None, verbose=False)
    text = as_json(info, style) if format_ is opt.PageFormat.json else as_text(info, style)
    opt.deliver(text, output_file)
