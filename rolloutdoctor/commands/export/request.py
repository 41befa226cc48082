"""What every kind of export is asked."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.cli import groups

if TYPE_CHECKING:
    from rolloutdoctor.search.hypotheses.fixes import ChosenFix


@dataclass(frozen=True)
class Asked:
    """A command line of ``export``.

    Attributes:
        paths: as the user gave them.
        output: where to write; None: nothing was said.
        source: who made the run.
        fix: labels of fixes.
        part: what to read of the run, and how to compute.
        quiet: True to say nothing.
        tables: names of the tables to write; none: all, so that they can be judged.
    """

    paths: list[str]
    output: str | None
    source: groups.Source
    fix: list[str]
    part: groups.Computed
    quiet: bool
    tables: frozenset[str]

    def fixes(self) -> "tuple[ChosenFix, ...]":
        """Return the fixes.

        Raises:
            UsageError: if there is no such fix.
        """
        from rolloutdoctor.search.hypotheses.fixes import choose

        return tuple(choose(text) for text in self.fix)
