"""RDM002: evaluation rows that are alone in their group."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import MIXED_SPLITS, Context, Judgement, Missing, counted
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places
from rolloutdoctor.search.hypotheses.fixes import choose

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

_FLAGGED = "frac_reward_zero_std"

_PROPOSED = "zero-std:pr5640"
"""The fix that masks the completions of flagged rows."""


class EvalGroupOfOne(TableRule):
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
    `rows_masked_by_pr5640` those that TRL's own flag marks. Confirmed: masks or the logged fraction show it.

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
    reads = ("tokens", "trained_tokens")
    adds = ("flagged",)
    splits = ("eval",)
    needs_objective = False
    needs = ("group_id",)
    uses = ("response_mask", "reward")

    def metrics(self, context: Context) -> frozenset[str]:
        """Return TRL's metrics of the reward's standard deviation."""
        return frozenset({_FLAGGED})

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Rows that the proposed mask would take out."""
        objective = None if step.evaluation is None else step.evaluation.objective
        if objective is None or not choose(_PROPOSED).applies_to(objective) or not step.batch.has("reward"):
            return {"flagged": None}
        return {"flagged": step.flagged_rows(objective.advantage.scale)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the numbers of evaluation rows of each step, and single rows, masked ones first."""
        single, flagged = pl.len().over(*STEP_KEY, "group") == 1, pl.col("flagged").cast(pl.Boolean)
        masked = single & (pl.col("trained_tokens") == 0) & (pl.col("tokens") > 0)
        lines = rows.with_columns(single=single, masked=masked.fill_null(value=False), proposed=single & flagged)
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(pl.sum("single", "masked", "proposed"), rows=pl.len())
        places = lines.filter("single").select(*NAMES, value=1.0 + pl.col("masked"))
        return with_places(sums, places, context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Add which steps are flagged: all rows are single and the log says so."""
        rows = run.rows.join(run.by_step(_FLAGGED), on=STEP_KEY, how="left", maintain_order="left")
        return rows.with_columns(is_flagged=(pl.col("single") == pl.col("rows")) & (pl.col(_FLAGGED) == 1))

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of rows, and of those that are fully masked."""
        return {
            "rows": (pl.sum("single"), "rows"),
            "masked_rows": (pl.sum("masked"), "rows"),
            "rows_masked_by_pr5640": (pl.sum("proposed"), "rows"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the kind of row."""
        return "no trained token" if place["value"] > 1 else "alone in its group"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Rows of which some may be of an evaluation."""
        return MIXED_SPLITS if context.splits_unknown and not len(run.table) else None

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No evaluation."""
        return None if len(run.table) else "no evaluation rows were read"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning if such rows are fully masked, else information."""
        rows, masked, proposed_rows = (run.count(name) for name in run.values)
        every = counted(int(run.table["rows"].sum()), "eval row")
        if not rows:
            return None
        flagged = int(run.table["is_flagged"].sum())
        evidence = "the recorded masks" if masked else "no logged value shows the effect"
        if flagged:
            evidence = f"frac_reward_zero_std is logged as 1 in {counted(flagged, 'evaluation')}" + (
                "; the masks show the fully masked rows" if masked else ""
            )
        proposed = ""
        if proposed_rows and context.trainer is not None:
            title = context.trainer.title
            proposed = f"; the mask proposed in {title} PR 5640 would remove {proposed_rows:,} of them"
        return Judgement(
            severity=Severity.WARNING if masked else Severity.INFO,
            confirmed=bool(masked or flagged),
            headline=f"{counted(rows, 'eval row')} are alone in their group, {masked:,} of them fully masked"
            + (f"; masking by std as in PR 5640 would blank {proposed_rows:,}" if proposed_rows > masked else ""),
            message=(
                f"{rows:,} of {every} are alone in their group, so their reward std is 0 by construction{proposed}"
            ),
            evidence=evidence,
            advice=(
                "do not mask evaluation rows: they have no gradient anyway, and masking sets their loss and KL "
                "metrics to 0"
                if masked
                else "ignore frac_reward_zero_std of evaluation rows; the fix zero-std does not touch them"
            ),
        )
