"""Lines of names and numbers: verl's, and those of loops of one's own."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rolloutdoctor.importers.logs.bar_form import BAR
from rolloutdoctor.importers.logs.counters import of_one_counter, through_epochs
from rolloutdoctor.importers.logs.printed import (
    COUNTERS,
    FEWEST_NUMBERS,
    LONGEST_LINE,
    Printed,
    counted,
    is_log_line,
    name_of,
    number,
    pairs,
    values_of,
)
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities

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


class Pairs:
    """Lines of names with numbers and a counter: loops of one's own, Megatron's ``iteration 2/ 624 | loss: ... |``.

    ``training_log`` (megatron/training/training.py) prints the second. A line that is a name and a number alone belongs
    to the step before.
    """

    title = "lines of names and numbers"
    remarks = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps; what has a counter, and no metric that many of them have, is the text of a response."""
        means: list[Printed] = []
        found = of_one_counter([*self._steps(_with_means(lines, means))]) or means
        times = Counter(name for record in found for name in record.values if is_metric(name))
        most = max(times.values(), default=0)
        yield from through_epochs(
            [record for record in found if any(_OF_MANY * times[name] >= most for name in record.values)]
        )

    def _steps(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield a record for each line with a counter, with what the lines behind it add."""
        record: Printed | None = None
        below = Counter[str]()
        ends_in_bar = False
        for line in lines:
            line = BAR.sub(" ", line) if "%|" in line else line
            step = counted(line) if "=" in line or ":" in line or "|" in line or " " in line else None
            rows = [(label, value) for label, value in pairs(line) if not _is_counter(label, value, step)]
            if ends_in_bar and "|" in line and not line.rstrip().endswith("|"):
                # The last number of a line that was cut may have lost its end.
                rows = rows[:-1]
            values: dict[str, float | None] = {
                name: value
                for label, text in rows
                if (name := name_of(label)) not in COUNTERS or name == "epoch"
                if (value := number(text)) is not None
            }
            metrics = {name: value for name, value in values.items() if name != "epoch"}
            is_log, is_whole = is_log_line(metrics), len(values) >= FEWEST_NUMBERS - 1 and is_log_line(metrics)
            if step is not None and (is_whole or len(rows) <= 1 or len(values) <= 1):
                if record is not None and _logs(record):
                    yield record
                ends_in_bar = line.rstrip().endswith("|")
                # A step alone, or with one metric, is the head of a block; of a step alone responses speak, too.
                counter = step[2] if is_log else f"{step[2]} alone"
                record = Printed(values if is_log else {}, step[0], counter=counter, total_steps=step[1])
                below.clear()
            elif record is not None and step is None and is_log:
                # A line of several may be of a response, but for one with a loss, right below the step of its update,
                # and one of means: ``average reward score: 0.5 | EMA reward score: 0.4``, as DeepSpeed-Chat prints it.
                of_update = not record.values and any("loss" in name for name in metrics)
                of_means = any(name.startswith(_MEANS) for name in metrics)
                # The parts of a reward and their total are of an episode of one response.
                of_episode = (
                    all("reward" in name for name in metrics) and "reward" in metric_quantities(metrics).values()
                )
                if len(rows) == 1 or of_update or of_means or of_episode:
                    _add(record.values, metrics, below)
        if record is not None and _logs(record):
            yield record


def _is_counter(label: str, value: str, step: tuple[int, int | None, str] | None) -> bool:
    """Tell the step of a line with a word before it, as ``rollout batch 3``, from its metrics."""
    first, _, last = name_of(label).rpartition("_")
    return step is not None and bool(first) and last in COUNTERS and value == str(step[0])


def _add(values: dict[str, float | None], more: Mapping[str, float | None], below: Counter[str]) -> None:
    """Add to the values of a step those of a line below it.

    What the line of the step says is not said again by that of a response below it, and rewards that lines below it say
    again and again are those of responses.

    Args:
        values: of the step.
        more: of the line.
        below: how often each name stood in a line below the step; counted on.
    """
    said = {name for name in (*values, *metric_quantities(values).values()) if not below[name]}
    for name, quantity in [(name, metric_quantities(more).get(name)) for name in more]:
        if name in said or quantity in said:
            continue
        below[name] += 1
        if below[name] == 1:
            values[name] = more[name]
        elif quantity == "reward":
            values.pop(name, None)


_MEANS = ("mean_", "avg_", "average_")

_OF_MANY = 10
"""A metric is of the log if it is in a tenth as many steps as the most common one: an evaluation is rarer than that."""


def _logs(record: Printed) -> bool:
    """Tell the numbers of a step: two, or a reward alone."""
    is_enough = len(record.values) >= FEWEST_NUMBERS - 1 or "reward" in metric_quantities(record.values).values()
    return is_enough and is_log_line(record.values)


def _with_means(lines: Iterable[str], means: list[Printed]) -> Iterator[str]:
    """Yield lines, and keep the mean rewards in them, which are of steps though nothing counts them."""
    for line in lines:
        if "reward" in line and any(word in line for word in ("mean", "avg", "average")):
            values: dict[str, float | None] = {name_of(label): number(text) for label, text in pairs(line)}
            known = metric_quantities(values)
            if any(known.get(name) == "reward" and _OF_MEANS.search(name) for name in values):
                means.append(Printed({name: value for name, value in values.items() if name in known}))
        yield line


_OF_MEANS = re.compile(r"mean|avg|average")
