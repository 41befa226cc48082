"""RDI021: rows of a trajectory whose context does not begin with what was said before."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.schema import CONTEXT
from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.ops.context_kinds import CONTINUED, FIRST, NEW, REWRITTEN
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

TRAJECTORY = (*STEP_KEY, "trajectory_id")


class PrefixBroken(TableRule):
    """Rows of a trajectory do not begin with the tokens of an earlier one: their context was rewritten.

    ## What it does
    Where a trajectory gives several rows (`trajectory_id`), compares the token ids of each, prompt and response, with
    those of every row before it in the trajectory.

    ## Why it matters
    An agent's context is rewritten where thinking is stripped from it, where it is compacted, where text is tokenized
    again, and where a sub-agent begins. What the policy wrote is then trained in one row, and read in another form, or
    not at all, in the next. Such rows cannot be merged into one sequence, a cache of prefixes does not serve them, and
    each trains only a part of the trajectory.

    ## How it is measured
    A row is `continued` if it begins with the prompt and response of an earlier one; with the same prompt alone it is a
    retry, and no break. It is `rewritten` if its prompt begins with the prompt of an earlier row and goes on with other
    tokens than that row's response; `kept_share` is how much of that response it keeps from the start: near 0 if
    something was put in its place, near 1 if a late token differs, as after tokenizing the text again. It begins a
    `new` context if its prompt begins with no earlier prompt: a sub-agent, or a context that was compacted or cut.
    `broken_share` is the share of the trained tokens of such trajectories that are in rewritten and new rows. Hashes of
    64 bits are compared. This is a property of the agent, and so information.

    ## What to do
    Keep it if contexts are managed on purpose, and train each piece in its own row. If not, pass the ids that the
    engine returned on to the next turn, in place of the text.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> per_row = {"trajectory_id": [0, 0], "prompt_ids": [1, 2], "context": [0, 3]}
    >>> per_row |= {"context_kept": [0, 1], "context_of": [0, 4]}
    >>> batch = toy_batch([[1, 1]], per_row=per_row, per_token={"response_ids": 5})
    >>> diagnose_one("RDI021", batch, trainer=None)
    'RDI021 info confirmed: broken_share 0.5'
    """

    code = "RDI021"
    name = "prefix-broken"
    references = (
        "https://github.com/verl-project/verl/issues/5375",
        "https://github.com/rllm-org/rllm/issues/734",
        "https://github.com/NovaSky-AI/SkyRL/issues/1277",
    )
    reads = ("trajectory_id", "trained_tokens")
    adds = CONTEXT
    needs_objective = False
    splits = ("train",)
    needs = ("trajectory_id", "prompt_ids", "response_ids", "response_mask")
    optional = ("kept_share",)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """What each row is to those before it, as it was read."""
        return {name: step.batch.per_row.get(name) for name in self.adds}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return sums over the rows of trajectories of several, and the rows that train most in another context."""
        kind, trained = pl.col(CONTEXT[0]), pl.col("trained_tokens")
        rows = rows.filter(pl.col("trajectory_id") >= 0, pl.len().over(TRAJECTORY) > 1)
        is_compared, rewritten, broken = kind >= FIRST, kind == REWRITTEN, (kind == REWRITTEN) | (kind == NEW)
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(
            several=pl.len(),
            compared=is_compared.sum(),
            trained=trained.filter(is_compared).sum(),
            trained_broken=trained.filter(broken).sum(),
            rewritten=rewritten.sum(),
            new=(kind == NEW).sum(),
            continued=(kind == CONTINUED).sum(),
            kept=pl.col(CONTEXT[1]).filter(rewritten).sum(),
            of=pl.col(CONTEXT[2]).filter(rewritten).sum(),
            trajectories=pl.col("trajectory_id").filter(broken).n_unique(),
        )
        places = rows.filter(broken).select(*NAMES, *CONTEXT, value=trained.cast(pl.Float64))
        return with_places(sums, places, context)

    def quantities(self) -> Mapping[str, Quantity]:
        """Trained tokens in such rows, and what became of the contexts."""
        kept, of = pl.sum("kept"), pl.sum("of")
        return {
            "broken_share": (pl.sum("trained_broken") / pl.sum("trained"), "share"),
            "broken_rows": (pl.sum("rewritten") + pl.sum("new"), "rows"),
            "rewritten_rows": (pl.sum("rewritten"), "rows"),
            "new_rows": (pl.sum("new"), "rows"),
            "continued_rows": (pl.sum("continued"), "rows"),
            "kept_share": (pl.when(of > 0).then(kept / of), "share"),
            "trajectories": (pl.sum("trajectories"), "trajectories"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """What became of the context."""
        if place[CONTEXT[0]] == NEW:
            return "its prompt begins with that of no earlier row of the trajectory"
        kept, of = (int(place[name]) for name in CONTEXT[1:])
        return f"goes on from an earlier prompt with the first {kept:,} of {counted(of, 'token')} that the policy wrote"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Rows that were not read together, or whose ids are not known."""
        several, compared = run.table.select(pl.sum("several", "compared")).row(0)
        if compared or not several:
            return None
        return Missing("the rows of no trajectory were read together", "write rows of a trajectory one after another")

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """One row for each trajectory."""
        return None if run.table["compared"].sum() else "every trajectory has one row"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information: whether it is meant, the agent's design says."""
        rows, rewritten, new = (run.count(f"{name}_rows") for name in ("broken", "rewritten", "new"))
        if not rows:
            return None
        parts = []
        if rewritten:
            parts.append(
                f"{counted(rewritten, 'row')} go on from an earlier prompt with other tokens than the policy wrote"
                + (f" (the first {percent(run['kept_share'])} are the same)" if run["kept_share"] is not None else "")
            )
        if new:
            parts.append(f"{counted(new, 'row')} begin a new context, as a sub-agent or a compacted one does")
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=(
                f"{percent(run['broken_share'])} of what trajectories of several rows train stands in rows whose "
                "context does not begin with an earlier one"
            ),
            message=f"of {counted(int(run.table['compared'].sum()), 'row')}, " + ", and ".join(parts),
            evidence="the token ids of the rows of each trajectory",
            advice=("keep it if contexts are managed on purpose; else pass on the ids of the engine, not the text"),
        )
