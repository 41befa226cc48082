"""RDM008: metrics of one logged line that cannot all be what the trainer's code makes."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logs_remedy, number
from rolloutdoctor.rules.fitted_identities import fitted_lines, fitted_metrics
from rolloutdoctor.rules.identity_sides import related_metrics, relation_lines
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


class LogContradictsItself(TableRule):
    """The trainer's own metrics contradict each other.

    ## What it does
    Tests every logged line against the identities of the trainer's code: a clipped share is the sum of its low and high
    parts, a mean lies between the smallest and the largest value, the loss is the policy term plus coefficient times KL
    minus coefficient times entropy, a share of groups times their number is a whole number. `rolloutdoctor explain
    metrics TRAINER` lists them, each with the upstream function that makes it.

    ## Why it matters
    Where numbers that one function makes of one set of rows do not fit, one of them is not what its name says: a
    patched trainer, a metric that something else overwrote, averages over different rows, another coefficient than the
    options state. What was concluded from it has to be looked at again.

    ## How it is measured
    `tested` is the number of identities times lines, `contradictions` those that fail. Both sides are compared within
    what the rounding of the log and of float32 may have moved them: half of the last printed digit, and 2^-18 of every
    value, which bounds a mean that is summed in pairs. An identity that depends on options is tested if these are
    stated, one that needs a line for each step if there is one, and one of a release if the release is stated. TRL
    averages the metrics of reward functions with one name: a reward is compared with them if as many weights as names
    are stated, or if it is its only metric in two lines. If no option states the coefficients of an entropy term in the
    loss, or of the functions whose weighted sum is the reward, both are compared with the least-squares sum over all
    lines: a warning, exposed, since a function may score no response. Otherwise it is an error, confirmed: the log
    itself is the proof; or a warning, exposed, for an identity that numbers at the edge of what is computed break.

    ## What to do
    Look at what makes the metric in the trainer that ran: its release, patches, callbacks that log under the same name.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> low = {"clip_fraction_low": [0.01] * 9, "clip_fraction_high": [0.02] * 9}
    >>> diagnose_log("RDM008", "trl", clip_fraction=[0.5] * 9, **low)
    'RDM008 error confirmed: contradictions 9'
    """

    code = "RDM008"
    name = "log-contradicts-itself"
    references = ("https://github.com/huggingface/trl/issues/5352",)
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    def columns(self, context: Context) -> frozenset[str]:
        """None: it is all in the log."""
        return frozenset()

    def metrics(self, context: Context) -> frozenset[str]:
        """What stands in an identity."""
        return related_metrics(context) | fitted_metrics(context)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without two metrics that belong together."""
        if self.metrics(context):
            return None
        return Missing(
            "no known identity connects the metrics of this log", context.recording.get("metrics", logs_remedy())
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each identity and step: its sides, and how many rounding radii they are too far apart."""
        wide = run.by_step(*self.metrics(context))
        return pl.concat([relation_lines(wide, context), fitted_lines(wide, context)]).sort("step", maintain_order=True)

    def quantities(self) -> Mapping[str, Quantity]:
        """How often an identity fails."""
        return {
            "contradictions": ((pl.col("beyond") > 1).sum(), "values"),
            "tested": (pl.len(), "values"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps that are furthest off."""
        return table.with_columns(value=pl.when(pl.col("beyond") > 1).then("beyond").otherwise(0.0))

    def note(self, place: Mapping[str, Any]) -> str:
        """Both sides."""
        return f"{place['identity']}: {number(place['left'])} and {number(place['right'])}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No line with all of an identity."""
        if len(run.table):
            return None
        return Missing("no logged line has all metrics of an identity", LONGER_LOG)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Name the identity that fails most often, the exact ones first."""
        failed = run.table.filter(pl.col("beyond") > 1)
        if failed.is_empty():
            return None
        each = failed.group_by("identity", "exact").agg(count=pl.len(), first=pl.col("step").min())
        worst = each.sort(["exact", "count", "identity"], descending=[True, True, False]).row(0, named=True)
        lines = len(run.table.filter(pl.col("identity") == worst["identity"]))
        place = failed.filter(pl.col("identity") == worst["identity"]).row(0, named=True)
        words = f"{worst['identity']} fails in {worst['count']:,} of {counted(lines, 'logged line')}"
        sides = f"{number(place['left'])} and {number(place['right'])}"
        others = len(each) - 1
        more = f"; {others:,} other {'identity fails' if others == 1 else 'identities fail'}" if others else ""
        return Judgement(
            severity=Severity.ERROR if worst["exact"] else Severity.WARNING,
            confirmed=bool(worst["exact"]),
            headline=f"the log contradicts itself: {words}",
            message=f"{words}, first at step {worst['first']}: {sides}{more}",
            evidence="the logged numbers differ by more than their rounding",
            advice="check how the trainer computes these metrics, and whether other code logs under the same names",
            measures={"onset": Measure(failed["step"][0], "step")},
        )
