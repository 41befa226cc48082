"""RDA014: rewards that contradict the stated answer and the reference answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.answers import EQUAL, OTHER
from rolloutdoctor.data.schema import STATED_ANSWER, TRUNCATED
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.ops.bounds import share_bound
from rolloutdoctor.results.findings import Excluded, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, excluded_share, number, percent
from rolloutdoctor.rules.measures.scored_answers import by_score, of_two_scores
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class RewardContradictsAnswer(TableRule):
    """The stated answer equals the reference answer and is not rewarded, or is another number and is.

    ## What it does
    Takes the answer that a response states (a LaTeX box, `####`, `<answer>` tags, a line `Answer:`; the last of them),
    compares it with `ground_truth`, and counts the rewards that say otherwise.

    ## Why it matters
    A verifier that cannot find a right answer teaches the policy that it was wrong, and no curve shows it. verl's GSM8K
    score looks at the last 300 characters alone, so that an answer with more text after it is scored 0.

    ## How it is measured
    Answers are equal if their texts are, apart from dollar signs, spacing and thousands separators, or if their numbers
    are. They are different only if both are plain numbers more than 1 % apart and not a percentage of each other;
    anything else (intervals, formulas, lists) is not compared. The reward function takes two values in the run, the
    lower for wrong; of several such functions, the one that contradicts least is used. `equal_unrewarded` are right
    answers with the lower value. `unexplained` are those of them that are stated in a way in which others are rewarded
    (the same marks, `</think>` alike, cut off alike), or all of them if no right answer is ever rewarded: the verifier
    may insist on a format that the others lack.

    `unstated_rewarded` are the rewarded responses among those that state no answer in one of these ways (`unstated`):
    information, since a verifier may take the last number of a text.

    It is a warning if more than 5 % of the right answers are unexplained, or more than 5 % of the other answers
    rewarded, at 99.9 % confidence; information for three contradictions or more. Exposed: a tolerance, or a rule of the
    verifier that the response does not show, looks the same.

    ## What to do
    Run the reward function on the responses listed, and look at how it finds the answer.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> texts = {"response": range(1, 21), "ground_truth": range(1, 21)}
    >>> batch = toy_batch([[1, 0]] * 10, per_row={**texts, "stated_answer": [5] * 20})
    >>> diagnose_one("RDA014", batch, trainer=None)
    'RDA014 warning exposed: equal_unrewarded 10'
    """

    code = "RDA014"
    name = "reward-contradicts-answer"
    references = (
        "https://github.com/volcengine/verl/issues/5635",
        "https://github.com/volcengine/verl/pull/7274",
        "https://github.com/volcengine/verl/pull/7440",
    )
    reads = ("reward", "rewards")
    adds = ("answer",)
    needs_objective = False
    needs = ("response", "ground_truth", "reward")
    uses = ("rewards", "status")

    share_from: float = 0.05
    fewest: int = 3
    limit: float = 0.1

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """How stated and reference answer compare, as the texts were read."""
        return {"answer": step.batch.per_row.get(STATED_ANSWER)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return how often each reward comes with each relation and form of an answer, and such responses."""
        answer, is_cut = pl.col("answer").cast(pl.Int64), pl.col("status").str.to_lowercase().is_in(TRUNCATED)
        form = answer // 4 % 16 + 16 * is_cut.fill_null(value=False)
        return by_score(rows.drop_nulls("answer"), context, relation=answer % 4, form=form)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Choose the function that contradicts least; `equal` is null of answers that were not compared."""
        relation, equal, rows = pl.col("relation"), pl.col("equal"), pl.col("rows")
        refused, paid, ever = pl.col("refused"), pl.col("paid"), (equal & pl.col("paid")).any()
        lines = (
            of_two_scores(run.rows)
            .with_columns(equal=pl.when(relation.is_in([EQUAL, OTHER])).then(relation == EQUAL))
            .with_columns(contradicts=(equal & refused) | (~equal & paid))
        )
        share = rows.filter("contradicts").sum() / rows.filter(equal.is_not_null()).sum()
        checked = lines.filter(equal.is_not_null()).with_columns(share=share.over("function"))
        chosen = checked.sort("share", maintain_order=True)["function"].head(1)
        of_chosen = lines.filter(pl.col("function").is_in(chosen.implode()))
        return of_chosen.with_columns(unexplained=equal & refused & (ever.over("form") | ~ever))

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the numbers of contradictions."""
        equal, rows = pl.col("equal"), pl.col("rows")
        return {
            "equal_unrewarded": (rows.filter(equal, "refused").sum(), "rows"),
            "unexplained": (rows.filter("unexplained").sum(), "rows"),
            "equal": (rows.filter(equal).sum(), "rows"),
            "other_rewarded": (rows.filter(~equal, "paid").sum(), "rows"),
            "other": (rows.filter(~equal).sum(), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The responses, those that no format explains first."""
        is_first = pl.col("unexplained") | ~pl.col("equal")
        return table.filter("contradicts").with_columns(value=pl.col("value") + is_first)

    def note(self, place: Mapping[str, Any]) -> str:
        """What contradicts what."""
        stated = "the reference answer" if place["equal"] else "another number"
        return f"states {stated}, and {place['function']} is {number(place['scored'])}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Nothing to compare."""
        if run.count("equal") + run.count("other"):
            return None
        return Missing(
            "no response with a reward of two values states an answer that can be compared with its ground_truth",
            "record a reward function of right and wrong, and reference answers of one value",
        )

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the share of contradictions."""
        contradicting = run.count("equal_unrewarded") + run.count("other_rewarded")
        compared = run.count("equal") + run.count("other")
        effect = "a share of rewards that contradict the stated answer"
        return excluded_share(self.code, effect, contradicting, compared, limit=self.limit, of="answers")

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where a share of the answers contradicts, information where some do."""
        equal, other = run.count("equal"), run.count("other")
        refused, unexplained, paid = (run.count(name) for name in ("equal_unrewarded", "unexplained", "other_rewarded"))
        function = run.table["function"][0]
        bare = run.table.filter(pl.col("form") % 8 == 0)
        unstated, unstated_paid = (
            int(frame["rows"].sum()) for frame in (bare, bare.filter("paid", pl.col("scored") > 0))
        )
        if refused + paid < self.fewest and (unstated_paid < self.fewest or equal < self.fewest):
            return None
        is_refused = unexplained >= self.fewest and share_bound(unexplained, equal)[0] > self.share_from
        is_paid = paid >= self.fewest and share_bound(paid, other)[0] > self.share_from
        words = f"{counted(unstated_paid, 'response')} of {unstated:,} that state no answer in a known way are rewarded"
        kinds = (refused, equal, "the reference answer are not"), (paid, other, "another number are")
        clauses = [
            f"{counted(some, 'response')} of {of:,} that state {outcome} rewarded"
            for some, of, outcome in kinds
            if some
        ]
        clauses = clauses if refused + paid >= self.fewest else [words]
        never = refused == equal and equal > 0
        explained = refused - unexplained
        return Judgement(
            severity=Severity.WARNING if is_refused or is_paid else Severity.INFO,
            confirmed=False,
            headline=" and ".join(clauses),
            message=f"{function} contradicts {percent((refused + paid) / (equal + other))} of the answers"
            + ("; no right answer is ever rewarded" if never else "")
            + (f"; {counted(explained, 'right answer')} stated in a way that is never rewarded" if explained else "")
            + (f"; {words}" if unstated_paid else ""),
            evidence="texts of response and ground_truth; a demand of the verifier that the text does not show, or a "
            "tolerance, looks the same",
            advice=f"run {function} on the responses listed, and look at how it finds the answer"
            if is_refused or is_paid
            else "keep it if the reward asks for a format",
            measures={"unstated": Measure(unstated, "rows"), "unstated_rewarded": Measure(unstated_paid, "rows")},
        )
