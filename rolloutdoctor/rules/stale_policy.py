"""RDO002: rows that older weights sampled than the trainer believes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.lag_table import MOST_LAGS, LagTable, LagTally
from rolloutdoctor.ops.tally import ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

STAMPS = frozenset({"policy_version_min", "policy_version_max"})


def corrects_the_sampler(objective: Objective | None) -> bool:
    """True if the objective weighs, bounds or rejects by the sampler's log-probs."""
    if objective is None:
        return False
    around, inside = objective.correction, objective.sampler_correction
    return (
        objective.surrogate.old == "rollout_log_probs"
        or (around.weights is not None and around.weighs)
        or around.rejects
        or (inside is not None and inside.weighs)
        or any(gate.against == "rollout_log_probs" and gate.kind != "high_entropy" for gate in objective.gates)
    )


@dataclass(frozen=True)
class StalePolicy(Rule[LagTally]):
    """Rows were sampled by older weights than the trainer believes.

    ## What it does
    Looks for version stamps that contradict the steps, for a gap between sampler and trainer that grows with version
    lag, for a step from which on the gap is much larger than before, and for rows whose first part has a larger gap
    than the rest.

    ## Why it matters
    An inference engine that missed a weight sync goes on as if nothing had happened: the reward curve lives on, and the
    update is off-policy. Upstream, a sleep mode that dropped the synced weights raised the mean gap from 0.015 to
    0.201 at the first update. Old log-probs that the trainer recomputes with its present weights hide it from the
    importance ratio, and stamps that are never set hide it from every staleness limit.

    ## How it is measured
    The gap is the trainer's log-prob before the update minus the sampler's, on trained tokens; of a step of more than
    2^15 tokens on every second one, or every third, and so on. Sizes are compared on
    tokens to which the sampler gave less than 0.9, as medians: a kernel's noise moves a log-prob by its size times
    (1 - p), so their share, which changes as a policy sharpens, would move the median of all. *Onset*: every step
    from there on has at least four times the median of every step before, and 0.02 or more; the last one or two steps
    ten times that of five or more before, and 0.1 or more. *Growth*: the last
    third of the run has six times the first two steps, in the order of steps (Spearman 0.8), and 0.1 or more, in eight
    steps or more; in five or more where it grows with each step, from the first to the last. *First update*: from the
    second step on it has ten times that of the first and 0.002 or more: with equal weights at the start the first step
    shows what the kernels differ by. This is information where the objective corrects for the sampler. An
    honest gap nearly doubles as a policy sharpens, and tripled over 30 steps on one public stack: such growth
    proves nothing. *Lag*: twice the gap at the larger of two lags in one step, or where the lag falls from one step
    to the next, and 0.02 or more. Kernel noise is flat in lag. *Inside a row*: four times the gap before some
    quarter of the row than after it, in 1 % of the rows with 32 such tokens on either side, and five times as many
    as the other way round. *Stamps*: one version for eight steps or more, four times longer than ever before;
    versions from after their step; a newest version older than the oldest. Versions that count something else than
    steps are compared within a step alone. A gap that grows with lag is information where the objective weighs,
    clips or rejects by the sampler's log-probs: bounded staleness is then a choice. So is all that is found where
    `stale-prefix-cache` or `engine-frozen` names the cause. `k3_per_version` is the rise of the KL of sampler and
    trainer with each version, `ess_*` the effective sample size of the importance weights, as a share of the
    tokens.

    ## What to do
    Find the sync that failed at the onset step. Stamp each row with the version that sampled it, and either correct
    with the sampler's log-probs or drop rows beyond the lag at which the effective sample size falls.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> steps = [toy_batch([[1, 0]], lengths=64, rollout=-1.0 - gap, step=step)
    ...          for step, gap in enumerate([0.01, 0.01, 0.2, 0.2, 0.21, 0.22])]
    >>> diagnose(steps, trainer=None, select=["RDO002"]).findings[0].headline
    'the gap to the sampler rises from 0.0107 to 0.203 at step 2 and stays'
    """

    code = "RDO002"
    name = "stale-policy"
    references = (
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/volcengine/verl/pull/7568",
        "https://github.com/radixark/miles/pull/1829",
    )
    tally = LagTally
    needs_objective = False
    splits = ("train",)

    onset_factor: float = 4.0
    """No honest run rises so far at once: kernels and precision stay the same from step to step."""
    onset_least: float = 0.02
    """The noise of a bf16 kernel; below it there is little to be stale."""
    first_factor: float = 10.0
    first_least: float = 0.002
    """A hundred times what kernels of float32 differ by."""
    growth_factor: float = 6.0
    """About twice the largest honest growth that was reported, 0.011 to 0.036."""
    growth_least: float = 0.1
    lag_factor: float = 2.0
    lag_least: float = 0.02
    """A gap below the noise of a bf16 kernel is no matter, however much smaller that of newer rows is."""
    stopped_least: int = 8
    turn: float = 4.0

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs; where they are not there, stamps are looked at alone."""
        gap = frozenset({"old_log_probs", "rollout_log_probs"})
        logged = "rollout_log_probs" in context.columns and context.columns & {"old_log_probs", "policy_log_probs"}
        return STAMPS if not logged and context.columns >= STAMPS else gap

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask and the stamps; where there are any, what the gradient takes."""
        wanted = frozenset({"response_mask", "optim_step_id"}) | STAMPS
        if context.objective is None or not context.columns & STAMPS:
            return wanted
        return wanted | loss_columns(context.objective)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Keep the tokens that are looked at."""
        from rolloutdoctor.evaluation.sampler_gap import looked_at

        return looked_at(block)

    def measure_each(self, steps: "StepView") -> list[LagTally]:
        """Add up the rows of each step, by lag."""
        if not len(steps.batch) or not steps.training:
            return steps.nothing(LagTally)
        found = {**_stamps(steps), **self._gaps(steps)}
        return steps.tallies(LagTally, **found) if found else steps.nothing(LagTally)

    def _gaps(self, steps: "StepView") -> dict[str, Any]:
        """The gap of each step by lag, and the rows in which it turns; nothing without the log-probs."""
        import numpy as np
        import torch

        from rolloutdoctor.evaluation.sampler_gap import sizes_by, turns_of, weights_of
        from rolloutdoctor.ops.gap_bins import middles
        from rolloutdoctor.ops.lag_cells import LagCells

        gap, by_step = steps.sampler_gap(self.code), steps.by_step
        if gap is None:
            return {}
        weight_T = weights_of(gap)
        terms = gap.counted_T, gap.delta_T.abs(), gap.delta_T, weight_T, weight_T.square()
        tokens, size, delta, weight, square = (gap.runs.total(x_T).cpu().numpy() for x_T in terms)
        sums = {"rows": np.ones_like(tokens), "tokens": tokens, "size": size, "k3": weight - tokens - delta}
        sums |= {"weight": weight, "square": square}
        if steps.tokens is not None:
            sums["grad"] = steps.tokens.grad_l1_N.nan_to_num(0.0, 0.0, 0.0).cpu().numpy()
        # Of a step without such tokens nothing is said by lag.
        cells = LagCells(steps.lags(MOST_LAGS), by_step, steps.batch.step_numbers, by_step.any(tokens))
        counts = sizes_by(gap, torch.from_numpy(cells.cell_N).to(gap.size_T.device), len(cells)).cpu().numpy()
        of_cells = {name: cells.sum(x_N) for name, x_N in sums.items()}
        of_cells |= {"unsure": counts.sum(axis=1), "middle": middles(counts)}
        early, late = turns_of(gap)
        is_early, is_late, several = early >= self.turn, late >= self.turn, _of_several_versions(steps)
        return {name: cells.by_name(x_C) for name, x_C in of_cells.items()} | {
            "equal": by_step.count(np.where(size == 0, tokens, 0)),
            "long": by_step.count(early > 0),
            "turned": by_step.count(is_early & ~several & ~is_late),
            "turned_several": by_step.count(is_early & several & ~is_late),
            "turned_back": by_step.count(is_late & ~is_early),
        }

    def measures(self, tally: LagTally) -> Mapping[str, Measure]:
        """The gap, by lag and over the steps."""
        table = LagTable(tally)
        buckets = [one for one in table.buckets if one.tokens]
        tokens = sum(tally.tokens.values())
        onset, ends = self._since(table), table.growth()
        lags = table.with_lag()
        middles = [size for _, size in table.by_step]
        return {
            "gap_mean": Measure(ratio(sum(tally.size.values()), tokens), "nats"),
            "gap_median_first": Measure(middles[0] if middles else None, "nats"),
            "gap_median_last": Measure(middles[-1] if middles else None, "nats"),
            "gap_growth": Measure(None if ends is None else ratio(ends[1], ends[0]), "1"),
            "onset_step": Measure(onset, "step"),
            "largest_lag": Measure(buckets[-1].lag if buckets and tally.newest else None, "versions"),
            "gap_ratio_by_lag": Measure(lags[0] if lags else None, "1"),
            "k3_per_version": Measure(table.slope, "nats per version"),
            "ess_newest": Measure(buckets[0].ess if buckets else None, "share"),
            "ess_oldest": Measure(buckets[-1].ess if buckets else None, "share"),
            "grad_share_lagged": Measure(table.stale_grad(0), "share"),
            "grad_share_lag_over_1": Measure(table.stale_grad(1), "share"),
            "grad_share_lag_over_3": Measure(table.stale_grad(3), "share"),
            "rows_of_several_versions": Measure(tally.several, "rows"),
            "rows_that_turn": Measure(tally.turned + tally.turned_several, "rows"),
        }

    def inconclusive_reason(self, run: LagTally, context: Context) -> Missing | None:
        """Neither stamps nor a gap over enough steps."""
        table, tokens = LagTable(run), sum(run.tokens.values())
        if len(run.newest) >= self.stopped_least or run.backwards or table.beyond():
            return None
        remedy = "record policy_version_min and policy_version_max, or more steps"
        if tokens and run.equal == tokens:
            return Missing(
                "the trainer's log-probs are the sampler's, bit by bit, so they show no other weights",
                "record old_log_probs as the trainer computes them, beside rollout_log_probs",
            )
        if table.mixes_lags() or len(table.by_step) >= 4:
            return None
        steps = counted(len(table.by_step), "step")
        return Missing(f"{steps} with 100 tokens or more below probability 0.9; needs 4", remedy)

    def judge(self, run: LagTally, context: Context) -> Judgement | None:
        """A warning, or information where the objective corrects for the sampler."""
        table, corrected = LagTable(run), corrects_the_sampler(context.objective)
        faults = [*self._of_stamps(run, table), *self._of_steps(table)]
        notes = [*([] if faults else self._of_first_update(table)), *self._of_lag(table), *self._of_rows(run)]
        if not faults and not notes:
            return None
        told = [*faults, *notes]
        ess = {f"ess_lag_{one.lag}": Measure(one.ess, "share") for one in table.buckets[:MOST_LAGS] if run.newest}
        middle = {
            f"gap_median_lag_{one.lag}": Measure(one.middle, "nats") for one in table.buckets[:MOST_LAGS] if run.newest
        }
        return Judgement(
            severity=Severity.WARNING if faults or not corrected else Severity.INFO,
            confirmed=False,
            headline=told[0],
            message="; ".join(told),
            evidence="the log-probs of sampler and trainer"
            + (", the version stamps" if run.newest else "; no version stamps")
            + ("; the objective corrects for the sampler's log-probs" if corrected and not faults else ""),
            advice="find the weight sync that failed, stamp each row with the version that sampled it, and correct "
            "with the sampler's log-probs or drop rows that are too old",
            measures={**ess, **middle},
        )

    def _of_stamps(self, run: LagTally, table: LagTable) -> list[str]:
        """How stamps contradict the steps."""
        found = []
        stopped, beyond = table.stopped(self.stopped_least), table.beyond()
        if stopped is not None:
            start, steps = stopped
            version = table.stamps[-1][1]
            since = "in all" if start == table.stamps[0][0] else f"from step {start} on, in"
            found.append(f"the version stamp stays at {version} {since} {counted(steps, 'step')}")
        if beyond:
            found.append(f"{counted(len(beyond), 'step')} from {beyond[0]} on hold versions from after them")
        if run.backwards:
            found.append(f"{counted(run.backwards, 'row')} have a newest version that is older than their oldest")
        return found

    def _onset(self, table: LagTable) -> tuple[int, float, float] | None:
        """Step from which on the gap is larger than before, by far; with fewer than three steps, by more."""
        found = table.onset(self.onset_factor, self.onset_least)
        if found is not None or any(one.lag for one in table.buckets) or len(table.by_step) < 6:
            return found
        return table.onset(self.first_factor, self.growth_least, after=1)

    def _since(self, table: LagTable) -> int | None:
        """Step from which on the gap is larger than before: by far, or twice as large where it then keeps growing."""
        onset = self._onset(table)
        if onset is None and self._grows(table):
            onset = table.onset(2.0, 0.0)
        return None if onset is None else onset[0]

    def _grows(self, table: LagTable) -> bool:
        ends = table.growth()
        if ends is None:
            return False
        before, after, order = ends
        return after >= self.growth_factor * before and order >= 0.8 and after >= self.growth_least

    def _of_steps(self, table: LagTable) -> list[str]:
        """How the gap rises over the run."""
        onset, ends = self._onset(table), table.growth()
        if onset is not None:
            step, low, high = onset
            is_last = step == table.by_step[-1][0]
            end = ", the last" if is_last else " and stays"
            return [f"the gap to the sampler rises from {number(low)} to {number(high)} at step {step}{end}"]
        if ends is None or not self._grows(table):
            return []
        since = self._since(table)
        told = f"the gap to the sampler grows over the run, from {number(ends[0])} to {number(ends[1])}"
        return [told if since is None else f"{told}, and is twice what it was from step {since} on"]

    def _of_first_update(self, table: LagTable) -> list[str]:
        """How the gap rises where the weights first change."""
        found = table.first_update(self.first_factor, self.first_least)
        if found is None:
            return []
        step, low, high = found
        return [
            f"the gap to the sampler rises from {number(low)} to {number(high)} at step {step}, after the first update"
        ]

    def _of_lag(self, table: LagTable) -> list[str]:
        """How the gap grows with the lag."""
        lags = table.with_lag()
        largest = max((one.middle or 0.0 for one in table.buckets), default=0.0)
        if lags is None or lags[0] < self.lag_factor or largest < self.lag_least:
            return []
        known = [one for one in table.buckets if one.ess is not None]
        words = f"the gap to the sampler is {number(lags[0])} times larger on the oldest rows than on the newest"
        return [f"{words}, and the effective sample size falls from {known[0].ess:.3g} to {known[-1].ess:.3g}"]

    def _of_rows(self, run: LagTally) -> list[str]:
        """Rows that begin under older weights."""
        rows = run.turned + run.turned_several
        if rows < max(10, 0.01 * run.long) or rows < 5 * run.turned_back:
            return []
        stamped = f", {run.turned_several:,} of them stamped with several versions" if run.several else ""
        return [f"{counted(rows, 'row')} have {self.turn:g} times the gap in their first part{stamped}"]


def _stamps(steps: "StepView") -> dict[str, Any]:
    """The newest version of each step, and rows whose stamps are odd; nothing without stamps."""
    import torch

    rows, by_step = steps.batch.per_row, steps.by_step
    if not rows.keys() >= STAMPS:
        return {}
    old_N, new_N = rows["policy_version_min"], rows["policy_version_max"]
    is_stamped_N = (old_N >= 0) & (new_N >= 0)
    newest = by_step.high(torch.where(is_stamped_N, new_N, -1))
    return {
        "newest": steps.by_number(newest, newest >= 0),
        "unstamped": by_step.count(~is_stamped_N),
        "backwards": by_step.count(is_stamped_N & (new_N < old_N)),
        "several": by_step.count(is_stamped_N & (new_N > old_N)),
    }


def _of_several_versions(steps: "StepView") -> "NDArray[np.bool_]":
    """Rows stamped with several versions, ``[N]``."""
    import numpy as np

    rows = steps.batch.per_row
    if not rows.keys() >= STAMPS:
        return np.zeros(len(steps.batch), bool)
    return (rows["policy_version_max"] > rows["policy_version_min"]).cpu().numpy()
