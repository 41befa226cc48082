"""RDA007: advantages that no standard score can have, and groups whose spread of rewards is rounding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
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

NOISE_ULPS = 4
"""A spread of so many float32 roundings of the largest reward is noise: a reward is a sum of a few terms."""


@dataclass(frozen=True)
class BlowUpTally(Sums):
    """What `advantage-blow-up` adds up over training steps."""

    beyond_rows: int = 0
    beyond_groups: int = 0
    compared_rows: int = 0
    max_abs: float = largest()
    worst: float = largest()
    beyond_mass: float = 0.0
    all_mass: float = 0.0
    noise_groups: int = 0
    noise_mass: float = 0.0
    noise_max: float = largest()
    logged_noise: int = 0
    top_share: float = largest()
    gradient_steps: int = 0


@dataclass(frozen=True)
class AdvantageBlowUp(Rule[BlowUpTally]):
    """Advantages are larger than a standard score can be, or standard scores of rounding noise.

    ## What it does
    Finds logged advantages beyond the largest standard score that a group of G rows can have, and groups whose rewards
    differ by rounding alone.

    ## Why it matters
    A group is divided by its standard deviation. Where that comes out too small (as the difference of two means, over
    a leave-one-out set that is constant, or of rewards like 0.1 + 0.2 and 0.3), one row gets an advantage of hundreds
    or thousands, and the update of the step is that row's.

    ## How it is measured
    Centred scores divided by their standard deviation never exceed sqrt(G - 1), whatever the rewards: the bound
    with n in the denominator, and the larger one; with n - 1 it is (G - 1) / sqrt(G). G is the size of the group,
    the configured size, or that of the step's largest group, whichever is largest, so that rows which the file lacks
    raise no alarm; steps with missing ranks, groups that are not complete and rows alone in a group are left out.
    Each value is given its rounding radius. Recomputed advantages keep the bound, so only logged ones are tested.
    A group's spread is rounding where max - min is above 0 and at most 4 * 2^-23 of its largest |reward|;
    `noise_max` is the largest advantage there. Equal rewards are float-residue's. `top_row_grad_share` is what the row
    with the largest advantage has of the recomputed gradient of its step (log-prob space), the largest over the steps.
    The bound says nothing of division by a batch's standard deviation, of whitening, or of no division.

    ## What to do
    Test for equal rewards by max - min before dividing, take the variance in two passes, and give it a floor.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[0, 0.95, 0.95, 0.95]], per_row={"advantage": [-2075, 0.5, 0.5, 0.5]})
    >>> diagnose_one("RDA007", batch, trainer="verl", adv_estimator="grpo")
    'RDA007 error confirmed: rows 1'
    """

    code = "RDA007"
    name = "advantage-blow-up"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/issues/1518",
        "https://github.com/NVIDIA-NeMo/RL/pull/4158",
        "https://github.com/NVIDIA-NeMo/RL/issues/4161",
    )
    tally = BlowUpTally
    stages = ("advantages",)
    splits = ("train",)

    warn_above: float = 0.01
    """Advantages of noise below it are no more than float-residue calls information."""

    def parts(self, context: Context) -> tuple[Part, ...]:
        """Only a division by a group's standard deviation has that bound."""
        return (Part.GROUP_STD,)

    def columns(self, context: Context) -> frozenset[str]:
        """What the advantages need, where the configuration divides by a group's standard deviation."""
        if context.objective is None or not context.objective.advantage.is_group_score:
            return frozenset()
        return advantage_columns(context.objective)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Logged advantages are what is tested; log-probs give the gradient, ranks tell of missing rows."""
        if context.objective is None or not self.columns(context):
            return frozenset()
        return loss_columns(context.objective) | {"advantage", "advantages", "response_mask", "rank"}

    def measure_each(self, steps: "StepView") -> list[BlowUpTally]:
        """Count the rows and groups of each step."""
        rows, evaluation = steps.rows, steps.evaluation
        if not steps.training or rows is None or rows.advantage_N is None:
            return steps.nothing(BlowUpTally)
        if evaluation is None or not evaluation.objective.advantage.is_group_score:
            return steps.nothing(BlowUpTally)
        by_step, groups = steps.by_step, steps.compared_by_step
        logged_N, excess_N = steps.logged_advantages(), self._excess(steps)
        beyond_N = excess_N > 1
        seen_N = (rows.advantage_N if logged_N is None else logged_N).nan_to_num(0.0).abs()
        noise_N = self._noise(steps) & (seen_N > 0)
        noise_groups = groups.count(steps.compared_sum(noise_N) > 0)
        top_shares = self._top_shares(steps)
        return steps.tallies(
            BlowUpTally,
            beyond_rows=by_step.count(beyond_N),
            beyond_groups=groups.count(steps.compared_sum(beyond_N) > 0),
            compared_rows=by_step.count(~excess_N.isnan()),
            max_abs=by_step.high(seen_N),
            worst=by_step.high(excess_N.nan_to_num(0.0)),
            beyond_mass=by_step.sum(seen_N * beyond_N),
            all_mass=by_step.sum(seen_N),
            noise_groups=noise_groups,
            noise_mass=by_step.sum(seen_N * noise_N),
            noise_max=by_step.high(seen_N * noise_N),
            logged_noise=noise_groups * (logged_N is not None),
            top_share=[share or 0.0 for share in top_shares],
            gradient_steps=[int(share is not None) for share in top_shares],
        )

    def _excess(self, steps: "StepView") -> "Tensor":
        """Logged |advantage| over the bound of its group, its radius taken off, ``[N]``; NaN where there is none."""
        return steps.cached("advantages over their bound", lambda: self._over_bound(steps))

    def _over_bound(self, steps: "StepView") -> "Tensor":
        import torch

        logged_N, trainer, config = steps.logged_advantages(), steps.trainer, steps.config
        if logged_N is None or trainer is None:
            return torch.full_like(steps.scores(), torch.nan)
        wanted = 0 if config is None else trainer.group_size(config, steps.batch.split) or 0
        groups, by_step = steps.compared, steps.by_step
        size = steps.compared_by_step.high(groups.size_G).clip(min=max(wanted, 1))
        # The statistics of equal rewards are rounding alone.
        untested_N = (steps.equal_reward_groups() | (groups.size_G < 2))[groups.index_N]
        untested_N |= self._incomplete(steps, wanted)
        radius_N = steps.advantage_radius() + 2.0**-23 * logged_N.abs()
        excess_N = (logged_N.abs() - radius_N).clamp(min=0.0) / by_step.expand((size - 1) ** 0.5)
        return torch.where(untested_N | ~logged_N.isfinite(), torch.nan, excess_N)

    def _incomplete(self, steps: "StepView", wanted: int) -> "Tensor":
        """Rows of groups without the configured size, or of steps with missing ranks, ``[N]`` bool.

        Where no group of a step has that size, it is no sign of lost rows.
        """
        import numpy as np

        from rolloutdoctor.audit.doubts import missing_ranks

        groups = steps.groups_by_step
        fits_G = steps.groups.size_G == wanted
        odd_N: Tensor = (~fits_G & groups.expand(groups.any(fits_G)))[steps.groups.index_N]
        if "rank" not in steps.batch.per_row:
            return odd_N
        lacks_ranks = np.array([bool(missing_ranks(each.batch)) for each in steps.each])
        return odd_N | steps.by_step.expand(lacks_ranks & ~steps.by_step.any(odd_N))

    def _noise(self, steps: "StepView") -> "Tensor":
        """Rows of groups whose rewards differ by rounding alone, ``[N]`` bool."""
        from rolloutdoctor.ops.group_stats import GroupStats

        assert steps.rows is not None
        reward_N, groups = steps.scores(), steps.compared
        stats = GroupStats(groups, steps.rows.in_baseline_N)
        spread_G, size_G = stats.spread(reward_N), stats.high(reward_N.abs())
        noise_G = (spread_G > 0) & (spread_G <= NOISE_ULPS * 2.0**-23 * size_G)
        return noise_G[groups.index_N] & steps.rows.in_baseline_N

    def _top_shares(self, steps: "StepView") -> list[float | None]:
        """What the row with the largest recomputed advantage has of each step's gradient; None without log-probs.

        Of several such rows the one with the largest gradient.
        """
        import torch

        rows, tokens, by_step = steps.rows, steps.tokens, steps.by_step
        if rows is None or rows.advantage_N is None or tokens is None:
            return [None] * len(by_step)
        size_N = rows.advantage_N.abs().nan_to_num(0.0)
        # Equal but for rounding.
        is_top_N = size_N >= by_step.expand(by_step.high(size_N) * (1 - 1e-6))
        top = by_step.high(torch.where(is_top_N, tokens.grad_l1_N, 0.0))
        return [ratio(*pair) for pair in zip(top.tolist(), by_step.sum(tokens.grad_l1_N).tolist(), strict=True)]

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The rows farthest beyond the bound."""
        rows, evaluation, logged_N = step.rows, step.evaluation, step.logged_advantages()
        if rows is None or rows.advantage_N is None or evaluation is None or logged_N is None or not step.training:
            return ()
        if not evaluation.objective.advantage.is_group_score:
            return ()
        excess_N = self._excess(step).nan_to_num(0.0)

        def note(row: int) -> str:
            return f"advantage {float(logged_N[row]):.4g}, {float(excess_N[row]):.3g} times the largest possible"

        return step.worst_rows(excess_N * (excess_N > 1), note, KEEP_EXAMPLES)

    def measures(self, tally: BlowUpTally) -> Mapping[str, Measure]:
        """How many rows, how far, and how much of the update."""
        return {
            "rows": Measure(tally.beyond_rows, "rows"),
            "groups": Measure(tally.beyond_groups, "groups"),
            "rows_compared": Measure(tally.compared_rows, "rows"),
            "max_abs_advantage": Measure(tally.max_abs, "advantage"),
            "times_bound": Measure(tally.worst if tally.compared_rows else None, "1"),
            "advantage_mass_share": Measure(ratio(tally.beyond_mass, tally.all_mass), "share"),
            "noise_groups": Measure(tally.noise_groups, "groups"),
            "noise_max": Measure(tally.noise_max, "advantage"),
            "noise_mass_share": Measure(ratio(tally.noise_mass, tally.all_mass), "share"),
            "top_row_grad_share": Measure(tally.top_share if tally.gradient_steps else None, "share"),
        }

    def inconclusive_reason(self, run: BlowUpTally, context: Context) -> Missing | None:
        """Without logged advantages, or with those of another rule, nothing can be beyond the bound."""
        otherwise = made_otherwise(context)
        if otherwise is not None:
            return otherwise
        if run.compared_rows or run.noise_max >= self.warn_above or not self.columns(context):
            return None
        if not context.columns & {"advantage", "advantages"}:
            return Missing(
                "no advantages were logged, and recomputed ones are within the bound",
                "log the advantages: the column advantage (one a row) or advantages (one a token)",
            )
        return Missing(
            "no complete group of two or more rows with different rewards has a logged advantage", "widen --steps"
        )

    def judge(self, run: BlowUpTally, context: Context) -> Judgement | None:
        """An error beyond the bound; a warning for noise."""
        if run.beyond_rows:
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=f"|advantage| up to {number(run.max_abs)} in {counted(run.beyond_rows, 'row')}, "
                f"{number(run.worst)} times the largest standard score",
                message=(
                    f"{counted(run.beyond_rows, 'row')} in {counted(run.beyond_groups, 'group')} have advantages that "
                    "no standard score of their group can have; they are "
                    f"{percent(ratio(run.beyond_mass, run.all_mass))} of the absolute advantage"
                ),
                evidence=(
                    f"of {counted(run.compared_rows, 'logged advantage')} the worst is {number(run.worst)} times "
                    "sqrt(G - 1), its rounding taken off"
                ),
                advice="take the variance in two passes, give it a floor, and leave out groups with equal rewards",
            )
        if run.noise_max < self.warn_above:
            return None
        source = "logged" if run.logged_noise else "recomputed"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=run.logged_noise > 0,
            headline=f"|advantage| up to {number(run.noise_max)} in {counted(run.noise_groups, 'group')} whose rewards "
            "differ by rounding alone",
            message=(
                f"the rewards of {counted(run.noise_groups, 'group')} differ by rounding alone, and their {source} "
                f"advantages are {percent(ratio(run.noise_mass, run.all_mass))} of the absolute advantage"
            ),
            evidence=f"max - min is above 0 and at most {NOISE_ULPS} float32 roundings of the largest reward",
            advice="round rewards before they are compared, or treat a spread at rounding level as none",
        )
