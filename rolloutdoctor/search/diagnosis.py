"""`Diagnosis`: what the disagreements of an audit come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolloutdoctor.audit.tally import AuditTally
from rolloutdoctor.results.audit import Cause


@dataclass(frozen=True)
class Diagnosis:
    """Causes of the disagreements of an audit.

    Attributes:
        causes: what was established, in the order of the stages.
        fixes: quantity to the names of the known fixes with which its values agree.
        unexplained: quantity to its tally, where no hypothesis gives the logged values.
        partly: quantities of which a cause explains some values and not all, or that come after such ones.
        given: quantities that agree only where the logged advantages, which nothing explains, are taken as they are.
    """

    causes: tuple[Cause, ...] = ()
    fixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unexplained: AuditTally = field(default_factory=dict)
    partly: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()


def undiagnosed(audit: AuditTally) -> Diagnosis:
    """Return the diagnosis where the rows are not at hand: every disagreement is unexplained."""
    return Diagnosis(unexplained={name: tally for name, tally in audit.items() if tally.disagree})
