"""RDG001: the gradient of zero-variance groups."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class ZeroStdTally(Sums):
    """What `zero-std-kl` adds up over training steps; `dead` is about groups whose rewards are all equal."""

    groups: int = 0
    comparable_groups: int = 0
    dead_groups: int = 0
    rows: int = 0
    dead_rows: int = 0
    tokens: float = 0.0
    dead_tokens: float = 0.0
    grad_l1: float = 0.0
    dead_l1: float = 0.0
    grad_sq: float = 0.0
    dead_sq: float = 0.0
    fixed_l1: float = 0.0
    fixed_sq: float = 0.0
    versus_l1: float = 0.0
    versus_dot: float = 0.0
    kl_loss: float = 0.0
    dead_kl_loss: float = 0.0
    logits_sq: float = 0.0
    dead_logits_sq: float = 0.0
    logits_low_sq: float = 0.0
    dead_logits_low_sq: float = 0.0
    exact_logits_steps: int = 0
    steps: int = 0
    dead_steps: int = 0
    confirmed_steps: int = 0
    logged_grad_norm: float = largest()
    told: int = 0
    told_with: int = 0
    told_without: int = 0


@dataclass(frozen=True)
class ZeroStdKl(Rule[ZeroStdTally]):
    """Zero-variance groups still update the model through the KL term.

    ## What it does
    Finds training groups of two or more rows whose rewards are all equal (max - min = 0, never by a standard
    deviation) while the loss has a KL term, and measures how much of the gradient comes from them.

    ## Why it matters
    Their advantages are zero, so their only gradient is the KL term, which pulls the policy towards the reference.
    Upstream regards this as the published objective, which applies the KL to every token whatever the advantage. It is
    therefore reported as information with a magnitude, never as a fault.

    ## How it is measured
    The gradient is the exact derivative of the loss with respect to each logged log-prob; it is not a gradient of
    parameters. `grad_share_logits_l2` weighs it by the norm of the derivative of the log-prob with respect to the
    token's logits, which needs the column `sum_pi_squared`; without it the share is bounded from both sides. `kappa` =
    <g, g_fixed> / <g_fixed, g_fixed>, where the fix masks the KL of such groups in the loss. Confirmed: the logged
    losses equal the objective with that KL term and differ, by more than their rounding radius, from the one
    without it; or, in a step where every group has equal rewards and all advantages are zero (as logged, or else
    recomputed in float32), the trainer logged a gradient norm above zero.

    ## What to do
    If the KL is not wanted there, filter such prompts before the update (dynamic sampling), vary the difficulty, or set
    beta = 0. The numbers compare with the fix `zero-std`.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 1], [1, 0]], policy=-1.0, ref=-1.5)
    >>> diagnose_one("RDG001", batch, trainer="trl", beta=0.1)
    'RDG001 info exposed: groups_share 0.5'
    """

    code = "RDG001"
    name = "zero-std-kl"
    fix = "zero-std:loss"
    references = (
        "https://github.com/huggingface/trl/issues/5588",
        "https://github.com/huggingface/trl/pull/5640",
        "https://arxiv.org/abs/2505.22257",
    )
    tally = ZeroStdTally
    splits = ("train",)

    def columns(self, context: Context) -> frozenset[str]:
        """Everything that the loss needs, if it has a KL term."""
        if context.objective is None or context.objective.kl_loss is None:
            return frozenset()
        return loss_columns(context.objective) | {"group_id"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Make the logit-space share exact, and the confirmation stricter."""
        return frozenset({"sum_pi_squared", "advantage", "advantages"}) if self.columns(context) else frozenset()

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The KL term in the loss."""
        return (Part.KL_LOSS,)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Losses whose policy term moves such groups too."""
        mine = context.objective
        if mine is None or mine.kl_loss is None:
            return None
        if mine.entropy_bonus is not None:
            return Missing(
                f"such groups get the gradient of the entropy bonus too: {mine.entropy_bonus.no_gradient}",
                "nothing records it; the audit compares the loss, the bonus included",
            )
        if not mine.surrogate.moves_without_advantage:
            return None
        return Missing(
            "the policy term of this loss moves tokens without advantage too, so what such groups get is not the KL "
            "term's alone",
            "compare with and without the KL term of such groups: diff --fix zero-std",
        )

    def measure_each(self, steps: "StepView") -> list[ZeroStdTally]:
        """Add up the rows of each step."""
        import numpy as np
        import torch

        fixed, by_step, groups = steps.fixed(self.fix), steps.by_step, steps.groups_by_step
        if not steps.training or steps.tokens is None or fixed is None or fixed.tokens is None:
            return steps.nothing(ZeroStdTally)
        rows, tokens = steps.rows, steps.tokens
        assert rows is not None
        assert rows.length_N is not None
        dead_N, low_N = rows.zero_std_N, tokens.logits_low_sq_N
        assert low_N is not None  # the evaluation as configured is the reference
        dead = by_step.only(dead_N)
        is_exact, kl_loss_N = tokens.logits_sq_N is not None, tokens.kl_loss_N * tokens.weight_N
        exact_N = torch.zeros_like(low_N) if tokens.logits_sq_N is None else tokens.logits_sq_N
        found = steps.tallies(
            ZeroStdTally,
            groups=groups.size,
            comparable_groups=groups.count(steps.groups.size_G > 1),
            dead_groups=groups.count(steps.group_sum(dead_N) > 0),
            rows=by_step.size,
            dead_rows=dead.size,
            tokens=by_step.sum(rows.length_N),
            dead_tokens=dead.sum(rows.length_N[dead_N]),
            grad_l1=by_step.sum(tokens.grad_l1_N),
            dead_l1=dead.sum(tokens.grad_l1_N[dead_N]),
            grad_sq=by_step.sum(tokens.grad_sq_N),
            dead_sq=dead.sum(tokens.grad_sq_N[dead_N]),
            fixed_l1=by_step.sum(fixed.tokens.grad_l1_N),
            fixed_sq=by_step.sum(fixed.tokens.grad_sq_N),
            versus_l1=by_step.sum(fixed.tokens.versus_l1_N),
            versus_dot=by_step.sum(fixed.tokens.versus_dot_N),
            kl_loss=by_step.sum(kl_loss_N),
            dead_kl_loss=dead.sum(kl_loss_N[dead_N]),
            logits_sq=by_step.sum(exact_N),
            dead_logits_sq=dead.sum(exact_N[dead_N]),
            logits_low_sq=by_step.sum(low_N),
            dead_logits_low_sq=dead.sum(low_N[dead_N]),
            exact_logits_steps=[int(is_exact)] * len(by_step),
            steps=[1] * len(by_step),
            dead_steps=((dead.size == by_step.size) & (by_step.size > 0)).astype(np.int64),
        )
        return [
            tally + self._from_log(each) if each.logged and tally.dead_rows else tally
            for each, tally in zip(steps.each, found, strict=True)
        ]

    def _from_log(self, step: "StepView") -> ZeroStdTally:
        """What the log of one step says of such groups."""
        assert step.rows is not None
        norm = self._logged_norm(step) if bool(step.rows.zero_std_N.all()) else None
        confirmed = ZeroStdTally(confirmed_steps=int(norm is not None), logged_grad_norm=norm or 0.0)
        return confirmed + self._discriminated(step)

    def _discriminated(self, step: "StepView") -> ZeroStdTally:
        """Hold logged losses against the objective with and without the KL term of such groups, where these differ."""
        trainer, fixed = step.trainer, step.fixed(self.fix)
        assert trainer is not None
        assert fixed is not None
        names = [name for name in step.logged if trainer.kind_of(name) in ("loss", "kl_loss") and name in step.metrics]
        if not names:
            return ZeroStdTally()
        told = told_with = told_without = 0
        metrics = trainer.metrics(fixed)
        for name in names:
            logged, with_kl, without_kl = step.logged[name], step.metrics[name], metrics[name]
            radius = step.radius(name, with_kl)
            if abs(with_kl - without_kl) > 2 * radius:
                told += 1
                told_with += int(abs(logged - with_kl) <= radius)
                told_without += int(abs(logged - without_kl) <= radius)
        return ZeroStdTally(told=told, told_with=told_with, told_without=told_without)

    def _logged_norm(self, step: "StepView") -> float | None:
        """Gradient norm logged at a step without any spread, if nothing but the KL term can explain it."""
        assert step.trainer is not None
        assert step.tokens is not None
        norm = step.logged.get(step.trainer.grad_norm_metric)
        if norm is None or not norm > 0 or bool((step.tokens.layout.steps_N > 1).any()):
            return None
        if not float(step.tokens.grad_l1_N.sum()) > 0:
            return None
        # A residue of rounding in the trainer's own advantages would be a gradient of its own.
        advantage_N = step.logged_advantages()
        if advantage_N is None:
            advantage_N = self._rounded_advantages(step)
        return None if bool((advantage_N.nan_to_num(0.0) != 0).any()) else norm

    def _rounded_advantages(self, step: "StepView") -> "Tensor":
        """What the trainer's float32 arithmetic may have made of the equal rewards, ``[N]``."""
        assert step.evaluation is not None
        rule = step.evaluation.objective.advantage
        scaled = rule.spec.is_standard_score and rule.scale == "group"
        return step.float32_advantages(rule.epsilon) * scaled

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The zero-variance groups that have the largest gradient."""
        if not step.training or step.rows is None or step.tokens is None or step.fixed(self.fix) is None:
            return ()
        score_N, grad_N = step.rows.score_N, step.tokens.grad_l1_N
        dead_G = step.group_sum(grad_N * step.rows.zero_std_N)

        def note(group: int) -> str:
            first = int(step.groups.order_N[step.groups.offsets[group]])
            total = step.by_step.sum(grad_N)[int(step.by_step.step_N[first])]
            share = percent(float(dead_G[group]) / max(total, 1e-300))
            return f"every reward is {float(score_N[first]):g}; {share} of the step's gradient (L1)"

        return step.worst_groups(dead_G, note, KEEP_EXAMPLES)

    def measures(self, tally: ZeroStdTally) -> Mapping[str, Measure]:
        """The shares of the gradient, and what the fix changes."""
        found: dict[str, tuple[float | None, str]] = {
            "groups_share": (ratio(tally.dead_groups, tally.groups), "share"),
            "rows_share": (ratio(tally.dead_rows, tally.rows), "share"),
            "tokens_share": (ratio(tally.dead_tokens, tally.tokens), "share"),
            "grad_share_l1": (ratio(tally.dead_l1, tally.grad_l1), "share"),
            "grad_share_l2": (ratio(sqrt(tally.dead_sq), sqrt(tally.grad_sq)), "share"),
            "relative_change_l1": (ratio(tally.versus_l1, tally.fixed_l1), "share"),
            "kappa": (ratio(tally.versus_dot, tally.fixed_sq), "1"),
            "cosine": (ratio(tally.versus_dot, sqrt(tally.grad_sq) * sqrt(tally.fixed_sq)), "1"),
            "kl_loss_share": (ratio(tally.dead_kl_loss, tally.kl_loss), "share"),
        }
        if tally.steps and tally.exact_logits_steps == tally.steps:
            share = ratio(sqrt(tally.dead_logits_sq), sqrt(tally.logits_sq))
            found["grad_share_logits_l2"] = (share, "share")
        else:
            # The squared norm lies between one and two times (1 - p)^2 g^2, for each part on its own.
            dead = tally.dead_logits_low_sq
            rest = tally.logits_low_sq - dead
            found["grad_share_logits_l2_low"] = (ratio(sqrt(dead), sqrt(dead + 2 * rest)), "share")
            found["grad_share_logits_l2_high"] = (ratio(sqrt(2 * dead), sqrt(2 * dead + rest)), "share")
        return {name: Measure(value, unit) for name, (value, unit) in found.items()}

    def vacuous_reason(self, run: ZeroStdTally, context: Context) -> str | None:
        """No group that could have zero reward variance, or no token that it could train."""
        if not run.comparable_groups:
            return "there is no training group of two or more"
        return None if run.tokens else "no token is trained"

    def judge(self, run: ZeroStdTally, context: Context) -> Judgement | None:
        """Information whenever such groups have a gradient at all."""
        if run.dead_l1 == 0:
            return None
        if run.told and run.told_without == run.told:
            return None  # the trainer already masks the KL term of such groups
        proven = run.told > 0 and run.told_with == run.told
        share = ratio(run.dead_groups, run.groups)
        headline = (
            f"{percent(share)} of groups have zero reward variance: their KL term is "
            f"{percent(ratio(run.dead_l1, run.grad_l1))} of the gradient"
        )
        message = (
            f"{counted(run.dead_groups, 'group')} of {run.groups:,} ({percent(share)}) have equal rewards; their "
            f"KL term alone is {percent(ratio(run.dead_l1, run.grad_l1))} of sum |dLoss/dlogp|"
        )
        if run.confirmed_steps:
            norm_name = context.trainer.grad_norm_metric if context.trainer else "grad_norm"
            evidence = (
                f"in {counted(run.confirmed_steps, 'step')} every group has equal rewards and zero advantage, yet "
                f"the logged {norm_name} is above zero (up to {number(run.logged_grad_norm)}): that update was KL only"
            )
        elif proven:
            evidence = (
                f"{run.told_with:,} of {run.told:,} logged losses equal the objective with the KL term on such groups, "
                "and differ from the one without it by more than rounding"
            )
        elif run.dead_steps:
            evidence = (
                f"in {counted(run.dead_steps, 'step')} every group has equal rewards, but no gradient norm above zero "
                "was logged there, or rounding may have made the advantages nonzero"
            )
        else:
            evidence = "every step also has groups with reward variance, so no logged value isolates the KL term"
        return Judgement(
            severity=Severity.INFO,
            confirmed=run.confirmed_steps > 0 or proven,
            headline=headline,
            message=message,
            evidence=evidence,
            advice=(
                "a design choice upstream, not a fault; if it is not wanted, filter such prompts or set the KL "
                "coefficient to 0; compare with `rolloutdoctor diff --fix zero-std`"
            ),
        )
