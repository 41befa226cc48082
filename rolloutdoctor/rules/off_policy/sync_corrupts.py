"""RDO014: weight syncs that leave the sampler with weights that the trainer never had."""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.ops.change import rise
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, number, too_few
from rolloutdoctor.rules.measures.lag_table import LEAST_TOKENS, MOST_LAGS
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

STAMPS = ("policy_version_min", "policy_version_max")


class SyncCorrupts(TableRule):
    """A weight sync gives the sampler weights that the trainer never had.

    ## What it does
    Looks for a step from which on the gap between sampler and trainer is much larger than before, and checks that old
    weights do not explain it.

    ## Why it matters
    Weights that are loaded into another layout than the kernels', in parts that overwrite each other, or not at all for
    some layers, make the sampler another model at its first sync: responses turn into fragments, and every one of them
    is trained on. It looks like a lost sync, and syncing more often does not cure it. Upstream, weights that were sent
    in several chunks turned mixture-of-experts models into gibberish after the first sync: each chunk reset the layers
    that it did not hold.

    ## How it is measured
    The gap is the mean absolute difference of the two log-probs on trained tokens that the sampler gave less than 0.9,
    of the rows of the newest version, as a median over rows. A finding requires that from some step, in three steps or
    more, it is at least ten times what it ever was before, and 0.1 nats or more. *Old weights* are excluded in one of
    two ways. With a reference that stays: the gap is four times or more the mean absolute difference of trainer and
    reference in all of these steps, so that not even the initial weights are as far away. Without one: the jump is at
    the second or third step, at which the version stamps rise, and in at least five steps from there the gap does not
    grow (the last third has at most 1.5 times the first). The distance to weights before the first update grows with
    each update, at least with the root of their number; that of a sampler which is always some versions behind does
    not, but its versions rise after the trainer's. Without stamps such a jump is skipped, as it is with stamps that
    contradict each other (left to `version-stamps`), and as is a smaller one of three times or more that does not grow.
    Nor may the gap of older rows be 1.5 times that of newer ones. What remains is left to `stale-policy`.

    ## What to do
    After a sync compare every weight of the engine with the trainer's, or the log-probs of one prompt; look at expert
    layers, fused and quantized ones, and at loading in several chunks.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> steps = [toy_batch([[1, 0]], lengths=64, rollout=-1.0 - gap, step=step,
    ...                    per_row={"policy_version_min": [step] * 2, "policy_version_max": [step] * 2})
    ...          for step, gap in enumerate([0.01, 0.5, 0.52, 0.5, 0.49, 0.51])]
    >>> diagnose(steps, trainer=None, select=["RDO014"]).findings[0].headline
    'the gap to the sampler jumps from 0.01 to 0.5 nats at step 1, and older weights do not explain it'
    """

    code = "RDO014"
    name = "sync-corrupts"
    references = (
        "https://github.com/NovaSky-AI/SkyRL/pull/1737",
        "https://github.com/verl-project/verl/pull/7195",
        "https://github.com/verl-project/verl/issues/7904",
    )
    reads = STAMPS
    adds = ("lag", "unsure", "size", "tokens", "apart", "trainer")
    needs_objective = False
    splits = ("train",)
    needs = ("old_log_probs", "rollout_log_probs")
    uses = ("response_mask", "ref_log_probs", *STAMPS, "optim_step_id")

    factor: float = 10.0
    smaller: float = 3.0
    """A lasting rise that a sampler some versions behind has as well, and that a sync may have made."""
    least: float = 0.1
    lasting: int = 3
    flat_steps: int = 5
    flat: float = 1.5
    beyond: float = 4.0

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sum the gap to the sampler, the distance to the reference and the trainer's log-prob of each row."""
        from rolloutdoctor.ops.elementwise import is_below, kept
        from rolloutdoctor.rules.measures.every_nth import every_nth
        from rolloutdoctor.rules.measures.sampler_gap import gap_of, sizes_of_rows

        gap, some = gap_of(block), every_nth(block)
        if gap is None:
            return {}
        own_T = some.column("old_log_probs")
        known_T, measures = some.trained_T & is_below(own_T.abs(), inf), {**sizes_of_rows(gap)}
        if block.has("ref_log_probs"):
            apart_T = (own_T - some.column("ref_log_probs")).abs()
            known_T = known_T & is_below(apart_T, inf)
            measures["apart"] = some.runs.total(kept(apart_T, known_T))
        return measures | {"tokens": some.runs.total(known_T), "trainer": some.runs.total(kept(own_T, known_T))}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The lag of each row behind the newest version of its step."""
        return {"lag": step.lags(MOST_LAGS)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the gaps of each step, and what its stamps say."""
        lag, size, unsure = pl.col("lag").fill_null(0), pl.col("size"), pl.col("unsure")
        is_new, tokens = lag == lag.min(), pl.col("tokens")
        relative = (size / unsure).filter(unsure > 0)
        oldest, newest = (pl.col(name) for name in STAMPS)
        backwards = ((oldest >= 0) & (newest >= 0) & (newest < oldest)).any()
        stamps = rows.group_by(STEP_KEY, maintain_order=True).agg(is_backwards=backwards, newest=newest.max())
        by_step = rows.filter(unsure.is_not_null()).group_by(STEP_KEY)
        gaps = by_step.agg(
            unsure=unsure.filter(is_new).sum(),
            gap=relative.filter(is_new.filter(unsure > 0)).median(),
            gap_old=relative.filter((~is_new).filter(unsure > 0)).median(),
            apart=pl.col("apart").sum() / tokens.sum(),
            has_apart=pl.col("apart").count() > 0,
            trainer=pl.col("trainer").sum() / tokens.sum(),
            version=pl.max_horizontal(*STAMPS).max(),
        )
        return stamps.join(gaps, on=STEP_KEY, how="left", maintain_order="left")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line a step with enough tokens; `after` from the jump on, if old weights do not explain it.

        `untold` is true of a run with a jump of which nothing says whether they do.
        """
        steps = (
            run.rows.with_columns(
                apart=pl.when(pl.col("has_apart").any()).then("apart"),
                version=pl.when(~pl.lit(self._contradict(run.rows))).then("version"),
            )
            .filter(pl.col("unsure") >= LEAST_TOKENS, pl.col("gap").is_not_null())
            .sort(STEP_KEY)
        )
        jump = self._jump(steps)
        after = pl.lit(value=False) if jump is None else pl.col("step") >= jump
        return steps.with_columns(after=after, untold=pl.lit(jump is None))

    def _contradict(self, steps: pl.DataFrame) -> bool:
        """Tell whether stamps contradict themselves or their order, so that they do not tell when the weights changed.

        A row cannot end under older weights than it began under, and no later step is of older weights alone.
        """
        return bool(steps["is_backwards"].any()) or bool((steps.sort("step")["newest"].diff() < 0).any())

    def _jump(self, steps: pl.DataFrame) -> int | None:
        """Step of a jump that older weights do not explain; one that never comes if there is none.

        None of one that they may explain, and of one that is smaller than what is found.
        """
        gaps, never = steps["gap"].to_list(), 2**62
        place = rise(gaps, factor=self.factor, after=self.lasting)
        if place is None or median(gaps[place:]) < self.least:
            smaller = rise(gaps, factor=self.smaller, after=self.lasting)
            return None if smaller is not None and self._is_flat(gaps[smaller:]) else never
        after = steps.slice(place)
        older = (after["gap_old"] / after["gap"]).median()
        if isinstance(older, float) and older >= self.flat:
            return never
        onset, apart = int(after["step"][0]), after["apart"]
        # A reference that is moved says nothing of the initial weights.
        if apart.count() == len(apart) and apart[-1] >= 0.5 * max(steps["apart"].drop_nulls().to_list()) > 0:
            return onset if bool((after["gap"] >= self.beyond * apart).all()) else never
        if place > 2 or not self._is_flat(gaps[place:]):
            return never
        before, at = steps["version"][place - 1], steps["version"][place]
        if before is None or at is None:
            return None
        return onset if at > before else never

    def _is_flat(self, late: Sequence[float]) -> bool:
        """Tell whether a gap stays what it is, as the distance to weights before the first update does not."""
        third = max(1, len(late) // 3)
        return len(late) >= self.flat_steps and median(late[-third:]) <= self.flat * median(late[:third])

    def quantities(self) -> Mapping[str, Quantity]:
        """The gap before and after."""
        after = pl.col("after")
        return {
            "gap_before": (pl.col("gap").filter(~after).median(), "nats"),
            "gap_after": (pl.col("gap").filter(after).median(), "nats"),
            "jump_step": (pl.col("step").filter(after).min(), "step"),
            "to_reference": (pl.col("apart").filter(after).median(), "nats"),
            "trainer_log_prob_before": (pl.col("trainer").filter(~after).median(), "nats"),
            "trainer_log_prob_after": (pl.col("trainer").filter(after).median(), "nats"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps."""
        of = f"with {LEAST_TOKENS} tokens or more below probability 0.9"
        return too_few(len(run.table), "step", of, self.lasting + 1, "record more steps")

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """A jump that a sampler some versions behind has as well."""
        if not run.table["untold"].any():
            return None
        return Missing(
            "the gap jumps and stays, as after a sync that corrupts and as of a sampler that is some versions behind",
            "record policy_version_min and policy_version_max, or ref_log_probs",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning."""
        if run["jump_step"] is None:
            return None
        step, before, now = run["jump_step"], number(run["gap_before"]), number(run["gap_after"])
        far = run["to_reference"]
        why = (
            f"the trainer is {number(far)} nats from the reference in them, so no earlier weights are as far away"
            if far is not None
            else "it does not grow as the trainer moves on, as the distance to earlier weights would"
        )
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the gap to the sampler jumps from {before} to {now} nats at step {step}, and older weights do "
            "not explain it",
            message=f"from step {step} on the sampler is {now} nats from the trainer, and {before} before; {why}; "
            "the trainer's mean log-prob of what was sampled goes from "
            f"{number(run['trainer_log_prob_before'])} to {number(run['trainer_log_prob_after'])}",
            evidence="the log-probs of sampler and trainer" + ("" if far is None else ", and of the reference"),
            advice=f"compare every weight of the engine with the trainer's after the sync before step {step}, expert, "
            "fused and quantized layers first",
        )
