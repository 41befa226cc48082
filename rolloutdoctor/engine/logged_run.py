"""Tabulate a log without rollouts: what rules query of it, without a batch or a tensor."""

from rolloutdoctor.data.step_key import logged_steps
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.engine.vitals import metrics_read
from rolloutdoctor.evaluation.run_tables import metrics_frame
from rolloutdoctor.results.findings import InputSummary


def measure_log(prepared: PreparedRun) -> RunState:
    """Tabulate what rules read of every logged step of a run without rows."""
    plan, options, context = prepared.plan, prepared.options, prepared.context
    keys = prepared.run.logged_steps(options.steps, options.split)
    read = metrics_read(plan.rules, context)
    values = []
    for key in keys:
        logged = prepared.metrics.at(key)
        is_read = any(key.split in rule.splits for rule in plan.rules)
        values.append({name: value for name, value in logged.items() if is_read and name in read})
    tables = Tables(metrics=(metrics_frame(keys, values),))
    return RunState(InputSummary(0, logged_steps(keys), 0, 0), seen=tuple(keys), tables=tables)
