"""A group in the terminal: its trajectories turn by turn, and its responses where the run has no turns."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.inspection import Completion, GroupPage, Trajectory, Turn
from rolloutdoctor.views.layout import as_text, many, numbers
from rolloutdoctor.views.style import Style, plain

_MOST = 60
"""Letters of a name or an error."""


def group_text(page: GroupPage, style: Style) -> str:
    """Render as text, with escape sequences if `style.color`."""
    return as_text(_parts(page, style), style)


def _parts(page: GroupPage, style: Style) -> Iterator[RenderableType]:
    bold = "bold" if style.color else ""
    split = " (eval)" if page.split == "eval" else ""
    yield Text(f"step {page.step}{split}, group {plain(page.group_id, _MOST)}", style=bold)
    if page.problem:
        yield Text(f"the loss is not recomputed: {plain(page.problem, 400)}")
    if not page.trajectories:
        yield numbers(["response", "reward", "advantage", "tokens"], [_response(one) for one in page.completions])
    for one in page.trajectories:
        yield ""
        yield Text(_headline(one), style=bold)
        yield from (Text(f"  error: {plain(error, 400)}") for error in one.errors)
        has_errors = any(turn.error for turn in one.turns)
        head = ["turn", "author", *["error"] * has_errors]
        yield numbers(
            [*head, "tokens", "trained", "|gradient|", "share"],
            [_line(turn, has_errors=has_errors) for turn in one.turns],
            left=len(head),
        )
    if any(turn.derived for one in page.trajectories for turn in one.turns):
        yield ""
        yield Text("derived: the file does not say who wrote what; it is read off the mask")


def _response(one: Completion) -> list[str]:
    advantage = one.logged if one.recomputed is None else one.recomputed
    return [plain(one.sample_id, _MOST), _number(one.reward), _number(advantage), f"{one.length:,}"]


def _headline(one: Trajectory) -> str:
    name = one.rows[0] if one.trajectory_id is None else f"trajectory {one.trajectory_id}"
    facts = [f"{many(one.count, 'turn')} in {many(len(one.rows), 'row')}"]
    facts += [f"reward {', '.join(map(_number, one.rewards))}"] * bool(one.rewards)
    facts += [f"ended {', '.join(plain(status, _MOST) for status in one.statuses)}"] * bool(one.statuses)
    if one.share is not None:
        facts.append(f"{100 * one.share:.3g} % of the step's |gradient|")
    return f"{plain(name, _MOST)}: {'; '.join(facts)}"


def _line(turn: Turn, *, has_errors: bool) -> list[str]:
    return [
        str(turn.turn),
        f"{turn.author}{' (derived)' if turn.derived else ''}",
        *[plain(turn.error or "", _MOST)] * has_errors,
        f"{turn.stop - turn.start:,}",
        "" if turn.trained is None else f"{turn.trained:,}" if turn.trained else "masked",
        _number(turn.gradient),
        "" if turn.share is None else f"{100 * turn.share:.3g} %",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
