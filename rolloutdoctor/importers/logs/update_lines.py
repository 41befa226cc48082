"""Lines of updates that nothing counts."""

from collections.abc import Iterable, Iterator

from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import Printed, is_update, name_of, pairs


class Updates:
    """Lines with a loss and two more metrics: no response has them, so that each is of a step."""

    title = "lines of names and numbers"
    remarks = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield a step for each line."""
        for line in lines:
            if "loss" in line.lower():
                values: dict[str, float | None] = {name_of(label): number(text) for label, text in pairs(line)}
                if is_update(values):
                    yield Printed(values)
