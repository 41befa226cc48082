"""`check --list`: every place that a rule points at, written as it is found."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import NOTHING_CHECKED
from rolloutdoctor.cli.inputs import refuse_inputs
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say, show
from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.escapes import json_text, visible_lines

if TYPE_CHECKING:
    from rolloutdoctor.commands.check.places import Place
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.rules.table import AnyRule

Write = Callable[["Sequence[Place]"], None]

_FORMATS = ("full", "json", "jsonl", "markdown")
_BATCH = 2**16
"""Rows that a Parquet file takes at a time."""


def one_rule(code: str) -> "AnyRule":
    """Return the rule that a code or a name stands for.

    Raises:
        UsageError: if it is none, or a family.
    """
    from rolloutdoctor.rules.table import pick

    picked = pick([code], [])
    if len(picked) != 1:
        raise UsageError(f"--list {code}: a family of {len(picked)} rules; name one of them")
    return picked[0]


def list_rule(run: "Run", rule: "AnyRule", options: "CheckOptions", form: opt.Format, path: str | None) -> int:
    """Write every place that a rule points at, and return the exit code.

    Raises:
        UsageError: if a format has no form for this, or nothing can be written there.
    """
    from rolloutdoctor.commands.check.places import list_places

    suffix = "" if path is None else path[path.rfind(".") :]
    if form.value not in _FORMATS:
        raise UsageError(
            f"--list has no format {form.value} (known: {', '.join(_FORMATS)}; or a file .parquet or .csv)"
        )
    check_target(path, "--output-file", whole="a Parquet file" if suffix == ".parquet" else "")
    writing = {".parquet": _parquet, ".csv": _csv}.get(suffix)
    count = 0

    def counted(places: "Sequence[Place]") -> None:
        nonlocal count
        count += len(places)
        write(places)

    with _lines(form.value, path) if writing is None or path is None else writing(path) as write:
        report = list_places(run, rule, options, counted)
    if report.findings:
        if not count:
            say(f"{rule.code} {rule.name} keeps no places: it is of the run as a whole ({report.findings[0].headline})")
        return 0
    skipped = next((f"skipped: {entry.reason}; {entry.remedy}" for entry in report.skipped), None)
    vacuous = next((f"not applicable: {entry.reason}" for entry in report.not_applicable), None)
    say(f"{rule.code} {rule.name} lists nothing: {skipped or vacuous or 'clean'}")
    return NOTHING_CHECKED if skipped else 0


@contextmanager
def _replacing(path: str) -> Iterator[Any]:
    """A file that appears whole, when everything was written."""
    from rolloutdoctor.io.write.replacing import Replacement

    target = Target.of(path)
    refuse_inputs(target)
    replacement = Replacement(target, "this list")
    with replacement.explaining_errors():
        yield replacement.file
    replacement.complete()
    replacement.place()


@contextmanager
def _lines(form: str, path: str | None) -> Iterator[Write]:
    """Text, a line for each place."""
    if path is None:
        yield from _written(form, show)
        return
    with _replacing(path) as file:
        yield from _written(form, lambda text: file.write(visible_lines(text).encode()))


def _written(form: str, put: Callable[[str], object]) -> Iterator[Write]:
    from rolloutdoctor.commands.check.places import PLACE_COLUMNS
    from rolloutdoctor.views.markup import inert
    from rolloutdoctor.views.style import plain

    head = {"full": _row(*PLACE_COLUMNS), "markdown": f"| {' | '.join(PLACE_COLUMNS)} |\n|{' --- |' * 6}\n"}
    count = 0

    def write(places: "Sequence[Place]") -> None:
        nonlocal count
        lines = [head.get(form, "")] if not count else []
        for place in places:
            cells = place.cells()
            if form in ("json", "jsonl"):
                text = json_text(dict(zip(PLACE_COLUMNS, cells, strict=True)))
                lines.append(f"{text}\n" if form == "jsonl" else f"{',' if count else '['}\n{text}")
            elif form == "markdown":
                lines.append(f"| {' | '.join(inert(plain(_word(cell), 200)) for cell in cells)} |\n")
            else:
                lines.append(_row(*(plain(_word(cell), 120) for cell in cells)))
            count += 1
        put("".join(lines))

    yield write
    if form == "json":
        put("\n]\n" if count else "[]\n")


def _word(cell: object) -> str:
    return "-" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _row(step: str, split: str, group: str, row: str, value: str, note: str) -> str:
    return f"{step:>6}  {split:<5}  {group:<14}  {row:<14}  {value:>12}  {note}".rstrip() + "\n"


@contextmanager
def _csv(path: str) -> Iterator[Write]:
    from rolloutdoctor.commands.check.places import PLACE_COLUMNS

    with _replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        lines = csv.writer(text)
        lines.writerow(PLACE_COLUMNS)
        yield lambda places: lines.writerows(place.cells() for place in places)
        text.detach()


@contextmanager
def _parquet(path: str) -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rolloutdoctor.commands.check.places import PLACE_COLUMNS

    types = (pa.int64(), pa.string(), pa.string(), pa.string(), pa.float64(), pa.string())
    schema = pa.schema(list(zip(PLACE_COLUMNS, types, strict=True)))
    waiting: list[tuple[object, ...]] = []
    with _replacing(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:

        def flush() -> None:
            columns = list(zip(*waiting, strict=True)) or [()] * len(schema)
            writer.write_table(
                pa.table([pa.array(cells, kind) for cells, kind in zip(columns, types, strict=True)], schema=schema)
            )
            waiting.clear()

        def write(places: "Sequence[Place]") -> None:
            waiting.extend(place.cells() for place in places)
            if len(waiting) >= _BATCH:
                flush()

        yield write
        flush()
