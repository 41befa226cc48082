"""RDA006: advantages of tokens that do not fit the mask."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.required_columns import advantage_columns, has_time_axis
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class MaskTally(Sums):
    """What `advantage-mask-mismatch` adds up.

    Attributes:
        tokens: trained tokens.
        zero_tokens: those with an advantage of 0 in a row that has another elsewhere.
        zero_rows: their rows.
        dead_tokens: trained tokens of rows that have 0 everywhere, though the reward gives another advantage.
        dead_rows: their rows.
        varying_rows: rows whose trained tokens have different advantages.
        spread: the largest difference in a row.
        faulty_rows: rows with trained tokens of 0 or different ones.
        outside_tokens: masked tokens whose advantage is neither 0 nor one of the row's trained tokens.
        outside_mass: sum of their absolute values.
        mass: the same over all tokens.
    """

    tokens: int = 0
    zero_tokens: int = 0
    zero_rows: int = 0
    dead_tokens: int = 0
    dead_rows: int = 0
    varying_rows: int = 0
    spread: float = largest()
    faulty_rows: int = 0
    outside_tokens: int = 0
    outside_mass: float = 0.0
    mass: float = 0.0


@dataclass(frozen=True)
class AdvantageMaskMismatch(Rule[MaskTally]):
    """Advantages of tokens do not fit the mask: 0 on trained tokens, or different ones in a row.

    ## What it does
    For estimators with one advantage a row, looks at the logged advantages of its tokens: all trained tokens of a row
    must have the same, and none of them 0 while the row has another advantage.

    ## Why it matters
    An advantage that was masked before it was given to other rows or turns, or shifted against the mask, trains
    tokens with 0: with N turns and the last one's advantage copied to all, (N - 1) / N of the rows learn nothing.
    No metric of the trainer shows it.

    ## How it is measured
    `zero_token_share` is the share of trained tokens with an advantage of 0 in rows that have another one, on other
    tokens or in the column advantage; rows that are 0 as a whole count, in `dead_rows`, where the reward gives them
    another advantage and no known cause explains the logged ones. Different values in a row count beyond the rounding
    radius of its advantage. `outside_tokens` are masked ones with a value that is neither 0 nor one of its row's
    trained tokens: the mask keeps these out of the loss, so alone they are information. Trainers that give every
    response token its row's advantage, masked or not, have none. Estimators with a time axis (GAE, discounted
    returns, credit by turn) have an advantage for each token, and are not looked at.

    ## What to do
    Give every row its own scalar advantage, and multiply that by the row's own mask.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> tokens = [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]]
    >>> batch = toy_batch([[1, 0]], mask=[[1, 1, 1], [1, 1, 1]], per_token={"advantages": tokens})
    >>> diagnose_one("RDA006", batch, trainer="trl", scale_rewards="none")
    'RDA006 error confirmed: rows 1'
    """

    code = "RDA006"
    name = "advantage-mask-mismatch"
    references = (
        "https://github.com/NovaSky-AI/SkyRL/issues/1492",
        "https://github.com/volcengine/verl/issues/1527",
    )
    tally = MaskTally
    stages = ("advantages",)

    def inapplicable_reason(self, context: Context) -> str | None:
        """Return why the advantages of a row may differ from token to token."""
        if context.objective is None or not has_time_axis(context.objective):
            return None
        return "the estimator gives every token an advantage of its own"

    def columns(self, context: Context) -> frozenset[str]:
        """Advantages of tokens, the mask, and what the advantages need; nothing for estimators with a time axis."""
        if context.objective is None or has_time_axis(context.objective):
            return frozenset()
        return advantage_columns(context.objective) | {"advantages", "response_mask"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The advantage of the row."""
        return frozenset({"advantage"}) if self.columns(context) else frozenset()

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Reduce the advantages of each row: on trained and on masked tokens."""
        import torch

        from rolloutdoctor.audit.logged import measure_advantages

        if not block.has("advantages", "response_mask"):
            return {}
        value_T, trained_T = block.column("advantages").double(), block.trained_T
        ends = measure_advantages(block)
        low_T, high_T = (block.runs.expand(ends[name]) for name in ("low", "high"))
        masked_T = ~trained_T & (value_T != 0) & value_T.isfinite()
        # A row without a trained token has no value to compare with.
        odd_T = masked_T & (low_T <= high_T) & ((value_T < low_T) | (value_T > high_T))
        size_T = value_T.abs().nan_to_num(0.0, 0.0, 0.0)
        return {
            **ends,
            "tokens": block.row_sum(trained_T),
            "zero": block.row_sum(trained_T & (value_T == 0)),
            "masked": block.row_sum(masked_T),
            "outside": block.row_sum(odd_T),
            "outside_mass": block.row_sum(torch.where(odd_T, size_T, 0.0)),
            "mass": block.row_sum(size_T),
        }

    def measure_each(self, steps: "StepView") -> list[MaskTally]:
        """Count the tokens and rows of each step."""
        found, by_step = self._faults(steps), steps.by_step
        if found is None:
            return steps.nothing(MaskTally)
        row = steps.token_measures[self.code]
        zero_N, varying_N, dead_N = found["zero"], found["varying"], found["dead"]
        return steps.tallies(
            MaskTally,
            tokens=by_step.count(row["tokens"]),
            zero_tokens=by_step.count(row["zero"] * zero_N),
            zero_rows=by_step.count(zero_N),
            dead_tokens=by_step.count(row["zero"] * dead_N),
            dead_rows=by_step.count(dead_N),
            varying_rows=by_step.count(varying_N),
            spread=by_step.only(varying_N).high((row["high"] - row["low"])[varying_N]),
            faulty_rows=by_step.count(zero_N | varying_N),
            outside_tokens=by_step.count(row["outside"]),
            outside_mass=by_step.sum(row["outside_mass"]),
            mass=by_step.sum(row["mass"]),
        )

    def _faults(self, step: "StepView") -> "Mapping[str, Tensor] | None":
        """Rows with trained tokens of 0, with different ones, and with 0 throughout, ``[N]`` bool each."""
        return step.cached(self.code, lambda: self._found(step))

    def _found(self, step: "StepView") -> "Mapping[str, Tensor] | None":
        rows, row = step.rows, step.token_measures.get(self.code)
        if rows is None or rows.advantage_N is None or not row:
            return None
        radius_N = step.advantage_radius()
        low_N, high_N, zero_N = row["low"], row["high"], row["zero"]
        trained_N = row["tokens"] > 0
        varying_N = trained_N & (high_N - low_N > 2 * radius_N)
        everywhere_N = trained_N & (zero_N == row["tokens"])
        stated_N = step.batch.per_row.get("advantage")
        elsewhere_N = (low_N < 0) | (high_N > 0) | (row["masked"] > 0)
        if stated_N is not None:
            elsewhere_N = elsewhere_N | (stated_N.abs() > radius_N)
        is_zero_N = trained_N & (zero_N > 0) & elsewhere_N
        return {
            "zero": is_zero_N,
            "varying": varying_N,
            "dead": everywhere_N & ~is_zero_N & (rows.advantage_N.abs() > radius_N),
        }

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The rows with most trained tokens of 0, or the widest range."""
        found = self._faults(step)
        if found is None:
            return ()
        row = step.token_measures[self.code]
        faulty_N = found["zero"] | found["varying"]
        weight_N = (row["zero"] * found["zero"] + found["varying"]) * faulty_N

        def note(number_of: int) -> str:
            zero, tokens = int(row["zero"][number_of]), int(row["tokens"][number_of])
            low, high = float(row["low"][number_of]), float(row["high"][number_of])
            return f"{zero} of {tokens} trained tokens have an advantage of 0; they range from {low:.4g} to {high:.4g}"

        return step.worst_rows(weight_N, note, KEEP_EXAMPLES)

    def measures(self, tally: MaskTally) -> Mapping[str, Measure]:
        """How many rows and tokens."""
        return {
            "rows": Measure(tally.faulty_rows, "rows"),
            "zero_tokens": Measure(tally.zero_tokens, "tokens"),
            "zero_token_share": Measure(ratio(tally.zero_tokens, tally.tokens), "share"),
            "dead_rows": Measure(tally.dead_rows, "rows"),
            "varying_rows": Measure(tally.varying_rows, "rows"),
            "largest_spread": Measure(tally.spread, "advantage"),
            "outside_tokens": Measure(tally.outside_tokens, "tokens"),
            "outside_mass_share": Measure(ratio(tally.outside_mass, tally.mass), "share"),
        }

    def inconclusive_reason(self, run: MaskTally, context: Context) -> Missing | None:
        """No trained token has an advantage."""
        if run.tokens or not self.columns(context):
            return None
        return Missing("no step has a trained token with a logged advantage", "record advantages for every row")

    def judge(self, run: MaskTally, context: Context) -> Judgement | None:
        """An error where trained tokens have another advantage than their row; outside of the mask information."""
        dead = "advantages" in context.unexplained and run.dead_rows > 0
        if not run.faulty_rows and not dead:
            return self._outside(run)
        zero = run.zero_tokens + (run.dead_tokens if dead else 0)
        rows = run.faulty_rows + (run.dead_rows if dead else 0)
        parts = []
        if zero:
            parts.append(
                f"{counted(zero, 'trained token')} ({percent(ratio(zero, run.tokens))}) have an advantage of 0 in rows "
                "whose advantage is another"
            )
        if run.varying_rows:
            parts.append(
                f"{counted(run.varying_rows, 'row')} have different advantages on their trained tokens, up to "
                f"{number(run.spread)} apart"
            )
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"advantages of {counted(rows, 'row')} do not fit the mask: "
            f"{percent(ratio(zero, run.tokens))} of trained tokens have 0",
            message="; ".join(parts),
            evidence="the logged advantages of the tokens, and an estimator that gives one to each row",
            advice="give every row its own scalar advantage, and multiply that by the row's own mask",
        )

    def _outside(self, run: MaskTally) -> Judgement | None:
        if not run.outside_tokens:
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"{counted(run.outside_tokens, 'masked token')} with an advantage other than their row's "
            f"({percent(ratio(run.outside_mass, run.mass))} of the absolute advantage)",
            message=(
                f"{counted(run.outside_tokens, 'masked token')} have an advantage that is neither 0 nor the row's; the "
                "mask keeps them out of the loss"
            ),
            evidence="the logged advantages of the tokens",
            advice="check that advantages and mask are of the same alignment",
        )
