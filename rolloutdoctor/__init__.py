"""rolloutdoctor: recompute what an RL post-training step computed, with and without the known faults.

`open` a run, then `check`, `compare`, `diff`, `identify`, `measure`, `plot`, `recompute`, `report` it, ask `info` what
can be checked or `why` it changed, or `evaluate` one batch under one objective. Nothing heavy is imported before one of
these is used.
"""

# Not from `typing`, which takes longer to import than the command line needs to be ready for signals.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from rolloutdoctor.api import (
        batches,
        check,
        compare,
        diff,
        identify,
        info,
        measure,
        objective_of,
        open,
        plot,
        recompute,
        report,
        why,
    )
    from rolloutdoctor.evaluation.evaluate import evaluate
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.results.comparison import Comparison, Recomputed
    from rolloutdoctor.results.errors import DeviceError, InputError, RolloutDoctorError, UsageError
    from rolloutdoctor.results.findings import Finding, Report
    from rolloutdoctor.results.identification import Identification
    from rolloutdoctor.results.ledger import Why
    from rolloutdoctor.results.run_comparison import RunComparison
    from rolloutdoctor.results.run_info import RunInfo
    from rolloutdoctor.results.version import __version__

__all__ = [
    "Comparison",
    "DeviceError",
    "Finding",
    "Identification",
    "InputError",
    "Recomputed",
    "Report",
    "RolloutDoctorError",
    "Run",
    "RunComparison",
    "RunInfo",
    "UsageError",
    "Why",
    "__version__",
    "batches",
    "check",
    "compare",
    "diff",
    "evaluate",
    "identify",
    "info",
    "measure",
    "objective_of",
    "open",
    "plot",
    "recompute",
    "report",
    "why",
]

_ELSEWHERE = {
    "Comparison": "rolloutdoctor.results.comparison",
    "DeviceError": "rolloutdoctor.results.errors",
    "Finding": "rolloutdoctor.results.findings",
    "Identification": "rolloutdoctor.results.identification",
    "InputError": "rolloutdoctor.results.errors",
    "Recomputed": "rolloutdoctor.results.comparison",
    "Report": "rolloutdoctor.results.findings",
    "RolloutDoctorError": "rolloutdoctor.results.errors",
    "Run": "rolloutdoctor.io.run",
    "RunComparison": "rolloutdoctor.results.run_comparison",
    "RunInfo": "rolloutdoctor.results.run_info",
    "UsageError": "rolloutdoctor.results.errors",
    "Why": "rolloutdoctor.results.ledger",
    "__version__": "rolloutdoctor.results.version",
    "evaluate": "rolloutdoctor.evaluation.evaluate",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "rolloutdoctor.api")), name)
    raise AttributeError(f"module 'rolloutdoctor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
