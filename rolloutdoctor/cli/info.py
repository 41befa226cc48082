"""``rolloutdoctor info``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target

if TYPE_CHECKING:
    from rolloutdoctor.commands.info import RunInfo

_MOST = 120
"""Characters of a list of names that are shown."""


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
    from rolloutdoctor.views.style import plain, set_to
    from rolloutdoctor.views.untested import by_reason, by_remedy, named
    from rolloutdoctor.views.wrapping import wrapped

    def some(names: Iterable[str]) -> str:
        shown: list[str] = []
        left = [plain(name) for name in names]
        while left and sum(map(len, shown)) + len(left[0]) < _MOST:
            shown.append(left.pop(0))
        return ", ".join(shown) + (f" and {len(left)} more (--format json has all)" if left else "")

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
    lines += [f"columns   {some(found.columns)}"] * bool(found.columns)
    lines += [f"metrics   {some(found.metrics)}"] * bool(found.metrics)
    by_origin: dict[str, list[str]] = {}
    for name, one in found.config.items():
        origin = f"{'assumed: ' * one.assumed}{one.origin}"
        by_origin.setdefault(plain(origin), []).append(set_to(name, one))
    for origin, values in by_origin.items():
        is_default = origin.startswith("default of ")
        lines.append(f"options   {f'{len(values)} more: {origin}' if is_default else f'{origin}: {some(values)}'}")
    lines.append(f"tested    {named(found.runnable, 1) if found.runnable else 'nothing'}")
    lines += [f"n/a       {rules}: {plain(reason)}" for rules, reason in by_reason(found.not_applicable)]
    remedies = {how: rules for rules, _, how in by_remedy(found.skipped)}
    lines += [f"skipped   {rules}; to run: {plain(how, 300)}" for how, rules in remedies.items()]
    # Without rows all columns are absent, and what would record them is what the rules need.
    absent = found.absent if size.rows else {}
    for how in dict.fromkeys("" if how in remedies else how for how in absent.values()):
        names = (name for name, each in absent.items() if each == how or (not how and each in remedies))
        lines.append(f"absent    {', '.join(names)}{how and ': '}{how}")
    return "\n".join(wrapped("\n".join(lines).split("\n"), width)) + "\n"
