"""`MetricName`: a metric under the name that a trainer logs it by."""

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class MetricName:
    """A metric of a trainer.

    Attributes:
        pattern: its name in the log; ``*`` stands for any text (of a reward function, a data source).
        quantity: the canonical quantity, a name in `quantities.QUANTITIES`.
        definition: mean of what over what, over which rows, per rank or over all, in one sentence.
        source: upstream file and function.
        since: first release that logs it under this name; empty: the oldest that is known.
        until: first release that does not any more; empty: it is still logged.
        factor: the canonical value is so many times the logged one (0.01 for percent).
    """

    pattern: str
    quantity: str
    definition: str
    source: str
    since: str = ""
    until: str = ""
    factor: float = 1.0

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """Matches the names that it stands for."""
        return re.compile(".+".join(map(re.escape, self.pattern.split("*"))))

    def matches(self, name: str) -> bool:
        """Tell whether a logged name is this metric's."""
        return self.expression.fullmatch(name) is not None
