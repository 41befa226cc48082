"""RDO009: prompts whose cached keys and values are from older weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from rolloutdoctor.ops.tally import Sums, ratio, sketches
from rolloutdoctor.results.findings import Excluded, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class PrefixTally(Sums):
    """What `stale-prefix-cache` adds up.

    Attributes:
        rows: rows with a known prompt.
        long_rows: those whose prompt is long enough to be cached.
        seen: sketch of prompt and version: rows, unsure tokens, sum of the sizes of their gaps, prompt tokens.
    """

    rows: int = 0
    long_rows: int = 0
    seen: str = sketches()


@dataclass(frozen=True)
class StalePrefixCache(Rule[PrefixTally]):
    """The engine serves prompts that come again from keys and values of older weights.

    ## What it does
    Compares the gap of sampler and trainer after prompts that were served before, at an older version, with that
    after prompts that are served for the first time.

    ## Why it matters
    A prefix cache that survives a weight sync gives the new weights the old model's view of the prompt. Only prompts
    that come again are hurt, more so the longer they are cached, so that means over a step hide it.

    ## How it is measured
    Prompts of 128 tokens and more, of which engines cache at least one block; all records of the 128 prompts with the
    smallest hashes are kept. The gap is the mean of its sizes on trained tokens with a sampler probability below 0.9,
    of 32 tokens or more. `gap_ratio` is the median over records of prompts that come again of their gap over that at
    the version at which they were first seen: hard prompts that come again have it too, then and now. `p_value` is of
    the hypothesis that at one version and length the gap has nothing to do with the versions since the prompt was
    first seen: a permutation test of ranks, stratified by versions and doublings of the length. Plain lag, and an
    engine that does not update at all, are the same for all prompts of a version. Found from a ratio of 3 and p below
    0.001, of ten records either way; or where `excess_ratio`, the same over what the gap of new prompts grew by
    meanwhile, is 2 and p below 1e-6 (from 1.5 on it is information). Clean excludes a median ratio of 3, by the
    last records of the prompts.

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
    tally = PrefixTally
    needs_objective = False
    splits = ("train",)

    least_length: int = 128
    least_records: int = 10
    factor: float = 3.0
    level: float = 1e-3
    factor_of_excess: float = 2.0
    """All that makes gaps grow from version to version, in old prompts and in new ones, is taken off."""
    excess_noted: float = 1.5
    level_of_excess: float = 1e-6

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs, and the prompts with their lengths."""
        return frozenset({"old_log_probs", "rollout_log_probs", "prompt_ids"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask and the version."""
        return frozenset({"response_mask", "policy_version_max", "optim_step_id"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Keep the tokens that are looked at."""
        from rolloutdoctor.evaluation.sampler_gap import looked_at

        return looked_at(block)

    def measure_each(self, steps: "StepView") -> list[PrefixTally]:
        """Keep the prompts of each step with the smallest hashes."""
        import torch

        from rolloutdoctor.data.batch import PROMPT_LENGTH
        from rolloutdoctor.ops.prefix_hash import scramble
        from rolloutdoctor.ops.sketch import sketch_each

        batch, rows = steps.batch, steps.unsure_gaps(self.code)
        prompt_N, length_N = batch.per_row.get("prompt_ids"), batch.per_row.get(PROMPT_LENGTH)
        if not rows or prompt_N is None or length_N is None or not len(batch):
            return steps.nothing(PrefixTally)
        version_N = batch.per_row.get("policy_version_max", steps.batch.number_N)
        is_known_N = (prompt_N != 0) & (rows["unsure"] > 0) & (version_N >= 0)
        is_long_N = is_known_N & (length_N >= self.least_length)
        each = torch.stack([torch.ones_like(rows["size"]), rows["unsure"], rows["size"], length_N.double()], 1)
        return steps.tallies(
            PrefixTally,
            rows=steps.by_step.count(is_known_N),
            long_rows=steps.by_step.count(is_long_N),
            seen=sketch_each(
                scramble(prompt_N)[is_long_N].cpu().numpy(),
                version_N[is_long_N].cpu().numpy(),
                each[is_long_N].cpu().numpy(),
                steps.by_step.count(is_long_N),
            ),
        )

    def measures(self, tally: PrefixTally) -> Mapping[str, Measure]:
        """How much larger the gap is, and since when the prompts were known."""
        found = self._look(tally)
        return {
            "gap_ratio": Measure(found.ratio, "1"),
            "excess_ratio": Measure(found.excess, "1"),
            "p_value": Measure(found.p, "probability"),
            "gap_first_seen": Measure(found.fresh, "nats"),
            "gap_seen_before": Measure(found.again, "nats"),
            "first_seen": Measure(found.first, "records"),
            "seen_before": Measure(found.later, "records"),
            "long_prompts_share": Measure(ratio(tally.long_rows, tally.rows), "share"),
        }

    def _look(self, tally: PrefixTally) -> "_Found":
        if not tally.seen:
            return _Found()
        import numpy as np

        from rolloutdoctor.ops.bounds import median_bound
        from rolloutdoctor.ops.prefix_age import ages_of, excess, tail, trend

        ages = ages_of(tally.seen, self.least_length)
        later = ages.age > 0
        first, again = int((~later).sum()), int(later.sum())
        if not first or not again:
            return _Found(first, again)
        more = excess(ages)
        known = more[later & np.isfinite(more)]
        grown = np.where(np.isfinite(more), more, ages.against_first)[later & ages.last]
        return _Found(
            first,
            again,
            float(np.median(ages.against_first[later])),
            tail(trend(ages)),
            float(np.median(ages.gap[~later])),
            float(np.median(ages.gap[later])),
            float(np.median(known)) if len(known) >= self.least_records else None,
            len(grown),
            median_bound(grown.tolist()),
        )

    def inconclusive_reason(self, run: PrefixTally, context: Context) -> Missing | None:
        """Too few prompts came again."""
        found = self._look(run)
        if (run.rows and not run.long_rows) or min(found.first, found.later) >= self.least_records:
            return None
        return Missing(
            f"{counted(found.first, 'prompt')} of 128 tokens or more, which come again {found.later:,} times, and it "
            f"takes {self.least_records} of either",
            "widen --steps to where prompts come again",
        )

    def vacuous_reason(self, run: PrefixTally, context: Context) -> str | None:
        """No prompt fills a block of the cache."""
        if run.rows and not run.long_rows:
            return f"no prompt has {self.least_length} tokens or more"
        return None

    def excluded(self, run: PrefixTally, context: Context) -> Excluded | None:
        """By how much the gap of most prompts may have grown since they were first seen."""
        found = self._look(run)
        if found.ratio is None:
            return None
        return Excluded(
            code=self.code,
            effect="a growth of the gap after prompts that come again",
            bound=found.bound,
            unit="times",
            estimate=found.ratio if found.excess is None else found.excess,
            limit=self.factor,
            seen=found.prompts,
            of="prompts that come again",
        )

    def judge(self, run: PrefixTally, context: Context) -> Judgement | None:
        """A warning: the log-probs show it, and no logged value proves it."""
        found = self._look(run)
        if found.ratio is None or found.p is None or min(found.first, found.later) < self.least_records:
            return None
        excess = (found.excess or 0.0) if found.p < self.level_of_excess else 0.0
        warns = excess >= self.factor_of_excess or (found.ratio >= self.factor and found.p < self.level)
        if not warns and excess < self.excess_noted:
            return None
        return Judgement(
            severity=Severity.WARNING if warns else Severity.INFO,
            confirmed=False,
            headline=f"after prompts that were served before, the gap to the sampler is {number(found.ratio)} times "
            "what it was at first",
            message=(
                f"the median gap is {number(found.again)} nats after prompts that come again at a later version "
                f"({found.later:,} records) and {number(found.fresh)} after prompts seen for the first time "
                f"({found.first:,}); it grows with the versions since then (p = {number(found.p)})"
            ),
            evidence="the log-probs of sampler and trainer, at equal versions and lengths of the prompt",
            advice="reset the engine's prefix cache after each weight sync",
        )


class _Found(NamedTuple):
    """What the records show."""

    first: int = 0
    later: int = 0
    ratio: float | None = None
    p: float | None = None
    fresh: float | None = None
    again: float | None = None
    excess: float | None = None
    prompts: int = 0
    bound: float = inf
