"""`RunInfo` as text."""

from collections.abc import Iterable

from rolloutdoctor.commands.info.agents import AGENT_COLUMNS
from rolloutdoctor.results.run_info import RunInfo
from rolloutdoctor.views.style import Style, plain, set_to
from rolloutdoctor.views.untested import by_reason, by_remedy, named
from rolloutdoctor.views.wrapping import wrapped

_CHECK = ", if there is enough data"
"""Why `check` counts fewer."""

_MOST, _MOST_STATED = 120, 480
"""Characters of a list of names that are shown, and of one of values that a log states."""


def as_text(found: RunInfo, style: Style) -> str:
    """Print what a run holds, and what can be checked of it."""

    def some(names: Iterable[str], most: int = _MOST) -> str:
        shown: list[str] = []
        left = [plain(name) for name in names]
        while left and sum(map(len, shown)) + len(left[0]) < most:
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
    lines.append(f"trainer   {plain(found.trainer or f'not fully stated: {found.unstated}', 600)}")
    lines.append(f"tier      {found.tier}: {found.tier_meaning}")
    lines += [f"columns   {some(found.columns)}"] * bool(found.columns)
    lines += [f"not read  {some(found.unread)}: no column of a run file"] * bool(found.unread)
    lines += [f"metrics   {some(found.metrics)}"] * bool(found.metrics)
    # A log has fewer lines below these; of rows, what one place states is one list.
    most_stated = _MOST if size.rows else _MOST_STATED
    by_origin: dict[tuple[str, str], list[str]] = {}
    for name, one in found.config.items():
        origin = f"{'assumed: ' * one.assumed}{one.origin}"
        by_origin.setdefault(("options", plain(origin)), []).append(set_to(name, one))
    for setting in found.settings:
        title = "options" if size.rows else "settings"
        by_origin.setdefault((title, plain(setting.origin)), []).append(set_to(setting.name, setting))
    for (title, origin), values in by_origin.items():
        is_default = origin.startswith("default of ")
        listed = some(values, _MOST if origin.startswith("assumed") else most_stated)
        lines.append(f"{title:10}{f'{len(values)} more: {origin}' if is_default else f'{origin}: {listed}'}")
    lines.append(
        f"testable  {named(found.runnable, 1) if found.runnable else 'nothing'}{_CHECK * bool(found.runnable)}"
    )
    lines += [f"n/a       {rules}: {plain(reason)}" for rules, reason in by_reason(found.not_applicable)]
    lines += [f"skipped   {rules}; to run: {plain(how, 300)}" for rules, _, how in by_remedy(found.skipped)]
    remedies = {one.remedy for one in found.skipped}
    # Without rows all columns are absent, and what would record them is what the rules need.
    absent = found.absent if size.rows else {}
    if found.agent is not None and size.rows:
        has = [name for name in AGENT_COLUMNS if name not in found.agent]
        lines.append(f"agent     {'trajectory columns: ' if has else 'no trajectory columns'}{', '.join(has)}")
        by_how: dict[str, list[str]] = {}
        for name, how in found.agent.items():
            by_how.setdefault(how, []).append(name)
        lines += [f"agent     no {', '.join(names)}: {how}" for how, names in by_how.items()]
        absent = {name: how for name, how in absent.items() if name not in found.agent}
    for how in dict.fromkeys("" if how in remedies else how for how in absent.values()):
        names = (name for name, each in absent.items() if each == how or (not how and each in remedies))
        lines.append(f"absent    {some(names)}{how and ': '}{how}")
    return "\n".join(wrapped("\n".join(lines).split("\n"), style.width)) + "\n"
