"""RDA003: equal rewards that get an advantage out of rounding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import (
    KEEP_EXAMPLES,
    Context,
    Judgement,
    Missing,
    Rule,
    counted,
    made_otherwise,
    number,
    percent,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class ResidueTally(Sums):
    """What `float-residue` adds up over training steps."""

    equal_groups: int = 0
    groups: int = 0
    max_abs: float = largest()
    mass: float = 0.0
    all_mass: float = 0.0
    logged_groups: int = 0
    logged_max: float = largest()
    recomputed_max: float = largest()


@dataclass(frozen=True)
class FloatResidue(Rule[ResidueTally]):
    """Groups with equal rewards get a nonzero advantage from float32 rounding.

    ## What it does
    Finds training groups whose rewards are all equal (max - min = 0) and yet have advantages other than 0. Advantages
    that are whitened over the step afterwards are not looked at: those of such a group are 0 less the mean of the step.

    ## Why it matters
    The float32 mean of eight times 0.3 is not 0.3. The residue, divided by a standard deviation of the same size plus a
    small epsilon, becomes an advantage of up to 0.9, with the same sign for the whole group: all of its responses are
    reinforced, or all suppressed, by rounding alone. Rewards of 0, 1 and dyadic fractions never do this.

    ## How it is measured
    Read from the logged advantages if there are any (then confirmed). Otherwise the trainer's float32 arithmetic is
    repeated on the rewards; the sign and size of the residue depend on the order of summation, so another device gives
    another one. The exact advantage is 0.

    ## What to do
    Test for equal rewards by max - min, compute group statistics in float64, or scale rewards to dyadic values.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDA003", toy_batch(rewards=[[0.6] * 8, [1, 0]]), trainer="verl", adv_estimator="grpo")
    'RDA003 warning exposed: groups 1'
    """

    code = "RDA003"
    name = "float-residue"
    references = (
        "https://github.com/radixark/miles/issues/570",
        "https://github.com/NVIDIA-NeMo/RL/pull/4158",
    )
    tally = ResidueTally
    splits = ("train",)

    warn_above: float = 0.01

    def columns(self, context: Context) -> frozenset[str]:
        """What the advantages need, where they are the standard scores of their groups."""
        if context.objective is None or not context.objective.advantage.is_group_score:
            return frozenset()
        return advantage_columns(context.objective)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Logged advantages show the residue itself."""
        return frozenset({"advantage", "advantages", "response_mask"}) if self.columns(context) else frozenset()

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The division by a group's standard deviation."""
        return (Part.GROUP_STD,)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Estimators whose rounding is not repeated here."""
        if context.objective is None or context.objective.advantage.is_group_score:
            return None
        return Missing(
            "the estimator does more than divide by a group's standard deviation, and its float32 rounding is not "
            "repeated here",
            "no column makes it run: look at the logged advantages of zero-variance groups",
        )

    def measure_each(self, steps: "StepView") -> list[ResidueTally]:
        """Count the groups of equal rewards of each step."""
        if not steps.training or steps.evaluation is None or steps.rows is None:
            return steps.nothing(ResidueTally)
        if not steps.evaluation.objective.advantage.is_group_score:
            return steps.nothing(ResidueTally)
        by_step, groups = steps.by_step, steps.compared_by_step
        equal_G, is_logged = steps.equal_reward_groups(), steps.logged_advantages() is not None
        seen_N, residue_N = self._seen(steps)
        recomputed_N = self._recomputed(steps).abs() * equal_G[steps.compared.index_N]
        found, max_abs = groups.count(steps.compared_sum(residue_N) > 0), by_step.high(residue_N)
        return steps.tallies(
            ResidueTally,
            equal_groups=groups.count(equal_G),
            groups=found,
            max_abs=max_abs,
            mass=by_step.sum(residue_N),
            all_mass=by_step.sum(seen_N.abs()),
            logged_groups=found * is_logged,
            logged_max=max_abs * is_logged,
            recomputed_max=by_step.high(recomputed_N),
        )

    def _recomputed(self, steps: "StepView") -> "Tensor":
        """What float32 makes of the rewards, ``[N]``."""
        assert steps.evaluation is not None
        return steps.float32_advantages(steps.evaluation.objective.advantage.epsilon).double()

    def _seen(self, steps: "StepView") -> "tuple[Tensor, Tensor]":
        """Advantages, logged or else recomputed, and their size where rewards are equal, ``[N]`` each.

        Rows that cannot tell get 0.
        """
        logged_N = steps.logged_advantages()
        seen_N = (self._recomputed(steps) if logged_N is None else logged_N).nan_to_num(0.0)
        return seen_N, seen_N.abs() * steps.equal_reward_groups()[steps.compared.index_N]

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The rows with the largest residue."""
        if not step.training or step.evaluation is None or not step.evaluation.objective.advantage.is_group_score:
            return ()
        seen_N, residue_N = self._seen(step)
        reward_N = step.batch.column("reward")

        def note(row: int) -> str:
            return f"every reward is {float(reward_N[row]):.6g}, advantage {float(seen_N[row]):.3g}"

        return step.worst_rows(residue_N, note, KEEP_EXAMPLES)

    def measures(self, tally: ResidueTally) -> Mapping[str, Measure]:
        """How many groups, and how large."""
        return {
            "groups": Measure(tally.groups, "groups"),
            "max_abs_advantage": Measure(tally.max_abs, "advantage"),
            "advantage_mass_share": Measure(ratio(tally.mass, tally.all_mass), "share"),
        }

    def inconclusive_reason(self, run: ResidueTally, context: Context) -> Missing | None:
        """Logged advantages that another rule made are no residue."""
        return made_otherwise(context)

    def vacuous_reason(self, run: ResidueTally, context: Context) -> str | None:
        """No group in which a residue could be seen."""
        return None if run.equal_groups else "no training group of two or more has equal rewards"

    def judge(self, run: ResidueTally, context: Context) -> Judgement | None:
        """Weight by size: below `warn_above` it is information."""
        if not run.groups:
            return None
        confirmed = run.logged_groups > 0
        severity = Severity.WARNING if run.max_abs >= self.warn_above else Severity.INFO
        if run.logged_max >= self.warn_above:
            severity = Severity.ERROR
        source = "logged" if run.logged_groups == run.groups else "logged or float32" if confirmed else "float32"
        evidence = (
            f"logged advantages of groups with equal rewards reach {number(run.logged_max)}; the same float32 "
            f"arithmetic repeated here reaches {number(run.recomputed_max)}, and the exact value is 0"
            if confirmed
            else f"no logged advantages; float32 arithmetic repeated here reaches {number(run.max_abs)}, and the exact "
            "value is 0"
        )
        return Judgement(
            severity=severity,
            confirmed=confirmed,
            headline=f"|advantage| up to {number(run.max_abs)} in {counted(run.groups, 'group')} of equal rewards",
            message=(
                f"{counted(run.groups, 'group')} of {run.equal_groups:,} with equal rewards have nonzero {source} "
                f"advantages, {percent(ratio(run.mass, run.all_mass))} of the total absolute advantage"
            ),
            evidence=evidence,
            advice="test for equal rewards by max - min in the trainer, or compute its group statistics in float64",
        )
