"""Columns of a run file."""

from collections.abc import Mapping

from rolloutdoctor.commands.explain.layout import hanging, titled


def lines() -> Mapping[str, str]:
    """Return name to meaning."""
    from rolloutdoctor.data.schema import COLUMNS

    return {column.name: column.meaning for column in COLUMNS}


def is_known(name: str) -> bool:
    """Tell whether a column has this name."""
    return name in lines()


def listing(*, verbose: bool = False) -> str:
    """List the columns with their types."""
    listed = [hanging(f"{name:<19} ", f"{body(name)['type']}: {meaning}", 20) for name, meaning in lines().items()]
    return "\n".join(listed)


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a column."""
    from rolloutdoctor.data.schema import BY_NAME

    column = BY_NAME[name]
    lines = [f"{name} (column of a run file)", "", titled("Type", column.kind.value), titled("Holds", column.meaning)]
    return "\n".join([*lines, *([titled("Read as", ", ".join(column.aliases))] if column.aliases else [])])


def body(name: str) -> dict[str, object]:
    """Return a column for programs."""
    from rolloutdoctor.data.schema import BY_NAME

    column = BY_NAME[name]
    return {
        "name": name,
        "type": column.kind.value,
        "meaning": column.meaning,
        "aliases": list(column.aliases),
    }


def bodies() -> list[dict[str, object]]:
    """Return every column for programs."""
    return [body(name) for name in lines()]
