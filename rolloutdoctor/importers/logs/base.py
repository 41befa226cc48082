"""Interface of readers of logged numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Cell
from rolloutdoctor.io.locations.paths import Source

Entry = tuple[int, str, Mapping[str, Cell]]
"""Step, split, and value by name."""


_T = TypeVar("_T")


def of_splits(
    values: Mapping[str, _T], evaluations: str, otherwise: str = TRAIN
) -> Iterator[tuple[str, dict[str, _T]]]:
    """Yield values by split, without what their names say of it.

    Args:
        values: by name.
        evaluations: how names of an evaluation begin, ``eval_`` or ``eval/``, beside which others have ``train/``;
            empty: names say nothing.
        otherwise: the split of all other names.

    >>> dict(of_splits({"train/kl": 0.5, "eval/kl": 0.25}, "eval/")), dict(of_splits({"eval_kl": 0.5}, "eval_"))
    ({'train': {'kl': 0.5}, 'eval': {'kl': 0.25}}, {'eval': {'kl': 0.5}})
    """
    splits: dict[str, dict[str, _T]] = {}
    for name, value in values.items():
        split = EVAL if evaluations and name.startswith(evaluations) else otherwise
        own = name.removeprefix(evaluations).removeprefix("train/" if evaluations == "eval/" else "")
        splits.setdefault(split, {})[own] = value
    yield from splits.items()


class LogFormat(Protocol):
    """One way in which programs write logged numbers. The docstring names the upstream function that writes them."""

    def detect(self, path: Path) -> str | None:
        """Say what `path`, a file or a folder, is; None if it is not of this format. Reads little, and not the name."""
        ...

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what was logged, in file order; `notes` takes what was assumed, and the length of the run.

        Raises:
            InputError: if it is not what it looks like.
        """
        ...
