"""RDG004: a logged loss that is the KL term and nothing else, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logs_remedy, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from rolloutdoctor.rules.logged_step import LoggedStep


@dataclass(frozen=True)
class KlOnlyLoss(TableRule):
    """The logged loss is the KL term alone: the curve shows drift from the reference, not learning.

    ## What it does
    Compares the logged loss with the logged KL times its coefficient. No rollouts are needed; if the run has them and
    they give the loss exactly, `RDG002` covers this case and this rule does not run.

    ## Why it matters
    At importance ratio 1 the policy term equals minus the mean advantage, which is 0 for centred advantages of equal
    weight. The printed loss is then beta times the KL: it starts at 0 and rises, although the policy gradient is not
    zero. So a falling loss is not progress, and a rising loss is not divergence.

    ## How it is measured
    TRL: `policy_loss` is the logged `loss` minus beta (which has to be given) times the logged `kl`. That difference is
    the policy part where TRL averages the KL in the loss over tokens as in the metric: `loss_type` dapo or bnpo on one
    micro-batch; elsewhere the two need not match, and the rule is silent unless they do. verl: `actor/pg_loss` is the
    policy part, and `actor/kl_loss` times `actor/kl_coef` the KL part. A step counts if the KL part is at least 1e-7
    and the policy part at most 1e-4 of it; a loss rounded to four digits (transformers before 5) is ignored below 0.5.
    Confirmed: it is what the trainer logged.

    ## What to do
    Nothing, if the logged gradient norm is not 0: watch reward and gradient norm instead of the loss.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> logged = {"loss": 9.192e-06, "kl": 2.298e-04, "grad_norm": 0.8}
    >>> diagnose_one("RDG004", toy_batch([[1, 0]]), trainer="trl", logged=logged, beta=0.04)
    'RDG004 info confirmed: steps_share 1'
    """

    code = "RDG004"
    name = "kl-only-loss"
    references = (
        "https://github.com/huggingface/open-r1/issues/239",
        "https://github.com/huggingface/trl/issues/2703",
    )
    needs_objective = False
    needs_loss = True
    needs_rows = False
    splits = ("train",)

    negligible: float = 1e-4
    smallest_kl: float = 1e-7
    dead_warn_above: float = 0.1

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The KL term in the loss, unless the log shows it."""
        return () if self._is_logged(context) else (Part.KL_LOSS,)

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rows that give the two parts of the loss exactly."""
        # The two log-probs stand in for each other.
        either = {"old_log_probs", "policy_log_probs"}
        held = context.columns | (either if either & context.columns else set())
        if context.objective is not None and loss_columns(context.objective) <= held:
            return "with rollouts RDG002 tests this exactly"
        return None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log that does not give the two parts of the loss."""
        return None if self._is_logged(context) else self._not_logged(context)

    def _is_logged(self, context: Context) -> bool:
        trainer = context.writer
        names = dict.fromkeys(context.metrics, 0.0)
        return trainer is not None and trainer.log.loss_parts(names, context.config) is not None

    def _not_logged(self, context: Context) -> Missing:
        return Missing(
            "the log does not give the policy and the KL part of the loss",
            context.recording.get("loss_parts", f"name the trainer with --trainer NAME, and {logs_remedy()}"),
        )

    def measure_log(self, step: "LoggedStep") -> Mapping[str, float | None]:
        """The two parts of the logged loss, and the gradient norm."""
        trainer = step.writer
        parts = None if trainer is None or not step.training else trainer.log.loss_parts(step.logged, step.config)
        if trainer is None or parts is None or not abs(parts.policy) + abs(parts.kl) < float("inf"):
            return {}
        return {"policy": parts.policy, "kl": parts.kl, "norm": step.logged.get(trainer.log.grad_norm)}

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step of which the log gives the parts; `loss`, `kl` and `norm` where it is the KL alone."""
        policy, kl, norm = pl.col("policy").abs(), pl.col("kl"), pl.col("norm")
        is_kl = (kl.abs() >= self.smallest_kl) & (policy <= self.negligible * kl.abs())
        parts = run.by_step("policy", "kl", "norm").drop_nulls("kl")
        loss = pl.when(is_kl).then(pl.col("policy") + kl)
        return parts.with_columns(
            loss=loss, kl=pl.when(is_kl).then(kl), norm=pl.when(is_kl).then(norm), policy=pl.when(is_kl).then(policy)
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the steps in question."""
        loss, norm = pl.col("loss"), pl.col("norm")
        return {
            "steps_share": (loss.is_not_null().mean(), "share"),
            "kl_only_steps": (loss.count(), "steps"),
            "dead_steps": ((norm == 0).sum(), "steps"),
            "loss": (loss.mean(), "loss"),
            "kl_loss": (pl.mean("kl"), "loss"),
            "largest_policy_loss": (pl.max("policy"), "loss"),
            "grad_norm": (norm.mean(), "parameter norm"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The steps themselves."""
        return table.drop_nulls("loss").with_columns(value=pl.col("loss").abs())

    def note(self, place: Mapping[str, Any]) -> str:
        """The loss."""
        return f"loss {number(place['loss'])}, all of it KL"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log that does not give the two parts of the loss."""
        return None if len(run.table) else self._not_logged(context)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information; a warning where the gradient is dead as well."""
        found, steps = run.count("kl_only_steps"), len(run.table)
        if not found:
            return None
        share, dead_share = run["steps_share"], run.count("dead_steps") / steps
        norm = run["grad_norm"]
        norm_words = "no norm was logged" if norm is None else f"the logged gradient norm is {number(norm)}"
        return Judgement(
            severity=Severity.WARNING if dead_share > self.dead_warn_above else Severity.INFO,
            confirmed=True,
            headline=f"in {counted(found, 'step')} of {steps:,} the loss is only the KL term",
            message=(
                f"in {percent(share)} of the steps the logged loss equals its KL term ({number(run['loss'])} on "
                f"average); {norm_words}"
            ),
            evidence=(
                "the logged policy part, or the loss minus coefficient times KL, is at most "
                f"{number(run['largest_policy_loss'])} there"
            ),
            advice=(
                f"{percent(dead_share)} of the steps also had a gradient norm of 0, so nothing was updated: check the "
                "rewards and the mask"
                if dead_share
                else "no action: watch the reward and the gradient norm instead of the loss"
            ),
        )
