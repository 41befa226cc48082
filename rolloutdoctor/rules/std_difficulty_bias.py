"""RDA012: dividing by the group's standard deviation weighs prompts by difficulty."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part, has_part
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent
from rolloutdoctor.rules.dead_groups import BINARY

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class DifficultyTally(Sums):
    """What `std-difficulty-bias` adds up over training steps; names are ``RIGHT/SIZE`` of a group.

    Attributes:
        rows: rows in groups of two or more.
        binary: those whose reward is right or wrong.
        groups: groups with a spread.
        mass: sum of the absolute advantages, as divided by the standard deviation.
        plain: the same of rewards less their mean.
    """

    rows: int = 0
    binary: int = 0
    groups: Mapping[str, float] = by_name()
    mass: Mapping[str, float] = by_name()
    plain: Mapping[str, float] = by_name()

    def edge(self, sums: Mapping[str, float]) -> float | None:
        """Share of groups with a single right response, or a single wrong one."""
        return ratio(sum(value for name, value in sums.items() if _is_edge(name)), sum(sums.values()))

    @property
    def factors(self) -> list[float]:
        """What the division multiplies the advantages of a kind of groups by."""
        return [self.mass[name] / self.plain[name] for name in self.mass if self.plain.get(name, 0) > 0]


def _is_edge(name: str) -> bool:
    right, size = map(int, name.split("/"))
    return size > 2 and right in (1, size - 1)


@dataclass(frozen=True)
class StdDifficultyBias(Rule[DifficultyTally]):
    """Dividing by the group's standard deviation lifts very easy and very hard prompts.

    ## What it does
    Adds up the absolute advantages by the number of right responses in a group, with the division by the group's
    standard deviation and without it.

    ## Why it matters
    A group with one right response of eight has a smaller standard deviation than one with four. The division weighs
    it up by half, whether the one was luck or not, so the objective is no longer the mean reward.

    ## How it is measured
    Rewards have to be right or wrong (0 and 1, or -1 and 1). `edge_mass_share` is the share of the absolute advantages
    in groups with one right or one wrong response, `edge_mass_share_without_std` what it would be without the division,
    and `weight_ratio` the largest by the smallest factor that the division puts on a group. It is a choice of the
    estimator, so this is information, where the share grows by a tenth of itself or more.

    ## What to do
    Nothing, if it is meant. Dr. GRPO leaves the division out; a standard deviation over the batch keeps the scale and
    weighs all prompts alike.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    >>> diagnose_one("RDA012", batch, trainer="trl")
    'RDA012 info exposed: edge_mass_share 0.3981'
    """

    code = "RDA012"
    name = "std-difficulty-bias"
    references = (
        "https://arxiv.org/abs/2503.20783",
        "https://github.com/huggingface/trl/issues/3256",
    )
    tally = DifficultyTally
    splits = ("train",)

    grows_by: float = 1.1

    def parts(self, context: Context) -> tuple[Part, ...]:
        """Only a division by the group's standard deviation does it."""
        return (Part.GROUP_STD,)

    def columns(self, context: Context) -> frozenset[str]:
        """What the advantages need, where a group's standard deviation divides."""
        if context.objective is None or not has_part(context.objective, Part.GROUP_STD):
            return frozenset()
        return advantage_columns(context.objective) | {"reward", "group_id"}

    def measure_each(self, steps: "StepView") -> list[DifficultyTally]:
        """Add up the groups of each step by their right responses and their size."""
        import numpy as np
        import torch

        from rolloutdoctor.ops.group_stats import GroupStats
        from rolloutdoctor.ops.segments import total_by

        rows, groups_by_step = steps.rows, steps.compared_by_step
        if rows is None or rows.advantage_N is None:
            return steps.nothing(DifficultyTally)
        groups, reward_N = steps.compared, steps.scores()
        stats = GroupStats(groups, rows.in_baseline_N)
        in_N = rows.in_baseline_N & (stats.count_N > 1) & reward_N.isfinite()
        if not bool(in_N.any()):
            return steps.nothing(DifficultyTally)
        known, known_n = steps.by_step.only(in_N), reward_N[in_N]
        is_binary = np.any([known.all((known_n == low) | (known_n == high)) for low, high in BINARY], axis=0)
        right_G = stats.total((reward_N == 1).double())
        live_G = (right_G > 0) & (right_G < stats.count_G) & (stats.count_G > 1) & groups_by_step.expand(is_binary)
        mass_G = groups.total(torch.where(in_N, rows.advantage_N.abs(), 0.0).nan_to_num(0.0))
        plain_G = groups.total(torch.where(in_N, (reward_N - stats.per_row(stats.mean(reward_N))).abs(), 0.0))
        width = int(stats.count_G.max()) + 1
        key_G = (groups_by_step.step_N * width + right_G.long()) * width + stats.count_G.long()
        kinds, kind_g = torch.unique(key_G[live_G], return_inverse=True)
        step_k, *of_kind = (x.tolist() for x in np.unravel_index(kinds.cpu().numpy(), (len(known), width, width)))
        names = [f"{right}/{size}" for right, size in zip(*of_kind, strict=True)]

        def sums(x_g: torch.Tensor) -> list[dict[str, float]]:
            found: list[dict[str, float]] = [{} for _ in steps.each]
            for step, name, value in zip(step_k, names, total_by(kind_g, x_g, len(kinds)).tolist(), strict=True):
                found[step][name] = value
            return found

        return steps.tallies(
            DifficultyTally,
            rows=known.size,
            binary=known.size * is_binary,
            groups=sums(torch.ones_like(kind_g)),
            mass=sums(mass_G[live_G]),
            plain=sums(plain_G[live_G]),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """None: it is about all groups."""
        return ()

    def measures(self, tally: DifficultyTally) -> Mapping[str, Measure]:
        """Shares of groups at the edges, with and without the division."""
        factors = tally.factors
        return {
            "edge_mass_share": Measure(tally.edge(tally.mass), "share"),
            "edge_mass_share_without_std": Measure(tally.edge(tally.plain), "share"),
            "edge_groups_share": Measure(tally.edge(tally.groups), "share"),
            "weight_ratio": Measure(ratio(max(factors), min(factors)) if factors else None, "1"),
        }

    def inconclusive_reason(self, run: DifficultyTally, context: Context) -> Missing | None:
        """No group with a spread."""
        if not run.rows or (run.binary == run.rows and not run.groups):
            return Missing("no group has a spread of rewards", "widen --steps, or record more steps")
        return None

    def vacuous_reason(self, run: DifficultyTally, context: Context) -> str | None:
        """Rewards without right and wrong."""
        return None if run.binary == run.rows else "rewards are not right or wrong, so groups have no pass rate"

    def judge(self, run: DifficultyTally, context: Context) -> Judgement | None:
        """Information: it is a choice."""
        if run.binary < run.rows:
            return None
        share, plain = run.edge(run.mass) or 0.0, run.edge(run.plain) or 0.0
        if not share or share < self.grows_by * plain:
            return None
        groups = sum(value for name, value in run.groups.items() if _is_edge(name))
        factors = run.factors
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=f"{percent(share)} of the absolute advantages are in groups with one right or one wrong response, "
            f"{percent(plain)} without the division by the standard deviation",
            message=f"{counted(groups, 'group')} have one right or one wrong response; the division multiplies the "
            f"advantages of a group by {number(min(factors))} to {number(max(factors))}",
            evidence="rewards and the configured estimator; it is a choice",
            advice="no action if it is meant; Dr. GRPO leaves the division out",
        )
