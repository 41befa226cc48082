"""RDG003: steps whose whole gradient is free of reward, from the trainer's log alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.ops.tally import Sums, largest, ratio, smallest
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import (
    Context,
    Judgement,
    Missing,
    Rule,
    counted,
    logged_lines,
    logs_remedy,
    number,
    percent,
)

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class RewardFreeTally(Sums):
    """What `reward-free-step` adds up: training steps whose log tells, and those of them without reward."""

    steps: int = 0
    reward_free: int = 0
    dead: int = 0
    grad_norm: float = 0.0
    others: int = 0
    grad_norm_others: float = 0.0
    with_kl: int = 0
    loss: float = 0.0
    kl: float = 0.0
    lowest: float = smallest()
    highest: float = largest()
    first: float = smallest()
    last: float = largest()

    def counted(self, count: int) -> str:
        """Some of the logged lines, in words."""
        return logged_lines(count, self.steps, self.first, self.last)


@dataclass(frozen=True)
class RewardFreeStep(Rule[RewardFreeTally]):
    """Steps with zero reward variance in every group that still updated the weights.

    ## What it does
    Finds the steps at which the trainer logged zero reward variance in every group, and shows the gradient norm
    that it logged for them. No rollouts are needed.

    ## Why it matters
    With zero reward variance every advantage is 0, and so is the policy gradient. The update of such a step comes from
    the KL term, an entropy bonus or an auxiliary loss alone. Many such steps mean that the weights drift under terms
    without any task signal.

    ## How it is measured
    A TRL step counts if the logged `frac_reward_zero_std` is exactly 1: a mean over groups, or over several steps, is 1
    only if each of them is, and the logged `grad_norm` is that of the last. TRL means a standard deviation below 1e-8,
    which leaves advantages of at most 1e-4 times the root of the group size. A verl step counts if
    `critic/advantages/max` and `/min`, over all trained tokens, are both 0. `grad_norm` is the mean of the logged norms
    over these steps, before clipping and over parameters; `grad_norm_ratio` is that mean divided by the mean over the
    other steps. `loss_by_kl` is the logged loss divided by the logged KL: at these steps the loss is beta times the KL,
    so the quotient is beta if both are averaged over tokens in the same way (`loss_by_kl_low` and `_high` are its
    extremes). With `logging_steps` above 1 the lines are windows of several steps.
    Confirmed: it is what the trainer logged.

    ## What to do
    See how many steps there are and how large their gradient norm is. `diff --fix zero-std` on recorded rollouts shows
    the update without the KL of such groups; dynamic sampling (DAPO) avoids these steps.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> logged = {"frac_reward_zero_std": 1.0, "grad_norm": 0.00132, "loss": 9.192e-06, "kl": 2.298e-04}
    >>> diagnose_one("RDG003", toy_batch([[1, 1]]), trainer="trl", logged=logged)
    'RDG003 warning confirmed: steps_share 1'
    """

    code = "RDG003"
    name = "reward-free-step"
    references = (
        "https://github.com/huggingface/trl/issues/5588",
        "https://github.com/huggingface/trl/issues/2703",
    )
    tally = RewardFreeTally
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    warn_above: float = 0.1

    def columns(self, context: Context) -> frozenset[str]:
        """None: it is all in the log."""
        return frozenset()

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log that does not say which steps had reward variance."""
        trainer = context.writer
        tells = trainer is not None and trainer.reward_free(dict.fromkeys(context.metrics, 0.0)) is not None
        return None if tells and trainer and trainer.grad_norm_metric in context.metrics else self._untold(context)

    def _untold(self, context: Context) -> Missing:
        return Missing(
            "no step logs both a gradient norm and how many groups had zero reward variance",
            context.recording.get("reward_free", logs_remedy()),
        )

    def measure(self, step: "StepView") -> RewardFreeTally:
        """Count one step."""
        logged = step.logged
        trainer = step.writer
        free = None if trainer is None or not step.training else trainer.reward_free(logged)
        norm = None if trainer is None else logged.get(trainer.grad_norm_metric)
        if trainer is None or free is None or norm is None or not norm >= 0:
            return RewardFreeTally()
        at = RewardFreeTally(first=float(step.batch.step), last=float(step.batch.step))
        if not free:
            return at + RewardFreeTally(steps=1, others=1, grad_norm_others=norm)
        loss, kl = logged.get(trainer.loss_metric), logged.get(trainer.kl_metrics[0])
        part = at + RewardFreeTally(steps=1, reward_free=1, dead=int(norm == 0), grad_norm=norm)
        if not trainer.loss_is_whole or loss is None or kl is None or not kl > 0:
            return part
        return part + RewardFreeTally(with_kl=1, loss=loss, kl=kl, lowest=loss / kl, highest=loss / kl)

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The steps that moved the model most."""
        tally = self.measure(step)
        if tally.reward_free and tally.grad_norm:
            yield Example(step.batch.step, None, None, tally.grad_norm, f"logged gradient norm {tally.grad_norm:.3g}")

    def measures(self, tally: RewardFreeTally) -> Mapping[str, Measure]:
        """Shares of steps, and means over them."""
        mean, others = ratio(tally.grad_norm, tally.reward_free), ratio(tally.grad_norm_others, tally.others)
        return {
            "steps_share": Measure(ratio(tally.reward_free, tally.steps), "share"),
            "reward_free_steps": Measure(tally.reward_free, "steps"),
            "dead_steps": Measure(tally.dead, "steps"),
            "grad_norm": Measure(mean, "parameter norm"),
            "grad_norm_others": Measure(others, "parameter norm"),
            "grad_norm_ratio": Measure(None if mean is None or not others else ratio(mean, others), "1"),
            "loss_by_kl": Measure(ratio(tally.loss, tally.kl), "1"),
            "loss_by_kl_low": Measure(tally.lowest if tally.with_kl else None, "1"),
            "loss_by_kl_high": Measure(tally.highest if tally.with_kl else None, "1"),
        }

    def inconclusive_reason(self, run: RewardFreeTally, context: Context) -> Missing | None:
        """A log that does not say which steps had reward variance."""
        return None if run.steps else self._untold(context)

    def judge(self, run: RewardFreeTally, context: Context) -> Judgement | None:
        """Information with a magnitude; a warning where such steps are many."""
        if not run.reward_free:
            return None
        share, moved = ratio(run.reward_free, run.steps), run.reward_free - run.dead
        found = {name: measure.value for name, measure in self.measures(run).items()}
        message = f"every group had zero reward variance in {percent(share)} of {run.counted(run.steps)}; " + (
            f"{moved:,} of them updated the weights, with a logged gradient norm of {number(found['grad_norm'])} on "
            "average"
            if moved
            else "none of them updated the weights: the logged gradient norm is 0"
        )
        if moved and found["grad_norm_ratio"] is not None:
            message += f", {number(found['grad_norm_ratio'])} times that of the other steps"
        evidence = "the trainer's log says that every group had zero reward variance, and gives the gradient norm"
        if run.with_kl:
            evidence += (
                f"; the logged loss is {number(run.lowest)} to {number(run.highest)} times the logged KL in "
                f"{counted(run.with_kl, 'such step')}"
            )
        return Judgement(
            severity=Severity.WARNING if (share or 0.0) > self.warn_above and moved else Severity.INFO,
            confirmed=True,
            headline=(
                f"{run.reward_free:,} of {run.counted(run.steps)} with zero reward variance: "
                f"{moved:,} updated the weights"
            ),
            message=message,
            evidence=evidence,
            advice=(
                "KL, entropy or an auxiliary loss updated them: record the rollouts and see `diff --fix zero-std`, or "
                "use dynamic sampling (DAPO), which leaves out zero-variance groups"
                if moved
                else "sample other prompts, neither too easy nor too hard: all responses to these got the same reward; "
                "larger groups or dynamic sampling (DAPO) help as well"
            ),
        )
