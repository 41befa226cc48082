"""Rules, trainers and importers of other installed packages, by their entry points."""

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from rolloutdoctor.results.errors import UsageError


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
    names, found = set(taken), []
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        which = f"{point.dist.name if point.dist else 'a package'} offers {point.value} as {group}"
        try:
            loaded = point.load()
        except Exception as error:
            raise UsageError(f"{which}, which cannot be loaded ({error!r}); update or uninstall it") from error
        lacking = [name for name in needs if isinstance(loaded, type) or not hasattr(loaded, name)]
        if lacking:
            raise UsageError(f"{which}, which is no instance with {', '.join(lacking)}; update or uninstall it")
        name = getattr(loaded, key)
        if name in names:
            raise UsageError(f"{which}, but {key} {name} is taken; rename it, or uninstall one")
        names.add(name)
        found.append(loaded)
    return tuple(found)
