"""Gather the loss as a picture: its policy and KL parts beside what was logged."""

from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.pictures.gather.base import LINES, FigureAccumulator
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import LossData
from rolloutdoctor.rules.base import Context


class LossFigure(FigureAccumulator):
    """The two parts of the loss of each step."""

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`; a loss without a KL term has one part."""
        objective = self.objectives[AS_CONFIGURED]
        if objective.kl_loss is None:
            raise InputError("the loss has no KL term: it is the policy part alone")
        self._logged = "" if context.trainer is None else context.trainer.log.loss
        return loss_columns(objective) | of_fix

    def gather(self, step: EvaluatedStep) -> None:
        """Take the parts of one step."""
        evaluation = step.evaluations[AS_CONFIGURED]
        if evaluation.tokens is not None:
            logged = step.logged.get(self._logged)
            self.line(LINES, steps=step.batch.step, policy=evaluation.policy_loss, kl=evaluation.kl_loss, logged=logged)

    def data(self) -> LossData:
        """Return the series."""
        return LossData(**self.series("policy", "kl", "logged"))
