"""RDA008: groups whose only signal is a shaping term."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


def _divides(objective: Objective) -> bool:
    """True if the sum of the reward functions is divided by its group's standard deviation."""
    return objective.advantage.spec.is_standard_score and objective.advantage.scale == "group"


@dataclass(frozen=True)
class PhantomTally(Sums):
    """What `shaped-reward-phantom` adds up over training steps; names are those of reward functions.

    The groups of a function are those in which it has no variance, and the reward has.

    Attributes:
        rows: rows.
        all_groups: groups of two or more rows.
        logged: rows of steps that logged advantages.
        mass: sum of the absolute advantages.
        binary: rows in which a function is 0 or 1.
        low: smallest value of a function.
        high: its largest.
        groups: groups of a function.
        failed: those of them where it is 0.
        own: sum of the absolute advantages of these groups.
        own_failed: of those of them where it is 0.
        squares: squared advantages of their rows.
        lengths: squared deviations of their rows' response lengths from the mean of the group.
        products: products of the two.
    """

    rows: int = 0
    all_groups: int = 0
    logged: int = 0
    mass: float = 0.0
    binary: Mapping[str, float] = by_name()
    low: Mapping[str, float] = by_name(min)
    high: Mapping[str, float] = by_name(max)
    groups: Mapping[str, float] = by_name()
    failed: Mapping[str, float] = by_name()
    own: Mapping[str, float] = by_name()
    own_failed: Mapping[str, float] = by_name()
    squares: Mapping[str, float] = by_name()
    lengths: Mapping[str, float] = by_name()
    products: Mapping[str, float] = by_name()

    @property
    def outcomes(self) -> list[str]:
        """Functions that are 0 or 1 in every row."""
        return sorted(name for name, rows in self.binary.items() if rows == self.rows and self.rows)

    @property
    def outcome(self) -> str | None:
        """The only one of these, if another function varies."""
        others = [name for name in self.low if self.high[name] > self.low[name] and name not in self.outcomes]
        return self.outcomes[0] if len(self.outcomes) == 1 and others else None

    @property
    def share(self) -> float | None:
        """Share of the absolute advantage that these groups have."""
        return None if self.outcome is None else ratio(self.own.get(self.outcome, 0.0), self.mass)

    @property
    def correlation(self) -> float | None:
        """Correlation of advantage and response length within these groups."""
        if self.outcome is None:
            return None
        product = self.products.get(self.outcome, 0.0)
        return ratio(product, sqrt(self.squares.get(self.outcome, 0.0)) * sqrt(self.lengths.get(self.outcome, 0.0)))


_OF = ("groups", "failed", "own", "own_failed", "squares", "lengths", "products")
"""What is added up of the groups of a function."""


