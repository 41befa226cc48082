"""Consoles that say the numbers of a step in words or in a block of lines: read under the names of the trackers."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.base import Entry, LogNotes
from rolloutdoctor.importers.logs.console import beginning, dict_in, lines_of, numbers_in
from rolloutdoctor.importers.reading.cells import decimal
from rolloutdoctor.io.locations.paths import Source

_NUMBER = r"(-?(?:[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?|nan|inf))"

_PRIME_STEP = re.compile(r"\bStep ([0-9]{1,18}) \| ([^'\n]{1,2000})")
_PRIME_PART = re.compile(rf"\s*([A-Z][\w. ]{{0,30}}?)(:?) {_NUMBER}(%?)")
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

_NEMO_STEP = re.compile(r"={8,64} Step ([0-9]{1,18})/[0-9]{1,18} ={8,64}")
_NEMO_PART = re.compile(rf"(?:^|\s) {{1,3}}• ([A-Z][A-Za-z ]{{1,30}}): {_NUMBER}s?\s*$")
_NEMO = {
    "Loss": "train/loss",
    "Generation KL Error": "train/gen_kl_error",
    "Avg Reward": "train/reward",
    "Avg Total Reward": "train/reward",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Total step time": "timing/train/total_step_time",
}

_OPENRLHF_STEP = re.compile(r"Global step ([0-9]{1,18}): (?=\{')")

_AREAL_STEP = re.compile(r"Train step ([0-9]{1,18})/[0-9]{1,18} done")
_AREAL_STATS = re.compile(r"Stats \(([0-9]{1,9})/[0-9]{1,9}\):")
_AREAL_CELL = re.compile(rf"[│|] *([\w./-]{{2,200}}) *[│|] *{_NUMBER} *(?=[│|])")


class _Blocks:
    """A console of which a function finds the numbers."""

    title: str

    def detect(self, path: Path) -> str | None:
        """Look for numbers of a step."""
        return self.title if next(self._entries(beginning(path)), None) is not None else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what the console says of steps."""
        for step, values in self._entries(lines_of(source)):
            yield step, TRAIN, values

    def _entries(self, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float | None]]]:
        raise NotImplementedError


class PrimeRlConsole(_Blocks):
    """Console of prime-rl's trainer or orchestrator: ``SUCCESS Step 3 | 12s | Loss 0.0123 | Entropy 0.4567 | ...``.

    ``train`` (src/prime_rl/trainer/rl/train.py), ``log_train_batch`` (src/prime_rl/orchestrator/orchestrator.py).
    """

    title = "the console log of prime-rl"

    def _entries(self, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float | None]]]:
        for line in lines:
            for step, text in _PRIME_STEP.findall(line):
                values: dict[str, float | None] = {}
                for part in text.split("|"):
                    found = _PRIME_PART.match(part)
                    if found and found[1] in _PRIME:
                        values[_PRIME[found[1]][not found[2]]] = decimal(found[3]) / (100 if found[4] else 1)
                if len(values) > 1 or values.keys() & {"loss/mean", "train/agg/all/reward/mean"}:
                    yield int(step), values


class NemoRlConsole(_Blocks):
    """Console of NeMo-RL: ``===== Step 3/100 =====``, and lines as ``• Avg Reward: 0.5000`` after it.

    ``grpo_train`` and ``async_grpo_train`` (nemo_rl/algorithms/grpo.py).
    """

    title = "the console log of NeMo-RL"

    def _entries(self, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float | None]]]:
        step, values = 0, dict[str, float | None]()
        for line in lines:
            begins, part = _NEMO_STEP.search(line), _NEMO_PART.search(line)
            name = None if part is None else _NEMO.get(part[1])
            # Who pastes a block without its step gives the steps from 1 on.
            if begins is not None or name in values:
                if values:
                    yield step, values
                step, values = int(begins[1]) if begins else step + 1, {}
            if part is not None and name is not None:
                step = step or 1
                values[name] = decimal(part[2])
        if values:
            yield step, values


class OpenRlhfConsole(_Blocks):
    """Console of OpenRLHF: ``Global step 3: {...}``, under the names of its trackers without ``train/``.

    ``fit`` (openrlhf/trainer/ppo_trainer.py) and ``fit`` (openrlhf/trainer/ppo_trainer_async.py).
    """

    title = "the console log of OpenRLHF"

    def _entries(self, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float | None]]]:
        for line in lines:
            begins = _OPENRLHF_STEP.search(line)
            row = None if begins is None else dict_in(line[begins.end() : line.rfind("}") + 1])
            if begins is not None and row:
                yield int(begins[1]), {f"train/{name}": value for name, value in numbers_in(row).items()}


class ArealConsole(_Blocks):
    """Console of AReaL: a table of names and numbers after ``Train step 3/100 done.``.

    ``commit`` and ``print_stats`` (areal/utils/stats_logger.py), ``tabulate_stats`` (areal/utils/printing.py).
    """

    title = "the console log of AReaL"

    def _entries(self, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float | None]]]:
        first, step = -1, -1
        for line in lines:
            begins, part = _AREAL_STEP.search(line), _AREAL_STATS.search(line)
            if begins is not None:
                # The trackers count from 0, and several tables of a step as steps of their own.
                first = step = max(int(begins[1]) - 1, step + 1)
            if part is not None:
                step = first + int(part[1]) - 1
            values: dict[str, float | None] = {name: decimal(cell) for name, cell in _AREAL_CELL.findall(line)}
            if first >= 0 and any("/" in name for name in values):
                yield step, values
