"""RDI001: NaN and infinity in the rows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.ops.tally import Sums, smallest
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

TOKEN_COLUMNS = (
    "policy_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "advantages",
    "kl",
    "values",
)
"""Columns that are looked at, where they are there or read for something else."""

LOSS_COLUMNS = ("policy_log_probs", "old_log_probs", "ref_log_probs", "advantages")


LOWEST, HIGHEST = -1000.0, 88 * 2**-8
"""Below the first a log-prob has no finite exponential in float32. Above 0 it is a probability above 1: a logit minus a
log-sum of exponentials can be that by rounding in bfloat16, and neither is above 88."""


def _is_sound(name: str, low: float, high: float) -> bool:
    """True if a column with these extremes has no value to look at; they are NaN if it holds one."""
    if name.endswith("log_probs"):
        return low >= LOWEST and high <= HIGHEST
    return low > -math.inf and high < math.inf


def _bad(name: str, column_T: "Tensor") -> "Tensor":
    """Values that are not finite, or are log-probs that none can be."""
    if not name.endswith("log_probs"):
        return ~column_T.isfinite()
    if name == "rollout_log_probs":
        # NaN has a meaning here: the engine gave none.
        return (column_T < LOWEST) | (column_T > HIGHEST)
    return ~((column_T >= LOWEST) & (column_T <= HIGHEST))


@dataclass(frozen=True)
class NonfiniteTally(Sums):
    """What `nonfinite-values` adds up."""

    tokens: int = 0
    masked_tokens: int = 0
    loss_tokens: int = 0
    rows: int = 0
    rewards: int = 0
    unscored: int = 0
    undefined: int = 0
    first_step: float = smallest()


@dataclass(frozen=True)
class NonfiniteValues(Rule[NonfiniteTally]):
    """NaN or infinity in log-probs, advantages or rewards.

    ## What it does
    Counts NaN and infinite values, separately for trained and for masked tokens.

    ## Why it matters
    One such value in a trained token makes the loss of the step NaN. In a masked token it does the same wherever the
    mask is applied by multiplication, as TRL does, since 0 * NaN is NaN. Loggers that skip NaN hide both.

    ## How it is measured
    `tokens` counts trained tokens with a value that is not finite in any column, `masked_tokens` masked ones, `rows`
    the rows that hold either or whose reward is not finite. A log-prob above 0.34 counts as well: it is a probability
    above 1, by more than logits in bfloat16 round to. So does one below -1000: a placeholder or a bug. A missing reward
    is not a fault if the trainer leaves such rows out (TRL); NaN in `rollout_log_probs` means that the inference engine
    returned none. All numbers elsewhere in a report leave masked values out. Confirmed: the values are in the
    file. `undefined_advantages` counts rows whose advantage the trainer itself computes as NaN from finite values:
    verl's opo divides by the trained tokens of the group, which are none where all of its rows were rejected. The mask
    keeps such a NaN out of the loss, but not out of its gradient, so verl skips the whole optimiser step. Recomputed
    gradients leave masked tokens out, so they say what the step would be without those rows. If these are the only
    ones, the verdict is exposed: the rows and the configuration would make it happen.

    ## What to do
    Look at the rows listed and find where the value comes from: an empty response, an overflowing exponential, a reward
    function that failed.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 0]], policy=float("nan"), mask=[[0, 0], [0, 1]])
    >>> diagnose_one("RDI001", batch, trainer="trl")
    'RDI001 error confirmed: tokens 1'
    """

    code = "RDI001"
    name = "nonfinite-values"
    references = (
        "https://github.com/huggingface/trl/issues/6702",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2084",
    )
    tally = NonfiniteTally
    needs_objective = False

    def columns(self, context: Context) -> frozenset[str]:
        """Nothing is needed: it looks at what is there."""
        return frozenset()

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Every column that can hold such a value and enters a loss or an advantage."""
        found = frozenset({"reward", "advantage", "response_mask", *TOKEN_COLUMNS})
        if context.objective is None:
            return found
        needed = advantage_columns(context.objective)
        # Advantages that depend on which tokens are left can be undefined.
        return found | needed if "response_mask" in needed else found

    def unavailable_reason(self, context: Context) -> Missing | None:
        """No column to look at."""
        if context.columns.intersection(("reward", "advantage", *TOKEN_COLUMNS)):
            return None
        return Missing(
            "there is no column of rewards, advantages or log-probs",
            context.recording.get("*", "record these columns, or name them as `rolloutdoctor info` lists them"),
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the tokens of each row with a value that is not finite: in any column, trained ones, in the loss."""
        bad_T = loss_T = None
        for name in TOKEN_COLUMNS:
            # Stand-ins are columns of their own here. One look at the extremes settles it for nearly every block.
            if not block.is_logged(name) or not len(block) or _is_sound(name, *block.extremes(name)):
                continue
            here_T = _bad(name, block.column(name))
            bad_T = here_T if bad_T is None else bad_T | here_T
            if name in LOSS_COLUMNS:
                loss_T = here_T if loss_T is None else loss_T | here_T
        none_N = block.runs.lengths.double() * 0
        return {
            "all": none_N if bad_T is None else block.row_sum(bad_T),
            "trained": none_N if bad_T is None else block.row_sum(bad_T & block.trained_T),
            "loss": none_N if loss_T is None else block.row_sum(loss_T & block.trained_T),
        }

    def measure_each(self, steps: "StepView") -> list[NonfiniteTally]:
        """Count the tokens and rows of each step."""
        import numpy as np

        by_step, tokens = steps.by_step, steps.token_measures[self.code]
        bad_reward_N, unscored_N, undefined_N = self._rows(steps)
        bad_N = bad_reward_N | (tokens["all"] > 0)
        numbers = np.array(steps.batch.step_numbers, np.float64)
        return steps.tallies(
            NonfiniteTally,
            tokens=by_step.count(tokens["trained"]),
            masked_tokens=by_step.count(tokens["all"] - tokens["trained"]),
            loss_tokens=by_step.count(tokens["loss"]),
            rows=by_step.count(bad_N),
            rewards=by_step.count(bad_reward_N),
            unscored=by_step.count(unscored_N),
            undefined=by_step.count(undefined_N),
            first_step=np.where(by_step.any(bad_N | undefined_N), numbers, np.inf),
        )

    def _rows(self, step: "StepView") -> "tuple[Tensor, Tensor, Tensor]":
        """Rows with a reward or advantage that is not finite and hurts, unscored ones, and those of `_undefined`."""
        return step.cached(self.code, lambda: (*self._bad_rewards(step), self._undefined(step)))

    def _undefined(self, step: "StepView") -> "Tensor":
        """Rows of groups without a trained token whose advantage comes out as NaN although their score is finite."""
        rows = step.rows
        if rows is None or rows.advantage_N is None or rows.length_N is None:
            return step.batch.rows.diff() < 0
        empty_N = (step.compared_sum(rows.length_N) == 0)[step.compared.index_N]
        undefined_N: Tensor = empty_N & rows.in_baseline_N & rows.advantage_N.isnan() & rows.score_N.isfinite()
        return undefined_N

    def _bad_rewards(self, step: "StepView") -> "tuple[Tensor, Tensor]":
        """Rows with a reward or advantage that is not finite and hurts, and rows that are merely unscored."""
        reward_N = step.batch.per_row.get("reward")
        advantage_N = step.batch.per_row.get("advantage")
        bad_N = step.batch.rows.diff() < 0
        unscored_N = bad_N
        if reward_N is not None:
            bad_N = bad_N | ~reward_N.isfinite()
            evaluation = step.evaluation
            if evaluation is None or RowSet.UNSCORED in evaluation.objective.baseline_rows.without:
                unscored_N = reward_N.isnan()
                bad_N = bad_N & ~unscored_N
        if advantage_N is not None:
            bad_N = bad_N | ~advantage_N.isfinite()
        return bad_N, unscored_N

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows with the most such values, and the first column that has one."""
        bad_N, _, undefined_N = self._rows(step)
        weight_N = bad_N.double() + step.token_measures[self.code]["all"] + undefined_N
        offsets = step.batch.rows

        def note(row: int) -> str:
            start, stop = int(offsets[row]), int(offsets[row + 1])
            for name in TOKEN_COLUMNS:
                if name not in step.batch.per_token:
                    continue
                column_T = step.batch.token_columns.part(name, slice(start, stop))
                bad_T = _bad(name, column_T)
                if bool(bad_T.any()):
                    token = int(bad_T.nonzero()[0])
                    return f"{name} is {float(column_T[token])} at token {token}"
            if bool(undefined_N[row]):
                return "its group has no trained token, and its advantage is 0 / 0"
            return "reward or advantage is not finite"

        return step.worst_rows(weight_N, note, KEEP_EXAMPLES)

    def measures(self, tally: NonfiniteTally) -> Mapping[str, Measure]:
        """How many, and since when."""
        first = None if tally.first_step == float("inf") else int(tally.first_step)
        return {
            "tokens": Measure(tally.tokens, "tokens"),
            "rows": Measure(tally.rows, "rows"),
            "first_step": Measure(first, "step"),
            "masked_tokens": Measure(tally.masked_tokens, "tokens"),
            "rewards": Measure(tally.rewards, "rows"),
            "undefined_advantages": Measure(tally.undefined, "rows"),
        }

    def judge(self, run: NonfiniteTally, context: Context) -> Judgement | None:
        """An error where the loss or an advantage is reached, a warning where a mask stands before it."""
        if not run.rows and not run.undefined:
            return None
        title = "the trainer" if context.trainer is None else context.trainer.title
        undefined = (
            f"{counted(run.undefined, 'row')} in groups without a trained token get the advantage 0 / 0, which is "
            f"masked in the loss and not in its gradient: the gradient of the step is NaN, and {title} skips its update"
        )
        if not run.rows:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=(
                    f"{counted(run.undefined, 'row')} with an advantage of 0 / 0, first at step {int(run.first_step)}"
                ),
                message=undefined,
                evidence="the rows and the configuration would make it happen; no column shows the update",
                advice="leave fully rejected groups out of the batch, or use another estimator than opo",
            )
        reached = run.loss_tokens > 0 or run.rewards > 0
        leak = (
            f"{title} multiplies by the mask, so a masked NaN reaches its loss"
            if context.trainer is not None and context.trainer.masks_by_product
            else "harmless only where the mask is applied by selection"
        )
        parts = [f"{counted(run.tokens, 'trained token')} and {counted(run.masked_tokens, 'masked token')}"]
        if run.rewards:
            parts.append(f"{counted(run.rewards, 'row')} with a reward or advantage that is not finite")
        return Judgement(
            severity=Severity.ERROR if reached else Severity.WARNING,
            confirmed=True,
            headline=(
                f"{counted(run.rows, 'row')} with NaN, infinity or an impossible log-prob, first at step "
                f"{int(run.first_step)}"
            ),
            message=f"values that are not finite, or log-probs that none can be, in {', '.join(parts)}"
            + (f"; {leak}" if run.masked_tokens else "")
            + (f"; {undefined}" if run.undefined else ""),
            evidence="the values are in the file",
            advice="look at the rows listed; numbers elsewhere in this report that such values reach are shown as n/a",
        )
