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
            cached: Found = self._kept[key]
            return cached
        computed = make()
        if keeps_none or computed is not None:
            self._kept[key] = computed
        return computed

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

    def evaluated(self, candidate: Candidate, *, rows_only: bool = False, per_token: bool = False) -> Evaluation | None:
        """Evaluate the step under a candidate; None where that cannot be done."""
        batch, objective = self.batch, candidate.objective
        try:
            for edit in candidate.edits:
                objective = objective if edit.objective is None else edit.objective(objective)
                batch = batch if edit.rows is None else edit.rows(batch, objective) or batch

            def amend(rows: RowResult) -> RowResult:
                for edit in candidate.edits:
                    logged_N = None if edit.advantages is None else self.advantage_N(candidate.objective)
                    if edit.advantages is None or logged_N is None or rows.advantage_N is None:
                        continue
                    edited = edit.advantages(Evaluation(batch, rows.objective, rows, None, self._dtype), logged_N)
                    rows = rows if edited is None else replace(rows, advantage_N=edited[0], edited_radius=edited[1])
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
        candidate: Candidate,
        evaluation: Evaluation,
        metrics: Mapping[str, float],
        stages: Sequence[str] = STAGES,
        *,
        in_doubt: bool = False,
    ) -> AuditTally:
        """Audit the advantages and some metrics that a candidate gives, which were logged."""
        logged = replace(self.logged(evaluation.objective), metrics={name: self.metrics[name] for name in metrics})
        trainer = candidate.trainer or self.names
        return tallies_of(
            compare_step(logged, evaluation, trainer, candidate.config, metrics, in_doubt=in_doubt, stages=stages)
        )

    def rows(self, candidate: Candidate) -> Evaluation | None:
        """Return the evaluation of the rows alone; None where it cannot be made."""
        objective = candidate.where_all_vote if self._all_vote and not candidate.evaluating else candidate.objective
        return self.once(
            ("rows", _decisive(objective), candidate.edits),
            lambda: self.evaluated(replace(candidate, objective=objective), rows_only=True),
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

    def whole(self, candidate: Candidate) -> Evaluation | None:
        """Return the evaluation of rows and tokens; None where it cannot be made.

        Candidates that differ in nothing but the coefficient of the KL share one pass over the tokens.
        """
        unit, term = self._unit(candidate), candidate.objective.kl_loss
        if unit is None or term is None:
            return unit

        def scaled() -> Evaluation:
            assert unit.tokens is not None
            assert unit.objective.kl_loss is not None
            objective = replace(unit.objective, kl_loss=replace(unit.objective.kl_loss, coef=term.coef))
            tokens = replace(unit.tokens, kl_loss_N=unit.tokens.kl_loss_N * term.coef)
            return replace(unit, objective=objective, tokens=tokens)

        return self.once((id(unit), term.coef), scaled)

    def _unit(self, candidate: Candidate) -> Evaluation | None:
        """The evaluation with a KL coefficient of 1, without what no value of this step depends on."""
        batch, old = self.batch, candidate.objective.surrogate.old
        on_policy = batch.stored_name(old) == batch.stored_name("policy_log_probs")
        objective = candidate.unit_at_ratio_one if on_policy else candidate.unit

        def make() -> Evaluation | None:
            evaluation = self.evaluated(replace(candidate, objective=objective))
            return None if evaluation is None or evaluation.tokens is None else evaluation

        return self.once(("whole", objective, candidate.evaluating), make)

    def advantages(self, candidate: Candidate) -> Prediction | None:
        """Return the advantages under a candidate; None where they cannot be computed or compared."""
        evaluation = self.rows(candidate)
        if evaluation is None or evaluation.rows is None:
            return None
        rows = evaluation.rows
        values = rows.advantage_N if rows.advantage_N is not None else rows.advantage_T
        assert values is not None
        key = ("advantages", rows.advantage_N is not None, _bytes(values))
        # Metrics have the names of one trainer: that those of another cannot be compared says nothing of its values.
        return self.once(key, lambda: self._advantages(candidate, evaluation, rows, values), keeps_none=False)

    def _advantages(
        self, candidate: Candidate, evaluation: Evaluation, rows: RowResult, values: Tensor
    ) -> Prediction | None:
        metrics = {}
        if not {"advantage", "advantages"} & (self.batch.per_row.keys() | self.batch.per_token.keys()):
            recomputed = self.names.metrics(evaluation)
            wanted = [
                name for name in self.metrics if stage_of(self.names, name) == "advantages" and name in recomputed
            ]
            metrics = {name: recomputed[name] for name in wanted}
        tallies = self.compared(candidate, evaluation, metrics, ("advantages",))
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

    def kl(self, candidate: Candidate) -> Prediction | None:
        """Return the KL metrics, and the KL that was stored, under a candidate."""
        return self._metrics(candidate, _KL_KINDS, "kl")

    def loss(self, candidate: Candidate) -> Prediction | None:
        """Return the metrics of the loss under a candidate."""
        return self._metrics(candidate, _LOSS_KINDS, "loss")

    def _metrics(self, candidate: Candidate, kinds: tuple[str, ...], stage: str) -> Prediction | None:
        evaluation = self.whole(candidate)
        if evaluation is None:
            return None
        key = (id(evaluation), (candidate.trainer or self.names).name, stage, candidate.edits)
        return self.once(key, lambda: self._compare(candidate, evaluation, kinds, stage))

    def _compare(
        self, candidate: Candidate, evaluation: Evaluation, kinds: tuple[str, ...], stage: str
    ) -> Prediction | None:
        trainer, unit = candidate.trainer or self.names, self._unit(candidate)
        assert unit is not None
        # Metrics of the loss are with a coefficient of 1, but for the loss itself.
        recomputed = self.metrics_of(unit, trainer)
        names = [name for name in sorted(self.metrics) if trainer.log.kind_of(name) in kinds and name in recomputed]
        shows_kl = any(trainer.log.kind_of(name) == "kl" for name in names)
        if stage == "kl" and candidate.objective.kl_loss is not None and not shows_kl:
            # What the rewards hold tells nothing of a term of the loss.
            return None
        by_kind = {"loss": evaluation.loss * _share(evaluation, trainer), "policy_loss": evaluation.policy_loss}
        as_made = {name: by_kind.get(trainer.log.kind_of(name), recomputed[name]) for name in names}
        metrics = candidate.edited(evaluation, trainer, as_made)
        tallies = self.compared(candidate, evaluation, metrics, (stage,))
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
