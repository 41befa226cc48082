"""RDG002: a loss of about zero, explained."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.tally import largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import (
    Context,
    Judgement,
    Missing,
    Rule,
    counted,
    logs_remedy,
    number,
    percent,
)
from rolloutdoctor.rules.loss_log import FEWEST_LINES, LoggedLosses, judge_log, read_log

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class LossTally(LoggedLosses):
    """What `loss-near-zero` adds up; all but `steps` is about training steps with a loss of about zero."""

    steps: int = 0
    near_zero: int = 0
    dead: int = 0
    kl_only: int = 0
    broken: int = 0
    loss: float = 0.0
    policy_loss: float = 0.0
    kl_loss: float = 0.0
    expected: float = 0.0
    grad_l1: float = 0.0
    grad_l2: float = 0.0
    compared: int = 0
    matched: int = 0
    worst_match: float = largest()


@dataclass(frozen=True)
class LossNearZero(Rule[LossTally]):
    """The loss is near zero: expected on-policy, unless the gradient is zero too.

    ## What it does
    Splits the loss of such steps into its policy and KL parts, predicts it at importance ratio 1 for the aggregation
    mode in use, and shows the gradient next to it.

    ## Why it matters
    At importance ratio 1 the clipped surrogate equals minus the advantage. Group-centred advantages average to zero
    over rows of equal weight, so the printed loss is the KL part alone, although the policy gradient is not zero. Under
    a token mean they cancel only if length is uncorrelated with reward. If the gradient is zero as well, the step does
    not update the policy.

    ## How it is measured
    `expected_loss_at_ratio_one` is minus the weighted advantages plus the KL part. Gradients are in log-prob space.
    Run-level numbers are means over the steps in question. Confirmed: the logged loss equals the recomputed one.

    Of a log without rollouts the loss and the gradient norm are read, from ten lines on. Losses of about zero with at
    most four digits and gradient norms above 0 were rounded: the gradient is there, and beta times the KL stays below
    half a digit. A gradient norm of 0 in every step whose groups had reward variance, three steps or more, means that
    nothing reaches the parameters; not so where the lines are windows of several steps, since TRL logs the gradient
    norm of the last step and the variance of all, nor where every response was cut off and may be masked.

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
    tally = LossTally
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    near_zero: float = 1e-3
    dead_warn_above: float = 0.1

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
            remedy = "nothing records it; the audit compares the loss, the bonus included"
            return None if bonus is None else Missing(bonus.no_gradient, remedy)
        trainer = context.writer
        names = () if trainer is None else (trainer.loss_metric, trainer.grad_norm_metric)
        return None if names and context.metrics.issuperset(names) else self._untold(context)

    def _untold(self, context: Context) -> Missing:
        return Missing(
            "no step logs both a loss and a gradient norm, and there are no rollouts",
            context.recording.get("metrics", logs_remedy()),
        )

    def measure_each(self, steps: "StepView") -> list[LossTally]:
        """Count each step."""
        return steps.cached("loss near zero", lambda: self._measured_each(steps))

    def _measured_each(self, steps: "StepView") -> list[LossTally]:
        import numpy as np

        evaluation = steps.evaluation
        if not len(steps.batch):
            return [LossTally(**asdict(read_log(steps, self.near_zero)))]
        if not steps.training or evaluation is None or evaluation.tokens is None or steps.trainer is None:
            return steps.nothing(LossTally)
        losses = evaluation.losses
        is_near, moves = abs(losses.total) < self.near_zero, losses.grad_l1 > 0
        numbers = {
            "loss": losses.total,
            "policy_loss": losses.policy,
            "kl_loss": losses.kl,
            "expected": losses.at_ratio_one,
            "grad_l1": losses.grad_l1,
            "grad_l2": losses.grad_l2,
        }
        found = steps.tallies(
            LossTally,
            steps=np.ones(len(is_near), int),
            near_zero=is_near.astype(int),
            dead=(is_near & (losses.grad_l1 == 0)).astype(int),
            kl_only=(is_near & moves & ~self._has_policy_signal(steps, evaluation)).astype(int),
            **{name: np.where(is_near, x, 0.0) for name, x in numbers.items()},
        )
        return [
            tally + self._from_log(step) if tally.near_zero and step.logged else tally
            for step, tally in zip(steps.each, found, strict=True)
        ]

    def _from_log(self, step: "StepView") -> LossTally:
        """What the log of a step says of its loss; nothing of several optimiser steps, of which it may hold one."""
        evaluation, trainer = step.evaluation, step.trainer
        assert evaluation is not None
        assert evaluation.tokens is not None
        assert trainer is not None
        if bool((evaluation.tokens.layout.steps_N > 1).any()):
            return LossTally()
        name, is_cut_off = trainer.loss_metric, step.is_logged_as_zero(trainer.grad_norm_metric)
        broken = int(is_cut_off and evaluation.grad_l1 > 0)
        if name not in step.logged:
            return LossTally(broken=broken)
        recomputed = step.metrics.get(name, evaluation.loss)
        gap = abs(step.logged[name] - recomputed)
        matched = gap <= step.radius(name, recomputed)
        return LossTally(broken=broken, compared=1, matched=int(matched), worst_match=gap if matched else 0.0)

    def _has_policy_signal(self, steps: "StepView", evaluation: "Evaluation") -> "NDArray[np.bool_]":
        """Steps in which a trained token has a policy gradient: an advantage, or a term that moves without one."""
        import numpy as np

        rows, by_step = evaluation.rows, steps.by_step
        assert rows is not None
        if evaluation.objective.surrogate.moves_without_advantage:
            return np.ones(len(by_step), bool)
        if rows.advantage_N is None:
            assert rows.advantage_T is not None
            return by_step.any(steps.row_sum((rows.advantage_T != 0) & steps.batch.column("response_mask")))
        assert rows.length_N is not None
        return by_step.any((rows.advantage_N != 0) & (rows.length_N > 0))

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The steps themselves; a dead one weighs more."""
        for each, tally in zip(step.each, self.measure_each(step), strict=True):
            if tally.near_zero:
                kind = "no gradient" if tally.dead else f"gradient {number(tally.grad_l1)} (L1)"
                kind += ", KL term only" if tally.kl_only else ""
                yield Example(each.batch.step, None, None, float(1 + tally.dead + tally.broken), kind)

    def measures(self, tally: LossTally) -> Mapping[str, Measure]:
        """Means over the steps in question."""
        found = {
            "loss": (tally.loss, "loss"),
            "policy_loss": (tally.policy_loss, "loss"),
            "kl_loss": (tally.kl_loss, "loss"),
            "expected_loss_at_ratio_one": (tally.expected, "loss"),
            "grad_l1": (tally.grad_l1, "loss per nat"),
            "grad_l2": (tally.grad_l2, "loss per nat"),
        }
        return {name: Measure(ratio(value, tally.near_zero), unit) for name, (value, unit) in found.items()}

    def decisive_parts(self, run: LossTally, context: Context) -> tuple[Part, ...]:
        """How advantages become a loss, and whether a KL term is added: another loss of these rows might be near 0."""
        return () if run.lines else (Part.POLICY_LOSS, Part.KL_LOSS)

    def inconclusive_reason(self, run: LossTally, context: Context) -> Missing | None:
        """A log that is too short to tell, or that never says both."""
        if context.has_rows or judge_log(run, self.near_zero) is not None:
            return None
        if not run.lines:
            return self._untold(context)
        if run.lines >= FEWEST_LINES:
            return None
        return Missing(
            f"{counted(run.lines, 'line')} with a loss and a gradient norm, and it takes {FEWEST_LINES}",
            "give a longer log, or record the rollouts",
        )

    def judge(self, run: LossTally, context: Context) -> Judgement | None:
        """Information if the gradient is alive, a warning if many steps are dead, an error if it is cut off."""
        if run.lines and not run.near_zero:
            return judge_log(run, self.near_zero)
        if not run.near_zero:
            return None
        dead_share = ratio(run.dead, run.steps) or 0.0
        severity = Severity.ERROR if run.broken else Severity.INFO
        # One such step says nothing of the run: its groups happened to have equal rewards, and there is no KL term.
        lone = run.dead == 1 < run.steps and run.kl_loss == 0
        if dead_share > self.dead_warn_above and not lone:
            severity = max(severity, Severity.WARNING)
        mean = {name: measure.value for name, measure in self.measures(run).items()}
        kl_only = f" ({run.kl_only:,} of them KL only)" if run.kl_only else ""
        headline = (
            f"|loss| < {self.near_zero:g} in {counted(run.near_zero, 'step')}: "
            f"{run.near_zero - run.dead:,} with a gradient{kl_only}, {run.dead:,} without"
        )
        message = (
            f"mean loss {number(mean['loss'])} = policy {number(mean['policy_loss'])} + KL "
            f"{number(mean['kl_loss'])}; on-policy (ratio 1) this aggregation gives "
            f"{number(mean['expected_loss_at_ratio_one'])}; sum |dLoss/dlogp| is {number(mean['grad_l1'])}"
        )
        if run.broken:
            advice = (
                "the rows have a gradient and the trainer logged a norm of 0: look for detached log-probs, frozen "
                "parameters or a broken autograd graph"
            )
        elif run.dead and not lone:
            advice = (
                f"{percent(dead_share)} of the steps have no gradient: every advantage and KL derivative is 0; filter "
                "zero-variance groups, or check the mask"
            )
        else:
            advice = (
                "no action: on-policy the surrogate is near 0 by construction, its gradient is not; watch reward and "
                "gradient norm instead of the loss"
            )
        if run.compared:
            evidence = (
                f"the logged loss equals the recomputed one in {run.matched:,} of {counted(run.compared, 'step')}"
            )
            evidence += f" (within {number(run.worst_match)})" if run.matched else ""
        else:
            evidence = "no logged loss to compare with"
        if run.broken:
            evidence += (
                f"; in {counted(run.broken, 'step')} the logged gradient norm is 0 and the recomputed one is not"
            )
        confirmed = run.broken > 0 or (run.matched > 0 and run.matched == run.compared)
        return Judgement(severity, confirmed, headline, message, evidence, advice)
