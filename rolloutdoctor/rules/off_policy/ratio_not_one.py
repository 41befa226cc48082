"""RDO006: the importance ratio compares other log-probs."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import log
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.results.audit import OTHER_NUMBERS
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.audited import COUNTED, AuditedMeasured, CountedMeasured, RowCountingRule
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

PAIR = ("old_log_probs", "policy_log_probs")

OF_PASSES = ("trained", "apart", "drift", "beyond")
"""Trained tokens of rows that two passes scored before the first update, and what was measured of them."""


class RatioNotOne(RowCountingRule):
    """The importance ratio in the loss is not that of the policy and the old log-probs.

    ## What it does
    Where the log-probs in the file do not reproduce the logged loss, clip fraction or drift, tries a ratio of 1
    everywhere, and one against the sampler's log-probs. Checks whether policy and old log-probs differ before the first
    update of a batch, which the loss agrees with: both are logged as they are.

    ## Why it matters
    Before the first update of a batch the ratio is exactly 1; any other value is noise in the loss and in the clip. A
    ratio that is not 1 at the first inner step clips tokens of an on-policy update.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the ratio that the log shows.

    Before the first update of a batch both log-probs are those of one model. They are compared on the trained tokens of
    rows with the smallest `optim_step_id`, or of all rows if the options say that a batch has one update, in steps that
    are the first pass over their rows. In TRL they are equal to the bit, so any difference is noise in the ratio,
    dropout or stale old log-probs. Trainers that compute them in two passes have noise there (`RDO015` says how much):
    a warning if the mean of old minus policy log-prob has a median over the steps above 0.01 nats, or a tenth of the
    tokens has a ratio above 1.2 or below 1/1.2; information above 0.001 of either; exposed. If nothing says which rows
    were scored before the first update, and the two differ, the rule is skipped.

    ## What to do
    Turn dropout off. Compute the old log-probs once before the first update, with the kernels of the update, and keep
    them.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, old = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, old=old)
    >>> diagnose_one("RDO006", batch, trainer="trl", logged={"loss": -0.1414013591})
    'RDO006 error confirmed: values_compared 1'
    """

    code = "RDO006"
    name = "ratio-not-one"
    references = ("https://github.com/volcengine/verl/issues/6280",)
    stages = ("loss",)
    shown_by = frozenset({"loss", "policy_loss"})
    adds = (*COUNTED, *OF_PASSES)
    clip: float = 1.2
    """The usual upper clip: a ratio beyond it is one that training would clip."""
    many_beyond: float = 0.1
    far: float = 0.01
    """Nats: noise without a direction does not reach it; see RDO015."""
    some: float = 0.001

    shows = "trained tokens whose policy and old log-probs differ before the first update"

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and those that identify the rows of the first update."""
        return super().optional_columns(context) | {*PAIR, "response_mask", "optim_step_id"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Compare the trained tokens of rows that were scored before the first update."""
        from rolloutdoctor.ops.elementwise import is_above
        from rolloutdoctor.rules.measures.sampled_rows import gap_of

        gap = gap_of(block, PAIR) if all(map(block.is_logged, PAIR)) else None
        if gap is None:
            return {}
        first_N, size_T = block.batch.first_part_N, gap.apart_T.abs()
        seen_n, apart_n = gap.count_N, block.row_sum(is_above(size_T, 0.0))
        beyond_n = block.row_sum(is_above(size_T, log(self.clip)))
        measures = {"looked_at": seen_n, "shown": apart_n, "size": block.row_sum(size_T), "trained": seen_n}
        measures |= {"apart": apart_n, "drift": 0 - block.row_sum(gap.apart_T), "beyond": beyond_n}
        return measures if first_N is None else {name: x_n * first_N[block.rows] for name, x_n in measures.items()}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Keep what was compared in steps whose rows are known to have been scored before the first update."""
        import torch

        is_known = torch.tensor([self._is_known(each) for each in step.each])
        in_passes = torch.tensor([each.training for each in step.each])
        measures = step.token_measures.get(self.code, {})
        of = {name: in_passes if name in OF_PASSES else is_known for name in self.adds}
        return {name: x_N * step.by_step.expand(of[name]) for name, x_N in measures.items()}

    def _is_known(self, step: "StepView") -> bool:
        trainer, config, numbered = step.trainer, step.config, step.batch.first_part_N is not None
        if trainer is None or config is None or not step.training:
            return False
        generated = any(fnmatchcase(name, pattern) for pattern in trainer.log.generation for name in step.logged)
        return trainer.updates.scored_before(config, numbered=numbered, generated=generated)

    def direct(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """A warning where they differ at all."""
        causes = [cause.hypothesis for several in context.causes.values() for cause in several]
        # The line of the step shows which pass comes first.
        if context.trainer is None or OTHER_NUMBERS in causes:
            return None
        if not run.shown:
            return None if run.looked_at else self._of_two_passes(run, context)
        mean = run.size / run.looked_at
        share = percent(run.shown / run.looked_at)
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=(
                "the importance ratio is not 1 before the first update: policy and old log-probs differ by "
                f"{number(mean)} nats on average"
            ),
            message=(
                f"{share} of {counted(run.looked_at, 'trained token')} scored before the first update of their batch "
                "have different policy and old log-probs: the ratio of an on-policy update is not 1"
            ),
            evidence=(
                f"both columns; {context.trainer.title} computes them with the same weights, so they should be "
                "bit-identical"
            ),
            advice="turn dropout off, and compute the old log-probs with the same weights and kernels as the update",
            measures={"gap_mean": Measure(mean, "nats")},
        )

    def _is_one_update(self, context: Context) -> bool:
        """True if the options state that each batch has one update, so that all rows were scored before it."""
        trainer, config = context.trainer, context.config
        return trainer is not None and config is not None and trainer.updates.a_batch(config) == 1

    def _of_two_passes(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """Compare the log-probs of two passes with what the noise between them reaches."""
        if not self._is_one_update(context) or self._is_against_sampler(context):
            return None
        sums = run.table.filter(pl.col("trained") > 0).group_by("step").agg(pl.sum(*OF_PASSES))
        if not len(sums):
            return None
        drift = abs(float(sums.select((pl.col("drift") / pl.col("trained")).median()).item()))
        share = float(sums.select(pl.sum("beyond") / pl.sum("trained")).item())
        if max(drift, share) <= self.some:
            return None
        words = f"policy and old log-probs differ by {number(drift)} nats (median over the steps of the mean)"
        far = drift > self.far or share > self.many_beyond
        return Judgement(
            severity=Severity.WARNING if far else Severity.INFO,
            confirmed=False,
            headline=(
                f"{words} and {percent(share)} of the ratios are beyond {self.clip:g}, although each batch is updated "
                "only once"
            ),
            message=f"in {counted(len(sums), 'step')} {words}, although the options state one update per batch",
            evidence=(
                "both columns; the bf16 noise of two forward passes has no direction, and leaves few ratios beyond the "
                "usual clip"
            ),
            advice=(
                "check that both passes have one temperature and the same weights, turn dropout off, and score with "
                "the micro-batches of the update"
            ),
            measures={"drift_median": Measure(drift, "nats"), "beyond_share": Measure(share, "share")},
        )

    def _is_against_sampler(self, context: Context) -> bool:
        """True if the ratio is that to the sampler."""
        objective = context.objective
        return objective is not None and objective.surrogate.old == "rollout_log_probs"

    def unseen_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Log-probs that differ where nothing says which rows were scored before the first update."""
        reason = super().unseen_reason(run, context)
        looked_at, apart = (int(count or 0) for count in run.table.select(pl.sum("looked_at", "apart")).row(0))
        if reason is not None or looked_at or not apart or self._is_one_update(context):
            return reason
        if self._is_against_sampler(context) or context.trainer is None or context.config is None:
            return reason
        updates = context.trainer.updates.a_batch(context.config)
        if isinstance(updates, str):
            return Missing(f"policy and old log-probs differ, and nothing states {updates}", "state them with --set")
        return Missing(
            "policy and old log-probs differ, and no column says which rows were scored before the first update",
            "record optim_step_id, the number of the update within the batch",
        )
