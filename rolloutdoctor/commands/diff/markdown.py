"""A comparison as Markdown, for a pull request or an issue."""

from collections.abc import Iterator, Sequence

from rolloutdoctor.commands.diff import words as words
from rolloutdoctor.results.comparison import Comparison
from rolloutdoctor.views.layout import many
from rolloutdoctor.views.markup import safe, table
from rolloutdoctor.views.style import Style

MOST_PARTS = 40


def as_markdown(result: Comparison, style: Style) -> str:
    """Render headings, sentences and tables."""
    text = "\n".join(_lines(result)) + "\n"
    return text if style.unicode else text.encode("ascii", "xmlcharrefreplace").decode()


def _lines(result: Comparison) -> Iterator[str]:
    size, is_every = result.input, result.untried is not None
    against = "every fix" if is_every else safe(result.effects[0].label)
    yield f"## As configured against {against}"
    yield ""
    yield (
        f"rolloutdoctor {result.version}, {safe(result.trainer)} {safe(result.trainer_version)}, "
        f"{many(size.rows, 'row')} in {many(size.groups, 'group')}, {many(size.steps, 'step')}, {result.dtype}"
    )
    yield ""
    yield from _every(result) if is_every else _sides(result)
    yield ""
    yield from (f"Note: {safe(note)}\n" for note in result.notes)
    yield safe(words.SPACES)


def _every(result: Comparison) -> Iterator[str]:
    """One table of all fixes."""
    lines = words.every_lines(result)
    if lines:
        yield from _table(words.EVERY_HEAD, lines, 1)
        yield ""
    for word, sentence in words.every_remark(result):
        yield f"- **{word}**: {safe(sentence)}"


def _sides(result: Comparison) -> Iterator[str]:
    main = result.effects[0]
    for name, sentence in (
        ("advantages", words.advantages(main.total)),
        ("baselines", words.baselines(main.total)),
        ("gradient", words.gradient(main.total)),
        *(("others", remark) for remark in main.remarks),
    ):
        if sentence:
            yield f"- **{name}**: {safe(sentence)}"
    sides, metrics = words.sides(main), words.moved_metrics(main)
    if sides:
        yield from _table(["mean over the steps", "before", "after", "change"], sides, 1)
    if metrics:
        yield from _table(["the trainer's metrics", "before", "after", "change"], metrics, 1)
    if len(result.effects) > 1:
        yield from _titled("Each alone, and together", *words.effect_lines(result), 1)
    if main.parts:
        few, left = words.most_changed(main.parts, MOST_PARTS)
        head, lines = words.part_lines(few)
        yield from _titled(f"By {result.by}", head, lines, len(head) - len(words.PART_HEAD))
        if left:
            yield f"\nand {left:,} more that change less"
    if main.groups:
        yield f"\n### Groups that changed most, by {main.moved_by}"
    for title, head, lines in words.group_lines(main, text=60):
        yield ""
        yield "<br>".join(safe(line) for line in title.splitlines())
        yield from _table(head, lines, 1)


def _titled(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    yield f"\n### {title}"
    yield from _table(head, lines, left)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    yield ""
    yield from table(head, lines, left)
