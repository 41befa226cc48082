"""A comparison of two runs: for a person at a terminal, in one line, as Markdown, and for programs."""

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.findings import Measure, Setting
from rolloutdoctor.results.run_comparison import FindingPair, OptionPair, Quantity, RunComparison, Side
from rolloutdoctor.views import structured
from rolloutdoctor.views.layout import as_text, fitting, hanging, many, numbers
from rolloutdoctor.views.markup import safe, table
from rolloutdoctor.views.style import Style, plain, shown, value_of

MOST_METRICS = 8
"""Logged metrics that are shown without -v: those that differ most."""

MOST_PARTS = 30
"""Parts that are shown without -v."""

_FINDINGS = "Findings"

Table = tuple[str, Sequence[str], Sequence[Sequence[str]], int]
"""Title, head, lines, and how many columns from the left are words."""


def verdict(result: RunComparison) -> str:
    """Say in a sentence or two where the runs part, and which metrics differ by a whole factor."""
    return " ".join([_parting(result), *_factors(result)])


def _factors(result: RunComparison) -> Iterator[str]:
    """Say which logged metrics of one run are a whole number of times those of the other, by factor."""
    alike: dict[tuple[int, str], list[Quantity]] = {}
    for curve in result.quantities:
        if curve.factor:
            alike.setdefault((curve.factor, curve.larger), []).append(curve)
    for (factor, larger), several in alike.items():
        names = [plain(curve.name if curve.split == "train" else f"{curve.name} ({curve.split})") for curve in several]
        more = [f"{len(names) - 3} more metrics"] if len(names) > 4 else names[3:]
        steps = min(len(curve.steps) for curve in several)
        are, that = ("is", "that") if len(names) == 1 else ("are", "those")
        yield (
            f"{_listed([*names[:3], *more])} of {larger.upper()} {are} {factor} times {that} of "
            f"{'B' if larger == 'a' else 'A'} in every step ({many(steps, 'step')}): a whole number, as of "
            "micro-batches or ranks."
        )


def _parting(result: RunComparison) -> str:
    """Say where the runs part."""
    both, only_a, only_b = result.steps
    if not both:
        return f"The runs have no step in common ({only_a:,} in A, {only_b:,} in B), so nothing was compared by step."
    first = result.first
    steps = many(both, "step")
    if first is None:
        if not result.joined:
            return f"The runs share no rows; they are compared by the means of {steps}."
        if any(curve.equal < len(curve.values) for curve in result.quantities):
            return f"All {many(result.joined, 'row')} are equal in both runs, and logged values differ (below)."
        return f"All {many(result.joined, 'row')} in {steps} are equal in both runs."
    at = f"step {first.step}" + ("" if first.split == "train" else f" ({first.split})")
    if first.quantity == "loss":
        return (
            f"All rows are equal, and the recomputed loss differs from {at} on ({_values(first.a, first.b)}): "
            "other options, not other data."
        )
    where = f"row {plain(first.sample_id, 40)}" + ("" if first.token is None else f", token {first.token:,}")
    row = f" ({where}: {_values(first.a, first.b)})" if first.a is not None else f" ({where})"
    if first.quantity == "prompt":
        return f"The runs answer different prompts from {at} on: {first.rows:,} of {many(first.of, 'row')} there{row}."
    order = [row.quantity for row in result.matched]
    before = order[: order.index(first.quantity)]
    equal = f" In that step {_listed(before)} {'is' if len(before) == 1 else 'are'} equal." if before else ""
    differ = f"{first.quantity} differs in {first.rows:,} of {many(first.of, 'row')}{row}"
    return f"The runs diverge at {at}: {differ}.{equal}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _values(a: float | None, b: float | None) -> str:
    return f"{_number(a)} in A, {_number(b)} in B"


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "n/a"
    return f"{value:,.0f}" if value == int(value) and 1000 <= abs(value) < 1e15 else f"{value:.6g}"


def full(result: RunComparison, style: Style) -> str:
    """Render as text, with escape sequences if `style.color`."""
    return as_text(_parts(result, style), style)


