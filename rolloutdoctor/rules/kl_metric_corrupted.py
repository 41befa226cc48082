"""RDM001: the logged KL is not the KL."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from rolloutdoctor.objective.objective import KlBuffer
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns, reward_kl_columns
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class KlMetricTally(Sums):
    """What `kl-metric-corrupted` adds up over the steps that logged a KL."""

    steps: int = 0
    logged: float = 0.0
    recomputed: float = 0.0
    recomputed_abs: float = 0.0
    abs_error: float = 0.0
    fits_kl: int = 0
    fits_reward: int = 0
    beside_loss: int = 0
    worst_reward_fit: float = largest()
    reward_part: float = 0.0
    kl_part: float = 0.0
    inverted: float = 0.0
    inverted_steps: int = 0
    tokens: int = 0
    tokens_fit_reward: int = 0
    telling: int = 0
    telling_fit_kl: int = 0
    telling_fit_reward: int = 0
    unlogged: int = 0
    unlogged_differ: int = 0
    unlogged_kl: float = 0.0
    unlogged_buffer: float = 0.0


@dataclass(frozen=True)
class _Seen:
    """A logged KL beside what it could be, and how far float32 may put it from each."""

    logged: float | None
    true: float
    radius: float
    reward: float | None = None
    reward_radius: float = 0.0
    reward_part: float = 0.0
    kl_part: float = 0.0
    coef: float = 0.0
    of_loss: bool = False


def _fits(logged: float, predicted: float, radius: float) -> bool:
    return (isnan(logged) and isnan(predicted)) or abs(logged - predicted) <= radius


def _overwrites(context: Context) -> bool:
    """True if the stated options and version are of a trainer that stores the reward buffer as its KL."""
    objective = context.objective
    stores = objective is not None and objective.stores_kl and objective.kl_buffer is KlBuffer.REWARD
    return stores and context.version_stated


def _is_explained(context: Context) -> bool:
    """True if a cause other than the reward buffer explains a logged KL."""
    names = {"kl"} if context.trainer is None else {"kl", *context.trainer.kl_metrics}
    return any(names & {*cause.explains} for causes in context.causes.values() for cause in causes)


def _is_beside_loss(step: "StepView", gap: float) -> bool:
    """True if the logged loss agrees, which a KL that is off by a gap would have moved beyond its radius."""
    evaluation, trainer = step.evaluation, step.trainer
    term = None if evaluation is None else evaluation.objective.kl_loss
    if term is None or trainer is None:
        return False
    losses = [tally for name, tally in step.audit.items() if trainer.kind_of(name) == "loss" and tally.compared]
    return any(not tally.disagree and abs(term.coef) * gap > 2 * tally.radius for tally in losses)


@dataclass(frozen=True)
class KlMetricCorrupted(Rule[KlMetricTally]):
    """The logged KL does not match the log-probs, for example because the reward overwrote it.

    ## What it does
    Recomputes the KL metric from the log-probs by the trainer's own definition and compares it with what was logged,
    per step and, where the per-token KL was stored, per token.

    ## Why it matters
    slime's ppo estimator built its reward inside the tensor that holds the KL: `-kl_coef * kl`, plus the reward at the
    last token. The dashboard then shows mean reward divided by mean length under the name `rollout/kl`: it can be
    negative, it rises with reward and falls with length, and with kl_coef = 0 it is reward alone.

    ## How it is measured
    `rel_error` is the mean absolute error divided by the mean absolute recomputed value; `reward_share` the part of the
    logged value that is reward; `tokens_matching` the share of stored token values that equal the reward buffer.
    `inverted` is the KL recovered from the corrupted series: (mean reward / mean length - logged) / kl_coef. Two values
    agree if they differ by no more than the float32 rounding error, which for k3 is some `4e-7` per token however small
    the KL is. Confirmed: the logged values equal the reward buffer and not the KL, or the logged loss, which holds the
    KL, agrees wherever the metric does not. Exposed: no KL is at hand, and a
    trainer of this release stores the reward buffer; the measures say how far its metric is off.

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
    fix = "kl-inplace:copy"
    references = ("https://github.com/THUDM/slime/pull/2114",)
    tally = KlMetricTally

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

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The stored per-token KL decides token by token."""
        return frozenset({"kl"}) if self.columns(context) else frozenset()

    def parts(self, context: Context) -> tuple[Part, ...]:
        """A KL in the loss or in the reward; one of coefficient 0 is logged all the same."""
        objective = context.objective
        if objective is None or objective.kl_loss is not None or objective.kl_reward is not None:
            return ()
        return (Part.KL_LOSS, Part.KL_REWARD)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Without any logged KL there is nothing to compare."""
        trainer = context.trainer
        if trainer is None or not self.columns(context) or "kl" in context.columns:
            return None
        if context.metrics & set(trainer.kl_metrics) or _overwrites(context):
            return None
        names = " or ".join(trainer.kl_metrics)
        if context.averaged & set(trainer.kl_metrics):
            option = trainer.window_option
            return Missing(
                f"the logged {names} is a mean over several steps, and there is no column kl",
                f"log every step: {option} = 1 (if that is what the run did, say --set {option}=1)",
            )
        return Missing(
            f"no logged KL: neither a column kl nor the metric {names}",
            "put the logged metrics beside the run as NAME.metrics.parquet or .jsonl (step, split, name, value)",
        )

    def measure(self, step: "StepView") -> KlMetricTally:
        """Count one step."""
        seen = step.cached("logged KL", lambda: self._seen(step))
        tokens = self._tokens(step)
        if seen is None:
            return tokens
        if seen.logged is None:
            assert seen.reward is not None
            differ = not _fits(seen.reward, seen.true, seen.radius + seen.reward_radius)
            return tokens + KlMetricTally(
                unlogged=1, unlogged_differ=int(differ), unlogged_kl=seen.true, unlogged_buffer=seen.reward
            )
        gap = abs(seen.logged - seen.true)
        fits_kl = _fits(seen.logged, seen.true, seen.radius)
        reward_gap = None if seen.reward is None else abs(seen.logged - seen.reward)
        fits_reward = not fits_kl and seen.reward is not None and _fits(seen.logged, seen.reward, seen.reward_radius)
        inverts = fits_reward and seen.coef > 0
        return tokens + KlMetricTally(
            steps=1,
            logged=seen.logged,
            recomputed=seen.true,
            recomputed_abs=abs(seen.true),
            abs_error=gap,
            fits_kl=int(fits_kl),
            fits_reward=int(fits_reward),
            beside_loss=int(seen.of_loss and not fits_kl and _is_beside_loss(step, gap)),
            worst_reward_fit=reward_gap if fits_reward and reward_gap is not None else 0.0,
            reward_part=abs(seen.reward_part) if fits_reward else 0.0,
            kl_part=abs(seen.kl_part) if fits_reward else 0.0,
            inverted=(seen.reward_part - seen.logged) / seen.coef if inverts else 0.0,
            inverted_steps=int(inverts),
        )

    def _seen(self, step: "StepView") -> _Seen | None:
        """The step's logged KL and what it could be; None if nothing usable was logged."""
        evaluation, trainer = step.evaluation, step.trainer
        if evaluation is None or trainer is None or not len(step.batch):
            return None
        stored = self._stored(step)
        if stored is not None:
            return stored
        if evaluation.tokens is None or bool((evaluation.tokens.layout.steps_N > 1).any()):
            return None
        recomputed = step.metrics
        for name in trainer.kl_metrics:
            if name in step.logged and name in recomputed:
                of_loss = trainer.kind_of(name) in ("kl", "kl_loss")
                return _Seen(step.logged[name], recomputed[name], step.radius(name, recomputed[name]), of_loss=of_loss)
        return None

    def _stored(self, step: "StepView") -> _Seen | None:
        """The metric of a stored KL: the copy and the reward buffer predict different values."""
        evaluation, batch = step.evaluation, step.batch
        metric = None if step.trainer is None else step.trainer.stored_kl
        assert evaluation is not None
        objective = evaluation.objective
        kl_T = step.stored_kl(objective, KlBuffer.COPY)
        buffer_T = step.stored_kl(objective, KlBuffer.REWARD)
        if kl_T is None or buffer_T is None or objective.kl_reward is None or metric is None or not batch.tokens:
            return None
        logged = step.logged.get(metric.metric) if objective.context_slices == 1 else None
        if logged is None and "kl" in batch.per_token:
            logged = metric.reduce(batch, batch.column("kl"))
        if logged is None and objective.kl_buffer is not KlBuffer.REWARD:
            return None
        true, coef = metric.reduce(batch, kl_T), objective.kl_reward.coef
        reward = metric.reduce(batch, buffer_T)
        return _Seen(
            logged,
            true,
            step.stored_mean_radius(kl_T),
            reward,
            step.stored_mean_radius(buffer_T),
            reward_part=reward + coef * true,
            kl_part=coef * true,
            coef=coef,
        )

    def _tokens(self, step: "StepView") -> KlMetricTally:
        """Stored token values against the copy and the reward buffer."""
        evaluation, batch = step.evaluation, step.batch
        if evaluation is None or "kl" not in batch.per_token:
            return KlMetricTally()
        kl_T = step.stored_kl(evaluation.objective, KlBuffer.COPY)
        buffer_T = step.stored_kl(evaluation.objective, KlBuffer.REWARD)
        if kl_T is None or buffer_T is None:
            return KlMetricTally()
        stored_T = batch.column("kl")

        kl_radius_T, buffer_radius_T = step.stored_radius(kl_T), step.stored_radius(buffer_T)

        def fitting(predicted_T: "Tensor", radius_T: "Tensor") -> "Tensor":
            fits_T: Tensor = (stored_T.double() - predicted_T.double()).abs() <= radius_T
            return fits_T

        fits_kl_T, fits_reward_T = fitting(kl_T, kl_radius_T), fitting(buffer_T, buffer_radius_T)
        # Where the KL is about 0 both predict the same, and the token tells nothing.
        telling_T = (kl_T.double() - buffer_T.double()).abs() > kl_radius_T + buffer_radius_T
        return KlMetricTally(
            tokens=batch.tokens,
            tokens_fit_reward=int(fits_reward_T.sum()),
            telling=int(telling_T.sum()),
            telling_fit_kl=int((fits_kl_T & telling_T).sum()),
            telling_fit_reward=int((fits_reward_T & telling_T).sum()),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The step, weighed by its error."""
        seen = step.cached("logged KL", lambda: self._seen(step))
        if seen is None or seen.logged is None or _fits(seen.logged, seen.true, seen.radius):
            return
        note = f"logged {number(seen.logged)}, recomputed {number(seen.true)}"
        yield Example(step.batch.step, None, None, abs(seen.logged - seen.true), note)

    def measures(self, tally: KlMetricTally) -> Mapping[str, Measure]:
        """Logged against recomputed, as means over steps."""
        of_log, of_rows = (tally.recomputed, tally.steps), (tally.unlogged_kl, tally.unlogged)
        recomputed = of_log if tally.steps else of_rows
        found = {
            "logged": Measure(ratio(tally.logged, tally.steps), "nats"),
            "recomputed": Measure(ratio(*recomputed), "nats"),
            "abs_error": Measure(ratio(tally.abs_error, tally.steps), "nats"),
            "rel_error": Measure(ratio(tally.abs_error, tally.recomputed_abs), "share"),
            "reward_share": Measure(ratio(tally.reward_part, tally.reward_part + tally.kl_part), "share"),
            "tokens_matching": Measure(ratio(tally.tokens_fit_reward, tally.tokens), "share"),
        }
        if tally.inverted_steps:
            found["inverted"] = Measure(tally.inverted / tally.inverted_steps, "nats")
        return found

    def inconclusive_reason(self, run: KlMetricTally, context: Context) -> Missing | None:
        """A configuration with a KL, and not one step whose logged KL could be compared."""
        if run.steps or run.tokens or not self.columns(context) or (run.unlogged_differ and _overwrites(context)):
            return None
        return Missing(
            "no step has a logged KL that belongs to one optimiser step",
            "log the KL of every optimiser step, or store it per token in the column kl",
        )

    def unseen_reason(self, run: KlMetricTally, context: Context) -> Missing | None:
        """A logged KL that is neither the recomputed one nor the reward buffer, by less than is reported here."""
        if run.fits_kl == run.steps or _is_explained(context):
            return None
        return Missing(
            f"the logged KL disagrees with the recomputed one in {run.steps - run.fits_kl:,} of "
            f"{counted(run.steps, 'step')}, and the reward buffer does not explain it",
            "check that the rows are all rows of the step, and that the KL options are those of the run",
        )

    def judge(self, run: KlMetricTally, context: Context) -> Judgement | None:
        """An error if the logged values are the reward buffer, a warning if they are something unknown."""
        if not run.steps and not run.tokens and run.unlogged_differ:
            return self._exposed(run, context)
        by_tokens = run.telling > 0 and run.telling_fit_reward == run.telling
        confirmed = (run.steps > 0 and run.fits_reward == run.steps) or (by_tokens and run.fits_kl < run.steps)
        beside_loss = not confirmed and 0 < run.beside_loss == run.steps - run.fits_kl
        relative = ratio(run.abs_error, run.recomputed_abs)
        off = run.fits_kl < run.steps and (relative is None or not relative <= self.warn_above)
        if not (confirmed or beside_loss or off or run.fits_reward):
            return None
        if not confirmed and _is_explained(context):
            return None  # the rule of that cause reports it
        found = self.measures(run)
        headline = (
            f"logged KL is {number(found['logged'].value)}, recomputed {number(found['recomputed'].value)}"
            f" (error {percent(relative)})"
        )
        if beside_loss:
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=headline,
                message=f"the logged KL disagrees with the recomputed one in {run.beside_loss:,} of "
                f"{counted(run.steps, 'step')}, and the logged loss, of which the KL is a term, agrees there",
                evidence="a loss with the logged KL in it would differ by more than rounding",
                advice="look for what is added to the KL metric, or stored in its place; the loss is unaffected",
            )
        if not confirmed:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=headline,
                message=(
                    f"the logged KL matches the recomputed one in {run.fits_kl:,} of {counted(run.steps, 'step')}, and "
                    f"the reward buffer in {run.fits_reward:,}"
                ),
                evidence="no known formula reproduces all of the logged values",
                advice="check that the rows are all rows of the step, and that the KL options are those of the run",
            )
        evidence = []
        if run.fits_reward:
            evidence.append(
                f"in {run.fits_reward:,} of {counted(run.steps, 'step')} the logged value equals "
                f"'-kl_coef * kl, plus the reward at the last token' within {number(run.worst_reward_fit)}"
            )
        if run.telling:
            evidence.append(
                f"where KL and reward buffer differ, {run.telling_fit_reward:,} of "
                f"{counted(run.telling, 'stored token')} equal the reward buffer and {run.telling_fit_kl:,} the KL"
            )
        inverted = (
            f"; true KL, recovered from the corrupted values: {number(found['inverted'].value)}"
            if "inverted" in found
            else ""
        )
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=headline,
            message=(
                f"the stored KL was overwritten by the reward: {percent(found['reward_share'].value)} of the logged "
                f"value is reward{inverted}"
            ),
            evidence="; ".join(evidence),
            advice="upgrade to a release of the trainer with the fix, or apply its patch (`rolloutdoctor fixes`); loss "
            "and advantages are unaffected",
        )

    def _exposed(self, run: KlMetricTally, context: Context) -> Judgement:
        """A warning: this release overwrites its KL, and none is at hand."""
        assert context.trainer is not None
        assert context.objective is not None
        kl, buffer = run.unlogged_kl / run.unlogged, run.unlogged_buffer / run.unlogged
        names, made = " or ".join(context.trainer.kl_metrics), f"{context.trainer.title} {context.objective.version}"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"{made} logs {number(buffer)} as its KL, which is {number(kl)}",
            message=f"with these options {made} overwrites the stored KL by the reward, so that {names} is not the KL",
            evidence=f"the options and the version; no {names} and no column kl is at hand",
            advice="ignore that metric, or upgrade to a release of the trainer with the fix (`rolloutdoctor fixes`)",
        )
