"""RDG011: a reference model that does not stay what it was."""

from collections.abc import Mapping
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, too_few
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

RATES = ("learning_rate", "lr")
"""Names of a logged learning rate, whatever comes before the last slash."""


class ReferenceMoved(TableRule):
    """The reference model moved: KL to it drops at once and stays low, or it is the policy itself.

    ## What it does
    Looks for a step from which on the KL of policy and reference is a tenth of what it was, while the policy moves no
    more than usual; and for a reference whose log-probs are those of the policy, bit by bit, while the policy moves.

    ## Why it matters
    The KL term keeps the policy near a fixed model; a reference that moves with the policy removes that constraint. A
    reference that was loaded anew from a checkpoint of the policy, or that shares its weights, holds it near nothing:
    the KL that is logged looks better than ever.

    ## How it is measured
    The KL is the mean of k3 over the trained tokens of each step; in a step with more than 32,768 response tokens, over
    every second token, every third and so on. A fall counts if the KL is at most a tenth of that of the step before,
    and the largest of the three steps from there is at most half of the smallest of the three before. In logarithms
    this gap has to be twice the largest gap of a rise to an earlier level, and twice the median change between
    neighbours: steps drawn from one distribution rise as far as they fall. (Or the KL is a tenth of that smallest, the
    largest is half of the step before, and no other fall is more than a third of it in logarithms.) A KL below 1e-8
    nats is rounding. The mean log-prob of the policy must change by at most three times its median change between
    neighbouring steps: another data set, a restart or a jump of the policy changes it as well. Three or more falls at
    equal distances are a schedule, and information; the rows cannot distinguish a single unrecorded sync from a fault.
    A fall to a third, twice as large as any other, after which the KL stays below three quarters, gives no verdict.
    Equal log-probs count in steps after the first, if an earlier step has different ones or the log-probs at the loss
    are not those before the update. Tokens may be equal by rounding: the probability that all of them are, at the rate
    of the last step with different ones, must be below 2^-40. If log-probs are equal in all of six steps or more, they
    count unless every step that logs a learning rate or a gradient norm has one of 0. Where a sync is recorded (TRL:
    sync_ref_model), this is information. The rule needs at least six steps.

    ## What to do
    Check where the reference is loaded after a resume, and that it shares no weights with the policy. If the trainer
    syncs it on purpose, there is nothing to fix.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> ref = [-1.2] * 4 + [-1.001] * 4
    >>> steps = [toy_batch([[1, 0]], policy=-1.0, ref=each, step=step) for step, each in enumerate(ref)]
    >>> [found] = diagnose(steps, trainer="trl", select=["RDG011"]).findings
    >>> found.headline
    'the KL to the reference falls from 0.0187 to 5e-07 at step 4 and stays low'
    """

    code = "RDG011"
    name = "reference-moved"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/issues/2955",
        "https://github.com/NVIDIA-NeMo/RL/pull/3722",
        "https://github.com/modelscope/ms-swift/issues/3558",
    )
    adds = ("tokens", "kl", "policy", "moved", "different")
    needs_objective = False
    splits = ("train",)
    needs = ("policy_log_probs", "ref_log_probs")
    uses = ("old_log_probs", "response_mask")
    """The mask, and the log-probs before the update, which show that the policy moves."""

    fall: float = 0.1
    """Nine tenths between two steps: training moves the KL by parts of it."""

    level: float = 0.5
    """Of what was there before, that is left afterwards at most."""

    others: float = 3.0
    """Times any other fall, of one that the policy leaves at once."""

    policy_moves: float = 3.0
    """Times its median change, up to which the policy itself did not jump."""

    window: int = 3
    """Steps before and after that must show it, so that one odd batch does not."""

    beyond_chance: float = 2.0
    """Times what the noise of the steps does in the other direction: for steps drawn alike a fall twice as far as the
    farthest rise has a probability that goes down with their number, below one run in 100 of 1,000 steps."""

    bits: float = 40.0
    """Bits of evidence needed that the tokens are not equal by rounding."""

    unsure_fall: float = 1 / 3
    """A fall to this, and not to a tenth, is neither a finding nor clean."""

    unsure_level: float = 0.75
    """The same as `level`, of such a fall."""

    unsure_others: float = 2.0
    """The same as `others`, of such a fall."""

    least_kl: float = 1e-8
    """Below it k3 is what float32 log-probs leave."""

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Add up the trained tokens of each row that are looked at, and count those that differ from the reference."""
        from rolloutdoctor.ops.elementwise import difference, is_below, is_unequal, kept
        from rolloutdoctor.rules.measures.every_nth import every_nth

        if not block.has("policy_log_probs", "ref_log_probs"):
            return {}
        some = every_nth(block)
        policy_T, ref_T, trained_T = some.column("policy_log_probs"), some.column("ref_log_probs"), some.trained_T
        different_n = some.runs.total(_differ(policy_T, ref_T) & trained_T)
        if some.stride > 1 and not bool(different_n.any()):
            # That they are equal is said of every trained token.
            differ_T = _differ(block.column("policy_log_probs"), block.column("ref_log_probs"))
            different_n = block.row_sum(differ_T & block.trained_T)
        is_old = block.is_logged("policy_log_probs") and block.is_logged("old_log_probs")
        old_T = some.column("old_log_probs") if is_old else policy_T
        apart_T = difference(ref_T, policy_T)
        counted_T = trained_T & is_below(apart_T.abs(), inf)
        moved_T = counted_T & is_unequal(old_T, policy_T)
        policy_T, apart_T = kept(policy_T, counted_T), kept(apart_T, counted_T)
        terms = counted_T, apart_T.expm1() - apart_T, policy_T, moved_T
        return dict(zip(self.adds, (*map(some.runs.total, terms), different_n), strict=True))

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Whether a learning rate or a gradient norm of 0 was logged, if any was."""
        norm = None if step.log.writer is None else step.log.writer.log.grad_norm
        rates = [value for name, value in step.logged.items() if name == norm or name.rpartition("/")[2] in RATES]
        return {"still": 0.0 in rates} if rates else {}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Add up the tokens of each step."""
        return rows.drop_nulls("tokens").group_by(STEP_KEY, maintain_order=True).agg(pl.sum(*self.adds))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with tokens that are looked at: its mean KL, and whether that falls there."""
        kl, before, drop, tokens = pl.col("mean_kl"), pl.col("mean_kl").shift(1), pl.col("drop"), pl.col("tokens")
        # Of three steps before, and of three from there on.
        low, high = kl.rolling_min(self.window).shift(1), kl.rolling_max(self.window).shift(1 - self.window)
        stands_out = self._log(low) - self._log(high) >= self.beyond_chance * self._chance(kl)
        policy_moved = pl.col("mean_policy").diff().abs()
        stays = (before > self.least_kl) & (policy_moved <= self.policy_moves * policy_moved.median() + 1e-12)
        # The largest fall beside the one of the step, in logarithms.
        other_drop = pl.when(drop < drop.max()).then(drop.max()).otherwise(drop.filter(drop < drop.max()).max())
        other_drop = other_drop.fill_null(0.0)
        # A policy that moves fast leaves the new reference at once: the KL stays low for one step then.
        deep = (kl <= self.fall * low) & (high <= self.level * before) & (drop >= self.others * other_drop)
        partly = (drop >= self.unsure_others * other_drop) & (high <= self.unsure_level * before)
        partly &= kl <= pl.min_horizontal(self.unsure_fall * before, self.unsure_level * low)
        return (
            run.rows.filter(tokens > 0)
            .join(run.by_step("still").cast({"still": pl.Boolean}), on=STEP_KEY, how="left", maintain_order="left")
            .with_columns(mean_kl=pl.col("kl") / tokens, mean_policy=pl.col("policy") / tokens)
            .with_columns(drop=pl.when(before > 0).then((before.clip(1e-300) / kl.clip(1e-300)).log(2)))
            .with_columns(
                before_kl=before,
                before_policy=pl.col("mean_policy").shift(1),
                is_equal=pl.col("different") == 0,
                is_fall=(((kl <= self.fall * before) & (high <= self.level * low) & stands_out) | deep) & stays,
                is_unsure=partly & stays,
            )
        )

    def _chance(self, kl: pl.Expr) -> pl.Expr:
        """How far noise moves the KL of three steps against the three before, in the most extreme place, in logarithms.

        Steps drawn alike rise as often as they fall, and as far: the largest rise to a level that was there before
        knows how many places the run has and how heavy the tails of a step are. In a short run that is left to luck,
        and the median change between neighbours is the least.
        """
        before, after = kl.rolling_max(self.window).shift(1), kl.rolling_min(self.window).shift(1 - self.window)
        rises = (self._log(after) - self._log(before)).filter(after <= kl.cum_max().shift(1))
        return pl.max_horizontal(rises.max(), self._log(kl).diff().abs().median()).fill_null(0.0)

    def _log(self, kl: pl.Expr) -> pl.Expr:
        return kl.clip(self.least_kl).log()

    def quantities(self) -> Mapping[str, Quantity]:
        """The KL, and where it fell."""
        return {
            "falls": (pl.sum("is_fall"), "steps"),
            "first_fall": (pl.col("step").filter("is_fall").min(), "step"),
            "kl_mean": (pl.sum("kl") / pl.sum("tokens"), "nats"),
            "equal_steps": (pl.sum("is_equal"), "steps"),
            "steps": (pl.len(), "steps"),
        }

    def _is_policy(self, table: pl.DataFrame) -> list[int]:
        """Steps after the first in which the reference is the policy, where something shows that this one moves."""
        equal, tokens, different = table.slice(1).filter("is_equal")["step"], pl.col("tokens"), pl.col("different")
        if table["is_equal"].all():
            return equal.to_list() if len(equal) >= self.window and table["moved"].sum() else []
        # One more token of either kind, so that none is impossible.
        chance = pl.when(different > 0).then((tokens - different + 1) / (tokens + 2)).forward_fill()
        bits = table.select(-(tokens * chance.log(2)).filter("is_equal").sum()).item()
        first = table.filter(~pl.col("is_equal"))["step"][0]
        return equal.filter(equal > first).to_list() if bits >= self.bits else []

    def _is_policy_throughout(self, table: pl.DataFrame) -> bool:
        """True if the reference is the policy in all of enough steps, and nothing shows that this one moves."""
        return len(table) >= 2 * self.window and bool(table["is_equal"].all()) and not table["moved"].sum()

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps to tell before from after, or a policy that stays where it is."""
        table, still = run.table, run.table["still"].drop_nulls()
        of, remedy = "with log-probs of both models", "widen --steps, or record more steps"
        if (few := too_few(len(table), "step", of, 2 * self.window, remedy)) is not None:
            return few
        if self._is_policy_throughout(table) and len(still) and still.all():
            return Missing("the policy does not change: the logged learning rate or gradient norm is 0", "train on")
        unsure = table.filter("is_unsure")["step"]
        if len(unsure) and not run["falls"] and not self._is_policy(table):
            return Missing(
                f"the KL to the reference falls to a third or less at step {unsure[0]}: a reference that moved part of "
                "the way to the policy and a policy that comes back are alike there",
                "compare the reference's weights with those of the step before, or record prompts that recur",
            )
        return None

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning, or information where a sync is recorded or the falls are a schedule."""
        table, rates = run.table, run.table["still"].drop_nulls()
        equal, moved = self._is_policy(table), int(table["moved"].sum())
        if equal:
            remark = f"; {counted(moved, 'token')} moved between update and loss" if moved else ""
            return _of_equal(context, counted(len(equal), "step"), (equal[0], equal[-1]), remark, confirmed=True)
        if self._is_policy_throughout(table):
            remark = "" if rates.all() else "; learning rate and gradient norm are not 0"
            return _of_equal(context, f"all {counted(len(table), 'step')}", None, remark, confirmed=bool(remark))
        return _of_falls(table, table.filter("is_fall")["step"].to_list(), context) if run["falls"] else None


