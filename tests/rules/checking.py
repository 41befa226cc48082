"""Check batches in memory with logged metrics for each step, and look at what came out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from random_order import RandomOrder

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.several_steps import TOGETHER, passes
from rolloutdoctor.data.turns import Turns, joined_turns
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.plan import Plan, make_plan
from rolloutdoctor.engine.prepare import context_for
from rolloutdoctor.engine.run_steps import StepDispatcher
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.testing import OF_BATCH
from rolloutdoctor.trainers.options import Layer

Metrics = Mapping[str, float]
JOINED: set[tuple[tuple[str, ...], frozenset[str]]] = set()
"""Rules and columns of which steps were measured together and alone already."""


def columns_of(batches: Sequence[RolloutBatch]) -> frozenset[str]:
    """Every column that is in any of the batches, as a file has it whose cells are null in some steps."""
    found: set[str] = set()
    for batch in batches:
        found |= {*batch.per_row, *batch.per_token}
        found |= {name for name in OF_BATCH if batch.has(name)}
    return frozenset(found)


def folded(
    batches: Sequence[RolloutBatch],
    *,
    trainer: str | None,
    logged: Metrics | Sequence[Metrics] = (),
    select: Sequence[str] = (),
    dtype: str = "float64",
    recorded: bool = True,
    **options: object,
):
    """Plan, fold and configuration of batches; `logged` is one mapping for all of them, or one for each.

    Options that are not given have their defaults, as a file says that recorded all of them; without `recorded` these
    are only assumed.
    """
    each = [logged] * len(batches) if isinstance(logged, Mapping) else list(logged) or [{}] * len(batches)
    names = frozenset(name for metrics in each for name in metrics)
    configured = configure(RunMetadata(), trainer, [Layer("test", options)])
    if configured is not None and recorded:
        settings = {name: replace(one, assumed=False) for name, one in configured.config.settings.items()}
        configured = replace(configured, config=replace(configured.config, settings=settings))
    rules = [find(code) for code in select] or list(RULES)
    plan = make_plan(rules, context_for(columns_of(batches), names, configured))
    fold = RuleAccumulator(plan)
    dispatcher = StepDispatcher([fold], find_dtype(dtype))
    for batch, metrics in zip(batches, each, strict=True):
        dispatcher.step(batch, metrics)
    kind = tuple(select), columns_of(batches)
    # A library orders the terms of a sum by their number, and steps that are measured together have more.
    if 0 < len(select) <= 3 and kind not in JOINED and not RandomOrder.active:
        JOINED.add(kind)
        assert_measured_alike(plan, [one for batch in batches for one in (companion(batch), batch)], dtype)
    return plan, fold, configured


def assert_measured_alike(plan: Plan, batches: Sequence[RolloutBatch], dtype: str = "float64") -> None:
    """Steps measured together give what each gives alone, to the bit."""
    alone, together = RuleAccumulator(plan), RuleAccumulator(plan)
    dispatcher = StepDispatcher([alone], find_dtype(dtype))
    for batch in batches:
        dispatcher.step(batch, {})
    dispatcher = StepDispatcher([together], find_dtype(dtype))
    for steps in passes(batches, TOGETHER):
        dispatcher.steps([(batch, {}) for batch in steps])
    one, other = alone.state(), together.state()
    assert repr(one) == repr(other)


def companion(batch: RolloutBatch) -> RolloutBatch:
    """Return another step with the same columns: the rows of a batch from the last to the second, other numbers."""
    order_N = torch.arange(len(batch)).flip(0)[:-1]
    if not len(order_N):
        return batch
    tokens = torch.cat([torch.arange(int(batch.rows[row]), int(batch.rows[row + 1])) for row in order_N])
    groups = group_ids = None
    if batch.groups is not None:
        kept, index_N = torch.unique(batch.groups.index_N[order_N], return_inverse=True)
        groups, group_ids = Groups.of(index_N, len(kept)), [batch.group_name(group) for group in kept.tolist()]
    return replace(
        batch,
        step=batch.step + 1_000_000,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[order_N].cumsum(0)]),
        groups=groups,
        group_ids=group_ids or (),
        per_row={name: _other(values[order_N]) for name, values in batch.per_row.items()},
        per_token={name: _other(values[tokens]) for name, values in batch.per_token.items()},
        rewards={name: _other(values[order_N]) for name, values in batch.rewards.items()},
        sample_ids=[batch.sample_ids[row] for row in order_N] if len(batch.sample_ids) else (),
        statuses=[batch.statuses[row] for row in order_N] if len(batch.statuses) else (),
        errors=[batch.errors[row] for row in order_N] if len(batch.errors) else (),
        turns=None if batch.turns is None else turns_in(batch.turns, order_N),
    )


def turns_in(turns: Turns, order_N: torch.Tensor) -> Turns:
    """Return the turns of some rows, in their order."""
    return joined_turns([turns.of_rows(slice(row, row + 1)) for row in order_N.tolist()])


def _other(x: torch.Tensor) -> torch.Tensor:
    return x * 0.75 if x.is_floating_point() else x


def report_on(batches: RolloutBatch | Sequence[RolloutBatch], **kwargs: object) -> Report:
    """Report on one batch or several."""
    if isinstance(batches, RolloutBatch):
        batches = [batches]
    plan, fold, configured = folded(batches, **kwargs)
    return judge(plan, fold.state(), configured, device="cpu", dtype="float64")


def outcomes(report: Report) -> dict[str, str]:
    """What became of each rule: found, clean, not applicable or skipped; a rule that ended twice is an error."""
    ended = [(finding.code, "found") for finding in report.findings]
    ended += [(code, "clean") for code, _ in report.clean]
    ended += [(one.code, "not applicable") for one in report.not_applicable]
    ended += [(one.code, "skipped") for one in report.skipped]
    assert len(dict(ended)) == len(ended)
    return dict(ended)


def found_by(code: str, batches: RolloutBatch | Sequence[RolloutBatch], **kwargs: object) -> Finding | None:
    """What one rule finds; None if there is nothing to find, or nothing was."""
    report = report_on(batches, select=[code], **kwargs)
    assert not report.skipped, report.skipped
    if not report.findings:
        assert outcomes(report)[code] in ("clean", "not applicable")
        return None
    (finding,) = report.findings
    assert finding.code == code
    return finding


def values(finding: Finding) -> dict[str, float | int | None]:
    """The numbers over the whole run."""
    return {name: measure.value for name, measure in finding.measures.items()}


def without(batch: RolloutBatch, column: str) -> RolloutBatch:
    """Return a batch without a column."""
    if column == "group_id":
        return replace(batch, groups=None, group_ids=())
    if column == "rewards":
        return replace(batch, rewards={})
    if column in ("status", "error"):
        return replace(batch, **{"status": {"statuses": ()}, "error": {"errors": ()}}[column])
    if column == "turns":
        return replace(batch, turns=None)
    rows = {name: values for name, values in batch.per_row.items() if name != column}
    tokens = {name: values for name, values in batch.per_token.items() if name != column}
    return replace(batch, per_row=rows, per_token=tokens)
