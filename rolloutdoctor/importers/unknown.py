"""Files that are neither a run file nor a dump nor a log: described in words, with the formats that are known."""

import csv
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rolloutdoctor.importers.logs.printed import pairs
from rolloutdoctor.importers.logs.rows import STEPS
from rolloutdoctor.importers.mapped import advice
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.text_lines import TRACEBACK, beginning, ending
from rolloutdoctor.importers.single_responses import described

KNOWN = (
    "known are run files (Parquet), dumps of trainers (`--from ?` lists them), and logs: trainer_state.json, CSV or "
    "JSON Lines with a step, what a trainer printed, the table of a notebook, TensorBoard events, folders and charts "
    "of wandb, trackio projects"
)

OTHERS = (
    (
        {"task_key", "mode", "valid", "reason"},
        "results.jsonl of verifiers' validation, which tries tasks and has no rollouts: give the traces.jsonl of an "
        "evaluation",
    ),
    (
        {"prompt", "completion", "gen_step"},
        "completions.jsonl of ms-swift on Ray, which says no groups: give its logging.jsonl, and record the rollouts "
        "with rolloutdoctor.recorders.own_loop",
    ),
)
"""Keys of a line, and in words what programs write with them that nothing here reads."""


_PACKED = {
    b"\x1f\x8b": "gzip: unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it with unzstd",
    b"\xfd7zXZ": "xz: unpack it with unxz",
    b"BZh": "bzip2: unpack it with bunzip2",
}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")

_LONGEST_NAME = 60
"""Characters of a column's name; what is longer is a sentence with commas."""

_TIME = re.compile(r"\W{0,2}[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:")
"""How the lines of a logger begin, with a comma before the milliseconds."""

_LOOKED_AT = 8
"""Files of a folder."""


def _of_another(path: Path) -> str | None:
    """Say what a program wrote that nothing here reads; None if it is none of these."""
    first = lines.first_object(path) or {}
    return next((words for keys, words in OTHERS if keys <= first.keys()), None)


def _lacks(path: Path) -> str:
    """Say what of a log was looked for in a text, and which number that no step counts comes nearest to it."""
    times = Counter(label.strip() for line in beginning(path) for label, _ in pairs(line) if _MEASURED.search(label))
    again = [label for label, count in times.most_common() if count >= _FEWEST]
    lacks = "no line has a step and two numbers of it, as `step 3 | loss 0.5 | reward 0.2` has"
    if not again:
        return lacks
    label = min(again, key=lambda text: _OF_SEVERAL.search(text) is None)
    return f"{lacks}; {label!r} has a number in {times[label]:,} lines, and no step: print it on the same line"


_MEASURED = re.compile(
    r"(?i)(?<![a-z])(?:reward|score|loss|kl|entropy|accurac(?:y|ies)|correct|solved|passed)(?![a-z])"
)
_OF_SEVERAL = re.compile(r"(?i)percent|mean|average|avg|rate|accurac|ratio")
"""Words of what is of several responses, and so of a step."""
_FEWEST = 2
"""Lines with a number that is measured again and again."""


_ERROR = re.compile(
    r"(?:[(\[][^()\[\]]{1,80}[)\]] ?){0,2}((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit))"
    r"(?:: (.{1,200}).*)?\s*"
)
"""The last line of a traceback, behind the name of a process."""
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "RayTaskError", "SystemExit")
"""Errors that say that a process of the training had one."""


def _last_error(path: Path) -> str:
    """Return the last error that a text shows, with the first line of its message; empty if it shows none."""
    last = ending(path)
    first = next((at for at, line in enumerate(last) if TRACEBACK in line), len(last))
    matches = [match for line in last[first:] if (match := _ERROR.fullmatch(line)) is not None]
    errors = [match for match in matches if not match[1].endswith(_OF_LAUNCHERS)] or matches
    return ": ".join(filter(None, errors[-1].groups())).strip() if errors else ""


def _of_text(path: Path, begins: str, error: str, also: Callable[[Path], str]) -> str:
    has = "; ".join(filter(None, (_lacks(path), also(path))))
    if error:
        return f"{has}; the last error is {error!r}: give the log of a run that got further"
    return f"text that begins {begins[:60]!r}: {has}; {KNOWN}"


def not_understood(path: Path, also: Callable[[Path], str] = lambda path: "") -> str | None:
    """Say in a sentence what a text file holds that nothing here reads; None if it is no text.

    Args:
        path: the file, or a folder.
        also: says what else than numbers a text holds.
    """
    if path.is_dir():
        inside = sorted(path.glob("*.jsonl"))[:_LOOKED_AT]
        return next((f"{entry.name} there is {words}" for entry in inside if (words := _of_another(entry))), None)
    if not path.is_file():
        return None
    if (responses := described(path)) is not None:
        return responses
    first = lines.first_object(path)
    if first is not None:
        return _of_another(path) or f"JSON Lines, but no rollouts that are known; {advice(first)}"
    try:
        with path.open("rb") as file:
            start = file.read(2**16)
        how = next((how for magic, how in _PACKED.items() if start.startswith(magic)), None)
        if how is not None:
            return f"packed with {how}, then give what comes out"
        if start.startswith(_UTF_16):
            return "text in UTF-16, as PowerShell writes: convert it with iconv -f utf-16 -t utf-8"
        if start.startswith(b"SQLite format 3\0"):
            return f"an SQLite file, but no trackio project that can be read; {KNOWN}"
        line = next((each for each in start.decode("utf-8-sig").splitlines() if each.strip()), "")
    except (OSError, UnicodeDecodeError):
        # A character that was cut in two is no text either, but seldom.
        return None
    if not line.strip() or start.startswith(b"PAR1"):
        return None
    if line.lstrip().startswith(("[", "{")) and path.suffix in (".json", ".jsonl"):
        return f"JSON that is neither an object on each line nor a trainer_state.json; {KNOWN}"
    names = [name.strip() for name in next(csv.reader([line]), [])]
    is_text = len(names) < 2 or not all(names) or max(map(len, names)) > _LONGEST_NAME or _TIME.match(line)
    if (error := _last_error(path)) or is_text:
        return _of_text(path, line.strip(), error, also)
    have = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    content = "rollouts, which are read from Parquet or JSON Lines" if set(names) & {*STEPS} else "no step"
    return f"a CSV with the columns {have}: {content}; {KNOWN}"


def only_file(folder: Path, also: Callable[[Path], str]) -> str | None:
    """Say what the only file of a folder holds that nothing here reads; None if there are more, or it is no text."""
    inside = [path for path in folder.glob("[!.]*") if path.is_file()]
    why = not_understood(inside[0], also) if len(inside) == 1 else None
    return why and f"{inside[0].name} there: {why}"
