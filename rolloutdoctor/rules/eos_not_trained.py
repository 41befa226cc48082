"""RDI007: the token that ends a response is masked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.ops.tally import Sums, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class EndTally(Sums):
    """What `eos-not-trained` adds up over training steps.

    Attributes:
        stopped: stopped rows with a trained token.
        known: those of steps whose end-of-sequence token is known.
        masked: of these, rows that hold it behind their last trained token, which is another.
        gradient: sum of the absolute gradient of the rows in `known`.
        lost: what the masked tokens would add to it, at the mean of their row.
    """

    stopped: int = 0
    known: int = 0
    masked: int = 0
    gradient: float = 0.0
    lost: float = 0.0


@dataclass(frozen=True)
class EosNotTrained(Rule[EndTally]):
    """The end-of-sequence token is masked: the model is never taught to stop.

    ## What it does
    Looks for stopped responses whose last token is the end-of-sequence token, with a mask of 0, behind a last trained
    token that is another one.

    ## Why it matters
    The decision to stop is a token like any other. Without it in the loss no reward reaches it, and the length of
    responses drifts until they are cut off. A mask made of "token is not padding" does this where the tokenizer pads
    with its end-of-sequence token.

    ## How it is measured
    Rows with a `status` of stop (eos, completed, finished) and a trained token are looked at. The end-of-sequence token
    is the one id that ends at least 90 % of the stopped responses of a step, eight or more; where none does, as with
    stop strings, nothing can be said. Trajectories that end with the output of a tool carry the token twice, and the
    last trained token is then the model's own end: no finding. A warning from 10 % of these rows on, else information:
    rejection and filters may mask single tokens. `gradient_lost_share` is what the token would add to the absolute
    gradient, at the mean of its row.

    ## What to do
    Extend the mask by the token that ended the response; do not mask by comparing with the padding token.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0] * 4], mask=[[1, 1, 0]] * 8, per_token={"response_ids": [[5, 6, 2]] * 8})
    >>> diagnose_one("RDI007", replace(batch, statuses=["stop"] * 8), trainer=None)
    'RDI007 warning confirmed: rows_share 1'
    """

    code = "RDI007"
    name = "eos-not-trained"
    references = (
        "https://github.com/volcengine/verl/issues/3805",
        "https://github.com/huggingface/trl/issues/4974",
    )
    tally = EndTally
    needs_objective = False
    splits = ("train",)

    end_share: float = 0.9
    fewest_ends: int = 8
    warn_from: float = 0.1

    def columns(self, context: Context) -> frozenset[str]:
        """Which tokens there are, which are trained, and which rows were stopped."""
        return frozenset({"response_ids", "response_mask", "status"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Read how each row ends."""
        from rolloutdoctor.evaluation.response_ends import response_ends

        return response_ends(block)

    def _rows(self, step: "StepView") -> "tuple[Tensor, Tensor, Tensor]":
        """Stopped rows with a trained token, the token that ends those of their step, and rows in which it is masked.

        The token is `NONE` where it is not known.
        """
        return step.cached(self.code, lambda: self._found(step))

    def _found(self, step: "StepView") -> "tuple[Tensor, Tensor, Tensor]":
        from rolloutdoctor.evaluation.response_ends import STOPPED, common_end, has_status

        row = step.token_measures[self.code]
        stopped_N = has_status(step.statuses, STOPPED, step.batch.device) & (row["trained"] > 0)
        end_N = common_end(row["last"], stopped_N, step.by_step, self.end_share, self.fewest_ends)
        is_masked_N = stopped_N & (row["last"] == end_N) & ~row["ends_trained"] & (row["last_trained"] != end_N)
        return stopped_N, end_N, is_masked_N

    def measure_each(self, steps: "StepView") -> list[EndTally]:
        """Count the rows of each step."""
        from rolloutdoctor.evaluation.response_ends import NONE

        by_step, row = steps.by_step, steps.token_measures.get(self.code)
        if not row:
            return steps.nothing(EndTally)
        stopped_N, end_N, masked_N = self._rows(steps)
        known_N = stopped_N & (end_N != NONE)
        fields = {}
        if steps.tokens is not None and steps.tokens.grad_l1_N is not None:
            known, masked, gradient_N = by_step.only(known_N), by_step.only(masked_N), steps.tokens.grad_l1_N
            mean_N = gradient_N / row["trained"].clamp(min=1)
            fields = {"gradient": known.sum(gradient_N[known_N]), "lost": masked.sum(mean_N[masked_N])}
        return steps.tallies(
            EndTally,
            stopped=by_step.count(stopped_N),
            known=by_step.count(known_N),
            masked=by_step.count(masked_N),
            **fields,
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The first rows in which it is masked."""
        if not step.token_measures.get(self.code):
            return ()
        _, end_N, masked_N = self._rows(step)
        return step.worst_rows(
            masked_N.double(), lambda row: f"ends with token {int(end_N[row])}, which is masked", KEEP_EXAMPLES
        )

    def measures(self, tally: EndTally) -> Mapping[str, Measure]:
        """How many rows, and what they would add."""
        return {
            "rows_share": Measure(ratio(tally.masked, tally.known), "share"),
            "rows": Measure(tally.masked, "rows"),
            "stopped_rows": Measure(tally.stopped, "rows"),
            "gradient_lost_share": Measure(ratio(tally.lost, tally.gradient + tally.lost), "share"),
        }

    def inconclusive_reason(self, run: EndTally, context: Context) -> Missing | None:
        """No stopped row, or no token that ends them."""
        if run.known:
            return None
        if not run.stopped:
            return Missing("no row was stopped with a trained token", "widen --steps, or record more rows")
        return Missing(
            f"no single token ends {percent(self.end_share)} of the stopped responses of a step, {self.fewest_ends} or "
            "more: stop strings, or several end-of-sequence tokens",
            "record whole steps; with stop strings there is no such token",
        )

    def judge(self, run: EndTally, context: Context) -> Judgement | None:
        """A warning where it is usual, information where it is rare."""
        if not run.masked:
            return None
        share = ratio(run.masked, run.known) or 0.0
        lost = ratio(run.lost, run.gradient + run.lost)
        return Judgement(
            severity=Severity.WARNING if share >= self.warn_from else Severity.INFO,
            confirmed=True,
            headline=f"the token that ends the response is masked in {percent(share)} of the stopped rows",
            message=f"{counted(run.masked, 'row')} of {run.known:,} that were stopped end with the token that ends "
            "nearly all of them, and the mask leaves it out of the loss"
            + ("" if lost is None else f"; it would add {percent(lost)} to |gradient|"),
            evidence="finish reasons, token ids and mask; the token is inferred, as no list of them is recorded",
            advice="extend the mask by that token; do not make it by comparing with the padding token",
        )
