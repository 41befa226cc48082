"""Results of a check of several runs."""

from dataclasses import dataclass

from rolloutdoctor.results.findings import Report


@dataclass(frozen=True)
class CheckedRun:
    """One of several runs.

    Attributes:
        name: what to call it.
        files: as they were found.
        report: of its check; None if it could not be read or checked.
        error: why not.
    """

    name: str
    files: tuple[str, ...]
    report: Report | None
    error: str = ""
