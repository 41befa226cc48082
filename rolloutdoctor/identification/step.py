"""One step as an identification sees it: what was logged, and what each configuration gives for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rolloutdoctor.audit.logged import LoggedStep, of_step
from rolloutdoctor.audit.step import audit_step, stage_of
from rolloutdoctor.audit.stored_digits import stored_radius
from rolloutdoctor.audit.tally import AuditTally
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.evaluation.together import SharedPass, StepsTogether
from rolloutdoctor.identification.configuration import Configuration, essence
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.logged_digits import Digits, rounding_of
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.trainers.spec import Trainer

_KL_KINDS = ("kl", "reward_kl", "stored_kl")
_LOSS_KINDS = ("loss", "policy_loss")


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a configuration gives for a step.

    Attributes:
        tallies: quantity to how it compares with the log.
        values: the values that were compared, ``[n]`` float64; NaN where nothing was.
        radii: their rounding radii, ``[n]`` float64.
    """

    tallies: AuditTally
    values: Tensor
    radii: Tensor


class SharedEvaluations:
    """Evaluations of some small steps that are evaluated together, each made once for all of them."""

    def __init__(
        self, batches: Sequence[RolloutBatch], logged: Sequence[Mapping[str, float]], dtype: torch.dtype
    ) -> None:
        """Take steps; see `StepsTogether`."""
        self._together = StepsTogether(batches, logged, dtype)
        self._rows: dict[Objective, list[Evaluation] | None] = {}
        self._whole: dict[Objective, SharedPass | None] = {}

    def rows(self, objective: Objective, place: int) -> Evaluation | None:
        """Return the evaluation of the rows of one of the steps; None where that has to be made by itself."""
        if objective not in self._rows:
            self._rows[objective] = self._together.rows(objective)
        found = self._rows[objective]
        return None if found is None else found[place]

    def whole(self, objective: Objective, place: int) -> Evaluation | None:
        """Return the evaluation of rows and tokens of one of the steps; None where that has to be made by itself."""
        if objective not in self._whole:
            self._whole[objective] = self._together.whole({"": objective})
        found = self._whole[objective]
        return None if found is None else found.each[place][""]


