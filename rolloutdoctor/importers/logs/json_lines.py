"""JSON Lines of logged numbers: verl's file logger, metrics.jsonl of prime-rl and tinker-cookbook, a line a value."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import is_list, is_number
from rolloutdoctor.importers.logs.printed import dict_in, values_of
from rolloutdoctor.importers.logs.row_names import (
    LONG,
    MOST_NAMES,
    STEPS,
    counter_of,
    has_mean_reward,
    is_log_row,
    is_long,
    of_rollouts,
    step_of,
)
from rolloutdoctor.importers.logs.row_shapes import counted, is_episode, plain, without_excerpts
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities, whose

_LOOKED_AT = 16
"""Objects at the beginning of a file."""

_FEWEST_STEPS = 3
"""Steps that these are of, where they are of samples."""


class JsonLines:
    """An object on each line, with a step and numbers. Lines that are cut, elided or none are left out, and counted."""

    def detect(self, path: Path) -> str | None:
        """Look at the first objects: before its numbers a loop may write its configuration, or an evaluation."""
        if path.name.endswith(".metrics.jsonl") or not path.is_file():
            return None
        rows = lines.first_objects(path, _LOOKED_AT, repeats=True)
        is_log = _are_steps(rows) or are_samples([*map(without_excerpts, rows)])
        return kind_of_rows(rows) or ("JSON Lines of logged numbers" if is_log else None)

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield every line that is whole."""
        is_tracker = is_history(lines.first_object(Path(source.path)) or {})
        rows = [(row if is_tracker else plain(without_excerpts(row)), where) for row, where in _rows(source, notes)]
        yield from entries_of_rows(rows, source.name, notes)


def _rows(source: Source, notes: LogNotes) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the objects of a file, and where each is."""
    broken: list[int] = []
    cut: list[int] = []
    twice: dict[str, list[int]] = {}
    named, steps = "", list[int]()
    without: dict[int, dict[str, object]] = {}
    for chunk in lines.chunks([source]):
        for number, raw in enumerate(chunk.raw.split(b"\n"), start=chunk.first):
            row, repeated = lines.without_repeats(raw.removeprefix(b"\xef\xbb\xbf"))
            for name in repeated:
                twice.setdefault(name, []).append(number)
            if {*repeated} & LONG:
                continue
            if row is None and raw.strip():
                row = _whole_pairs(raw)
                (broken if row is None else cut).append(number)
                if row is not None and counter_of(row) is None:
                    without[number] = row
                    continue
            if row is not None:
                # Where others follow it, nothing says which step a line is of.
                broken += without
                without.clear()
                if (found := counter_of(row)) is not None:
                    named, steps = found[0], [*steps[-1:], found[1]]
                yield row, f"{source.name}, line {number}"
    if steps and len(without) == 1:
        ((number, row),) = without.items()
        without.clear()
        following = steps[-1] + (steps[-1] - steps[0] or 1)
        notes.tell(f"{source.name}, line {number}: its step stood behind the cut, and is taken for {following}")
        yield {**row, named: following}, f"{source.name}, line {number}"
    broken = sorted([*broken, *without])
    for name, numbers in twice.items():
        count = f"line {numbers[0]:,}" if len(numbers) == 1 else f"{len(numbers):,} lines (line {numbers[0]:,})"
        notes.tell(f"{source.name}: {name} is there twice with two values in {count}, and left out there")
    for odd, what in ((broken, "left out"), ([*set(cut) - set(broken)], "read up to where the cut is")):
        if odd:
            count = "1 line is" if len(odd) == 1 else f"{len(odd):,} lines are"
            notes.tell(f"{source.name}: {count} no whole JSON object, and {what} (line {min(odd):,})")


def _whole_pairs(raw: bytes) -> dict[str, object] | None:
    """Return the names and numbers of an object that was cut, before the cut; None if there are no two."""
    is_cut = raw.lstrip().startswith(b"{") and not raw.rstrip().endswith(b"}")
    found = dict_in(raw.decode(errors="replace")) if is_cut else None
    row: dict[str, object] = {**values_of(found or {})}
    row |= {name: int(text) for name, text in (found or {}).items() if name in STEPS and text.isdecimal()}
    return row if len(row) > 1 else None


def _are_steps(rows: Sequence[Mapping[str, object]]) -> bool:
    """Tell rows of numbers, each of another step, with names of metrics; rollouts share a step, or have a text."""
    steps = {
        str(step) for row in rows if (step := next((row[name] for name in STEPS if name in row), None)) is not None
    }
    return 1 < len(rows) == len(steps) and all(
        all(map(is_number, row.values())) and of_rollouts(row.keys()) <= {"reward"} and sum(map(is_metric, row)) > 1
        for row in rows
    )


def are_samples(rows: Sequence[Mapping[str, object]]) -> bool:
    """Tell the rewards of samples, several a step, beside which nothing says of which group they are."""
    steps = [*map(step_of, rows)]
    return (
        None not in steps
        and _FEWEST_STEPS <= len({*steps}) < len(steps)
        and all(
            all(map(is_number, row.values()))
            and of_rollouts(row.keys()) <= {"reward", "advantage"}
            and "reward" in metric_quantities(row).values()
            for row in rows
        )
    )


def kind_of_rows(rows: Sequence[Mapping[str, object]]) -> str | None:
    """Say what the first rows of logged numbers are; None if they are rollouts, or something else."""
    if len(rows) > 1 and (counted(rows) or all(map(is_episode, rows))):
        return "JSON Lines of logged numbers"
    for row in rows:
        if (kind := kind_of_row(row)) is not None:
            return kind
        if not _may_come_first(row):
            return None
    return None


def _may_come_first(row: Mapping[str, object]) -> bool:
    """Tell what a loop writes before its numbers: its configuration, what begins, numbers of samples or evaluations."""
    if all(value is None or isinstance(value, (bool, int, float)) for value in row.values()):
        return any(name in row for name in STEPS)
    return of_rollouts(row.keys()) <= {"reward"}


def is_history(row: Mapping[str, object]) -> bool:
    """Tell a row that `scan_history` of wandb's API gave."""
    return {"_step", "_timestamp"} <= row.keys()


def kind_of_row(row: Mapping[str, object]) -> str | None:
    """Say what a row of logged numbers is; None if it is a rollout, or something else.

    Rollouts have a reward or a text; a log of numbers has names that nobody gives a rollout. The vocabulary of a
    tokenizer has all these names, too.
    """
    if len(row) > MOST_NAMES:
        return None
    row = plain(row)
    if set(row) == {"step", "data"} and isinstance(row["data"], dict):
        return "verl's file logger"
    if is_history(row):
        return "the history of a wandb run"
    is_flat = all(
        value is None or isinstance(value, (bool, int, float, str)) or is_list(value) for value in row.values()
    )
    has_step = any(name in row and not isinstance(row[name], list) for name in STEPS)
    if has_step and has_mean_reward(row):
        return _of_numbers(row)
    if not is_flat or not has_step:
        return None
    if is_long(row):
        return "JSON Lines of step, name and value"
    if not is_log_row(row):
        return None
    return _of_numbers(row)


def _of_numbers(row: Mapping[str, object]) -> str:
    return "JSON Lines of logged numbers" + (f", named as {trainer} does" if (trainer := whose(row)) else "")
