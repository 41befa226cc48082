"""RDG004: a logged loss that is the KL term and nothing else, from the trainer's log alone."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.logged_quantities import by_step, is_rounded, metrics_of, not_logged
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

_READ = ("loss", "policy_loss", "kl", "kl_coefficient", "kl_term", "grad_norm", "ppo_kl")
"""Quantities that the rule reads."""


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
    The policy part is the logged policy loss, or the logged loss minus the coefficient, if stated, times the logged KL.
    The KL part is what the trainer logs as such, its logged coefficient times the KL, or the loss minus its policy part
    if that is a round number times the KL. For TRL the difference is the policy part if the KL in the loss is averaged
    over tokens as in the metric: `loss_type` dapo, or bnpo on one micro-batch; elsewhere the two need not match, and
    the rule is silent unless they do. A step counts if the KL part is at least 1e-7 and the policy part at most 1e-4 of
    it; a loss rounded to four digits (transformers before 5) is ignored below 0.5. Confirmed: the trainer logged it.
    `zero_policy_steps` have a policy loss of exactly 0 although the ratio is not 1 (a KL of the update above 1e-3):
    there advantages do not cancel, so every one is 0. It is a warning if more than a tenth of the steps are of that
    kind, or if in as many the loss is the KL alone and the gradient norm is 0; else information.

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
    moved: float = 1e-3
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
        names = context.quantities.keys()
        return "kl_term" in names or ("kl" in names and bool(self._sources(context)))

    def _sources(self, context: Context) -> tuple[str, ...]:
        """Return what the KL part can be made of, beside the KL."""
        names, coefficient = context.quantities.keys(), stated_coefficient(context)
        present = [coefficient is not None and "loss" in names, {"policy_loss", "kl_coefficient"} <= names]
        present.append({"policy_loss", "loss"} <= names)
        return tuple(name for name, is_there in zip(("stated", "logged", "loss"), present, strict=True) if is_there)

    def _not_logged(self, context: Context) -> Missing:
        if "kl" not in context.quantities:
            return not_logged(context, "kl")
        if "loss" not in context.quantities and "policy_loss" not in context.quantities:
            return not_logged(context, "loss")
        option = None if context.writer is None else context.writer.roles.kl
        how = f"add --set {option}=NUMBER" if option else "log the policy loss apart from the loss"
        return Missing("nothing gives the coefficient of the KL in the loss", how)

    def metrics(self, context: Context) -> frozenset[str]:
        """The loss and its parts, the KL and the gradient norm."""
        return metrics_of(context, _READ)

    def watched(self, context: Context) -> tuple[str, ...]:
        """The loss and its parts."""
        return ("loss", "policy_loss", "kl", "kl_term")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step of which the log gives the parts; `loss`, `kl` and `norm` where it is the KL alone."""
        loss, policy, kl = pl.col("loss"), pl.col("policy_loss"), pl.col("kl")
        coefficient = stated_coefficient(context)
        rest = loss - policy
        by_kl = rest / kl
        term = pl.coalesce(
            "kl_term", pl.col("kl_coefficient") * kl, pl.when((by_kl - _round(by_kl)).abs() <= 1e-5 * by_kl).then(rest)
        )
        if coefficient is not None and "policy_loss" not in context.quantities:
            term = pl.coalesce(term, coefficient * kl)
            policy = loss - coefficient * kl
        log = by_step(run, context, _READ).select(*STEP_KEY, "grad_norm", "ppo_kl", policy=policy, part=term)
        log = log.filter(pl.col("policy").is_finite(), pl.col("part").is_finite())
        size = pl.col("policy").abs()
        is_kl = (pl.col("part").abs() >= self.smallest_kl) & (size <= self.negligible * pl.col("part").abs())
        is_zero = (size == 0) & (pl.col("ppo_kl").abs() > self.moved) & pl.lit(not is_rounded(context, "policy_loss"))
        columns = {"loss": pl.col("policy") + pl.col("part"), "kl": pl.col("part"), "norm": pl.col("grad_norm")}
        return log.select(
            *STEP_KEY,
            is_zero=(is_kl & is_zero).fill_null(value=False),
            policy=pl.when(is_kl).then(size),
            **{name: pl.when(is_kl).then(value) for name, value in columns.items()},
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Means over the steps in question."""
        loss, norm = pl.col("loss"), pl.col("norm")
        return {
            "steps_share": (loss.is_not_null().mean(), "share"),
            "kl_only_steps": (loss.count(), "steps"),
            "dead_steps": ((norm == 0).sum(), "steps"),
            "zero_policy_steps": (pl.col("is_zero").sum(), "steps"),
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
        """No line with both parts."""
        return None if len(run.table) else Missing("no line gives the policy and the KL part of the loss", LONGER_LOG)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information; a warning where the gradient is dead as well, or the advantages are."""
        kl_only, steps = run.count("kl_only_steps"), len(run.table)
        if not kl_only:
            return None
        zero = run.count("zero_policy_steps")
        if zero > self.dead_warn_above * steps:
            return self._without_advantages(run, context, zero)
        share, dead_share = run["steps_share"], run.count("dead_steps") / steps
        norm = run["grad_norm"]
        norm_words = "no norm was logged" if norm is None else f"the logged gradient norm is {number(norm)}"
        return Judgement(
            severity=Severity.WARNING if dead_share > self.dead_warn_above else Severity.INFO,
            confirmed=True,
            headline=f"in {counted(kl_only, 'step')} of {steps:,} the loss is only the KL term",
            message=(
                f"in {percent(share)} of the steps the logged loss equals its KL term ({number(run['loss'])} on "
                f"average); {norm_words}"
            ),
            evidence=(
                "the logged policy part, or the loss minus coefficient times KL, is at most "
                f"{number(run['largest_policy_loss'])} there"
            ),
            advice=(
                f"check the rewards and the mask: {percent(dead_share)} of the steps also had a gradient norm of 0, so "
                "nothing was updated"
                if dead_share
                else "watch the reward and the gradient norm instead of the loss"
            ),
        )

    def _without_advantages(self, run: Measured, context: Context, zero: int) -> Judgement:
        """Judge a policy loss that is exactly 0 although the ratio is not 1."""
        first = run.table.filter("is_zero").row(0, named=True)
        steps = f"step {first['step']}" if len(run.table) == 1 else f"{zero:,} of {counted(len(run.table), 'step')}"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"in {steps} the loss is the KL term alone ({number(first['kl'])}): the policy loss is exactly 0, "
            "so every advantage is 0",
            message=f"In {steps} the policy loss is exactly 0 while the importance ratio is not 1, so that advantages "
            "cannot cancel: every advantage is 0, and only the KL moves the weights.",
            evidence="the logged policy loss, and the logged KL of the update",
            advice="check whether the rewards differ within groups, and what the advantages are computed from",
            measures={"onset": Measure(first["step"], "step")},
        )


def stated_coefficient(context: Context) -> float | None:
    """Return the coefficient of the KL in the loss that the options state, where the loss has no entropy bonus."""
    objective, config = context.objective, context.config
    option = None if context.trainer is None else context.trainer.roles.kl
    if option is None or config is None or objective is None or objective.entropy_bonus is not None:
        return None
    setting = config.settings.get(option)
    if setting is None or not setting.is_stated or not isinstance(setting.value, int | float) or not setting.value:
        return None
    return float(setting.value)


def _round(x: pl.Expr) -> pl.Expr:
    """Round to two significant digits, as coefficients are."""
    return x.round_sig_figs(2)
