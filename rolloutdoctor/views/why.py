"""A change of a metric in words: for a person at a terminal, in a line, as Markdown, and for programs."""

from collections.abc import Callable, Iterator
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.ledger import Compared, Interval, Ledger, Line, Why
from rolloutdoctor.views import structured
from rolloutdoctor.views.layout import as_text, hanging, header, many, numbers
from rolloutdoctor.views.markup import safe, table
from rolloutdoctor.views.style import Style, plain

MOST_ROWS = 5
"""Rows that are named without -v."""

_NEARLY_ALL = (0.7, 1.3)
"""Shares of a line that are nearly all of it."""

_FEW = 3
"""Quantities that moved with a metric, named in the first sentence."""

_safe = partial(safe, limit=600)

_PLAIN = ("1", "share", "reward")
"""Units that say no more than the metric."""


def number(value: float) -> str:
    """A number of a ledger: three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def signed(value: float) -> str:
    """The same with its sign; what rounding leaves of 0 is 0."""
    return "0" if abs(value) < 1e-12 else f"{'+' if value > 0 else '-'}{number(abs(value))}"


def answer(why: Why, ledger: Ledger) -> str:
    """Say in a sentence or two what changed, and what most of it is."""
    change, unit = ledger.change, "" if why.unit in _PLAIN else f" {why.unit}"
    if not change:
        return f"{why.title} did not change at step {ledger.at}: {number(ledger.before)}{unit} before and after."
    verb = "rose" if change > 0 else "fell"
    start = (
        f"{why.title[0].upper()}{why.title[1:]} {verb} by {number(abs(change))}{unit} at step {ledger.at}, from "
        f"{number(ledger.before)} to {number(ledger.after)}"
    )
    line = ledger.largest
    if line is None:
        return f"{start}{_moved(ledger) if ledger.of == 'log' else '; no line goes that way.'}"
    cause = f"{start}: {signed(line.share)} ({100 * line.share / change:.0f} %) is {line.cause}"
    wide = line.interval is not None and line.interval[0] <= 0 <= line.interval[1]
    within = None if wide else largest_part(line)
    cause += f", {signed(within[1])} of it {within[0]}" if within is not None else ""
    cause += f" ({line.words})" if line.words else ""
    return f"{cause}{'; its interval includes 0' if wide else ''}."


def _moved(ledger: Ledger) -> str:
    """Say which finding begins at a change of which the log holds no term, and what moved with it."""
    words = ""
    if ledger.judged:
        first = next(iter(ledger.began), None)
        words = "; no finding begins there" if first is None else f". {first.code} begins there: {first.headline}"
    few, more = list(ledger.coincidences[:_FEW]), len(ledger.coincidences) - _FEW
    few = [*few, *([f"{more} more"] if more > 0 else [])]
    several = f"{', '.join(few[:-1])} and {few[-1]}" if few[1:] else "".join(few)
    moved = f"Also changed there: {several}" if few else "No other logged metric changed there"
    return f"{words}. {moved}."


_OF_TRAJECTORIES = {
    "tool_turns": ("", "turns of a tool a trajectory"),
    "tool_calls": ("", "tool calls a response"),
    "turns": ("", "turns a trajectory"),
    "tool_failures": (" %", "of the tool calls failed"),
    "errors": (" %", "of the trajectories ended in an error"),
}
"""Unit and words of what trajectories did."""

_FROM = {"log": " (from the log)", "derived": " (from the mask)"}


def trajectories(ledger: Ledger) -> Iterator[tuple[str, str]]:
    """Say what the trajectories of an agent did before and after: a line for errors, and one for tools."""
    for title, names in (("errors", ("errors",)), ("tools", ("tool_turns", "tool_calls", "tool_failures", "turns"))):
        words = [_compared(compared) for name in names for compared in ledger.trajectories if compared.name == name]
        if words:
            yield title, "; ".join(words)


def _compared(compared: Compared) -> str:
    unit, words = _OF_TRAJECTORIES[compared.name]
    before, after = (f"{number(100 * value if unit else value)}{unit}" for value in (compared.before, compared.after))
    return f"{before} {words} before, {after} after{_FROM.get(compared.of, '')}"


def largest_part(line: Line) -> tuple[str, float] | None:
    """Return the class that accounts for nearly all of a line, of all attributes; None where none does."""
    shares = [
        (f"{name.replace('_', ' ')} {part}", share)
        for name, parts in line.parts.items()
        for part, share in parts.items()
        if len(parts) > 2 and line.share and _NEARLY_ALL[0] <= share / line.share <= _NEARLY_ALL[1]
    ]
    return min(shares, key=lambda pair: abs(pair[1] - line.share), default=None)


def windows(ledger: Ledger) -> str:
    """Name the steps of both windows."""
    (first, last), (start, end) = ledger.steps_before, ledger.steps_after
    return f"steps {first} to {last} before, {start} to {end} after"


def _cells(ledger: Ledger) -> Iterator[list[str]]:
    for line in ledger.lines:
        yield [plain(line.cause, 60), signed(line.share), _ends(line.interval), f"{line.count:,}" if line.count else ""]
    yield ["remainder", signed(ledger.remainder), "", ""]
    yield ["change", signed(ledger.change), _ends(ledger.interval), ""]


def _ends(interval: Interval | None) -> str:
    return "" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


_HEAD = ["cause", "share", "95 % interval", "rows"]


def full(why: Why, style: Style) -> str:
    """Render as text, with escape sequences if `style.color`."""
    return as_text(_parts(why, style), style)


def _parts(why: Why, style: Style) -> Iterator[RenderableType]:
    bold = "bold" if style.color else ""
    for ledger in why.ledgers:
        yield Text(plain(answer(why, ledger), 600), style=bold)
        if style.quiet:
            continue
        yield Text(f"  {windows(ledger)}; {_source(ledger)}")
        yield ""
        if ledger.lines or ledger.of == "rows":
            yield numbers(_HEAD, list(_cells(ledger)))
            yield ""
        for line in ledger.lines:
            yield from _of_line(line, ledger, style)
        yield from (_aside(title, words) for title, words in trajectories(ledger))
        yield from (_aside("begins", f"{begun.code} {begun.headline}") for begun in ledger.began)
        yield from (_aside("also", sentence) for sentence in ledger.coincidences)
        yield from (_aside("note", note) for note in ledger.notes)
        if ledger.coincidences:
            yield _aside("", "what else changed at that step (also) need not be a cause")
        yield ""
    yield from (_aside("note", note) for note in why.notes)
    if not style.quiet:
        yield header(why)


def _aside(title: str, words: str, width: int = 8) -> RenderableType:
    return hanging(Text(title), Text(plain(words, 400)), width)


def _source(ledger: Ledger) -> str:
    if ledger.of == "log":
        return "from the log alone"
    if ledger.logged is None:
        return "from the rows"
    name, before, after = ledger.logged
    return f"from the rows; the log has {plain(name)} {number(before)} and {number(after)}"


def _of_line(line: Line, ledger: Ledger, style: Style) -> Iterator[RenderableType]:
    """Say more of a line: what was seen, its parts, its rows."""
    is_main = line is ledger.largest
    if not (is_main or style.verbose) or not (line.words or line.parts or line.rows):
        return
    yield Text(plain(line.cause, 60))
    if line.words:
        yield _aside("  seen", line.words, 10)
    for name, parts in line.parts.items():
        if len(parts) > 1:
            words = "; ".join(f"{plain(part, 60)} {signed(share)}" for part, share in parts.items())
            yield hanging(Text("  by"), Text(f"{name.replace('_', ' ')}: {words}"), 10)
    if line.rows:
        few = line.rows if style.verbose else line.rows[:MOST_ROWS]
        left = line.count - len(few)
        more = f" and {left:,} more" if left > 0 else ""
        yield hanging(Text("  rows"), Text(f"{', '.join(plain(row, 60) for row in few)}{more}"), 10)


def concise(why: Why, style: Style) -> str:
    """Render one sentence a change."""
    lines = [answer(why, ledger) for ledger in why.ledgers] or list(why.notes)
    return "".join(f"{plain(line, 600)}\n" for line in lines)


def as_markdown(why: Why, style: Style) -> str:
    """Render headings, sentences and tables."""
    text = "\n".join(_markdown(why)) + "\n"
    return text if style.unicode else text.encode("ascii", "xmlcharrefreplace").decode()


def _markdown(why: Why) -> Iterator[str]:
    yield f"## Why the {_safe(why.title)} changed"
    for ledger in why.ledgers:
        yield from ("", _safe(answer(why, ledger)), "", f"{windows(ledger)}; {_safe(_source(ledger))}", "")
        if ledger.lines or ledger.of == "rows":
            yield from table(_HEAD, list(_cells(ledger)), 1)
        main = ledger.largest
        if main is not None and main.rows:
            rows = ", ".join(map(_safe, main.rows[:MOST_ROWS]))
            yield f"\nRows of {_safe(main.cause)}: {rows} of {many(main.count, 'row')}"
        yield from (f"\n{title.capitalize()}: {words}" for title, words in trajectories(ledger))
        yield from (f"\nBegins there: {_safe(f'{begun.code} {begun.headline}')}" for begun in ledger.began)
        yield from (f"\nBeside it, and no cause by that: {_safe(sentence)}" for sentence in ledger.coincidences)
        yield from (f"\nNote: {_safe(note)}" for note in ledger.notes)
    yield from (f"\nNote: {_safe(note)}" for note in why.notes)


RENDERERS: dict[str, Callable[[Why, Style], str]] = {
    "full": full,
    "concise": concise,
    "json": structured.as_json,
    "jsonl": structured.as_json_lines,
    "markdown": as_markdown,
}
"""Every format by name."""
