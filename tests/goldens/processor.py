"""Whose processor made stored results: in float32 a library orders its additions by it, and the last digits go with it.

`processors.json` names it for each file, as `/proc/cpuinfo` does; null where it was made before that was noted.
"""

import json
import platform
import re
from pathlib import Path

HERE = Path(__file__).parent
NOTED = HERE / "processors.json"


def maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the maker of this machine's processor, else its architecture."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def note(stored: str | Path, noted: Path = NOTED) -> None:
    """Write down that a file of results was made on this machine."""
    name = Path(stored).resolve().relative_to(noted.resolve().parent).as_posix()
    makers = json.loads(noted.read_text()) | {name: maker()}
    noted.write_text(json.dumps(dict(sorted(makers.items())), indent=1) + "\n")
