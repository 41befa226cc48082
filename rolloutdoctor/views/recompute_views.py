"""What `recompute` found, for people and for programs: the numbers of every step beside what the trainer logged."""

import math
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.comparison import Numbers, Recomputed, RecomputedStep
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.exact import mean
from rolloutdoctor.views.layout import as_text, configuration, hanging, header, many, numbers
from rolloutdoctor.views.structured import SCHEMA_VERSION, known, settings
from rolloutdoctor.views.style import Style, plain

_OWN = ("loss", "policy_loss", "kl_loss", "grad_l1", "grad_l2")


def as_full(result: Recomputed, style: Style) -> str:
    """Render the means over the steps, logged beside recomputed."""
    return as_text(_parts(result), style)


def as_json(result: Recomputed, style: Style) -> str:
    """Render everything as one JSON object; numbers are never rounded."""
    body = {**_head(result), "per_step": [_step(step) for step in result.steps], "notes": list(result.notes)}
    return json_text(body, indent=2, ascii_only=not style.unicode) + "\n"


def as_json_lines(result: Recomputed, style: Style) -> str:
    """Render one JSON object a line: the run, then every step."""
    lines = [{"type": "run", **_head(result), "notes": list(result.notes)}]
    lines += [{"type": "step", **_step(step)} for step in result.steps]
    return "".join(json_text(line, ascii_only=not style.unicode) + "\n" for line in lines)


def _head(result: Recomputed) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "rolloutdoctor": result.version,
        "device": result.device,
        "dtype": result.dtype,
        "input": vars(result.input),
        "trainer": {"name": result.trainer, "version": result.trainer_version, "config": settings(result.config)},
        "fixes": list(result.fixes),
        "columns": list(result.columns),
    }


def _step(step: RecomputedStep) -> dict[str, object]:
    before = step.before
    found: dict[str, object] = {"step": step.step, "split": step.split, "rows": step.rows, "tokens": step.tokens}
    found |= _numbers(before)
    found["logged"] = {name: known(value) for name, value in step.logged.items()}
    found["difference"] = {name: known(before.metrics[name] - value) for name, value in step.logged.items()}
    if step.fixed is not None:
        found["fixed"] = _numbers(step.fixed)
    return found


def _numbers(one: Numbers) -> dict[str, object]:
    """The trainer's metrics under their own names, then ours: a trainer's `loss` is the loss of the step."""
    own = {name: known(getattr(one, name)) for name in _OWN}
    return {**own, **{name: known(value) for name, value in one.metrics.items() if name not in own}}


def _parts(result: Recomputed) -> Iterator[RenderableType]:
    yield header(result)
    yield ""
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
    yield from configuration(result)
    for note in result.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), 11)


def _lines(steps: list[RecomputedStep], fixed: bool) -> Iterator[list[str]]:
    names = [*_OWN, *dict.fromkeys(name for step in steps for name in step.before.metrics)]
    for name in dict.fromkeys(names):
        gaps = [_value(step.before, name) - step.logged[name] for step in steps if name in step.logged]
        sides = [_mean([_value(step.before, name) for step in steps])]
        if fixed:
            sides.append(_mean([_value(step.fixed, name) for step in steps if step.fixed is not None]))
        logged = _mean([step.logged[name] for step in steps if name in step.logged])
        far = max((abs(gap) for gap in gaps if math.isfinite(gap)), default=math.nan)
        yield [plain(name, 40), *map(_shown, sides), *((_shown(logged), _shown(far)) if gaps else ("", ""))]


def _value(one: Numbers | None, name: str) -> float:
    found = None
    if one is not None:
        found = getattr(one, name) if name in _OWN else one.metrics.get(name)
    return math.nan if found is None else found


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return mean(finite)


def _shown(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "n/a"


RENDERERS: dict[str, Callable[[Recomputed, Style], str]] = {
    "full": as_full,
    "json": as_json,
    "jsonl": as_json_lines,
}
