"""Every dialect."""

from collections.abc import Collection

from rolloutdoctor.trainers.dialects import axolotl, easyr1
from rolloutdoctor.trainers.dialects.spec import Dialect

DIALECTS: tuple[Dialect, ...] = (axolotl.DIALECT, easyr1.DIALECT)


def dialect_of(keys: Collection[str]) -> Dialect | None:
    """Return the dialect of a configuration, by its keys; None if it is none."""
    return next((dialect for dialect in DIALECTS if dialect.marks <= set(keys)), None)


def dialect_of_class(name: str) -> Dialect | None:
    """Return the dialect that a class of options is of, by its full name."""
    return next((dialect for dialect in DIALECTS if dialect.package and name.startswith(f"{dialect.package}.")), None)
