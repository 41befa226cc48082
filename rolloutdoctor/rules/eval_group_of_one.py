"""RDM002: evaluation rows that are alone in their group."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.hypotheses.fixes import choose
from rolloutdoctor.ops.tally import Sums
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, MIXED_SPLITS, Context, Judgement, Missing, Rule, counted

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

_PROPOSED = "zero-std:pr5640"
"""The fix that masks the completions of flagged rows."""


@dataclass(frozen=True)
class EvalTally(Sums):
    """What `eval-group-of-one` adds up over evaluation steps."""

    rows: int = 0
    eval_rows: int = 0
    masked_rows: int = 0
    pr_rows: int = 0
    steps: int = 0
    flagged_steps: int = 0


@dataclass(frozen=True)
class EvalGroupOfOne(Rule[EvalTally]):
    """Evaluation rows in groups of one: a mask or metric based on zero reward std applies to every one of them.

    ## What it does
    Counts evaluation rows that are alone in their group, how many of them are fully masked, and how many the completion
    mask proposed in TRL PR 5640 would have masked.

    ## Why it matters
    With `num_generations_eval = 1` TRL's standard deviation is 0 for every row, so `eval_frac_reward_zero_std` is 1 by
    construction. A mask based on it removes every evaluation row: loss, KL and entropy become 0. The fix `zero-std`
    here never touches evaluation rows or groups of one.

    ## How it is measured
    `rows` are evaluation rows alone in their group, `masked_rows` those of them without a trained token,
    `rows_masked_by_pr5640` those that TRL's own flag covers. Confirmed: masks or the logged fraction show it.

    ## What to do
    Restrict such masks to training rows and test max - min instead of the std; ignore `frac_reward_zero_std` in
    evaluation.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDM002", toy_batch(rewards=[[1], [0]], split="eval"), trainer="trl")
    'RDM002 info exposed: rows 2'
    """

    code = "RDM002"
    name = "eval-group-of-one"
    references = ("https://github.com/huggingface/trl/pull/5640",)
    tally = EvalTally
    splits = ("eval",)
    needs_objective = False

    def columns(self, context: Context) -> frozenset[str]:
        """Groups."""
        return frozenset({"group_id"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask shows rows that were blanked, rewards what the proposed mask would do."""
        return frozenset({"response_mask", "reward"})

    def measure(self, step: "StepView") -> EvalTally:
        """Count one step."""
        if step.training:
            return EvalTally()
        single_N = self._single(step)
        flagged = 0
        objective = None if step.evaluation is None else step.evaluation.objective
        if objective is not None and choose(_PROPOSED).applies_to(objective) and step.batch.has("reward"):
            flagged_N = step.flagged_rows(objective.advantage.scale)
            flagged = int((flagged_N & single_N).sum())
        return EvalTally(
            rows=int(single_N.sum()),
            eval_rows=len(step.batch),
            masked_rows=int(self._masked(step, single_N).sum()),
            pr_rows=flagged,
            steps=int(bool(single_N.any())),
            flagged_steps=int(
                len(single_N) > 0 and bool(single_N.all()) and step.logged.get("frac_reward_zero_std") == 1
            ),
        )

    def _single(self, step: "StepView") -> "Tensor":
        alone_N: Tensor = (step.groups.size_G == 1)[step.groups.index_N]
        return alone_N

    def _masked(self, step: "StepView", single_N: "Tensor") -> "Tensor":
        """Single rows that have tokens and an all-zero mask."""
        if "response_mask" not in step.batch.per_token:
            return single_N & False
        trained_N = step.batch.trained.diff()
        masked_N: Tensor = single_N & (trained_N == 0) & (step.batch.rows.diff() > 0)
        return masked_N

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Masked rows first."""
        if step.training:
            return ()
        single_N = self._single(step)
        masked_N = self._masked(step, single_N)
        weight_N = single_N.double() + masked_N.double()

        def note(row: int) -> str:
            return "no trained token" if bool(masked_N[row]) else "alone in its group"

        return step.worst_rows(weight_N, note, KEEP_EXAMPLES)

    def measures(self, tally: EvalTally) -> Mapping[str, Measure]:
        """How many rows, and how many are fully masked."""
        return {
            "rows": Measure(tally.rows, "rows"),
            "masked_rows": Measure(tally.masked_rows, "rows"),
            "rows_masked_by_pr5640": Measure(tally.pr_rows, "rows"),
        }

    def inconclusive_reason(self, run: EvalTally, context: Context) -> Missing | None:
        """Rows of which some may be of an evaluation."""
        return MIXED_SPLITS if context.splits_unknown and not run.eval_rows else None

    def vacuous_reason(self, run: EvalTally, context: Context) -> str | None:
        """No evaluation."""
        return None if run.eval_rows else "no evaluation rows were read"

    def judge(self, run: EvalTally, context: Context) -> Judgement | None:
        """A warning if such rows are fully masked, else information."""
        if not run.rows:
            return None
        evidence = "the masks themselves show it" if run.masked_rows else "no logged value shows it"
        if run.flagged_steps:
            evidence = f"frac_reward_zero_std is logged as 1 in {counted(run.flagged_steps, 'evaluation')}" + (
                "; the masks show the fully masked rows" if run.masked_rows else ""
            )
        proposed = ""
        if run.pr_rows and context.trainer is not None:
            title = context.trainer.title
            proposed = f"; the mask proposed in {title} PR 5640 would remove {run.pr_rows:,} of them"
        return Judgement(
            severity=Severity.WARNING if run.masked_rows else Severity.INFO,
            confirmed=bool(run.masked_rows or run.flagged_steps),
            headline=f"{counted(run.rows, 'eval row')} in groups of one, {run.masked_rows:,} of them fully masked",
            message=(
                f"{run.rows:,} of {counted(run.eval_rows, 'eval row')} are alone in their group, so the reward std is "
                f"0 by construction{proposed}"
            ),
            evidence=evidence,
            advice=(
                "do not mask evaluation rows: they have no gradient, and with the mask their loss and KL are 0"
                if run.masked_rows
                else "no action: the fix zero-std does not touch evaluation rows; ignore frac_reward_zero_std there"
            ),
        )
