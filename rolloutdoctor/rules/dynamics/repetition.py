"""RDT011: responses that repeat themselves, from their token ids."""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.exact import ratio
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, excluded_share, number, percent
from rolloutdoctor.rules.measures.pooled import pooled_error
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

SAMPLED_TOKENS = 2**17
"""Tokens of a step beyond which only some of its responses are looked at: as many as hold about so many."""


class Repetition(TableRule):
    """Responses repeat themselves: half of what they say they said before.

    ## What it does
    Counts responses in which half of the 16-grams of token ids or more occurred earlier in the same response, by step,
    and compares their rewards with those of their groups. It needs no text and no tokenizer.

    ## Why it matters
    A response in a loop spends its length on nothing, and is mostly cut off. Where the share grows, the policy is
    degenerating; where the reward pays for it, it grows because of the reward.

    ## How it is measured
    Only trained tokens count, so that repeats by a tool do not, in responses of 128 or more. `looping_share_last` is
    the share in the last quarter of the steps. `reward_difference` is the mean reward of looping responses minus that
    of their group. In steps of more than 131,072 tokens some responses, chosen by hash, are tested.

    Of 1,099 pieces of English manuals of 256 to 4,096 words none has such a share of repeats (0.37 at most); of 5,856
    pieces of Python 0.3 % do, tables of data. So a finding requires 1 % of the responses and three of them. Responses
    that are tables, boards or lists look the same, and if these are right they are rewarded. A warning therefore
    requires ten looping responses; 10 % in the last quarter, or a reward above that of their group by three standard
    errors; and that they do not end (half of them are cut off) or that their share grew: the last quarter has twice
    that of the first, by three standard errors. It is exposed if they end.

    ## What to do
    Read the responses listed. Score what repeats as wrong, look at the end-of-sequence token and the length limit where
    they are cut off, and at entropy and learning rate where the share grows.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> ids = [[5, 6, 7, 8] * 40 if row < 4 else list(range(160)) for row in range(8)]
    >>> batch = toy_batch([[1, 0]] * 4, lengths=160, per_token={"response_ids": ids})
    >>> diagnose_one("RDT011", batch, trainer=None)
    'RDT011 info confirmed: looping_share 0.5'
    """

    code = "RDT011"
    name = "repetition"
    references = ("https://arxiv.org/abs/1904.09751", "https://arxiv.org/abs/2503.14476")
    reads = ("reward",)
    adds = ("ngrams", "repeated")
    needs_objective = False
    splits = ("train",)
    needs = ("response_ids",)
    uses = ("response_mask", "reward", "group_id", "status")
    optional = ("reward_difference", "truncated_share")

    least: int = 113
    """16-grams of a response of 128 tokens."""

    loops_from: float = 0.5
    info_above: float = 0.01
    fewest_looping: int = 3
    warn_above: float = 0.1
    fewest: int = 10
    errors: float = 3.0
    cut_from: float = 0.5

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the 16-grams of trained tokens, and those that occurred before, of sampled responses."""
        from rolloutdoctor.rules.measures.repeated_tokens import repeated_tokens

        return dict(zip(self.adds, repeated_tokens(block, self.least, SAMPLED_TOKENS), strict=True))

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return sums over the responses of 128 trained tokens that were looked at, and those that repeat most."""
        reward, share, loops = pl.col("reward"), pl.col("repeated") / pl.col("ngrams"), pl.col("loops")
        of_group = reward.filter(reward.is_finite()).mean().over(*STEP_KEY, "group")
        is_compared = reward.is_finite() & pl.col("group").is_not_null()
        lines = rows.with_columns(above=pl.when(is_compared).then(reward - of_group))
        lines = lines.filter(pl.col("ngrams") >= self.least).with_columns(share=share, loops=share >= self.loops_from)
        above, cut = pl.col("above").filter(loops), pl.col("status").str.to_lowercase().is_in(TRUNCATED).filter(loops)
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            pl.sum("repeated", "ngrams"),
            responses=pl.len(),
            looping=loops.sum(),
            above=above.sum(),
            compared=above.count(),
            squares=((above - above.mean()) ** 2).sum(),
            cut=cut.sum(),
            told=cut.count(),
        )
        return with_places(sums, lines.filter(loops).select(*NAMES, "share", of="ngrams", value="repeated"), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Say which steps are of the first and of the last quarter."""
        steps = pl.col("step").rank("dense")
        return run.rows.with_columns(is_first=steps <= 0.25 * steps.max(), is_last=steps > 0.75 * steps.max())

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the share of looping responses, and how they fared."""
        looping, responses, last = pl.col("looping"), pl.col("responses"), pl.col("is_last")
        return {
            "looping_share": (looping.sum() / responses.sum(), "share"),
            "looping": (looping.sum(), "rows"),
            "responses": (responses.sum(), "rows"),
            "looping_share_last": (looping.filter(last).sum() / responses.filter(last).sum(), "share"),
            "repeated_share": (pl.sum("repeated") / pl.sum("ngrams"), "share"),
            "reward_difference": (pl.sum("above") / pl.sum("compared"), "reward"),
            "truncated_share": (pl.sum("cut") / pl.sum("told"), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Their share."""
        return f"{percent(place['share'])} of {place['of']:,.0f} 16-grams occurred before"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Short responses."""
        if len(run.table):
            return None
        return Missing("no response has 128 trained tokens one after another", "check a run of longer responses")

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the share of looping responses."""
        loops, rows = run.count("looping"), run.count("responses")
        return excluded_share(
            self.code, "a share of looping responses", loops, rows, limit=self.warn_above, of="responses of 128 tokens"
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information, and a warning where many responses loop at the end or are rewarded for it."""
        loops, share, last = run.count("looping"), run["looping_share"] or 0.0, run["looping_share_last"] or 0.0
        if loops < self.fewest_looping or share < self.info_above:
            return None
        mean, compared = run["reward_difference"] or 0.0, int(run.table["compared"].sum())
        error = pooled_error(run.table, mean)
        is_paid = compared >= self.fewest and mean > 0 and (error == 0 or (ratio(mean, error) or 0.0) >= self.errors)
        is_many = last >= self.warn_above and loops >= self.fewest
        cut = run["truncated_share"]
        is_cut = (cut or 0.0) > self.cut_from
        is_fault = (is_paid or is_many) and (is_cut or self._grew(run.table))
        more = [f"their reward is {number(mean)} from that of their groups"] if compared else []
        more += [f"{percent(cut)} of them are cut off"] if cut is not None else []
        advice = "read the responses listed; "
        if is_paid:
            advice += "score a response that repeats itself as wrong: the reward pays for it"
        elif is_cut:
            advice += "they do not end: look at the end-of-sequence token, and at the entropy of the policy"
        else:
            advice += "ignore it if the task asks for tables or lists"
        return Judgement(
            severity=Severity.WARNING if is_fault else Severity.INFO,
            confirmed=is_cut or not is_fault,
            headline=f"{percent(share)} of {counted(run.count('responses'), 'long response')} repeat themselves, "
            f"{percent(last)} in the last quarter of the steps" + (", and are rewarded for it" if is_paid else ""),
            message="; ".join([f"in {counted(loops, 'response')} half of the 16-grams or more occurred before", *more]),
            evidence="token ids of trained tokens",
            advice=advice,
        )

    def _grew(self, table: pl.DataFrame) -> bool:
        """Tell whether the last quarter of the steps has twice the looping share of the first, beyond chance."""
        sums = pl.sum("looping", "responses")
        (early, first), (late, last) = (table.filter(name).select(sums).row(0) for name in ("is_first", "is_last"))
        if not first or not last:
            return False
        before, now = early / first, late / last
        error = sqrt(before * (1 - before) / first + now * (1 - now) / last)
        return bool(now >= 2 * before and now - before > self.errors * error)
