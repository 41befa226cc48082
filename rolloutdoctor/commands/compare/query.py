"""`compare`: two runs side by side, and where their rows part."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import polars as pl

from rolloutdoctor.commands.compare.rows import COLUMNS, RowComparison, step_pairs
from rolloutdoctor.commands.compare.run_profile import MEASURES, RECOMPUTED, ROW_PARTS, RunProfile, profile_of
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.breakdown import labelled
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.devices import find_dtype, on_device
from rolloutdoctor.engine.gathering import gather
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Executor
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.io.progress import Progress, common_unit
from rolloutdoctor.io.run import Run
from rolloutdoctor.ops.whole_factors import whole_quotient
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.results.findings import Report
from rolloutdoctor.results.run_comparison import (
    FindingPair,
    FirstDifference,
    Matched,
    OptionPair,
    Part,
    Quantity,
    RunComparison,
    Side,
)
from rolloutdoctor.results.version import __version__
from rolloutdoctor.trainers.table import TRAINERS


@dataclass(frozen=True)
class _Seen:
    """Results of one pass over a run."""

    prepared: PreparedRun
    report: Report
    state: RunState
    profile: RunProfile


def compare(
    a: Run,
    b: Run,
    options: CheckOptions,
    *,
    by: str | None = None,
    names: tuple[str, str] | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> RunComparison:
    """Compare a run with another one.

    Rows are joined by step and sample_id, and compared in causal order; everything else is put side by side by step.

    Args:
        a: the first run.
        b: the second run.
        options: how to read and check both.
        by: ``reward``, ``length`` or ``status`` of the rows, ``step``, or the name of a quantity: the parts.
        names: what to call the runs; None: by their files.
        progress: called with what is done and what there is to do, of both runs together, in their `common_unit`.
        executor: where parts of each are measured; None: in this process.

    Raises:
        UsageError: if an option cannot be used, or a run has nothing to break down by.
        InputError: if a file cannot be read, or breaks the contract.
    """
    alone = executor in (None, Processes(1))
    return on_device(options, [a, b], lambda chosen: _compare(a, b, chosen, by, names, progress, executor), alone=alone)


def _compare(
    a: Run,
    b: Run,
    options: CheckOptions,
    by: str | None,
    names: tuple[str, str] | None,
    progress: Progress | None,
    executor: Executor | None,
) -> RunComparison:
    turns = _in_turn(a, b, options, progress)
    sides = [_see(run, options, by, advance, executor) for run, advance in zip((a, b), turns, strict=True)]
    keys = [set(side.state.seen) | set(_logged(side)) for side in sides]
    rows = RowComparison()
    if "sample_id" in a.columns & b.columns:
        shared = set(sides[0].state.seen) & set(sides[1].state.seen)
        dtype = find_dtype(options.dtype)
        read = [
            run.batches([n for n in COLUMNS if n in run.columns], steps=options.steps, split=options.split, dtype=dtype)
            for run in (a, b)
        ]
        for pair in step_pairs(read[0], read[1], shared):
            rows.add(*pair)
    quantities = tuple(_quantities(sides[0], sides[1]))
    loss: list[Matched] = []
    first = rows.first
    if sides[0].prepared.context.objective != sides[1].prepared.context.objective:
        loss, first = _loss(quantities, rows)
    named = names or (_name(a), _name(b))
    parts = _parts(sides[0], sides[1], quantities, by)
    return RunComparison(
        version=__version__,
        device=sides[0].report.device,
        dtype=options.dtype,
        a=_side(named[0], sides[0].report),
        b=_side(named[1], sides[1].report),
        steps=(len(keys[0] & keys[1]), len(keys[0] - keys[1]), len(keys[1] - keys[0])),
        options=tuple(_options(sides[0].report, sides[1].report)),
        joined=rows.joined,
        matched=(*rows.matched(), *loss),
        first=first,
        findings=tuple(_findings(sides[0].report, sides[1].report)),
        quantities=quantities,
        by=by,
        parts=parts,
        notes=tuple(_notes(a, b, sides, rows)),
    )


def _in_turn(
    a: Run, b: Run, options: CheckOptions, progress: Progress | None
) -> tuple[Progress | None, Progress | None]:
    """Progress of the first run, and of the second one after it."""
    if progress is None:
        return None, None
    tokens = common_unit([a.unit, b.unit]) == "tokens"
    first, second = ((run.size(options.steps, options.split) if tokens else run.rows) for run in (a, b))
    return (
        lambda done, total: progress(first * done // total, first + second),
        lambda done, total: progress(first + second * done // total, first + second),
    )


def _see(
    run: Run, options: CheckOptions, by: str | None, progress: Progress | None, executor: Executor | None
) -> _Seen:
    """Check a run and gather its numbers, in one pass."""
    prepared = prepare(run, options)
    state, (profile,) = gather(prepared, profile_of, by, progress=progress, executor=executor)
    return _Seen(prepared, report_of(prepared, state), state, profile)


def _name(run: Run) -> str:
    more = f" and {len(run.files) - 1:,} more" if len(run.files) > 1 else ""
    return f"{run.files[0]}{more}"


def _side(name: str, report: Report) -> Side:
    return Side(name, report.input, report.trainer, report.trainer_version)


def _logged(side: _Seen) -> list[StepKey]:
    """Steps of the log that were asked for."""
    options, metrics = side.prepared.options, side.prepared.run.metrics
    return [
        key
        for key in metrics.steps()
        if options.split in (None, key.split) and (options.steps is None or key.step in options.steps)
    ]


def _options(a: Report, b: Report) -> Iterator[OptionPair]:
    if a.trainer != b.trainer:
        return
    for name in dict.fromkeys((*a.config, *b.config)):
        mine, other = a.config.get(name), b.config.get(name)
        if mine is None or other is None or mine.value != other.value:
            yield OptionPair(name, mine, other)


def _findings(a: Report, b: Report) -> Iterator[FindingPair]:
    outcomes = [_outcomes(report) for report in (a, b)]
    by_code = [{finding.code: finding for finding in report.findings} for report in (a, b)]
    for code in sorted(by_code[0].keys() | by_code[1].keys()):
        mine, other = by_code[0].get(code), by_code[1].get(code)
        finding = mine or other
        assert finding is not None
        measures = [{} if each is None else each.measures for each in (mine, other)]
        yield FindingPair(
            code,
            finding.name,
            outcomes[0].get(code, "not run"),
            outcomes[1].get(code, "not run"),
            "" if mine is None else mine.headline,
            "" if other is None else other.headline,
            {name: (measures[0].get(name), measures[1].get(name)) for name in finding.measures},
        )


def _outcomes(report: Report) -> dict[str, str]:
    return (
        {finding.code: finding.severity.label for finding in report.findings}
        | {code: "clean" for code, _ in report.clean}
        | {entry.code: "not applicable" for entry in report.not_applicable}
        | {entry.code: "skipped" for entry in report.skipped}
    )


def _numbers(side: _Seen) -> pl.DataFrame:
    """Return one line a number of a step: ``at, step, split, name, value``; those of `MEASURES` come first."""
    numbers = side.profile.numbers()
    numbers = numbers.select(
        pl.col("name").replace_strict({name: at for at, name in enumerate(MEASURES)}).alias("at"), pl.all()
    )
    metrics = side.prepared.run.metrics
    logged = [(len(MEASURES), *key, *named_value) for key in _logged(side) for named_value in metrics.at(key).items()]
    return pl.concat([numbers, pl.DataFrame(logged, numbers.schema, orient="row")]).filter(pl.col("value").is_finite())


def _quantities(a: _Seen, b: _Seen) -> Iterator[Quantity]:
    key = ["split", "at", "name", "step"]
    both = _numbers(a).join(_numbers(b), on=key).sort(key, descending=[True, False, False, False])
    for (split, at, name), frame in both.group_by(key[:3], maintain_order=True):
        origin = "logged" if at == len(MEASURES) else "recomputed" if name in RECOMPUTED else "rows"
        unit = "1" if origin == "logged" else MEASURES[name][1]
        values = tuple(frame.select("value", "value_right").rows())
        factor = whole_quotient(values) if origin == "logged" else None
        count, larger = (0, "") if factor is None else (factor[0], "b" if factor[1] else "a")
        yield Quantity(name, origin, split, unit, tuple(frame["step"]), values, count, larger)


def _loss(quantities: Iterable[Quantity], rows: RowComparison) -> tuple[list[Matched], FirstDifference | None]:
    """Compare the losses where all rows are the same: then other options alone make them differ.

    Returns:
        What was compared, and the earliest difference of all.
    """
    train = {curve.name: curve for curve in quantities if curve.origin == "recomputed" and curve.split == "train"}
    matched = rows.matched()
    if "loss" not in train or rows.left or not rows.joined or any(row.equal < row.compared for row in matched):
        return [], rows.first
    loss = train["loss"]
    gaps = [abs(b - a) for a, b in loss.values]
    counted = Matched("loss", len(gaps), loss.equal, max(gaps), "step")
    place = next((place for place, gap in enumerate(gaps) if gap), None)
    if place is None:
        return [counted], rows.first
    a, b = loss.values[place]
    return [counted], FirstDifference(loss.steps[place], "train", "loss", None, None, a, b, 1, 1)


def _parts(a: _Seen, b: _Seen, quantities: tuple[Quantity, ...], by: str | None) -> tuple[Part, ...]:
    if by is None:
        return ()
    if by in ROW_PARTS:
        return tuple(_row_parts(a, b, by))
    if by == "step":
        chosen = [curve for curve in quantities if curve.origin != "logged"]
    else:
        chosen = [curve for curve in quantities if curve.name == by]
        if not chosen:
            names = [*ROW_PARTS, "step", *dict.fromkeys(curve.name for curve in quantities)]
            raise UsageError(
                f"--by {by}: neither {', '.join(ROW_PARTS)} nor step, and no quantity of both runs{nearest(by, names)}"
            )
    by_step: dict[tuple[int, str], dict[str, tuple[float, float]]] = {}
    for curve in chosen:
        for step, pair in zip(curve.steps, curve.values, strict=True):
            by_step.setdefault((step, curve.split), {})[curve.name] = pair
    return tuple(
        Part(f"{step}" if split == "train" else f"{step} {split}", values)
        for (step, split), values in sorted(by_step.items(), key=lambda entry: (entry[0][0], entry[0][1] != "train"))
    )


def _row_parts(a: _Seen, b: _Seen, by: str) -> Iterator[Part]:
    """Yield rows, mean reward and mean length of each part."""
    each = [run.profile.rows().with_columns(side=pl.lit(side), rows=1) for side, run in enumerate((a, b))]
    rows = pl.concat(each).drop_nulls("part")
    if rows.is_empty():
        raise UsageError(f"--by {by}: neither run has what rows can be broken down by so")
    sides = [pl.col("side") == side for side in range(2)]
    measures = {
        "rows": [mine.sum().cast(pl.Float64) for mine in sides],
        "rows_share": [mine.sum() / max(1, rows.filter(mine).height) for mine in sides],
        "reward": [pl.col("reward").filter(mine & pl.col("reward").is_finite()).mean() for mine in sides],
        "response_length": [pl.col("tokens").filter(mine).mean() for mine in sides],
    }
    asked = {f"{name} {side}": value for name, pair in measures.items() for side, value in enumerate(pair)}
    table = (
        labelled(by, rows)
        .group_by("bin", "label", maintain_order=True)
        .agg(**asked)
        .sort("bin", nulls_last=True)
        .fill_null(math.nan)
    )
    for line in table.to_dicts():
        yield Part(line["label"], {name: (line[f"{name} 0"], line[f"{name} 1"]) for name in measures})


def _redefined(sides: list[_Seen]) -> Iterator[str]:
    """Say which metrics of one name the releases of the two runs count differently."""
    stated = {side.report.trainer for side in sides} - {None}
    names = [side.prepared.run.metrics.names() for side in sides]
    for trainer in TRAINERS.values():
        for redefinition in trainer.log.redefined if stated <= {trainer.name} else ():
            so = [redefinition.counts_so(each) for each in names]
            if None not in so and so[0] != so[1]:
                new, old = ("A", "B") if so[0] else ("B", "A")
                yield redefinition.words.format(new=new, old=old)


def _notes(a: Run, b: Run, sides: list[_Seen], rows: RowComparison) -> Iterator[str]:
    yield from dict.fromkeys((*a.notes.sentences, *b.notes.sentences))
    if a.metrics_only or b.metrics_only:
        yield "A log without rollouts has no rows to compare."
    elif "sample_id" not in a.columns & b.columns:
        yield "Rows cannot be joined: a run has no column sample_id."
    elif not rows.joined and set(sides[0].state.seen) & set(sides[1].state.seen):
        yield "No row of A has its step and sample_id in B."
    if rows.joined and rows.left:
        yield f"{rows.left:,} rows of the steps in both runs have no partner, and were not compared."
    lacking = [name for name in COLUMNS if (name in a.columns) != (name in b.columns)]
    if lacking and rows.joined:
        yield f"Not compared, as only one run has them: {', '.join(lacking)}."
    quantities = {row.quantity for row in rows.matched()}
    if rows.joined and "prompt" not in quantities:
        yield "Without prompt_ids or prompt in both runs, rows of one sample_id are taken to answer one prompt."
    if rows.joined and "response" not in quantities:
        yield "Without response_ids or response in both runs, rows of one length are taken to be one response."
    reports = [side.report for side in sides]
    if reports[0].trainer != reports[1].trainer:
        names = [report.trainer or "an unknown trainer" for report in reports]
        yield f"Options of {names[0]} and {names[1]} have different names and meanings, and are not compared."
    yield from _redefined(sides)
    objectives = [side.prepared.context.objective for side in sides]
    if None in objectives:
        which = "A" if objectives[0] is None else "B"
        yield f"Nothing is recomputed for {which}: its trainer and options are not known."
    elif objectives[0] != objectives[1]:
        yield "The objectives differ: each run's loss and gradient are recomputed with its own."
