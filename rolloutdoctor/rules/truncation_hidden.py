"""RDI011: responses that were cut off and do not count as such."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, lgamma, nan
from typing import TYPE_CHECKING, Any

from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.all_truncated import TRUNCATED
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent
from rolloutdoctor.rules.duplicate_responses import SAMPLER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class HiddenTally(Sums):
    """What `truncation-hidden` adds up over training steps.

    Attributes:
        rows: rows with a finish reason and a token.
        cut: rows that count as cut off.
        judged: rows of steps whose end-of-sequence token is known.
        longest: by the largest length of a step, its rows of that length that count as finished without that token.
        beside: the same of rows one token shorter than that, and of those that end with it.
        mass: absolute advantages by the same length, of the rows in `longest`.
        total_mass: absolute advantages.
        compared: steps that logged a share of responses that were cut off.
        below: those in which it is less than that of the rows.
        logged: sum of these logged shares.
        counted: sum of the shares of the rows in these steps.
        at_limit: rows as long as the stated limit.
        ended: those of them that count as finished, and have a log-prob of their last token.
        end_nats: sum of minus these log-probs.
    """

    rows: int = 0
    cut: int = 0
    judged: int = 0
    longest: Mapping[str, float] = by_name()
    beside: Mapping[str, float] = by_name()
    mass: Mapping[str, float] = by_name()
    total_mass: float = 0.0
    compared: int = 0
    below: int = 0
    logged: float = 0.0
    counted: float = 0.0
    at_limit: int = 0
    ended: int = 0
    end_nats: float = 0.0

    @property
    def forced_nats(self) -> float:
        """Minus the log of the chance that so many rows at the limit end there by themselves, whichever they are."""
        ways = lgamma(self.at_limit + 1) - lgamma(self.ended + 1) - lgamma(self.at_limit - self.ended + 1)
        return self.end_nats - ways

    @property
    def cap(self) -> str | None:
        """The largest length of the run, as the name of its counts."""
        return max(self.longest, key=float, default=None)


@dataclass(frozen=True)
class TruncationHidden(Rule[HiddenTally]):
    """Responses that were cut off at the largest length count as finished.

    ## What it does
    Looks for rows at the largest length of the run that have a `status` of stop and no end-of-sequence token, and holds
    the logged share of responses that were cut off against the rows. Looks for rows of the stated limit whose last
    token ends them though the sampler gave it next to no chance.

    ## Why it matters
    What handles truncated responses (a mask, a penalty, an alarm on the share) relies on that word. A response that
    was cut off and counts as finished is scored as a wrong answer, or as a right one that never ended.

    ## How it is measured
    The end-of-sequence token is the one id that ends at least 90 % of the stopped responses of a step. Five rows or
    more of the run's largest length without it, and none or few of one token less, are a pile-up at a cap: an error,
    since their status says otherwise. Fewer than five, or lengths that taper off, are stop strings and chance, and no
    finding. An end-of-sequence token that was put at the limit by force has the log-prob that the sampler gave it:
    where the product of these chances, times the ways to choose the rows, is below exp(-16), it is a warning. A logged
    share that is 0 in steps in which rows have a status of length is a warning: verl compares lengths with the padded
    width, and another limit may cut before that. Where no token ends the responses, and no share is logged, nothing can
    be said; nor where rows of the limit end there and the log-probs do not tell.

    ## What to do
    Take the finish reason from the engine. Count, mask or penalise these rows as what they are.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> ids = [[5, 2]] * 60 + [[5, 6, 7, 8]] * 6
    >>> batch = toy_batch([[1, 0] * 33], lengths=[2] * 60 + [4] * 6, per_token={"response_ids": ids})
    >>> diagnose_one("RDI011", replace(batch, statuses=["stop"] * 66), trainer=None)
    'RDI011 error confirmed: hidden_rows 6'
    """

    code = "RDI011"
    name = "truncation-hidden"
    references = (
        "https://github.com/volcengine/verl/issues/7823",
        "https://github.com/volcengine/verl/issues/7817",
        "https://github.com/huggingface/trl/issues/3248",
    )
    tally = HiddenTally
    needs_objective = False
    splits = ("train",)

    end_share: float = 0.9
    fewest_ends: int = 8
    fewest: int = 5
    nats: float = 16.0
    """A chance of 1e-7 for a run."""

    def columns(self, context: Context) -> frozenset[str]:
        """How the rows ended."""
        return frozenset({"status"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The tokens and their log-probs, and the advantages that these rows got."""
        return frozenset({"response_ids", "response_mask", "advantage", *SAMPLER})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Read the last token of each row, and its log-prob."""
        import torch

        from rolloutdoctor.evaluation.response_ends import response_ends

        if not block.is_logged("response_ids"):
            return {}
        found, name = {"last": response_ends(block)["last"]}, next((one for one in SAMPLER if block.is_logged(one)), "")
        if name:
            is_filled_n, ends = block.runs.lengths > 0, block.runs.offsets[1:]
            found["log_prob"] = torch.full_like(ends, nan, dtype=torch.float64)
            found["log_prob"][is_filled_n] = block.column(name)[ends[is_filled_n] - 1].double()
        return found

    def _hidden(self, step: "StepView") -> "tuple[Tensor, Tensor, NDArray[np.bool_]] | None":
        """Rows of the largest length of their step that count as finished without an end, and rows beside these.

        ``[N]`` bool each, and whether the token that ends responses is known, ``[S]``. None without token ids.
        """
        return step.cached(self.code, lambda: self._found(step))

    def _found(self, step: "StepView") -> "tuple[Tensor, Tensor, NDArray[np.bool_]] | None":
        from rolloutdoctor.evaluation.response_ends import NONE, STOPPED, common_end, has_status

        row, length_N, by_step = step.token_measures.get(self.code), step.batch.rows.diff(), step.by_step
        if not row:
            return None
        last_N, stopped_N = row["last"], has_status(step.statuses, STOPPED, step.batch.device) & (length_N > 0)
        end_N = common_end(last_N, stopped_N, by_step, self.end_share, self.fewest_ends)
        less_N = by_step.expand(by_step.high(length_N)) - length_N
        open_N = stopped_N & (last_N != end_N) & (end_N != NONE)
        beside_N = (open_N & (less_N == 1)) | ((last_N == end_N) & (less_N == 0))
        return open_N & (less_N == 0), beside_N, by_step.any(end_N != NONE)

    def measure_each(self, steps: "StepView") -> list[HiddenTally]:
        """Count the rows of each step."""
        import numpy as np

        from rolloutdoctor.evaluation.response_ends import has_status

        by_step, device = steps.by_step, steps.batch.device
        rows = by_step.count(has_status(steps.statuses, None, device))
        cut = by_step.count(has_status(steps.statuses, TRUNCATED, device))
        share = np.array([_logged_share(each) for each in steps.each])
        compared = (share >= 0) & (share <= 1) & (rows > 0) & (rows == by_step.size)
        below = compared & (share == 0) & (cut > 0)
        return steps.tallies(
            HiddenTally,
            rows=rows,
            cut=cut,
            compared=compared.astype(np.int64),
            below=below.astype(np.int64),
            logged=np.where(below, share, 0.0),
            counted=np.where(below, cut / np.maximum(rows, 1), 0.0),
            **self._at_cap(steps, rows),
            **self._at_limit(steps),
        )

    def _at_limit(self, steps: "StepView") -> dict[str, Any]:
        """The rows of the stated limit, and what the sampler thought of the ends of those that count as finished."""
        import torch

        from rolloutdoctor.evaluation.response_ends import STOPPED, has_status

        measured, by_step = steps.token_measures.get(self.code, {}), steps.by_step
        option = None if steps.trainer is None else steps.trainer.length_option
        setting = None if option is None or steps.config is None else steps.config.settings[option]
        limit = setting.value if setting is not None and setting.is_stated else None
        if "log_prob" not in measured or not isinstance(limit, int):
            return {}
        log_prob_N, is_long_N = measured["log_prob"], steps.batch.rows.diff() == limit
        ended_N = is_long_N & has_status(steps.statuses, STOPPED, steps.batch.device) & log_prob_N.isfinite()
        nats_N = torch.where(ended_N, -log_prob_N, 0.0)
        return {"at_limit": by_step.count(is_long_N), "ended": by_step.count(ended_N), "end_nats": by_step.sum(nats_N)}

    def _at_cap(self, steps: "StepView", rows: "NDArray[np.int64]") -> dict[str, Any]:
        """The rows of the largest length of each step, where the token that ends its responses is known."""
        import numpy as np

        hidden, advantage_N, by_step = self._hidden(steps), steps.logged_advantages(), steps.by_step
        if hidden is None:
            return {}
        hidden_N, beside_N, is_known = hidden
        most = by_step.high(steps.batch.rows.diff())

        def by_length(x_N: "Tensor") -> list[dict[str, float]]:
            sums = zip(is_known.tolist(), most.tolist(), by_step.sum(x_N).tolist(), strict=True)
            return [{str(int(length)): total} if known else {} for known, length, total in sums]

        found = {
            "judged": np.where(is_known, rows, 0),
            "longest": by_length(hidden_N),
            "beside": by_length(beside_N),
        }
        if advantage_N is not None:
            mass_N = advantage_N.abs().nan_to_num(0.0)
            found |= {"mass": by_length(mass_N * hidden_N), "total_mass": np.where(is_known, by_step.sum(mass_N), 0.0)}
        return found

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows at the largest length of their step."""
        hidden = self._hidden(step)
        if hidden is None:
            return ()
        length_N = step.batch.rows.diff()

        def note(row: int) -> str:
            return f"{int(length_N[row]):,} tokens, status {step.statuses[row]}, and no end of sequence"

        return step.worst_rows(hidden[0] * length_N.double(), note, KEEP_EXAMPLES)

    def measures(self, tally: HiddenTally) -> Mapping[str, Measure]:
        """How many rows, and how large their advantages are."""
        cap = tally.cap
        hidden = 0 if cap is None else int(tally.longest[cap])
        mass = None if cap is None else tally.mass.get(cap)
        return {
            "hidden_rows": Measure(hidden if tally.judged else None, "rows"),
            "hidden_share": Measure(ratio(hidden, tally.judged), "share"),
            "length": Measure(None if cap is None else int(cap), "tokens"),
            "advantage_mass_share": Measure(None if mass is None else ratio(mass, tally.total_mass), "share"),
            "truncated_rows": Measure(tally.cut, "rows"),
            "steps_below": Measure(tally.below if tally.compared else None, "steps"),
        }

    def inconclusive_reason(self, run: HiddenTally, context: Context) -> Missing | None:
        """Neither a token that ends responses nor a logged share."""
        if run.judged or run.compared:
            return None
        name = "response_ids"
        return Missing(
            "no single token is known to end the responses, and no share of those that were cut off was logged",
            context.recording.get(name, context.recording.get("*", f"record {name}")),
        )

    def unseen_reason(self, run: HiddenTally, context: Context) -> Missing | None:
        """Ends at the limit that were sampled, or put there: their log-probs do not tell."""
        if not run.ended:
            return None
        return Missing(
            f"{counted(run.ended, 'response')} of {run.at_limit:,} at the limit ended there, with a chance of "
            f"{percent(exp(-run.end_nats / run.ended))} each: too few, or too likely, to tell sampled ends from others",
            "take the finish reason from the engine, and look at rows of the largest length that count as finished",
        )

    def judge(self, run: HiddenTally, context: Context) -> Judgement | None:
        """An error where rows say so themselves, a warning where the log does not follow from them."""
        cap = run.cap
        hidden = 0 if cap is None else run.longest[cap]
        if cap is not None and hidden >= self.fewest and hidden >= self.fewest * run.beside[cap]:
            mass = ratio(run.mass.get(cap, 0.0), run.total_mass)
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=f"{counted(hidden, 'response')} of {int(cap):,} tokens have no end and count as finished",
                message=f"{counted(hidden, 'row')} at the largest length of the run, {int(cap):,} tokens, have a "
                "status of stop and end with another token than nearly all stopped responses"
                + ("" if mass is None else f"; they carry {percent(mass)} of the absolute advantages"),
                evidence=f"{counted(run.beside[cap], 'row')} of one token less, or with an end: they pile up at a cap",
                advice="take the finish reason from the engine; mask, penalise or count these rows as cut off",
            )
        if run.ended >= self.fewest and run.forced_nats > self.nats:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=True,
                headline=f"{counted(run.ended, 'response')} at the limit end with a token that was not sampled",
                message=f"{run.ended:,} of {counted(run.at_limit, 'response')} at the stated limit count as finished, "
                "and the sampler gave their last token next to no chance: it was put there",
                evidence=f"the log-probs of these tokens: the chance of so many ends is below exp(-{self.nats:.0f})",
                advice="take the finish reason from the engine; mask, penalise or count these rows as cut off",
                measures={"forced_ends": Measure(run.ended, "rows")},
            )
        if run.below:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=True,
                headline=f"the logged share of responses cut off is 0 in {counted(run.below, 'step')} with such rows",
                message=f"{number(100 * run.counted / run.below)} % of the rows of {counted(run.below, 'step')} have a "
                "status of length, and the trainer logged that none was cut off",
                evidence="the finish reasons of the rows against the trainer's log: it compares with another cap",
                advice="trust the rows; set the trainer's largest length to the limit that binds",
            )
        return None


def _logged_share(step: "StepView") -> float:
    """The logged share of responses that were cut off; NaN if there is none to hold against the rows."""
    names = None if step.writer is None else step.writer.end_metrics
    return nan if names is None or step.omits_rows else step.logged.get(names[0], nan)
