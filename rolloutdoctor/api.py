"""The Python interface: the commands as functions on a run that is open. Import it as `rolloutdoctor`."""

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rolloutdoctor.commands.check.runs_of_log import of_worst_run
from rolloutdoctor.commands.compare.query import compare as _compare
from rolloutdoctor.commands.diff.ablation import LeftOut
from rolloutdoctor.commands.diff.query import diff as _diff
from rolloutdoctor.commands.diff.sides import DiffOptions
from rolloutdoctor.commands.export.tables import MeasuredRun
from rolloutdoctor.commands.export.tables import measure as _measure
from rolloutdoctor.commands.export.tokens import RecomputeOptions
from rolloutdoctor.commands.export.tokens import recompute as _recompute
from rolloutdoctor.commands.identify.query import identify as _identify
from rolloutdoctor.commands.info.query import describe
from rolloutdoctor.commands.plot.query import draw
from rolloutdoctor.commands.why.query import Question
from rolloutdoctor.commands.why.query import why as _why
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.check import check as _check
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.engine.requirements import evaluation_columns, need_trainer
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.io.write.frames import Rows, written
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.ops.evaluation_mode import one_thread
from rolloutdoctor.results.comparison import Comparison, Recomputed
from rolloutdoctor.results.display import Displayed, print_as, show_as
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.figures import ASKED, known_kind
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.results.identification import Identification
from rolloutdoctor.results.ledger import Why
from rolloutdoctor.results.run_comparison import RunComparison
from rolloutdoctor.results.run_info import RunInfo
from rolloutdoctor.rules.table import pick
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose
from rolloutdoctor.trainers.options import Layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Options = Mapping[str, object]
Chosen = TypeVar("Chosen", bound=ReadOptions)
RunLike = Run | str | os.PathLike[str] | Rows
"""A run from `open`, or what `open` takes."""

_log = logging.getLogger("rolloutdoctor")


def open(
    *paths: str | os.PathLike[str] | Rows,
    trainer: str | None = None,
    from_: str | None = None,
    map: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
) -> Run:
    """Open what the commands open: run files, directories and patterns, a trainer's own dump, or logged metrics alone.

    Rows that are in memory are read through a temporary file, like those of a file of the same columns. Of a dump,
    which importer read it and what it found out goes to the logger ``rolloutdoctor``; the run file that it is read
    through is removed with the run.

    Args:
        paths: files, directories, patterns and remote addresses; or rows: a polars frame, an Arrow table or what hands
            itself over as one (pandas, DuckDB), a list of dicts.
        trainer: who wrote the files, where they do not say.
        from_: importer of a dump, where it is not recognised, as ``--from``.
        map: canonical column to where the dump has it, as ``--map``.
        allow_pickle: load torch files that can run code.

    Raises:
        InputError: if nothing is found, or a file cannot be read as a run.
        UsageError: for an unknown importer or column.
    """
    with ExitStack() as stack:
        places = [
            os.fspath(each) if isinstance(each, str | os.PathLike) else stack.enter_context(written(each, _log.warning))
            for each in paths
        ]
        run = stack.enter_context(
            open_any(
                places,
                trainer=(trainer or "").partition("@")[0] or None,
                options=ConvertOptions(from_, dict(map or {}), allow_pickle),
                tell=_log.warning,
                logs_alone=True,
            )
        )
        for note in run.notes.sentences:
            _log.warning(note)
        weakref.finalize(run, stack.pop_all().close)
    return run


