"""Measure a log without rollouts: what rules query of it, without a batch or a tensor."""

from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.engine.vitals import metrics_read
from rolloutdoctor.evaluation.run_tables import metrics_frame
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.rules.logged_step import LoggedStep


def measure_log(prepared: PreparedRun) -> RunState:
    """Let the rules measure every logged step of a run without rows."""
    plan, options, context = prepared.plan, prepared.options, prepared.context
    keys = prepared.run.logged_steps(options.steps, options.split)
    read = metrics_read(plan.rules, context)
    values = []
    for key in keys:
        logged = prepared.metrics.at(key)
        step = LoggedStep(key.split, logged, context.trainer, context.config, context.digits)
        rules = [rule for rule in plan.rules if key.split in rule.splits]
        found: dict[str, float | None] = {name: value for name, value in logged.items() if rules and name in read}
        for rule in rules:
            found |= {f"{rule.name}/{name}": value for name, value in rule.measure_log(step).items()}
        values.append(found)
    tables = Tables(metrics=(metrics_frame(keys, values),))
    return RunState(InputSummary(0, len(keys), 0, 0), seen=tuple(keys), tables=tables)
