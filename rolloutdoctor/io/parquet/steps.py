"""`StepRange`: which optimizer steps the user asked for."""

import re
from dataclasses import dataclass

from rolloutdoctor.results.errors import UsageError


@dataclass(frozen=True)
class StepRange:
    """Half-open range of steps, like a Python slice; None leaves an end open."""

    start: int | None = None
    stop: int | None = None

    def __contains__(self, step: int) -> bool:
        return (self.start is None or step >= self.start) and (self.stop is None or step < self.stop)

    def meets(self, low: int, high: int) -> bool:
        """Tell whether any step from `low` to `high`, both included, can be in the range."""
        return (self.start is None or high >= self.start) and (self.stop is None or low < self.stop)

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        """Read ``100:200``, ``100:``, ``:200``, ``:`` or ``7`` (that step alone).

        >>> StepRange.parse("100:200")
        StepRange(start=100, stop=200)
        >>> StepRange.parse("7")
        StepRange(start=7, stop=8)

        Raises:
            UsageError: if the text is none of these, or no step can be in the range.
        """
        match = re.fullmatch(r"\s*([0-9]*)\s*(:?)\s*([0-9]*)\s*", text, re.ASCII)
        first, colon, last = match.groups() if match else ("", "", "")
        # More digits than any step has; int() itself refuses thousands of them.
        if not (first or colon) or max(len(first), len(last)) > 20:
            raise UsageError(f"steps {text!r}: not a range of steps; write START:STOP, START:, :STOP or one step")
        if not colon:
            if last:
                raise UsageError(f"steps {text!r}: not a range of steps; write START:STOP, START:, :STOP or one step")
            return cls(int(first), int(first) + 1)
        steps = cls(int(first) if first else None, int(last) if last else None)
        if steps.stop is not None and steps.stop <= (steps.start or 0):
            raise UsageError(f"steps {text!r}: no step is in that range; STOP is excluded and has to be above START")
        return steps
