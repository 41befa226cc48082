"""A run as three tables, in memory or as Parquet, from which it can be judged without reading it again."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path

import polars as pl

from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.commands.diff.sides import DiffOptions
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.devices import on_device
from rolloutdoctor.engine.merged import saved_state
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.run_steps import run_file_steps
from rolloutdoctor.engine.state_file import MANIFEST, MOST_STATE_BYTES, SavedState, is_measured, load_state, saved_of
from rolloutdoctor.engine.stored import HEAD, files_of, write_parquet, written_files
from rolloutdoctor.engine.table_builder import FullTableBuilder
from rolloutdoctor.io.locations.small_files import read_small_bytes
from rolloutdoctor.io.locations.targets import Target, shown
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.io.write.replacing import pieces_of, write_together
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.comparison import Comparison
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.findings import Report
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose

_DIGESTS = "digests"
"""Key of the manifest: table to the SHA-256 of its file."""

TABLES = ("rows", "tokens", "metrics", "audit", "turns")
"""What a folder may hold; `turns` only of a run that has some."""

_TURNS = "turns.parquet"


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A run as tables; docs/python.md lists their columns.

    Attributes:
        tokens: one line a sampled token, of some four million.
    """

    tokens: pl.DataFrame
    _prepared: PreparedRun
    _state: RunState
    _device: str = "auto"

    @property
    def rows(self) -> pl.DataFrame:
        """One line a response."""
        return self._state.tables.whole.rows

    @property
    def metrics(self) -> pl.DataFrame:
        """One line a step, split and metric."""
        return self._state.tables.whole.metrics

    @property
    def turns(self) -> pl.DataFrame:
        """One line a turn of a response; empty where the run has none."""
        return self._state.tables.whole.turns

    def count(self, table: str) -> int:
        """Return how many lines a table has, without reading it."""
        return len(self.tokens if table == "tokens" else self._state.frames[table])

    def __repr__(self) -> str:
        """Summarise the tables in a line."""
        counts = ", ".join(f"{self.count(name):,} {name}" for name in ("rows", "tokens", "metrics"))
        return f"<MeasuredRun {', '.join(self._prepared.run.files[:1])}: {counts}>"

    def check(self) -> Report:
        """Judge what was measured; the run is read again only where its options do not reproduce logged values."""
        return report_of(self._prepared, self._state)

    def diff(self, *fixes: str) -> Comparison:
        """Compare the run with what fixes, ``NAME`` or ``NAME:VARIANT``, make of it, as the command `diff` does."""
        check_options = self._prepared.options
        options = DiffOptions(
            trainer=check_options.trainer,
            layers=check_options.layers,
            steps=check_options.steps,
            split=check_options.split or "train",
            device=self._device,
            dtype=check_options.dtype,
            fixes=tuple(choose(fix) for fix in fixes),
        )
        return diff(self._prepared.run, options)

    def write(self, folder: str | Path, tables: Collection[str] = ()) -> None:
        """Write the tables and what judging them needs; those of an earlier run are there until all are written.

        Args:
            folder: where to.
            tables: ``rows``, ``tokens`` or ``metrics``: these alone, which cannot be judged; none: all.

        Raises:
            UsageError: if the folder cannot be written, or holds other files.
        """
        path = Path(folder)
        prepare_folder(path, self._prepared.run, tables)
        chosen = {**self._state.frames, "tokens": self.tokens}
        with scratch_folder() as scratch:
            if tables:
                writers = {f"{name}.parquet": partial(write_parquet, chosen[name]) for name in tables}
                _place(path, written_files(writers, scratch))
                return
            files = files_of(saved_state(self._prepared, self._state), scratch)
            manifest = files.pop(HEAD).read_bytes()
            files |= written_files({"tokens.parquet": partial(write_parquet, self.tokens)}, scratch)
            # The manifest may hold infinities, which only Python's own JSON keeps.
            body = {**json.loads(manifest), _DIGESTS: {name: _digest(file) for name, file in files.items()}}
            text = json.dumps(body, separators=(",", ":")).encode()
            _place(path, files | written_files({MANIFEST: lambda stream: stream.write(text)}, scratch))
        if _TURNS not in files:
            # That of an earlier run, of which the manifest says nothing any more.
            (path / _TURNS).unlink(missing_ok=True)


