"""The rows of a log in a JSON document: lists of objects or points, columns, objects by their step, at any depth."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rolloutdoctor.importers.logs.kinds_of_rows import (
    Rows,
    are_of_steps,
    kind_of_rows,
    steps_by_counter,
    steps_by_place,
)
from rolloutdoctor.importers.logs.numbers import is_list, is_number
from rolloutdoctor.importers.logs.printed import is_log_line
from rolloutdoctor.importers.logs.row_shapes import VALUES, is_episode, parsed, plain, without_excerpts
from rolloutdoctor.importers.logs.rows import OF_TRAINER, RUNS, STEPS, step_of
from rolloutdoctor.metric_names.generic import generic, is_held_out, is_metric
from rolloutdoctor.metric_names.table import metric_quantities

_DEEPEST = 4
"""Objects within each other in which rows are looked for."""

_FEWEST, _LOOKED_AT, _MOST_PHASES = 3, 16, 32
"""Rows of numbers under other names that are a log; rows of it, and objects in a list, that are looked at."""

_AT_STEP = re.compile(r"(?:(?:global_)?step|iter|iteration|checkpoint|update|epoch|round)?[_-]?([0-9]{1,18})")

_OF_RUN = re.compile(r"(?i)(?:run|seed|trial|exp|experiment)[-_ ]?[0-9]")
"""Names of runs; lists of one metric under others may be those of reward functions."""


def rows_of(body: object) -> tuple[Rows, bool]:
    """Return the rows of a document, and whether their places are counted as steps: those with rewards, or the most.

    >>> rows_of({"rewards": [{"step": 1, "value": 0.5}], "kl": [[1, 0.1]]})
    ([{'step': 1, 'rewards': 0.5, 'kl': 0.1}], False)
    """
    tables = [*_tables(body, isinstance(body, dict))]
    best = max(tables, key=lambda each: _weight(each[0]), default=([], False, ""))
    names = {*best[0][0]} if best[0] else set()
    # Tables of the same names side by side are those of several runs.
    alike = {label: rows for rows, _, label in tables if rows and {*rows[0]} == names and len(rows) >= _FEWEST}
    # What an object holds may be found in it once more.
    alike = {label: alike[label] for label in alike if not any(other.startswith(f"{label}/") for other in alike)}
    if len(alike) > 1 and "" not in alike and not names & {*RUNS}:
        return [{"run": label, **row} for label, rows in alike.items() for row in rows], best[1]
    return best[:2]


def _weight(rows: Rows) -> tuple[bool, int, int]:
    """How much of a training rows say: rewards, numbers of metrics, rows."""
    names = Counter(name for row in rows for name, value in row.items() if is_number(value) or is_list(value))
    metrics = sum(count for name, count in names.items() if is_metric(name))
    return "reward" in metric_quantities(names).values(), metrics, len(rows)


def _tables(body: object, is_named: bool, depth: int = 0, label: str = "") -> Iterator[tuple[Rows, bool, str]]:
    """Yield what are rows of a log in a document, and where they stand in it."""
    body = parsed(body)
    tables: list[tuple[Rows, bool]] = []
    is_of_episodes = False
    if isinstance(body, list) and body and all(isinstance(row, dict) for row in body):
        is_of_episodes = len(body) >= _FEWEST and all(map(is_episode, body[:_LOOKED_AT]))
        body, _ = steps_by_counter(body)
        samples = [*map(without_excerpts, body)]
        body = samples if are_of_steps(samples[:_LOOKED_AT], of_samples=True) else body
        numbered = steps_by_place(body)
        tables = [(numbered, True) if numbered else ([*map(plain, body)], False)]
    elif isinstance(body, dict):
        tables = [*_columns(body), (_side_by_side(body), False), (_by_step(body), False), (_split(body), False)]
    logs = [each for each in tables if each[0] and (is_of_episodes or _is_log(each[0], is_named))]
    yield from ((*each, label) for each in logs)
    if depth > _DEEPEST or (isinstance(body, list) and logs):
        return
    inside = (
        body.items() if isinstance(body, dict) else enumerate(body[:_MOST_PHASES]) if isinstance(body, list) else ()
    )
    for name, inner in inside:
        if isinstance(inner, (dict, list, str)):
            yield from _tables(inner, is_named or isinstance(body, dict), depth + 1, f"{label}/{name}".strip("/"))


def _columns(body: Mapping[str, object]) -> Iterator[tuple[Rows, bool]]:
    """Yield lists of numbers by name, those of one length together; pandas writes them as objects by place."""
    columns: dict[int, dict[str, Sequence[object]]] = {}
    for name, each in body.items():
        is_by_place = isinstance(each, dict) and each and all(map(str.isdecimal, each))
        column = [*each.values()] if is_by_place and isinstance(each, dict) else each
        if isinstance(column, list) and column and all(map(is_number, column)):
            columns.setdefault(len(column), {})[name] = column
    for named in columns.values():
        if is_log_line(named):
            is_counted = not any(name in named for name in STEPS)
            rows = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
            yield [{"step": n, **row} if is_counted else row for n, row in enumerate(rows, start=1)], is_counted


def _split(body: Mapping[str, object]) -> Rows:
    """Return the rows of names and lists of cells, as pandas and wandb write a table."""
    names, cells = body.get("columns"), body.get("data")
    if not (isinstance(names, list) and isinstance(cells, list) and all(isinstance(name, str) for name in names)):
        return []
    rows = [row for row in cells if isinstance(row, list) and len(row) == len(names)]
    return [plain(dict(zip(names, row, strict=True))) for row in rows] if len(rows) == len(cells) else []


def _by_step(body: Mapping[str, object]) -> Rows:
    named = {name: _AT_STEP.fullmatch(name) for name, row in body.items() if isinstance(row, dict)}
    rows = [{"step": int(match[1]), **_object(body[name])} for name, match in named.items() if match is not None]
    return [*map(plain, rows)] if len(rows) > 1 else []


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _side_by_side(body: Mapping[str, object]) -> Rows:
    """Return the rows of lists of points that stand side by side, by their steps."""
    points = {name: series for name, each in body.items() if isinstance(each, list) and (series := _points(name, each))}
    longest = max(points.values(), key=len, default={})
    shapes = Counter(
        frozenset(next(iter(each.values()))) for name, each in points.items() if not is_held_out(f"{name}/")
    )
    if any(count > 1 and (len(shape) > 1 or all(map(_OF_RUN.match, points))) for shape, count in shapes.items()):
        # Lists of the same names are of several runs.
        return []
    merged: dict[int, dict[str, object]] = {}
    owners: dict[str, str] = {}
    for name, by_step in points.items():
        if 2 * len(by_step.keys() & longest.keys()) < len(by_step):
            continue
        for step, row in by_step.items():
            into = merged.setdefault(step, {"step": step})
            for metric, value in row.items():
                is_apart = is_held_out(f"{name}/") or owners.setdefault(metric, name) != name
                into[f"{name}/{metric}" if is_apart and metric != name else metric] = value
    return [merged[step] for step in sorted(merged)]


def _points(name: str, rows: Sequence[object]) -> dict[int, dict[str, object]]:
    """Return the numbers of a list by their steps; none if it is of anything else, or a step is there twice."""
    pairs = [{"step": row[0], name: row[1]} for row in rows if is_list(row) and isinstance(row, list) and len(row) == 2]
    point_rows = (
        pairs if len(pairs) == len(rows) and is_metric(name) else [plain(row) for row in rows if isinstance(row, dict)]
    )
    by_step: dict[int, dict[str, object]] = {}
    for row in point_rows:
        if (step := step_of(row)) is None or not all(map(is_number, row.values())):
            return {}
        numbers = {_called(name, metric): value for metric, value in row.items() if metric not in STEPS}
        by_step[step] = {metric: value for metric, value in numbers.items() if value is not None}
    return by_step if len(by_step) == len(rows) else {}


def _called(name: str, metric: str) -> str:
    """Return the name of a number in a list that is called as a metric: what is no metric's says part of it."""
    if is_metric(metric) or generic(metric) is not None or not is_metric(name):
        return metric
    return name if metric in (*VALUES, name) else f"{name}/{metric}"


def _is_log(rows: Rows, is_named: bool) -> bool:
    """Tell rows of logged numbers by the first ones; within an object that names them, columns say enough."""
    first, some = rows[0], rows[:_LOOKED_AT]
    has_step = any(name in first for name in STEPS)
    is_of_numbers = is_named and has_step and all(map(is_number, first.values())) and is_log_line(first)
    is_of_trainer = any("step" in row and len(OF_TRAINER & row.keys()) > 1 for row in some)
    return is_of_numbers or is_of_trainer or kind_of_rows(some) is not None or are_of_steps(some)
