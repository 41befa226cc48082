"""`diff`: a run computed as configured and with changes, side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import polars as pl

from rolloutdoctor.commands.diff.ablation import LeftOut
from rolloutdoctor.commands.diff.every_fix import by_size, every_fix
from rolloutdoctor.commands.diff.measures import Totals, differs, is_other, measures, totals
from rolloutdoctor.commands.diff.sides import DiffOptions, Sides, apart_of, asked_of, columns_of, sides_in, sides_of
from rolloutdoctor.commands.diff.top_groups import moved_groups
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.engine.breakdown import PARTS, labelled
from rolloutdoctor.engine.devices import find_device, on_device
from rolloutdoctor.engine.gathering import gather
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Executor
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.requirements import need_trainer
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.comparison import Comparison, Effect, Pair, Slice
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.exact import mean
from rolloutdoctor.results.findings import Measure
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.base import counted, percent

BY_GRADIENT = "absolute change of the log-prob gradient"
BY_ADVANTAGE = "absolute change of advantages"

ONLY_KL = "zero-std:loss"
"""The change that takes away the KL term of zero-variance groups, and nothing else."""

_ALL = 1e-9
"""Share of a gradient that is the rounding of its sum."""

MOST_NAMED = 12
"""Rows that are named of those left out."""


def diff(
    run: Run,
    options: DiffOptions,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Comparison:
    """Compare a run as configured with the same run under fixes, other options, or both.

    Args:
        run: what to read.
        options: what to compare.
        progress: called with what is done and what there is to do, in the run's `unit`.
        executor: where parts are measured; None: in this process.

    Raises:
        UsageError: if an option cannot be used, or there is nothing to compare.
        InputError: if a file cannot be read, breaks the contract, or lacks what the advantages need.
    """
    alone = executor in (None, Processes(1))
    return on_device(options, [run], lambda chosen: _diff(run, chosen, progress, executor), alone=alone)


def _diff(run: Run, options: DiffOptions, progress: Progress | None, executor: Executor | None) -> Comparison:
    _refuse_contradictions(options)
    ready = prepare(run, CheckOptions(**options.reading, rules=()), lenient=False)
    run, options = ready.run, replace(options, **ready.options.reading)
    configured = need_trainer(ready.configured, run)
    if options.without and configured.objective.unknown_loss:
        raise InputError(f"{run.files[0]}: rows are left out of a loss: {configured.objective.unknown_loss}")
    untried = None
    if options.all_fixes:
        able, untried = every_fix(run, configured)
        options = replace(options, fixes=able)
    sides = sides_of(run, configured, options)
    _, notes = columns_of(run, ready.metrics, configured, sides, options.fixes)
    how = {"measured": False, "lenient": False}
    _, (gathered,) = gather(ready, sides_in, *asked_of(options), progress=progress, executor=executor, **how)
    read, left = gathered.input, gathered.table("left")
    if not read.rows:
        raise UsageError(f"no {options.split} rows to compare; widen --steps or set --split")
    if options.without.names and left.is_empty() and not options.without.rows:
        raise UsageError("no row with a gradient has such a name; --without takes SAMPLE or STEP/GROUP/SAMPLE")
    notes += gathered.notes()
    others = run.rows - read.rows
    if options.steps is None and others > 0:
        other = "evaluation" if options.split == TRAIN else "training"
        notes.append(
            f"{counted(others, f'{other} row')} of {run.rows:,} are not in these numbers; --split "
            f"{'eval' if options.split == TRAIN else TRAIN} compares them"
        )
    bonus = configured.objective.entropy_bonus
    if bonus is not None:
        notes.append(f"losses and gradients are those of the policy term and the KL term: {bonus.no_gradient}")
    labels = [label for label in (*sides, *apart_of(configured, options)) if label != AS_CONFIGURED]
    has_joint = len(labels) > 1 and not options.all_fixes
    effects = [_effect(gathered, label, options.by, joint=has_joint and not at) for at, label in enumerate(labels)]
    if options.all_fixes:
        effects.sort(key=by_size)
    if options.without:
        remarks = *_carried(effects[0], left, options.without), *effects[0].remarks
        effects[0] = replace(effects[0], remarks=remarks)
    if options.top:
        effects[0] = replace(effects[0], groups=moved_groups(gathered.table("moved")))
    return Comparison(
        version=__version__,
        device=find_device(options.device).type,
        dtype=options.dtype,
        input=read,
        trainer=configured.trainer.name,
        trainer_version=configured.version,
        config=configured.settings(),
        by=options.by,
        effects=tuple(effects),
        notes=(*run.notes.sentences, *notes),
        advantages=gathered.advantages,
        untried=untried,
    )


def _refuse_contradictions(options: DiffOptions) -> None:
    """Refuse options that leave nothing to compare, or of which one leaves nothing for the other to do.

    Raises:
        UsageError: if such are given.
    """
    if options.all_fixes and (options.fixes or options.against or options.without or options.by or options.top):
        raise UsageError(
            "--all-fixes is one table of every fix: leave out --fix, --against, --without, --by, --top and --top-tokens"
        )
    if not options.all_fixes and not options.fixes and not options.against and not options.without:
        raise UsageError(
            "nothing to compare with: add --fix NAME (see `rolloutdoctor explain fixes`), --all-fixes, "
            "--against KEY=VALUE, --without ROWS or --top N"
        )
    if (options.fixes or options.against) and options.without:
        raise UsageError("--without compares a step with itself: leave out --fix and --against")
    if options.by is not None and options.by not in PARTS:
        raise UsageError(f"no parts by {options.by!r} (known: {', '.join(PARTS)})")


def _effect(sides: Sides, side: str, by: str | None, *, joint: bool) -> Effect:
    """Query what a changed side makes of the run."""
    lines = sides.table("steps").filter(side=side).sort("step", "split")
    metrics = sides.table("metrics").filter(side=side).sort("step", "split", maintain_order=True)
    (total,) = lines.select(**totals()).to_dicts()
    pairs: dict[StepKey, dict[str, Pair]] = {}
    names: dict[str, list[Pair]] = {}
    for _, step, split, name, before, after in metrics.iter_rows():
        pair = pairs.setdefault(StepKey(step, split), {})[name] = Pair(before, after)
        names.setdefault(name, []).append(pair)
    moved = any(is_other(before, after) for before, after in metrics.select("before", "after").iter_rows())
    keys = lines.select("step", "split").iter_rows()
    per_step = tuple(
        Slice({"step": step, "split": split}, numbers, pairs.get(StepKey(step, split), {}))
        for (step, split), numbers in zip(keys, measures(lines), strict=True)
    )
    parts: tuple[Slice, ...] = per_step if by == "step" else ()
    if by is not None and by != "step":
        parts = tuple(part_slices(by, sides.table("parts").filter(side=side), total["steps"]))
    run_total = measures(lines.select(**totals()))[0]
    return Effect(
        label=side,
        joint=joint,
        differs=differs(total) or moved,
        total=run_total | _of_kl_only(side, run_total),
        metrics={name: _mean(frame) for name, frame in names.items()},
        per_step=per_step,
        parts=parts,
        moved_by=BY_GRADIENT if total["steps"] else BY_ADVANTAGE,
        remarks=(*_remarks(total, moved), *_whole_steps(lines)),
    )


def _of_kl_only(side: str, total: Mapping[str, Measure]) -> dict[str, Measure]:
    """What the spurious share is where the KL term of zero-variance groups, and nothing else, is taken away."""
    share = total["spurious_share_l1"]
    return {"kl_only_share_l1": share} if side == ONLY_KL and share.value is not None else {}


def part_slices(by: str, lines: pl.DataFrame, steps: float) -> Iterator[Slice]:
    """Yield the parts in order; losses are divided by `steps`, so that they add up to the run's."""
    lines = lines.sort("step", "split")
    if by == "group":
        slices = lines.with_columns(pl.col("group_id").fill_null("")).sort("step", "split", "group_id")
        names = slices.select("step", "split", "group_id").to_dicts()
        yield from map(Slice, names, measures(slices, steps))
        return
    slices = labelled(by, lines).group_by("bin", "label").agg(**totals()).sort("bin", nulls_last=True)
    for label, numbers in zip(slices["label"], measures(slices, steps), strict=True):
        # A group lies in several parts, so that none is its own.
        yield Slice({by: label}, {name: value for name, value in numbers.items() if "groups" not in name})


