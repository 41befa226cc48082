"""RDO010: an inference engine whose weights do not change."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent, too_few
from rolloutdoctor.rules.measures.recurring_contexts import ADDS, TOKENS, contexts_at, is_bf16, smallest
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

VERSIONS = 32
"""Versions of one context that are paired: the first of them."""


class EngineFrozen(TableRule):
    """The inference engine keeps its weights while the trainer's move.

    ## What it does
    Compares the log-prob of one token, among the first four of a response, in the same context at two policy versions:
    the sampler's stays what it was, and the trainer's moves. Checks whether the sampler is the reference.

    ## Why it matters
    A weight sync that fails without an error, an adapter that is not served, or float32 updates below the spacing of
    bf16 weights leave the engine where it was. Rewards stay flat or fall, and every update is more off-policy.

    ## How it is measured
    A bounded sample of recurring prompts is kept: all records of the 128 contexts with the smallest hashes that end at
    the first token, and as many at the second, third and fourth. A version is the newest stamp of a row, else its step.
    *Noise* is the standard deviation of one token's log-prob among siblings of one version, by the trainer. In a pair
    of versions the trainer moves if its mean changes by ten times that, and by at least 0.1 nats; the sampler stays if
    its mean changes by at most a tenth of that, or four times the noise. A finding requires that the sampler stays in
    90 % of at least 20 moved pairs, of five contexts or more, from some version: with an engine that follows, one pair
    in ten stays by chance. Moves of 0.002 nats count as well if the sampler's log-prob is the same number before and
    after, to 2^-20, and the trainer's moves by more than the spacing of bf16 if the sampler's were rounded to that: an
    engine that follows gives the same number once in a thousand pairs. If the trainer does not move either, as with a
    learning rate of 0, nothing is frozen. `frozen_from` is that version. The sampler is the reference if in the last
    third of four steps or more its mean gap to the reference is at most a tenth of that to the trainer, which grows
    with the steps (Spearman 0.8).

    ## What to do
    Compare a weight of the engine with the trainer's after a sync; check that the adapter is served, and that the
    update is not lost in bf16.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO010", toy_batch([[1, 0]]), trainer=None)
    'RDO010 skipped: missing columns response_ids, rollout_log_probs'
    """

    code = "RDO010"
    name = "engine-frozen"
    references = (
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/allenai/open-instruct/issues/1473",
    )
    reads = ("prompt", "policy_version_max")
    adds = (*ADDS, "compared", "to_trainer", "to_reference")
    needs_objective = False
    splits = ("train",)
    needs = ("old_log_probs", "rollout_log_probs", "response_ids")

    least_pairs: int = 20
    least_contexts: int = 5
    share: float = 0.9
    least_move: float = 0.1
    """Two means with a noise of 0.055, the largest that was reported at equal weights, are less apart."""

    least_exact: float = 0.002
    """Two thousand times the rounding to 2^-20, within one of which two numbers are the same by chance."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns that identify a prompt and a version."""
        named = {"response_mask", "policy_version_max", "optim_step_id", "ref_log_probs"}
        return prompt_columns(context.columns) | named

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing says which rows answer one prompt in two steps."""
        if prompt_columns(context.columns):
            return None
        remedy = context.recording.get("prompt_ids", "record prompt_ids or prompt")
        return Missing("no column shows which prompt a row answers", remedy)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """The first tokens of each row, and the sampler's gaps to trainer and reference."""
        from rolloutdoctor.ops.elementwise import kept
        from rolloutdoctor.rules.measures.first_tokens import first_tokens

        measures = dict(first_tokens(block, TOKENS))
        if measures and block.has("ref_log_probs"):
            own_T = block.column("rollout_log_probs")
            gaps = [(block.column(name) - own_T).abs() for name in ("old_log_probs", "ref_log_probs")]
            known_T = block.trained_T & gaps[0].isfinite() & gaps[1].isfinite()
            measures["compared"] = block.row_sum(known_T)
            measures["to_trainer"], measures["to_reference"] = (block.row_sum(kept(x_T, known_T)) for x_T in gaps)
        return measures

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Hashes of prompt and first tokens, and both log-probs there, to 2^-20; NaN where one is not known."""
        from rolloutdoctor.rules.measures.first_tokens import contexts_of

        return contexts_of(step.token_measures[self.code], step.batch.prompts)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each of some tokens of a row whose context may be among those of the run, by its `place`."""
        version = pl.coalesce("policy_version_max", "step")
        conditions = pl.col("sampler").is_finite(), pl.col("trainer").is_finite(), pl.col("version") >= 0
        gaps = rows.group_by(STEP_KEY, maintain_order=True).agg(pl.sum("compared", "to_trainer", "to_reference"))
        return pl.concat([contexts_at(rows, *conditions, version=version), gaps], how="diagonal")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each context at a version, and one for each pair of versions of a context.

        The first have the `inside` sum of squares of the trainer's log-prob and its degrees of freedom (`spare`); the
        others how far sampler and trainer moved from the `first` version, in the step that has the later one.
        """
        trainer = pl.col("trainer")
        records = (
            smallest(run.rows)
            .group_by("context", "version")
            .agg(
                pl.col(*STEP_KEY).sort().first(),
                pl.mean("sampler", "trainer"),
                spare=pl.len().cast(pl.Int64) - 1,
                inside=((trainer - trainer.mean()) ** 2).sum(),
            )
            .sort("context", "version")
        )
        places = records.with_columns(place=pl.int_range(pl.len()).over("context")).filter(pl.col("place") < VERSIONS)
        pairs = places.join(places, on="context", suffix="_later").filter(pl.col("place") < pl.col("place_later"))
        noise = records.select(_NOISE).item() or 0.0
        pairs = pairs.select(
            "context",
            step="step_later",
            split="split_later",
            first="version",
            spacing=pl.col("sampler").abs() * (2.0**-7 if is_bf16(records["sampler"]) else 0.0),
            sampler=(pl.col("sampler") - pl.col("sampler_later")).abs(),
            trainer=(pl.col("trainer") - pl.col("trainer_later")).abs(),
        )
        large = trainer >= max(self.least_move, 10 * noise)
        small = trainer >= pl.max_horizontal(pl.lit(max(self.least_exact, 10 * noise)), "spacing")
        stays = pl.col("sampler") <= pl.max_horizontal(0.1 * trainer, pl.lit(4 * noise))
        either = [
            pairs.with_columns(moved=moved, frozen=moved & stays_put)
            for moved, stays_put in ((large, stays), (small, pl.col("sampler") == 0))
        ]
        starts = ((frame, start) for frame in either if (start := self._since(frame)) is not None)
        pairs, start = next(starts, (either[0], None))
        pairs = pairs.with_columns(
            pl.col("moved", "frozen") & (pl.col("first") >= (start or 0)), since=pl.lit(start, pl.Int64)
        )
        return pl.concat([records.select(*STEP_KEY, "spare", "inside"), pairs], how="diagonal")

    def _since(self, pairs: pl.DataFrame) -> int | None:
        """Return the version from which on the sampler stays while the trainer moves."""
        moved = pairs.filter("moved")
        for start in pairs["first"].unique().sort():
            later = moved.filter(pl.col("first") >= start)
            enough = len(later) >= self.least_pairs and later["context"].n_unique() >= self.least_contexts
            if enough and later["frozen"].sum() >= self.share * len(later):
                return int(start)
        return None

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of pairs, and what moved in them."""
        moved = pl.col("moved")
        return {
            "pairs": (pl.count("first"), "pairs"),
            "moved_pairs": (moved.sum(), "pairs"),
            "contexts": (pl.col("context").filter(moved).n_unique(), "contexts"),
            "frozen_share": (pl.sum("frozen") / moved.sum(), "share"),
            "frozen_from": (pl.max("since"), "version"),
            "trainer_move": (pl.col("trainer").filter(moved).median(), "nats"),
            "sampler_move": (pl.col("sampler").filter(moved).median(), "nats"),
            "noise": (_NOISE, "nats"),
        }

    def _gaps_to_reference(self, run: Measured) -> tuple[int, float, float] | None:
        """Steps, and the sampler's gaps to trainer and reference at their end, where the sampler is the reference."""
        gaps = run.run.rows.filter(pl.col("compared") > 0).sort("step").select(pl.col("^to_.*$") / pl.col("compared"))
        trainer, reference = gaps["to_trainer"], gaps["to_reference"]
        last = gaps.tail(max(1, len(gaps) // 3))
        if len(gaps) < 4 or (last["to_reference"] > 0.1 * last["to_trainer"]).any():
            return None
        grows = gaps.select(pl.corr(pl.int_range(pl.len()), "to_trainer", method="spearman")).item() >= 0.8
        return (len(gaps), trainer[-1], reference[-1]) if grows and trainer[-1] >= self.least_exact else None

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No prompt came again, or no two siblings began with the same token."""
        if self._gaps_to_reference(run) is not None:
            return None
        of, remedy = "of one context at two versions", "widen --steps to where prompts recur"
        few = too_few(run.count("pairs"), "pair", of, self.least_pairs, remedy)
        if few is not None or run["noise"] is not None:
            return few
        return Missing(
            "no two responses of a group begin with the same token, so the trainer's noise is unknown",
            "record groups of several responses",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning: the log-probs show it, and no logged value proves it."""
        gaps = self._gaps_to_reference(run)
        if gaps is not None:
            steps, gap, reference = gaps
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=(
                    f"the sampler still runs the reference weights: its log-probs are {number(gap)} nats from the "
                    f"trainer's but {number(reference)} from the reference's"
                ),
                message=(
                    f"over {counted(steps, 'step')} the sampler's difference to the trainer grows to {number(gap)} "
                    f"nats while that to the reference stays at {number(reference)}: the engine never received the "
                    "trained weights"
                ),
                evidence="the log-probs of sampler, trainer and reference",
                advice="check that the engine serves the adapter, and compare one of its weights with the trainer's",
            )
        if run["frozen_from"] is None or run["noise"] is None:
            return None
        move = number(run["trainer_move"])
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=(
                f"from version {run['frozen_from']} on the sampler's log-probs stay the same "
                f"while the trainer's change by {move} nats"
            ),
            message=(
                f"in {percent(run['frozen_share'])} of {counted(run.count('moved_pairs'), 'pair')} of one context at "
                "two versions the sampler's log-prob is unchanged; the median change is "
                f"{number(run['sampler_move'])} nats for the sampler and {move} for the trainer"
            ),
            evidence=(
                f"the log-probs of {counted(run.count('contexts'), 'context')} that recur; the trainer's noise among "
                f"group members is {number(run['noise'])} nats"
            ),
            advice=(
                "compare one weight of the engine with the trainer's after a sync; check that the adapter is served "
                "and that bf16 rounding does not lose the updates"
            ),
        )


_NOISE = pl.when(pl.sum("spare") >= 10).then((pl.sum("inside") / pl.sum("spare")).sqrt())
"""Standard deviation of the trainer's log-prob among rows of one context and version."""
