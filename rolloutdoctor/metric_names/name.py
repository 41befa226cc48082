"""`MetricName`: a metric under the name that a trainer logs it by."""

import re
from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True)
class MetricName:
    """A metric of a trainer; its canonical value is ``offset + factor * logged``.

    Attributes:
        pattern: its name in the log; ``*`` stands for any text (of a reward function, a data source), at the end for
            any without a slash, and what stands in brackets may be missing (a prefix that some loggers add).
        quantity: the canonical quantity, a name in `quantities.QUANTITIES`.
        definition: mean of what over what, over which rows, per rank or over all, in one sentence.
        source: upstream file and function.
        since: first release that logs it so; empty: the oldest that was read.
        until: first release that does not any more; empty: it is still logged.
        factor: 0.01 for percent, -1 for the opposite sign.
        offset: 1 for the share of all others.
        lower_bound: the quantity may be larger than the metric, which does not count all of it.
        zero_when_off: a log of nothing but zeros says that it was not computed, not that it is 0.
        before_update: the value of the first step is of the model that the training starts from.
    """

    pattern: str
    quantity: str
    definition: str
    source: str
    since: str = ""
    until: str = ""
    factor: float = 1.0
    offset: float = 0.0
    lower_bound: bool = False
    zero_when_off: bool = False
    before_update: bool = False

    @cached_property
    def spellings(self) -> tuple[tuple[str, str, str], ...]:
        """Text before the star, the star, and text after it, with what stands in brackets and without."""
        patterns = re.sub(r"[][]", "", self.pattern), re.sub(r"\[[^]]*\]", "", self.pattern)
        return tuple(spelling.partition("*") for spelling in dict.fromkeys(patterns))

    def matches(self, name: str) -> bool:
        """Tell whether a logged name is this metric's.

        >>> MetricName("rewards/*/mean", "reward", "", "").matches("rewards/format/mean")
        True
        """
        return any(
            name.startswith(head)
            and name.endswith(tail)
            and len(name) > len(head) + len(tail)
            and (tail != "" or "/" not in name[len(head) :])
            if star
            else name == head
            for head, star, tail in self.spellings
        )

    def canonical(self, logged: float) -> float:
        """Return the value of the quantity, in its unit."""
        return self.offset + self.factor * logged

    def logged_at(self, release: str) -> bool:
        """Tell whether a release logs it so.

        >>> MetricName("entropy", "entropy", "", "", since="0.20").logged_at("1.9.0.dev0")
        True
        """
        at = ordered(release)
        return ordered(self.since) <= at and (not self.until or at < ordered(self.until))

    def releases(self) -> str:
        """Say which releases log it so."""
        first, end = f"from {self.since}" if self.since else "", f"before {self.until}" if self.until else ""
        return ", ".join(filter(None, (first, end))) or "all"


@cache
def ordered(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a release, which are in the order of releases; none for an empty one."""
    match = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", release)
    numbers = [int(part) for part in match[1].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
