"""Every importer, in the order in which they are asked whether a dump is theirs."""

from pathlib import Path

from rolloutdoctor import packs
from rolloutdoctor.importers.base import Importer
from rolloutdoctor.importers.mapped import MappedTable
from rolloutdoctor.importers.responses import ResponseList
from rolloutdoctor.plugins import offered, own
from rolloutdoctor.results.errors import UsageError, nearest

IMPORTERS: tuple[Importer, ...] = tuple(importer() for importer in own(packs.DUMPS))

_NAMES = [*(importer.name for importer in IMPORTERS), ResponseList.name, MappedTable.name]

# These take what nobody else knows.
IMPORTERS += (
    *offered("rolloutdoctor.importers", ("name", "detect", "read"), _NAMES, "name"),
    MappedTable(),
    ResponseList(),
)


def find(name: str) -> Importer:
    """Return an importer by name.

    Raises:
        UsageError: if there is none.
    """
    for importer in IMPORTERS:
        if importer.name == name:
            return importer
    names = [importer.name for importer in IMPORTERS]
    raise UsageError(f"--from {name}: no such importer{nearest(name, names)} (known: {', '.join(names)})")


def detect(path: Path) -> tuple[Importer, str] | None:
    """Return the importer of a dump and why it is; None if no importer knows it."""
    for importer in IMPORTERS:
        why = importer.detect(path)
        if why is not None:
            return importer, why
    return None
