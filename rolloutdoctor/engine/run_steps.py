"""Run the steps of a run: each is read once, evaluated once, and passed to every consumer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.several_steps import TOGETHER, passes
from rolloutdoctor.engine.devices import find_device, find_dtype
from rolloutdoctor.engine.garbage_collection import rare_collections
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.evaluation.device import Evaluator
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation
from rolloutdoctor.evaluation.joined_steps import SharedPass, StepsTogether
from rolloutdoctor.evaluation.on_demand import OnDemand
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.evaluation.token_measures import TokenMeasure, TokenMeasures, measured_on_demand
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import CannotComputeError

LoggedBatch = tuple[RolloutBatch, Mapping[str, float]]
"""A step and the metrics logged at it."""


@dataclass(frozen=True, eq=False)
class EvaluatedStep:
    """One step as a consumer sees it.

    Attributes:
        batch: the rows.
        logged: the metrics logged at the step.
        dtype: of the token values.
        evaluations: by the consumer's own labels; the `versus_*` sums compare with `AS_CONFIGURED`. Empty if the
            consumer asked for none, or if the step cannot be evaluated.
        failure: why the step cannot be evaluated, or None.
        token_measures: name of a token measure to its values, ``[N, ...]`` each.
    """

    batch: RolloutBatch
    logged: Mapping[str, float]
    dtype: torch.dtype
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    failure: str | None = None
    token_measures: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class EvaluatedSteps:
    """Adjacent steps of one split as a consumer sees them.

    Attributes:
        steps: each of them.
        batch: their rows as one batch; None for a single step, and where the steps do not share a pass.
        evaluations: those of `batch`, by the consumer's own labels.
        token_measures: name of a token measure to its values over `batch`.
    """

    steps: Sequence[EvaluatedStep]
    batch: RolloutBatch | None = None
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    token_measures: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)


class StepConsumer(ABC):
    """Takes in every step, and keeps what it needs of it.

    Attributes:
        columns: canonical columns to be read.
        objectives: label to what is to be evaluated; `AS_CONFIGURED` is there unless nothing is.
        per_token: labels of the evaluations whose token values are to be kept.
        optional: labels of what may be left out of a step where it cannot be computed; the others are needed.
        split: only steps of this split are passed on; None: of both.
    """

    columns: frozenset[str]
    objectives: Mapping[str, Objective]
    per_token: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    split: str | None = None

    def token_measures(self, batch: RolloutBatch) -> Mapping[str, TokenMeasure]:
        """Return what is to be measured of the step's tokens while they are evaluated, by name."""
        return {}

    @abstractmethod
    def add(self, step: EvaluatedStep) -> None:
        """Take in one step."""

    def add_all(self, steps: EvaluatedSteps) -> None:
        """Take in some steps."""
        for step in steps.steps:
            self.add(step)


def run_file_steps(
    run: Run,
    consumers: Sequence[StepConsumer],
    options: ReadOptions,
    metrics: LoggedMetrics,
    progress: Progress | None = None,
) -> None:
    """Read every step of a run and pass it to all consumers; less than two steps are in memory.

    Args:
        run: what to read.
        consumers: what each step is passed to.
        options: which steps, on which device.
        metrics: the logged metrics that can be compared with one step.
        progress: called after each slice of rows with what is done and what there is to do, in the run's `unit`.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
        DeviceError: if a GPU fails, or does not compute what the CPU computes.
    """
    evaluator, dtype = Evaluator(find_device(options.device)), find_dtype(options.dtype)
    columns = frozenset[str]().union(*(each.columns for each in consumers))
    batches = run.batches(columns, steps=options.steps, split=options.split, dtype=dtype, progress=progress)
    run_steps(batches, consumers, dtype, metrics, evaluator)


