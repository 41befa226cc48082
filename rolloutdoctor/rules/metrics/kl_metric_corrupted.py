"""RDM001: the logged KL is not the KL."""

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.objective.objective import KlBuffer
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns, reward_kl_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, deviation, number, percent, release_with_fix
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView

OF_KL = ("logged", "recomputed", "gap", "fits_kl", "beside_loss")
OF_BUFFER = ("buffer", "differs", "fits_reward", "buffer_gap", "reward_part", "kl_part", "inverted")
OF_TOKENS = ("tokens", "fit_reward", "telling", "telling_fit_kl", "telling_fit_reward")


def _overwrites(context: Context) -> bool:
    """True if the stated options and version are of a trainer that stores the reward buffer as its KL."""
    objective = context.objective
    stores = objective is not None and objective.stores_kl and objective.kl_buffer is KlBuffer.REWARD
    return stores and context.version_stated


def _is_explained(context: Context) -> bool:
    """True if a cause other than the reward buffer explains a logged KL."""
    names = {"kl"} if context.trainer is None else {"kl", *context.trainer.log.kl}
    return any(names & {*cause.explains} for causes in context.causes.values() for cause in causes)


_CHECK = "check that the file holds all rows of the step, and that the KL options are the run's"


class KlMetricCorrupted(TableRule):
    """The logged KL does not match the log-probs, for example because the reward overwrote it.

    ## What it does
    Recomputes the KL metric from the log-probs by the trainer's own definition and compares it with what was logged,
    per step and, where the per-token KL was stored, per token.

    ## Why it matters
    slime's ppo estimator built its reward inside the tensor that holds the KL: `-kl_coef * kl`, plus the reward at the
    last token. The dashboard then shows mean reward divided by mean length under the name `rollout/kl`: it can be
    negative, it rises with reward and falls with length, and with kl_coef = 0 it is reward alone.

    ## How it is measured
    `rel_error` is the mean absolute error divided by the mean absolute recomputed value; `reward_share` is the part of
    the logged value that is reward; `tokens_matching` is the share of stored token values that equal the reward buffer.
    `inverted` is the KL recovered from the corrupted series: (mean reward / mean length - logged) / kl_coef. Two values
    agree if they differ by no more than the float32 rounding error, which for k3 is some `4e-7` per token however small
    the KL is. Confirmed: the logged values, or all stored tokens that tell the two apart, equal the reward buffer and
    not the KL, or the logged loss, which holds the KL, agrees wherever the metric does not. If neither is so, it is a
    warning where `rel_error` is above 5 %, and below that the rule has no verdict. Exposed: the run has no KL, and a
    trainer of this release stores the reward buffer; the measures say how far off its metric is.

    ## What to do
    Upgrade the trainer. For the old run use the recovered KL given here, and ignore alerts that its logged KL
    triggered.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 0]], policy=-1.0, ref=-1.2, lengths=4)
    >>> diagnose_one("RDM001", batch, trainer="slime", logged={"rollout/kl": 0.115}, advantage_estimator="ppo",
    ...              kl_coef=0.05)
    'RDM001 error confirmed: logged 0.115'
    """

    code = "RDM001"
    name = "kl-metric-corrupted"
    rests_on = ("kl",)
    fix = "kl-inplace:copy"
    references = ("https://github.com/THUDM/slime/pull/2114",)
    optional = ("inverted",)
    uses = ("kl",)
    """The stored per-token KL decides token by token."""

    warn_above: float = 0.05

    def columns(self, context: Context) -> frozenset[str]:
        """The log-probs that the KL is made of; nothing if the configuration has no KL."""
        objective = context.objective
        if objective is None:
            return frozenset()
        needed: frozenset[str] = frozenset()
        # A metric of a penalty on the tokens of the mask is compared like one of the loss.
        if objective.kl_loss is not None or (objective.kl_reward is not None and objective.kl_reward.masked):
            needed = loss_columns(objective)
        if objective.kl_reward is not None:
            needed |= reward_kl_columns(objective) | {"reward", "response_mask"}
        return needed

    def parts(self, context: Context) -> tuple[Part, ...]:
        """A KL in the loss or in the reward; one of coefficient 0 is logged all the same."""
        objective = context.objective
        if objective is None or objective.kl_loss is not None or objective.kl_reward is not None:
            return ()
        return (Part.KL_LOSS, Part.KL_REWARD)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """No logged KL to compare."""
        trainer = context.trainer
        if trainer is None or not self.columns(context) or "kl" in context.columns:
            return None
        if context.metrics & set(trainer.log.kl) or _overwrites(context):
            return None
        names = " or ".join(trainer.log.kl)
        if context.averaged & set(trainer.log.kl):
            option = trainer.roles.window
            return Missing(
                f"the logged {names} is a mean over several steps, and there is no column kl",
                f"log every step: {option} = 1 (if that is what the run did, say --set {option}=1)",
            )
        return Missing(
            f"no logged KL: neither a column kl nor the metric {names}",
            "put the logged metrics beside the run as NAME.metrics.parquet or .jsonl (step, split, name, value)",
        )

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """See `logged_kl`."""
        from rolloutdoctor.rules.logged_kl import logged_kl

        return logged_kl(step)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with a KL that could be compared, or whose metric would be the reward buffer."""
        flags = pl.col("fits_kl", "beside_loss", "differs", "fits_reward").cast(pl.Boolean)
        lines = run.by_step(*OF_KL, *OF_BUFFER, *OF_TOKENS).with_columns(flags)
        return lines.filter(pl.any_horizontal(pl.col("recomputed", "tokens").is_not_null()))

    def quantities(self) -> Mapping[str, Quantity]:
        """Logged against recomputed, as means over steps."""
        logged, recomputed, inverted = pl.col("logged"), pl.col("recomputed"), pl.col("inverted")
        is_logged = logged.is_not_null()
        reward, kl = pl.col("reward_part").abs().sum(), pl.col("kl_part").abs().sum()
        means = pl.when(is_logged.any()).then(recomputed.filter(is_logged).mean()).otherwise(recomputed.mean())
        return {
            "logged": (logged.mean(), "nats"),
            "recomputed": (means, "nats"),
            "abs_error": (pl.mean("gap"), "nats"),
            "rel_error": (pl.sum("gap") / recomputed.filter(is_logged).abs().sum(), "share"),
            "reward_share": (reward / (reward + kl), "share"),
            "tokens_matching": (pl.sum("fit_reward") / pl.sum("tokens"), "share"),
            "inverted": (inverted.mean(), "nats"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The steps that disagree, by their error."""
        return table.filter(~pl.col("fits_kl")).with_columns(value=pl.col("gap").fill_nan(inf))

    def note(self, place: Mapping[str, Any]) -> str:
        """Both values."""
        return f"logged {number(place['logged'])}, recomputed {number(place['recomputed'])}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A configuration with a KL, and not one step whose logged KL could be compared."""
        steps, differs = _counts(run, "logged", "differs")
        if steps or run["tokens_matching"] is not None or not self.columns(context):
            return None
        if differs and _overwrites(context):
            return None
        return Missing(
            "no step has a logged KL that belongs to one optimizer step",
            "log the KL of every optimizer step, or store it per token in the column kl",
        )

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """A logged KL that is neither the recomputed one nor the reward buffer, by less than is reported here."""
        steps, fit = _counts(run, "logged", "fits_kl")
        if fit == steps or _is_explained(context):
            return None
        return Missing(
            f"the logged KL disagrees with the recomputed one in {steps - fit:,} of "
            f"{counted(steps, 'step')}, and the reward buffer does not explain it",
            _CHECK,
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error if the logged values are the reward buffer, a warning if they are something unknown."""
        steps, fit, fit_reward, of_loss = _counts(run, "logged", "fits_kl", "fits_reward", "beside_loss")
        telling, _, telling_reward = _counts(run, *OF_TOKENS[2:])
        if not steps and run["tokens_matching"] is None and run.table["differs"].any():
            return self._exposed(run, context)
        by_tokens = 0 < telling == telling_reward
        confirmed = 0 < steps == fit_reward or (by_tokens and fit < steps)
        beside_loss = not confirmed and 0 < of_loss == steps - fit
        relative = run["rel_error"]
        off = fit < steps and (relative is None or not relative <= self.warn_above)
        if not (confirmed or beside_loss or off or fit_reward):
            return None
        if not confirmed and _is_explained(context):
            return None  # the rule of that cause reports it
        headline = (
            f"the logged KL is {number(run['logged'])} but the rows give {number(run['recomputed'])} "
            f"({deviation(run['logged'], run['recomputed'])})"
        )
        if confirmed:
            return _overwritten(run, context, headline)
        if beside_loss:
            message = f"disagrees with the recomputed one in {of_loss:,} of {counted(steps, 'step')}, where the logged "
            message += "loss, which contains the KL, agrees"
            evidence = "a loss that contained the logged KL would differ by more than rounding"
            advice = "find what is added to the KL metric or replaces it; the loss is unaffected"
        else:
            message = f"matches the recomputed one in {fit:,} of {counted(steps, 'step')}, and the reward buffer in "
            message += f"{fit_reward:,}"
            evidence, advice = "no known formula reproduces all of the logged values", _CHECK
        return Judgement(
            severity=Severity.ERROR if beside_loss else Severity.WARNING,
            confirmed=beside_loss,
            headline=headline,
            message=f"the logged KL {message}",
            evidence=evidence,
            why="A KL metric that is wrong hides how far the policy has moved from the reference.",
            advice=advice,
        )

    def _exposed(self, run: Measured, context: Context) -> Judgement:
        """A warning: this release overwrites its KL, and none is at hand."""
        assert context.trainer is not None
        assert context.objective is not None
        kl, buffer = run.table.select(pl.mean("recomputed", "buffer")).row(0)
        names, release = " or ".join(context.trainer.log.kl), f"{context.trainer.title} {context.objective.version}"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"{release} logs {number(buffer)} as KL; the real KL is {number(kl)}",
            message=f"with these options {release} overwrites the stored KL with the reward, so {names} is not the KL",
            evidence=f"the options and the version; the run has neither {names} nor a column kl",
            advice=f"ignore this metric, or {release_with_fix(context, 'kl-inplace')}",
        )


def _overwritten(run: Measured, context: Context, headline: str) -> Judgement:
    """An error: what was logged or stored as the KL is the reward buffer."""
    steps, fit_reward = _counts(run, "logged", "fits_reward")
    telling, telling_kl, telling_reward = _counts(run, *OF_TOKENS[2:])
    evidence = []
    if fit_reward:
        worst = number(run.table.select(pl.max("buffer_gap")).item())
        evidence.append(
            f"in {fit_reward:,} of {counted(steps, 'step')} the logged value equals "
            f"'-kl_coef * kl, plus the reward at the last token' within {worst}"
        )
    if telling:
        evidence.append(
            f"where KL and reward buffer differ, {telling_reward:,} of "
            f"{counted(telling, 'stored token')} equal the reward buffer and {telling_kl:,} the KL"
        )
    true = "" if run["inverted"] is None else number(run["inverted"])
    return Judgement(
        severity=Severity.ERROR,
        confirmed=True,
        headline=headline,
        message=f"the reward overwrote the stored KL: {percent(run['reward_share'])} of the logged value is reward"
        + (f"; true KL, recovered from the corrupted values: {true}" if true else ""),
        evidence="; ".join(evidence),
        advice=f"{release_with_fix(context, 'kl-inplace')}; loss and advantages are unaffected",
    )


def _counts(run: Measured, *names: str) -> list[int]:
    """Count the steps with a value, and sum flags and counts."""
    sums = [pl.col(name).count() if name == "logged" else pl.sum(name) for name in names]
    return [int(count) for count in run.table.select(sums).row(0)]
