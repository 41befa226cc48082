"""RDI008: log-probs of a neighbouring token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from rolloutdoctor.ops.tally import by_name, by_step, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.audited import AuditedTally
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, counted
from rolloutdoctor.rules.direct import DirectRule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.sampled_rows import Sample
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.ops.by_step import ByStep
    from rolloutdoctor.rules.step import StepView

OWN = {
    "sampler": ("rollout_log_probs", "old_log_probs"),
    "reference": ("ref_log_probs", "policy_log_probs"),
    "old policy": ("old_log_probs", "policy_log_probs"),
}
"""Whose log-probs are compared with those of which column of the trainer."""

START = {"sampler": "", "reference": "reference ", "old policy": "old policy "}
"""Of the names of what is measured: that of the sampler is measured once for several rules."""

WHOSE = {"sampler": "trainer", "reference": "policy", "old policy": "policy"}


class Limits(NamedTuple):
    """What makes a shift visible.

    Attributes:
        pairs: adjacent tokens of a row.
        spread: standard deviation of its log-probs.
        better: how many times smaller its squared error is one token away, in a row that is counted as moved.
        rows: fewest rows.
        share: share of them that are moved.
        deviations: by how many standard deviations these are more than half of the rows.
        pooled: how many times smaller the errors of all rows are.
    """

    pairs: int
    spread: float
    better: float
    rows: int
    share: float
    deviations: float
    pooled: float


ENGINES = Limits(8, 0.3, better=5.0, rows=5, share=0.9, deviations=0.0, pooled=5.0)
"""Of log-probs of two engines, whose noise is up to 0.08 nats, and smaller than what tokens differ by."""

UPDATES = Limits(3, 1e-3, better=1.0, rows=36, share=0.5, deviations=6.0, pooled=1.5)
"""Of log-probs of one engine before and after updates, which may be as far apart as tokens are."""

LIMITS = {"sampler": ENGINES, "reference": UPDATES, "old policy": UPDATES}

FALSE_ALARMS = 1e-6
"""Probability of a false alarm over a whole run."""

LEAST_PAIRS = 30
"""Pairs of adjacent tokens of a step below which its correlations are not looked at: z takes these as normal."""


@dataclass(frozen=True)
class ShiftTally(AuditedTally):
    """What `logprob-shift` adds up beside the audit, over sampled rows: of the sampler, and of the reference.

    Attributes:
        rows: rows whose log-probs vary enough.
        late: those in which its log-probs fit the token before five times better.
        early: those in which they fit the token after.
        aligned_error: sum of the squared differences of rows, in place.
        moved_error: sum of the same moved to where they fit better, of the rows that do.
        correlated: steps whose correlations are looked at.
        moved: ``STEP:WHOSE SIDE`` to by how many standard deviations these fit better one token away, if they do.
    """

    rows: Mapping[str, float] = by_name()
    late: Mapping[str, float] = by_name()
    early: Mapping[str, float] = by_name()
    aligned_error: Mapping[str, float] = by_name()
    moved_error: Mapping[str, float] = by_name()
    correlated: Mapping[str, float] = by_name()
    moved: Mapping[str, float] = by_step()

    def moved_steps(self, whose: str, side: str) -> list[str]:
        """Numbers of the steps in which log-probs are those of the neighbouring token, by more than chance."""
        tests = sum(2 * steps for steps in self.correlated.values())
        least = -NormalDist().inv_cdf(FALSE_ALARMS / max(1.0, tests))
        names = [name.partition(":") for name, z in self.moved.items() if z >= least]
        return sorted((step for step, _, its in names if its == f"{whose} {side}"), key=int)

    def moved_rows(self, whose: str, side: str) -> bool:
        """True if far more rows fit better on this side than on the other, which chance does not prefer."""
        one, other = (self.late, self.early) if side == "late" else (self.early, self.late)
        rows, less = one.get(whose, 0.0), other.get(whose, 0.0)
        if LIMITS[whose].better <= 1 or rows < 10 * less:
            return False
        # Chernoff's bound of a fair coin: rows + less throws, of which so many are of one side.
        bits = rows + less + sum(n * log2(n / (rows + less)) for n in (rows, less) if n)
        return bits >= log2(2 * len(OWN) / FALSE_ALARMS)


@dataclass(frozen=True)
class Errors:
    """Squared differences of two log-probs over adjacent tokens, of the sampled rows whose log-probs vary.

    Attributes:
        by_step: these rows by step.
        row: ``[r]`` number of each.
        aligned: ``[r]`` in place.
        late: ``[r]`` of the trainer's with the sampler's, or the reference's, one token later.
        early: ``[r]`` with these one token earlier.
        pairs: ``[S]`` adjacent tokens of each step, of rows that are not alike.
        late_z: ``[S]`` by how many standard deviations those of a step correlate better one token late.
        early_z: ``[S]`` the same one token early.
    """

    by_step: "ByStep"
    row: "NDArray[np.int64]"
    aligned: "NDArray[np.float64]"
    late: "NDArray[np.float64]"
    early: "NDArray[np.float64]"
    pairs: "NDArray[np.float64]"
    late_z: "NDArray[np.float64]"
    early_z: "NDArray[np.float64]"


@dataclass(frozen=True)
class LogProbShift(DirectRule):
    """Log-probs are one token early or late.

    ## What it does
    Compares the sampler's log-probs with those of the trainer, and the reference's with those of the policy, in place
    and moved by one token within each row. Where a logged KL, loss or ratio does not follow from the log-probs in the
    file, tries the reference's and the old log-probs moved by one token.

    ## Why it matters
    KL, ratio and clip then compare different tokens: ratios of 3 and more on every second token, and a KL that never
    falls.

    ## How it is measured
    Sampler against trainer, on sampled rows of eight adjacent trained tokens or more whose log-probs have a standard
    deviation above 0.3: found where nine tenths of at least five such rows have a squared error that is five times
    smaller one token away. `late_rows` have the sampler's log-prob one token later than the trainer's, `early_rows` one
    earlier. Rows of near-certain tokens say nothing: all of their log-probs are the same. Reference and old log-probs
    come from the engine of the policy's and are some updates away, so that rows of three adjacent tokens and a standard
    deviation of 0.001 count: found where more of at least 36 rows than half have a smaller error one token away, by six
    standard deviations of a coin, and the error of all of them is a third smaller there.

    Some rows: found where ten times as many rows fit five times better on one side as on the other, and a fair coin
    would do that once in a million runs. Some steps: found where in a step with 30 adjacent tokens the ranks of the
    two log-probs correlate better one token away than in place (Williams's test) and than on the other side, each by
    so many standard deviations that chance would do it once in a million runs of as many steps. Rows that are alike
    count once.

    Every logged loss and KL is held against both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradient differs in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1, and the `cosine` of the two.

    ## What to do
    Align log-probs with the tokens they belong to: the logits at position t predict token t + 1.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, ref = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, ref=ref)
    >>> diagnose_one("RDI008", batch, trainer="trl", beta=0.1, logged={"kl": 0.7457480582})
    'RDI008 error confirmed: values_compared 1'
    """

    code = "RDI008"
    name = "logprob-shift"
    references = ("https://github.com/modelscope/ms-swift/issues/8196",)
    tally = ShiftTally
    needs_objective = False
    stages = ("kl", "loss")
    remedy = "log the loss and the KL of every optimiser step beside the run"

    def optional_columns(self, context: Context) -> frozenset[str]:
        """What the audit reads, and both log-probs where they are there."""
        pairs = {name for pair in self._pairs(context) for name in OWN[pair]}
        return super().optional_columns(context) | pairs | ({"response_mask"} if pairs else set())

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Neither an objective to recompute with, nor two log-probs to compare."""
        if context.objective is not None or self._pairs(context):
            return None
        wanted = f"{context.unstated}; {context.recording['*']}" if "*" in context.recording else context.unstated
        return Missing("nothing says which trainer made the run, and with which options", wanted)

    def _pairs(self, context: Context) -> list[str]:
        known = context.columns
        has_trainer = bool(known & {"old_log_probs", "policy_log_probs"})
        found = [whose for whose, (own, _) in OWN.items() if has_trainer and own in known]
        return [whose for whose in found if whose != "old policy" or "policy_log_probs" in known]

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sampled rows."""
        from rolloutdoctor.evaluation.sampled_rows import gap_of

        logged = {
            whose: pair for whose, pair in OWN.items() if whose != "old policy" or all(map(block.is_logged, pair))
        }
        gaps = {whose: gap_of(block, pair) for whose, pair in logged.items()}
        return {START[whose] + name: x for whose, gap in gaps.items() if gap for name, x in gap.sampled.items()}

    def look(self, steps: "StepView") -> Mapping[str, Any]:
        """Count the rows that fit better one token away."""
        import numpy as np

        found: dict[str, list[dict[str, float]]] = {}
        for whose in OWN:
            errors = self._errors(steps, whose)
            if errors is None:
                continue
            rows, aligned, late, early = errors.by_step, errors.aligned, errors.late, errors.early
            better = LIMITS[whose].better
            is_late, is_early = (aligned > better * late) & (late < early), (aligned > better * early) & (early < late)
            moved = np.where(is_late, late, np.where(is_early, early, aligned))
            counts = {"rows": rows.size, "late": rows.count(is_late)}
            counts |= {"early": rows.count(is_early)}
            for name, x_S in {**counts, "aligned_error": rows.sum(aligned), "moved_error": rows.sum(moved)}.items():
                each = found.setdefault(name, [{} for _ in steps.each])
                for one, value, size in zip(each, x_S.tolist(), rows.size.tolist(), strict=True):
                    one.update({whose: float(value)} if size else {})
            is_enough = errors.pairs >= LEAST_PAIRS
            found.setdefault("correlated", [{} for _ in steps.each])
            found.setdefault("moved", [{} for _ in steps.each])
            for one, value in zip(found["correlated"], is_enough.tolist(), strict=True):
                one.update({whose: 1.0} if value else {})
            for side, z_S in (("late", errors.late_z), ("early", errors.early_z)):
                for one, by_number in zip(found["moved"], steps.by_number(z_S, is_enough & (z_S > 4)), strict=True):
                    one.update({f"{step}:{whose} {side}": z for step, z in by_number.items()})
        return found

    def _errors(self, steps: "StepView", whose: str) -> "Errors | None":
        return steps.cached(
            f"errors of moved {whose}", lambda: _errors(steps.sample(self.code, START[whose]), LIMITS[whose])
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Values that disagree, and rows that fit best one token away."""
        import numpy as np
        import torch

        from rolloutdoctor.rules.worst_places import worst_places

        for each in step.each:
            yield from super().examples(each)
        for whose in OWN:
            found = self._errors(step, whose)
            if found is None:
                continue
            moved = np.minimum(found.late, found.early)
            gain = torch.from_numpy(found.aligned - LIMITS[whose].better * moved)
            for _, weight, place in worst_places(gain, found.by_step, step.kept(KEEP_EXAMPLES)):
                view, row = step.own_row(int(found.row[place]))
                side = "late" if found.late[place] < found.early[place] else "early"
                error = f"squared error {found.aligned[place]:.3g} in place, {moved[place]:.3g}"
                note = f"{error} with the {whose}'s {side}"
                yield Example(view.batch.step, None, view.batch.sample_name(row), weight, note)

    def measures(self, tally: AuditedTally) -> Mapping[str, Measure]:
        """The audit's, and the rows that fit better one token away."""
        found = dict(super().measures(tally))
        for whose in tally.rows if isinstance(tally, ShiftTally) else ():
            assert isinstance(tally, ShiftTally)
            start = START[whose].replace(" ", "_")
            found[f"{start}late_rows"] = Measure(int(tally.late[whose]), "rows")
            found[f"{start}early_rows"] = Measure(int(tally.early[whose]), "rows")
            found[f"{start}varying_rows"] = Measure(int(tally.rows[whose]), "rows")
            gain = ratio(tally.aligned_error[whose], tally.moved_error[whose])
            found[f"{start}error_ratio"] = Measure(gain, "1")
        return found

    def _side(self, run: ShiftTally) -> tuple[str, str] | None:
        """Whose log-probs are moved, and to which side, if any are."""
        for whose, limits in LIMITS.items():
            rows = run.rows.get(whose, 0.0)
            least = max(limits.share * rows, (rows + limits.deviations * sqrt(rows)) / 2)
            is_all = rows >= limits.rows and run.aligned_error[whose] >= limits.pooled * run.moved_error[whose]
            for side, moved in (("late", run.late), ("early", run.early)):
                some = run.moved_rows(whose, side) or run.moved_steps(whose, side)
                if some or (is_all and moved[whose] >= least):
                    return whose, side
        return None

    def inconclusive_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """Neither a logged value nor enough rows could show it."""
        if isinstance(run, ShiftTally) and any(rows >= LIMITS[whose].rows for whose, rows in run.rows.items()):
            return None
        return super().inconclusive_reason(run, context)

    def direct(self, run: ShiftTally, context: Context) -> Judgement | None:
        """An error: two columns of the file belong to different tokens."""
        found = self._side(run)
        if found is None:
            return None
        whose, side = found
        late = side == "late"
        rows, total = (run.late if late else run.early).get(whose, 0.0), run.rows.get(whose, 0.0)
        gain = ratio(run.aligned_error.get(whose, 0.0), run.moved_error.get(whose, 0.0))
        places, where = run.moved_steps(whose, side), f"{counted(rows, 'sampled row')} of {total:,.0f}"
        if places and 2 * rows < total:
            where = f"{counted(len(places), 'step')} of {run.correlated[whose]:,.0f}, first at step {places[0]}"
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"log-probs of {whose} and {WHOSE[whose]} are one token apart in {where}",
            message=(
                f"in {where}, the {whose}'s log-probs are those that the {WHOSE[whose]} has one token "
                f"{'before' if late else 'after'}: they are one place {'later' if late else 'earlier'}"
            ),
            evidence="the squared difference of the two "
            + ("vanishes" if gain is None else f"is {gain:.3g} times smaller")
            + " with one of them moved by one token",
            advice="align log-probs with the tokens they belong to: the logits at position t predict token t + 1",
        )


