"""JSON Lines of logged numbers: verl's file logger, metrics.jsonl of prime-rl and tinker-cookbook, a line a value."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutdoctor.importers.logs.base import (
    STEPS,
    Entry,
    LogNotes,
    entries_of,
    entries_of_tracker,
    is_log_row,
    is_long,
)
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.table import whose

_LOOKED_AT = 4
"""Objects at the beginning of a file."""


class JsonLines:
    """An object on each line, with a step and numbers. Lines that are cut, elided or none are left out, and counted."""

    def detect(self, path: Path) -> str | None:
        """Look at the first objects: before its numbers a loop may write its configuration, or an evaluation."""
        if path.name.endswith(".metrics.jsonl") or not path.is_file():
            return None
        rows = lines.first_objects(path, _LOOKED_AT)
        if rows and not _may_come_first(rows[0]):
            rows = rows[:1]
        return next((kind for row in rows if (kind := kind_of_row(row)) is not None), None)

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield every line that is whole."""
        if is_history(lines.first_object(Path(source.path)) or {}):
            yield from entries_of_tracker([row for row, _ in _rows(source, notes)], source.name, notes)
            return
        without: list[str] = []
        for row, where in _rows(source, notes):
            if "data" in row or any(row.get(name) is not None for name in STEPS):
                yield from entries_of(row, where, notes)
            else:
                without.append(where)
        if without:
            count = "1 line has no step and is" if len(without) == 1 else f"{len(without):,} lines have no step and are"
            notes.tell(f"{source.name}: {count} left out ({without[0].rpartition(', ')[2]})")


def _rows(source: Source, notes: LogNotes) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the objects of a file, and where each is."""
    broken: list[int] = []
    for chunk in lines.chunks([source]):
        for number, raw in enumerate(chunk.raw.split(b"\n"), start=chunk.first):
            row = lines.parse(raw.removeprefix(b"\xef\xbb\xbf"))
            if row is not None:
                yield row, f"{source.name}, line {number}"
            elif raw.strip():
                broken.append(number)
    if broken:
        count = "1 line is" if len(broken) == 1 else f"{len(broken):,} lines are"
        notes.tell(f"{source.name}: {count} no whole JSON object, and left out (line {broken[0]:,})")


def _may_come_first(row: Mapping[str, object]) -> bool:
    """Tell the configuration of a loop, which has objects and no step, and numbers of an evaluation, which has one."""
    if any(name in row for name in STEPS):
        return all(value is None or isinstance(value, (bool, int, float)) for value in row.values())
    return any(isinstance(value, dict) for value in row.values())


def is_history(row: Mapping[str, object]) -> bool:
    """Tell a row that `scan_history` of wandb's API gave."""
    return {"_step", "_timestamp"} <= row.keys()


def kind_of_row(row: Mapping[str, object]) -> str | None:
    """Say what a row of logged numbers is; None if it is a rollout, or something else.

    Rollouts have a reward or a text; a log of numbers has names that nobody gives a rollout.
    """
    if set(row) == {"step", "data"} and isinstance(row["data"], dict):
        return "verl's file logger"
    if is_history(row):
        return "the history of a wandb run"
    is_flat = all(value is None or isinstance(value, (bool, int, float, str)) for value in row.values())
    if not is_flat or not any(name in row for name in STEPS):
        return None
    if is_long(row):
        return "JSON Lines of step, name and value"
    if not is_log_row(row):
        return None
    trainer = whose(row)
    return "JSON Lines of logged numbers" + (f", named as {trainer} does" if trainer else "")