def _parts(result: RunComparison, style: Style) -> Iterator[RenderableType]:
    bold = "bold" if style.color else ""
    yield Text(plain(verdict(result), 600), style=bold)
    if style.quiet:
        return
    yield ""
    for letter, side in (("A", result.a), ("B", result.b)):
        yield hanging(Text(letter), Text(_described(side)), 3)
    for title, head, lines, left in tables(result, everything=style.verbose):
        yield ""
        yield Text(title)
        if title == _FINDINGS:
            yield from _finding_lines(result)
            continue
        # Words are folded; numbers that do not fit are left out from the right.
        count = len(head) if left == len(head) else fitting(head, lines, style.width)
        left = min(left, count)
        yield numbers(head[:count], [line[:count] for line in lines], left=left)
    if result.notes:
        yield ""
    for note in result.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), 6)
    yield ""
    yield Text(f"rolloutdoctor {result.version}   {result.device} {result.dtype}", style=bold)


def _finding_lines(result: RunComparison) -> Iterator[RenderableType]:
    """Each rule with what became of it in both runs, one under the other."""
    for pair in result.findings:
        yield Text(f"    {pair.code} {pair.name}")
        for letter, side in (("A", "a"), ("B", "b")):
            yield hanging(Text(f"      {letter}"), Text(_outcome(pair, side)), 9)


def _described(side: Side) -> str:
    who = f"{side.trainer} {side.trainer_version or ''}".strip() if side.trainer else "trainer unknown"
    size, steps = side.input, many(side.input.steps, "step")
    rows = f"{many(size.rows, 'row')} in {many(size.groups, 'group')}, {steps}, {many(size.tokens, 'token')}"
    return f"{plain(side.name, 120)}: {plain(who)}, {rows if size.rows else f'{steps} logged, no rollouts'}"


def tables(result: RunComparison, *, everything: bool) -> Iterator[Table]:
    """Yield every table that has lines."""
    both, only_a, only_b = result.steps
    if only_a or only_b:
        yield "Steps", ("in both", "in A alone", "in B alone"), [(f"{both:,}", f"{only_a:,}", f"{only_b:,}")], 0
    if result.options:
        yield "Options that differ", ("", "A", "B"), [_option_line(pair) for pair in result.options], 3
    if result.matched:
        lines = [
            (row.quantity, many(row.compared, row.unit), f"{row.equal:,}", _number(row.largest))
            for row in result.matched
            if row.compared
        ]
        yield (
            "Rows joined by step and sample_id, in causal order",
            ("", "compared", "equal", "largest difference"),
            lines,
            1,
        )
    if result.findings:
        yield (
            _FINDINGS,
            ("rule", "A", "B"),
            [(f"{pair.code} {pair.name}", _outcome(pair, "a"), _outcome(pair, "b")) for pair in result.findings],
            3,
        )
        measures = list(_measure_lines(result)) if everything else []
        if measures:
            yield "Measures of the findings", ("", "A", "B"), measures, 1
    yield from _quantity_tables(result, everything=everything)
    if result.parts:
        yield _part_table(result, everything=everything)


def _outcome(pair: FindingPair, side: str) -> str:
    outcome, headline = getattr(pair, side), getattr(pair, f"headline_{side}")
    return f"{outcome}: {plain(headline, 300)}" if headline else outcome


def _option_line(pair: OptionPair) -> tuple[str, str, str]:
    return plain(pair.name), _setting(pair.a), _setting(pair.b)


def _setting(setting: Setting | None) -> str:
    if setting is None:
        return "no such option"
    return value_of(setting) + (" (assumed)" if setting.assumed else "")


def _measure_lines(result: RunComparison) -> Iterator[tuple[str, str, str]]:
    for pair in result.findings:
        for name, (a, b) in pair.measures.items():
            yield f"{pair.code} {name}", _measure(a), _measure(b)


def _measure(measure: Measure | None) -> str:
    return "-" if measure is None else shown(measure)


