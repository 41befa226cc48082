"""Results of an audit: the number of logged values that the rows and the recorded options reproduce."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Disagreement:
    """A logged value that the rows do not reproduce.

    Attributes:
        step: optimizer step.
        sample_id: name of the row; None for a value of the whole step.
        logged: the value in the log.
        recomputed: the value that the rows and the options give.
    """

    step: int
    sample_id: str | None
    logged: float
    recomputed: float


@dataclass(frozen=True)
class AuditEntry:
    """One logged quantity, compared with its recomputed values.

    Attributes:
        quantity: ``advantages``, ``kl`` (stored per token), or the trainer's own name of a metric.
        compared: values that were compared.
        agree: those that lie within their rounding radius.
        worst: largest difference in units of its rounding radius; at most 1 agrees.
        first: the first value that does not agree, or None.
        with_fixes: names of the known fixes with which the values agree; without them they would not.
        fault: code of the rule that reports a fault of the recorded release with which the values agree, and without
            which they would not; empty if there is none.
        not_compared: logged values that could not be compared.
        reason: why they could not.
        shape: how the disagreeing values differ, in words; empty where all agree.
        stage: what it is about: ``advantages``, ``kl``, ``loss`` or ``metrics``.
        window: steps that each logged value is the mean over.
    """

    quantity: str
    compared: int
    agree: int
    worst: float
    first: Disagreement | None = None
    with_fixes: tuple[str, ...] = ()
    not_compared: int = 0
    reason: str = ""
    shape: str = ""
    stage: str = "metrics"
    window: int = 1
    fault: str = ""

    @property
    def outcome(self) -> str:
        """Return how the values compare: ``intended``, ``known fault`` or ``differs``; empty if none was compared."""
        if not self.compared or not self.agrees:
            return "differs" if self.compared else ""
        return "known fault" if self.fault else "intended"

    @property
    def agrees(self) -> bool:
        """True if every value that was compared agrees."""
        return self.agree == self.compared


OTHER_NUMBERS = "log-numbered-otherwise"
"""Name of the cause that the log numbers its steps otherwise than the rows."""


@dataclass(frozen=True)
class Cause:
    """A hypothesis that gives the logged values where the recorded options do not.

    Attributes:
        hypothesis: its name in the table of causes.
        code: of the rule that reports it.
        words: what the trainer did, in one sentence.
        quantity: the logged quantity that shows it.
        compared: values of that quantity.
        as_recorded: values that agree with the recorded options.
        as_found: values that agree under the hypothesis.
        worst: largest difference under the hypothesis, in units of its rounding radius.
        remedy: what to do about it.
        explains: every quantity that disagrees with the options and agrees under the hypothesis.
        also: other hypotheses that give the same values.
        measures: name to value and unit, how much the cause changes.
        steps: first and last step whose values show it, and how many there are.
        references: upstream threads and papers.
    """

    hypothesis: str
    code: str
    words: str
    quantity: str
    compared: int
    as_recorded: int
    as_found: int
    worst: float
    remedy: str = ""
    explains: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    measures: Mapping[str, tuple[float | None, str]] = field(default_factory=dict)
    steps: tuple[int, int, int] | None = None
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refuted:
    """An option that the log contradicts.

    Attributes:
        option: its name.
        value: its value, in words.
        assumed: True if nothing states the value.
        words: why it cannot be, in one sentence.
        evidence: the logged values that show it.
    """

    option: str
    value: str
    assumed: bool
    words: str
    evidence: str
