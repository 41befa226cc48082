"""Count how many values of a quantity agree, and keep what the disagreeing ones have in common."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rolloutdoctor.ops.whole_factors import quotients

INCOMPLETE = "some groups do not have the configured number of rows"
"""A doubt about some places, which the others do without."""


OF_JOIN = "each optimizer step may have a line of its own"
"""A doubt about which rows a line of the log is of."""


ENOUGH_BITS = 8.0
"""Evidence that logged values must give for an explanation, in bits: some hundred are tried.

A value says as many bits as its radius fits into its size, or into its distance from what the options give: a value of
0 follows from many formulas, and one whose radius is as wide as that distance from both."""


Lengths = tuple[float, float, float, float]


@dataclass(frozen=True)
class QuantityTally:
    """Comparison of the logged values of one quantity with the recomputed ones; tallies of steps add up.

    The intervals hold every factor (offset) that would carry all disagreeing values to the logged ones within their
    radii; where the lower end is not above the upper one there is such a factor (offset).

    Attributes:
        stage: one of `STAGES`.
        compared: values that were compared.
        agree: those within their radius.
        worst: largest difference in radii.
        first: step, row (empty for a value of the step), logged and recomputed value of the first that disagrees.
        not_compared: values that disagree inconclusively.
        reason: why nothing follows.
        steps: steps with a value that was compared.
        steps_off: steps with a value that disagrees.
        last_off: the last of them.
        factor_low: lower end of the interval of factors.
        factor_high: its upper end.
        offset_low: lower end of the interval of offsets.
        offset_high: its upper end.
        window: steps that a value is the mean over.
        radius: the smallest radius above 0 of a value that was compared.
        bits: how often the radii of the disagreeing values fit into what they tell, their size or their distance from
            the recomputed ones: the sum of binary logarithms, equal values counted once and values of 0 not at all.
        telling: how many values that is.
        zeros: values that agree and are 0 within their radius: they are so whatever they are multiplied by.
        above: the smallest and the largest difference of a disagreeing value from the recomputed one.
        line: the largest squared distance of the values of a step from a line of the recomputed ones, as a share of
            their own from their mean (one minus R2); infinite where a step has too few different values.
        zero_bits: the same as `bits` of the disagreeing values that are 0 within their radius, by their distance from
            the recomputed ones.
        factor_bits: what the disagreeing values say for a factor that is a whole number or one over it: the sum of
            binary logarithms of one over the chance that the interval of a value holds one.
        faults: fix of a fault that the release has to the values of which the objective as it is and the fixed one give
            different numbers, and those of them that agree with the former.
        groups: groups with a value that disagrees, and groups with one that was compared, in steps where some disagree.
        lengths: tokens of the shortest and the longest row whose value disagrees, and of the shortest and the longest
            row whose value agrees.
    """

    stage: str
    compared: int = 0
    agree: int = 0
    worst: float = 0.0
    first: tuple[int, str, float, float] | None = None
    not_compared: int = 0
    reason: str = ""
    steps: int = 0
    steps_off: int = 0
    last_off: int = 0
    factor_low: float = -math.inf
    factor_high: float = math.inf
    offset_low: float = -math.inf
    offset_high: float = math.inf
    window: int = 1
    radius: float = math.inf
    bits: float = 0.0
    telling: int = 0
    zeros: int = 0
    above: tuple[float, float] = (math.inf, -math.inf)
    line: float = 0.0
    factor_bits: float = 0.0
    zero_bits: float = 0.0
    faults: tuple[tuple[str, int, int], ...] = ()
    groups: tuple[int, int] = (0, 0)
    lengths: Lengths = (math.inf, -math.inf, math.inf, -math.inf)

    def __add__(self, other: "QuantityTally") -> "QuantityTally":
        firsts = [first for first in (self.first, other.first) if first is not None]
        reasons = [tally.reason for tally in (self, other) if tally.reason]
        return QuantityTally(
            stage=self.stage,
            compared=self.compared + other.compared,
            agree=self.agree + other.agree,
            worst=max(self.worst, other.worst),
            first=min(firsts, key=lambda first: first[0]) if firsts else None,
            not_compared=self.not_compared + other.not_compared,
            # Of several that is kept which is about more.
            reason=min(reasons, key=lambda why: (why == INCOMPLETE, why)) if reasons else "",
            steps=self.steps + other.steps,
            steps_off=self.steps_off + other.steps_off,
            last_off=max(self.last_off, other.last_off),
            factor_low=max(self.factor_low, other.factor_low),
            factor_high=min(self.factor_high, other.factor_high),
            offset_low=max(self.offset_low, other.offset_low),
            offset_high=min(self.offset_high, other.offset_high),
            window=max(self.window, other.window),
            radius=min(self.radius, other.radius),
            bits=self.bits + other.bits,
            telling=self.telling + other.telling,
            zeros=self.zeros + other.zeros,
            above=(min(self.above[0], other.above[0]), max(self.above[1], other.above[1])),
            line=max(self.line, other.line),
            groups=(self.groups[0] + other.groups[0], self.groups[1] + other.groups[1]),
            lengths=_joined(self.lengths, other.lengths),
            factor_bits=self.factor_bits + other.factor_bits,
            zero_bits=self.zero_bits + other.zero_bits,
            faults=_added(self.faults, other.faults),
        )

    @property
    def disagree(self) -> int:
        """Values that were compared and lie outside their radius."""
        return self.compared - self.agree

    @property
    def is_tested(self) -> bool:
        """True if a value was compared, and none is in doubt but where rows are missing: a fault would have shown."""
        return self.compared > 0 and (not self.not_compared or self.reason == INCOMPLETE)

    @property
    def fault(self) -> str:
        """Return the fix of the fault with which the values were reproduced; empty: they are as intended."""
        return next((label for label, apart, as_is in self.faults if apart == as_is), "") if not self.disagree else ""

    @property
    def constant(self) -> str:
        """Describe the one factor, or the one offset, by which several values disagree; empty if there is none."""
        if self.disagree < 2:
            return ""
        if self.factor_low <= self.factor_high:
            factor = _shortest(self.factor_low, self.factor_high)
            return f"{factor} times the recomputed value" if float(factor) else "0, and not the recomputed value"
        if self.offset_low <= self.offset_high:
            offset = _shortest(self.offset_low, self.offset_high)
            return f"the recomputed value {'' if offset.startswith('-') else '+'}{offset}"
        return ""

    @property
    def shape(self) -> str:
        """Describe how the disagreeing values differ from the recomputed ones."""
        if not self.disagree:
            return ""
        where = ""
        if self.first is not None and self.steps_off < self.steps:
            first, last = self.first[0], self.last_off
            where = f" at step {first}" if first == last else f" in {self.steps_off:,} of {self.steps:,} steps"
        off, groups = self.groups
        if off < groups:
            where += f", in {off:,} of {groups:,} groups"
        shortest, longest, shortest_agreeing, longest_agreeing = self.lengths
        if shortest > longest_agreeing >= 0:
            where += f", only in rows of {shortest:g} tokens or more"
        elif 0 <= longest < shortest_agreeing < math.inf:
            where += f", only in rows of up to {longest:g} tokens"
        if self.constant:
            return f"{self.constant}{where}"
        if self.disagree > 1 and self.line <= _STRAIGHT:
            return f"a straight line of the recomputed value in every step (R2 at least {1 - self.line:.6g}){where}"
        if self.disagree > 1 and self.above[0] > 0 and self.above[1] < 2 * self.above[0]:
            return f"between {self.above[0]:.4g} and {self.above[1]:.4g} above the recomputed value{where}"
        return f"no constant factor or offset{where}"


def _added(
    left: tuple[tuple[str, int, int], ...], right: tuple[tuple[str, int, int], ...]
) -> tuple[tuple[str, int, int], ...]:
    if not left or not right:
        return left or right
    counts = {label: (apart, as_is) for label, apart, as_is in left}
    for label, apart, as_is in right:
        before = counts.get(label, (0, 0))
        counts[label] = (before[0] + apart, before[1] + as_is)
    return tuple(sorted((label, *count) for label, count in counts.items()))


def _joined(left: Lengths, right: Lengths) -> Lengths:
    return min(left[0], right[0]), max(left[1], right[1]), min(left[2], right[2]), max(left[3], right[3])


_STRAIGHT = 0.01
"""Distance from a line, one minus R2, up to which values are called one."""

AuditTally = Mapping[str, QuantityTally]
"""Name of a quantity to its tally."""


def add_tallies(left: AuditTally, right: AuditTally) -> dict[str, QuantityTally]:
    """Add the tallies of two parts of a run, quantity by quantity."""
    total = dict(left)
    for name, tally in right.items():
        total[name] = total[name] + tally if name in total else tally
    return total


@dataclass(frozen=True)
class ComparedValue:
    """A logged value beside the recomputed one; see `tally_value`."""

    stage: str
    step: int
    logged: float
    recomputed: float
    radius: float
    doubt: str
    rounding: float = 0.0

    def tally(self) -> QuantityTally:
        """Compare them."""
        values = self.logged, self.recomputed, self.radius
        return tally_value(self.stage, self.step, *values, self.doubt, self.rounding)


def tally_value(
    stage: str, step: int, logged: float, recomputed: float, radius: float, doubt: str, rounding: float = 0.0
) -> QuantityTally:
    """Compare one value of a step.

    Args:
        stage: one of `STAGES`.
        step: optimizer step.
        logged: the value in the log.
        recomputed: the value that the rows give.
        radius: how far rounding may put the two apart.
        doubt: why a disagreement is inconclusive; empty if it is not.
        rounding: the part of the radius that is due to the digits of the log.
    """
    units = _units(abs(logged - recomputed), radius) if logged != recomputed else 0.0
    if math.isnan(logged) and math.isnan(recomputed):
        units = 0.0
    agrees = units <= 1
    if not agrees and doubt:
        return QuantityTally(stage, not_compared=1, reason=doubt)
    zeros = int(agrees and abs(logged) <= radius)
    tally = QuantityTally(stage, compared=1, agree=int(agrees), worst=units, steps=1, radius=radius, zeros=zeros)
    if agrees:
        return tally
    factors, offsets = _interval(logged, recomputed, radius, rounding)
    first = (step, "", logged, recomputed)
    ends = (*factors, *offsets)
    distance = min(abs(logged), abs(logged - recomputed))
    bits = rounded_down(math.log2(distance / radius)) if distance > radius > 0 and math.isfinite(distance) else 0.0
    above = (logged - recomputed,) * 2
    telling = int(bits > 0)
    info = rounded_down(_factor_bits(factors, recomputed, 0.0 if stage == "kl" else radius))
    is_zero = abs(logged) <= radius < math.inf
    of_zero = rounded_down(math.log2(units)) if is_zero and radius > 0 and math.isfinite(units) else 0.0
    return QuantityTally(
        stage, 1, 0, units, first, 0, "", 1, 1, step, *ends, 1, radius, bits, telling, 0, above, math.inf, info, of_zero
    )


def rounded_down(bits: float) -> float:
    """Bits to 1/1024 of one: their sums are the same in any order."""
    return math.floor(bits * 1024) / 1024 if math.isfinite(bits) else bits


def _factor_bits(factors: tuple[float, float], recomputed: float, radius: float) -> float:
    """Return the evidence of a value for a whole factor or one over it, in bits.

    Of a mean of counts or of rewards of a few kinds many multiples are such means, too: every p-th of those with the
    denominator of p / q, the simplest fraction within the radius. A KL, of radius 0 here, is no such mean.
    """
    low, high = factors
    if not 0 < low < high:
        return 0.0
    width = high - low if low > 1 else 1 / low - 1 / high
    bits = -math.log2(width) if 0 < width < 1 else 0.0
    least, most = abs(recomputed) - radius, abs(recomputed) + radius
    if not radius:
        return bits
    return min(bits, math.log2(_simplest(least, most)[0])) if 0 < least < most < math.inf else 0.0


def _simplest(low: float, high: float) -> tuple[int, int]:
    """Numerator and denominator of the simplest fraction between two numbers above 0."""
    ceiling = math.ceil(low)
    if ceiling <= high:
        return ceiling, 1
    numerator, denominator = _simplest(1 / (high - ceiling + 1), 1 / (low - ceiling + 1))
    return (ceiling - 1) * numerator + denominator, numerator


def _shortest(low: float, high: float) -> str:
    """Return the number of fewest digits between two numbers, six at most.

    >>> _shortest(-1.000001, -0.999998), _shortest(-0.1, 0.2), _shortest(1.69999, 1.70001), _shortest(9.999, 10.001)
    ('-1', '0', '1.7', '10')
    """
    if low <= 0 <= high:
        return "0"
    middle = (low + high) / 2
    shorter = (float(f"{middle:.{digits}g}") for digits in range(1, 7))
    return f"{next((x for x in shorter if low <= x <= high), middle):.6g}"


def _units(gap: float, radius: float) -> float:
    if math.isnan(gap):
        return math.inf
    return gap / radius if radius > 0 else math.inf


def _interval(
    logged: float, recomputed: float, radius: float, rounding: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the factors and the offsets that carry a recomputed value to the logged one.

    A factor multiplies what arithmetic lost, too, and the digits of the log are lost after it.
    """
    gap = logged - recomputed
    if not math.isfinite(gap) or not math.isfinite(radius):
        return (math.inf, -math.inf), (math.inf, -math.inf)
    offsets = (gap - radius, gap + radius)
    if recomputed == 0:
        return (math.inf, -math.inf), offsets
    return quotients(logged, rounding, recomputed, radius - rounding), offsets
