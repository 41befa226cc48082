"""A comparison for a person at a terminal, and one line an effect for logs."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rolloutdoctor.commands.diff import words as words
from rolloutdoctor.results.comparison import Comparison, Effect
from rolloutdoctor.views.histogram import before_and_after
from rolloutdoctor.views.layout import as_text, assumptions, configuration, fitting, hanging, header, many, numbers
from rolloutdoctor.views.style import Style, plain, shown

MOST_PARTS = 40
_MARGIN = 12


def full(result: Comparison, style: Style) -> str:
    """Render everything: all changes together in detail, each alone in a table."""
    return as_text(_parts(result, style), style)


def concise(result: Comparison, style: Style) -> str:
    """Render one line an effect."""
    lines = []
    for effect in result.effects:
        total = effect.total
        line = (
            f"{plain(effect.label, 120)}: {shown(total['changed_rows'])} of {shown(total['unmasked_rows'])} advantages"
        )
        line += f", loss {words.number(total['loss_before'].value)} -> {words.number(total['loss_after'].value)}"
        lines.append(f"{line}, gradient {words.gradient(total) or 'n/a'}" if effect.differs else f"{line}, no change")
    lines += [f"{plain(fix.label, 120)}: not compared: {plain(fix.why, 400)}" for fix in result.untried or ()]
    return "\n".join(lines) + "\n"


def _every(result: Comparison, style: Style) -> Iterator[RenderableType]:
    """One table of all fixes."""
    lines = words.every_lines(result)
    yield _title(words.verdict(result.effects[0]) if lines else "No fix changes anything.", style)
    if lines:
        yield ""
        yield Text("what each fix would have changed, largest first")
        yield from _fitted([*words.EVERY_HEAD], lines, 1, style)
    yield ""
    for word, sentence in words.every_remark(result):
        yield hanging(Text(word), Text(sentence), _MARGIN)
    yield ""


def _parts(result: Comparison, style: Style) -> Iterator[RenderableType]:
    yield from _every(result, style) if result.untried is not None else _sides(result, style)
    yield from _basis(result, style)
    for note in result.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), _MARGIN)
    yield Text(words.SPACES)
    yield header(result)


def _sides(result: Comparison, style: Style) -> Iterator[RenderableType]:
    main = result.effects[0]
    yield Text(words.verdict(main), style="bold" if style.color else "")
    yield ""
    yield from _effect(main)
    if result.advantages is not None and result.advantages.changed:
        yield _title(f"advantages of trained {result.advantages.unit}, heights by the square root of the count", style)
        yield from (Text(f"    {line}") for line in before_and_after(result.advantages, style))
        yield ""
    if len(result.effects) > 1:
        yield _title("each alone, and together", style)
        yield from _fitted(*words.effect_lines(result), 1, style)
        yield ""
    if main.parts:
        few, left = words.most_changed(main.parts, MOST_PARTS)
        yield _title(f"by {result.by}", style)
        head, lines = words.part_lines(few)
        yield from _fitted(head, lines, len(head) - len(words.PART_HEAD), style)
        if left:
            yield Text(f"  and {left:,} more that change less: --format json has all of them")
        yield ""
    if main.groups:
        yield _title(f"groups that changed most, by {main.moved_by}", style)
        yield ""
    for title, head, lines in words.group_lines(main, text=max(20, style.width - 60)):
        yield from (Text(f"  {line}") for line in title.splitlines())
        yield _rows(head, lines)
        yield ""


def _basis(result: Comparison, style: Style) -> Iterator[RenderableType]:
    """What nobody stated and was assumed; with -v every option and its origin."""
    if style.verbose:
        yield from configuration(result)
    else:
        yield from (hanging(Text(title), Text(words), _MARGIN) for title, words in assumptions(result))


def _title(title: str, style: Style) -> Text:
    return Text(title, style="bold" if style.color else "")


def _effect(effect: Effect) -> Iterator[RenderableType]:
    total = effect.total
    sentences = [
        ("advantages", words.advantages(total)),
        ("baselines", words.baselines(total)),
        ("gradient", words.gradient(total)),
        *(("others", remark) for remark in effect.remarks),
    ]
    for name, sentence in sentences:
        if sentence:
            yield hanging(Text(name), Text(sentence), _MARGIN)
    yield ""
    table = words.sides(effect)
    if table:
        yield numbers(["mean over the steps", "before", "after", "change"], table)
        yield ""
    metrics = words.moved_metrics(effect)
    if metrics:
        yield numbers(["the trainer's metrics", "before", "after", "change"], metrics)
        same = len(effect.metrics) - len(metrics)
        if same:
            yield Text(f"  {many(same, 'more metric')} {'is' if same == 1 else 'are'} unchanged")
        yield ""


def _fitted(head: list[str], lines: list[list[str]], left: int, style: Style) -> Iterator[RenderableType]:
    """A table, less the columns that do not fit the width; which these are is said."""
    keep = max(fitting(head, lines, style.width), left + 1)
    yield numbers(head[:keep], [line[:keep] for line in lines], left=left)
    if keep < len(head):
        yield Text(f"  too narrow to show: {', '.join(head[keep:])}")


def _rows(head: list[str], lines: list[list[str]]) -> Table:
    """Rows of a group: words, numbers, and the head of the response."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="")
    grid.add_column("  ", width=2)
    for name in head:
        is_number = name in ("reward", "advantage", "after", "|gradient|")
        grid.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    for line in lines:
        grid.add_row("", *(Text(cell) for cell in line))
    return grid
