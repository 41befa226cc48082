"""RDA002: groups with one unmasked response."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.parts import Part, has_baseline_per_row
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import (
    KEEP_EXAMPLES,
    Context,
    Judgement,
    Missing,
    Rule,
    baseline_per_token,
    counted,
    number,
    percent,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class SingletonTally(Sums):
    """What `singleton-group` adds up over training steps."""

    groups: int = 0
    rows: int = 0
    all_groups: int = 0
    mass: float = 0.0
    all_mass: float = 0.0
    compared: int = 0
    matched: int = 0
    worst_match: float = largest()


@dataclass(frozen=True)
class SingletonGroup(Rule[SingletonTally]):
    """Groups with a single unmasked response have no baseline.

    ## What it does
    Counts training groups with exactly one unmasked response (or one response, if no mask is logged), and their share
    of the total absolute advantage.

    ## Why it matters
    Trainers disagree on its advantage: the raw score (verl's grpo, rloo, opo), the score times a batch factor (gpg), or
    0 (verl's rloo_vectorized, TRL, slime). With non-negative rewards, a raw score as the advantage reinforces the
    response however bad it is. Rejection makes such groups common.

    ## How it is measured
    `advantage_mass_share` is the sum of |A| over these responses divided by the sum over all unmasked ones, for the
    advantages as configured. Confirmed: the logged advantages of these rows equal the recomputed ones.

    ## What to do
    Drop such groups, or set their advantage to 0, as the fix `rejected-rows:singleton-zero` does.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDA002", toy_batch(rewards=[[0.7], [1, 0]]), trainer="verl", adv_estimator="rloo")
    'RDA002 warning exposed: groups 1'
    """

    code = "RDA002"
    name = "singleton-group"
    references = ("https://github.com/verl-project/verl/pull/6452",)
    tally = SingletonTally
    splits = ("train",)

    def columns(self, context: Context) -> frozenset[str]:
        """What the advantages need; nothing for estimators without a group baseline."""
        if context.objective is None or not has_baseline_per_row(context.objective):
            return frozenset()
        return advantage_columns(context.objective)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask tells which rows are live, logged advantages confirm."""
        return frozenset({"response_mask", "advantage", "advantages"}) if self.columns(context) else frozenset()

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The group baseline."""
        return (Part.GROUP_BASELINE,)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A baseline of another kind."""
        return baseline_per_token(context)

    def measure_each(self, steps: "StepView") -> list[SingletonTally]:
        """Count the groups of each step."""
        rows, by_step = steps.rows, steps.by_step
        if not steps.training or rows is None or rows.advantage_N is None:
            return steps.nothing(SingletonTally)
        live_N, single_N = self._singles(steps)
        size_N = rows.advantage_N.abs()
        live, single = by_step.only(live_N), by_step.only(single_N)
        return steps.tallies(
            SingletonTally,
            groups=single.size,
            rows=single.size,
            all_groups=steps.compared_by_step.size,
            mass=single.sum(size_N[single_N]),
            all_mass=live.sum(size_N[live_N]),
            **self._matches(steps, single_N),
        )

    def _matches(self, steps: "StepView", single_N: "Tensor") -> "dict[str, NDArray[Any]]":
        """Hold the logged advantages of such rows against the recomputed ones."""
        import torch

        rows, by_step, logged_N = steps.rows, steps.by_step, steps.logged_advantages()
        if logged_N is None:
            return {}
        known_N = single_N & ~logged_N.isnan()
        if not bool(known_N.any()):
            return {}
        assert rows is not None
        assert rows.advantage_N is not None
        error_N = (logged_N - rows.advantage_N).abs()
        matched_N = known_N & (error_N <= steps.advantage_radius())
        return {
            "compared": by_step.count(known_N),
            "matched": by_step.count(matched_N),
            "worst_match": by_step.high(torch.where(matched_N, error_N, 0.0)),
        }

    def _singles(self, steps: "StepView") -> "tuple[Tensor, Tensor]":
        """Live rows, and those that are alone in their group, ``[N]`` bool each."""
        return steps.cached("rows alone in their group", lambda: self._found(steps))

    def _found(self, steps: "StepView") -> "tuple[Tensor, Tensor]":
        rows = steps.rows
        assert rows is not None
        live_N = ~rows.score_N.isnan()
        if rows.rejected_N is not None:
            live_N &= ~rows.rejected_N
        alone_N: Tensor = (steps.compared_sum(live_N) == 1)[steps.compared.index_N] & live_N
        return live_N, alone_N

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The rows with the largest advantage."""
        rows = step.rows
        if not step.training or rows is None or rows.advantage_N is None:
            return ()
        advantage_N, score_N = rows.advantage_N, rows.score_N
        _, single_N = self._singles(step)

        def note(row: int) -> str:
            return f"score {float(score_N[row]):.4g}, advantage {float(advantage_N[row]):.4g}"

        return step.worst_rows(advantage_N.abs() * single_N, note, KEEP_EXAMPLES)

    def measures(self, tally: SingletonTally) -> Mapping[str, Measure]:
        """How many, and how much advantage they carry."""
        return {
            "groups": Measure(tally.groups, "groups"),
            "rows": Measure(tally.rows, "rows"),
            "advantage_mass_share": Measure(ratio(tally.mass, tally.all_mass), "share"),
        }

    def inconclusive_reason(self, run: SingletonTally, context: Context) -> Missing | None:
        """Masks that might have left one response of a group."""
        if run.groups or "response_mask" in context.columns:
            return None
        how = context.recording or (context.trainer.recording if context.trainer is not None else {})
        return Missing(
            "missing column response_mask, and no group has a single response: nothing says which are fully masked",
            how.get("response_mask", how.get("*", "record the column response_mask")),
        )

    def vacuous_reason(self, run: SingletonTally, context: Context) -> str | None:
        """No groups."""
        return None if run.all_groups else "there are no training groups"

    def judge(self, run: SingletonTally, context: Context) -> Judgement | None:
        """A warning if these rows carry advantage, information if they are merely wasted."""
        if not run.groups:
            return None
        share = ratio(run.mass, run.all_mass)
        confirmed = run.compared > 0 and run.matched == run.compared
        evidence = "no logged advantages to compare with"
        if run.compared:
            evidence = (
                f"the logged advantages of {run.matched:,} of {counted(run.compared, 'such row')} equal the "
                f"recomputed ones" + (f" (within {number(run.worst_match)})" if run.matched else "")
            )
        return Judgement(
            severity=Severity.WARNING if run.mass > 0 else Severity.INFO,
            confirmed=confirmed,
            headline=(
                f"{counted(run.groups, 'group')} with a single unmasked response, hence no baseline "
                f"({percent(share)} of the total advantage)"
            ),
            message=(
                f"{run.groups:,} of {counted(run.all_groups, 'group')} have a single unmasked response; "
                + (
                    f"these responses carry {percent(share)} of the total absolute advantage without a baseline"
                    if run.mass > 0
                    else "their advantage is 0, so they add nothing to the policy gradient"
                )
            ),
            evidence=evidence,
            advice=(
                "drop such groups, or set their advantage to 0, as the fix rejected-rows:singleton-zero does"
                if run.mass > 0
                else "no action: they only cost tokens"
            ),
        )
