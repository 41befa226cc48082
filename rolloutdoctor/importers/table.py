"""Every importer, in the order in which they are asked whether a dump is theirs."""

from pathlib import Path

from rolloutdoctor.importers.areal import Areal
from rolloutdoctor.importers.base import Importer
from rolloutdoctor.importers.journal import RecordingJournal
from rolloutdoctor.importers.mapped import MappedTable
from rolloutdoctor.importers.miles import MilesDump
from rolloutdoctor.importers.ms_swift import MsSwiftCompletions
from rolloutdoctor.importers.nemo_rl import NemoRl
from rolloutdoctor.importers.open_instruct import OpenInstruct
from rolloutdoctor.importers.prime_rl_tokens import PrimeRlTokens
from rolloutdoctor.importers.prime_rl_traces import PrimeRlTraces
from rolloutdoctor.importers.rllm import Rllm
from rolloutdoctor.importers.skyrl import SkyRlDump
from rolloutdoctor.importers.slime import SlimeDump
from rolloutdoctor.importers.tinker_cookbook import TinkerCookbook
from rolloutdoctor.importers.trl import TrlCompletions
from rolloutdoctor.importers.verifiers import Verifiers
from rolloutdoctor.importers.verifiers_traces import VerifiersTraces
from rolloutdoctor.importers.verl import VerlRollouts
from rolloutdoctor.plugins import offered
from rolloutdoctor.results.errors import UsageError, nearest

IMPORTERS: tuple[Importer, ...] = (
    RecordingJournal(),
    TrlCompletions(),
    VerlRollouts(),
    MilesDump(),
    SlimeDump(),
    MsSwiftCompletions(),
    SkyRlDump(),
    NemoRl(),
    PrimeRlTokens(),
    VerifiersTraces(),
    PrimeRlTraces(),
    OpenInstruct(),
    TinkerCookbook(),
    Rllm(),
    Areal(),
    Verifiers(),
)

_NAMES = [*(importer.name for importer in IMPORTERS), MappedTable.name]

# The mapped table takes what nobody else knows.
IMPORTERS += (*offered("rolloutdoctor.importers", ("name", "detect", "read"), _NAMES, "name"), MappedTable())


def find(name: str) -> Importer:
    """Return an importer by name.

    Raises:
        UsageError: if there is none.
    """
    for importer in IMPORTERS:
        if importer.name == name:
            return importer
    known = [importer.name for importer in IMPORTERS]
    raise UsageError(f"--from {name}: no such importer{nearest(name, known)} (known: {', '.join(known)})")


def detect(path: Path) -> tuple[Importer, str] | None:
    """Return the importer of a dump and why it is; None if no importer knows it."""
    for importer in IMPORTERS:
        why = importer.detect(path)
        if why is not None:
            return importer, why
    return None