def measure(
    run: Run, options: CheckOptions, fixes: Sequence[ChosenFix] = (), progress: Progress | None = None
) -> MeasuredRun:
    """Measure a run into tables.

    Args:
        run: what to read.
        options: what to check, and how.
        fixes: under which the rows are evaluated beside those that the rules compare with.
        progress: called with what is done and what there is to do, in the run's `unit`.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    measured = on_device(options, [run], lambda chosen: _measure(run, chosen, fixes, progress))
    # What `auto` was resolved to is not what a later comparison was asked for.
    return replace(measured, _device=options.device)


def _measure(run: Run, options: CheckOptions, fixes: Sequence[ChosenFix], progress: Progress | None) -> MeasuredRun:
    prepared = prepare(run, options)
    plan = prepared.plan
    if fixes:
        plan = replace(plan, fixes=tuple({fix.label: fix for fix in (*plan.fixes, *fixes)}.values()))
    tables = FullTableBuilder(plan, options.memory)
    rules = RuleAccumulator(plan, tables)
    run_file_steps(run, [rules], prepared.options, prepared.metrics, progress)
    state = rules.state()
    return MeasuredRun(tables.tokens(), replace(prepared, plan=plan), state)


def _place(folder: Path, files: Mapping[str, Path]) -> None:
    """Put files into a folder, the last one when the others are there."""
    targets = {name: Target.of(str(folder / name)) for name in files}
    write_together({targets[name]: pieces_of(file) for name, file in files.items()}, [*targets.values()][-1])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def load(path: str) -> SavedState:
    """Return what ``export -o`` or ``check --save-state`` wrote, to be judged alone or together with others.

    Raises:
        InputError: if a file of it is damaged or missing.
    """
    if not is_measured(path):
        return load_state(path)
    members = {HEAD: _content(Path(path) / MANIFEST)}
    digests = _digests_of(members[HEAD])
    names = (f"{table}.parquet" for table in TABLES if table != "tokens")
    tables = [name for name in names if name != _TURNS or name in digests]
    members |= {name: _content(Path(path) / name) for name in tables}
    # First whether the manifest is one, and of this version.
    state = saved_of(path, members)
    for name in tables:
        if digests.get(name) != sha256(members[name]).hexdigest():
            raise InputError(
                f"{shown(Path(path) / name)}: not the table that was written with {MANIFEST}: it was altered, or is "
                "of another run; measure the run again"
            )
    return state


def _digests_of(manifest: bytes) -> dict[str, str]:
    """Table to the digest of its file; nothing of what is no manifest."""
    try:
        digests = json.loads(manifest)[_DIGESTS]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return digests if isinstance(digests, dict) else {}


def _content(path: Path) -> bytes:
    return read_small_bytes(path, expected="measure the run again", most=MOST_STATE_BYTES, error=InputError)


def prepare_folder(folder: str | Path, run: Run, tables: Collection[str] = ()) -> None:
    """Make the folder of the tables; those of an earlier run stay until others are complete.

    Args:
        folder: where to.
        run: which must not be in it.
        tables: as `MeasuredRun.write` takes them.

    Raises:
        UsageError: if it cannot be made, or holds other files.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        entries = {each.name for each in path.iterdir() if not each.name.startswith(".")}
    except OSError as error:
        raise UsageError(f"{shown(path)}: {error.strerror}; name a folder that can be written") from None
    others = sorted(entries - {MANIFEST, *(f"{name}.parquet" for name in TABLES)})
    if others or any(Target.of(str(path / f"{name}.parquet")).is_any(run.inputs) for name in TABLES):
        name = others[0] if others else "the run itself"
        raise UsageError(f"{shown(path)} holds {name}, which is no table of a measured run; name an empty folder")
    if tables and MANIFEST in entries:
        raise UsageError(f"{shown(path)} holds all tables of a measured run, to be judged; name another folder")
