"""Pieces of text that every view for people shares: the header, the options with their origins, hanging lines."""

import io
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rolloutdoctor.results.escapes import visible_lines
from rolloutdoctor.results.findings import RunResult
from rolloutdoctor.views.style import Style, plain, set_to

_MOST_LIKELY = 3
"""Trainers with the names of a log that are named; more say that its names say nothing."""


_MOST_UNKNOWN = 12
"""Names of options that are listed for people; the JSON has all of them."""


def as_sentence(words: str) -> str:
    """Begin with a capital, unless the first word is the name of a metric.

    >>> as_sentence("entropy is NaN"), as_sentence("grad_norm is NaN"), as_sentence("kl is NaN")
    ('Entropy is NaN', 'grad_norm is NaN', 'kl is NaN')
    """
    first = words.partition(" ")[0]
    is_name = first == "kl" or any(mark in first for mark in "_/.@")
    return words if is_name else words[:1].upper() + words[1:]


class _EscapingConsole(Console):
    """A console whose only escape sequences are its own colours: what came with the text is shown."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible_lines(segment.text))


def as_text(parts: Iterable[RenderableType], style: Style) -> str:
    """Print the parts one under the other, with escape sequences if `style.color`."""
    console = _EscapingConsole(
        file=io.StringIO(),
        width=style.width,
        force_terminal=style.color,
        color_system="standard" if style.color else None,
        no_color=not style.color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        # Or it would display each part in a notebook by itself, and leave no text.
        force_jupyter=False,
    )
    for part in parts:
        console.print(part)
    text = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    lines = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    return lines if style.unicode else lines.encode("ascii", "replace").decode()


def header(subject: RunResult) -> Text:
    """Version, trainer, size of the input, device and dtype."""
    size = subject.input
    rows = (
        f"{many(size.rows, 'row')} in {many(size.groups, 'group')}, {many(size.steps, 'step')}, "
        f"{many(size.tokens, 'token')}   {subject.device} {subject.dtype}"
    )
    alone = f"{many(size.steps, 'step')} logged, no rollouts" if size.steps else "no step was read"
    words = f"{plain(made_by(subject))}   {rows if size.rows else alone}"
    return Text.assemble((f"rolloutdoctor {subject.version}", "bold"), f"   {words}")


def made_by(subject: RunResult) -> str:
    """Say who made a run: as it says, or whose names its log has.

    >>> from rolloutdoctor.results.findings import InputSummary, Report
    >>> made_by(Report("0.1.0", "cpu", "float32", InputSummary(), likely_trainers=("trl", "ms-swift")))
    'trl or ms-swift (inferred from metric names)'
    """
    if subject.trainer:
        return f"{subject.trainer} {subject.trainer_version or ''}".rstrip()
    likely: tuple[str, ...] = getattr(subject, "likely_trainers", ())
    return (
        f"{' or '.join(likely)} (inferred from metric names)" if 0 < len(likely) <= _MOST_LIKELY else "trainer unknown"
    )


def many(count: int, noun: str) -> str:
    """A count with its noun.

    >>> many(1, "row"), many(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def assumptions(subject: RunResult) -> Iterator[tuple[str, str]]:
    """Yield what nobody stated and was assumed, or taken from the log: a title and words for each origin.

    Before these come the names of options that are not understood, where the release was not read.
    """
    yield from _unknown(subject)
    by_origin: dict[tuple[str, str], list[str]] = {}
    for name, setting in subject.config.items():
        if setting.assumed:
            by_origin.setdefault(("assumed", setting.origin), []).append(set_to(name, setting))
        elif setting.origin.startswith("identified"):
            by_origin.setdefault(("options", setting.origin), []).append(set_to(name, setting))
    for (title, origin), values in by_origin.items():
        yield title, f"{plain(origin)}: {', '.join(values)}"


def _unknown(subject: RunResult) -> Iterator[tuple[str, str]]:
    """Yield the names of options that are not understood, where the release was not read."""
    unknown: tuple[str, ...] = getattr(subject, "unknown_options", ()) if getattr(subject, "unread_release", "") else ()
    if unknown:
        more = f" and {len(unknown) - _MOST_UNKNOWN} more" if len(unknown) > _MOST_UNKNOWN else ""
        yield "unknown", f"options that are not understood: {plain(', '.join(unknown[:_MOST_UNKNOWN]), 400)}{more}"


def configuration(subject: RunResult) -> Iterator[RenderableType]:
    """Every value that was set, by origin, and every value that was only assumed."""
    by_origin: dict[str, list[str]] = {}
    assumed: dict[str, list[str]] = {}
    for name, setting in subject.config.items():
        if setting.assumed:
            assumed.setdefault(setting.origin, []).append(set_to(name, setting))
        elif not setting.origin.startswith("default"):
            by_origin.setdefault(setting.origin, []).append(set_to(name, setting))
    stated: dict[str, list[str]] = {}
    for stated_setting in getattr(subject, "settings", ()):
        stated.setdefault(stated_setting.origin, []).append(set_to(stated_setting.name, stated_setting))
    if not by_origin and not assumed and not stated:
        return
    for title, words in _unknown(subject):
        yield hanging(Text(title), Text(words), 11)
    for title, group in (("options", by_origin), ("assumed", assumed), ("settings", stated)):
        for origin, values in group.items():
            yield hanging(Text(title), Text(f"{plain(origin)}: {', '.join(values)}"), 11)
    yield ""


def hanging(first: Text, rest: Text, width: int) -> Table:
    """A line whose first word stands in a margin."""
    grid = Table.grid(padding=(0, 0, 0, 0))
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(first, rest)
    return grid


def fitting(head: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> int:
    """Return how many columns, from the left, fit a width; what does not fit must not vanish silently."""
    used = 2 + 2
    for place, name in enumerate(head):
        longest = max(len(name), *(len(line[place]) for line in lines)) if lines else len(name)
        used += longest + (2 if place else 0)
        if used > width and place:
            return place
    return len(head)


def numbers(head: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1, indent: int = 2) -> Table:
    """A table without rules: the first `left` columns are words, the others numbers."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="")
    grid.add_column(" " * indent, width=indent)
    for position, name in enumerate(head):
        is_word = position < left
        # Words give way before numbers do, but never vanish.
        width = min(24, max(len(line[position]) for line in lines)) if is_word and lines else None
        grid.add_column(
            name, justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word, min_width=width
        )
    for line in lines:
        grid.add_row("", *(Text(cell) for cell in line))
    return grid
