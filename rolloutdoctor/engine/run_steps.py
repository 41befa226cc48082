"""The sweep: every step of a run is read once, evaluated once, and shown to everyone who looks at it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.devices import find_dtype, find_evaluator
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.evaluation.gpu_check.first_step import Asked, Evaluator
from rolloutdoctor.io.allocation import prepare_memory
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops.elementwise import unwarned
from rolloutdoctor.ops.threads import one_torch_thread
from rolloutdoctor.results.errors import CannotComputeError

AS_CONFIGURED = ""
"""Label of the evaluation that the others are compared with."""


@dataclass(frozen=True, eq=False)
class SeenStep:
    """One step as a consumer sees it.

    Attributes:
        batch: the rows.
        logged: the metrics logged at the step.
        dtype: of the token values.
        evaluations: by the consumer's own labels; the `versus_*` sums compare with `AS_CONFIGURED`. Empty if the
            consumer asked for none, or if the step cannot be evaluated.
        failure: why the step cannot be evaluated, or None.
    """

    batch: RolloutBatch
    logged: Mapping[str, float]
    dtype: torch.dtype
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    failure: str | None = None


class Consumer(ABC):
    """Someone who looks at every step, and keeps what is needed of it.

    Attributes:
        columns: canonical columns to be read.
        objectives: label to what is to be evaluated; `AS_CONFIGURED` is there unless nothing is.
        per_token: labels of the evaluations whose token values are to be kept.
        split: only steps of this split are shown; None: of both.
    """

    columns: frozenset[str]
    objectives: Mapping[str, Objective]
    per_token: frozenset[str] = frozenset()
    split: str | None = None

    @abstractmethod
    def add(self, step: SeenStep) -> None:
        """Take in one step."""


def sweep(
    run: Run,
    consumers: Sequence[Consumer],
    options: ReadOptions,
    metrics: LoggedMetrics,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Show every step of a run to all consumers; no more than one step is in memory.

    Args:
        run: what to read.
        consumers: who looks.
        options: which steps, on which device.
        metrics: what was logged, as far as it can be compared with one step.
        progress: called after each row group with the rows done and the rows to do.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
        DeviceError: if a GPU does not compute what the CPU computes.
    """
    evaluator, dtype = find_evaluator(options), find_dtype(options.dtype)
    columns = frozenset[str]().union(*(each.columns for each in consumers))
    batches = run.batches(columns, steps=options.steps, split=options.split, dtype=dtype, progress=progress)
    show = Show(consumers, dtype, evaluator)
    prepare_memory()
    with one_torch_thread(), unwarned():
        for batch in batches:
            show.step(evaluator.moved(batch), metrics.at(batch.key))
            evaluator.done()
            # Or this step would stay in memory while the next one is decoded.
            del batch


class Show:
    """Shows steps to consumers, each evaluated once for all of them."""

    def __init__(self, consumers: Sequence[Consumer], dtype: torch.dtype, evaluator: Evaluator | None = None) -> None:
        self._consumers, self._dtype = tuple(consumers), dtype
        self._evaluator = evaluator or Evaluator(torch.device("cpu"))
        self._shared: dict[str, _Shared] = {}

    def step(self, batch: RolloutBatch, logged: Mapping[str, float]) -> None:
        """Evaluate a step, and show it to everyone who looks at its split."""
        if batch.split not in self._shared:
            lookers = [each for each in self._consumers if each.split in (None, batch.split)]
            self._shared[batch.split] = _Shared(lookers, self._evaluator)
        shared = self._shared[batch.split]
        for consumer, seen in zip(shared.consumers, shared.evaluate(batch, logged, self._dtype), strict=True):
            consumer.add(seen)


class _Shared:
    """What some consumers ask for together: objectives that are equal are one."""

    def __init__(self, consumers: Sequence[Consumer], evaluator: Evaluator) -> None:
        self.consumers, self._evaluator = tuple(consumers), evaluator
        self._distinct: list[Objective] = []
        self._names = [self._named(each.objectives) for each in consumers]
        self._per_token = {
            names[label] for each, names in zip(consumers, self._names, strict=True) for label in each.per_token
        }
        if any(names.get(AS_CONFIGURED) != "0" for names in self._names if names):
            raise ValueError("consumers of one sweep compare with one and the same objective")

    def _named(self, objectives: Mapping[str, Objective]) -> dict[str, str]:
        """Label to the name under which the objective is evaluated; the reference comes first."""
        names = {}
        for label in sorted(objectives, key=lambda label: label != AS_CONFIGURED):
            if objectives[label] not in self._distinct:
                self._distinct.append(objectives[label])
            names[label] = str(self._distinct.index(objectives[label]))
        return names

    def evaluate(self, batch: RolloutBatch, logged: Mapping[str, float], dtype: torch.dtype) -> Iterator[SeenStep]:
        """What each consumer sees of a step."""
        objectives = {str(number): objective for number, objective in enumerate(self._distinct)}
        try:
            found = self._evaluator.evaluate(batch, Asked(objectives, dtype, self._per_token, logged))
        except CannotComputeError as error:
            if len(self.consumers) == 1:
                yield SeenStep(batch, logged, dtype, failure=str(error))
                return
            # What cannot be computed may be another's: nobody goes without because of who else looks.
            for consumer in self.consumers:
                yield from _Shared([consumer], self._evaluator).evaluate(batch, logged, dtype)
            return
        for names in self._names:
            yield SeenStep(batch, logged, dtype, {label: found[name] for label, name in names.items()})
