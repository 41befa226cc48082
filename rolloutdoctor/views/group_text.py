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
        yield numbers(
            ["response", "reward", "advantage", "tokens"], [_response(completion) for completion in page.completions]
        )
    for trajectory in page.trajectories:
        yield ""
        yield Text(_headline(trajectory), style=bold)
        yield from (Text(f"  error: {plain(error, 400)}") for error in trajectory.errors)
        has_errors = any(turn.error for turn in trajectory.turns)
        head = ["turn", "author", *["error"] * has_errors]
        yield numbers(
            [*head, "tokens", "trained", "|gradient|", "share"],
            [_line(turn, has_errors=has_errors) for turn in trajectory.turns],
            left=len(head),
        )
    if any(turn.derived for trajectory in page.trajectories for turn in trajectory.turns):
        yield ""
        yield Text("derived: the file does not say who wrote what; it is read off the mask")


def _response(completion: Completion) -> list[str]:
    advantage = completion.logged if completion.recomputed is None else completion.recomputed
    return [
        plain(completion.sample_id, _MOST),
        _number(completion.reward),
        _number(advantage),
        f"{completion.length:,}",
    ]


def _headline(trajectory: Trajectory) -> str:
    name = trajectory.rows[0] if trajectory.trajectory_id is None else f"trajectory {trajectory.trajectory_id}"
    facts = [f"{many(trajectory.count, 'turn')} in {many(len(trajectory.rows), 'row')}"]
    facts += [f"reward {', '.join(map(_number, trajectory.rewards))}"] * bool(trajectory.rewards)
    facts += [f"ended {', '.join(plain(status, _MOST) for status in trajectory.statuses)}"] * bool(trajectory.statuses)
    if trajectory.share is not None:
        facts.append(f"{100 * trajectory.share:.3g} % of the step's |gradient|")
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
