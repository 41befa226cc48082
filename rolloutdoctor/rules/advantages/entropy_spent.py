"""RDA017: entropy that fell while likely tokens were reinforced."""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import advantage_columns, optional_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


class EntropySpent(TableRule):
    """The entropy fell while the advantages reinforced tokens that were likely already.

    ## What it does
    Gives the covariance of log-prob and advantage over the trained tokens of each step, and compares its sign with the
    change of the entropy.

    ## Why it matters
    To first order a natural policy-gradient step changes the entropy by minus the covariance of an action's log-prob
    and its advantage, times the learning rate (a plain one weighs the advantage by the probability). Where it stays
    positive, reward is bought with entropy, and the gain ends where the entropy does. The covariance shows it before
    the entropy is gone, and which responses spend it.

    ## How it is measured
    `covariance` is the mean over the steps, in nats times advantage; `positive_share` is the share of steps in which it
    is above 0. Entropies are those recorded for the tokens, or else minus the mean log-prob; `entropy_first` and
    `entropy_last` are medians over the first and the last tenth of the steps, at least three. `change_correlation`
    correlates minus the covariance with the change of the entropy to the next step. It is information, if the entropy
    fell by three tenths or more and the covariance is positive in more of at least ten steps than three standard errors
    of a fair coin allow. Most runs that learn spend entropy: the rule says where it goes, not that this is wrong.

    ## What to do
    If the entropy is needed longer, raise the clip range for positive advantages, clip or penalize the tokens of the
    largest covariance (Clip-Cov, KL-Cov), or lower the learning rate.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> old = [[[0.08 * step - 1.4] * 4, [0.08 * step - 1.6] * 4] for step in range(12)]
    >>> steps = [toy_batch([[1, 0]], old=old[step], policy=old[step], step=step) for step in range(12)]
    >>> diagnose(steps, trainer="trl", select=["RDA017"]).findings[0].headline
    'the entropy fell from 1.42 to 0.7 nats; 100 % of 12 steps reinforced tokens that were likely already'
    """

    code = "RDA017"
    name = "entropy-spent"
    rests_on = ("advantages",)
    references = (
        "https://arxiv.org/abs/2505.22617",
        "https://github.com/volcengine/verl/issues/5953",
        "https://github.com/volcengine/verl/pull/1830",
    )
    reads = ("advantage", "logged_advantage", "trained_tokens")
    adds = ("log_prob", "entropy")
    splits = ("train",)

    fewest: int = 10
    fall: float = 0.3
    errors: float = 3.0

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the advantages, the log-probs and the mask."""
        if context.objective is None:
            return frozenset()
        return advantage_columns(context.objective) | {"old_log_probs", "response_mask"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Entropies, the logged advantage, and the layout of a step."""
        return (
            frozenset() if context.objective is None else optional_columns(context.objective) | {"entropy", "advantage"}
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Add up log-probs and entropies of trained tokens."""
        import torch

        names = {"log_prob": "old_log_probs"} | ({"entropy": "entropy"} if block.is_logged("entropy") else {})
        sums = {
            name: block.row_sum(block.of_trained(block.column(column)))
            for name, column in names.items()
            if block.has(column)
        }
        return {name: sums.get(name, torch.full_like(block.trained_n, torch.nan)) for name in self.adds}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each step, and for each of its responses with an advantage its share of the covariance."""
        tokens, log_prob = pl.col("trained_tokens").cast(pl.Float64), pl.col("log_prob")
        advantage = pl.coalesce("advantage", "logged_advantage")
        total, step = tokens.sum().over(STEP_KEY), list(STEP_KEY)
        lines = (
            rows.filter(tokens > 0, advantage.is_finite(), log_prob.is_finite())
            .with_columns(
                mean=log_prob.sum().over(step) / total,
                mean_advantage=(advantage * tokens).sum().over(step) / total,
                spread=pl.col("entropy").sum().over(step) / total,
            )
            .with_columns(
                value=(advantage - pl.col("mean_advantage")) * (log_prob - tokens * pl.col("mean")) / total,
                level=pl.when(pl.col("spread").is_finite()).then("spread").otherwise(-pl.col("mean")),
            )
        )
        steps = lines.group_by(step, maintain_order=True).agg(
            covariance=pl.sum("value"), level=pl.first("level"), varies=(pl.col("value") != 0).any()
        )
        return with_places(steps, lines.select(*NAMES, "value"), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The steps with the change of their entropy to the next one, and the responses."""
        change, is_step = pl.col("level").shift(-1) - pl.col("level"), pl.col("row").is_null()
        steps = run.rows.filter(is_step).with_columns(change=change, is_step=pl.lit(value=True))
        return pl.concat([steps, run.rows.filter(~is_step)], how="diagonal")

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the covariance and the entropy."""
        is_step = pl.col("is_step").fill_null(value=False)
        covariance, level, change = (pl.col(name).filter(is_step) for name in ("covariance", "level", "change"))
        count = pl.max_horizontal(3, is_step.sum() // 10)
        return {
            "covariance": (covariance.mean(), "nats"),
            "positive_share": ((covariance > 0).mean(), "share"),
            "entropy_first": (level.head(count).median(), "nats"),
            "entropy_last": (level.tail(count).median(), "nats"),
            "change_correlation": (pl.corr(-covariance, change), "1"),
            "steps": (is_step.sum(), "steps"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The responses that add most to the covariance."""
        return table.filter(pl.col("is_step").is_null())

    def note(self, place: Mapping[str, Any]) -> str:
        """What it adds."""
        return f"adds {number(place['value'])} to the covariance of its step"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps."""
        if run.count("steps") >= self.fewest:
            return None
        return Missing(
            f"needs {self.fewest} steps with one advantage a response; found {run.count('steps')}", "widen --steps"
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No advantage."""
        return None if run.table["varies"].any() else "no step has advantages and log-probs that vary"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information."""
        steps, first, last = run.count("steps"), run["entropy_first"] or 0.0, run["entropy_last"] or 0.0
        share = run["positive_share"] or 0.0
        if steps < self.fewest or last > (1 - self.fall) * first or (2 * share - 1) * sqrt(steps) < self.errors:
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"the entropy fell from {number(first)} to {number(last)} nats; {percent(share)} of "
            f"{counted(steps, 'step')} reinforced tokens that were likely already",
            message=f"the covariance of log-prob and advantage is {number(run['covariance'])} nats on average; minus "
            f"it and the change of entropy to the next step have a correlation of {number(run['change_correlation'])}",
            evidence="log-probs and advantages of the trained tokens; to first order a natural policy-gradient step "
            "changes the entropy by minus their covariance",
            advice="raise the clip range for positive advantages, or clip or penalize the tokens of the largest "
            "covariance, unless the reward is high enough",
        )
