"""Which logged values follow from the logged advantages, where those do not follow from the rows."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from rolloutdoctor.audit.logged import LoggedStep, of_step
from rolloutdoctor.audit.step import audit_step
from rolloutdoctor.audit.tally import STAGES, AuditTally, add_tallies
from rolloutdoctor.engine.cause_search import LoggedRows
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, evaluate_rows
from rolloutdoctor.evaluation.tokens import token_pass
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.rules.base import Context


def given_advantages(
    steps: Iterable[LoggedRows], unexplained: AuditTally, context: Context, dtype: torch.dtype
) -> frozenset[str]:
    """Return the unexplained quantities that agree in every step once the logged advantages are put in.

    Args:
        steps: the steps of the run, with what was logged at them.
        unexplained: quantity to its tally, where no hypothesis gives the logged values.
        context: trainer, options and objective of the run.
        dtype: of the token values.
    """
    later = {name: tally for name, tally in unexplained.items() if tally.stage != STAGES[0] and tally.window == 1}
    if "advantages" not in unexplained or not later:
        return frozenset()
    total: AuditTally = {}
    with el.unwarned():
        for step in steps:
            total = add_tallies(total, _audited(step, context, dtype))
    return frozenset(
        name
        for name, tally in later.items()
        if name in total and not total[name].disagree and total[name].agree >= tally.compared
    )


def _audited(step: LoggedRows, context: Context, dtype: torch.dtype) -> AuditTally:
    """The audit of a step whose loss is made of the logged advantages; empty where it cannot be evaluated."""
    trainer, batch = context.trainer, step.batch
    assert context.objective is not None
    assert trainer is not None
    try:
        objective = context.objective.at_step(step.logged)
        rows = evaluate_rows(batch, objective, dtype)
        logged = of_step(batch, step.logged, objective, context.digits, omits_rows=context.omits_rows)
        given = None if rows is None else _with_logged(rows, logged)
        if given is None or not batch.has(*loss_columns(objective)):
            return {}
        tokens, _ = token_pass(batch, {"": given}, dtype, ())[""]
        found = Evaluation(batch, objective, given, tokens, dtype)
        return audit_step(logged, found, trainer, context.config, trainer.metrics(found))
    except (CannotComputeError, UsageError):
        return {}


def _with_logged(rows: RowResult, logged: LoggedStep) -> RowResult | None:
    """The rows with their logged advantages; those without one keep the recomputed one. None where none was logged."""
    batch = logged.batch
    if rows.advantage_N is not None and "advantage" in batch.per_row:
        logged_N = batch.column("advantage").double()
    elif rows.advantage_N is not None and logged.advantage_range is not None:
        low_N, high_N = logged.advantage_range
        if bool((low_N < high_N).any()):
            return None  # not one for each row
        logged_N = torch.where(low_N == high_N, low_N, torch.nan)
    elif rows.advantage_T is not None and "advantages" in batch.per_token:
        logged_T = batch.column("advantages").to(rows.advantage_T.dtype)
        return replace(rows, advantage_T=torch.where(logged_T.isnan(), rows.advantage_T, logged_T))
    else:
        return None
    return replace(rows, advantage_N=torch.where(logged_N.isnan(), rows.advantage_N, logged_N))