def _quantity_tables(result: RunComparison, *, everything: bool) -> Iterator[Table]:
    head = ("", "A", "B", "B - A", "steps", "largest at step")
    stats = [curve for curve in result.quantities if curve.origin != "logged"]
    few = stats if everything else [curve for curve in stats if curve.equal < len(curve.values) and _in_short(curve)]
    if few:
        title = "Means over the steps in both"
        if len(few) < len(stats):
            title += f"; {len(few)} of {len(stats)}, -v also shows those that are equal and those of evaluations"
        yield title, head, [_quantity_line(curve) for curve in few], 1
    logged = [curve for curve in result.quantities if curve.origin == "logged"]
    chosen = logged if everything else sorted(logged, key=_relative, reverse=True)[:MOST_METRICS]
    if chosen:
        title = "Logged metrics, means over the steps in both"
        if len(chosen) < len(logged):
            title += f"; the {len(chosen)} of {len(logged):,} that differ most, -v shows all"
        yield title, head, [_quantity_line(curve) for curve in chosen], 1


def _in_short(curve: Quantity) -> bool:
    return curve.split == "train" or curve.name == "reward"


def _relative(curve: Quantity) -> float:
    a, b = curve.mean
    size = max(abs(a), abs(b))
    return abs(b - a) / size if size and math.isfinite(size) else 0.0


def _quantity_line(curve: Quantity) -> tuple[str, ...]:
    a, b = curve.mean
    name = curve.name if curve.split == "train" else f"{curve.name} ({curve.split})"
    place = curve.widest
    largest = f"{curve.steps[place]}" if curve.values[place][0] != curve.values[place][1] else "equal"
    values = [shown(Measure(float(value), curve.unit)) for value in (a, b)]
    gap = f"{100 * (b - a):.3g} points" if curve.unit == "share" else shown(Measure(b - a, curve.unit))
    return (plain(name), *values, gap, f"{len(curve.steps):,}", largest)


def _part_table(result: RunComparison, *, everything: bool) -> Table:
    names = list(dict.fromkeys(name for part in result.parts for name in part.values))
    parts = result.parts if everything else result.parts[:MOST_PARTS]
    left = len(result.parts) - len(parts)
    head = [str(result.by if result.by in ("reward", "length", "status") else "step")]
    head += [f"{name} {side}" for name in names for side in ("A", "B")]
    missing = (math.nan, math.nan)
    lines = [
        [plain(part.name), *(_cell(name, value) for name in names for value in part.values.get(name, missing))]
        for part in parts
    ]
    title = f"By {result.by}" + (f"; the first {len(parts)} of {len(result.parts):,}, -v shows all" if left else "")
    return title, head, lines, 1


def _cell(name: str, value: float) -> str:
    if name == "rows_share" and math.isfinite(value):
        return f"{100 * value:.3g} %"
    return "n/a" if math.isnan(value) else f"{value:,.0f}" if name == "rows" else f"{value:.4g}"


def concise(result: RunComparison, style: Style) -> str:
    """Render one line."""
    line = f"{plain(result.a.name, 120)} {plain(result.b.name, 120)}: {plain(verdict(result), 600)}\n"
    return line if style.unicode else line.encode("ascii", "replace").decode()


def as_markdown(result: RunComparison, style: Style) -> str:
    """Render headings, sentences and tables."""
    text = "\n".join(_markdown(result)) + "\n"
    return text if style.unicode else text.encode("ascii", "xmlcharrefreplace").decode()


def _markdown(result: RunComparison) -> Iterator[str]:
    yield f"## {safe(result.a.name)} against {safe(result.b.name)}"
    yield ""
    yield f"**{safe(verdict(result))}**"
    yield ""
    for letter, side in (("A", result.a), ("B", result.b)):
        yield f"- **{letter}**: {safe(_described(side))}"
    for title, head, lines, left in tables(result, everything=False):
        yield f"\n### {safe(title)}\n"
        yield from table([*map(safe, head)], lines, left)
    yield ""
    yield from (f"Note: {safe(note)}\n" for note in result.notes)


RENDERERS: dict[str, Callable[[RunComparison, Style], str]] = {
    "full": full,
    "concise": concise,
    "json": structured.as_json,
    "jsonl": structured.as_json_lines,
    "markdown": as_markdown,
}