class IdentifiedStep:
    """A step with its log; evaluations are kept as long as the step."""

    def __init__(
        self,
        batch: RolloutBatch,
        metrics: Mapping[str, float],
        dtype: torch.dtype,
        names: Trainer,
        digits: Mapping[str, tuple[Digits, ...]] | None = None,
        shared: tuple[SharedEvaluations, int] | None = None,
    ) -> None:
        """Take a step.

        Args:
            batch: its rows.
            metrics: the metrics logged at it.
            dtype: of token values.
            names: the trainer whose names of metrics the log has.
            digits: name of a metric to what its values may have been rounded to.
            shared: the evaluations of steps that are evaluated together, and the place of this one among them.
        """
        self.batch, self.metrics, self._shared = batch, metrics, shared
        self._dtype, self._names, self._digits = dtype, names, digits or {}
        self._logged: dict[bool, LoggedStep] = {}
        self._moved: dict[bool, Tensor | None] = {}
        self._rows: dict[tuple[object, ...], Evaluation | None] = {}
        self._whole: dict[tuple[object, ...], Evaluation | None] = {}
        self._scaled: dict[tuple[int, float], Evaluation] = {}
        self._made: dict[tuple[int, str], Mapping[str, float]] = {}
        self._compared: dict[tuple[object, ...], Prediction | None] = {}
        self._seen: dict[tuple[bool, bytes], Prediction] = {}
        self._named: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        # Of each configuration by its identity, which is told faster than its objective; it is kept, so that no other
        # can come to have the same.
        self._rows_of: dict[int, tuple[Configuration, Evaluation | None]] = {}
        self._unit_of: dict[int, tuple[Configuration, Evaluation | None]] = {}

    def logged(self, objective: Objective) -> LoggedStep:
        """Return what was logged, as an objective on its axis is compared with it."""
        by_row = objective.advantage.spec.axis is Axis.ROWS
        if by_row not in self._logged:
            self._logged[by_row] = of_step(self.batch, self.metrics, objective, self._digits)
        return self._logged[by_row]

    def advantages(self, one: Configuration) -> Prediction | None:
        """Return the advantages under a configuration; None where it cannot be computed or compared."""
        evaluation = self.rows(one)
        if evaluation is None or evaluation.rows is None:
            return None
        rows = evaluation.rows
        values = rows.advantage_N if rows.advantage_N is not None else rows.advantage_T
        assert values is not None
        known = rows.advantage_N is not None, _bytes(values)
        if known in self._seen:
            return self._seen[known]
        logged = self.logged(evaluation.objective)
        metrics = {}
        if not {"advantage", "advantages"} & (self.batch.per_row.keys() | self.batch.per_token.keys()):
            made = self._names.metrics(evaluation)
            wanted = [name for name in self.metrics if stage_of(self._names, name) == "advantages" and name in made]
            metrics = {name: made[name] for name in wanted}
        seen = _with_metrics(logged, metrics)
        tallies = audit_step(seen, evaluation, one.trainer or self._names, one.config, metrics, stages=("advantages",))
        if not tallies:
            return None
        radius = advantage_radius if rows.advantage_N is not None else token_advantage_radius
        radii = radius(evaluation).likely.expand(len(values))
        moved = self._stored(by_row=rows.advantage_N is not None)
        if moved is not None:
            radii = radii + moved
        if rows.advantage_N is not None and rows.rejected_N is not None and logged.advantage_range is not None:
            # The log holds nothing of rows without a trained token.
            values = torch.where(rows.rejected_N, torch.nan, values)
        if rows.advantage_T is not None:
            # Only trained tokens are compared.
            values = torch.where(self.batch.column("response_mask"), values, torch.nan)
        found = Prediction(tallies, values.double(), radii.double())
        self._seen[known] = found
        return found

    def _stored(self, *, by_row: bool) -> Tensor | None:
        """How far storing may have moved each logged advantage, of rows or of tokens; None if it did not."""
        if by_row not in self._moved:
            name = next((name for name in ("advantage", "advantages") if self.batch.has(name)), None)
            moved = None if name is None else stored_radius(self.batch.column(name))
            if moved is not None and by_row and name == "advantages":
                moved = seg.high(moved, self.batch.rows).clamp(min=0)
            self._moved[by_row] = moved
        return self._moved[by_row]

    def kl(self, one: Configuration) -> Prediction | None:
        """Return the KL metrics, and the KL that was stored, under a configuration."""
        return self._metrics(one, _KL_KINDS, "kl")

    def loss(self, one: Configuration) -> Prediction | None:
        """Return the metrics of the loss under a configuration."""
        return self._metrics(one, _LOSS_KINDS, "loss")

    def _metrics(self, one: Configuration, kinds: tuple[str, ...], stage: str) -> Prediction | None:
        evaluation = self.whole(one)
        if evaluation is None:
            return None
        trainer = one.trainer or self._names
        key = (id(evaluation), trainer.name, stage, one.edits)
        if key not in self._compared:
            self._compared[key] = self._compare(one, evaluation, trainer, kinds, stage)
        return self._compared[key]

    def _compare(
        self, one: Configuration, evaluation: Evaluation, trainer: Trainer, kinds: tuple[str, ...], stage: str
    ) -> Prediction | None:
        made = self._made_by(trainer, one)
        names = [name for name in self._names_in(trainer, kinds) if name in made]
        if stage == "kl" and one.objective.kl_loss is not None and all(trainer.kind_of(name) != "kl" for name in names):
            # What the rewards hold tells nothing of a term of the loss.
            return None
        metrics = {name: made[name] for name in names}
        own = {"loss": evaluation.loss, "policy_loss": evaluation.policy_loss}
        metrics |= {name: own[trainer.kind_of(name)] for name in names if trainer.kind_of(name) in own}
        for edit in one.edits:
            if edit.metrics is not None:
                edited = edit.metrics(evaluation, trainer, metrics)
                metrics |= {name: value for name, value in edited.items() if name in metrics}
        logged = _with_metrics(self.logged(evaluation.objective), metrics)
        tallies = audit_step(logged, evaluation, trainer, one.config, metrics, stages=(stage,))
        if not tallies:
            return None
        radii = [
            float(metric_radius(evaluation, trainer.kind_of(name), value))
            + rounding_of(self._digits, name, self.metrics[name])
            for name, value in metrics.items()
        ]
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        return Prediction(tallies, values, torch.tensor(radii, dtype=torch.float64))

    def _names_in(self, trainer: Trainer, kinds: tuple[str, ...]) -> list[str]:
        """Logged metrics of some kinds, in order."""
        if (trainer.name, kinds) not in self._named:
            found = sorted(name for name in self.metrics if trainer.kind_of(name) in kinds)
            self._named[trainer.name, kinds] = found
        return self._named[trainer.name, kinds]

    def _made_by(self, trainer: Trainer, one: Configuration) -> Mapping[str, float]:
        """Metrics of a configuration; those of its loss are with a coefficient of 1."""
        unit = self._unit(one)
        assert unit is not None
        if (id(unit), trainer.name) not in self._made:
            self._made[id(unit), trainer.name] = trainer.metrics(unit)
        return self._made[id(unit), trainer.name]

    @property
    def by_row(self) -> bool:
        """True if the log has one advantage for each row, and none for tokens."""
        return "advantage" in self.batch.per_row

    def loss_residual(self, unit: Configuration) -> tuple[float, float, float] | None:
        """Return what the KL term has to add to the logged loss, what it adds at a coefficient of 1, and the radius.

        None where no logged number holds the KL term.

        Args:
            unit: a configuration whose KL term has a coefficient of 1.
        """
        trainer = unit.trainer or self._names
        name = next((name for name in self.metrics if trainer.kind_of(name) == "loss"), None)
        if name is not None:
            evaluation = self.whole(unit)
            if evaluation is None:
                return None
            factor = 1.0
            for edit in unit.edits:
                if edit.metrics is not None:
                    factor = edit.metrics(evaluation, trainer, {name: 1.0}).get(name, 1.0)
            radius = float(metric_radius(evaluation, trainer.kind_of(name), evaluation.policy_loss))
            radius += rounding_of(self._digits, name, self.metrics[name])
            return self.metrics[name] - evaluation.policy_loss * factor, evaluation.kl_loss * factor, radius
        logged = trainer.loss_parts(self.metrics, None)
        kl = next((self.metrics[each] for each in trainer.kl_metrics if each in self.metrics), None)
        if logged is None or not kl:
            return None
        return logged.kl, kl, abs(kl) * 2.0**-22

    def rows(self, one: Configuration) -> Evaluation | None:
        """Return the evaluation of the rows alone; None where it cannot be made."""
        if id(one) not in self._rows_of:
            objective = one.where_all_vote if self._all_vote and not one.edits_rows else one.objective
            key = (_decisive(objective), one.edits)
            if key not in self._rows:
                self._rows[key] = self._evaluated(replace(one, objective=objective), rows_only=True)
            self._rows_of[id(one)] = one, self._rows[key]
        return self._rows_of[id(one)][1]

    @cached_property
    def _all_vote(self) -> bool:
        """True if every row has a reward and a trained token, and every group two rows or more."""
        batch = self.batch
        if batch.groups is None or "reward" not in batch.per_row or not len(batch):
            return False
        if bool((batch.groups.size_G < 2).any()) or bool(batch.column("reward").isnan().any()):
            return False
        if "response_mask" not in batch.per_token:
            return bool((batch.rows.diff() > 0).all())
        return bool((seg.total(batch.column("response_mask"), batch.rows) > 0).all())

    def whole(self, one: Configuration) -> Evaluation | None:
        """Return the evaluation of rows and tokens; None where it cannot be made.

        Configurations that differ in nothing but the coefficient of the KL share one pass over the tokens.
        """
        unit, term = self._unit(one), one.objective.kl_loss
        if unit is None or unit.tokens is None or term is None:
            return unit
        key = (id(unit), term.coef)
        if key not in self._scaled:
            assert unit.objective.kl_loss is not None
            objective = replace(unit.objective, kl_loss=replace(unit.objective.kl_loss, coef=term.coef))
            tokens = replace(unit.tokens, kl_loss_N=unit.tokens.kl_loss_N * term.coef)
            self._scaled[key] = replace(unit, objective=objective, tokens=tokens)
        return self._scaled[key]

    def _unit(self, one: Configuration) -> Evaluation | None:
        """The evaluation with a coefficient of 1."""
        if id(one) not in self._unit_of:
            objective = self._unit_objective(one)
            key = (objective, tuple(edit for edit in one.edits if edit.rows is not None))
            if key not in self._whole:
                self._whole[key] = self._evaluated(replace(one, objective=objective), rows_only=False)
            self._unit_of[id(one)] = one, self._whole[key]
        return self._unit_of[id(one)][1]

    def _unit_objective(self, one: Configuration) -> Objective:
        """The objective with a coefficient of 1, without what no value of this step depends on."""
        batch, old = self.batch, one.objective.surrogate.old
        on_policy = batch.stored_name(old) == batch.stored_name("policy_log_probs")
        return one.unit_at_ratio_one if on_policy else one.unit

    def _evaluated(self, one: Configuration, *, rows_only: bool) -> Evaluation | None:
        batch = self.batch
        if self._shared is not None and not one.edits_rows:
            steps, place = self._shared
            found = (steps.rows if rows_only else steps.whole)(one.objective, place)
            if found is not None:
                return found if rows_only or found.tokens is not None else None
        try:
            for edit in one.edits:
                if edit.rows is not None:
                    batch = edit.rows(batch, one.objective) or batch
            if not rows_only:
                found = evaluate(batch, one.objective, dtype=self._dtype, logged=self.metrics)
                return None if found.tokens is None else found
            objective = one.objective.at_step(self.metrics)
            rows = evaluate_rows(batch, objective, self._dtype)
        except (CannotComputeError, UsageError):
            return None
        return None if rows is None else Evaluation(batch, objective, rows, None, self._dtype)


def _with_metrics(logged: LoggedStep, names: Iterable[str]) -> LoggedStep:
    """What was logged, with those metrics alone that are compared."""
    return replace(logged, metrics={name: logged.metrics[name] for name in names})


def _decisive(objective: Objective) -> object:
    """What decides the result of the rows: objectives of two trainers often have it in common."""
    rule = objective.advantage
    if rule.spec.axis is not Axis.ROWS:
        return objective
    batches = objective.aggregation.eval_batches
    return essence(objective), rule.single, rule.whitened_over, rule.whitened_moments, batches


def _bytes(values: Tensor) -> bytes:
    """The values as a key, so that equal ones are found at once: every NaN is the same, and -0.0 is 0.0."""
    return (values.double().nan_to_num(7e77) + 0.0).numpy().tobytes()
