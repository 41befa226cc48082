"""RDO005: log-probs that were rounded to few digits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.ops.by_step import ByStep
    from rolloutdoctor.rules.step import StepView

SIDES = {"sampler": "the sampler", "trainer": "the trainer"}

BINARY, DECIMAL = {"bfloat16": 7, "float16": 10}, {"1": 1, "2": 2, "3": 3, "4": 4}
"""Digits behind the first one of a number of each lattice, or behind the point; float32 has 23 binary ones."""

LATTICES = (*BINARY, *DECIMAL)
"""Coarsest first among binary and among decimal ones."""

EXPONENTS = 256
"""Of a float32: 127 is that of numbers from 1 to 2."""

COARSE = 0.01
"""A spacing by which ratios are off as much as they differ in a healthy run."""

LARGE = 0.1
"""Log-softmax of float32 logits near 20 is a multiple of 2^-19: values closer to 0 have few digits anyway."""


LOOKED_AT = 2**12
"""Values of a step: digits are the same in all of them."""


@dataclass(frozen=True)
class LatticeTally(Sums):
    """What `quantized-logprobs` adds up, under names like ``sampler:bfloat16``.

    Attributes:
        values: side to sampled log-probs of a size of a tenth or more.
        positive: side to those above 0.
        on: lattice to those of them that lie on it.
        chance: lattice to how many would by chance.
        step: lattice to the sum of its spacings at these.
        coarse: lattice to how many of these have a spacing above a hundredth.
    """

    values: Mapping[str, float] = by_name()
    positive: Mapping[str, float] = by_name()
    on: Mapping[str, float] = by_name()
    chance: Mapping[str, float] = by_name()
    step: Mapping[str, float] = by_name()
    coarse: Mapping[str, float] = by_name()

    def found(self, side: str, least: int) -> str | None:
        """The coarsest lattice on which 99 % of a side's values lie, and many more than by chance."""
        total = self.values.get(side, 0.0)
        if total < least:
            return None
        names = [lattice for lattice in LATTICES if self.on.get(f"{side}:{lattice}", 0.0) >= 0.99 * total]
        names = [lattice for lattice in names if self.chance[f"{side}:{lattice}"] < 0.05 * total]
        return min(names, key=lambda lattice: -self.step[f"{side}:{lattice}"], default=None)


