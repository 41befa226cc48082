"""RDA009: reward functions that cancel in the baseline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, percent

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.ops.by_step import ByStep
    from rolloutdoctor.rules.step import StepView


def _has_group_baseline(objective: Objective) -> bool:
    """True if what the rows of a group have in common cancels."""
    rule = objective.advantage
    return rule.spec.has_groups and rule.spec.subtracts_mean and rule.estimator != "raw"


@dataclass(frozen=True)
class InertTally(Sums):
    """What `inert-reward-term` adds up over training steps; names are those of reward functions.

    Attributes:
        groups: groups of two or more rows.
        bits: how unlikely it is that a function that depends on the response is the same in each of them, in bits.
        varying: groups in which a function varies.
        low: smallest value of a function.
        high: its largest.
        squares: squared deviations of a function from its mean over the step.
        within: squared deviations of the reward from the mean of its group.
        total: the same from the mean of the step.
    """

    groups: int = 0
    bits: float = 0.0
    varying: Mapping[str, float] = by_name()
    low: Mapping[str, float] = by_name(min)
    high: Mapping[str, float] = by_name(max)
    squares: Mapping[str, float] = by_name()
    within: float = 0.0
    total: float = 0.0

    @property
    def inert(self) -> list[str]:
        """Functions that vary, and never within a group."""
        return sorted(
            name for name in self.low if self.groups and not self.varying.get(name) and self.high[name] > self.low[name]
        )

    @property
    def constant(self) -> list[str]:
        """Functions that have one value in the whole run."""
        return sorted(name for name in self.low if not self.varying.get(name) and self.high[name] == self.low[name])

    @property
    def inert_share(self) -> float | None:
        """Their share of the squared deviations of all functions."""
        inert = sum(self.squares.get(name, 0.0) for name in self.inert)
        return ratio(inert, sum(self.squares[name] for name in sorted(self.squares)))


@dataclass(frozen=True)
class InertRewardTerm(Rule[InertTally]):
    """A reward function is the same for all responses to a prompt, so that it cancels.

    ## What it does
    Finds reward functions that are constant within every group and differ between groups, and names those that never
    vary in the whole run.

    ## Why it matters
    A group baseline takes out what all rows of a group have in common. A term that depends on the prompt alone, or on
    the group as a whole (a penalty for low diversity, a bonus for hard prompts), moves the reward metric and
    never the policy.

    ## How it is measured
    A function varies within a group if max - min is above 0, or if some rows have it and others do not (null).
    `inert_variance_share` is what the inert functions have of the squared deviations of all functions from
    their means over the step; `reward_variance_share` is what the reward has within its groups of its own: the share
    that can reach the gradient. That a function which depends on the response agrees in every group by chance must have
    a probability of 2^-20: one in (n + 1) / 2 for each group of n rows (a success whose chance is any between 0 and 1),
    and one in two at least, so that it takes 20 pairs, or ten groups of eight. Functions of weight 0 are left out.
    Estimators without a group baseline, pass@k, and steps that are compared as one batch are not looked at, since
    there the term does not cancel; neither is a single group.

    ## What to do
    Make the term depend on the response, apply it after the baseline, or drop it.

    ## Example
    >>> from dataclasses import replace
    >>> import torch
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> correct, hard = torch.tensor([1.0, 0.0] * 20), torch.arange(40).div(2, rounding_mode="floor").double()
    >>> batch = toy_batch([[1 + g, g] for g in range(20)])
    >>> diagnose_one("RDA009", replace(batch, rewards={"correct": correct.double(), "hard": hard}), trainer="trl")
    'RDA009 warning exposed: inert_functions 1'
    """

    code = "RDA009"
    name = "inert-reward-term"
    references = ("https://github.com/huggingface/trl/issues/3857",)
    tally = InertTally
    splits = ("train",)

    least_bits: float = 20.0
    """Once in a million runs."""

    warn_above: float = 0.1
    """Below a tenth of what the functions vary by, what cancels is small beside what does not."""

    def parts(self, context: Context) -> tuple[Part, ...]:
        """Only a group baseline cancels what all responses to a prompt share."""
        return (Part.GROUP_BASELINE,)

    def columns(self, context: Context) -> frozenset[str]:
        """Rewards by function and groups, where there is a group baseline."""
        if context.objective is None or not _has_group_baseline(context.objective):
            return frozenset()
        return frozenset({"group_id", "reward", "rewards"})

    def measure_each(self, steps: "StepView") -> list[InertTally]:
        """Count the groups of each step, and add up what functions and reward vary by."""
        import numpy as np

        from rolloutdoctor.ops.by_step import named_counts

        batch, evaluation, by_step, compared = steps.batch, steps.evaluation, steps.by_step, steps.compared_by_step
        if not steps.training or evaluation is None or not _has_group_baseline(evaluation.objective):
            return steps.nothing(InertTally)
        if not len(batch) or not batch.rewards:
            return steps.nothing(InertTally)
        weights = evaluation.objective.reward_weights or evaluation.objective.advantage.reward_weights
        if len(weights) != len(batch.rewards):
            weights = (1.0,) * len(batch.rewards)
        named = {name: each_N for (name, each_N), weight in zip(batch.rewards.items(), weights, strict=True) if weight}

        shape = len(named), len(by_step)
        is_known_KS = np.array([by_step.any(x_N.isfinite()) for x_N in named.values()]).reshape(shape)

        def by_name(make: "Callable[[Tensor], NDArray[Any]]") -> list[dict[str, float]]:
            x_KS = np.array([make(x_N) for x_N in named.values()]).reshape(shape)
            return named_counts(x_KS.T, list(named), is_known_KS.T)

        reward_N = batch.column("reward")
        tallies = steps.tallies(
            InertTally,
            groups=compared.count(steps.compared.size_G > 1),
            bits=compared.sum(_bits(steps.compared.size_G)),
            varying=by_name(lambda x_N: compared.count(self._varying(steps, x_N))),
            low=by_name(lambda x_N: by_step.only(x_N.isfinite()).low(x_N[x_N.isfinite()])),
            high=by_name(lambda x_N: by_step.only(x_N.isfinite()).high(x_N[x_N.isfinite()])),
            squares=by_name(lambda x_N: _squares(x_N, by_step)),
            within=compared.sum(self._within(steps, reward_N)),
            total=_squares(reward_N, by_step),
        )
        is_one = (compared.size < 2) & (steps.groups_by_step.size >= 2)
        return [InertTally() if one else tally for one, tally in zip(is_one.tolist(), tallies, strict=True)]

    def _varying(self, step: "StepView", value_N: "Tensor") -> "Tensor":
        """Groups in which a function varies, or which have it for some rows only, ``[G]`` bool."""
        from rolloutdoctor.ops.group_stats import GroupStats

        stats = GroupStats(step.compared, value_N.isfinite())
        some_G = (stats.count_G > 0) & (stats.count_G < step.compared.size_G)
        return (stats.spread(value_N) > 0) | some_G

    def _within(self, step: "StepView", value_N: "Tensor") -> "Tensor":
        """Squared deviations from the mean of the group, added up by group, ``[G]``."""
        from rolloutdoctor.ops.group_stats import GroupStats

        stats = GroupStats(step.compared, value_N.isfinite())
        return stats.total((value_N - stats.per_row(stats.mean(value_N))).square())

    def measures(self, tally: InertTally) -> Mapping[str, Measure]:
        """How many functions cancel, and what they are of the reward."""
        return {
            "inert_functions": Measure(len(tally.inert), "functions"),
            "constant_functions": Measure(len(tally.constant), "functions"),
            "inert_variance_share": Measure(tally.inert_share, "share"),
            "reward_variance_share": Measure(ratio(min(tally.within, tally.total), tally.total), "share"),
            "groups": Measure(tally.groups, "groups"),
        }

    def inconclusive_reason(self, run: InertTally, context: Context) -> Missing | None:
        """Too few groups of two or more rows."""
        if run.bits >= self.least_bits or not self.columns(context):
            return None
        return Missing(
            f"{counted(run.groups, 'group')} of two or more rows with rewards by function, which agree by chance once "
            f"in 2^{run.bits:.0f} runs, and it takes 2^{self.least_bits:g}",
            "widen --steps, or record the column rewards for every row",
        )

    def judge(self, run: InertTally, context: Context) -> Judgement | None:
        """A warning where much of what the functions vary by cancels, else information."""
        inert, constant = run.inert, run.constant
        if not inert and not constant:
            return None
        share = run.inert_share
        alone = len(inert) + len(constant) == len(run.low)  # no group has any variance: dead groups, and not one term
        heavy = bool(inert) and share is not None and share >= self.warn_above and not alone
        named = [*inert, *constant]
        names, parts = " and ".join(named), []
        if inert:
            parts.append(f"{', '.join(inert)}: constant within each of {counted(run.groups, 'group')}")
        if constant:
            values = ", ".join(f"{name} = {run.low[name]:.4g}" for name in constant)
            parts.append(f"{values} in every row")
        return Judgement(
            severity=Severity.WARNING if heavy else Severity.INFO,
            confirmed=False,
            headline=f"{names} {'cancel' if len(named) > 1 else 'cancels'} in the group baseline "
            f"({percent(share)} of the functions' variance)",
            message="; ".join(parts),
            evidence=(
                f"{percent(ratio(min(run.within, run.total), run.total))} of the variance of the reward is within "
                "groups and can reach the gradient"
            ),
            advice="make the term depend on the response, apply it after the baseline, or drop it",
        )


def _bits(size_G: "Tensor") -> "Tensor":
    """How unlikely it is that the rows of a group agree by chance, in bits, ``[G]``."""
    return ((size_G + 1) / 2).log2().clamp(min=1.0) * (size_G > 1)


def _squares(value_N: "Tensor", by_step: "ByStep") -> "NDArray[np.float64]":
    """Squared deviations from the mean of the step, ``[S]``."""
    known_N = value_N.isfinite()
    known, value_n = by_step.only(known_N), value_N[known_N].double()
    return known.sum((value_n - known.expand(known.mean(value_n))).square())
