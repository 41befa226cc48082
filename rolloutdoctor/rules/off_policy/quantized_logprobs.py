"""RDO005: log-probs that were rounded to few digits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent, too_few
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

SIDES = {"sampler": "the sampler", "trainer": "the trainer"}

BINARY, DECIMAL = {"bfloat16": 7, "float16": 10}, {"1": 1, "2": 2, "3": 3, "4": 4}
"""Digits behind the first one of a number of each lattice, or behind the point; float32 has 23 binary ones."""

COUNTS = ("values", "positive", "power", "low_power", *BINARY, *(f"coarse:{name}" for name in BINARY), *DECIMAL)
"""Counts summed by row: `power` is the power of two below a value, `low_power` the same where floats of its size
have four decimal digits, else the limit of that."""

COARSE = 0.01
"""A spacing by which ratios are off as much as they differ in a healthy run."""

LARGE = 0.1
"""Log-softmax of float32 logits near 20 is a multiple of 2^-19: values closer to 0 have few digits anyway."""


class QuantizedLogProbs(TableRule):
    """Log-probs of the sampler or the trainer were rounded to few digits.

    ## What it does
    Checks whether the values lie on the grid of bfloat16 or float16, or have at most four decimal digits.

    ## Why it matters
    A bfloat16 near -8 is off by up to 0.016, and so is the log of every importance ratio, clip and KL made of it: noise
    that grows where a token was unlikely, where ratios matter most. Steps of 0.031 and log-probs above 0 were seen
    upstream.

    ## How it is measured
    Sampled tokens with log-probs of a size of 0.1 or more are tested: nearer to 0 a log-softmax has few digits anyway,
    and a policy that collapsed to exact zeros proves nothing. A finding requires that 99 % of at least 200 values lie
    on one grid and that less than 5 % would by chance (2^-16 for bfloat16, 2^-13 for float16, the spacing of float32
    over that of the digits for decimals). `ratio_error` is the standard deviation of the rounding in the log of a
    ratio, the mean spacing over the square root of 12; `coarse_share` is the share of tokens with a spacing above 0.01.
    It is a warning from a mean spacing of 2^-7 (0.0078), that of bfloat16 at 1, or if one of the values is above 0. If
    both columns lie on one grid, they may have been rounded when they were stored, and only what is computed from them
    here is limited. Logits in bfloat16 do not put log-probs on a grid: `sampler-mismatch` shows their noise.

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
    adds = tuple(f"{side}:{name}" for side in SIDES for name in COUNTS)
    needs_objective = False
    splits = ("train",)
    needs = ("rollout_log_probs", "old_log_probs")
    uses = ("response_mask",)

    least_values: int = 200
    warn_from: float = 2.0**-7
    """The spacing of bfloat16 at 1: half of it is the size of a healthy difference."""

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Count the values of each sampled row that lie on each lattice."""
        import numpy as np

        sample, columns = step.sample(), dict[str, "Tensor | None"]()
        if sample is None:
            return columns
        for side, log_probs in (("sampler", sample.sampler), ("trainer", sample.trainer)):
            values = log_probs.astype(np.float32)
            large = np.flatnonzero(abs(values) >= LARGE)
            counts = sample.among_all(sample.runs.at(large).sums(_counted(values[large])), len(step.batch))
            columns |= {f"{side}:{name}": x_N for name, x_N in zip(COUNTS, counts.unbind(1), strict=True)}
        return columns

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Add up the counts of each step."""
        return rows.group_by(STEP_KEY, maintain_order=True).agg(pl.sum(*self.adds))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step."""
        return run.rows

    def _coarsest(self, side: str) -> dict[str, pl.Expr]:
        """The coarsest lattice on which 99 % of a side's values lie, and many more than by chance; null if none.

        Its `name`, its mean `spacing`, and the shares `on` it, on it by `chance`, and with a `coarse` spacing.
        """
        total, power, low_power = (pl.sum(f"{side}:{name}") for name in ("values", "power", "low_power"))
        of = {
            name: {
                "spacing": power * 2.0**-digits / total,
                "chance": pl.lit(2.0 ** (digits - 23)),
                "coarse": pl.sum(f"{side}:coarse:{name}") / total,
            }
            for name, digits in BINARY.items()
        } | {
            name: {
                "spacing": pl.lit(10.0**-digits),
                "chance": (low_power * 2.0**-23 * 10**digits / total).clip(upper_bound=1.0),
                "coarse": pl.lit(float(10.0**-digits > COARSE)),
            }
            for name, digits in DECIMAL.items()
        }
        for name, each in of.items():
            each |= {"name": pl.lit(name), "on": pl.sum(f"{side}:{name}") / total}
        is_on = [(total >= self.least_values) & (each["on"] >= 0.99) & (each["chance"] < 0.05) for each in of.values()]
        spacings = [
            pl.when(condition).then(each["spacing"]) for condition, each in zip(is_on, of.values(), strict=True)
        ]
        coarsest = pl.concat_list(spacings).list.arg_max()
        names = ("name", "spacing", "on", "chance", "coarse")
        return {key: pl.concat_list(each[key] for each in of.values()).list.get(coarsest) for key in names}

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the coarseness of the values."""
        none = pl.when(pl.sum("sampler:values") > 0).then(0.0)
        lattices = [self._coarsest(side) for side in SIDES]
        spacing, coarse = (pl.coalesce(*(each[name] for each in lattices), none) for name in ("spacing", "coarse"))
        measures = {
            "ratio_error": (spacing / 12**0.5, "nats"),
            "mean_spacing": (spacing, "nats"),
            "coarse_share": (coarse, "share"),
        }
        for side in SIDES:
            values = pl.sum(f"{side}:values")
            measures[f"{side}_values"] = (values.cast(pl.Int64), "tokens")
            measures[f"{side}_bfloat16_share"] = (pl.sum(f"{side}:bfloat16") / values, "share")
            measures[f"{side}_four_digits_share"] = (pl.sum(f"{side}:4") / values, "share")
        return measures

    def _lattices(self, run: Measured) -> dict[str, dict[str, Any]]:
        """The coarsest lattice of each side that has one."""
        lattices = {side: run.table.select(**self._coarsest(side)).to_dicts()[0] for side in SIDES}
        return {side: lattice for side, lattice in lattices.items() if lattice["name"] is not None}

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few values with digits to look at."""
        fewest = min(run.count(f"{side}_values") for side in SIDES)
        few = too_few(fewest, "sampled log-prob", "of a size of a tenth or more", self.least_values)
        return None if few is None or self._lattices(run) else few

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning by size."""
        lattices = self._lattices(run)
        if not lattices:
            return None
        parts = []
        for side, lattice in lattices.items():
            name = lattice["name"]
            kind = f"{name} decimal digit{'' if name == '1' else 's'}" if name.isdigit() else name
            parts.append(
                f"{percent(lattice['on'])} of the log-probs of {SIDES[side]} are {kind} ({percent(lattice['chance'])} "
                f"expected by chance), with a mean spacing of {number(lattice['spacing'])} nats"
            )
        worst = max(lattice["spacing"] for lattice in lattices.values())
        above = sum(int(run.table[f"{side}:positive"].sum()) for side in lattices)
        if above:
            parts.append(f"{counted(above, 'value')} above 0")
        if len(lattices) > 1:
            parts.append("both columns are rounded, so they may have been rounded when they were stored")
        whose = "sampler and trainer" if len(lattices) > 1 else SIDES[next(iter(lattices))]
        return Judgement(
            severity=Severity.WARNING if worst >= self.warn_from or above else Severity.INFO,
            confirmed=True,
            headline=f"log-probs of {whose} are rounded: log-ratios are off by {number(worst / 12**0.5)} nats",
            message="; ".join(parts),
            evidence="the recorded values; log-probs near 0, where float32 itself has few digits, are excluded",
            advice="compute log-softmax in float32, and return and store float32",
        )


def _counted(values: "NDArray[np.float32]") -> "NDArray[np.float64]":
    """Return what each of some log-probs adds to `COUNTS`, ``[V] -> [V, K]``."""
    import numpy as np

    bits = values.view(np.int32)
    power = (bits & 0x7F800000).view(np.float32).astype(np.float64)
    columns = {"values": np.ones(len(values)), "positive": values > 0, "power": power}
    columns["low_power"] = np.minimum(power, 2.0**23 / 10 ** max(DECIMAL.values()))
    for name, digits in BINARY.items():
        columns |= {name: bits & ((1 << (23 - digits)) - 1) == 0, f"coarse:{name}": power * 2.0**-digits > COARSE}
    # A number with few decimal digits is one with more, too: none is looked for where these are not.
    left = np.arange(len(values))
    for name, digits in reversed(DECIMAL.items()):
        nearest = np.rint(values[left].astype(np.float64) * 10**digits) / 10**digits
        left = left[nearest.astype(np.float32) == values[left]]
        columns[name] = np.zeros(len(values))
        columns[name][left] = 1
    return np.stack([columns[name] for name in COUNTS], 1).astype(np.float64)
