"""Rules, trainers and importers of other installed packages, by their entry points."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rolloutdoctor.results.errors import UsageError

_WORD = re.compile(r"[A-Za-z0-9][\w.-]{0,60}", re.ASCII)


@contextmanager
def _explained(which: str) -> Iterator[None]:
    """Turn whatever the code of another package raises into a sentence, an exit of the process as well.

    Ctrl-C is the user's, and what this package raises for a signal is no fault of the other one.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if type(error).__module__.startswith("rolloutdoctor."):
            raise
        raise UsageError(f"{which}, which cannot be loaded ({_shown(error)}); update or uninstall it") from error


def _shown(value: object) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def own(references: Iterable[str]) -> list[Any]:
    """Load what this package offers: each reference is ``module:object`` below `rolloutdoctor` (`packs`)."""
    named = (reference.partition(":") for reference in references)
    return [getattr(import_module(f"rolloutdoctor.{module}"), name) for module, _, name in named]


_PACKAGES: dict[str, str] = {}


def offers_of(module: str) -> str | None:
    """Say what the package of a module offers; None if it offers nothing."""
    return _PACKAGES.get(module.partition(".")[0])


@cache
def _every_entry_point() -> Any:  # noqa: ANN401  # of a class that depends on the version of Python
    """Read once: each look goes through every installed package."""
    return entry_points()


def offered(group: str, needs: Iterable[str], taken: Iterable[str], key: str) -> tuple[Any, ...]:
    """Load what other packages offer, sorted by name.

    Args:
        group: of entry points, each of which names an instance as the tables of this package hold them.
        needs: attributes that each of them must have.
        taken: names that are taken already.
        key: the attribute that names one.

    Raises:
        UsageError: if an entry point cannot be loaded, is something else, or takes a name that is taken.
    """
    names, accepted = set(taken), []
    for point in sorted(_every_entry_point().select(group=group), key=lambda point: (point.name, point.value)):
        which = f"{point.dist.name if point.dist else 'a package'} offers {point.value} as {group}"
        with _explained(which):
            loaded = point.load()
            _PACKAGES[point.value.partition(":")[0].partition(".")[0]] = which
            lacking = [name for name in needs if isinstance(loaded, type) or not hasattr(loaded, name)]
            words = {name: getattr(loaded, name) for name in (key, "name") if name == key or hasattr(loaded, name)}
        if lacking:
            raise UsageError(f"{which}, which is no instance with {', '.join(lacking)}; update or uninstall it")
        for attribute, word in words.items():
            if not isinstance(word, str) or not _WORD.fullmatch(word):
                raise UsageError(
                    f"{which}, but its {attribute} is {_shown(word)} where letters, digits, '-', '_' and '.' were "
                    "expected; update or uninstall it"
                )
        empty = [name for name in needs if name not in words and not callable(getattr(loaded, name))]
        if empty:
            raise UsageError(f"{which}, of which {', '.join(empty)} cannot be called; update or uninstall it")
        name = words[key]
        if name in names:
            raise UsageError(f"{which}, but {key} {name} is taken; rename it, or uninstall one")
        names.add(name)
        accepted.append(loaded)
    return tuple(accepted)