@dataclass(frozen=True)
class ShapedRewardPhantom(Rule[PhantomTally]):
    """A shaping term is the whole signal of groups that have one outcome.

    ## What it does
    Finds groups whose outcome (a reward function of 0 and 1) is the same for all rows while their total reward varies,
    where rewards are divided by the group's standard deviation.

    ## Why it matters
    In a group where every response fails, a small term for format or length is all that varies. Divided by its own
    standard deviation it gets advantages as large as those of a group of failures and successes, whatever its weight:
    the policy learns to shape, with full force, on the prompts that it cannot solve. Measured upstream: exact match of
    0.10 with the term, 0.75 where groups were filtered by their outcome.

    ## How it is measured
    The outcome is the only function that is exactly 0 or 1 in every row of the run, beside another one that varies;
    with none or several the rule cannot tell. `advantage_mass_share` is what the groups have of the absolute
    advantage, logged or else recomputed; `length_correlation` is that of advantage and response length within them,
    above 0 where they teach to write more. A spread of the reward at the level of rounding is none. Dense rewards
    without an outcome have no such groups. A warning where groups in which every response fails have a quarter of the
    absolute advantage, confirmed by logged advantages; else information: some shaping is wanted, and among successes it
    chooses between right responses.

    ## What to do
    Leave out groups without variance in the outcome, give the term to successes only, or do not divide such groups.

    ## Example
    >>> from dataclasses import replace
    >>> import torch
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> correct, brief = [0.0, 0.0, 1.0, 0.0], [0.1, 0.0, 0.0, 0.0]
    >>> rewards = {"correct": torch.tensor(correct).double(), "brief": torch.tensor(brief).double()}
    >>> batch = replace(toy_batch([[0.1, 0.0], [1.0, 0.0]]), rewards=rewards)
    >>> diagnose_one("RDA008", batch, trainer="trl")
    'RDA008 warning exposed: groups 1'
    """

    code = "RDA008"
    name = "shaped-reward-phantom"
    references = ("https://github.com/verl-project/verl-recipe/issues/125",)
    tally = PhantomTally
    splits = ("train",)

    warn_above: float = 0.25
    """From a quarter of the absolute advantage on, shaping is no side term of the update."""

    def parts(self, context: Context) -> tuple[Part, ...]:
        """Only a division by the group's standard deviation blows a shaping term up."""
        return (Part.GROUP_STD,)

    def columns(self, context: Context) -> frozenset[str]:
        """Rewards by function and what the advantages need, where a group's standard deviation divides."""
        if context.objective is None or not _divides(context.objective):
            return frozenset()
        return advantage_columns(context.objective) | {"rewards"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Logged advantages are better than recomputed ones."""
        return frozenset({"advantage", "advantages", "response_mask"}) if self.columns(context) else frozenset()

    def measure_each(self, steps: "StepView") -> list[PhantomTally]:
        """Count the rows of each step, and the groups of the functions that are 0 or 1 in all of them."""
        return steps.cached(self.code, lambda: self._found(steps))

    def _found(self, steps: "StepView") -> list[PhantomTally]:
        import numpy as np

        from rolloutdoctor.ops.by_step import named_counts

        rewards, by_step = steps.batch.rewards, steps.by_step
        rows, evaluation = steps.rows, steps.evaluation
        if not steps.training or not len(steps.batch) or rows is None or rows.advantage_N is None or not rewards:
            return steps.nothing(PhantomTally)
        if evaluation is None or not _divides(evaluation.objective):
            return steps.nothing(PhantomTally)
        known = {name: x_N.isfinite() for name, x_N in rewards.items()}
        binary_SK = _columns(by_step.count((x_N == 0) | (x_N == 1)) for x_N in rewards.values())
        known_SK = _columns(by_step.any(known_N) for known_N in known.values())
        low_SK = _columns(by_step.only(known[name]).low(x_N[known[name]]) for name, x_N in rewards.items())
        high_SK = _columns(by_step.only(known[name]).high(x_N[known[name]]) for name, x_N in rewards.items())
        names, is_outcome_SK = list(rewards), binary_SK == by_step.size[:, None]
        none = np.zeros(len(by_step))
        of = [
            self._of(steps, name) if is_outcome_SK[:, place].any() else dict.fromkeys(_OF, none)
            for place, name in enumerate(names)
        ]
        return steps.tallies(
            PhantomTally,
            rows=by_step.size,
            all_groups=steps.compared_by_step.count(steps.compared.size_G > 1),
            logged=by_step.size * (steps.logged_advantages() is not None),
            mass=by_step.sum(self._advantages(steps).abs()),
            binary=named_counts(binary_SK, names, np.ones_like(known_SK)),
            low=named_counts(low_SK, names, known_SK),
            high=named_counts(high_SK, names, known_SK),
            **{field: named_counts(_columns(each[field] for each in of), names, is_outcome_SK) for field in _OF},
        )

    def _advantages(self, step: "StepView") -> "Tensor":
        """Logged advantages, else recomputed ones, ``[N]``; 0 where there is none."""
        logged_N, rows = step.logged_advantages(), step.rows
        assert rows is not None
        assert rows.advantage_N is not None
        return (rows.advantage_N if logged_N is None else logged_N).nan_to_num(0.0)

    def _phantom(self, step: "StepView", name: str) -> "Tensor":
        """Groups in which a function has no variance, and the reward has, ``[G]`` bool."""
        from rolloutdoctor.ops.group_stats import GroupStats

        assert step.rows is not None
        stats = GroupStats(step.compared, step.rows.in_baseline_N)
        reward_N = step.scores()
        noise_G = 4 * 2.0**-23 * stats.high(reward_N.abs())
        return (stats.spread(step.batch.rewards[name]) == 0) & (stats.spread(reward_N) > noise_G)

    def _of(self, steps: "StepView", name: str) -> "dict[str, NDArray[np.float64]]":
        """Add up the groups of one function, ``[S]`` each."""
        groups, phantom_G, by_group = steps.compared, self._phantom(steps, name), steps.compared_by_step
        inside_N = phantom_G[groups.index_N]
        advantage_N = self._advantages(steps) * inside_N
        length_N = steps.batch.rows.diff().double()
        mean_G = groups.total(length_N) / groups.size_G
        apart_N = (length_N - mean_G[groups.index_N]) * inside_N
        failed_G = phantom_G & (groups.total(steps.batch.rewards[name].abs()) == 0)
        return {
            "groups": by_group.sum(phantom_G),
            "failed": by_group.sum(failed_G),
            "own": steps.by_step.sum(advantage_N.abs()),
            "own_failed": steps.by_step.sum(advantage_N.abs() * failed_G[groups.index_N]),
            "squares": steps.by_step.sum(advantage_N.square()),
            "lengths": steps.by_step.sum(apart_N.square()),
            "products": steps.by_step.sum(advantage_N * apart_N),
        }

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The groups with the largest advantages, of steps that are compared by group."""
        import torch

        outcomes = [tally.outcome for tally in self.measure_each(step)]
        if not any(outcomes) or step.batch.groups is None:
            return ()
        groups, compared, reward_N = step.groups, step.compared, step.batch.column("reward")
        is_grouped = step.compared_by_step.size == step.groups_by_step.size
        # Groups and what is compared may be numbered differently.
        compared_G = compared.index_N[groups.order_N[groups.offsets[:-1]]]
        size_G = compared.total(self._advantages(step).abs())[compared_G]
        weight_G = torch.zeros_like(size_G)
        for name in sorted({name for name in outcomes if name is not None}):
            is_its_G = step.groups_by_step.expand(is_grouped & [outcome == name for outcome in outcomes])
            weight_G += size_G * (self._phantom(step, name)[compared_G] & is_its_G)

        def note(group: int) -> str:
            outcome, members = outcomes[int(step.groups_by_step.step_N[group])], groups.index_N == group
            assert outcome is not None
            low, high = float(reward_N[members].min()), float(reward_N[members].max())
            each = float(step.batch.rewards[outcome][members][0])
            return f"{outcome} is {each:.3g} in every row, rewards range from {low:.4g} to {high:.4g}"

        return step.worst_groups(weight_G, note, KEEP_EXAMPLES)

    def measures(self, tally: PhantomTally) -> Mapping[str, Measure]:
        """How many groups, and how much of the update they are."""
        name = tally.outcome
        groups = None if name is None else tally.groups.get(name, 0.0)
        return {
            "groups": Measure(groups, "groups"),
            "groups_share": Measure(None if groups is None else ratio(groups, tally.all_groups), "share"),
            "failed_groups": Measure(None if name is None else tally.failed.get(name, 0.0), "groups"),
            "advantage_mass_share": Measure(tally.share, "share"),
            "length_correlation": Measure(tally.correlation, "1"),
        }

    def inconclusive_reason(self, run: PhantomTally, context: Context) -> Missing | None:
        """No function is the outcome, or several could be."""
        if run.outcome is not None or not self.columns(context):
            return None
        remedy = "record the outcome as one reward function of 0 and 1 beside the shaping terms"
        if len(run.outcomes) > 1:
            return Missing(f"several reward functions could be the outcome: {', '.join(run.outcomes)}", remedy)
        if run.outcomes:
            return Missing(f"no reward function varies beside {run.outcomes[0]}", remedy)
        return Missing("no reward function is 0 or 1 in every row, so none is the outcome", remedy)

    def judge(self, run: PhantomTally, context: Context) -> Judgement | None:
        """A warning from a quarter of the absolute advantage in groups of failures on, else information."""
        name, share = run.outcome, run.share
        if name is None or not run.own.get(name, 0.0):
            return None
        groups, failed, slope = run.groups[name], run.failed[name], run.correlation
        heavy = run.own_failed.get(name, 0.0) >= self.warn_above * run.mass
        direction = "" if slope is None else f"; longer responses {'gain' if slope > 0 else 'lose'} there"
        return Judgement(
            severity=Severity.WARNING if heavy else Severity.INFO,
            confirmed=run.logged == run.rows,
            headline=f"{percent(share)} of the absolute advantage is from {counted(groups, 'group')} where every row "
            f"has the same {name}",
            message=(
                f"in {counted(groups, 'group')} of {run.all_groups:,} every row has the same {name} ({int(failed):,} "
                f"with 0) while the reward varies: shaping alone decides {percent(share)} of the absolute advantage"
                f"{direction}"
            ),
            evidence=f"correlation of advantage and response length within these groups {number(slope)}",
            advice="leave out groups without variance in the outcome, or give shaping terms to successes only",
        )


def _columns(each: "Iterable[NDArray[Any]]") -> "NDArray[Any]":
    """Values of the steps by function, ``[S, K]``."""
    import numpy as np

    return np.stack(list(each), 1)