ADVICE = "check which weights the reference loads after a resume, and that it shares no parameters with the policy"


def _synced(context: Context) -> str:
    """Name the option that is recorded as syncing the reference with the policy, as evidence; empty without one."""
    name = None if context.trainer is None else context.trainer.roles.sync
    sync = None if name is None or context.config is None else context.config.settings.get(name)
    return f"; {name} = true is recorded" if sync is not None and sync.is_stated and sync.value is True else ""


def _of_equal(context: Context, steps: str, ends: tuple[int, int] | None, remark: str, *, confirmed: bool) -> Judgement:
    """Judge a reference that is the policy from the first of some steps to the last, or in all (`ends` is None)."""
    synced = _synced(context)
    return Judgement(
        severity=Severity.INFO if synced else Severity.WARNING,
        confirmed=confirmed,
        headline=f"reference and policy are bit-identical in {steps}" + (f" from step {ends[0]}" if ends else ""),
        message="reference and policy log-probs are equal on every trained token"
        + (
            f" of {steps} ({ends[0]} to {ends[1]}), although the policy changes"
            if ends
            else ": the reference shares the policy's weights, or updates change nothing"
        ),
        evidence=f"the log-probs of both models{remark}{synced}",
        advice=ADVICE,
    )


def _of_falls(table: pl.DataFrame, falls: list[int], context: Context) -> Judgement:
    """A warning about a KL that falls, or information where the falls are a schedule."""
    gaps, synced = {later - earlier for earlier, later in pairwise(falls)}, _synced(context)
    regular = len(falls) > 2 and len(gaps) == 1
    columns = ("before_kl", "mean_kl", "before_policy", "mean_policy")
    before_kl, kl, before_policy, policy = table.filter("is_fall").select(columns).row(0)
    return Judgement(
        severity=Severity.INFO if synced or regular else Severity.WARNING,
        confirmed=False,
        headline=(
            f"the KL to the reference falls from {number(before_kl)} to {number(kl)} at step {falls[0]} and stays low"
        ),
        message=(
            f"the KL to the reference falls by at least 90 % at {counted(len(falls), 'step')}"
            + (f", every {gaps.pop()} steps: the reference is synced on a schedule" if regular else "")
            + f"; meanwhile the policy's mean log-prob goes from {before_policy:.4g} to {policy:.4g}"
        ),
        evidence="the log-probs of both models" + (synced or "; an intended reference sync looks the same"),
        advice=ADVICE,
    )


def _differ(policy_T: "Tensor", ref_T: "Tensor") -> "Tensor":
    """Tokens whose two log-probs are known and not the same number, ``[T]`` bool."""
    from rolloutdoctor.ops.elementwise import is_above, is_below

    # Of two float32 numbers the difference is 0 only if they are equal. NaN is neither above nor below.
    size_T = (ref_T - policy_T).abs()
    return is_above(size_T, 0.0) & is_below(size_T, inf)
