"""The forms in which programs print the numbers of a step: dicts, names and numbers of a line, labels of a block."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import STEPS
from rolloutdoctor.importers.logs.csv_table import OF_ROLLOUTS
from rolloutdoctor.importers.logs.printed import (
    COUNTERS,
    NUMBER,
    Printed,
    counted,
    dict_in,
    is_log_line,
    name_of,
    nulls_of,
    number,
    pairs,
    values_of,
)


class Form(Protocol):
    """One way in which programs print numbers. The docstring names the upstream function."""

    @property
    def title(self) -> str:
        """What a text of this form is, in words."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of its numbers, in sentences."""
        ...

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the lines with numbers, in their order."""
        ...


_PARTS, _LINES, _LONGEST_PART = 1_000, 40, 2**16
"""Lines of a line of verl, which people print with a metric on each; lines of a dict, which terminals cut; characters
of such a part."""

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
    if len(line) > _LONGEST_PART or _VERL_STEP.search(line):
        return False
    return bool(_VERL_MORE.search(line) or _VERL_END.fullmatch(line) or before.endswith((" -", ":")))


_OPENS = re.compile(r"""\{\s*['"]""")
_WITHOUT_BRACE = re.compile(r"""\s*(['"])[\w/.-]+\1: """)


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Put the lines of a dict together that is broken over several."""
    held: list[str] = []
    size = 0
    for line in lines:
        size += len(line)
        if held and ("{" in line or len(held) == _LINES or size > _LONGEST_PART):
            yield from held
            held = []
        if held:
            held.append(line)
            if "}" in line:
                yield "".join(held)
                held = []
            continue
        *_, start = (-1, *(match.start() for match in _OPENS.finditer(line)))
        if start >= 0 and "}" not in line[start:]:
            held, size = [line], len(line)
        else:
            yield line
    yield from held


@dataclass(frozen=True)
class _Numbering:
    """What stands before a dict of numbers, and what is done to its names."""

    marker: str
    pattern: re.Pattern[str]
    prefix: str = ""
    evaluations: frozenset[str] = frozenset()


_NUMBERINGS = {
    "slime": _Numbering(
        ": {",
        re.compile(r"(?:^|\s|])(step|rollout|perf|eval|passrate|multi_turn) ([0-9]{1,18}): (?=\{)"),
        evaluations=frozenset({"eval", "passrate"}),
    ),
    "OpenRLHF": _Numbering("Global step ", re.compile(r"(Global step) ([0-9]{1,18}): (?=\{')"), "train/"),
}
"""``train`` in slime/backends/megatron_utils/model.py and slime/observability/*_metrics.py print the first, ``fit``
(openrlhf/trainer/ppo_trainer.py and ppo_trainer_async.py) the second, under the names of its trackers but for their
prefix."""


@dataclass(frozen=True)
class NumberedDict:
    """A dict behind its number: ``step 3: {...}``."""

    writer: str
    remarks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Whose console it is."""
        return f"the console log of {self.writer}"

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the lines with a number."""
        numbering = _NUMBERINGS[self.writer]
        for line in _joined(lines):
            match = numbering.pattern.search(line) if numbering.marker in line else None
            row = None if match is None else dict_in(line[match.end() :])
            if match is None or not row:
                continue
            values = {f"{numbering.prefix}{name}": value for name, value in values_of(row).items()}
            if any("/" in name for name in values):
                split = EVAL if match[1] in numbering.evaluations else TRAIN
                yield Printed(values, int(match[2]), split, counter=match[1])


_TRAINER = {"loss", "grad_norm", "learning_rate", "reward", "kl"}
_SUMMARY = "train_runtime"


def _dict_of(line: str) -> dict[str, str] | None:
    # Who pastes a line may lose its first character.
    text = "{" + line if "{" not in line and _WITHOUT_BRACE.match(line) else line
    opened = _OPENS.search(text)
    row = None if opened is None else dict_in(text[opened.start() :])
    return None if row is None or _SUMMARY in row else row


def _step_of(row: Mapping[str, str]) -> tuple[int | None, int | None, str]:
    """Return the step that a row says, of how many, and the name under which it does."""
    for name in (*STEPS, *sorted(COUNTERS - {"epoch", "episode"})):
        done, _, total = row.get(name, "").partition("/")
        if done.isdecimal() and len(done) < 19:
            return int(done), int(total) if total.isdecimal() else None, name
    return None, None, ""


class TrainerDict:
    """Console of the transformers Trainer: a Python dict a line, floats with four digits and mostly no step.

    ``ProgressCallback.on_log`` and ``PrinterCallback.on_log`` (transformers/trainer_callback.py). Of programs built on
    it, ms-swift says the step in the line.
    """

    title = "the console log of the transformers Trainer"
    remarks = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the dicts with an epoch and a name that every training logs."""
        for line in _joined(lines):
            row = _dict_of(line) if "epoch" in line else None
            if row is None or ("epoch" not in row and "eval_epoch" not in row):
                continue
            is_eval = any(name.startswith("eval_") for name in row)
            named = {name.removeprefix("eval_"): value for name, value in row.items()}
            values = values_of(named)
            if _TRAINER & values.keys():
                step, total, _ = _step_of({name: row[name] for name in row if "/max" in name})
                yield Printed(values | nulls_of(named), step, EVAL if is_eval else TRAIN, total_steps=total)


_FEWEST = 3
"""Numbers of a line: two may stand in any text."""


class AnyDict:
    """Any dict of Python or object of JSON on a line of text, whole or cut, with three numbers and a metric's name."""

    title = "lines of names and numbers"
    remarks = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the dicts; a line that logs nothing but the step of what follows is none."""
        for line in _joined(lines):
            row = _dict_of(line) if "{" in line or ": " in line else None
            if row is None or any(f"{quote}{name}{quote}:" in line for name in OF_ROLLOUTS for quote in "'\""):
                continue
            step, total, name = _step_of(row)
            if step is None and (before := counted(line[: line.find("{")])) is not None:
                step, total = before
            values = values_of({key: value for key, value in row.items() if key != name})
            if len(row) - len(nulls_of(row)) >= _FEWEST and is_log_line(values):
                yield Printed(values, step, counter=name, total_steps=total)


_PRIME = {
    "Loss": ("loss/mean", "loss/mean"),
    "Entropy": ("entropy/mean", "entropy/all/mean"),
    "Mismatch KL": ("mismatch_kl/mean", "mismatch_kl/all/mean"),
    "Grad. Norm": ("optim/grad_norm", "optim/grad_norm"),
    "LR": ("optim/lr", "optim/lr"),
    "Reward": ("reward/mean", "train/agg/all/reward/mean"),
    "Truncation": ("is_truncated/mean", "train/agg/all/is_truncated/mean"),
    "Time": ("time/step", "time/step"),
}
"""Label to the metric where a colon is behind it, as up to 0.6, and where there is none."""

_NEMO = {
    "Loss": "train/loss",
    "Generation KL Error": "train/gen_kl_error",
    "Avg Reward": "train/reward",
    "Avg Total Reward": "train/reward",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Total step time": "timing/train/total_step_time",
}
_SMALL = NUMBER.replace("[-+]?", "-?")
_PRIME_STEP = re.compile(r"\bStep ([0-9]{1,18}) \| ([^'\n]{1,2000})")
_PRIME_PART = re.compile(rf"\s*([A-Z][\w. ]{{0,30}}?)(:?) ({_SMALL})(%?)")
_NEMO_STEP = re.compile(r"={8,64} Step ([0-9]{1,18})/([0-9]{1,18}) ={8,64}")
_NEMO_PART = re.compile(rf"(?:^|\s) {{1,3}}• ([A-Z][A-Za-z ]{{1,30}}): ({_SMALL})s?\s*$")
_AREAL_STEP = re.compile(r"Train step ([0-9]{1,18})/([0-9]{1,18}) done")
_AREAL_STATS = re.compile(r"Stats \(([0-9]{1,9})/[0-9]{1,9}\):")
_AREAL_CELL = re.compile(rf"[│|] *([\w./-]{{2,200}}) *[│|] *({_SMALL}) *(?=[│|])")


def _prime(lines: Iterable[str]) -> Iterator[Printed]:
    """``SUCCESS Step 3 | 12s | Loss 0.0123 | ...`` of the trainer and of the orchestrator.

    ``train`` (src/prime_rl/trainer/rl/train.py), ``log_train_batch`` (src/prime_rl/orchestrator/orchestrator.py).
    """
    for line in lines:
        for step, text in _PRIME_STEP.findall(line) if "Step " in line else ():
            values: dict[str, float | None] = {}
            for part in text.split("|"):
                match = _PRIME_PART.match(part)
                if match and match[1] in _PRIME and (value := number(match[3])) is not None:
                    values[_PRIME[match[1]][not match[2]]] = value / (100 if match[4] else 1)
            if len(values) > 1 or values.keys() & {"loss/mean", "train/agg/all/reward/mean"}:
                yield Printed(values, int(step), counter="loss" if "loss/mean" in values else "reward")


def _nemo(lines: Iterable[str]) -> Iterator[Printed]:
    """``===== Step 3/100 =====``, and lines as ``• Avg Reward: 0.5000`` after it.

    ``grpo_train`` and ``async_grpo_train`` (nemo_rl/algorithms/grpo.py).
    """
    step, total, values = 0, None, dict[str, float | None]()
    for line in lines:
        begins = _NEMO_STEP.search(line) if "= Step" in line else None
        part = _NEMO_PART.search(line) if "•" in line else None
        name = None if part is None else _NEMO.get(part[1])
        # Who pastes a block without its step gives the steps from 1 on.
        if begins is not None or name in values:
            if values:
                yield Printed(values, step, total_steps=total)
            step, values = int(begins[1]) if begins else step + 1, {}
            total = int(begins[2]) if begins else total
        if part is not None and name is not None:
            step = step or 1
            values[name] = number(part[2])
    if values:
        yield Printed(values, step, total_steps=total)


def _areal(lines: Iterable[str]) -> Iterator[Printed]:
    """A table of names and numbers after ``Train step 3/100 done.``.

    ``commit`` and ``print_stats`` (areal/utils/stats_logger.py), ``tabulate_stats`` (areal/utils/printing.py).
    """
    first, step, total = -1, -1, None
    for line in lines:
        begins, part = _AREAL_STEP.search(line), _AREAL_STATS.search(line)
        if begins is not None:
            # The trackers count from 0, and several tables of a step as steps of their own.
            first = step = max(int(begins[1]) - 1, step + 1)
            total = int(begins[2])
        if part is not None:
            step = first + int(part[1]) - 1
        values: dict[str, float | None] = {name: number(cell) for name, cell in _AREAL_CELL.findall(line)}
        if first >= 0 and any("/" in name for name in values):
            yield Printed(values, step, total_steps=total)


_LABELLED = {"prime-rl": _prime, "NeMo-RL": _nemo, "AReaL": _areal}


@dataclass(frozen=True)
class Labelled:
    """A console that says the numbers of a step in words or in a block: read under the names of its trackers."""

    writer: str
    remarks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Whose console it is."""
        return f"the console log of {self.writer}"

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps."""
        return _LABELLED[self.writer](lines)


_WANDB = re.compile(rf"^wandb:\s+([\w./@ -]{{1,200}}?) +({NUMBER})\s*$")


class WandbSummary:
    """What wandb prints when a run ends: ``wandb: NAME VALUE`` behind ``wandb: Run summary:``.

    ``_footer_history_summary_info`` (wandb/sdk/wandb_run.py).
    """

    title = "the summary that wandb prints at the end of a run"
    remarks = ("it is the summary of the last step alone; the history of the run is not there",)

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield a summary as one record, under the trainer's step where it has one."""
        row: dict[str, str] = {}
        inside = False
        for line in lines:
            inside = (inside or "Run summary:" in line) and "Run history:" not in line
            match = _WANDB.match(line) if inside else None
            if match is not None:
                row[match[1].strip()] = match[2]
        name = next((name for name in STEPS if name in row and name != "_step"), "")
        step = number(row.pop(name)) if name else None
        prefixed = any(key.startswith("train/") for key in row) and name == "train/global_step"
        prefixed |= any(key in row for key in ("train/loss", "train/reward")) and "train/learning_rate" in row
        values = values_of({key.removeprefix("train/") if prefixed else key: value for key, value in row.items()})
        if len(values) >= _FEWEST and is_log_line(values):
            yield Printed(values, 1 if step is None else int(step))


class Pairs:
    """Lines of names with numbers and a counter: loops of one's own, Megatron's ``iteration 2/ 624 | loss: ... |``.

    ``training_log`` (megatron/training/training.py) prints the second. A line that is a name and a number alone belongs
    to the step before.
    """

    title = "lines of names and numbers"
    remarks = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield a record for each line with a counter, with what the lines behind it add."""
        record: Printed | None = None
        ends_in_bar = False
        for line in lines:
            step = counted(line) if "=" in line or ":" in line or "|" in line or " " in line else None
            rows = [(label, value) for label, value in pairs(line)]
            if ends_in_bar and "|" in line and not line.rstrip().endswith("|"):
                # The last number of a line that was cut may have lost its end.
                rows = rows[:-1]
            values: dict[str, float | None] = {
                name: value
                for label, text in rows
                if (name := name_of(label)) not in COUNTERS or name == "epoch"
                if (value := number(text)) is not None
            }
            is_whole = len(values) >= _FEWEST - 1 and is_log_line(values)
            if step is not None and (is_whole or not rows or (len(rows) == 1 and not values)):
                if record is not None and _logs(record):
                    yield record
                ends_in_bar = line.rstrip().endswith("|")
                # A step alone is the head of a block, of a name and a number a line.
                record = Printed(values if is_whole else {}, step[0], counter="step", total_steps=step[1])
            elif record is not None and step is None and len(rows) == 1 and is_log_line(values):
                record.values.update({name: value for name, value in values.items() if name not in record.values})
        if record is not None and _logs(record):
            yield record


def _logs(record: Printed) -> bool:
    return len(record.values) >= _FEWEST - 1 and is_log_line(record.values)
