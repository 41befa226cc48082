"""RDI015: rows that fill up a batch are trained and counted."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import COUNTED, AuditedMeasured, CountedMeasured, RowCountingRule
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Quantity, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

TELLING = frozenset({"response_ids", "rollout_log_probs", "old_log_probs", "policy_log_probs"})
"""Columns of which one is needed to know a copy."""

FIX = "padding-rows:left-out"


class PaddingRows(RowCountingRule):
    """Rows that a trainer adds to fill up a batch are trained and counted.

    ## What it does
    Finds rows that repeat an earlier row of their group to the bit and that a trainer added so that the batch divides
    by ranks and mini-batches. Where the logged advantages are not reproduced by all rows, tries them without those.

    ## Why it matters
    A copy without an advantage adds nothing to the policy term, but its tokens are in the denominator: the step gets
    smaller by their share, and its KL term counts twice. A copy with an advantage weighs a response twice, in the
    loss and in the baseline of its group.

    ## How it is measured
    A copy has the reward, the tokens and the sampler's log-probs of another row of its group, and a trained token.
    Sampling repeats short or certain responses as well (`RDI009`), so there must be a sign that the copy was added.
    Either logged advantages show it: 0 for the copy and not for the other row. Or the sizes of groups do: of at least
    three groups at most half have copies (or groups of three sizes have fewer copies than other rows), and all have one
    size without the copies but not with them. Sizes show nothing if groups without their copies have different ones in
    the run, as after a filter of responses. `rows_shown` are such rows, `tokens_share` is their share of the trained
    tokens. With logged advantages the finding says how many of them are reproduced with and without these rows in the
    baselines. It is an error if logged losses show that the tokens are counted, else a warning.

    ## What to do
    Set the mask of such rows to 0, or leave them out of all sums. `rolloutdoctor diff --fix padding-rows` shows what
    they change.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> rollout = [[-0.5, -1.5], [-2.5, -0.2], [-1.0, -0.7], [-2.0, -1.0], [-3.0, -0.4], [-0.9, -2.0], [-0.9, -2.0]]
    >>> batch = toy_batch([[1, 0], [0, 1], [1, 0, 0]], lengths=2, rollout=rollout)
    >>> diagnose_one("RDI015", batch, trainer="verl", adv_estimator="grpo")
    'RDI015 warning exposed: tokens_share 0.1429'
    """

    code = "RDI015"
    name = "padding-rows"
    references = (
        "https://github.com/rllm-org/rllm/pull/508",
        "https://github.com/verl-project/verl/pull/5969",
    )
    stages = ("advantages",)
    needs_objective = False
    splits = ("train",)
    adds = (*COUNTED, "copied", "trained", "idle", "own")
    unit = "rows"
    shows = "row that fills up the batch"

    def columns(self, context: Context) -> frozenset[str]:
        """The groups, and which tokens are trained."""
        return frozenset({"group_id", "response_mask"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return what identifies a copy, and the logged advantages."""
        named = {*TELLING, "reward", "advantage", "advantages", "optim_step_id", "generation_id"}
        return super().optional_columns(context) | named

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing identifies a row that is repeated."""
        if context.columns & TELLING:
            return super().unavailable_reason(context)
        return Missing("nothing identifies a row that repeats another", context.to_record("response_ids"))

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Copies, those that fill up the batch, and trained tokens."""
        from rolloutdoctor.evaluation.padding_rows import copies_of_steps, own_rows

        copied_N, fills_N, idle_N = copies_of_steps([each.batch for each in step.each], step.batch)
        trained_N = step.batch.trained.diff()
        counts = {"looked_at": trained_N > 0, "shown": fills_N, "size": trained_N * fills_N}
        own_N = own_rows(step.batch, copied_N)
        return {**counts, "copied": copied_N, "trained": trained_N, "idle": idle_N, "own": own_N}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the sums of each step, of the rows that are shown and of the idle ones among them, and these rows."""
        own, shown = pl.col("own"), pl.col("shown").cast(pl.Boolean)
        idle = shown & pl.col("idle").cast(pl.Boolean)
        finite, size = own.filter(own.is_finite()), pl.col("size")
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(
            pl.sum("looked_at", "copied", "trained"),
            least=finite.min(),
            most=finite.max(),
            **{f"shown_{word}": of.sum() for word, of in (("idle", idle), ("any", shown))},
            **{f"size_{word}": size.filter(of).sum() for word, of in (("idle", idle), ("any", shown))},
        )
        places = rows.select(*NAMES, is_idle=idle, value=shown.cast(pl.Float64))
        return with_places(sums, places, context, "is_idle")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Count the rows; not by sizes of groups where these differ anyway."""
        is_uneven = bool(run.rows.select((pl.max("most") > pl.min("least")).fill_null(value=False)).item())
        word = "idle" if is_uneven else "any"
        is_shown = pl.col("is_idle") | pl.lit(not is_uneven)
        rows = run.rows.with_columns(value=pl.when(is_shown).then("value"), shown=f"shown_{word}", size=f"size_{word}")
        return super().table(run.with_rows(rows), context)

    def quantities(self) -> Mapping[str, Quantity]:
        """The counts, and the share of tokens."""
        share = pl.sum("size") / pl.sum("trained")
        return {"tokens_share": (pl.when(pl.sum("trained") > 0).then(share), "share"), **super().quantities()}

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Copies that nothing tells from repeated samples."""
        copied = int(run.table["copied"].sum())
        if not copied or run.table["shown"].sum() or run.compared or self.code in context.causes:
            return None
        return Missing(
            f"{counted(copied, 'row')} repeat another of their group, and no logged advantage tells whether they were "
            "sampled",
            self.what_to_log,
        )

    def vacuous_reason(self, run: AuditedMeasured, context: Context) -> str | None:
        """No row is trained."""
        return None if run.table["looked_at"].sum() else "no training row has a trained token"

    def unseen_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Copies whose advantages are not explained."""
        return super().unseen_reason(run, context) if run.table["copied"].sum() else None

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """A warning where the logged values are also those of a trainer that leaves the rows out."""
        judgement = super().judge(run, context)
        if judgement is None or judgement.cause is None or FIX not in judgement.cause.also:
            return judgement
        return replace(judgement, severity=Severity.WARNING, confirmed=False)

    def direct(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """A warning where the sizes of groups show them, unless the logged advantages are others."""
        if not run.shown or (run.compared and not run.is_reproduced):
            return None
        share, rows = percent(run["tokens_share"]), counted(run.shown, "row")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"{rows} that only fill up the batch are trained: {share} of all trained tokens",
            message=f"{rows} repeat another of their group to the bit, and groups have one size without them: they "
            f"hold {share} of the trained tokens",
            evidence="tokens, log-probs and rewards of the rows, and the sizes of groups"
            + ("; the logged advantages count them in the baselines" if run.is_reproduced else ""),
            advice="set the mask of such rows to 0; compare with `rolloutdoctor diff --fix padding-rows`",
            fix=FIX,
        )
