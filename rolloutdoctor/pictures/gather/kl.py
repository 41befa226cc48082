"""Gather the KL metric by step, and the KL of tokens."""

from dataclasses import replace

from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, reward_kl_tokens
from rolloutdoctor.objective.objective import KlBuffer
from rolloutdoctor.objective.required_columns import loss_columns, reward_kl_columns
from rolloutdoctor.pictures.gather.base import LINES, FigureAccumulator, carrying
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import KlData
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.logged_kl import logged_kl
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.trainers.spec import Trainer

_METRIC = "metric"
"""Table with the name of the metric of each step."""


class KlFigure(FigureAccumulator):
    """The KL metric as logged and recomputed, and the per-token KL."""

    wanted = frozenset({"kl"})
    trainer: Trainer | None = None

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        objective, self.trainer = self.objectives[AS_CONFIGURED], context.trainer
        if objective.kl_loss is not None:
            self.per_token = frozenset({AS_CONFIGURED})
            return loss_columns(objective)
        term = objective.kl_reward
        logged = context.metrics & set(context.trainer.log.kl if context.trainer else ())
        if term is None or (term.coef == 0 and not logged):
            raise InputError("the configuration has no KL term, so there is no KL to draw; set its options with --set")
        return reward_kl_columns(objective) | {"response_mask", "reward"}

    def gather(self, step: EvaluatedStep) -> None:
        """Take the metric, and count the tokens."""
        evaluation, batch, trainer = step.evaluations[AS_CONFIGURED], step.batch, self.trainer
        term = evaluation.objective.kl_loss
        kl_T = None
        if term is not None and evaluation.per_token is not None:
            kl_T = evaluation.per_token.kl_T
        elif term is None and batch.has(*reward_kl_columns(evaluation.objective), "response_mask"):
            term = evaluation.objective.kl_reward
            kl_T = reward_kl_tokens(batch, evaluation.objective, step.dtype)
        if trainer is None or term is None or kl_T is None:
            return
        self.count("tokens", kl_T[carrying(batch, evaluation, "kl_loss")])
        if self.fix is not None:
            self.count("after", kl_T[carrying(batch, step.evaluations[self.fix], "kl_loss")])
        copied = replace(evaluation, objective=replace(evaluation.objective, kl_buffer=KlBuffer.COPY))
        recomputed = trainer.metrics(copied)
        names = [name for name in trainer.log.kl if name in recomputed]
        if not names:
            return
        name = next((name for name in names if name in step.logged), names[0])
        view = StepView(batch, step.logged, trainer, evaluations=step.evaluations, dtype=step.dtype)
        logged_terms = logged_kl(view)
        fixed = None if self.fix is None else trainer.metrics(step.evaluations[self.fix]).get(name)
        logged, inverted = logged_terms.get("logged", step.logged.get(name)), logged_terms.get("inverted")
        self.line(LINES, steps=batch.step, logged=logged, recomputed=recomputed[name], inverted=inverted, after=fixed)
        self.line(_METRIC, name=name)

    def data(self) -> KlData:
        """Return the series."""
        names = ("logged", "recomputed", "inverted", *(() if self.fix is None else ("after",)))
        metrics, objective = self.table(_METRIC), self.objectives[AS_CONFIGURED]
        term = objective.kl_loss or objective.kl_reward
        return KlData(
            metric="" if metrics.is_empty() else metrics["name"][0],
            estimator="" if term is None else term.estimator,
            tokens=self.counts["tokens"],
            fix=self.fix,
            tokens_after=None if self.fix is None else self.counts["after"],
            **self.series(*names),
        )