def run_steps(
    batches: Iterable[RolloutBatch],
    consumers: Sequence[StepConsumer],
    dtype: torch.dtype,
    metrics: LoggedMetrics,
    evaluator: Evaluator | None = None,
) -> None:
    """Evaluate every step of an iterable once for all consumers, and pass it to them.

    Args:
        batches: steps: of a file, of a list, as they are being logged.
        consumers: what each step is passed to.
        dtype: of the token values.
        metrics: the logged metrics that can be compared with one step.
        evaluator: of a device; None: of the CPU.
    """
    evaluator = evaluator or Evaluator(torch.device("cpu"))
    dispatcher = StepDispatcher(consumers, dtype, evaluator)
    with evaluation_mode(), rare_collections():
        # A GPU is given its steps one by one, as they are.
        for steps in passes(batches, TOGETHER if evaluator.device.type == "cpu" else 0):
            dispatcher.steps([(batch, metrics.at(batch.key)) for batch in steps])
            # Or these steps would stay in memory while the next one is decoded.
            steps.clear()


class StepDispatcher:
    """Passes steps to consumers, each evaluated once for all of them; small steps share a pass over their tokens."""

    def __init__(
        self, consumers: Sequence[StepConsumer], dtype: torch.dtype, evaluator: Evaluator | None = None
    ) -> None:
        self._consumers, self._dtype = tuple(consumers), dtype
        self._evaluator = evaluator or Evaluator(torch.device("cpu"))
        self._by_split: dict[str, SharedEvaluator] = {}

    def steps(self, steps: Sequence[LoggedBatch]) -> None:
        """Evaluate some steps of one split, together where that is possible, and pass them to its consumers."""
        split = steps[0][0].split
        if split not in self._by_split:
            consumers = [each for each in self._consumers if each.split in (None, split)]
            self._by_split[split] = SharedEvaluator(consumers, self._evaluator)
        self._by_split[split].pass_on(steps, self._dtype)

    def step(self, batch: RolloutBatch, logged: Mapping[str, float]) -> None:
        """Evaluate a step by itself, and pass it to every consumer of its split."""
        self.steps([(batch, logged)])


