"""RDA016: rewards of responses in which only a tool's text has the answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.answers import IN_MODEL, IN_TOOL, NOWHERE
from rolloutdoctor.data.schema import STATED_ANSWER
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.ops.bounds import share_bound
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, excluded_share, percent
from rolloutdoctor.rules.measures.scored_answers import by_score, of_two_scores
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class RewardFromToolText(TableRule):
    """Responses are rewarded for an answer that only a tool wrote.

    ## What it does
    Finds responses of several turns in which the reference answer occurs in what tools or users wrote, and not in what
    the model wrote, and counts those that are rewarded.

    ## Why it matters
    A reward function that is given the whole response reads what tools returned as if the model had said it. verl's
    naive, dapo and batch reward managers decode all tokens of the attention mask, observations included. The policy
    then learns to call the tool, and never to answer.

    ## How it is measured
    Turns of others are messages of a role other than the assistant's, `<tool_response>`, `<information>` and
    `<observation>` tags, and turns in the formats of ChatML and Llama. The reference answer (`ground_truth`, of four
    letters or digits or more) counts as absent from the model's text if not one of its words occurs there, so that a
    paraphrase does not count. The reward function takes two values; of several such functions, the one that best
    distinguishes responses with the answer from those without is used. It is a warning if more than 10 % of such
    responses are rewarded, at 99.9 % confidence, and more than of the responses in which the answer occurs nowhere;
    information for three or more. It is also information if no response is rewarded for an answer that the model wrote:
    then the reward is the verdict of the environment. Exposed: an answer in another language, or in digits instead of
    words, looks the same.

    ## What to do
    Score the tokens of the response mask alone, or the last message of the model.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> texts = {"response": range(1, 41), "ground_truth": range(1, 41)}
    >>> batch = toy_batch([[1, 0]] * 20, per_row={**texts, "stated_answer": [64, 192] + [128, 192] * 19})
    >>> diagnose_one("RDA016", batch, trainer=None)
    'RDA016 warning exposed: tool_only_rewarded 19'
    """

    code = "RDA016"
    name = "reward-from-tool-text"
    references = ("https://github.com/volcengine/verl/pull/6392",)
    reads = ("reward", "rewards")
    adds = ("answer",)
    needs_objective = False
    needs = ("response", "ground_truth", "reward")
    uses = ("rewards",)

    share_from: float = 0.1
    fewest: int = 3

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Where the reference answer stands, as the texts were read."""
        return {"answer": step.batch.per_row.get(STATED_ANSWER)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return how often each reward comes with a reference answer at each place, and such responses."""
        return by_score(rows, context, place=pl.col("answer").cast(pl.Int64) // 64)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Look at responses of several turns, and at the function that pays most for what the model wrote."""
        lines = of_two_scores(run.rows).filter(pl.col("place") > 0)
        gap = (_paid_at(IN_MODEL).fill_nan(0) - _paid_at(NOWHERE).fill_nan(0)).over("function")
        chosen = lines.with_columns(told=gap).sort("told", descending=True, maintain_order=True)["function"].head(1)
        return lines.filter(pl.col("function").is_in(chosen.implode()))

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of responses by where the answer stands, and of those rewarded."""
        rows, in_tool = pl.col("rows"), pl.col("place") == IN_TOOL
        return {
            "tool_only_rewarded": (rows.filter(in_tool, "paid").sum(), "rows"),
            "tool_only": (rows.filter(in_tool).sum(), "rows"),
            "tool_only_rewarded_share": (_paid_at(IN_TOOL), "share"),
            "nowhere_rewarded_share": (_paid_at(NOWHERE), "share"),
            "in_model_rewarded_share": (_paid_at(IN_MODEL), "share"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The rewarded responses."""
        return table.filter("paid", pl.col("place") == IN_TOOL)

    def note(self, place: Mapping[str, Any]) -> str:
        """What is to be seen."""
        return f"the reference answer is only in what a tool wrote, and {place['function']} is {place['scored']:g}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Nothing to look at."""
        if run["tool_only"]:
            return None
        return Missing(
            "no response with a reward of two values has its reference answer in a tool's text alone",
            "record responses of several turns as messages, and reference answers of four letters or digits or more",
        )

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the share of such responses that are rewarded."""
        paid, cases = run.count("tool_only_rewarded"), run.count("tool_only")
        return excluded_share(
            self.code,
            "a rewarded share of the responses with the answer in a tool's text alone",
            paid,
            cases,
            limit=self.share_from,
            of="such responses",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where a share of them is rewarded."""
        paid, cases = run.count("tool_only_rewarded"), run.count("tool_only")
        if paid < self.fewest:
            return None
        low, nowhere = share_bound(paid, cases)[0], run["nowhere_rewarded_share"]
        is_for_answers = bool(run["in_model_rewarded_share"])
        return Judgement(
            severity=Severity.WARNING
            if is_for_answers and low > max(self.share_from, nowhere or 0.0)
            else Severity.INFO,
            confirmed=False,
            headline=f"{counted(paid, 'response')} of {cases:,} with the answer in a tool's text alone are rewarded",
            message=f"{run.table['function'][0]} is the higher one in {percent(paid / cases)} of them, in "
            f"{percent(run['in_model_rewarded_share'])} of those in which the model wrote the answer, and in "
            f"{percent(nowhere)} of those without it",
            evidence="texts of response and ground_truth; the same answer without a common word looks the same",
            advice="score the tokens of the response mask alone, or the last message of the model",
        )


def _paid_at(place: int) -> pl.Expr:
    """The share of the responses with the answer at a place that are rewarded."""
    rows = pl.col("rows").filter(pl.col("place") == place)
    return (pl.col("rows") * pl.col("paid")).filter(pl.col("place") == place).sum() / rows.sum()
