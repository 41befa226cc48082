"""RDA005: rows without a reward count as 0."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.ops.tally import largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.audited import AuditedTally, CauseRule
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, counted, number

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.evaluate import RowResult
    from rolloutdoctor.rules.step import StepView

FAILED = frozenset({"abort", "aborted", "cancelled", "canceled", "error", "failed", "timeout", "timed_out"})
"""Values of the column status, in lower case, of a rollout that did not come to an end that could be scored."""


@dataclass(frozen=True)
class MissingTally(AuditedTally):
    """What `reward-missing-as-zero` adds up.

    Attributes:
        unscored: rows whose reward is null.
        rows: rows with a reward of 0 and a witness that it is none.
        moved: rows whose advantage is another one without those, they included.
        live_rows: those of them that have a reward.
        shift: sum over these of the change of the baseline.
        shift_max: the largest.
        sign_flips: those whose advantage changes its sign.
        tested: those with a logged advantage that tells the two formulas apart.
        matched_zero: those that match the one with rewards of 0.
        matched_without: those that match the other.
    """

    unscored: int = 0
    rows: int = 0
    moved: int = 0
    live_rows: int = 0
    shift: float = 0.0
    shift_max: float = largest()
    sign_flips: int = 0
    tested: int = 0
    matched_zero: int = 0
    matched_without: int = 0


@dataclass(frozen=True)
class RewardMissingAsZero(CauseRule):
    """Rows that could not be scored enter the baseline with a reward of 0.

    ## What it does
    Where rows have no reward (null or NaN) and the logged advantages do not follow without them, tries a reward of
    0 for each of them. Where rows have a reward of exactly 0, looks for a witness that they have none: every reward
    function of the row is null, or its status is aborted, error, timeout or failed.

    ## Why it matters
    A reward function that timed out says nothing about the response. As a 0 it is a failure: it lowers the baseline
    of its siblings and is itself pushed away.

    ## How it is measured
    Rewards that are null: every logged advantage is held against both formulas, each within its rounding radius. The
    finding gives how many values each explains, how many rows change, how many advantages change their sign
    (`sign_flips`), and with log-probs how much of the gradient differs: `relative_change_l1` =
    |g_made - g_recorded|_1 / |g_recorded|_1, in log-prob space.
    Rewards of 0: `rows` are those with a witness; a 0 without one is a valid score and never counts. Where rows
    without any function have other rewards than 0, the file does not hold all functions, and null ones prove nothing.
    Advantages are recomputed with the rows left out: `baseline_shift` is the change of what the estimator subtracts
    from `live_rows` siblings, and `sign_flips` are among these. Exposed, unless the logged advantages match one of the
    two formulas on every row where they differ: confirmed with the rows counted as 0, clean without them.

    ## What to do
    Leave rows that could not be scored out of the baseline, and give them an advantage of 0.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, float("nan"), 0.5]], per_row={"advantage": [0.5, -0.5, 0.0]})
    >>> diagnose_one("RDA005", batch, trainer="trl", scale_rewards="none")
    'RDA005 error confirmed: values_compared 3'
    """

    code = "RDA005"
    name = "reward-missing-as-zero"
    references = (
        "https://github.com/huggingface/trl/issues/5773",
        "https://github.com/huggingface/trl/issues/6427",
    )
    tally = MissingTally
    stages = ("advantages",)
    remedy = "log the advantages: the column advantage (one a row) or advantages (one a token)"

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The rewards, and what can witness that one is missing."""
        return frozenset({"reward", "rewards", "status", "response_mask"})

    def measure_each(self, steps: "StepView") -> list[MissingTally]:
        """Count the values and the rows of each step."""
        batch, by_step = steps.batch, steps.by_step
        audited = [vars(self.audited(each)) for each in steps.each]
        if "reward" not in batch.per_row:
            return [MissingTally(**values) for values in audited]
        unscored, rows = by_step.count(batch.per_row["reward"].isnan()), by_step.count(self._missing(steps))
        counts = zip(audited, unscored.tolist(), rows.tolist(), strict=True)
        found = [MissingTally(**values, unscored=nulls, rows=zeros) for values, nulls, zeros in counts]
        return [
            tally + self._effect(step, self._missing(step)) if tally.rows else tally
            for tally, step in zip(found, steps.each, strict=True)
        ]

    def _missing(self, step: "StepView") -> "Tensor":
        """Rows with a reward of 0 and a witness that it is none, ``[N]`` bool."""
        return step.cached("rewards missing as 0", lambda: self._witnessed(step))

    def _witnessed(self, step: "StepView") -> "Tensor":
        import torch

        from rolloutdoctor.evaluation.response_ends import has_status

        batch, reward_N, by_step = step.batch, step.batch.column("reward"), step.by_step
        witness_N = has_status(step.statuses, FAILED, batch.device)
        if batch.rewards:
            null_N = torch.stack([each_N.isnan() for each_N in batch.rewards.values()]).all(0)
            # Other rewards than 0 without any function: the file does not hold all functions of these rows.
            lacks_some = by_step.any(null_N & reward_N.isfinite() & (reward_N != 0))
            witness_N |= null_N & by_step.expand(~lacks_some & ~by_step.all(null_N))
        return witness_N & (reward_N == 0)

    def _without(self, step: "StepView", missing_N: "Tensor") -> "RowResult | None":
        """The first pass with the rows left out; None where it cannot be told from the rewards."""
        import torch

        from rolloutdoctor.evaluation.evaluate import evaluate_rows
        from rolloutdoctor.results.errors import CannotComputeError

        evaluation, batch = step.evaluation, step.batch
        assert evaluation is not None
        objective = evaluation.objective
        if objective.advantage.spec.axis is not Axis.ROWS:
            return None
        if objective.advantage.sums_tokens and "token_rewards" in batch.per_token:
            return None
        reward_N = torch.where(missing_N, torch.nan, batch.column("reward"))
        scored = replace(batch, per_row={**batch.per_row, "reward": reward_N})
        leaving = replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.UNSCORED))
        try:
            return evaluate_rows(scored, leaving, evaluation.dtype)
        except CannotComputeError:
            return None

    def _effect(self, step: "StepView", missing_N: "Tensor") -> MissingTally:
        """What the rows change: advantages with and without them."""
        before = step.rows
        after = None if before is None else self._without(step, missing_N)
        if before is None or after is None:
            return MissingTally(moved=int(missing_N.sum()))
        old_N, new_N = before.advantage_N, after.advantage_N
        assert old_N is not None
        assert new_N is not None
        assert before.baseline_N is not None
        assert after.baseline_N is not None
        radius_N = step.advantage_radius()
        differ_N = (old_N - new_N).abs() > 2 * radius_N
        live_N = differ_N & ~missing_N
        shift_N = (before.baseline_N - after.baseline_N).abs() * live_N
        logged_N = step.logged_advantages()
        tested_N = live_N & False if logged_N is None else live_N & logged_N.isfinite()
        logged_N = old_N if logged_N is None else logged_N
        return MissingTally(
            moved=int((live_N | (missing_N & (old_N.abs() > radius_N))).sum()),
            live_rows=int(live_N.sum()),
            shift=float(shift_N.sum()),
            shift_max=float(shift_N.max()),
            sign_flips=int((live_N & (old_N * new_N < 0)).sum()),
            tested=int(tested_N.sum()),
            matched_zero=int((tested_N & ((logged_N - old_N).abs() <= radius_N)).sum()),
            matched_without=int((tested_N & ((logged_N - new_N).abs() <= radius_N)).sum()),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows with a witness; of steps without any, the first value of each quantity that disagrees."""
        missing_N = self._missing(step) if "reward" in step.batch.per_row else step.batch.rows.diff() < 0
        for each, has_some in zip(step.each, step.by_step.any(missing_N).tolist(), strict=True):
            if not has_some:
                yield from super().examples(each)

        def note(row: int) -> str:
            status = step.statuses[row]
            failed = status is not None and status.lower() in FAILED
            return f"reward 0, status {status}" if failed else "reward 0, and every reward function is null"

        yield from step.worst_rows(missing_N.double(), note, KEEP_EXAMPLES)

    def measures(self, tally: AuditedTally) -> Mapping[str, Measure]:
        """How many logged values follow, how many rows have a witness, and what these change."""
        assert isinstance(tally, MissingTally)
        return {
            **super().measures(tally),
            "rows": Measure(tally.rows, "rows"),
            "live_rows": Measure(tally.live_rows, "rows"),
            "baseline_shift_mean": Measure(ratio(tally.shift, tally.live_rows), "reward"),
            "baseline_shift_max": Measure(tally.shift_max, "reward"),
            "sign_flips": Measure(tally.sign_flips, "rows"),
        }

    def inconclusive_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """Nothing tells a reward that is missing from a 0, or nothing was logged that could show what became of it."""
        assert isinstance(run, MissingTally)
        if run.rows or self.code in context.causes:
            return None
        if run.unscored:
            return super().inconclusive_reason(run, context)
        if context.columns & {"rewards", "status"}:
            return None
        return Missing(
            "nothing tells a reward that is missing from a 0",
            "record rewards that are missing as null, or the columns rewards (one number per function) or status",
        )

    def unseen_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """As the audit has it, unless the logged advantages show that the trainer leaves these rows out."""
        assert isinstance(run, MissingTally)
        return None if run.tested and run.matched_without == run.tested else super().unseen_reason(run, context)

    def judge(self, run: AuditedTally, context: Context) -> Judgement | None:
        """An error where logged values show it, a warning where rows have a witness and nothing logged decides."""
        assert isinstance(run, MissingTally)
        found = super().judge(run, context)
        if found is not None or not run.moved:
            return found
        if run.tested and run.matched_without == run.tested:
            return None  # the trainer leaves them out
        confirmed = run.tested > 0 and run.matched_zero == run.tested
        evidence = "no logged advantages to compare with"
        if run.tested:
            evidence = (
                f"of {counted(run.tested, 'row')} where it makes a difference, {run.matched_zero:,} logged advantages "
                f"match rewards of 0, and {run.matched_without:,} match without these rows"
            )
        return Judgement(
            severity=Severity.ERROR if confirmed else Severity.WARNING,
            confirmed=confirmed,
            headline=f"{counted(run.rows, 'row')} without a reward {'count' if run.rows != 1 else 'counts'} as 0, "
            f"baselines of {counted(run.live_rows, 'row')} off by up to {number(run.shift_max)}",
            message=(
                f"{counted(run.rows, 'row')} have a reward of 0 although they could not be scored: "
                f"{counted(run.live_rows, 'advantage')} of other rows shift, {run.sign_flips:,} of them flip sign"
            ),
            evidence=evidence,
            advice="leave rows that could not be scored out of the baseline, and give them an advantage of 0",
        )
