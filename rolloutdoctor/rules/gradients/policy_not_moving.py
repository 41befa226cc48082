"""RDG015: updates after which the policy is what it was."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import loss_columns, prompt_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, counted, number, percent, too_few
from rolloutdoctor.rules.measures.recurring_contexts import ADDS, TOKENS, contexts_at, is_bf16, smallest
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

_GATES = ("learning_rate", "grad_norm")
"""Logged quantities without which, where they are logged and not above 0, a step changes no weight."""


class PolicyNotMoving(TableRule):
    """The policy is the same before and after updates that have a gradient.

    ## What it does
    Compares the trainer's log-prob of one token, among the first four of a response, in the same context at two steps
    with updates between them.

    ## Why it matters
    Gradients that are thrown away, an optimizer that was built over other parameters, or updates below the spacing of
    bf16 weights leave the policy where it was, while loss, reward and gradient norm look like training. Upstream, an
    accumulation boundary at every backward pass dropped the gradients of all micro-batches but the last.

    ## How it is measured
    Contexts of recurring prompts are sampled: all records of the 128 contexts with the smallest hashes that end at the
    first token, and as many at the second, third and fourth. The first and the last step of a context are compared if
    at least four steps between them have an *update*: a gradient of the loss by log-probs, recomputed from the rows, so
    that equal rewards and clipped tokens do not count, and a finite learning rate and gradient norm above 0 if these
    are logged, so that a warm-up, also of a critic, does not count. The policy did not move in a pair whose two
    log-probs are the same number to 2^-20. A finding requires 90 % of at least 20 pairs; if the policy moves, one pair
    in a thousand is equal. It is also found from the contexts of two steps with a single update between them
    (`lost_updates`), if such updates before and after it moved the policy by 2^-10 or more in the median. Only tokens
    below probability 0.99 count. If siblings of a step have different log-probs in one context, kernel noise hides a
    small move, and the rule is skipped, as it is if log-probs are stored in bf16. Exposed: a trainer that stores the
    log-probs of a frozen engine as its own looks the same.

    ## What to do
    Compare a weight before and after one optimizer step; look at the parameter groups of the optimizer, the boundary of
    gradient accumulation, and keep float32 master weights.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> same = {"per_row": {"prompt_ids": [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]}}
    >>> same |= {"per_token": {"response_ids": [[1, 2, 3, 4]] * 10}}
    >>> steps = [toy_batch([[1, 0]] * 5, policy=-1.1, step=step, **same) for step in range(6)]
    >>> diagnose(steps, trainer="trl", select=["RDG015"]).findings[0].headline
    'the log-probs of 20 of 20 contexts are the same after 5 updates'
    """

    code = "RDG015"
    name = "policy-not-moving"
    references = ("https://github.com/allenai/open-instruct/pull/1498",)
    reads = ("prompt", "grad_l1")
    adds = ADDS
    splits = ("train",)

    updates: int = 4
    least_pairs: int = 20
    least_shared: int = 4
    share: float = 0.9
    sure: float = -0.01
    moves: float = 2.0**-10
    """Median move by one update, beside which one below 2^-20 is none: updates of a run differ by less than that."""

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the loss and of a context."""
        loss = frozenset() if context.objective is None else loss_columns(context.objective)
        return loss | {"response_ids", "old_log_probs"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns that identify a prompt, and the sampler's log-probs."""
        return prompt_columns(context.columns) | {"rollout_log_probs", "optim_step_id"}

    def metrics(self, context: Context) -> frozenset[str]:
        """The logged learning rate and gradient norm."""
        return frozenset(context.quantities[name][0] for name in _GATES if name in context.quantities)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing says which rows answer one prompt in two steps."""
        if prompt_columns(context.columns):
            return None
        remedy = context.recording.get("prompt_ids", "record prompt_ids or prompt")
        return Missing("nothing says which prompt a row answers", remedy)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """The first tokens of each row."""
        from rolloutdoctor.rules.measures.first_tokens import first_tokens

        return first_tokens(block, TOKENS, ("sampler", "trainer") if block.has("rollout_log_probs") else ("trainer",))

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Hashes of prompt and first tokens, and the log-probs there, to 2^-20; NaN where one is not known."""
        from rolloutdoctor.rules.measures.first_tokens import contexts_of

        return contexts_of(step.token_measures[self.code], step.batch.prompts)

    def measure_step(self, step: "StepView") -> "Mapping[str, float | None]":
        """Tell that something was logged at the step."""
        return {"lines": 1.0} if step.logged else {}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each step, and for each of some tokens of a row whose context may be among those of the run."""
        gradient = pl.col("grad_l1").filter(pl.col("grad_l1").is_finite()).sum() > 0
        steps = rows.group_by(STEP_KEY, maintain_order=True).agg(updated=gradient)
        contexts = contexts_at(rows, pl.col("trainer").is_finite(), pl.col("trainer") < self.sure)
        contexts = contexts.group_by(pl.all(), maintain_order=True).agg(rows=pl.len())
        return pl.concat([steps, contexts], how="diagonal").sort(STEP_KEY, maintain_order=True)

    def thinned(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Follow the contexts of the smallest hashes."""
        frame = pl.concat([lines.filter(pl.col("place").is_null()), smallest(lines)])
        return frame.sort(STEP_KEY, maintain_order=True)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each context at two steps, in the later one, and whether its log-prob is the same (`same`)."""
        names = sorted(self.metrics(context))
        # An overflow or a norm that is not finite makes the optimizer skip the step, which logs it nevertheless.
        gates = [pl.col(name).is_null() | ((pl.col(name) > 0) & pl.col(name).is_finite()) for name in names]
        if names:
            # A step that logs other metrics and none of these had no update, such as one that warms up the critic.
            gates.append(pl.any_horizontal(pl.col(names).is_not_null()) | pl.col("lines").is_null())
        steps = (
            run.rows.select(*STEP_KEY, "updated")
            .drop_nulls("updated")
            .join(run.by_step(*names, "lines"), on=STEP_KEY, how="left")
            .sort("step")
            .with_columns(updated=pl.all_horizontal("updated", *gates))
            .select("step", before=pl.col("updated").cum_sum() - pl.col("updated"))
        )
        records = run.rows.drop_nulls("place").drop("updated", "place")
        pairs = _pairs(records).join(steps.rename({"before": "before_first", "step": "first"}), on="first")
        return (
            pairs.join(steps, on="step")
            .with_columns(
                updates=pl.col("before").cast(pl.Int64) - pl.col("before_first").cast(pl.Int64),
                same=pl.col("one") == pl.col("other"),
                rounded=pl.lit(is_bf16(records["trainer"])),
            )
            .with_columns(lost=self._lost())
            .sort("step", "first", "context")
        )

    def _lost(self) -> pl.Expr:
        """Tell of the pairs of one update whether it is lost: others, before it and after, did move the policy."""
        is_single, interval = pl.col("next") & (pl.col("updates") == 1), ("next", "first", "step")
        same = pl.col("same").mean().over(interval)
        counts = is_single & (pl.len().over(interval) >= self.least_pairs)
        move = (pl.col("one") - pl.col("other")).abs().median().over(interval)
        moved = pl.col("step").filter(counts & (move >= self.moves))
        return counts & (same >= self.share) & pl.col("step").is_between(moved.min(), moved.max(), closed="none")

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of contexts, and how many did not move."""
        counts = ~pl.col("next") & (pl.col("updates") >= self.updates) & (pl.col("wide") == 0)
        at, is_single = pl.col("step"), pl.col("next") & (pl.col("updates") == 1)
        move = (pl.col("one") - pl.col("other")).abs().filter(counts)
        return {
            "same_share": (pl.col("same").filter(counts).mean(), "share"),
            "contexts": (counts.sum(), "contexts"),
            "same_contexts": ((pl.col("same") & counts).sum(), "contexts"),
            "most_updates": (pl.col("updates").filter(counts).max(), "updates"),
            "move_median": (move.median(), "nats"),
            "lost_updates": (at.filter("lost").n_unique().cast(pl.Int64), "updates"),
            "updates_seen": (at.filter(is_single).n_unique().cast(pl.Int64), "updates"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No context came again over updates, or nothing would show a move."""
        if len(run.table) and run.table["copied"].fill_null(value=False).all():
            return Missing(
                "the trainer's log-probs are the sampler's, bit by bit, so they show no weights of the trainer",
                "record old_log_probs as the trainer computes them, beside rollout_log_probs",
            )
        if len(run.table) and run.table["rounded"].all():
            return Missing("the log-probs are stored in bf16, which hides small moves", "store them in float32")
        if context.metrics and not self.metrics(context):
            return Missing(
                "the log has neither a learning rate nor a gradient norm, so that nothing says which steps had an "
                "update",
                "give the whole log of the run",
            )
        of, remedy = f"recur after {self.updates} updates", "widen --steps to where prompts recur"
        if (few := too_few(run.count("contexts"), "context", of, self.least_pairs, remedy)) is not None:
            return few
        shared = run.table.filter(~pl.col("next"), "shared")["wide"] == 0
        if len(shared) >= self.least_shared and shared.sum() >= self.share * len(shared):
            return None
        return Missing(
            "siblings have other log-probs in the same context, or too few have one, so that a move is not told from "
            "the noise of kernels",
            "record groups of several responses; kernels that do not depend on the batch show smaller moves",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning: of a policy that does not move, or that some updates do not move."""
        if run["same_share"] is None or run["same_share"] < self.share:
            return self._of_some(run)
        updates = counted(run.count("most_updates"), "update")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the log-probs of {run.count('same_contexts'):,} of {counted(run.count('contexts'), 'context')} "
            f"are the same after {updates}",
            message=f"the trainer gives the same token in the same context the same log-prob in "
            f"{percent(run['same_share'])} of {counted(run.count('contexts'), 'context')}, although up to {updates} "
            "with a gradient lie between: the weights do not change",
            evidence="old_log_probs of contexts that recur, equal to 2^-20; the gradient is recomputed from the rows",
            advice="compare a weight before and after an optimizer step: gradients that are dropped, an optimizer over "
            "other parameters, or updates that are lost in bf16",
        )

    def _of_some(self, run: Measured) -> Judgement | None:
        """A warning where single updates, between others that moved the policy, did not."""
        lost, updates = run.count("lost_updates"), run.count("updates_seen")
        if not lost:
            return None
        steps = sorted(set(run.table.filter("lost")["first"].to_list()))
        listed = ", ".join(map(str, steps[:KEEP_EXAMPLES])) + (" and others" if len(steps) > KEEP_EXAMPLES else "")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"{lost:,} of {counted(updates, 'update')} left the log-probs of recurring contexts as they were",
            message=f"the updates of step {listed} changed the log-prob of the same token in the same context in less "
            f"than {percent(1 - self.share)} of the contexts, and others moved it by {number(run['move_median'])} nats "
            f"in {self.updates} updates or more",
            evidence="old_log_probs of contexts that recur in neighbouring steps, equal to 2^-20; the gradient is "
            "recomputed from the rows",
            advice="compare a weight before and after the optimizer steps of these: a gradient that is dropped or "
            "overwritten, or log-probs of an engine that gets new weights every few steps",
        )


def _pairs(records: pl.DataFrame) -> pl.DataFrame:
    """Pair the steps of each context: the first with the last, and each with the following one (`next`).

    Args:
        records: ``split, step, context, trainer, sampler``, and how many rows have these.
    """
    trainer = pl.col("trainer")
    at = (
        records.group_by("context", "step")
        .agg(
            pl.first("split"),
            trainer=trainer.min(),
            wide=trainer.max() - trainer.min(),
            shared=pl.sum("rows") > 1,
            copied=(pl.col("sampler") == trainer).all(ignore_nulls=False),
        )
        .sort("context", "step")
    )
    later = [pl.col(name).shift(-1).over("context").alias(f"{name}_later") for name in ("step", "trainer", "wide")]
    both = at.with_columns(*later, shared_later=pl.col("shared").shift(-1).over("context"), next=pl.lit(value=True))
    ends = at.group_by("context", maintain_order=True).agg(
        *(pl.first(name) for name in ("split", "step", "trainer", "wide", "shared")),
        *(pl.last(name).alias(f"{name}_later") for name in ("step", "trainer", "wide", "shared")),
        copied=pl.col("copied").all(ignore_nulls=False),
        next=pl.lit(value=False),
    )
    return (
        pl.concat([both, ends], how="diagonal")
        .filter(pl.col("step") < pl.col("step_later"))
        .select(
            "context", "split", "copied", "next", first="step", step="step_later", one="trainer", other="trainer_later",
            wide=pl.max_horizontal("wide", "wide_later"), shared=pl.col("shared") | pl.col("shared_later"),
        )
    )  # fmt: skip
