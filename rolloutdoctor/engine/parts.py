"""Parts of a run, what is done with each, and how their states are added: the same for every executor.

A part is whole steps. An executor measures the parts wherever it likes, and gives their states back in the order of the
parts; they are added in a tree of which the shape is given by their number, so that nothing depends on who was faster.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rolloutdoctor.engine.stored import State
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run, StepRange

Addable = TypeVar("Addable", bound="Sum")


class Sum(Protocol):
    """A state that adds up."""

    def __add__(self, other: Any, /) -> Any:  # noqa: ANN401  # another of the same
        """Add another."""


@dataclass(frozen=True)
class Part:
    """Whole steps of a run.

    Attributes:
        number: place among the parts.
        steps: the steps.
        run: the run, of which only the files that may hold these steps are read.
    """

    number: int
    steps: StepRange
    run: Run

    @property
    def words(self) -> str:
        """Return the name of the part for messages."""
        start, stop = ("" if end is None else str(end) for end in (self.steps.start, self.steps.stop))
        return f"steps {start}:{stop}"


class Work(ABC, Generic[State]):
    """Work of a command on each part; it is sent to other processes and machines by pickle.

    Attributes:
        kind: class of the states.
    """

    kind: type[State]

    @abstractmethod
    def measure(self, part: Part, progress: Progress | None) -> State:
        """Measure a part.

        Raises:
            InputError: if a file cannot be read, or breaks the contract.
        """

    def among(self, parts: int) -> "Work[State]":
        """Return the same work for one of some parts, which other processes of this machine measure."""
        return self

    def usable(self, state: State) -> State:
        """Return a state that was stored, if it can be added.

        Raises:
            ValueError: if it cannot.
        """
        return state

    @abstractmethod
    def identity(self) -> str:
        """Everything but the part and the version that a state depends on."""


class Executor(Protocol):
    """Measures the parts of a run somewhere."""

    def measure(
        self,
        work: Work[State],
        run: Run,
        steps: StepRange | None = None,
        split: str | None = None,
        progress: Progress | None = None,
    ) -> list[State]:
        """Measure all parts, and return their states in the order of the parts; one of them at least.

        Raises:
            InputError: if a file cannot be read, or breaks the contract: the error of the earliest part that has one.
        """


def plan_parts(run: Run, steps: StepRange | None, split: str | None, count: int) -> list[Part]:
    """Cut a run into at most `count` parts, from its footers where they tell where the steps are."""
    return [Part(number, *part) for number, part in enumerate(run.parts(steps, split, count))]


def tree_sum(states: Sequence[Addable]) -> Addable:
    """Add one or more states in a balanced tree; an odd one at the end waits for the next level.

    >>> tree_sum(["a", "b", "c"])
    'abc'
    """
    level = list(states)
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