def _errors(sample: "Sample | None", limits: Limits) -> "Errors | None":
    """Compare the sampled rows whose log-probs vary, in place and moved by one token."""
    import numpy as np

    if sample is None or not len(sample.place):
        return None
    own, other, place = sample.sampler, sample.trainer, sample.place
    # Tokens that the next one of their row does not follow at once.
    is_last = np.append(place[1:] != place[:-1] + 1, True)
    is_last[sample.runs.cuts[1:] - 1] = True
    last, room = np.flatnonzero(is_last), np.zeros(len(place))

    def total(before: "NDArray[np.float64]", after: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Sum of squared differences over the pairs of adjacent tokens of each row, ``[r]``."""
        np.subtract(before, after, out=room[:-1])
        room[last] = 0
        return sample.by_row(np.square(room, out=room))

    count = np.maximum(sample.by_row(~is_last), 1)
    room[:-1] = other[:-1]
    room[last] = 0
    mean = sample.by_row(room) / count
    spread = total(other[:-1], sample.runs.spread(mean)[:-1]) / count
    varies = (count >= limits.pairs) & (spread > limits.spread**2)
    aligned = (total(other[:-1], own[:-1]) + total(other[1:], own[1:])) / 2
    late, early = total(other[:-1], own[1:]), total(other[1:], own[:-1])
    return Errors(
        sample.by_step.only(varies),
        sample.row[varies],
        aligned[varies],
        late[varies],
        early[varies],
        *_correlations(sample, np.append(~is_last[:-1], False), np.stack([count, aligned, late, early], 1)),
    )


def _correlations(
    sample: "Sample", is_pair: "NDArray[np.bool_]", of_row: "NDArray[np.float64]"
) -> "tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]":
    """Correlate the ranks of the two log-probs of each step in place and moved, over pairs of adjacent tokens.

    They are those of a neighbouring token if they correlate better than in place, by Williams's test of correlations
    that share a variable (Steiger 1980), better than with those of the other neighbour, by Fisher's, and leave a third
    less variance. A pattern of sure and unsure tokens that repeats fits on both sides.

    Args:
        sample: rows.
        is_pair: ``[V]`` tokens that the next one of their row follows at once.
        of_row: ``[r, 4]`` pairs and squared differences in place, late and early; rows that are alike count once, and
            steps that fit best in place are not ranked.

    Returns:
        Pairs, and standard deviations of late and of early, ``[S]`` each.
    """
    import numpy as np

    from rolloutdoctor.ops.ranks import StepRanks

    step_r = sample.by_step.cpu.step_N.numpy()
    first = np.zeros(len(step_r), bool)
    first[np.unique(np.column_stack([step_r, of_row[:, :3].round(4)]), axis=0, return_index=True)[1]] = True
    count = sample.tokens_by_step.at(np.flatnonzero(is_pair & sample.runs.spread(first))).size.astype(np.float64)
    aligned, late, early = (sample.by_step.cpu.sum(of_row[:, place]) for place in (1, 2, 3))
    first &= (np.minimum(late, early) < aligned)[step_r]
    place = np.flatnonzero(is_pair & sample.runs.spread(first))
    tokens = sample.tokens_by_step.at(place)
    ranks = StepRanks(tokens)
    own, other, own_next, other_next = (
        ranks.centred(x[place + later]) for later in (0, 1) for x in (sample.sampler, sample.trainer)
    )

    def correlation(x: "NDArray[np.float64]", y: "NDArray[np.float64]") -> "NDArray[np.float64]":
        return ranks.correlation(x, y).clip(1e-9 - 1, 1 - 1e-9)

    late, early, between = correlation(other, own_next), correlation(other_next, own), correlation(own, own_next)
    sides = []
    for side, far, here in (late, early, correlation(other, own)), (early, late, correlation(other_next, own_next)):
        rest = 1 - here**2 - side**2 - between**2 + 2 * here * side * between
        with np.errstate(all="ignore"):
            spread = 2 * (count - 1) / (count - 3) * rest + (here + side) ** 2 / 4 * (1 - between) ** 3
            z = (side - here) * np.sqrt((count - 1) * (1 + between) / np.maximum(spread, 1e-9))
            z = np.minimum(z, (np.arctanh(side) - np.arctanh(far)) * np.sqrt((count - 3) / 2))
        sides.append(np.where(UPDATES.pooled * (1 - side**2) <= 1 - here**2, np.nan_to_num(z), 0.0))
    return count, sides[0], sides[1]
