"""Gather the parts of the gradient by step, and what a fix changes."""

from dataclasses import replace

from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.pictures.gather.base import LINES, FigureAccumulator
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import GradientData
from rolloutdoctor.rules.base import Context

POLICY_ONLY = "policy part"


class GradientFigure(FigureAccumulator):
    """The parts of the gradient, and what the fix changes in it."""

    default_fix = "zero-std"

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        objective = self.objectives[AS_CONFIGURED]
        if objective.entropy_bonus is not None:
            raise InputError(objective.entropy_bonus.no_gradient)
        self.objectives = {**self.objectives, POLICY_ONLY: replace(objective, kl_loss=None)}
        return super().prepare(context, of_fix)

    def gather(self, step: EvaluatedStep) -> None:
        """Take the norms of one step."""
        tokens, policy = step.evaluations[AS_CONFIGURED].tokens, step.evaluations[POLICY_ONLY].tokens
        if tokens is None or policy is None:
            return
        l1, square = float(tokens.grad_l1_N.sum()), float(tokens.grad_sq_N.sum())
        spurious = cosine = None
        fixed = None if self.fix is None else step.evaluations[self.fix].tokens
        if fixed is not None:
            spurious = float(fixed.versus_l1_N.sum()) / l1 if l1 else None
            norms = (square * float(fixed.grad_sq_N.sum())) ** 0.5
            cosine = float(fixed.versus_dot_N.sum()) / norms if norms else None
        # Policy-only against the whole: what they differ by is the KL part.
        parts = {"policy": float(policy.grad_l1_N.sum()), "kl": float(policy.versus_l1_N.sum())}
        self.line(LINES, steps=step.batch.step, whole=l1, **parts, spurious=spurious, cosine=cosine)

    def data(self) -> GradientData:
        """Return the series."""
        return GradientData(self.fix, **self.series("whole", "policy", "kl", "spurious", "cosine"))
