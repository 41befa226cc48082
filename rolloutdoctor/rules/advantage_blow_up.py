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

    def measure(self, step: "StepView") -> BlowUpTally:
        """Count one step."""
        rows, evaluation = step.rows, step.evaluation
        if not step.training or not len(step.batch) or rows is None or rows.advantage_N is None:
            return BlowUpTally()
        if evaluation is None or not evaluation.objective.advantage.is_group_score:
            return BlowUpTally()
        logged_N, excess_N = step.logged_advantages(), self._excess(step)
        beyond_N = excess_N > 1
        seen_N = (rows.advantage_N if logged_N is None else logged_N).nan_to_num(0.0).abs()
        noise_N = self._noise(step) & (seen_N > 0)
        noise_groups = int((step.compared_sum(noise_N) > 0).sum())
        top_share = self._top_share(step)
        return BlowUpTally(
            beyond_rows=int(beyond_N.sum()),
            beyond_groups=int((step.compared_sum(beyond_N) > 0).sum()),
            compared_rows=int((~excess_N.isnan()).sum()),
            max_abs=float(seen_N.max()),
            worst=float(excess_N.nan_to_num(0.0).max()),
            beyond_mass=float(seen_N[beyond_N].sum()),
            all_mass=float(seen_N.sum()),
            noise_groups=noise_groups,
            noise_mass=float(seen_N[noise_N].sum()),
            noise_max=float((seen_N * noise_N).max()),
            logged_noise=0 if logged_N is None else noise_groups,
            top_share=0.0 if top_share is None else top_share,
            gradient_steps=int(top_share is not None),
        )

    def _excess(self, step: "StepView") -> "Tensor":
        """Logged |advantage| over the bound of its group, its radius taken off, ``[N]``; NaN where there is none."""
        return step.cached("advantages over their bound", lambda: self._over_bound(step))

    def _over_bound(self, step: "StepView") -> "Tensor":
        import torch

        from rolloutdoctor.audit.doubts import doubts_of

        logged_N, none_N = step.logged_advantages(), torch.full_like(step.scores(), torch.nan)
        if logged_N is None or step.trainer is None:
            return none_N
        doubts = doubts_of(step.batch, step.trainer, step.config)
        if doubts.rows and not bool(doubts.odd_N.any()):
            return none_N  # ranks are missing
        wanted = None if step.config is None else step.trainer.group_size(step.config, step.batch.split)
        groups = step.compared
        size = max(wanted or 0, int(groups.size_G.max()))
        # The statistics of equal rewards are rounding alone.
        tested_N = ~(doubts.odd_N | (step.equal_reward_groups() | (groups.size_G < 2))[groups.index_N])
        radius_N = step.advantage_radius() + 2.0**-23 * logged_N.abs()
        excess_N: Tensor = (logged_N.abs() - radius_N).clamp(min=0.0) / (size - 1) ** 0.5 if size > 1 else none_N
        return torch.where(tested_N & logged_N.isfinite(), excess_N, torch.nan)

    def _noise(self, step: "StepView") -> "Tensor":
        """Rows of groups whose rewards differ by rounding alone, ``[N]`` bool."""
        from rolloutdoctor.ops.group_stats import GroupStats

        assert step.rows is not None
        reward_N, groups = step.scores(), step.compared
        stats = GroupStats(groups, step.rows.in_baseline_N)
        spread_G, size_G = stats.spread(reward_N), stats.high(reward_N.abs())
        noise_G = (spread_G > 0) & (spread_G <= NOISE_ULPS * 2.0**-23 * size_G)
        return noise_G[groups.index_N] & step.rows.in_baseline_N

    def _top_share(self, step: "StepView") -> float | None:
        """What the row with the largest recomputed advantage has of the gradient; None without log-probs.

        Of several such rows the one with the largest gradient.
        """
        rows, tokens = step.rows, step.tokens
        if rows is None or rows.advantage_N is None or tokens is None:
            return None
        size_N = rows.advantage_N.abs().nan_to_num(0.0)
        is_top_N = size_N >= size_N.max() * (1 - 1e-6)  # equal but for rounding
        return ratio(float(tokens.grad_l1_N[is_top_N].max()), float(tokens.grad_l1_N.sum()))

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
