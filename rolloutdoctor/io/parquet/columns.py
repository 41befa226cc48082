"""Columns of the contract in a file, with their names and types."""

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import pyarrow as pa
from pyarrow import types

from rolloutdoctor.data.schema import BY_NAME, COLUMNS, Column, Kind
from rolloutdoctor.results.errors import SchemaError

TrainerAliases = Mapping[str, Mapping[str, str]]
NO_ALIASES: TrainerAliases = MappingProxyType({})


@dataclass(frozen=True)
class StoredColumn:
    """A column of the contract as one file stores it.

    Attributes:
        column: what it is.
        stored: its name in the file, an alias perhaps.
        type: its arrow type.
    """

    column: Column
    stored: str
    type: pa.DataType

    @property
    def label(self) -> str:
        """Return the column's name for messages: the file's, with the canonical name if that differs."""
        return self.stored if self.stored == self.column.name else f"{self.stored} ({self.column.name})"


def resolve(
    schema: pa.Schema, name: str, *, trainer: str | None = None, aliases: TrainerAliases = NO_ALIASES
) -> dict[str, StoredColumn]:
    """Map canonical names to the columns of a file.

    The canonical name wins over aliases. `advantages` with one number per row is `advantage`, and `advantage` with
    lists is `advantages`. A column whose type is null (nothing but nulls) is absent.

    Args:
        schema: of the file.
        name: of the file, for messages.
        trainer: who wrote it.
        aliases: trainer to its own names of columns, which mean another one elsewhere, or none.

    Raises:
        SchemaError: on a missing `step`, a type that the column may not have, two aliases of one column, or two
            columns of one name.
    """
    twice = sorted(stored for stored, count in Counter(schema.names).items() if count > 1)
    if twice:
        raise SchemaError(f"{name}: two columns are called {twice[0]}; drop or rename one of them")
    by_alias = {alias: column.name for column in COLUMNS for alias in column.aliases}
    by_alias |= aliases.get((trainer or "").partition("@")[0], {})
    exact: dict[str, pa.Field] = {}
    fields: dict[str, list[pa.Field]] = {}
    for field in schema:
        if types.is_null(field.type):
            continue
        canonical = _advantage(field) or field.name
        if canonical == field.name and canonical in BY_NAME:
            exact[canonical] = field
        elif canonical in BY_NAME:
            fields.setdefault(canonical, []).append(field)
        elif field.name in by_alias:
            fields.setdefault(by_alias[field.name], []).append(field)
    stored = {}
    for column in COLUMNS:
        candidates = [exact[column.name]] if column.name in exact else fields.get(column.name, [])
        if len(candidates) > 1:
            names = [field.name for field in candidates]
            raise SchemaError(
                f"{name}: columns {' and '.join(names)} both mean {column.name}; "
                f"rename the right one to {column.name}, or drop the others"
            )
        if candidates:
            stored[column.name] = _checked(StoredColumn(column, candidates[0].name, candidates[0].type), name)
    if "group_id" not in stored and "task_id" in stored:
        stored["group_id"] = replace(stored["task_id"], column=BY_NAME["group_id"])
    if "step" not in stored:
        names = ["step", *(alias for alias, canonical in by_alias.items() if canonical == "step")]
        have = ", ".join(schema.names[:30])
        more = ", ..." if len(schema.names) > 30 else ""
        raise SchemaError(
            f"{name}: no column step (accepted names: {', '.join(names)}; the file has: {have}{more}); "
            "add the optimizer step of every row as an integer"
        )
    return stored


_ALIKE = 0.85
"""How alike two names are, as `difflib` says, before one is the other misspelt: `rewrd`, `reward` are 0.91."""


def misspelt(unread: Iterable[str], columns: Collection[str]) -> dict[str, str]:
    """Map columns that a file lacks to what it has under a name much like theirs or one of their aliases.

    >>> misspelt(["policy_logprobs", "Reward", "learning_rate"], ["step"])
    {'policy_log_probs': 'policy_logprobs', 'reward': 'Reward'}
    """
    names = {name: each.name for each in COLUMNS if each.name not in columns for name in (each.name, *each.aliases)}
    meant: dict[str, str] = {}
    for name in unread:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=_ALIKE)
        if close:
            meant.setdefault(names[close[0]], name)
    return meant


def _advantage(field: pa.Field) -> str | None:
    if field.name in ("advantage", "advantages"):
        return "advantages" if _is_list(field.type) else "advantage"
    return None


def _checked(stored: StoredColumn, name: str) -> StoredColumn:
    kind = stored.column.kind
    if not _ACCEPTS[kind](stored.type):
        raise SchemaError(
            f"{name}: column {stored.label} is {stored.type} where {kind.value} was expected; "
            "write it with that type, or rename it if it is something else"
        )
    return stored


def _is_list(type_: pa.DataType) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _is_number(type_: pa.DataType) -> bool:
    return bool(types.is_floating(type_) or types.is_integer(type_) or types.is_boolean(type_))


def _is_text(type_: pa.DataType) -> bool:
    if types.is_dictionary(type_):
        type_ = type_.value_type
    return bool(types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_))


def _is_identifier(type_: pa.DataType) -> bool:
    if types.is_dictionary(type_):
        type_ = type_.value_type
    return bool(types.is_integer(type_)) or _is_text(type_)


def _is_named_numbers(type_: pa.DataType) -> bool:
    if types.is_map(type_):
        return _is_text(type_.key_type) and _is_number(type_.item_type)
    if not types.is_struct(type_):
        return False
    fields = [type_.field(index).type for index in range(type_.num_fields)]
    return all(_is_number(field) or bool(types.is_null(field)) for field in fields)


def _is_turns(type_: pa.DataType) -> bool:
    if not _is_list(type_) or types.is_null(type_.value_type):
        return _is_list(type_)
    if not types.is_struct(type_.value_type):
        return False
    fields = {field.name: field.type for field in type_.value_type}
    return all(
        name in fields and accepts(fields[name]) if is_needed else accepts(fields.get(name, pa.null()))
        for name, is_needed, accepts in _TURN_FIELDS
    )


def _list_of(accepts: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    # list<null> is what lists that are all empty are inferred to be.
    return lambda type_: _is_list(type_) and (types.is_null(type_.value_type) or bool(accepts(type_.value_type)))


_TURN_FIELDS: tuple[tuple[str, bool, Callable[[pa.DataType], bool]], ...] = (
    ("author", True, _is_text),
    *((name, True, lambda type_: bool(types.is_integer(type_))) for name in ("start", "stop")),
    *(
        (name, False, lambda type_: bool(types.is_integer(type_) or types.is_null(type_)))
        for name in ("turn", "version")
    ),
    *((name, False, lambda type_: _is_text(type_) or bool(types.is_null(type_))) for name in ("status", "error")),
)
"""Field of a turn, whether it has to be there, and the types that it may have."""

_ACCEPTS: dict[Kind, Callable[[pa.DataType], bool]] = {
    Kind.INTEGER: types.is_integer,
    Kind.NUMBER: _is_number,
    Kind.IDENTIFIER: _is_identifier,
    Kind.TEXT: _is_text,
    # Prompts and responses are never read, so whatever a trainer stores there is fine.
    Kind.MESSAGES: lambda _: True,
    Kind.NAMED_NUMBERS: _is_named_numbers,
    Kind.TURNS: _is_turns,
    Kind.FLOATS: _list_of(lambda type_: types.is_floating(type_) or types.is_integer(type_)),
    Kind.TOKENS: _list_of(types.is_integer),
    Kind.MASK: _list_of(lambda type_: types.is_boolean(type_) or types.is_integer(type_)),
}
