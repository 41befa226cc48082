"""Lines that begin with the number of their step: a dict behind it, or verl's ``- name:number`` pairs."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.dict_forms import joined_dicts
from rolloutdoctor.importers.logs.printed import LONGEST_LINE, Form, Printed, dict_in, values_of

_EVALUATIONS = frozenset({"eval", "passrate"})

_PARTS = 1_000
"""Lines of a line of verl, which people print with a metric on each."""

_VERL_STEP = re.compile(r"(?:^|\s)step:[0-9]{1,18}(?: -.*)?\s*$")
_VERL_END = re.compile(r"[\w./@-]{0,200}:-?[0-9][0-9.e+-]{0,30}\s*")
_VERL_MORE = re.compile(r"(?:^|\s)- [\w./@-]{1,200}:(?:np\.\w{1,20}\()?-?(?:[0-9]|nan|inf|$)")
_NUMPY = re.compile(r"(?:np|numpy)\.\w{1,20}\((.*)\)")


@dataclass(frozen=True, eq=False)
class StepLine(Form):
    """A line a step, with names that have a slash.

    Attributes:
        title: what a text of this form is, in words.
        numbering: what is counted, and the step.
        mark: text of every line of this form.
        prefix: of the names, which the trackers of the trainer have and the console has not.
        row: returns the numbers behind the step as they are written.
        joined: puts lines together that are broken over several.
    """

    title: str
    numbering: re.Pattern[str]
    mark: str
    prefix: str = ""
    row: Callable[[str], dict[str, str] | None] = dict_in
    joined: Callable[[Iterable[str]], Iterator[str]] = joined_dicts

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the lines with a step."""
        for line in self.joined(lines):
            match = self.numbering.search(line) if self.mark in line else None
            row = None if match is None else self.row(line[match.end() :])
            values = {f"{self.prefix}{name}": value for name, value in values_of(row or {}).items()}
            if match is not None and any("/" in name for name in values):
                yield Printed(values, int(match[2]), EVAL if match[1] in _EVALUATIONS else TRAIN, counter=match[1])


def _verl_row(text: str) -> dict[str, str]:
    parts = [part.rpartition(":") for part in text.split(" - ")]
    return {name.strip(): _NUMPY.sub(r"\1", value.strip()) for name, _, value in parts if name}


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


# ``concat_dict_to_str`` (verl/utils/logger/aggregate_logger.py); Ray puts the name of the process before it.
VERL = StepLine(
    "the console log of verl",
    re.compile(r"(?:^|\s)(step):([0-9]{1,18}) +- (?=\S)"),
    mark="step:",
    row=_verl_row,
    joined=_unbroken,
)
# ``train`` (slime/backends/megatron_utils/model.py) and slime/observability/*_metrics.py.
SLIME = StepLine(
    "the console log of slime",
    # OpenRLHF says "Global step".
    re.compile(r"(?<!Global )(?<![^\s\]])(step|rollout|perf|eval|passrate|multi_turn) ([0-9]{1,18}): (?=\{)"),
    mark=": {",
)
# ``fit`` (openrlhf/trainer/ppo_trainer.py, ppo_trainer_async.py).
OPENRLHF = StepLine(
    "the console log of OpenRLHF",
    re.compile(r"(Global step) ([0-9]{1,18}): (?=\{')"),
    mark="Global step ",
    prefix="train/",
)
