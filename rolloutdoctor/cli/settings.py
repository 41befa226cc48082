"""Settings from files: the nearest `rolloutdoctor.toml`, or `[tool.rolloutdoctor]` in the nearest `pyproject.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolloutdoctor.io.locations.small_files import flat, read_small
from rolloutdoctor.results.errors import UsageError, nearest

KEYS = (
    "trainer",
    "trainer-config",
    "set",
    "device",
    "dtype",
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
        source: the file, or None.
    """

    path: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)
    trainer_options: Mapping[str, object] = field(default_factory=dict)
    source: Path | None = None


def find_settings(start: Path | None = None) -> FileSettings:
    """Read the nearest settings file at or above `start`; the first directory that has one decides.

    Args:
        start: a directory; None: the working directory.

    Raises:
        UsageError: if the file is not TOML, or has a key that is not an option.
    """
    try:
        start = start or Path.cwd()
    except OSError as error:
        # Libraries that are imported next end the process without a message that a user could act on.
        raise UsageError(f"the working directory is gone ({error.strerror}); change to another one") from None
    for folder in [start, *start.parents]:
        settings_file, project = folder / "rolloutdoctor.toml", folder / "pyproject.toml"
        if settings_file.is_file():
            return _settings(settings_file.name, settings_file, _read(settings_file))
        if project.is_file():
            tool = _read(project).get("tool")
            table = tool.get("rolloutdoctor") if isinstance(tool, dict) else None
            if isinstance(table, dict):
                return _settings(f"{project.name} [tool.rolloutdoctor]", project, table)
    return FileSettings()


def _read(path: Path) -> dict[str, object]:
    what_to_do = "fix the file or run from another directory"
    try:
        return tomllib.loads(read_small(path, name=path.name, expected=what_to_do))
    except RecursionError:
        raise UsageError(f"{path.name}: nested too deeply; {what_to_do}") from None
    except ValueError as error:
        raise UsageError(f"{path.name}: {error}; {what_to_do}") from None


def _settings(name: str, source: Path, table: Mapping[str, object]) -> FileSettings:
    for key in table:
        if key not in KEYS:
            raise UsageError(f"{name}: no setting {key!r}{nearest(key, KEYS)} (known: {', '.join(KEYS)})")
    options = table.get("set", {})
    if not isinstance(options, dict):
        raise UsageError(f"{name}: set is a table of the trainer's options, such as [set] beta = 0.04")
    values = {key: value for key, value in table.items() if key != "set"}
    return FileSettings(name, values, flat(options, name), source)
