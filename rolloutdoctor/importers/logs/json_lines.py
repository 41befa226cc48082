"""JSON Lines of logged numbers: verl's file logger, metrics.jsonl of prime-rl and tinker-cookbook, a line a value."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rolloutdoctor.importers.logs.kinds_of_rows import NUMBERS, are_of_steps, is_history, kind_of_rows, steps_by_counter
from rolloutdoctor.importers.logs.notes import LogNotes, read_once
from rolloutdoctor.importers.logs.numbers import Entry, is_number
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.importers.logs.printed import dict_in, values_of
from rolloutdoctor.importers.logs.row_shapes import plain, without_excerpts
from rolloutdoctor.importers.logs.rows import LONG, STEPS, counter_of
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.generic import is_metric

_LOOKED_AT = 16
"""Objects at the beginning of a file."""


class JsonLines:
    """An object on each line, with a step and numbers. Lines that are cut, elided or none are left out, and counted."""

    def detect(self, path: Path) -> str | None:
        """Look at the first objects: before its numbers a loop may write its configuration, or an evaluation."""
        if path.name.endswith(".metrics.jsonl") or not path.is_file():
            return None
        rows, _ = steps_by_counter(lines.first_objects(path, _LOOKED_AT, repeats=True))
        samples = [*map(without_excerpts, rows)]
        is_log = are_of_steps(rows) or are_of_steps(samples, of_samples=True)
        # A list under a name that nobody knows may have a number for each token.
        is_log = is_log and all(any(map(is_metric, row)) and all(map(is_number, row.values())) for row in samples)
        return kind_of_rows(rows) or (NUMBERS if is_log else None)

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield every line that is whole."""
        yield from entries_of_rows(read_once(_read, source, notes), source.name, notes)


def _read(source: Source, notes: LogNotes) -> Sequence[Row]:
    """Return the rows, each with its step."""
    is_tracker = is_history(lines.first_object(Path(source.path)) or {})
    read = [*_rows(source, notes)]
    found, counter = steps_by_counter([row for row, _ in read])
    if counter:
        notes.tell(f"{source.name}: the lines name no step; {counter}, which counts them, is taken for it")
    return [
        (row if is_tracker else plain(without_excerpts(row)), where)
        for row, (_, where) in zip(found, read, strict=True)
    ]


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
