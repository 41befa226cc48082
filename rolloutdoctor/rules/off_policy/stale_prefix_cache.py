"""RDO009: prompts whose cached keys and values are from older weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.measures.stratified_ranks import SCORE, ranked, tail, window_of
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, of_smallest

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

PROMPTS = 128
"""Prompts that are followed."""

LEAST_TOKENS = 32
"""Unsure tokens of a prompt at one version, at least."""


class StalePrefixCache(TableRule):
    """The engine serves recurring prompts from keys and values of older weights.

    ## What it does
    Compares the gap of sampler and trainer after prompts that were served before, at an older version, with that
    after prompts that are served for the first time.

    ## Why it matters
    A prefix cache that survives a weight sync gives the new weights the old model's view of the prompt. Only prompts
    that recur are hurt, more so the longer they are cached, so that means over a step hide it.

    ## How it is measured
    Prompts of 128 tokens and more are tested, of which engines cache at least one block; all records of the 128 prompts
    with the smallest hashes are kept. The gap is the mean absolute difference on trained tokens with a sampler
    probability below 0.9, at least 32. `gap_ratio` is the median, over records of recurring prompts, of their gap
    divided by that at the version at which they were first seen: hard recurring prompts have a large one both times.
    `p_value` tests the hypothesis that at one version and length the gap does not depend on the versions since the
    prompt was first seen: a permutation test of ranks, stratified by versions and doublings of the length. Plain lag,
    and an engine that does not update at all, are the same for all prompts of a version. A finding requires a ratio of
    3 and p below 0.001, of ten records either way; or an `excess_ratio` (the same divided by how much the gap of new
    prompts grew meanwhile) of 2 and p below 1e-6 (from 1.5 it is information). Clean excludes a median ratio of 3, by
    the last records of the prompts.

    ## What to do
    Reset the prefix cache of the engine after each weight sync.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO009", toy_batch([[1, 0]], rollout=-1.0), trainer=None)
    'RDO009 skipped: missing column prompt_ids'
    """

    code = "RDO009"
    name = "stale-prefix-cache"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/pull/4018",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/1650",
        "https://github.com/NovaSky-AI/SkyRL/issues/2246",
    )
    reads = ("prompt", "policy_version_max")
    adds = ("unsure", "size", "prompt_tokens", "key")
    needs_objective = False
    splits = ("train",)
    needs = ("old_log_probs", "rollout_log_probs", "prompt_ids")
    uses = ("response_mask", "policy_version_max", "optim_step_id")

    least_length: int = 128
    least_records: int = 10
    factor: float = 3.0
    level: float = 1e-3
    factor_of_excess: float = 2.0
    """All that makes gaps grow from version to version, in old prompts and in new ones, is taken off."""
    excess_noted: float = 1.5
    level_of_excess: float = 1e-6

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Unsure tokens of each row and the sum of the sizes of their gaps."""
        from rolloutdoctor.rules.measures.sampler_gap import gap_of, sizes_of_rows

        gap = gap_of(block)
        return {} if gap is None else sizes_of_rows(gap)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The prompts' lengths, and the hashes by which some of them are chosen."""
        from rolloutdoctor.data.schema import PROMPT_LENGTH
        from rolloutdoctor.ops.prefix_hash import scramble

        rows = step.batch.per_row
        return {"prompt_tokens": rows.get(PROMPT_LENGTH), "key": scramble(rows["prompt_ids"])}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return one line for each step, with its rows, and one for each of its long prompts at a version."""
        version, tokens = pl.coalesce("policy_version_max", "step"), pl.col("prompt_tokens")
        rows = rows.with_columns(version=version, is_long=tokens >= self.least_length).filter(
            pl.col("prompt") != 0, pl.col("unsure") > 0, pl.col("version") >= 0, tokens.is_not_null()
        )
        counts = rows.group_by(STEP_KEY, maintain_order=True).agg(rows=pl.len(), long_rows=pl.sum("is_long"))
        prompts = rows.filter("is_long").group_by(*STEP_KEY, "key", "version", maintain_order=True)
        return pl.concat([counts, prompts.agg(pl.sum("unsure", "size", "prompt_tokens"), of=pl.len())], how="diagonal")

    def thinned(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Follow the prompts of the smallest hashes, however many there are."""
        is_prompt = pl.col("key").is_not_null()
        return pl.concat([lines.filter(~is_prompt), of_smallest("key", PROMPTS, lines.filter(is_prompt))])

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step, with its rows, and one for each long prompt at a version, with its gap.

        `age` is the versions since the prompt was first seen, and `against_first` the gap over that at that version.
        `excess` is the same over what the median gap of new prompts grew by from one window of versions to the other;
        null where a window has none of them.
        """
        version, age, gap = pl.col("version"), pl.col("age"), pl.col("gap")
        counts = run.rows.filter(pl.col("key").is_null()).select(*STEP_KEY, "rows", "long_rows")
        new, length = gap.filter(age == 0).median(), pl.sum("prompt_tokens") / pl.sum("of")
        records = (
            run.rows.drop_nulls("key")
            .group_by("key", "version", maintain_order=True)
            .agg(pl.first(*STEP_KEY), pl.sum("unsure", "size"), octave=length.log(2).floor())
            .filter(pl.col("unsure") >= LEAST_TOKENS)
            .with_columns(gap=(pl.col("size") / pl.col("unsure")).clip(lower_bound=1e-4), window=window_of(version, 8))
            .sort("key", "version")
            .with_columns(
                age=version - version.first().over("key"),
                against_first=gap / gap.first().over("key"),
                last=version == version.max().over("key"),
                first_window=pl.first("window").over("key"),
            )
            .with_columns(excess=pl.col("against_first") * new.over("first_window") / new.over("window"))
        )
        return pl.concat([counts, ranked(records)], how="diagonal")

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the growth of the gap, and since when the prompts were known."""
        gap, is_new, is_old = pl.col("gap"), pl.col("age") == 0, pl.col("age") > 0
        excess = pl.col("excess").filter(is_old)
        p = SCORE.map_elements(tail, pl.Float64)
        return {
            "gap_ratio": (pl.col("against_first").filter(is_old).median(), "1"),
            "excess_ratio": (pl.when(excess.count() >= self.least_records).then(excess.median()), "1"),
            "p_value": (pl.when(is_old.any()).then(p), "probability"),
            "gap_first_seen": (gap.filter(is_new).median(), "nats"),
            "gap_seen_before": (gap.filter(is_old).median(), "nats"),
            "first_seen": (is_new.sum(), "records"),
            "seen_before": (is_old.sum(), "records"),
            "long_prompts_share": (pl.sum("long_rows") / pl.sum("rows"), "share"),
        }

    def _is_short(self, run: Measured) -> bool:
        """True if there are prompts, and none that is long enough to be cached."""
        return run["long_prompts_share"] == 0

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few prompts came again."""
        first, later = run.count("first_seen"), run.count("seen_before")
        if self._is_short(run) or min(first, later) >= self.least_records:
            return None
        return Missing(
            f"{counted(first, 'prompt')} of at least 128 tokens, which recur {later:,} times; needs "
            f"{self.least_records} of each",
            "widen --steps to where prompts recur",
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No prompt fills a block of the cache."""
        return f"no prompt has {self.least_length} tokens or more" if self._is_short(run) else None

    def excluded(self, run: Measured, context: Context) -> Excluded | None:
        """Bound the growth of the gap of most prompts since they were first seen."""
        from rolloutdoctor.ops.bounds import median_bound

        ratio, excess = run["gap_ratio"], run["excess_ratio"]
        if ratio is None:
            return None
        last = run.table.filter("last", pl.col("age") > 0).select(pl.coalesce("excess", "against_first")).to_series()
        return Excluded(
            code=self.code,
            effect="a growth of the gap after recurring prompts",
            bound=median_bound(last.to_list()),
            unit="times",
            estimate=ratio if excess is None else excess,
            limit=self.factor,
            seen=len(last),
            of="recurring prompts",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning: the log-probs show it, and no logged value proves it."""
        ratio, p, first, later = run["gap_ratio"], run["p_value"], run.count("first_seen"), run.count("seen_before")
        if ratio is None or p is None or min(first, later) < self.least_records:
            return None
        excess = (run["excess_ratio"] or 0.0) if p < self.level_of_excess else 0.0
        warns = excess >= self.factor_of_excess or (ratio >= self.factor and p < self.level)
        if not warns and excess < self.excess_noted:
            return None
        return Judgement(
            severity=Severity.WARNING if warns else Severity.INFO,
            confirmed=False,
            headline=(
                f"stale prefix cache: the sampler mismatch after a recurring prompt is {number(ratio)} times that "
                "after its first use"
            ),
            message=(
                f"the median mismatch is {number(run['gap_seen_before'])} nats after prompts that recur at a later "
                f"version ({later:,} records) and {number(run['gap_first_seen'])} after new prompts ({first:,}); it "
                f"grows with the number of versions since (p = {number(p)})"
            ),
            evidence="the log-probs of sampler and trainer, at equal versions and prompt lengths",
            advice="reset the engine's prefix cache after every weight sync",
        )
