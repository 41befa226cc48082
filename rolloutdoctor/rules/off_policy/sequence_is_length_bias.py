"""RDO007: importance weights of sequences that depend on length."""

from collections.abc import Mapping
from math import exp
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, loss_columns
from rolloutdoctor.objective.sampler_distance import sequence_bounds
from rolloutdoctor.ops.bounds import share_bound
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, number, percent, too_few
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

TERMS = ("length", "size", "weight")
THIRDS = ("shortest", "middle", "longest")


class SequenceIsLengthBias(TableRule):
    """Importance weights of whole sequences grow with length even where sampler and trainer agree on every token.

    ## What it does
    Where weights or rejections are made of sums over the tokens of a response, compares short and long responses: how
    many are within the bounds, and how far their log-probs differ per token.

    ## Why it matters
    The log weight of a sequence is a sum: noise that is harmless for a token, 0.05 nats, makes a median weight of 0.90
    at 100 tokens, 0.30 at 1,000 and 0.007 at 4,000. Long responses lose their weight or are rejected, whatever they
    say, and the policy is trained on short ones.

    ## How it is measured
    Rows are cut into thirds by their trained tokens within each step (before rejection, if `response_mask_pre` is
    there). `kept_..._share` is the share within all bounds on sequences that the configuration has, `..._gap` the mean
    size of delta per token, `length_correlation` the rank correlation of length and |log weight| within a step,
    averaged over rows. It is a warning if the longest third keeps fewer rows than the shortest by a tenth of its rows,
    or by a twentieth if the lost rows are longer than the others beyond chance (`lost_length_score`: four standard
    deviations of a permutation test of their lengths, within steps), and its difference per token is at most one and a
    half times that of the shortest. If it is more, the mismatch itself grows along the response, and that is
    information, as is a correlation of 0.3 or more. It takes 60 rows; without a bound on sequences,
    or with thirds less than a fifth apart in length, nothing can show.

    Logged metrics of the weights, all reproduced by the rows, confirm it.

    ## What to do
    Weigh tokens (truncated), or hold the geometric mean of a sequence to its bounds.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> lengths = [10] * 32 + [40] * 32
    >>> batch = toy_batch([[1, 0] * 4] * 8, lengths=lengths, policy=-1.0, rollout=-1.05)
    >>> diagnose_one("RDO007", batch, trainer="trl", use_vllm=True, vllm_importance_sampling_mode="sequence_mask")
    'RDO007 warning exposed: length_correlation 1'
    """

    code = "RDO007"
    name = "sequence-is-length-bias"
    references = (
        "https://github.com/huggingface/trl/pull/5815",
        "https://github.com/huggingface/trl/issues/4772",
        "https://github.com/NVIDIA-NeMo/RL/issues/1899",
    )
    adds = ("length", "k1", "k2", "k3", "size")
    splits = ("train",)
    stages = ("metrics",)

    least_rows: int = 60
    lost: float = 0.1
    lost_for_sure: float = 0.05
    """Enough where the lost rows are longer by `beyond_chance` standard deviations."""
    beyond_chance: float = 4.0
    same_gap: float = 1.5
    correlated: float = 0.3
    longer: float = 1.2

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs, where sequences are weighed."""
        return frozenset({"rollout_log_probs", "old_log_probs"}) if sequence_bounds(context.objective) else frozenset()

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, the one before rejection, and what the metrics are made of."""
        if context.objective is None or not self.columns(context):
            return frozenset()
        return frozenset({"response_mask", "response_mask_pre"}) | loss_columns(context.objective) | LOGGED_COLUMNS

    def inapplicable_reason(self, context: Context) -> str | None:
        """Nothing is made of sums over sequences."""
        if context.objective is None or sequence_bounds(context.objective):
            return None
        return "no importance weight or rejection uses a sum over a sequence"

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sums over the trained tokens of each row."""
        import torch

        if not block.has("rollout_log_probs", "old_log_probs"):
            return {}
        apart_T = block.log_ratio("old_log_probs", "rollout_log_probs")
        mask_T = block.column("response_mask_pre") if block.is_logged("response_mask_pre") else block.trained_T
        counted_T = mask_T & apart_T.isfinite()
        apart_T = torch.where(counted_T, apart_T, 0.0).clamp_(-20, 20)
        return {
            "length": block.row_sum(counted_T),
            "k1": block.row_sum(apart_T),
            "k2": block.row_sum(apart_T.square() / 2),
            "k3": block.row_sum(torch.expm1(apart_T) - apart_T),
            "size": block.row_sum(apart_T.abs()),
        }

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Logged metrics of the importance weights and of what these are made of: how many, and how many agree."""
        kind_of = None if step.trainer is None else step.trainer.log.kind_of
        metrics = [tally for name, tally in step.audit.items() if kind_of and kind_of(name) == "sampler_gap"]
        return {"compared": sum(tally.compared for tally in metrics), "agree": sum(tally.agree for tally in metrics)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return sums over each third of the rows of steps with three or more: how many are within all bounds."""
        bounds, length, k1 = sequence_bounds(context.objective), pl.col("length"), pl.col("k1")
        count = pl.len().over(STEP_KEY).cast(pl.Int64)
        lost, apart = (~pl.col("kept")).sum().over(STEP_KEY), pl.col("apart")
        correlation = pl.corr(length, k1.abs(), method="spearman").over(STEP_KEY)
        # Rows of one length are in one third.
        third = ((length.rank("average").over(STEP_KEY) - 0.5) * len(THIRDS) / count).cast(pl.Int64)
        lines = (
            rows.filter(length > 0, bool(bounds))
            .filter(count >= len(THIRDS))
            .with_columns(
                kept=pl.all_horizontal(
                    pl.lit(True), *(pl.col(bound.of).is_between(bound.low, bound.high) for bound in bounds)
                ),
                third=third,
                weight=k1.clip(-20, 20).exp(),
                apart=length - length.mean().over(STEP_KEY),
                correlation=correlation.fill_nan(None),
            )
            # Drawn without putting back: the variance of a sum of some of the lengths.
            .with_columns(variance=apart**2 * lost * (count - lost) / (count * (count - 1)))
        )
        sums, trend = pl.sum("kept", *TERMS, "variance"), apart.filter(~pl.col("kept")).sum()
        thirds = lines.group_by(*STEP_KEY, "third", maintain_order=True)
        return thirds.agg(sums, pl.first("correlation"), rows=pl.len(), trend=trend)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the share that each third keeps."""
        is_of = {name: pl.col("third") == number for number, name in enumerate(THIRDS)}
        rows, is_known = pl.col("rows"), pl.col("correlation").is_not_null()
        mean = (pl.col("correlation") * rows).sum() / rows.filter(is_known).sum()
        measures: dict[str, Quantity] = {"length_correlation": (mean, "1")}
        for third, part in is_of.items():
            measures[f"kept_{third}_share"] = pl.col("kept").filter(part).sum() / rows.filter(part).sum(), "share"
        for third in ("shortest", "longest"):
            length, size, weight, count = (pl.col(name).filter(is_of[third]).sum() for name in (*TERMS, "rows"))
            measures[f"{third}_gap"] = size / length, "nats"
            measures[f"{third}_length"] = length / count, "tokens"
            measures[f"{third}_weight"] = weight / count, "1"
        measures["lost_length_score"] = pl.sum("trend") / pl.sum("variance").sqrt(), "1"
        return measures | {"rows": (rows.sum(), "rows")}

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Responses of one length cannot show it."""
        short, long = run["shortest_length"], run["longest_length"]
        if not len(run.table) or (short is not None and long is not None and long >= self.longer * short):
            return None
        return "all responses have about the same length"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few rows."""
        few = too_few(run.count("rows"), "row", "with both log-probs", self.least_rows)
        return few if sequence_bounds(context.objective) else None

    def excluded(self, run: Measured, context: Context) -> Excluded | None:
        """Bound the excess of lost responses among the long ones over the short ones."""
        if run["length_correlation"] is None:
            return None
        of_third = (pl.col("third") == THIRDS.index(third) for third in ("shortest", "longest"))
        counts = (run.table.filter(is_part).select(pl.sum("rows", "kept")).row(0) for is_part in of_third)
        (fewest, _), (_, most) = (share_bound(rows - kept_rows, rows) for rows, kept_rows in counts)
        return Excluded(
            code=self.code,
            effect="a loss of long responses",
            bound=most - fewest,
            unit="as a share of the rows, beyond that of short ones",
            estimate=(run["kept_shortest_share"] or 0.0) - (run["kept_longest_share"] or 0.0),
            limit=self.lost,
            seen=run.count("rows"),
            of="rows",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where long responses are lost without differing more, else information."""
        short, long, correlation = (
            run[name] for name in ("kept_shortest_share", "kept_longest_share", "length_correlation")
        )
        if run.count("rows") < self.least_rows or short is None or long is None or correlation is None:
            return None
        gaps = run["shortest_gap"] or 0.0, run["longest_gap"] or 0.0
        sure = (run["lost_length_score"] or 0.0) >= self.beyond_chance
        loses = short - long >= (self.lost_for_sure if sure else self.lost)
        is_same = not gaps[0] or gaps[1] / gaps[0] <= self.same_gap
        if self.vacuous_reason(run, context) is not None or not (loses or correlation >= self.correlated):
            return None
        bounds = sequence_bounds(context.objective)
        logged, agree = run.run.by_step("compared", "agree").select(pl.sum("compared", "agree")).row(0)
        shown = 0 < logged == agree
        words = "are kept" if any(bound.rejects for bound in bounds) else "have an uncapped weight"
        limits = ", ".join(
            f"{exp(bound.low):.3g} to {exp(bound.high):.3g}" if bound.of == "k1" else f"{bound.of} up to {bound.high:g}"
            for bound in bounds
        )
        of_longest, of_shortest = (
            f"{percent(long)} of the longest third {words}",
            f"{percent(short)} of the shortest third",
        )
        return Judgement(
            severity=Severity.WARNING if loses and is_same else Severity.INFO,
            confirmed=shown,
            headline=f"sequence weights favor short responses: {of_longest}, {of_shortest}"
            if loses
            else f"|log weight| of a sequence correlates with its length (rank correlation {number(correlation)}); "
            f"{of_longest}",
            message=(
                f"{of_shortest} (mean {number(run['shortest_length'])} tokens) {words}, {percent(long)} of the longest "
                f"(mean {number(run['longest_length'])}); the log weight is a sum over tokens and its rank correlation "
                f"with length is {number(correlation)}"
                + ("" if is_same else "; the mismatch per token is larger in long responses")
            ),
            evidence=(
                f"sampler and trainer differ by {number(gaps[0])} nats per token in the shortest third and "
                f"{number(gaps[1])} in the longest; configured bounds: {limits}"
                + (f"; these rows reproduce all {logged:,.0f} logged weight metrics" if shown else "")
            ),
            advice="use token-level weights, or bound the geometric mean of a sequence's ratios (the right level is "
            "contested upstream)",
        )
