"""States of a check in files: what parts of a run gave, kept until they are added up and judged together.

A file is JSON with exact numbers: floats are written so that they read back as they were, and what JSON cannot write
(NaN, infinity) under its name; frames are written column by column, as their bytes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolloutdoctor.audit.tally import QuantityTally
from rolloutdoctor.audit.windows import OpenWindow
from rolloutdoctor.data.batch import EVAL, TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.engine.accumulate import RunState
from rolloutdoctor.engine.plain_values import MOST, built, plain, record
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.results.audit import Refuted
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import InputSummary, Setting
from rolloutdoctor.results.version import __version__

STATE_SCHEMA = 5
SPLITS = (TRAIN, EVAL)
_MOST_BYTES = 2**30
"""Largest size of a state, in bytes: it has some kilobytes for each step that it keeps."""

_MOST_STEPS = 2**20
"""More than any run has: what spans of steps say is not believed beyond."""


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
    for split in SPLITS:
        keys = [key for key in logged if key.split == split]
        names = sorted({name for key in keys for name in metrics.at(key)})
        found[split] = LoggedNames(tuple(key.step for key in keys), tuple(names))
    return found


def dumped(saved: SavedState) -> str:
    """Return the text of a state file; equal states give equal bytes."""
    return json_text({**_about(saved), "state": plain_run(saved.state)}, compact=True) + "\n"


def _about(saved: SavedState) -> dict[str, object]:
    maker = saved.maker
    return {
        "schema_version": STATE_SCHEMA,
        "rolloutdoctor": saved.version,
        "device": saved.device,
        "dtype": saved.dtype,
        "files": list(saved.files),
        "columns": sorted(saved.columns),
        "logged": {
            split: {"steps": _spans(one.steps, split), "names": list(one.names)} for split, one in saved.logged.items()
        },
        "rules": list(saved.rules),
        "trainer": None
        if maker is None
        else {**record(maker), "config": {name: record(one) for name, one in maker.config.items()}},
        "metadata": {**record(saved.metadata), "config": plain(dict(saved.metadata.config))},
        "has_rows": saved.has_rows,
        "refuted": [record(one) for one in saved.refuted],
    }


def plain_run(state: RunState) -> dict[str, object]:
    """Return a state, of a run or of a part of it, as JSON can write it; `loaded_run` turns it back."""
    return {
        "input": record(state.input),
        "odd_groups": state.odd_groups,
        "failures": {why: list(where) for why, where in sorted(state.failures.items())},
        "seen": {split: _spans([key.step for key in state.seen if key.split == split], split) for split in SPLITS},
        "audit": {name: record(tally) for name, tally in sorted(state.audit.items())},
        "windows": [record(window) for _, window in sorted(state.windows.items())],
        "updates": state.updates,
        "tables": state.tables.dumped(),
    }


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
    return SavedState(
        version=body["rolloutdoctor"],
        device=_word(body["device"]),
        dtype=_word(body["dtype"]),
        files=tuple(map(_word, body["files"])),
        columns=frozenset(map(_word, body["columns"])),
        logged={split: _logged(body["logged"][split]) for split in SPLITS},
        rules=tuple(map(_word, body["rules"])),
        maker=None
        if made is None
        else built(
            TrainerInfo,
            made | {"config": {"map": {}}},
            config={k: built(Setting, v) for k, v in made["config"].items()},
        ),
        metadata=built(RunMetadata, body["metadata"]),
        has_rows=bool(body["has_rows"]),
        refuted=tuple(built(Refuted, one) for one in body["refuted"]),
        state=loaded_run(state),
    )


def loaded_run(state: Mapping[str, Any]) -> RunState:
    """Return the state that `plain_run` was given.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if it is no such state.
    """
    return RunState(
        input=built(InputSummary, state["input"]),
        odd_groups=_whole(state["odd_groups"]),
        failures={why: (_whole(step), _whole(count)) for why, (step, count) in state["failures"].items()},
        seen=tuple(sorted(_key(step, split) for split in SPLITS for step in _steps(state["seen"][split]))),
        audit={_word(name): built(QuantityTally, tally) for name, tally in state["audit"].items()},
        windows={(one.last, one.name): one for one in (built(OpenWindow, each) for each in state["windows"])},
        updates=_whole(state["updates"]),
        tables=Tables.loaded(state["tables"]),
    )


def _spans(steps: Iterable[int], split: str) -> list[list[int]]:
    """First and last of each run of consecutive steps."""
    return [list(span) for span in StepSpans(StepKey(step, split) for step in steps).spans(split)]


def _steps(spans: Sequence[Sequence[int]]) -> Iterator[int]:
    """The steps of some runs of consecutive steps, which are in order and apart."""
    end, count = -1, 0
    for first, last in spans:
        count += _whole(last) - _whole(first) + 1
        if not end < first <= last or count > _MOST_STEPS:
            raise ValueError(f"steps {first} to {last}")
        end = last
        yield from range(first, last + 1)


def _logged(plain: Mapping[str, Any]) -> LoggedNames:
    return LoggedNames(tuple(_steps(plain["steps"])), tuple(map(_word, plain["names"])))


def _refused(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _key(step: object, split: object) -> StepKey:
    if split not in (TRAIN, EVAL):
        raise ValueError(f"split {split!r}")
    return StepKey(_whole(step), _word(split))


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise TypeError(f"{value!r} where a whole number of 0 or more was expected")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a word was expected")
    return value