@dataclass(frozen=True)
class QuantizedLogProbs(Rule[LatticeTally]):
    """Log-probs of the sampler or the trainer were rounded to few digits.

    ## What it does
    Looks whether the values lie on the lattice of bfloat16 or float16, or have at most four decimal digits.

    ## Why it matters
    A bfloat16 near -8 is off by up to 0.016, and so is the log of every importance ratio, clip and KL made of it: noise
    that grows where a token was unlikely, where ratios matter most. Steps of 0.031 and log-probs above 0 were seen
    upstream.

    ## How it is measured
    On sampled tokens with log-probs of a size of 0.1 or more: nearer to 0 a log-softmax has few digits anyway, and a
    policy that collapsed to exact zeros proves nothing. Found where 99 % of at least 200 values lie on one lattice and
    less than 5 % would by chance (2^-16 for bfloat16, 2^-13 for float16, the spacing of float32 over that of the
    digits for decimals). `ratio_error` is the standard deviation of the rounding in the log of a ratio, the mean
    spacing over the square root of 12; `coarse_share` the tokens with a spacing above 0.01. A warning from a mean
    spacing of 0.01 on, where ratios are off by as much as they differ in a healthy run, or where one of the values is
    above 0. Where both columns lie on one lattice, they may have been rounded when they were stored, and only what is
    computed from them here is limited. Logits in bfloat16 are no lattice of log-probs: `sampler-mismatch` shows their
    noise.

    ## What to do
    Compute log-softmax in float32 and return and store float32.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> rollout = [[-round(1.37 + 0.713 * place, 1) for place in range(16)]] * 16
    >>> policy = [[-1.3712 - 0.7134 * place for place in range(16)]] * 16
    >>> batch = toy_batch([[1] * 16], lengths=16, policy=policy, rollout=rollout)
    >>> diagnose_one("RDO005", batch, trainer=None)
    'RDO005 warning confirmed: ratio_error 0.02887'
    """

    code = "RDO005"
    name = "quantized-logprobs"
    references = (
        "https://github.com/AI-Hypercomputer/maxtext/pull/5231",
        "https://github.com/THUDM/slime/pull/892",
        "https://github.com/huggingface/transformers/issues/31267",
    )
    tally = LatticeTally
    needs_objective = False
    splits = ("train",)

    least_values: int = 200
    warn_from: float = 2.0**-7
    """The spacing of bfloat16 at 1: half of it is the size of a healthy difference."""

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs."""
        return frozenset({"rollout_log_probs", "old_log_probs"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask."""
        return frozenset({"response_mask"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sampled tokens."""
        from rolloutdoctor.evaluation.sampled_rows import gap_of

        gap = gap_of(block)
        return {} if gap is None else gap.sampled

    def measure_each(self, steps: "StepView") -> list[LatticeTally]:
        """Count the values of each step that lie on each lattice."""
        import numpy as np

        from rolloutdoctor.ops.by_step import named_counts

        sample = steps.sample(self.code)
        if sample is None:
            return steps.nothing(LatticeTally)
        measured, tokens = steps.token_measures[self.code], sample.tokens_by_step
        found = [_counted(measured[side].float().numpy(), tokens) for side in SIDES]
        names = [f"{side}:{lattice}" for side in SIDES for lattice in LATTICES]

        def of_sides(name: str, names: list[str]) -> list[dict[str, float]]:
            return named_counts(np.column_stack([one[name] for one in found]), names)

        return steps.tallies(
            LatticeTally,
            **{name: of_sides(name, [*SIDES]) for name in ("values", "positive")},
            **{name: of_sides(name, names) for name in ("on", "chance", "step", "coarse")},
        )

    def measures(self, tally: LatticeTally) -> Mapping[str, Measure]:
        """How coarse the values are."""
        found: dict[str, Measure] = {}
        lattices = {side: tally.found(side, self.least_values) for side in SIDES}
        side = next((side for side, lattice in lattices.items() if lattice), "sampler")
        name, total = f"{side}:{lattices[side]}", tally.values.get(side, 0.0)
        spacing = ratio(tally.step.get(name, 0.0), total)
        found["ratio_error"] = Measure(None if spacing is None else spacing / 12**0.5, "nats")
        found["mean_spacing"] = Measure(spacing, "nats")
        found["coarse_share"] = Measure(ratio(tally.coarse.get(name, 0.0), total), "share")
        for each in SIDES:
            count = tally.values.get(each, 0.0)
            found[f"{each}_values"] = Measure(int(count), "tokens")
            share = ratio(tally.on.get(f"{each}:bfloat16", 0.0), count)
            found[f"{each}_bfloat16_share"] = Measure(share, "share")
            share = ratio(tally.on.get(f"{each}:4", 0.0), count)
            found[f"{each}_four_digits_share"] = Measure(share, "share")
        return found

    def inconclusive_reason(self, run: LatticeTally, context: Context) -> Missing | None:
        """Too few values with digits to look at."""
        fewest = min(run.values.get(side, 0.0) for side in SIDES)
        if fewest >= self.least_values or any(run.found(side, self.least_values) for side in SIDES):
            return None
        return Missing(
            f"{counted(fewest, 'sampled log-prob')} of a size of a tenth or more, and it takes {self.least_values}",
            "widen --steps",
        )

    def judge(self, run: LatticeTally, context: Context) -> Judgement | None:
        """A warning by size."""
        lattices = {side: run.found(side, self.least_values) for side in SIDES}
        if not any(lattices.values()):
            return None
        parts, worst = [], 0.0
        for side, lattice in lattices.items():
            if lattice is None:
                continue
            name, total = f"{side}:{lattice}", run.values[side]
            spacing = run.step[name] / total
            worst = max(worst, spacing)
            kind = f"{lattice} decimal digit{'' if lattice == '1' else 's'}" if lattice.isdigit() else lattice
            parts.append(
                f"{percent(run.on[name] / total)} of the log-probs of {SIDES[side]} are {kind} "
                f"({percent(run.chance[name] / total)} would by chance), with a mean spacing of {number(spacing)} nats"
            )
        above = sum(run.positive.get(side, 0.0) for side, lattice in lattices.items() if lattice)
        if above:
            parts.append(f"{counted(above, 'value')} above 0")
        both = all(lattices.values())
        if both:
            parts.append("both columns are, so that they may have been rounded when they were stored")
        whose = "sampler and trainer" if both else next(SIDES[side] for side, each in lattices.items() if each)
        return Judgement(
            severity=Severity.WARNING if worst >= self.warn_from or above else Severity.INFO,
            confirmed=True,
            headline=f"log-probs of {whose} are rounded: ratios are off by {number(worst / 12**0.5)} nats",
            message="; ".join(parts),
            evidence="the values are in the file; log-probs near 0, where float32 has few digits, do not count",
            advice="compute log-softmax in float32, and return and store float32",
        )


def _counted(values: "NDArray[np.float32]", tokens: "ByStep") -> "dict[str, NDArray[Any]]":
    """Count for the fields of `LatticeTally`: ``[S]`` for `values` and `positive`, ``[S, K]`` for those of lattices.

    Args:
        values: log-probs of one side, ``[V]``.
        tokens: these by step.
    """
    import numpy as np

    large = np.flatnonzero(abs(values) >= LARGE)
    cuts = tokens.at(large).runs.cuts.tolist()
    large = np.concatenate([large[start:stop][:LOOKED_AT] for start, stop in pairwise(cuts)])
    values, tokens = values[large], tokens.at(large)
    bits, positive = values.view(np.int32), tokens.count(values > 0)
    spacing_KE, chance_KE = _lattices()
    many_SE = tokens.histogram((bits >> 23) & 0xFF, EXPONENTS)

    def total(x_KE: "NDArray[Any]") -> "NDArray[np.float64]":
        return np.asarray((many_SE[:, None] * x_KE).sum(2), np.float64)

    on = {name: tokens.count(bits & ((1 << (23 - digits)) - 1) == 0) for name, digits in BINARY.items()}
    # A number with few decimal digits is one with more, too: none is looked for where these are not.
    left, of_left = values, tokens
    for name, digits in reversed(DECIMAL.items()):
        nearest = np.rint(left.astype(np.float64) * 10**digits) / 10**digits
        is_on = np.flatnonzero(nearest.astype(np.float32) == left)
        left, of_left = left[is_on], of_left.at(is_on)
        on[name] = of_left.size
    return {
        "values": tokens.size,
        "positive": positive,
        "on": np.stack([on[name] for name in LATTICES], 1),
        "chance": total(chance_KE),
        "step": total(spacing_KE),
        "coarse": total(spacing_KE > COARSE),
    }


@cache
def _lattices() -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
    """Spacing of each lattice, and the chance that a float32 lies on it, by the exponent of this: ``[K, E]`` each."""
    import numpy as np

    power_E = np.ldexp(1.0, np.arange(EXPONENTS) - 127)
    spacing = [power_E * 2.0**-digits for digits in BINARY.values()]
    spacing += [np.full(EXPONENTS, 10.0**-digits) for digits in DECIMAL.values()]
    spacing_KE = np.stack(spacing)
    return spacing_KE, np.minimum(power_E * 2.0**-23 / spacing_KE, 1)
