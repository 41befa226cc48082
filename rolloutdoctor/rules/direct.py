"""Base of rules that are judged by the audit and look at the rows as well: a fault may be consistent with the log."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rolloutdoctor.results.findings import Example, Measure
from rolloutdoctor.rules.audited import AuditedTally, CauseRule
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class DirectTally(AuditedTally):
    """What a direct test adds up beside the audit.

    Attributes:
        looked_at: tokens, rows or steps in which the fault could have shown itself.
        shown: those in which it does.
        size: sum of how far they are off.
    """

    looked_at: int = 0
    shown: int = 0
    size: float = 0.0


@dataclass(frozen=True)
class DirectRule(CauseRule):
    """A cause rule with a direct test on rows or options, which speaks where the audit found no cause.

    By default the test is what `measure_tokens` returns of each row under the names of the tally's fields.

    Attributes:
        unit: what the test counts.
        shows: what an example is, after its count.
    """

    tally: ClassVar[type[AuditedTally]] = DirectTally
    unit: ClassVar[str] = "tokens"
    shows: ClassVar[str] = ""

    def look(self, steps: "StepView") -> Mapping[str, Any]:
        """Return fields of the tally for each step, ``[S]`` each; nothing where the rows cannot show the fault."""
        rows = steps.token_measures.get(self.code, {}) if self.measures_tokens else {}
        return {name: getattr(steps.by_step, "sum" if name == "size" else "count")(x_N) for name, x_N in rows.items()}

    def direct(self, run: Any, context: Context) -> Judgement | None:  # noqa: ANN401  # the rule's own tally
        """Judge what the rows and the options show; None if there is nothing to find."""
        return None

    def measure_each(self, steps: "StepView") -> Sequence[AuditedTally]:
        """Count the logged values of each step, and what its rows show."""
        audited = [vars(self.audited(each)) for each in steps.each]
        found = self.look(steps) if len(steps.batch) else {}
        return steps.tallies(self.tally, **{name: [one[name] for one in audited] for name in audited[0]}, **found)

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Values that disagree, then the rows in which most is shown."""
        yield from super().examples(step)
        rows = step.token_measures.get(self.code, {}) if self.measures_tokens else {}
        if "shown" in rows:
            shown_N = rows["shown"]
            yield from step.worst_rows(shown_N, lambda row: f"{int(shown_N[row]):,} {self.shows}", KEEP_EXAMPLES)

    def measures(self, tally: AuditedTally) -> Mapping[str, Measure]:
        """The audit's, and what was looked at."""
        found = dict(super().measures(tally))
        if isinstance(tally, DirectTally) and tally.looked_at:
            found[f"{self.unit}_looked_at"] = Measure(tally.looked_at, self.unit)
            found[f"{self.unit}_shown"] = Measure(tally.shown, self.unit)
        return found

    def inconclusive_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """Neither a logged value nor the rows show it."""
        return super().inconclusive_reason(run, context) if self.direct(run, context) is None else None

    def judge(self, run: AuditedTally, context: Context) -> Judgement | None:
        """Report a cause that the audit established, else what the rows show."""
        return super().judge(run, context) or self.direct(run, context)


def follows(run: AuditedTally) -> bool:
    """True if all values that were logged follow from the rows and the options, so that the trainer did as they say."""
    return run.compared > 0 and run.agree == run.compared
