"""Any JSON Lines or Parquet with one rollout in each row: names that are not ours are mapped by the user."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyarrow import types

from rolloutdoctor.data.schema import BY_NAME, COLUMNS, METADATA_KEY, TEXTS, Kind
from rolloutdoctor.importers import base, mapped_lines
from rolloutdoctor.importers.equal_prompts import with_groups
from rolloutdoctor.importers.mapped_lines import Place, cell, constant, read_lines, value_at, value_of, whole_reward
from rolloutdoctor.importers.reading import folders, lines
from rolloutdoctor.importers.reading.parquet_files import batches
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.parquet.files import open_parquet, reading
from rolloutdoctor.results.errors import InputError, SchemaError, UsageError, nearest


class MappedTable:
    """JSON Lines or Parquet of any origin.

    A column is taken from where `--map NAME=WHERE` says, else from its own name or one of its aliases.
    WHERE is a name, a path such as ``info.score`` in JSON, or a number or quoted text that every row gets. What is
    mapped nowhere is left out. Every file has the columns of the first row of the first file.
    """

    name = "mapped"
    summary = "any JSON Lines or Parquet, columns named with --map"
    logs_beside = True
    checks_files = False
    omits_rows = True
    recording: Mapping[str, str] = {
        "*": "say where the file has it with --map COLUMN=WHERE, or write it with rolloutdoctor.recorders.own_loop"
    }

    def detect(self, path: Path) -> str | None:
        """JSON Lines with a step and something to check, under names that are known."""
        files = _files(path, (".jsonl", ".json"))
        first = lines.first_object(files[0]) if files else None
        if first is None:
            return None
        places = _where(first, {}, files[0].name, strict=False)
        if "step" not in places or not places.keys() & {"reward", "policy_log_probs", "old_log_probs", "advantage"}:
            return None
        return f"JSON Lines with {', '.join(sorted(places))}"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order given."""
        for column in options.columns:
            if column not in BY_NAME:
                raise UsageError(f"--map {column}=...: no column is called {column!r}{nearest(column, list(BY_NAME))}")
        files = folders.named(sources, partial(_files, endings=(".jsonl", ".json", ".parquet")))
        if not files:
            raise InputError(f"{sources[0].name}: no JSON Lines and no Parquet there")
        total = sum(Path(file.path).stat().st_size for file in files)
        done = 0
        where: dict[str, Place] | None = None
        for file in files:
            if file.path.endswith(".parquet"):
                where = _read_parquet(file, sink, options, where)
            else:
                if where is None:
                    where = _stored_in_lines(file, files, sink, options)
                if where is not None:
                    read_lines(file, sink, where, done, total)
            done += Path(file.path).stat().st_size
            sink.advance(done, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no whole row in these files")


def _stored_in_lines(
    file: Source, files: Sequence[Source], sink: base.RunSink, options: base.ImportOptions
) -> dict[str, Place] | None:
    """Find the columns in the first line of a file, and begin with them; None if it has no whole line."""
    first = next(lines.objects(file), None)
    if first is None or first.body is None:
        if first is not None:
            sink.note(f"{file.name}: the last line was not written to its end, and is left out")
        return None
    sink.begin(RunMetadata())
    return _wanted(with_groups(_where(first.body, options.columns, file.name, strict=True), files, sink), options)


def _wanted(where: dict[str, Place], options: base.ImportOptions) -> dict[str, Place]:
    """Leave out the texts where nobody wants them: they are most of a file."""
    return where if options.text else {name: path for name, path in where.items() if name not in TEXTS}


def _where(body: Mapping[str, object], mapping: Mapping[str, str], file: str, *, strict: bool) -> dict[str, Place]:
    """Find each column in the first row: as mapped, else by its name, else by an alias."""
    places: dict[str, Place] = {}
    for column in COLUMNS:
        if column.name in mapping:
            path = mapping[column.name]
            if value_at(body, path) is None and path not in body:
                literal = constant(path)
                if literal is not None:
                    places[column.name] = literal
                    continue
                names = list(body)
                have = ", ".join(names[:20])
                raise SchemaError(
                    f"{file}: --map {column.name}={path}: no such field{nearest(path, names)} (it has {have})"
                )
            places[column.name] = path
            continue
        names = [name for name in (column.name, *column.aliases) if name in body and name not in mapping.values()]
        fits = [name for name in names if _fits(column.kind, body[name])]
        if fits:
            places[column.name] = fits[0]
    if total := "" if "reward" in places else mapped_lines.total_of_parts(body):
        places["reward"] = total
    if strict and "step" not in places:
        raise SchemaError(f"{file}: no step; {advice(body, mapping)}")
    updates = [name for name in _OF_AN_UPDATE if name in body]
    of_rows = {column for column in places if column not in ("step", "reward", "split")}
    if strict and updates and not of_rows:
        raise SchemaError(
            f"{file}: a log of numbers, with {' and '.join(updates)}, and no rollouts: its rewards are means; "
            "check it without --map and --from, or map a group_id if each row is a response"
        )
    return places


def fields_of(body: Mapping[str, object]) -> dict[str, str]:
    """Return the fields of a row that are columns, by their own names or an alias."""
    return {name: str(place) for name, place in _where(body, {}, "", strict=False).items()}


_OF_AN_UPDATE = ("loss", "learning_rate", "lr", "grad_norm")
"""Names of what an update has, and a response has not."""

_LIKELY = {
    "step": ("step", "iteration", "update"),
    "group_id": ("group", "prompt_id", "uid", "question_id", "task_id", "prompt_idx"),
    "reward": ("reward", "score", "return"),
}
"""Column to what the names of fields have in them that are likely to be it, the best first."""


def advice(body: Mapping[str, object], mapped: Collection[str] = ()) -> str:
    """Suggest how to map the fields of a row that are not understood, but for columns that are mapped.

    >>> advice({"prompt": "1+1=", "info": {"score": 1.0}})
    'say where the columns are, such as --map step=0 --map reward=info.score (it has prompt, info.score)'
    """
    fields = dict(_flat(body, ""))
    places = _where(body, {}, "", strict=False)
    words = []
    for column, likely in _LIKELY.items():
        if column in places or column in mapped:
            continue
        fitting = [name for name, value in fields.items() if _is_plain(value, column)]
        guess = next((name for part in likely for name in fitting if part in name.lower()), None)
        if guess is not None and column == "reward":
            guess = whole_reward(guess, fitting)
        if guess is None and column == "step":
            guess = "0"
        if guess is not None:
            words.append(f"--map {column}={guess}")
    have = ", ".join(list(fields)[:20])
    has = f"it has {have}" if have else "it has no field"
    return f"say where the columns are, such as {' '.join(words) or '--map step=NAME'} ({has})"


def _is_plain(value: object, column: str) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number or (column == "group_id" and isinstance(value, str))


def _flat(body: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in body.items():
        if isinstance(value, dict) and prefix.count(".") < 3:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _fits(kind: Kind, value: object) -> bool:
    if kind.per_token or kind is Kind.TURNS:
        return isinstance(value, list)
    if kind is Kind.NAMED_NUMBERS:
        return isinstance(value, dict)
    return kind is Kind.MESSAGES or not isinstance(value, (dict, list))


def _read_parquet(
    file: Source, sink: base.RunSink, options: base.ImportOptions, where: dict[str, Place] | None
) -> dict[str, Place]:
    with open_parquet(file) as parquet:
        with reading(file.name, "the footer"):
            schema = parquet.schema_arrow
            metadata = schema.metadata or {}
        if where is None:
            where = _wanted(_stored(schema, options.columns, file.name), options)
            sink.begin(RunMetadata.decode(metadata if METADATA_KEY.encode() in metadata else None, file.name))
        named = [place for place in where.values() if isinstance(place, str)]
        for batch in batches(parquet, file, list(dict.fromkeys(named))):
            if batch.num_rows:
                sink.write_from(file, {name: _column(batch, name, path, file) for name, path in where.items()})
        return where


def _column(batch: pa.RecordBatch, name: str, path: Place, file: Source) -> Sequence[object]:
    if not isinstance(path, str):
        return [cell(name, value_of({}, path), f"{file.name}: {path}")] * batch.num_rows
    array, kind = batch.column(path), BY_NAME[name].kind
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kind.per_token or kind is Kind.NUMBER or (kind is Kind.INTEGER and types.is_integer(array.type)):
        plain: Sequence[object] = array
        return plain
    cells = array.to_pylist()
    return [
        cell(name, dict(each) if types.is_map(array.type) and each else each, f"{file.name}: {path}") for each in cells
    ]


def _stored(schema: pa.Schema, mapping: Mapping[str, str], file: str) -> dict[str, Place]:
    shapes: dict[str, object] = {}
    for field in schema:
        if types.is_null(field.type):
            continue
        is_list = types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type)
        is_object = types.is_struct(field.type) or types.is_map(field.type)
        shapes[field.name] = [] if is_list else {} if is_object else 0
    return _where(shapes, mapping, file, strict=True)


def _files(path: Path, endings: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in endings else []
    from rolloutdoctor.importers.logs.table import kind_of

    files = folders.listed(path, lambda entry: entry.suffix in endings and ".metrics." not in entry.name)
    return [each for each in files if kind_of(each) is None]
