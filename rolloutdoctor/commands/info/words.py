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


def as_text(info: RunInfo, style: Style) -> str:
    """Print what a run holds, and what can be checked of it."""

    def some(names: Iterable[str], most: int = _MOST) -> str:
        shown: list[str] = []
        left = [plain(name) for name in names]
        while left and sum(map(len, shown)) + len(left[0]) < most:
            shown.append(left.pop(0))
        return ", ".join(shown) + (f" and {len(left)} more (--format json has all)" if left else "")

    size = info.input
    lines = [f"{len(info.files)} file{'s' if len(info.files) != 1 else ''}: {', '.join(map(plain, info.files[:5]))}"]
    splits = ", ".join(f"{rows:,} {split}" for split, rows in sorted(info.splits.items()))
    rows = f"{size.rows:,} ({splits}) in {size.groups:,} groups, {size.tokens:,} tokens"
    lines.append(f"rows      {rows if size.rows else 'none: logged metrics without rollouts'}")
    lines.append(
        f"steps     {info.first_step} to {info.last_step}: {size.steps:,} batches (a batch is one step of one split)"
    )
    if info.dropped:
        steps = ", ".join(f"{step} ({plain(split)})" for step, split in info.dropped[:5])
        lines.append(f"left out  {len(info.dropped):,} steps that the recorder could not write in time: {steps}")
    lines.append(f"trainer   {plain(info.trainer or f'not fully stated: {info.unstated}', 600)}")
    lines.append(f"tier      {info.tier}: {info.tier_meaning}")
    lines += [f"columns   {some(info.columns)}"] * bool(info.columns)
    lines += [f"not read  {some(info.unread)}: no column of a run file"] * bool(info.unread)
    lines += [f"metrics   {some(info.metrics)}"] * bool(info.metrics)
    # A log has fewer lines below these; of rows, what one place states is one list.
    most_stated = _MOST if size.rows else _MOST_STATED
    by_origin: dict[tuple[str, str], list[str]] = {}
    for name, stated in info.config.items():
        origin = f"{'assumed: ' * stated.assumed}{stated.origin}"
        by_origin.setdefault(("options", plain(origin)), []).append(set_to(name, stated))
    for setting in info.settings:
        title = "options" if size.rows else "settings"
        by_origin.setdefault((title, plain(setting.origin)), []).append(set_to(setting.name, setting))
    for (title, origin), values in by_origin.items():
        is_default = origin.startswith("default of ")
        listed = some(values, _MOST if origin.startswith("assumed") else most_stated)
        lines.append(f"{title:10}{f'{len(values)} more: {origin}' if is_default else f'{origin}: {listed}'}")
    lines.append(f"testable  {named(info.runnable, 1) if info.runnable else 'nothing'}{_CHECK * bool(info.runnable)}")
    lines += [f"n/a       {rules}: {plain(reason)}" for rules, reason in by_reason(info.not_applicable)]
    lines += [f"skipped   {rules}; to run: {plain(how, 300)}" for rules, _, how in by_remedy(info.skipped)]
    remedies = {skipped.remedy for skipped in info.skipped}
    # Without rows all columns are absent, and what would record them is what the rules need.
    absent = info.absent if size.rows else {}
    if info.agent is not None and size.rows:
        has = [name for name in AGENT_COLUMNS if name not in info.agent]
        lines.append(f"agent     {'trajectory columns: ' if has else 'no trajectory columns'}{', '.join(has)}")
        by_how: dict[str, list[str]] = {}
        for name, how in info.agent.items():
            by_how.setdefault(how, []).append(name)
        lines += [f"agent     no {', '.join(names)}: {how}" for how, names in by_how.items()]
        absent = {name: how for name, how in absent.items() if name not in info.agent}
    for how in dict.fromkeys("" if how in remedies else how for how in absent.values()):
        names = (name for name, each in absent.items() if each == how or (not how and each in remedies))
        lines.append(f"absent    {some(names)}{how and ': '}{how}")
    return "\n".join(wrapped("\n".join(lines).split("\n"), style.width)) + "\n"
