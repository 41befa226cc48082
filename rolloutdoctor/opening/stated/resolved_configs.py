"""`configs/` in an output folder: what prime-rl resolved its options to, a JSON file for each of its programs."""

import json
from pathlib import Path

from rolloutdoctor.io.locations.small_files import flat, once, read_small
from rolloutdoctor.opening.stated.options import Stated
from rolloutdoctor.results.errors import InputError

_PROGRAMS = ("trainer", "orchestrator")
_INSIDE = ("rollouts", "token_exports")
"""Folders of an output folder that may be given instead of it."""


def read_resolved_configs(folder: Path) -> Stated | None:
    """Read the options of an output folder; None if it has no such files.

    ``write_subconfigs`` (src/prime_rl/entrypoints/rl.py) writes a file for each program, without its name in the keys.

    Raises:
        InputError: if a file is not JSON.
    """
    if folder.name in _INSIDE:
        folder = folder.absolute().parent
    values: dict[str, object] = {}
    file_names = []
    for program in _PROGRAMS:
        file = folder / "configs" / f"{program}.json"
        if not file.is_file():
            continue
        name = f"configs/{file.name}"
        try:
            body = json.loads(read_small(file, name=name, expected="", error=InputError), object_pairs_hook=once)
        except (ValueError, RecursionError):
            raise InputError(f"{name}: not JSON; its options are not used") from None
        if isinstance(body, dict):
            values |= flat({program: body}, name)
            file_names.append(name)
    has_loss = any(name.startswith("trainer.loss.") for name in values)
    return Stated(" and ".join(file_names), "prime-rl", values) if has_loss else None
