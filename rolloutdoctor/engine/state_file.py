"""States of a check in files: what parts of a run gave, kept until they are added up and judged together.

A file is JSON with exact numbers: floats are written so that they read back as they were, and what JSON cannot write
(NaN, infinity) under its name. What a rule adds up is written by the fields of its tally, whatever they are.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, get_args, get_origin

from rolloutdoctor.audit.tally import QuantityTally
from rolloutdoctor.audit.windows import OpenWindow
from rolloutdoctor.data.batch import EVAL, TRAIN, StepKey
from rolloutdoctor.engine.accumulate import RuleState, RunState
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.results.audit import Refuted
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Example, InputSummary, Setting
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.table import RULES

STATE_SCHEMA = 1
_MOST_BYTES = 2**30
"""Largest size of a state, in bytes: it grows with the number of steps, by some kilobytes for each."""

_MOST = 2**63
"""Whole numbers are below it."""


@dataclass(frozen=True)
class LoggedNames:
    """Which metrics were logged in a split, and at which steps."""

    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainerInfo:
    """Who made a run, and with which options.

    Attributes:
        name: of the trainer.
        version: of the trainer.
        version_origin: where that came from.
        version_assumed: True if nothing said it.
        config: option to value and origin.
        fixes: labels of the fixes that the run already had.
    """

    name: str
    version: str
    version_origin: str
    version_assumed: bool
    config: Mapping[str, Setting]
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class SavedState:
    """What a check of a part of a run has seen, with all that judging it takes.

    Attributes:
        version: of this package.
        device: where the evaluation ran.
        dtype: of the token values.
        files: names of the files.
        columns: canonical columns that all of them have.
        logged: split to the metrics logged in it.
        rules: codes of the rules that were selected.
        maker: who made the run, or None if nothing says.
        metadata: what the files say of themselves.
        has_rows: False if there are logged metrics alone.
        state: what was seen.
        refuted: options that the log contradicts.
    """

    version: str
    device: str
    dtype: str
    files: tuple[str, ...]
    columns: frozenset[str]
    logged: Mapping[str, LoggedNames]
    rules: tuple[str, ...]
    maker: TrainerInfo | None
    metadata: RunMetadata
    has_rows: bool
    state: RunState
    refuted: tuple[Refuted, ...] = ()

    @property
    def provenance(self) -> str:
        """Who made the run by its files, as text, in which NaN is what it is."""
        found = self.metadata
        return repr((found.trainer, found.trainer_version, sorted(found.config.items())))


def logged_names(metrics: LoggedMetrics) -> dict[str, LoggedNames]:
    """Which names a trainer logged, by split."""
    found, logged = {}, metrics.steps()
    for split in (TRAIN, EVAL):
        keys = [key for key in logged if key.split == split]
        names = sorted({name for key in keys for name in metrics.at(key)})
        found[split] = LoggedNames(tuple(key.step for key in keys), tuple(names))
    return found


def dumped(saved: SavedState) -> str:
    """Return the text of a state file; equal states give equal bytes."""
    state, maker = saved.state, saved.maker
    body = {
        "schema_version": STATE_SCHEMA,
        "rolloutdoctor": saved.version,
        "device": saved.device,
        "dtype": saved.dtype,
        "files": list(saved.files),
        "columns": sorted(saved.columns),
        "logged": {split: _record(names) for split, names in saved.logged.items()},
        "rules": list(saved.rules),
        "trainer": None
        if maker is None
        else {**_record(maker), "config": {name: _record(one) for name, one in maker.config.items()}},
        "metadata": {**_record(saved.metadata), "config": _plain(dict(saved.metadata.config))},
        "has_rows": saved.has_rows,
        "refuted": [_record(one) for one in saved.refuted],
        "state": {
            "input": _record(state.input),
            "odd_groups": state.odd_groups,
            "failures": {why: list(where) for why, where in sorted(state.failures.items())},
            "seen": [list(key) for key in state.seen],
            "audit": {name: _record(tally) for name, tally in sorted(state.audit.items())},
            "windows": [_record(window) for _, window in sorted(state.windows.items())],
            "rules": {
                code: {
                    "steps": [[*key, _record(tally)] for key, tally in one.steps],
                    "examples": [_record(example) for example in one.examples],
                    "unmeasured": one.skipped_steps,
                }
                for code, one in state.rules.items()
            },
        },
    }
    return json_text(body, compact=True) + "\n"


def load_state(path: str) -> SavedState:
    """Read a state file.

    Raises:
        InputError: if it cannot be read, was not written by `dumped`, or by another version of this package.
    """
    given, expected = path, "name a file that check --save-state wrote"
    path = shown(given)
    text = read_small(given, expected=expected, most=_MOST_BYTES, error=InputError)
    try:
        body = json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise InputError(f"{path}: nested too deeply; {expected}") from None
    except ValueError:
        raise InputError(f"{path}: not JSON; {expected}") from None
    if not isinstance(body, dict) or "schema_version" not in body or "state" not in body:
        raise InputError(f"{path}: not a state of a check; name a file that check --save-state wrote")
    written = (body["schema_version"], body.get("rolloutdoctor"))
    if written != (STATE_SCHEMA, __version__):
        raise InputError(
            f"{path}: a state of rolloutdoctor {written[1]} (schema {written[0]}), and this is {__version__} (schema "
            f"{STATE_SCHEMA}): numbers of two versions do not add up; check that part again"
        )
    try:
        return _loaded(body)
    except RecursionError:
        raise InputError(f"{path}: nested too deeply; {expected}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: the state is damaged ({type(error).__name__}: {error}); check that part again"
        ) from None


def _loaded(body: Mapping[str, Any]) -> SavedState:
    made, state = body["trainer"], body["state"]
    tallies = {rule.code: rule.tally for rule in RULES}
    return SavedState(
        version=body["rolloutdoctor"],
        device=_word(body["device"]),
        dtype=_word(body["dtype"]),
        files=tuple(map(_word, body["files"])),
        columns=frozenset(map(_word, body["columns"])),
        logged={split: _built(LoggedNames, body["logged"][split]) for split in (TRAIN, EVAL)},
        rules=tuple(map(_word, body["rules"])),
        maker=None
        if made is None
        else _built(
            TrainerInfo,
            made | {"config": {"map": {}}},
            config={k: _built(Setting, v) for k, v in made["config"].items()},
        ),
        metadata=_built(RunMetadata, body["metadata"]),
        has_rows=bool(body["has_rows"]),
        refuted=tuple(_built(Refuted, one) for one in body["refuted"]),
        state=RunState(
            input=_built(InputSummary, state["input"]),
            rules={
                code: RuleState(
                    tuple((_key(step, split), _built(tallies[code], tally)) for step, split, tally in one["steps"]),
                    tuple(_built(Example, example) for example in one["examples"]),
                    _whole(one["unmeasured"]),
                )
                for code, one in state["rules"].items()
            },
            odd_groups=_whole(state["odd_groups"]),
            failures={why: (_whole(step), _whole(count)) for why, (step, count) in state["failures"].items()},
            seen=tuple(_key(*key) for key in state["seen"]),
            audit={_word(name): _built(QuantityTally, tally) for name, tally in state["audit"].items()},
            windows={(one.last, one.name): one for one in (_built(OpenWindow, each) for each in state["windows"])},
        ),
    )


def _record(value: Any) -> dict[str, object]:  # noqa: ANN401  # any dataclass
    """The fields of a dataclass; its mappings of other dataclasses are left to the caller."""
    return {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.name != "config"}


def _plain(value: object) -> object:
    """What JSON can write without losing anything; `_value` turns it back.

    >>> _plain((1, 0.1, float("nan")))
    {'tuple': [1, 0.1, {'float': 'nan'}]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {"map": {str(name): _plain(one) for name, one in value.items()}}
    raise TypeError(f"{type(value).__name__} cannot be kept in a state")


def _refused(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _value(plain: object) -> object:
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError("a number is too large")
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(_value(one) for one in inner)
    if kind == "map":
        return {name: _value(one) for name, one in inner.items()}
    raise ValueError(f"unknown kind of value {kind!r}")


def _built(kind: Callable[..., Any], plain: Mapping[str, object], **given: object) -> Any:  # noqa: ANN401  # an instance of `kind`
    """The dataclass of these fields: all of them, and numbers where numbers belong.

    Raises:
        TypeError: if they are not the fields of the class.
    """
    found = {name: _value(one) for name, one in plain.items()} | given
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass, called as what it makes
        if not _fits(found[one.name], one.type):
            raise TypeError(f"{one.name} is {found[one.name]!r}")
    return kind(**found)


def _fits(value: object, kind: object) -> bool:
    """Tell whether a value is of the type that a field is declared with; whole numbers are counts or steps."""
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) < _MOST)
    if kind is int:
        return type(value) is int and 0 <= value < _MOST
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, tuple):
        kinds = inner[:1] * len(value) if inner[-1:] == (Ellipsis,) else inner
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin is not None and isinstance(value, Mapping):
        return all(_fits(name, inner[0]) and _fits(one, inner[1]) for name, one in value.items())
    if origin is not None:
        return False
    return isinstance(value, kind) if isinstance(kind, type) else True


def _key(step: object, split: object) -> StepKey:
    if split not in (TRAIN, EVAL):
        raise ValueError(f"split {split!r}")
    return StepKey(_whole(step), _word(split))


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise TypeError(f"{value!r} where a whole number of 0 or more was expected")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a word was expected")
    return value
