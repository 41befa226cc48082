"""rolloutdoctor: recompute what an RL post-training step computed, with and without the known faults.

`open` a run, then `check`, `diff`, `identify`, `plot` or `recompute` it, or `evaluate` one batch under one objective.
Nothing heavy is imported before one of these is used.
"""

# Not from `typing`, which takes longer to import than the command line needs to be ready for signals.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from rolloutdoctor.api import batches, check, diff, identify, objective_of, open, plot, recompute
    from rolloutdoctor.evaluation.evaluate import evaluate
    from rolloutdoctor.results.version import __version__

__all__ = [
    "__version__",
    "batches",
    "check",
    "diff",
    "evaluate",
    "identify",
    "objective_of",
    "open",
    "plot",
    "recompute",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        return getattr(import_module("rolloutdoctor.results.version"), name)
    if name == "evaluate":
        return getattr(import_module("rolloutdoctor.evaluation.evaluate"), name)
    if name in __all__:
        return getattr(import_module("rolloutdoctor.api"), name)
    raise AttributeError(f"module 'rolloutdoctor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
