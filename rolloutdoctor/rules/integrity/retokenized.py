"""RDI010: turns that were tokenized again before training."""

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.ops.bounds import quantile_above_median
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

_STRATA, _LOWEST = 5, 4 * (127 - 20)
"""As `evaluation.turn_starts` has them."""


class Retokenized(TableRule):
    """Turns were tokenized again: their first tokens are not those that were sampled.

    ## What it does
    Compares how far old and rollout log-probs are apart in the first four tokens of every turn behind masked tokens
    with the other trained tokens of the same responses.

    ## Why it matters
    A conversation that is decoded to text and tokenized again has different tokens where turns meet. The log-probs of
    what was sampled are then compared with those of something else, and the ratio is wrong exactly there.

    ## How it is measured
    Absolute differences are counted in bins, four to each doubling, separately for five ranges of the log-prob, because
    rounding moves unlikely tokens more; the other tokens are weighted to the same mix of ranges. It is a warning if,
    over at least 20 turns, the median at the starts is at least five times the other, with bin edges taken against the
    finding, and at least 0.01 nats. It is information if the median is at least twice the other and remains so when
    five standard deviations of the number of turns that start above a median are allowed for. Clean excludes a median
    that would be a warning. Responses with a single turn cannot show it. A run file has one column of token ids;
    importers that see two compare them.

    ## What to do
    Train on the ids that the engine returned; do not tokenize a conversation again.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> mask = [[1] * 20 + [0] * 4 + [1] * 20] * 20
    >>> rollout = [[-1.001] * 24 + [-1.5] * 4 + [-1.001] * 16] * 20
    >>> batch = toy_batch([[1, 0] * 10], mask=mask, policy=-1.0, rollout=rollout)
    >>> diagnose_one("RDI010", batch, trainer=None)
    'RDI010 warning exposed: median_ratio_low 409.6'
    """

    code = "RDI010"
    name = "retokenized"
    references = (
        "https://github.com/huggingface/trl/issues/5224",
        "https://github.com/volcengine/verl/issues/6719",
        "https://github.com/THUDM/slime/issues/117",
    )
    adds = ("turns",)
    needs_objective = False
    splits = ("train",)
    needs = ("rollout_log_probs", "old_log_probs", "response_mask")

    fewest: int = 20
    times: float = 5.0
    nats: float = 0.01
    times_noted: float = 2.0
    beyond_chance: float = 5.0
    """Standard deviations of how many turns start above a median: tokens of one turn need not be independent."""

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the turns of each row behind its first."""
        from rolloutdoctor.rules.measures.turn_starts import turn_starts

        # Without a masked token there is one turn, and without a trained one none.
        is_cut = bool(((block.trained_n < block.runs.lengths) & (block.trained_n > 0)).any())
        return {"turns": block.row_sum(turn_starts(block)) if is_cut else block.trained_n * 0}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Tokens by distance of old from rollout log-probs, ``near:STRATUM:BIN`` in the first tokens of these turns.

        ``rest:STRATUM:BIN`` are other tokens of these rows. Tokens are looked at again only where there are turns.
        """
        from rolloutdoctor.rules.measures.turn_starts import distances

        turns_N = step.token_measures.get(self.code, {}).get("turns")
        if turns_N is None or not bool((turns_N > 0).any()):
            return {}
        each = zip(("near", "rest"), distances(step.batch, turns_N > 0), strict=True)
        return {f"{where}:{place}": count for where, counts in each for place, count in counts.items()}

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """The same of several steps: nothing of them is looked at again where none has such turns."""
        turns_N = steps.token_measures.get(self.code, {}).get("turns")
        is_cut = turns_N is not None and bool((turns_N > 0).any())
        return super().measure_steps(steps) if is_cut else [{} for _ in steps.each]

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """The turns of each step, and the rows that have some."""
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(pl.sum("turns"))
        return with_places(sums, rows.select(*NAMES, value="turns"), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The steps and their rows, then one line for each step and bin of distances."""
        parts = pl.col("metric").str.split_exact(":", 2).struct.rename_fields(["where", "stratum", "bin"])
        bins = run.metrics.select(*STEP_KEY, parts, count="logged").unnest("metric")
        place = pl.col("bin").cast(pl.Int64)
        edges = {"low": pl.when(place > 0).then(_edge(place)).otherwise(0.0), "high": _edge(place + 1)}
        return pl.concat([run.rows, bins.with_columns(**edges)], how="diagonal_relaxed")

    def _medians(self, at: float = 0.5) -> dict[str, pl.Expr]:
        """Bounds of the median distance at the start of turns and elsewhere, at the same mix of strata, if any.

        Args:
            at: another quantile at the start of turns, below 1.
        """
        count, is_near = pl.col("count"), pl.col("where") == "near"
        scales = []
        for stratum in map(str, range(_STRATA)):
            near, rest = (count.filter(is_part, pl.col("stratum") == stratum).sum() for is_part in (is_near, ~is_near))
            scales.append(pl.when(pl.col("stratum") == stratum).then(near / rest))
        scale, medians = pl.coalesce(scales), {}
        for name, chosen, weight, share in (
            ("start", is_near & scale.is_finite(), count, at),
            ("other", ~is_near & (scale > 0), count * scale, 0.5),
        ):
            for bound in ("low", "high"):
                edge, weights = pl.col(bound).filter(chosen), weight.filter(chosen)
                # The sum of all is that of the last but for rounding.
                is_enough = weights.sort_by(edge).cum_sum() >= weights.sum() * share * (1 - 1e-12)
                medians[f"{name}_median_{bound}"] = edge.sort().filter(is_enough).first()
        return medians

    def quantities(self) -> Mapping[str, Quantity]:
        """Medians as bounds of their bins."""
        medians = self._medians()
        low, high = medians["start_median_low"], medians["other_median_high"]
        return {
            "median_ratio_low": (pl.when(low > 0).then(low / high), "1"),
            "turns": (pl.sum("turns").cast(pl.Int64), "turns"),
            **{name: (median, "nats") for name, median in medians.items()},
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the number of turns."""
        return f"{int(place['value']):,} turns behind its first"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Some turns, and too few."""
        turns = run.count("turns")
        if not turns or (turns >= self.fewest and run["start_median_low"] is not None):
            return None
        return Missing(
            f"{counted(turns, 'turn')} after masked tokens; needs {self.fewest} with log-probs",
            "widen --steps, or record more steps",
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Responses of a single turn."""
        return None if run["turns"] else "no response has a second turn after masked tokens"

    def excluded(self, run: Measured, context: Context) -> Excluded | None:
        """Bound the gap at the first tokens of most turns."""
        start_median, other = run["start_median_low"], run["other_median_high"]
        if start_median is None or other is None:
            return None
        turns = run.count("turns")
        at = quantile_above_median(turns)
        return Excluded(
            code=self.code,
            effect="a median distance at the start of turns",
            bound=run.table.select(self._medians(at)["start_median_high"]).item() if at < 1 else inf,
            unit="nats",
            estimate=start_median,
            limit=max(self.nats, self.times * other),
            seen=turns,
            of="turns",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where the starts of turns stand out, information where they do by less."""
        near_low, rest_high, turns = run["start_median_low"], run["other_median_high"], run.count("turns")
        if turns < self.fewest or near_low is None or rest_high is None:
            return None
        warns = near_low >= max(self.nats, self.times * rest_high)
        least = max(0.5 - self.beyond_chance / (2 * sqrt(turns)), 0.0)
        is_beyond_chance = run.table.select(self._medians(least)["start_median_low"]).item() > rest_high
        if not warns and (near_low < self.times_noted * rest_high or not is_beyond_chance):
            return None
        start = f"{number(near_low)} to {number(run['start_median_high'])} nats"
        other = f"{number(run['other_median_low'])} to {number(rest_high)}"
        return Judgement(
            severity=Severity.WARNING if warns else Severity.INFO,
            confirmed=False,
            headline=(
                f"sampler and trainer differ by {number(near_low)} nats at turn starts and {number(rest_high)} "
                "elsewhere: the conversation was tokenized again"
            ),
            message=(
                f"the median difference is {start} in the first four tokens of {counted(turns, 'turn')} and {other} "
                "in other tokens of the same responses"
            ),
            evidence="sampler and trainer log-probs, compared at equal token probability",
            advice="train on the token ids that the engine returned; do not re-tokenize the conversation"
            if warns
            else "check whether the engine computes the first tokens of a turn differently: other tokens differ more",
        )


def _edge(bin_: pl.Expr) -> pl.Expr:
    """The lower bound of a bin."""
    place = bin_ + _LOWEST
    return (1 + place % 4 / 4) * pl.lit(2.0) ** (place // 4 - 127)