def _carried(effect: Effect, left: pl.DataFrame, without: LeftOut) -> Iterator[str]:
    """Say how much of the step was left out, and what the rest of it keeps."""
    total = effect.total
    before, after = total["grad_l2_before"].value, total["grad_l2_after"].value
    if before and after is not None and not without.afresh:
        share = percent(1 - (after / before) ** 2)
        yield f"what is left out carries {share} of the squared log-prob gradient (L2)"
    names = left.sort("step", maintain_order=True)["name"].to_list()
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    if names:
        yield f"{counted(len(names), 'row')}: {', '.join(names[:MOST_NAMED])}{more}"
    yield (
        "advantages and denominators are those of a step without them"
        if without.afresh
        else "the other rows keep their advantages and the denominators of the step"
    )


def _mean(pairs: Sequence[Pair]) -> Pair:
    """Mean over the steps where both sides have a finite value."""
    finite_pairs = [
        (pair.before, pair.after)
        for pair in pairs
        if pair.before is not None
        and pair.after is not None
        and math.isfinite(pair.before)
        and math.isfinite(pair.after)
    ]
    if not finite_pairs:
        return Pair(None, None)
    return Pair(mean([before for before, _ in finite_pairs]), mean([other for _, other in finite_pairs]))


def _whole_steps(lines: pl.DataFrame) -> Iterator[str]:
    """Say in how many steps the change takes all of the gradient."""
    gradient = pl.col("grad_l1")
    emptied = lines.filter(gradient > 0, pl.col("versus_l1") >= (1 - _ALL) * gradient, pl.col("grad_l1_after") == 0)
    if len(emptied):
        yield f"in {len(emptied):,} of {counted(len(lines), 'step')} the fix removes the whole gradient"


def _remarks(total: Totals, metrics_moved: bool) -> Iterator[str]:
    if not differs(total):
        same = "advantages, loss and gradient are the same"
        same = same if total["steps"] else "advantages are the same, and there is no loss to compare"
        yield f"only metrics change: {same}" if metrics_moved else f"nothing changes: {same}"
        return
    if total["steps"] and not total["versus_l1"] > 0:
        yield "the gradient is the same"
    if total["rescaled"]:
        mean = total["weight_ratio"] / total["same"]
        yield (
            "the denominators change, and with them the effective learning rate of all rows: "
            f"{total['rescaled']:,} of {total['same']:,} otherwise unaffected rows get another loss weight, "
            f"x{mean:.4g} on average (x{total['weight_low']:.4g} to x{total['weight_high']:.4g})"
        )
    elif total["same"]:
        yield f"unaffected: {total['same']:,} rows keep advantage and loss weight"
