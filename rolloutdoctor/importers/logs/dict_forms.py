"""Dicts that programs print, with their step among the numbers."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.counters import COUNTERS, counted
from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import (
    FEWEST_NUMBERS,
    LONGEST_LINE,
    NULL,
    Form,
    Printed,
    dict_in,
    is_log_line,
    mean_rewards_in,
    nulls_of,
    values_of,
)
from rolloutdoctor.importers.logs.rows import MOST_NAMES, OF_ROLLOUTS, STEPS, counter_of
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities

_LINES = 1_000
"""Lines of a dict, which terminals cut and `pprint` gives a name each."""

_OPENS = re.compile(r"""\{\s*(?:['"]|$)""")
_BEGINS = re.compile(r"\s*\{")
_LIST = re.compile(r"""[^{]*\[\s*\{\s*['"]""")
_NEXT = re.compile(r"""(?<=\}),\s{0,9}(?=\{\s{0,9}['"])""")
_PROCESS = re.compile(r"(?:\([\w.()-]{1,100} pid=[0-9]{1,9}[^()\n]{0,60}\) )?")
"""What Ray puts before each line of a process, between which those of others stand."""
_INNER = re.compile(r"""(['"])(?:metrics|data)\1\s?:\s?\{(?=\s*['"])""")
"""The numbers of a step in a dict that has its step: ``{"step": 3, "metrics": {"loss": 0.5}}``."""
_WITHOUT_BRACE = re.compile(r"""\s*(['"])[\w/.-]+\1: """)
_AS_IT_TRAINS = frozenset({"loss", "grad_norm", "learning_rate", "reward", "kl", "objective/rlhf_reward"})
"""What the Trainer logs as it trains, the last by PPO: the summary at its end has ``train_loss``."""
_EVAL = "eval_"
_SUMMARY = "train_runtime"
_OF_STEP = re.compile(r"(?i)loss|kl|entropy|grad|lr|learning_rate|clip|ratio|mean|avg|average|std|epoch|episode|return")
"""Words in the names of what is of a step, of an update of it or of several responses."""


@dataclass(frozen=True)
class DictForm(Form):
    """A dict of Python or an object of JSON on a line of text, whole or cut, with its step in it, before it or nowhere.

    Attributes:
        title: what a text of this form is, in words.
        mark: text of every line of this form.
        names: of which one has to be there beside an epoch; none: three numbers, one of them a metric.
    """

    title: str = "lines of names and numbers"
    mark: str = ": "
    names: frozenset[str] = frozenset()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the dicts that log numbers; the summary at the end of a training only where there is nothing else.

        One that nothing counts has the mean rewards that are printed before it: ``train`` (skyrl/train/trainer.py).
        """
        summary: list[Printed] | None = []
        rewards: dict[str, float | None] = {}
        previous: Printed | None = None
        at_end: list[Printed] = []
        has_ended = False
        for line in joined_dicts(lines):
            if self.mark not in line:
                cut = None if previous is None or "{" not in line else _cut(line, previous)
                if cut is not None and "}" in line:
                    # Whoever cut the end of a paste may have put a brace there; elsewhere it is another dict.
                    at_end = [cut]
                elif cut is not None:
                    yield cut
                continue
            if not self.names and "{" not in line and "eval" not in line:
                rewards |= mean_rewards_in(line)
            records = self._found(line)
            if _SUMMARY not in line:
                for record in records:
                    previous, at_end = (record if self.names else None), []
                    record = replace(record, is_after_end=True) if has_ended else record
                    has_ended = False
                    has_own = record.step is not None or "reward" in metric_quantities(record.values).values()
                    yield record if has_own or not rewards else replace(record, values=rewards | record.values)
                    rewards, summary = {}, None
                continue
            has_ended = True
            if summary is not None:
                summary = list(records)
        yield from [*(summary or ()), *at_end]

    def _found(self, line: str) -> Iterator[Printed]:
        # Who pastes a line may lose its first character.
        text = "{" + line if "{" not in line and _WITHOUT_BRACE.match(line) else line
        opened = _OPENS.search(text)
        row = None if opened is None else dict_in(_INNER.sub("", text[opened.start() :], count=1))
        if row is None or len(row) > MOST_NAMES:
            return
        counter, step, total = counter_of(row, (*STEPS, "it")) or ("", None, None)
        if step is None and not self.names:
            step, total, _ = counted(line[: line.find("{")]) or (None, None, "")
        is_eval = _is_evaluation(row)
        named = {_named(name, is_eval=is_eval): text for name, text in row.items() if name != counter}
        values, nulls = values_of(named), nulls_of(named)
        if self.names:
            logs, values = "epoch" in values and bool(self.names & values.keys()), values | nulls
        else:
            of_rollouts = (f"{quote}{name}{quote}:" for name in OF_ROLLOUTS for quote in "'\"")
            is_long = len(row) - len(nulls) >= FEWEST_NUMBERS
            # Rewards and verdicts that nothing counts are those of a response, which a reward function prints, and the
            # best of them is of the run.
            is_of_step = any(name in COUNTERS or _OF_STEP.search(name) for name in values)
            is_of_step = step is not None or (is_of_step and not any(name.startswith("best_") for name in values))
            logs = is_long and is_of_step and is_log_line(values) and not any(name in line for name in of_rollouts)
        if logs:
            texts = _texts_in(text[text.find("{") :])
            texts = {_named(name, is_eval=is_eval): value for name, value in texts.items()}
            yield Printed(values, step, EVAL if is_eval else TRAIN, counter=counter, total_steps=total, texts=texts)


# ``ProgressCallback.on_log`` and ``PrinterCallback.on_log`` (transformers/trainer_callback.py), where ms-swift says the
# step as well.
TRAINER = DictForm("the console log of the transformers Trainer", "epoch", _AS_IT_TRAINS)
ANY_DICT = DictForm()


def _cut(line: str, previous: Printed) -> Printed | None:
    """Return the pairs that are whole in a line that lost its end; None unless they begin as those of a line before."""
    values = values_of(dict_in(line[line.find("{") :]) or {})
    is_beginning = [*values] == [*previous.values][: len(values)] and len(values) >= FEWEST_NUMBERS
    is_again = all(previous.values[name] == value for name, value in values.items() if name in previous.values)
    return Printed(values) if is_beginning and not is_again else None


def _is_evaluation(row: dict[str, str]) -> bool:
    """True if a row has numbers of an evaluation, and not of training: that may say ``eval_loss: null``."""
    of_eval = {name.removeprefix(_EVAL) for name in values_of(row) if name.startswith(_EVAL)}
    return bool(of_eval) and not of_eval & row.keys()


def _named(name: str, *, is_eval: bool) -> str:
    return name.removeprefix(_EVAL) if is_eval else name


def joined_dicts(lines: Iterable[str]) -> Iterator[str]:
    """Put the lines of a dict together that is broken over several, with the step on the line above it.

    Of a list on one line yield each dict.
    """
    held: list[str] = []
    size = depth = 0
    process = above = ""
    for line in lines:
        size += len(line)
        match = _PROCESS.match(line)
        prefix, text = (match[0], line[match.end() :]) if match else ("", line)
        is_inside = bool(held) and prefix == process
        if held and ((is_inside and _BEGINS.match(text)) or len(held) == _LINES or size > LONGEST_LINE):
            yield from held
            held, is_inside = [], False
        if is_inside:
            held.append(text)
            depth += text.count("{") - text.count("}")
            if depth <= 0:
                yield "".join(held)
                held = []
        elif not held and "{" in text and (depth := text.count("{") - text.count("}")) > 0 and _OPENS.search(text):
            held, size, process = [above + text if _BEGINS.match(text) else text], len(line), prefix
        elif not held and _LIST.match(text):
            yield from _NEXT.split(text)
        else:
            yield line
        above = f"{text} " if text.rstrip().endswith(":") and counted(text) else ""
    yield from held


_TEXT = re.compile(r"""(['"])([\w/ .-]{1,100})\1\s?:\s?(['"])((?:(?!\3)[^\\\n]){1,60})\3\s*(?=[,}])""")


def _texts_in(text: str) -> dict[str, str]:
    """Return what a dict has in place of the number of a metric.

    >>> _texts_in("{'loss': 0.5, 'reward': 'n/a', 'kl': '0.1', 'remaining': '3h'}")
    {'reward': 'n/a'}
    """
    texts = {name: value for _, name, _, value in _TEXT.findall(text)} if len(text) <= LONGEST_LINE else {}
    return {
        name: value
        for name, value in texts.items()
        if is_metric(name) and number(value.partition("/")[0].strip()) is None and value not in NULL.split("|")
    }
