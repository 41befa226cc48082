"""The console of verl: a line a step, whole or broken."""

import re
from collections.abc import Iterable, Iterator

from rolloutdoctor.importers.logs.printed import LONGEST_LINE, Printed, values_of

_PARTS = 1_000
"""Lines of a line of verl, which people print with a metric on each."""

_VERL = re.compile(r"(?:^|\s)step:([0-9]{1,18}) +- (\S.*)$")
_VERL_STEP = re.compile(r"(?:^|\s)step:[0-9]{1,18}(?: -.*)?\s*$")
_VERL_END = re.compile(r"[\w./@-]{0,200}:-?[0-9][0-9.e+-]{0,30}\s*")
_VERL_MORE = re.compile(r"(?:^|\s)- [\w./@-]{1,200}:(?:np\.\w{1,20}\()?-?(?:[0-9]|nan|inf|$)")
_NUMPY = re.compile(r"(?:np|numpy)\.\w{1,20}\((.*)\)")


class VerlLine:
    """Console of verl: ``step:3 - critic/score/mean:0.036 - ...`` a line.

    ``concat_dict_to_str`` (verl/utils/logger/aggregate_logger.py); Ray puts the name of the process before it.
    """

    title = "the console log of verl"
    remarks = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the lines with a step."""
        for line in _unbroken(lines):
            match = _VERL.search(line) if "step:" in line else None
            if match is None:
                continue
            parts = [part.rpartition(":") for part in match[2].split(" - ")]
            row = {name.strip(): _NUMPY.sub(r"\1", value.strip()) for name, _, value in parts if name}
            values = values_of(row)
            if any("/" in name for name in values):
                yield Printed(values, int(match[1]))


def _unbroken(lines: Iterable[str]) -> Iterator[str]:
    """Put the parts of a line of verl together that a terminal has cut, or that has a metric on each line."""
    held: list[str] = []
    for line in lines:
        if held and len(held) < _PARTS and _is_part(line, held[-1]):
            # A space is lost where the line was cut there.
            held.append(f" {line}" if held[-1].endswith(" -") or line.startswith("- ") else line)
            continue
        if held:
            yield "".join(held)
        held = [line] if _VERL_STEP.search(line) else []
        if not held:
            yield line
    if held:
        yield "".join(held)


def _is_part(line: str, before: str) -> bool:
    if len(line) > LONGEST_LINE or _VERL_STEP.search(line):
        return False
    return bool(_VERL_MORE.search(line) or _VERL_END.fullmatch(line) or before.endswith((" -", ":")))
