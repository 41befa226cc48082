"""RDO006: the importance ratio compares other log-probs."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rolloutdoctor.results.audit import OTHER_NUMBERS
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.audited import COUNTED, CountedMeasured, CountingRule
from rolloutdoctor.rules.base import Context, Judgement, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

PAIR = ("policy_log_probs", "old_log_probs")


@dataclass(frozen=True)
class RatioNotOne(CountingRule):
    """The importance ratio in the loss is not that of the policy and the old log-probs.

    ## What it does
    Where the log-probs in the file do not reproduce the logged loss, clip fraction or drift, tries a ratio of 1
    everywhere, and one against the sampler's log-probs. Looks whether policy and old log-probs differ before the first
    update of a batch, which the loss agrees with: both are logged as they are.

    ## Why it matters
    Before the first update of a batch the ratio is exactly 1; any other value is noise in the loss and in the clip. A
    ratio that is not 1 at the first inner step clips tokens of an on-policy update.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradient differs in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1, and the `cosine` of the two.

    Before the first update of a batch both log-probs are those of one model. They are compared on the trained tokens of
    rows with the smallest `optim_step_id`, or of all rows where the options say that a batch has one update, in steps
    that are the first pass over their rows. In TRL they are equal to the bit, so that any difference is noise in the
    ratio, dropout or stale old log-probs. Trainers that batch the two passes differently are not looked at.

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
    remedy = "log the loss and the KL of every optimizer step beside the run"
    adds = COUNTED
    shows = "trained tokens whose policy and old log-probs differ before the first update"

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and those that identify the rows of the first update."""
        return super().optional_columns(context) | {*PAIR, "response_mask", "optim_step_id"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Compare the trained tokens of rows that were scored before the first update."""
        from rolloutdoctor.ops.elementwise import kept

        if not all(map(block.is_logged, PAIR)):
            return {}
        first_N = block.batch.first_part_N
        apart_T = (block.column(PAIR[0]) - block.column(PAIR[1])).abs()
        counted_T = block.trained_T & apart_T.isfinite()
        if first_N is not None:
            counted_T = counted_T & block.runs.expand(first_N[block.rows])
        size_T = kept(apart_T, counted_T)
        sums = {"looked_at": counted_T, "shown": size_T > 0, "size": size_T}
        return {name: block.row_sum(x_T) for name, x_T in sums.items()}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Keep what was compared in steps whose rows are known to have been scored before the first update."""
        import torch

        known = torch.tensor([self._is_known(each) for each in step.each])
        found = step.token_measures.get(self.code, {})
        return {name: x_N * step.by_step.expand(known) for name, x_N in found.items()}

    def _is_known(self, step: "StepView") -> bool:
        trainer, config, numbered = step.trainer, step.config, step.batch.first_part_N is not None
        if trainer is None or config is None or not step.training:
            return False
        generated = any(fnmatchcase(name, one) for one in trainer.log.generation for name in step.logged)
        return trainer.updates.scored_before(config, numbered=numbered, generated=generated)

    def direct(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """A warning where they differ at all."""
        causes = [cause.hypothesis for found in context.causes.values() for cause in found]
        # The line of the step shows which pass comes first.
        if not run.shown or context.trainer is None or OTHER_NUMBERS in causes:
            return None
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
