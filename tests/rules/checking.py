"""Check batches in memory with logged metrics for each step, and look at what came out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.plan import make_plan
from rolloutdoctor.engine.prepare import context_for
from rolloutdoctor.engine.run_steps import StepDispatcher
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.trainers.options import Layer

Metrics = Mapping[str, float]


def columns_of(batches: Sequence[RolloutBatch]) -> frozenset[str]:
    """Every column that is in any of the batches, as a file has it whose cells are null in some steps."""
    found: set[str] = set()
    for batch in batches:
        found |= {*batch.per_row, *batch.per_token}
        found |= {name for name in ("group_id", "rewards", "status") if batch.has(name)}
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
    return plan, fold, configured


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