def check(
    run: RunLike,
    *,
    trainer: str | None = None,
    options: Options | None = None,
    fixes: Sequence[str] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    steps: str | None = None,
    split: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> Report:
    """Run the rules, as the command `check` does.

    Args:
        run: from `open`, a path, or rows.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        fixes: fixes that the run already had.
        select: only these rules or families.
        ignore: not these.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
    """
    rules = pick(_names(select), _names(ignore))
    chosen = _chosen(CheckOptions, trainer, options, steps, split, device, dtype, rules=rules, fixes=_fixes(fixes))
    read = _opened(run, trainer)
    # Of a log with several runs one that was opened is meant as it is.
    return of_worst_run(read, _check(read, chosen), None if isinstance(run, Run) else chosen)


def diff(
    run: RunLike,
    *,
    fixes: Sequence[str] = (),
    all_fixes: bool = False,
    against: Options | None = None,
    trainer: str | None = None,
    options: Options | None = None,
    by: str | None = None,
    top: int = 0,
    text: bool = False,
    without: Sequence[str] = (),
    heaviest: int = 0,
    heaviest_tokens: int = 0,
    afresh: bool = False,
    steps: str | None = None,
    split: str = "train",
    device: str = "auto",
    dtype: str = "float32",
) -> Comparison:
    """Compute a run as configured and with changes, or without some rows, as the command `diff` does.

    Args:
        run: from `open`, a path, or rows.
        fixes: ``NAME`` or ``NAME:VARIANT``: the other side has these.
        all_fixes: compare every fix by itself, the largest effect first; `Comparison.untried` has the others.
        against: the other side's options, where they differ.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        by: ``step``, ``group``, ``reward`` or ``length``: break the numbers down by this.
        top: how many of the groups that moved most to keep.
        text: read the prompts and responses of these.
        without: rows that the other side leaves out, ``SAMPLE`` or ``STEP/GROUP/SAMPLE``.
        heaviest: how many rows of each step it leaves out, those with the largest squared gradient.
        heaviest_tokens: how many tokens of each step, likewise.
        afresh: compute advantages and denominators of what is left without them; else they are kept.
        steps: ``START:STOP``.
        split: ``train`` or ``eval``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
    """
    other = tuple(f"{key}={value}" for key, value in (against or {}).items())
    left_out = LeftOut(tuple(sorted(set(_names(without)))), heaviest, heaviest_tokens, afresh)
    more = {"fixes": _fixes(fixes), "all_fixes": all_fixes, "against": other, "by": by, "top": top, "text": text}
    more["without"] = left_out
    chosen = _chosen(DiffOptions, trainer, options, steps, split, device, dtype, **more)
    return _diff(_opened(run, trainer), chosen)


def compare(
    a: RunLike,
    b: RunLike,
    *,
    by: str | None = None,
    trainer: str | None = None,
    options: Options | None = None,
    steps: str | None = None,
    split: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> RunComparison:
    """Compare two runs, as the command `compare` does.

    Args:
        a: from `open`, a path, or rows.
        b: the other run.
        by: ``reward``, ``length`` or ``status`` of the rows, ``step``, or the name of a quantity: the parts.
        trainer: ``NAME`` or ``NAME@VERSION`` of both, over what the files say.
        options: the trainer's own options by name, for both, over what the files say.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
    """
    chosen = _chosen(CheckOptions, trainer, options, steps, split, device, dtype)
    return _compare(_opened(a, trainer), _opened(b, trainer), chosen, by=by)


def measure(
    run: RunLike,
    *,
    trainer: str | None = None,
    options: Options | None = None,
    fixes: Sequence[str] = (),
    steps: str | None = None,
    split: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> MeasuredRun:
    """Measure a run into the tables `rows`, `tokens` and `metrics`, as the command `export` does.

    Args:
        run: from `open`, a path, or rows.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        fixes: ``NAME`` or ``NAME:VARIANT``: `rows` has the values with each of these, too.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
    """
    chosen = _chosen(CheckOptions, trainer, options, steps, split, device, dtype)
    return _measure(_opened(run, trainer), chosen, _fixes(fixes))


def why(
    run: RunLike,
    metric: str,
    *,
    at: int | None = None,
    before: int = 20,
    after: int = 20,
    trainer: str | None = None,
    options: Options | None = None,
    steps: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> Why:
    """Split the change of a metric into lines that add up to it, as the command `why` does.

    Args:
        run: from `open`, a path, or rows.
        metric: ``reward``, ``response_length``, ``entropy``, ``kl``, ``grad_norm``, ``loss``, ``clip_fraction``, or the
            name of a logged metric.
        at: first step of the window after; None: the changes that stand out.
        before: steps of the window before.
        after: steps of that after.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        steps: ``START:STOP``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.

    Raises:
        UsageError: if an option cannot be used, or there is no step before or after `at`.
        InputError: if neither rows nor log hold the metric.
    """
    chosen = _chosen(CheckOptions, trainer, options, steps, None, device, dtype)
    return _why(_opened(run, trainer), chosen, Question(metric, at, before, after))


def identify(
    run: RunLike,
    *,
    trainer: str | None = None,
    options: Options | None = None,
    steps: str | None = None,
    split: str | None = None,
) -> Identification:
    """Find the objective that made the logged numbers of a run, as the command `identify` does.

    Args:
        run: from `open`, a path, or rows.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
    """
    chosen = _chosen(ReadOptions, trainer, options, steps, split)
    return _identify(_opened(run, trainer), chosen)


def info(
    run: RunLike,
    *,
    trainer: str | None = None,
    options: Options | None = None,
    steps: str | None = None,
    split: str | None = None,
) -> RunInfo:
    """Say what a run holds, what can be checked of it and what would make the rest checkable, as `info` does.

    Args:
        run: from `open`, a path, or rows.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
    """
    return describe(_opened(run, trainer), _chosen(CheckOptions, trainer, options, steps, split))


def plot(
    kind: str,
    run: RunLike,
    *,
    fixes: Sequence[str] = (),
    by: str | None = None,
    metric: str = "reward",
    at: int | None = None,
    before: int = 20,
    after: int = 20,
    trainer: str | None = None,
    options: Options | None = None,
    steps: str | None = None,
    split: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> "Figure":
    """Draw a picture of a run, as the command `plot` does; save it with the figure's own `savefig`.

    Args:
        kind: ``overview``, ``audit``, ``advantages``, ``kl``, ``baseline``, ``gradient``, ``ratio``, ``mismatch``,
            ``lengths``, ``rewards`` or ``why``.
        run: from `open`, a path, or rows.
        fixes: ``NAME`` or ``NAME:VARIANT``: before against after.
        by: ``step`` for one ridge for each band of steps, where the picture has that form.
        metric: what `why` is about, as are the next three.
        at: first step of the window after; None: the largest change that stands out.
        before: steps of the window before.
        after: steps of that after.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``; None: training rows.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if the run lacks what the picture needs.
    """
    from rolloutdoctor.pictures.table import figure_of, known_by

    if not isinstance(kind, str):
        raise UsageError(f"the picture is the first argument, as in plot('rewards', run), not a {type(kind).__name__}")
    by_step = known_by(known_kind(kind), by)
    chosen = _chosen(CheckOptions, trainer, options, steps, split, device, dtype)
    opened = _opened(run, trainer)
    if kind in ASKED:
        return figure_of(kind, _why(opened, chosen, Question(metric, at, before, after)))
    return figure_of(kind, draw(opened, kind, chosen, _fixes(fixes)), by_step=by_step)


def recompute(
    run: RunLike,
    path: str | Path | None = None,
    *,
    trainer: str | None = None,
    options: Options | None = None,
    fixes: Sequence[str] = (),
    steps: str | None = None,
    split: str | None = None,
    device: str = "auto",
    dtype: str = "float64",
    logits: bool = False,
) -> Recomputed:
    """Recompute the numbers of every step and, where `path` is given, write the values of every token there.

    Args:
        run: from `open`, a path, or rows.
        path: of the Parquet file to write, or None.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        fixes: ``NAME`` or ``NAME:VARIANT``: the second set of columns and numbers has these.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
        logits: write the norm of the gradient with respect to each token's logits, too.
    """
    more = {"fixes": _fixes(fixes), "logits": logits}
    chosen = _chosen(RecomputeOptions, trainer, options, steps, split, device, dtype, **more)
    return _recompute(_opened(run, trainer), chosen, path)


def report(
    run: RunLike,
    path: str | Path | None = None,
    *,
    fixes: Sequence[str] = (),
    trainer: str | None = None,
    options: Options | None = None,
    steps: str | None = None,
    split: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> str:
    """Make the page of a run, as the command `report` does; it is returned, and written where `path` is given.

    Args:
        run: from `open`, a path, or rows.
        path: where to write the page, or None.
        fixes: ``NAME`` or ``NAME:VARIANT``: the pictures are drawn with and without these.
        trainer: ``NAME`` or ``NAME@VERSION``, over what the file says.
        options: the trainer's own options by name, over what the file says.
        steps: ``START:STOP``.
        split: only ``train`` or ``eval``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.

    Raises:
        UsageError: if an option cannot be used, or the page cannot be written.
        InputError: if a file cannot be read as a run.
    """
    from rolloutdoctor.commands.view.page import page_of
    from rolloutdoctor.io.locations.targets import Target

    opened = _opened(run, trainer)
    target = None if path is None else Target.of(path)
    if target is not None:
        target.refuse(opened.inputs, "is a file of the run itself")
    chosen = _chosen(CheckOptions, trainer, options, steps, split, device, dtype)
    page = page_of(opened, chosen, _fixes(fixes))
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def _opened(run: RunLike, trainer: str | None) -> Run:
    return run if isinstance(run, Run) else open(run, trainer=trainer)


def objective_of(run: RunLike, *, trainer: str | None = None, options: Options | None = None) -> Objective:
    """Return what the trainer of a run computes from a step, for `evaluate`.

    Raises:
        UsageError: if nothing says which trainer made the run, or an option cannot be used.
    """
    opened = _opened(run, trainer)
    return need_trainer(configure(opened.metadata, trainer, _layers(options)), opened).objective


def batches(
    run: RunLike, objective: Objective, *, steps: str | None = None, dtype: str = "float32"
) -> Iterator[RolloutBatch]:
    """Read a run one step at a time, with the columns that `evaluate` can use under an objective."""
    opened = _opened(run, None)
    columns = evaluation_columns(objective) & opened.columns
    return _on_one_thread(opened, opened.batches(columns, steps=_steps(steps), dtype=find_dtype(dtype)))


def _on_one_thread(run: Run, batches: Iterator[RolloutBatch]) -> Iterator[RolloutBatch]:
    """Read the next batch as the commands do; between two of them torch has the threads of the caller.

    The run is kept until then: the temporary file of rows in memory goes with it.
    """
    while True:
        with one_thread():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        # Or it would stay in memory while the next one is decoded.
        del batch


def _layers(options: Options | None) -> tuple[Layer, ...]:
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"options: expected a mapping such as {{'beta': 0.04}}, got a {type(options).__name__}")
    return (Layer("options", dict(options)),) if options else ()


def _fixes(texts: Sequence[str]) -> tuple[ChosenFix, ...]:
    return tuple(choose(text) for text in _names(texts))


def _names(texts: Sequence[str]) -> list[str]:
    """One name is a sequence of characters to Python, and a name to whoever gives it."""
    return [texts] if isinstance(texts, str) else list(texts)


def _chosen(
    kind: type[Chosen],
    trainer: str | None,
    options: Options | None,
    steps: str | None,
    split: str | None,
    device: str = "auto",
    dtype: str = "float32",
    **more: Any,  # noqa: ANN401  # further fields of `kind`
) -> Chosen:
    return kind(
        trainer=trainer,
        layers=_layers(options),
        steps=_steps(steps),
        split=split,
        device=device,
        dtype=dtype,
        **more,
    )


def _steps(text: str | None) -> StepRange | None:
    if text is not None and not isinstance(text, str):
        raise UsageError(f"steps: expected a text such as '100:200', got a {type(text).__name__}")
    return None if text is None else StepRange.parse(text)


def _views() -> None:
    """Say how results print and show themselves in a notebook; what does it is imported when one is shown."""

    def of_run(run: Run) -> str:
        from rolloutdoctor.notebook import run_html

        metadata = run.metadata
        trainer = (
            f"{metadata.trainer} {metadata.trainer_version or ''}".strip()
            if metadata.trainer
            else "not stated in the file"
        )
        return run_html(run.files, trainer, run.rows, run.columns, run.metrics.names())

    def of_result(result: Displayed) -> str:
        from rolloutdoctor.notebook import html_of

        return html_of(result)

    def as_text(result: Displayed) -> str:
        from rolloutdoctor.notebook import text_of

        return text_of(result)

    show_as(Run, of_run)
    for kind in (Report, Finding, Comparison, RunComparison, Identification, Recomputed, RunInfo, Why):
        show_as(kind, of_result)
        print_as(kind, as_text)


_views()
