"""RDO016: tokens of a negative advantage whose ratio nothing bounds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.objective.parts import is_policy_alone
from rolloutdoctor.objective.required_columns import has_time_axis, loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_sums

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

FAR = 3.0
"""verl's default cap of negative advantages (``clip_ratio_c``)."""


class UnboundedRatio(TableRule):
    """Responses with a negative advantage have tokens of a large ratio, and nothing bounds it.

    ## What it does
    Counts trained tokens of responses with a negative advantage whose importance ratio is above 3, where the objective
    has no cap for them.

    ## Why it matters
    The clipped surrogate is the smaller of `r A` and `clip(r) A`: with a negative advantage that is `r A` however large
    `r` is. One token that the policy now finds e^5 times as likely as before weighs as much as 148 others. With rows of
    older weights, or ratios against the sampler's log-probs, such tokens come up without any fault.

    ## How it is measured
    The ratio is that of the loss, token by token. `grad_share` is these tokens' share of the L1 norm of the gradient by
    log-probs, exact if the loss is the policy term alone and nothing else weights it, and otherwise left out.
    `tokens_share` is their share of the trained tokens of responses with a negative advantage. Information: many
    trainers have no cap, and most runs need none. It is reported if these tokens carry 1 % of the gradient or more; if
    that share is not known, if they are at least ten and one in a thousand. If every ratio is 1, nothing can be seen.

    ## What to do
    Set the cap (TRL `delta`, verl `clip_ratio_c`), correct for the sampler with bounded weights, or drop rows of
    weights that are too old.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> old = [[-1.0] * 4, [-1.0, -1.0, -1.0, -5.0]]
    >>> diagnose_one("RDO016", toy_batch([[1, 0]], old=old), trainer="trl", beta=0.0)
    'RDO016 info confirmed: ratio_max 54.6'
    """

    code = "RDO016"
    name = "unbounded-ratio"
    references = (
        "https://github.com/huggingface/trl/pull/7120",
        "https://github.com/huggingface/trl/pull/3434",
    )
    reads = ("advantage", "logged_advantage", "policy_weight", "grad_l1", "trained_tokens")
    adds = ("far", "far_ratio", "largest", "moved")
    splits = ("train",)
    optional = ("grad_share",)

    least: float = 0.01
    least_tokens: float = 0.001
    fewest: int = 10

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the loss."""
        return loss_columns(context.objective) if context.objective is not None else frozenset()

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the logged advantages."""
        return frozenset({"advantage"})

    def inapplicable_reason(self, context: Context) -> str | None:
        """The ratio is bounded, or is not one of tokens that are clipped."""
        objective = context.objective
        if objective is None:
            return None
        surrogate, around = objective.surrogate, objective.policy_correction
        if not surrogate.clips_by_sign:
            return "the policy loss has no clipped ratio of tokens"
        if surrogate.cap is not None:
            return f"the ratio of a negative advantage is capped at {surrogate.cap:g}"
        return "tokens with a large ratio are rejected" if around is not None and around.rejects else None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """The estimator has one advantage a token."""
        if context.objective is None or not has_time_axis(context.objective):
            return None
        return Missing(
            "the estimator has one advantage a token, and this rule takes those of rows",
            "look at the ratios in the trainer",
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Look at the ratios of each row, against old log-probs and against the sampler's."""
        from rolloutdoctor.rules.measures.far_ratios import far_ratios

        measures = dict[str, "Tensor"]()
        for old in ("old_log_probs", "rollout_log_probs"):
            if block.has("policy_log_probs", old):
                measures |= {f"{old}/{name}": x_n for name, x_n in far_ratios(block, old, FAR).items()}
        return measures

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return those against the log-probs that the loss compares with."""
        old = "old_log_probs" if step.evaluation is None else step.evaluation.objective.surrogate.old
        measured = step.token_measures[self.code]
        return {name: measured.get(f"{old}/{name}") for name in self.adds}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each response of a negative advantage with tokens above 3: these, and what they carry."""
        advantage, gradient = pl.coalesce("advantage", "logged_advantage"), pl.col("grad_l1")
        is_plain = context.objective is not None and is_policy_alone(context.objective)
        carried = pl.col("policy_weight") * -advantage * pl.col("far_ratio") if is_plain else pl.lit(None, pl.Float64)
        columns = {name: pl.col(name) for name in ("far", "largest", "trained_tokens")} | {"far_l1": carried}
        lines = rows.with_columns(
            **{name: pl.when(advantage < 0).then(x) for name, x in columns.items()},
            grad_l1=pl.when(gradient.is_finite()).then(gradient),
        )
        return with_sums(lines, pl.col("far") > 0, "far_l1", "trained_tokens", "grad_l1", "moved")

    def quantities(self) -> Mapping[str, Quantity]:
        """Count tokens."""
        carried = pl.col("far_l1")
        return {
            "ratio_max": (pl.col("largest").filter(pl.col("far") > 0).max().exp(), "1"),
            "tokens": (pl.sum("far").cast(pl.Int64), "tokens"),
            "tokens_share": (pl.sum("far") / pl.sum("trained_tokens"), "share"),
            "rows": ((pl.col("far") > 0).sum(), "rows"),
            "grad_share": (pl.when(carried.count() > 0).then(carried.sum() / pl.sum("grad_l1")), "share"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Responses with the largest ratio."""
        return table.with_columns(value=pl.when(pl.col("far") > 0).then(pl.col("largest").exp()))

    def note(self, place: Mapping[str, Any]) -> str:
        """How many tokens, and the largest ratio."""
        return f"{counted(place['far'], 'token')} above {FAR:g}, the largest {number(place['value'])}"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Every ratio is 1."""
        return None if (run.table["moved"] > 0).any() else "every ratio is 1: one update a batch"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information."""
        share, often, count = run["grad_share"], run["tokens_share"] or 0.0, run.count("tokens")
        is_seldom = count < self.fewest or often < self.least_tokens
        if not count or (is_seldom if share is None else share < self.least):
            return None
        tokens, largest = counted(count, "token"), number(run["ratio_max"])
        carried = "" if share is None else f" and {percent(share)} of the gradient"
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"{tokens} of responses with a negative advantage have a ratio above {FAR:g}, up to "
            f"{largest}{carried}",
            message=f"nothing bounds the ratio of a negative advantage: {tokens} of "
            f"{counted(run.count('rows'), 'response')} have one above {FAR:g}, up to {largest}{carried}",
            evidence="the log-probs at the loss and those that it compares them with; the objective has no cap",
            advice="cap the ratio of negative advantages (dual clip), or bound the age of rows",
        )
