"""Views of `recompute`, for people and for programs: the numbers of every step beside what the trainer logged."""

import math
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.comparison import OWN_NUMBERS, Numbers, Recomputed, RecomputedStep
from rolloutdoctor.results.exact import mean
from rolloutdoctor.views import structured
from rolloutdoctor.views.layout import as_text, assumptions, configuration, hanging, header, many, numbers
from rolloutdoctor.views.style import Style, plain


def as_full(result: Recomputed, style: Style) -> str:
    """Render the means over the steps, logged beside recomputed."""
    return as_text(_parts(result, style), style)


def _parts(result: Recomputed, style: Style) -> Iterator[RenderableType]:
    splits = dict.fromkeys(step.split for step in result.steps)
    for split in splits:
        steps = [step for step in result.steps if step.split == split]
        head = [f"mean over {many(len(steps), f'{split} step')}", "recomputed", "logged", "off by at most"]
        if result.fixes:
            head.insert(2, "fixed")
        yield numbers(head, list(_lines(steps, bool(result.fixes))))
        yield ""
    yield Text(
        "Gradients are with respect to the logged log-probs, not to parameters. Logged means and differences are over "
        "the steps that were logged."
    )
    if result.fixes:
        yield hanging(Text("fixed"), Text(f"with {', '.join(result.fixes)}"), 11)
    yield ""
    yield from configuration(result) if style.verbose else _assumed(result)
    for note in result.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), 11)
    yield header(result)


def _assumed(result: Recomputed) -> Iterator[RenderableType]:
    """What nobody stated."""
    return (hanging(Text(title), Text(words), 11) for title, words in assumptions(result))


def _lines(steps: list[RecomputedStep], fixed: bool) -> Iterator[list[str]]:
    names = [*OWN_NUMBERS, *dict.fromkeys(name for step in steps for name in step.before.metrics)]
    for name in dict.fromkeys(names):
        gaps = [_value(step.before, name) - step.logged[name] for step in steps if name in step.logged]
        sides = [_mean([_value(step.before, name) for step in steps])]
        if fixed:
            sides.append(_mean([_value(step.fixed, name) for step in steps if step.fixed is not None]))
        logged = _mean([step.logged[name] for step in steps if name in step.logged])
        far = max((abs(gap) for gap in gaps if math.isfinite(gap)), default=math.nan)
        yield [plain(name, 40), *map(_shown, sides), *((_shown(logged), _shown(far)) if gaps else ("", ""))]


def _value(numbers: Numbers | None, name: str) -> float:
    number = None
    if numbers is not None:
        number = getattr(numbers, name) if name in OWN_NUMBERS else numbers.metrics.get(name)
    return math.nan if number is None else number


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return mean(finite)


def _shown(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "n/a"


RENDERERS: dict[str, Callable[[Recomputed, Style], str]] = {
    "full": as_full,
    "json": structured.as_json,
    "jsonl": structured.as_json_lines,
}
