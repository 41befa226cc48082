"""RDG002: a loss of about zero, explained."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.findings import LONGER_LOG, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent, too_few
from rolloutdoctor.rules.logged_quantities import by_step, metrics_of, not_logged
from rolloutdoctor.rules.loss_log import FEWEST_LINES, LOSSES, READ, judge_log, logged_losses
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class LossNearZero(TableRule):
    """The loss is near zero: expected on-policy, unless the gradient is zero too.

    ## What it does
    Splits the loss of such steps into its policy and KL parts, predicts it at importance ratio 1 for the aggregation
    mode in use, and shows the gradient next to it.

    ## Why it matters
    At importance ratio 1 the policy loss is minus the mean advantage, which is 0 for centered advantages: a small loss
    alone is no fault. Group-centred advantages average to zero over rows of equal weight, so the printed loss is the KL
    part alone, although the policy gradient is not zero. Under a token mean they cancel only if length is uncorrelated
    with reward. If the gradient is zero as well, the step does not update the policy.

    ## How it is measured
    `expected_loss_at_ratio_one` is minus the weighted advantages plus the KL part. Gradients are in log-prob space.
    Run-level numbers are means over the steps whose loss is below 0.001. It is information if there is a gradient; a
    warning if more than a tenth of the steps have none, apart from a single step without a KL, or the first. Confirmed:
    the logged loss equals the recomputed one.

    From a log without rollouts, the loss and the gradient norm are read. A policy term cannot give a gradient norm of
    exactly 0 in a line in which no group is zero-variance, or in a step with reward variance: one such line is a
    warning, and three, if all lines are so, an error. Lines in which more than a tenth of the responses, which may be
    masked, were cut off, or every token is clipped, prove nothing; where all lines are so, one with a share below 1 is
    a warning without proof. Losses of about zero with at most four digits, and
    gradient norms above 0, or above 0.001 in one or two lines, were rounded: the gradient is there, and beta times the
    KL stays below half a digit. A loss and a gradient norm of 0 throughout count from ten lines.

    ## What to do
    Nothing, if there is a gradient. If there is none, either every group has zero reward variance and the loss has no
    KL term, or every token is masked. If the trainer logged a gradient norm of 0 while this gradient is not 0, the
    autograd graph is broken in the trainer.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 0], [0, 1]], policy=-1.0)
    >>> diagnose_one("RDG002", batch, trainer="trl", loss_type="grpo")
    'RDG002 info exposed: loss 0'
    """

    code = "RDG002"
    name = "loss-near-zero"
    references = (
        "https://github.com/huggingface/open-r1/issues/239",
        "https://github.com/huggingface/trl/issues/2703",
    )
    reads = ("loss", "policy_loss", "kl_loss", "grad_l1", "grad_sq")
    adds = ("expected_loss_at_ratio_one", "has_signal")
    needs_objective = False
    needs_loss = True
    needs_rows = False
    splits = ("train",)

    near_zero: float = 1e-3
    dead_warn_above: float = 0.1
    same: float = 0.005
    """Share of the KL part that the policy part may have of a loss that is called the KL part alone: 1.00 to two
    digits."""

    def columns(self, context: Context) -> frozenset[str]:
        """Everything that the loss needs; nothing where there is a log alone."""
        rows = context.has_rows and context.objective is not None
        return loss_columns(context.objective) if rows and context.objective is not None else frozenset()

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Rollouts without options, or a log without loss and gradient norm."""
        if context.has_rows:
            unstated = "nothing says which trainer made the run, and with which options"
            if context.objective is None:
                return Missing(unstated, context.unstated)
            bonus = context.objective.entropy_bonus
            return None if bonus is None else Missing(bonus.no_gradient, bonus.remedy)
        loss = () if context.quantities.keys() & {*LOSSES} else ("loss",)
        needed = (*loss, "grad_norm")
        return None if context.quantities.keys() >= {*needed} else not_logged(context, *needed)

    def metrics(self, context: Context) -> frozenset[str]:
        """What a log without rollouts says of the loss and the gradient."""
        return frozenset() if context.has_rows else metrics_of(context, READ)

    def watched(self, context: Context) -> tuple[str, ...]:
        """The loss and the gradient norm of a log without rollouts."""
        return () if context.has_rows else (*LOSSES, "grad_norm")

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The loss at ratio one, and whether a trained token has a policy gradient."""
        evaluation, rows, tokens = step.evaluation, step.rows, step.tokens
        if evaluation is None or rows is None or tokens is None:
            return dict.fromkeys(self.adds)
        if evaluation.objective.surrogate.moves_without_advantage:
            signal_N = step.batch.rows.diff() >= 0
        elif rows.advantage_N is None:
            assert rows.advantage_T is not None
            signal_N = step.row_sum((rows.advantage_T != 0) & step.batch.column("response_mask")) > 0
        else:
            assert rows.length_N is not None
            signal_N = (rows.advantage_N != 0) & (rows.length_N > 0)
        bare_N = tokens.loss_at_ratio_one_N * tokens.policy_weight_N
        expected_N = bare_N + tokens.kl_loss_N * tokens.weight_N
        return {"expected_loss_at_ratio_one": expected_N, "has_signal": signal_N}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Return the distance of the logged loss from that of the rows."""
        if not step.logged:
            return {}
        trainer, logged, evaluation = step.log.writer, step.logged, step.evaluation
        # Of several optimizer steps the log may hold one.
        if trainer is None or evaluation is None or evaluation.tokens is None:
            return {}
        if bool((evaluation.tokens.layout.steps_N > 1).any()):
            return {}
        name, no_norm = trainer.log.loss, step.log.is_logged_as_zero(trainer.log.grad_norm)
        if name not in logged:
            return {"no_norm": no_norm}
        recomputed = step.metrics.get(name, evaluation.loss)
        gap = abs(logged[name] - recomputed)
        return {"no_norm": no_norm, "gap": gap, "matched": gap <= step.radius(name, recomputed)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the loss of each step, its parts and its gradient."""
        sums = pl.sum("loss", "policy_loss", "kl_loss", "expected_loss_at_ratio_one", "grad_l1")
        signal = pl.col("has_signal").cast(pl.Boolean).any()
        steps = rows.drop_nulls("loss").group_by(STEP_KEY, maintain_order=True)
        return steps.agg(sums, grad_l2=pl.sum("grad_sq").sqrt(), has_signal=signal)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with a loss, recomputed or else `logged`."""
        near, gradient = pl.col("loss").abs() < self.near_zero, pl.col("grad_l1")
        compared = run.by_step("no_norm", "gap", "matched").with_columns(pl.col("no_norm", "matched").cast(pl.Boolean))
        log = logged_losses(by_step(run, context, READ), context)
        return (
            compared.join(log, on=STEP_KEY, how="left", maintain_order="left")
            .join(run.rows, on=STEP_KEY, how="left", maintain_order="left")
            .filter(pl.col("loss").is_not_null() | pl.col("logged").is_not_null())
            .with_columns(
                is_near=near.fill_null(value=False),
                is_dead=near & (gradient == 0),
                is_kl=near & (gradient > 0) & ~pl.col("has_signal"),
                is_broken=near & (gradient > 0) & pl.col("no_norm"),
            )
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the steps in question."""
        units = dict.fromkeys(("loss", "policy_loss", "kl_loss", "expected_loss_at_ratio_one"), "loss")
        units |= dict.fromkeys(("grad_l1", "grad_l2"), "loss per nat")
        return {name: (pl.col(name).filter("is_near").mean(), unit) for name, unit in units.items()}

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The steps themselves; a dead one weighs more."""
        return table.filter("is_near").with_columns(value=1 + pl.sum_horizontal("is_dead", "is_broken"))

    def note(self, place: Mapping[str, Any]) -> str:
        """Its gradient."""
        kind = "no gradient" if place["is_dead"] else f"gradient {number(place['grad_l1'])} (L1)"
        return f"{kind}, KL term only" if place["is_kl"] else kind

    def decisive_parts(self, run: Measured, context: Context) -> tuple[Part, ...]:
        """Return the parts that turn advantages into a loss, KL term included: another loss might be near 0."""
        return () if len(_log(run)) else (Part.POLICY_LOSS, Part.KL_LOSS)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log that is too short to tell, or that never says both."""
        log = _log(run)
        if context.has_rows or judge_log(log, self.near_zero, context) is not None:
            return None
        if not len(log):
            return Missing("no line has both a loss and a gradient norm", LONGER_LOG)
        return too_few(len(log), "line", "with a loss and a gradient norm", FEWEST_LINES, LONGER_LOG)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information if there is a gradient, a warning if many steps have none, an error if it is cut off."""
        near = run.table.filter("is_near")
        if not len(near):
            return judge_log(_log(run), self.near_zero, context)
        dead, broken = near.select(pl.sum("is_dead", "is_broken")).row(0)
        compared = near.drop_nulls("gap")
        matched = compared.filter("matched")
        dead_share = dead / run.table["loss"].count()
        severity = Severity.ERROR if broken else Severity.INFO
        # One such step says nothing of the run: its groups happened to have equal rewards, and there is no KL term or,
        # at the first step, no distance from the reference yet.
        is_first = near.filter("is_dead")["step"].to_list() == [run.table["step"].min()]
        alone = dead == 1 < run.table["loss"].count() and (run["kl_loss"] == 0 or is_first)
        if dead_share > self.dead_warn_above and not alone:
            severity = max(severity, Severity.WARNING)
        headline = self._headline(near, run.table["loss"].count(), dead)
        message = (
            f"mean loss {number(run['loss'])} = policy {number(run['policy_loss'])} + KL "
            f"{number(run['kl_loss'])}; on-policy (ratio 1) this aggregation gives "
            f"{number(run['expected_loss_at_ratio_one'])}; sum |dLoss/dlogp| is {number(run['grad_l1'])}"
        )
        if broken:
            advice = (
                "look for detached log-probs, frozen parameters or a broken autograd graph: the rows give a nonzero "
                "gradient, but the trainer logged a norm of 0"
            )
        elif dead and not alone:
            advice = (
                f"filter zero-variance groups, or check the mask: {percent(dead_share)} of the steps have no gradient, "
                "because every advantage and KL derivative is 0"
            )
        else:
            advice = (
                "watch the reward and the gradient norm instead: on-policy the surrogate loss is near 0 by "
                "construction, but its gradient is not"
            )
        if len(compared):
            evidence = (
                f"the logged loss equals the recomputed one in {len(matched):,} of {counted(len(compared), 'step')}"
            )
            evidence += f" (within {number(matched.select(pl.max('gap')).item())})" if len(matched) else ""
        else:
            evidence = "no logged loss to compare with"
        if broken:
            evidence += f"; in {counted(broken, 'step')} the logged gradient norm is 0 and the recomputed one is not"
        confirmed = broken > 0 or 0 < len(matched) == len(compared)
        return Judgement(severity, confirmed, headline, message, evidence, advice)

    def _headline(self, near: pl.DataFrame, steps: int, dead: int) -> str:
        """Say what the loss is in the steps in question, and in how many there was a gradient."""
        count = len(near)
        policy, kl = pl.col("policy_loss").abs(), pl.col("kl_loss").abs()
        of_kl = near.filter(kl != 0, policy <= self.same * kl)
        every = f"all {count:,} steps" if count > 1 else "the step"
        gradient = f"{count - dead:,} of {counted(count, 'step')} had a gradient" if dead else f"{every} had a gradient"
        only_kl = int(near["is_kl"].sum())
        if only_kl:
            gradient += ", from the KL term alone" if count == 1 else f", {only_kl:,} of them from the KL term alone"
        if len(of_kl) == count:
            ratio = float(of_kl.select((pl.col("loss") / pl.col("kl_loss")).mean()).item())
            return (
                f"the loss is about 0 in {count:,} of {counted(steps, 'step')} by design: on-policy it is beta x KL "
                f"(loss / (beta x KL) = {ratio:.2f} in {count:,} of {count:,}), which starts at 0 and grows, and does "
                f"not measure progress; {gradient}"
            )
        return f"the loss is about 0 (below {self.near_zero:g}) in {count:,} of {counted(steps, 'step')}; {gradient}"


def _log(run: Measured) -> pl.DataFrame:
    """The lines of a log without rollouts."""
    return run.table.drop_nulls("logged")
