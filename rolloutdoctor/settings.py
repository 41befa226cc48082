"""Settings from files: the nearest `rolloutdoctor.toml`, or `[tool.rolloutdoctor]` in the nearest `pyproject.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolloutdoctor.errors import UsageError, nearest

KEYS = (
    "trainer",
    "trainer-config",
    "set",
    "device",
    "dtype",
    "kernel",
    "format",
    "select",
    "ignore",
    "fail-on",
    "exit-zero",
    "steps",
    "split",
    "color",
    "quiet",
    "workers",
)


@dataclass(frozen=True)
class FileSettings:
    """Settings from a file.

    Attributes:
        path: name of the file, or None if there is none.
        values: option of the command line, without dashes, to its value.
        trainer_options: the table `set`.
    """

    path: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)
    trainer_options: Mapping[str, object] = field(default_factory=dict)


def find_settings(start: Path) -> FileSettings:
    """Read the nearest settings file at or above `start`; the first directory that has one decides.

    Raises:
        UsageError: if the file is not TOML, or has a key that is not an option.
    """
    for folder in [start, *start.parents]:
        own, project = folder / "rolloutdoctor.toml", folder / "pyproject.toml"
        if own.is_file():
            return _settings(own.name, _read(own))
        if project.is_file():
            tool = _read(project).get("tool")
            table = tool.get("rolloutdoctor") if isinstance(tool, dict) else None
            if isinstance(table, dict):
                return _settings(f"{project.name} [tool.rolloutdoctor]", table)
    return FileSettings()


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path.name}: {error}; mend the file or run from another directory") from None


def _settings(name: str, table: Mapping[str, object]) -> FileSettings:
    for key in table:
        if key not in KEYS:
            raise UsageError(f"{name}: no setting {key!r}{nearest(key, KEYS)} (known: {', '.join(KEYS)})")
    options = table.get("set", {})
    if not isinstance(options, dict):
        raise UsageError(f"{name}: set is a table of the trainer's options, such as [set] beta = 0.04")
    return FileSettings(name, {key: value for key, value in table.items() if key != "set"}, _flat(options, ""))


def _flat(table: Mapping[str, object], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