class SharedEvaluator:
    """Evaluates what some consumers ask for together: equal objectives are evaluated once."""

    def __init__(self, consumers: Sequence[StepConsumer], evaluator: Evaluator) -> None:
        self.consumers, self._evaluator = tuple(consumers), evaluator
        self._distinct: list[Objective] = []
        self._names = [self._named(each.objectives) for each in consumers]
        self._per_token = {
            names[label] for each, names in zip(consumers, self._names, strict=True) for label in each.per_token
        }
        if any(names.get(AS_CONFIGURED) != "0" for names in self._names if names):
            raise ValueError("consumers of one run of steps compare with one and the same objective")

    def _named(self, objectives: Mapping[str, Objective]) -> dict[str, str]:
        """Map labels to the names under which the objectives are evaluated; the reference comes first."""
        names = {}
        for label in sorted(objectives, key=lambda label: label != AS_CONFIGURED):
            if objectives[label] not in self._distinct:
                self._distinct.append(objectives[label])
            names[label] = str(self._distinct.index(objectives[label]))
        return names

    @property
    def _objectives(self) -> dict[str, Objective]:
        return {str(number): objective for number, objective in enumerate(self._distinct)}

    def _measures(self, batch: RolloutBatch) -> dict[str, TokenMeasure]:
        return {
            f"{number} {name}": measure
            for number, consumer in enumerate(self.consumers)
            for name, measure in consumer.token_measures(batch).items()
        }

    def pass_on(self, steps: Sequence[LoggedBatch], dtype: torch.dtype) -> None:
        """Evaluate some steps, together where that is possible, and pass them to the consumers."""
        if len(steps) > 1:
            together = StepsTogether([batch for batch, _ in steps], [logged for _, logged in steps], dtype)
            shared: SharedPass | None = SharedPass({}, [{} for _ in steps])
            if self._distinct:
                shared = together.whole(self._objectives, self._per_token) or self._joined(together, steps, dtype)
            if shared is not None:
                return self._pass_on_together(steps, together.batch, shared, dtype)
        evaluated = [tuple(self.evaluate(batch, logged, dtype)) for batch, logged in steps]
        for consumer, evaluated_steps in zip(self.consumers, zip(*evaluated, strict=True), strict=True):
            consumer.add_all(EvaluatedSteps(evaluated_steps))
        return None

    def _joined(self, together: StepsTogether, steps: Sequence[LoggedBatch], dtype: torch.dtype) -> SharedPass | None:
        """Evaluate steps one by one, and join what comes out; None where that cannot be done of all of them."""
        objectives = self._objectives
        if not together.can_be_joined(objectives):
            return None
        try:
            each = [
                self._evaluator.evaluate(
                    batch, EvaluationRequest(objectives, dtype, self._per_token, logged)
                ).evaluations
                for batch, logged in steps
            ]
        except CannotComputeError:
            return None
        return together.join(each)

    def _pass_on_together(
        self, steps: Sequence[LoggedBatch], joined_batch: RolloutBatch, shared: SharedPass, dtype: torch.dtype
    ) -> None:
        for consumer, names in zip(self.consumers, self._names, strict=True):
            measures = consumer.token_measures(joined_batch)
            evaluated_steps = [
                EvaluatedStep(
                    batch,
                    logged,
                    dtype,
                    _labelled(evaluations, names),
                    token_measures=measured_on_demand(measures, batch, at_once=False),
                )
                for (batch, logged), evaluations in zip(steps, shared.each, strict=True)
            ]
            joined = _labelled(shared.joined, names)
            consumer.add_all(
                EvaluatedSteps(
                    evaluated_steps, joined_batch, joined, measured_on_demand(measures, joined_batch, at_once=True)
                )
            )

    def evaluate(self, batch: RolloutBatch, logged: Mapping[str, float], dtype: torch.dtype) -> Iterator[EvaluatedStep]:
        """Yield what each consumer sees of a step."""
        objectives, measures = self._objectives, self._measures(batch)
        request = EvaluationRequest(objectives, dtype, self._per_token, logged, measures)
        try:
            result = self._evaluator.evaluate(batch, request)
        except CannotComputeError as error:
            if len(self.consumers) == 1:
                some = self._without_optional(batch, logged, dtype)
                if some is not None:
                    yield some
                    return
                measured = _by_consumer(TokenMeasures(measures).finish(batch), 0)
                yield EvaluatedStep(batch, logged, dtype, failure=str(error), token_measures=measured)
                return
            # What cannot be computed may be another's: no consumer goes without because of the others.
            for consumer in self.consumers:
                yield from SharedEvaluator([consumer], self._evaluator).evaluate(batch, logged, dtype)
            return
        for number, names in enumerate(self._names):
            evaluations = {label: result.evaluations[name] for label, name in names.items()}
            measured = _by_consumer(result.measures, number)
            yield EvaluatedStep(batch, logged, dtype, evaluations, token_measures=measured)

    def _without_optional(
        self, batch: RolloutBatch, logged: Mapping[str, float], dtype: torch.dtype
    ) -> EvaluatedStep | None:
        """Evaluate a step for the only consumer, without what may be left out and cannot be computed.

        None where that is nothing, or where what is needed cannot be computed either.
        """
        (consumer,), (names,) = self.consumers, self._names
        if not consumer.optional & names.keys():
            return None
        labels = [label for label in names if label not in consumer.optional]
        step: EvaluatedStep | None = None
        for more in ([], *([label] for label in sorted(consumer.optional & names.keys()))):
            objectives = {names[label]: self._distinct[int(names[label])] for label in (*labels, *more)}
            per_token = self._per_token & objectives.keys()
            request = EvaluationRequest(objectives, dtype, per_token, logged, self._measures(batch))
            try:
                result = self._evaluator.evaluate(batch, request)
            except CannotComputeError:
                if not more:
                    return None
                continue
            labels += more
            evaluations = {label: result.evaluations[names[label]] for label in labels}
            measured = _by_consumer(result.measures, 0)
            step = EvaluatedStep(batch, logged, dtype, evaluations, token_measures=measured)
        return step


def _labelled(evaluations: Mapping[str, Evaluation], names: Mapping[str, str]) -> Mapping[str, Evaluation]:
    """Return evaluations by a consumer's own labels."""
    return OnDemand(names, lambda label: evaluations[names[label]])


def _by_consumer(
    measured: Mapping[str, Mapping[str, torch.Tensor]], number: int
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the token measures of one consumer by its own names."""
    start = f"{number} "
    return {name.removeprefix(start): values for name, values in measured.items() if name.startswith(start)}
