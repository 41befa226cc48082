"""RDG006: the loss depends on the cut into micro-batches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.audited import AuditedMeasured
from rolloutdoctor.rules.base import Context, Judgement, number, release_with_fix
from rolloutdoctor.rules.known_fault import KnownFaultRule, of_fixes, shifts_of

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


FIXES = ("global-denominator:token-mean",)


class AggregationByMicroBatch(KnownFaultRule):
    """The loss averages over each micro-batch, and then over micro-batches.

    ## What it does
    Where the recorded aggregation does not reproduce the logged loss, tries means over each micro-batch, and the
    number of micro-batches or of ranks as a factor too many or too few. An aggregation that itself divides by all
    tokens of the generation and by its micro-batches on top is a warning, with the factor. Where an option or the
    release asks for a mean in each micro-batch or on each rank, says how far the gradient is from that of one mean.

    ## Why it matters
    With a mean in each micro-batch the weight of a token depends on which rows it shares a micro-batch with: tokens
    of short micro-batches count more. A factor of the accumulation is a learning rate that nobody set. Some recipes
    went back to it because it scored better, so the finding gives the size and not a verdict on the recipe.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the aggregation that the log shows. Clean: a loss
    was logged, and all of them agree with the recorded aggregation.

    ## What to do
    Divide by the token count of the whole optimizer step, and scale once.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> cut = {"micro_batch_id": [0, 0, 1, 1]}
    >>> batch = toy_batch([[1, 0], [0, 1]], lengths=[3, 2, 5, 1], ref=-1.3, per_row=cut)
    >>> diagnose_one("RDG006", batch, trainer="trl", beta=0.1, loss_type="dapo", logged={"loss": 0.1690500731})
    'RDG006 error confirmed: values_compared 1'
    """

    code = "RDG006"
    name = "aggregation-by-micro-batch"
    references = (
        "https://github.com/huggingface/trl/pull/3021",
        "https://github.com/volcengine/verl/issues/906",
    )
    stages = ("loss",)
    shown_by = frozenset({"loss", "policy_loss"})
    absent = "every step is one micro-batch"
    fixes = FIXES
    reads = of_fixes(*FIXES)
    adds = shifts_of(*FIXES)

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Tell whether the step has several micro-batches, or does not say, and what tells the fix apart."""
        measures = super().measure_step(step)
        micro_N = step.batch.per_row.get("micro_batch_id")
        rank_N = step.batch.per_row.get("rank")
        columns = [column for column in (micro_N, rank_N) if column is not None]
        several = micro_N is None or any(bool((column != column[:1]).any()) for column in columns)
        micros = len(step.batch) and micro_N is not None and step.evaluation is not None and step.evaluation.tokens
        if not micros:
            return {**measures, "occurs": len(step.batch) > 0 and several}
        layout = micros.layout
        return {**measures, "occurs": several, "divided_by": float((layout.micros_N / layout.ranks_N).mean())}

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Judge as its base does; what an older release does, and nothing states the release, is a warning."""
        fault, config = super().judge(run, context), context.config
        if fault is None or fault.cause is None or config is None or config.is_release or context.trainer is None:
            return fault
        why = context.trainer.release_decides(config)
        return replace(fault, severity=Severity.WARNING, message=f"{fault.message}; {why}") if why else fault

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """A warning where the aggregation divides by the number of micro-batches on top of all tokens."""
        mode = "" if context.objective is None else context.objective.aggregation.mode
        divisors = run.run.metrics.filter(pl.col("metric") == "divided_by")["logged"]
        times = float(divisors.mean()) if len(divisors) else 1.0  # type: ignore[arg-type]  # of floats
        if mode != "generation-token-mean-over-micro-batches" or times <= 1:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=run.is_reproduced,
            headline=(
                f"loss and gradient are 1/{number(times)} of the token mean: each micro-batch divides by the whole "
                "batch and is averaged again"
            ),
            message=(
                "each micro-batch divides by all tokens of the generation, and the engine then averages over "
                f"{number(times)} micro-batches: the effective learning rate is {number(times)} times smaller than "
                "with other losses"
            ),
            evidence=f"this reproduces {run.agree} of {run.compared} logged values"
            if run.compared
            else "the options of the run",
            advice=f"{release_with_fix(context, 'one-over-accumulation')}; `rolloutdoctor diff --fix "
            "one-over-accumulation` shows the effect",
            measures={"divided_by": Measure(times, "micro-batches")},
            fix="one-over-accumulation:rescaled",
        )
