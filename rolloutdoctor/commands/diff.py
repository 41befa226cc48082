"""`diff`: a run computed as configured and with changes, side by side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rolloutdoctor.commands.breakdown import PARTS, part_slices
from rolloutdoctor.commands.diff_parts import DiffOptions, DiffWork, FoldState, columns_of, sides_of
from rolloutdoctor.commands.diff_stats import Change, measures
from rolloutdoctor.commands.needs import need_trainer
from rolloutdoctor.commands.top_groups import moved_groups
from rolloutdoctor.engine.comparable import comparable
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.engine.identified_options import with_identified
from rolloutdoctor.engine.parts import Executor, Serial, tree_sum
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.ops.tally import ratio
from rolloutdoctor.results.comparison import Comparison, Effect, Pair, Slice
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.exact import mean
from rolloutdoctor.results.version import __version__

BY_GRADIENT = "absolute change of the log-prob gradient"
BY_ADVANTAGE = "absolute change of advantages"


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
    if not options.fixes and not options.against:
        raise UsageError("nothing to compare with: add --fix NAME (see `rolloutdoctor fixes`) or --against KEY=VALUE")
    if options.by is not None and options.by not in PARTS:
        raise UsageError(f"no parts by {options.by!r} (known: {', '.join(PARTS)})")
    options = with_identified(run, options)
    configured = need_trainer(configure(run.metadata, options.trainer, options.layers))
    _, notes = columns_of(run, comparable(run.metrics, configured), configured, sides_of(run, configured, options))
    states = (executor or Serial()).measure(DiffWork(options), run, options.steps, options.split, progress)
    seen = tree_sum(states)
    if not seen.input.rows:
        raise UsageError(f"no {options.split} rows to compare; widen --steps or set --split")
    notes += seen.notes()
    bonus = configured.objective.entropy_bonus
    if bonus is not None:
        notes.append(f"losses and gradients are those of the policy term and the KL term: {bonus.no_gradient}")
    folds = seen.folds
    effects = [
        _effect(fold, options.by, label, joint=not at and len(folds) > 1)
        for at, (label, fold) in enumerate(folds.items())
    ]
    if options.top:
        groups_moved = moved_groups(run, next(iter(folds.values())).candidates, text=options.text)
        effects[0] = replace(effects[0], groups=groups_moved)
    return Comparison(
        version=__version__,
        device=find_device(options.device).type,
        dtype=options.dtype,
        input=seen.input,
        trainer=configured.trainer.name,
        trainer_version=configured.version,
        config=configured.settings(),
        by=options.by,
        effects=tuple(effects),
        notes=tuple(notes),
        advantages=None if seen.figure is None else seen.figure.data(),
    )


def _effect(fold: FoldState, by: str | None, label: str, *, joint: bool) -> Effect:
    """What came out."""
    steps = [(key, *found) for key, found in sorted(fold.steps.items())]
    total = Change()
    for _, change, _ in steps:
        total = total + change
    names = dict.fromkeys(name for _, _, pairs in steps for name in pairs)
    metrics = {name: _mean([pairs[name] for _, _, pairs in steps if name in pairs]) for name in names}
    moved = any(_other(pair) for _, _, pairs in steps for pair in pairs.values())
    per_step = tuple(
        Slice({"step": key.step, "split": key.split}, measures(change), pairs) for key, change, pairs in steps
    )
    return Effect(
        label=label,
        joint=joint,
        differs=total.differs or moved,
        total=measures(total),
        metrics=metrics,
        per_step=per_step,
        parts=() if by is None else per_step if by == "step" else part_slices(by, fold.part_totals(), total.steps),
        moved_by=BY_GRADIENT if fold.by_gradient else BY_ADVANTAGE,
        remarks=tuple(_remarks(total, moved)),
    )


def _other(pair: Pair) -> bool:
    one, other = pair.before, pair.after
    return one is not None and other is not None and one != other and not (one != one and other != other)


def _mean(pairs: Sequence[Pair]) -> Pair:
    """Mean over the steps where both sides have a finite value."""
    known = [
        (pair.before, pair.after)
        for pair in pairs
        if pair.before is not None
        and pair.after is not None
        and math.isfinite(pair.before)
        and math.isfinite(pair.after)
    ]
    if not known:
        return Pair(None, None)
    return Pair(mean([one for one, _ in known]), mean([other for _, other in known]))


def _remarks(total: Change, metrics_moved: bool) -> Iterator[str]:
    if not total.differs:
        same = "advantages, loss and gradient are the same"
        yield f"only metrics change: {same}" if metrics_moved else f"nothing changes: {same}"
        return
    if total.steps and not total.versus_l1 > 0:
        yield "the gradient is the same"
    if total.rescaled:
        mean = ratio(total.weight, total.same) or math.nan
        yield (
            "the denominators change, and with them the effective learning rate of all rows: "
            f"{int(total.rescaled):,} of {int(total.same):,} otherwise unaffected rows get another loss weight, "
            f"x{mean:.4g} on average (x{total.weight_low:.4g} to x{total.weight_high:.4g})"
        )
    elif total.same:
        yield f"unaffected: {int(total.same):,} rows keep advantage and loss weight"
