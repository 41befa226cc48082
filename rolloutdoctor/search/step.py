"""One step with its log, and what candidates give for it, each worked out once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from rolloutdoctor.audit.logged import LoggedStep, of_step, row_advantages
from rolloutdoctor.audit.step import compare_step, stage_of, tallies_of
from rolloutdoctor.audit.stored_digits import stored_radius
from rolloutdoctor.audit.tally import AuditTally
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.windows import Window
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, evaluate, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.stages import STAGES, essence
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.logged_digits import Digits, rounding_of
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.search.candidates import Candidate
from rolloutdoctor.trainers.spec import Trainer

Found = TypeVar("Found")

_KL_KINDS = ("kl", "reward_kl", "stored_kl")
_LOSS_KINDS = ("loss", "policy_loss")


@dataclass(frozen=True, eq=False)
class Prediction:
    """Values that a candidate predicts for a step, compared with the log.

    Attributes:
        tallies: quantity to how it compares with the log.
        values: the values that were compared, ``[n]`` float64; NaN where nothing was.
        radii: their rounding radii, ``[n]`` float64.
    """

    tallies: AuditTally
    values: Tensor
    radii: Tensor


class Step:
    """A step with its log; evaluations are kept as long as the step.

    Attributes:
        batch: its rows.
        metrics: the metrics logged at it.
        names: the trainer whose names of metrics the log has.
        digits: name of a metric to what its values may have been rounded to.
        window: the steps over which other metrics are means, and those.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        metrics: Mapping[str, float],
        dtype: torch.dtype,
        names: Trainer,
        digits: Mapping[str, tuple[Digits, ...]] | None = None,
        *,
        window: Window | None = None,
    ) -> None:
        self.batch, self.metrics, self.names, self.digits, self.window = batch, metrics, names, digits or {}, window
        self._dtype = dtype
        self._kept: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Found], *, keeps_none: bool = True) -> Found:
        """Return what was made under a key, or make it."""
        if key in self._kept:
            kept: Found = self._kept[key]
            return kept
        found = make()
        if keeps_none or found is not None:
            self._kept[key] = found
        return found

    def forget(self) -> None:
        """Drop all of it."""
        self._kept.clear()

    def logged(self, objective: Objective) -> LoggedStep:
        """Return what was logged, as an objective on its axis is compared with it."""
        by_row = objective.advantage.spec.axis is Axis.ROWS
        return self.once(("logged", by_row), lambda: of_step(self.batch, self.metrics, objective, self.digits))

    @property
    def by_row(self) -> bool:
        """True if the log has one advantage for each row, and none for tokens."""
        return "advantage" in self.batch.per_row

    def evaluated(self, one: Candidate, *, rows_only: bool = False, per_token: bool = False) -> Evaluation | None:
        """Evaluate the step under a candidate; None where that cannot be done."""
        batch, objective = self.batch, one.objective
        try:
            for edit in one.edits:
                objective = objective if edit.objective is None else edit.objective(objective)
                batch = batch if edit.rows is None else edit.rows(batch, objective) or batch

            def amend(rows: RowResult) -> RowResult:
                for edit in one.edits:
                    logged_N = None if edit.advantages is None else self.advantage_N(one.objective)
                    if edit.advantages is None or logged_N is None or rows.advantage_N is None:
                        continue
                    made = edit.advantages(Evaluation(batch, rows.objective, rows, None, self._dtype), logged_N)
                    rows = rows if made is None else replace(rows, advantage_N=made[0], edited_radius=made[1])
                return rows

            if not rows_only:
                return evaluate(
                    batch, objective, dtype=self._dtype, logged=self.metrics, per_token=per_token, amend=amend
                )
            objective = objective.at_step(self.metrics)
            rows = evaluate_rows(batch, objective, self._dtype)
            return None if rows is None else Evaluation(batch, objective, amend(rows), None, self._dtype)
        except (CannotComputeError, UsageError):
            return None

    def advantage_N(self, objective: Objective) -> Tensor | None:
        """Return the logged advantage of each row; see `row_advantages`."""
        return row_advantages(self.logged(objective))

    def metrics_of(self, evaluation: Evaluation, trainer: Trainer) -> Mapping[str, float]:
        """Return the trainer's metrics of an evaluation, each made when it is asked for."""
        # The evaluation is kept with them, so that no other can come to have its identity.
        return self.once((id(evaluation), trainer.name), lambda: (evaluation, trainer.metrics(evaluation)))[1]

    def compared(
        self,
        one: Candidate,
        evaluation: Evaluation,
        metrics: Mapping[str, float],
        stages: Sequence[str] = STAGES,
        *,
        in_doubt: bool = False,
    ) -> AuditTally:
        """Audit the advantages and some metrics that a candidate gives, which were logged."""
        logged = replace(self.logged(evaluation.objective), metrics={name: self.metrics[name] for name in metrics})
        trainer = one.trainer or self.names
        return tallies_of(
            compare_step(logged, evaluation, trainer, one.config, metrics, in_doubt=in_doubt, stages=stages)
        )

    def rows(self, one: Candidate) -> Evaluation | None:
        """Return the evaluation of the rows alone; None where it cannot be made."""
        objective = one.where_all_vote if self._all_vote and not one.evaluating else one.objective
        return self.once(
            ("rows", _decisive(objective), one.edits),
            lambda: self.evaluated(replace(one, objective=objective), rows_only=True),
        )

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

    def whole(self, one: Candidate) -> Evaluation | None:
        """Return the evaluation of rows and tokens; None where it cannot be made.

        Candidates that differ in nothing but the coefficient of the KL share one pass over the tokens.
        """
        unit, term = self._unit(one), one.objective.kl_loss
        if unit is None or term is None:
            return unit

        def scaled() -> Evaluation:
            assert unit.tokens is not None
            assert unit.objective.kl_loss is not None
            objective = replace(unit.objective, kl_loss=replace(unit.objective.kl_loss, coef=term.coef))
            tokens = replace(unit.tokens, kl_loss_N=unit.tokens.kl_loss_N * term.coef)
            return replace(unit, objective=objective, tokens=tokens)

        return self.once((id(unit), term.coef), scaled)

    def _unit(self, one: Candidate) -> Evaluation | None:
        """The evaluation with a KL coefficient of 1, without what no value of this step depends on."""
        batch, old = self.batch, one.objective.surrogate.old
        on_policy = batch.stored_name(old) == batch.stored_name("policy_log_probs")
        objective = one.unit_at_ratio_one if on_policy else one.unit

        def make() -> Evaluation | None:
            found = self.evaluated(replace(one, objective=objective))
            return None if found is None or found.tokens is None else found

        return self.once(("whole", objective, one.evaluating), make)

    def advantages(self, one: Candidate) -> Prediction | None:
        """Return the advantages under a candidate; None where they cannot be computed or compared."""
        evaluation = self.rows(one)
        if evaluation is None or evaluation.rows is None:
            return None
        rows = evaluation.rows
        values = rows.advantage_N if rows.advantage_N is not None else rows.advantage_T
        assert values is not None
        key = ("advantages", rows.advantage_N is not None, _bytes(values))
        # Metrics have the names of one trainer: that those of another cannot be compared says nothing of its values.
        return self.once(key, lambda: self._advantages(one, evaluation, rows, values), keeps_none=False)

    def _advantages(self, one: Candidate, evaluation: Evaluation, rows: RowResult, values: Tensor) -> Prediction | None:
        metrics = {}
        if not {"advantage", "advantages"} & (self.batch.per_row.keys() | self.batch.per_token.keys()):
            made = self.names.metrics(evaluation)
            wanted = [name for name in self.metrics if stage_of(self.names, name) == "advantages" and name in made]
            metrics = {name: made[name] for name in wanted}
        tallies = self.compared(one, evaluation, metrics, ("advantages",))
        if not tallies:
            return None
        by_row = rows.advantage_N is not None
        radius = advantage_radius if by_row else token_advantage_radius
        radii = radius(evaluation).likely.expand(len(values))
        moved = self.once(("stored", by_row), lambda: self._stored(by_row=by_row))
        if moved is not None:
            radii = radii + moved
        if by_row and rows.rejected_N is not None and self.logged(evaluation.objective).advantage_range is not None:
            # The log holds nothing of rows without a trained token.
            values = torch.where(rows.rejected_N, torch.nan, values)
        if not by_row:
            # Only trained tokens are compared.
            values = torch.where(self.batch.column("response_mask"), values, torch.nan)
        return Prediction(tallies, values.double(), radii.double())

    def _stored(self, *, by_row: bool) -> Tensor | None:
        """Return the radius of each logged advantage, of rows or of tokens, due to storing; None if it is 0."""
        name = next((name for name in ("advantage", "advantages") if self.batch.has(name)), None)
        moved = None if name is None else stored_radius(self.batch.column(name))
        if moved is not None and by_row and name == "advantages":
            moved = seg.high(moved, self.batch.rows).clamp(min=0)
        return moved

    def kl(self, one: Candidate) -> Prediction | None:
        """Return the KL metrics, and the KL that was stored, under a candidate."""
        return self._metrics(one, _KL_KINDS, "kl")

    def loss(self, one: Candidate) -> Prediction | None:
        """Return the metrics of the loss under a candidate."""
        return self._metrics(one, _LOSS_KINDS, "loss")

    def _metrics(self, one: Candidate, kinds: tuple[str, ...], stage: str) -> Prediction | None:
        evaluation = self.whole(one)
        if evaluation is None:
            return None
        key = (id(evaluation), (one.trainer or self.names).name, stage, one.edits)
        return self.once(key, lambda: self._compare(one, evaluation, kinds, stage))

    def _compare(self, one: Candidate, evaluation: Evaluation, kinds: tuple[str, ...], stage: str) -> Prediction | None:
        trainer, unit = one.trainer or self.names, self._unit(one)
        assert unit is not None
        # Metrics of the loss are with a coefficient of 1, but for the loss itself.
        made = self.metrics_of(unit, trainer)
        names = [name for name in sorted(self.metrics) if trainer.log.kind_of(name) in kinds and name in made]
        shows_kl = any(trainer.log.kind_of(name) == "kl" for name in names)
        if stage == "kl" and one.objective.kl_loss is not None and not shows_kl:
            # What the rewards hold tells nothing of a term of the loss.
            return None
        own = {"loss": evaluation.loss * _share(evaluation, trainer), "policy_loss": evaluation.policy_loss}
        as_made = {name: own.get(trainer.log.kind_of(name), made[name]) for name in names}
        metrics = one.edited(evaluation, trainer, as_made)
        tallies = self.compared(one, evaluation, metrics, (stage,))
        if not tallies:
            return None
        radii = [self._radius(evaluation, trainer, name, value) for name, value in metrics.items()]
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        return Prediction(tallies, values, torch.tensor(radii, dtype=torch.float64))

    def _radius(self, evaluation: Evaluation, trainer: Trainer, name: str, value: float) -> float:
        radius = float(metric_radius(evaluation, trainer.log.kind_of(name), value))
        return radius + rounding_of(self.digits, name, self.metrics[name])

    def loss_residual(self, unit: Candidate) -> tuple[float, float, float] | None:
        """Return what the KL term has to add to the logged loss, what it adds at a coefficient of 1, and the radius.

        None where no logged number holds the KL term.

        Args:
            unit: a candidate whose KL term has a coefficient of 1.
        """
        trainer = unit.trainer or self.names
        name = next((name for name in self.metrics if trainer.log.kind_of(name) == "loss"), None)
        if name is not None:
            evaluation = self.whole(unit)
            if evaluation is None:
                return None
            factor = unit.edited(evaluation, trainer, {name: _share(evaluation, trainer)})[name]
            radius = self._radius(evaluation, trainer, name, evaluation.policy_loss)
            return self.metrics[name] - evaluation.policy_loss * factor, evaluation.kl_loss * factor, radius
        logged = trainer.log.loss_parts(self.metrics, None)
        kl = next((self.metrics[each] for each in trainer.log.kl if each in self.metrics), None)
        if logged is None or not kl:
            return None
        return logged.kl, kl, abs(kl) * 2.0**-22


def _share(evaluation: Evaluation, trainer: Trainer) -> float:
    """Return the share of the loss of the step that the trainer logs."""
    share = trainer.log.loss_share(evaluation)
    return 1.0 if share is None else share


def _decisive(objective: Objective) -> object:
    """Return what decides the result of the rows: objectives of two trainers often have it in common."""
    rule = objective.advantage
    if rule.spec.axis is not Axis.ROWS:
        return objective
    batches = objective.aggregation.eval_batches
    return essence(objective), rule.single, rule.whitened_over, rule.whitened_moments, batches


def _bytes(values: Tensor) -> bytes:
    """The values as a key, so that equal ones are found at once: every NaN is the same, and -0.0 is 0.0."""
    return (values.double().nan_to_num(7e77) + 0.0).numpy().tobytes()
