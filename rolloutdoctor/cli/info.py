"""``rolloutdoctor info``."""

from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.results.escapes import json_text

if TYPE_CHECKING:
    from rolloutdoctor.commands.info import RunInfo


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
    from rolloutdoctor.commands.info import describe
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.views.structured import as_json

    options = groups.read_options(CheckOptions, source, part)
    run = dumps.opened(paths, source, logs_alone=True)
    check_target(output_file, "--output-file")
    found = describe(run, options)
    style = opt.style_of(opt.Color.never, to_file=output_file is not None, verbose=False)
    text = as_json(found, style) if format_ is opt.PageFormat.json else _as_text(found, style.width)
    opt.deliver(text, output_file)


def _as_text(found: "RunInfo", width: int) -> str:
    from rolloutdoctor.views.style import plain
    from rolloutdoctor.views.wrapping import wrapped

    size = found.input
    lines = [f"{len(found.files)} file{'s' if len(found.files) != 1 else ''}: {', '.join(map(plain, found.files[:5]))}"]
    splits = ", ".join(f"{rows:,} {split}" for split, rows in sorted(found.splits.items()))
    rows = f"{size.rows:,} ({splits}) in {size.groups:,} groups, {size.tokens:,} tokens"
    lines.append(f"rows      {rows if size.rows else 'none: logged metrics without rollouts'}")
    lines.append(
        f"steps     {found.first_step} to {found.last_step}: {size.steps:,} batches (a batch is one step of one split)"
    )
    if found.dropped:
        steps = ", ".join(f"{step} ({plain(split)})" for step, split in found.dropped[:5])
        lines.append(f"left out  {len(found.dropped):,} steps that the recorder could not write in time: {steps}")
    lines.append(f"trainer   {plain(found.trainer or f'not known in full: {found.unstated}', 600)}")
    lines.append(f"tier      {found.tier}: {found.tier_meaning}")
    if found.columns:
        lines.append("\ncolumns")
        lines += [f"  {name:<20} {meaning}" for name, meaning in found.columns.items()]
    if found.metrics:
        lines.append(f"\nlogged metrics\n  {', '.join(map(plain, found.metrics))}")
    if found.config:
        lines.append("\noptions")
        lines += [
            f"  {plain(name)} = {plain(json_text(one.value))}  ({'assumed: ' * one.assumed}{plain(one.origin)})"
            for name, one in found.config.items()
        ]
    lines.append("\ncan be checked")
    lines += [f"  {code} {name}" for code, name in found.runnable] or ["  nothing"]
    if found.not_applicable:
        lines.append("\nnot applicable")
        lines += [f"  {one.code} {one.name}: {one.reason}" for one in found.not_applicable]
    if found.skipped:
        lines.append("\ncannot be checked")
        lines += [f"  {one.code} {one.name}: {one.reason}\n    to run it: {one.remedy}" for one in found.skipped]
    if found.absent:
        lines.append("\nmissing columns that would allow more")
        for how in dict.fromkeys(found.absent.values()):
            names = [name for name, each in found.absent.items() if each == how]
            lines.append(f"  {', '.join(names)}\n    {how}")
    return "\n".join(wrapped("\n".join(lines).split("\n"), width)) + "\n"
