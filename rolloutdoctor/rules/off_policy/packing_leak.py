"""RDO013: rows of a pack that see the rows before them."""

from collections.abc import Mapping
from math import inf, sqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.ops.bounds import median_bound
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, too_few
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

_RATIO = pl.col("behind") / pl.col("first").clip(lower_bound=1e-6)


class PackingLeak(TableRule):
    """Rows that are not the first of their pack have another gap to the sampler than the first.

    ## What it does
    Compares how far the log-probs of sampler and trainer are apart in the first tokens of the responses of one pack: in
    its first row, and in those behind it.

    ## Why it matters
    A trainer that packs several sequences into one has to tell its layers where each begins. Where a layer is not told,
    state or attention goes on from one sequence into the next: a linear attention or Mamba layer starts each row with
    the memory of another, and the trainer's log-probs, gradients and importance ratios are those of another context.
    The loss looks as usual; upstream the sampler gap of such runs was many times larger with packing than without.

    ## How it is measured
    A pack is a micro-batch of an optimizer step and rank; `pack_index` is the place of a row in it. The gap of a row of
    the newest version of the step is the mean absolute difference of old and rollout log-probs over those of its first
    16 tokens that are trained and that the sampler gave less than 0.9, if there are four or more. In each pack the
    median of the later rows is compared with the first: without a leak either may be larger, so the number of packs in
    which the later rows are has a known spread. A finding requires a ratio of 3 in the median pack, a later gap of 0.01
    nats, and a number of packs four standard deviations above a half, which takes 16. The gap in the rest of these rows
    says whether it fades, as in a recurrent state.

    ## What to do
    Pass the bounds of the sequences (`cu_seqlens`, `seq_idx`, position ids) to every layer that mixes tokens; compare
    the log-probs of a row alone and in a pack.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> rollout = [[-1.01] * 20 if row % 2 == 0 else [-1.3] * 20 for row in range(40)]
    >>> packs = {"micro_batch_id": [row // 2 for row in range(40)], "pack_index": [row % 2 for row in range(40)]}
    >>> diagnose_one("RDO013", toy_batch([[1, 0]] * 20, lengths=20, rollout=rollout, per_row=packs), trainer=None)
    'RDO013 warning exposed: gap_ratio 30'
    """

    code = "RDO013"
    name = "packing-leak"
    references = (
        "https://github.com/THUDM/slime/pull/1686",
        "https://github.com/NovaSky-AI/SkyRL/pull/2056",
        "https://github.com/NVIDIA-NeMo/RL/issues/2105",
    )
    reads = ("micro_batch_id", "optim_step_id", "rank", "pack_index")
    adds = ("lag", "near_tokens", "near", "rest_tokens", "rest")
    needs_objective = False
    splits = ("train",)
    needs = ("old_log_probs", "rollout_log_probs", "micro_batch_id", "pack_index")
    uses = ("response_mask", "optim_step_id", "rank", "policy_version_min", "policy_version_max")

    first_tokens: int = 16
    least_tokens: int = 4
    times: float = 3.0
    nats: float = 0.01
    deviations: float = 4.0

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sum the gap of each row in its first tokens, and in the rest."""
        from rolloutdoctor.ops.elementwise import kept
        from rolloutdoctor.rules.measures.sampler_gap import UNSURE

        if not block.has("old_log_probs", "rollout_log_probs"):
            return {}
        size_T = block.log_ratio("old_log_probs", "rollout_log_probs").abs()
        known_T = block.trained_T & size_T.isfinite() & (block.column("rollout_log_probs") < UNSURE)
        near_T, measures = block.position_T < self.first_tokens, dict[str, "Tensor"]()
        for name, here_T in (("near", known_T & near_T), ("rest", known_T & ~near_T)):
            measures |= {f"{name}_tokens": block.row_sum(here_T), name: block.row_sum(kept(size_T, here_T))}
        return measures

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The lag of each row behind the newest version of its step."""
        return {"lag": step.lags(2)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each pack of several rows: the gap of the `first` row, and of those `behind` it."""
        place, is_first = pl.col("pack_index"), pl.col("pack_index") == 0
        rest, rest_tokens = (pl.col(name).filter(~is_first).sum() for name in ("rest", "rest_tokens"))
        packs = (
            rows.filter(place >= 0, pl.col("lag").fill_null(0) == 0, pl.col("near_tokens") >= self.least_tokens)
            .with_columns(gap=pl.col("near") / pl.col("near_tokens"))
            .group_by(*STEP_KEY, "optim_step_id", "rank", "micro_batch_id", maintain_order=True)
            .agg(
                pl.col("group_id", "sample_id").filter(~is_first).first(),
                first=pl.col("gap").filter(is_first).mean(),
                behind=pl.col("gap").filter(~is_first).median(),
                rest=rest / rest_tokens,
                rows=pl.len(),
            )
        )
        packs = packs.drop_nulls(["first", "behind"]).sort(*STEP_KEY, "optim_step_id", "rank", "micro_batch_id")
        return pl.concat([packs, rows.group_by(STEP_KEY).agg(has_behind=(place > 0).any())], how="diagonal")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The packs."""
        return run.rows.drop_nulls("first")

    def quantities(self) -> Mapping[str, Quantity]:
        """The gap in the first rows and behind them."""
        first, behind = pl.col("first"), pl.col("behind")
        return {
            "gap_ratio": (_RATIO.median(), "1"),
            "gap_first": (first.median(), "nats"),
            "gap_behind": (behind.median(), "nats"),
            "gap_behind_rest": (pl.col("rest").filter(pl.col("rest").is_finite()).median(), "nats"),
            "packs": (pl.len().cast(pl.Int64), "packs"),
            "packs_above": ((behind > first).sum().cast(pl.Int64), "packs"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Packs with the largest ratio."""
        return table.with_columns(value=_RATIO)

    def note(self, place: Mapping[str, Any]) -> str:
        """Both gaps."""
        return (
            f"micro-batch {place['micro_batch_id']}: {number(place['first'])} nats in the first row, "
            f"{number(place['behind'])} behind it"
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No row is behind another."""
        return None if run.run.rows["has_behind"].any() else "every row is the only one of its pack"

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few packs."""
        tokens = f"{self.least_tokens} of the first {self.first_tokens} tokens below probability 0.9"
        of, fewest = f"of several rows with {tokens}", int(self.deviations**2)
        return too_few(run.count("packs"), "pack", of, fewest, "record more steps")

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the ratio of the median pack."""
        ratios = run.table.select(_RATIO).to_series().to_list()
        return Excluded(
            code=self.code,
            effect="a gap behind the first row of a pack",
            bound=median_bound(ratios),
            unit="times that of the first",
            estimate=run["gap_ratio"] or 0.0,
            limit=inf if (run["gap_behind"] or 0.0) < self.nats else self.times,
            seen=len(ratios),
            of="packs",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning."""
        packs, above = run.count("packs"), run.count("packs_above")
        ratio, behind = run["gap_ratio"] or 0.0, run["gap_behind"] or 0.0
        beyond = (2 * above - packs) / sqrt(packs) if packs else 0.0
        if ratio < self.times or behind < self.nats or beyond < self.deviations:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the gap to the sampler is {number(behind)} nats at the start of rows behind the first of their "
            f"pack, and {number(run['gap_first'])} in the first",
            message=f"in {above:,} of {counted(packs, 'pack')} the rows behind the first have the larger gap in their "
            f"first {self.first_tokens} tokens, {number(ratio)} times in the median pack; in their other tokens it is "
            f"{number(run['gap_behind_rest'])} nats",
            evidence="the log-probs of sampler and trainer, by pack_index and micro_batch_id",
            advice="pass the bounds of packed sequences to every layer that mixes tokens, and compare the log-probs of "
            "a row alone and in a pack",
        )
