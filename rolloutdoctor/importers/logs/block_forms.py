"""Names and numbers behind their step, on its line or in a block below it: a row of a table for each program."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import FEWEST_NUMBERS, NUMBER, Printed, is_log_line
from rolloutdoctor.importers.logs.row_names import STEPS

_STEPS = (*STEPS[:-1], "time/total_timesteps")


@dataclass(frozen=True, eq=False)
class BlockForm:
    """A line with a step, and names with numbers behind it, up to the next step or a name that is there already.

    Attributes:
        title: what a text of this form is, in words.
        begins: a step: its number and that of all, where the line has them; the step is in the block otherwise.
        part: a name and a number; a name without a number is that of a section.
        marks: text of every line that begins a step, and of every line with a part.
        names: label to metric; None: every name is that of a metric.
        first: number of the first step.
        in_block: whether the numbers are on the lines below the step.
        is_headless: whether blocks without a step are read.
        needs_step: whether a block without a step is none.
        is_of_tracker: whether names may have the prefix that the transformers Trainer gives them in trackers.
        before: rewrites the lines, where a number is printed before the step that it is of.
        remarks: what the user should know of the numbers.
    """

    title: str
    begins: re.Pattern[str]
    part: re.Pattern[str]
    marks: tuple[str, str]
    names: Mapping[str, str] | None = None
    first: int = 0
    in_block: bool = True
    is_headless: bool = False
    needs_step: bool = False
    is_of_tracker: bool = False
    before: Callable[[Iterable[str]], Iterable[str]] = iter
    remarks: tuple[str, ...] = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps; a block without a step, where a form may have one, is of the next."""
        step, total, more, section, has_begun = 0, None, 0, "", False
        values: dict[str, float | None] = {}
        for begins, text in self._pieces(self.before(lines)):
            if begins is not None:
                yield from self._closed(values, step, total)
                values, section, has_begun = {}, "", True
                if begins.lastindex:
                    step = int(begins[1]) - self.first + more
                    total = int(begins[2]) if begins.lastindex > 1 else None
            elif not (has_begun or self.is_headless):
                continue
            for label, cell in self.part.findall(text):
                if not cell:
                    section = label if label.endswith("/") else ""
                    continue
                name = label if "/" in label else f"{section}{label}"
                name = name if self.names is None else self.names.get(name, "")
                if not name:
                    continue
                if name in values or not has_begun:
                    # Who pastes a block without its step gives the steps from 1 on; AReaL shows several tables of one.
                    yield from self._closed(values, step, total)
                    more += has_begun
                    values, step, has_begun = {}, step + 1, True
                values[name] = number(cell)
        yield from self._closed(values, step, total)

    def _pieces(self, lines: Iterable[str]) -> Iterator[tuple[re.Match[str] | None, str]]:
        """Yield the lines that may have a part, from each beginning of a step to the next."""
        begins, part = self.marks
        for line in lines:
            starts = [*self.begins.finditer(line)] if begins in line else []
            if not starts and self.in_block and part in line:
                yield None, line
            ends = [*(match.start() for match in starts[1:]), len(line)]
            for match, end in zip(starts, ends[: len(starts)], strict=True) if starts else ():
                yield match, line[match.end() : end]

    def _closed(self, values: dict[str, float | None], step: int, total: int | None) -> Iterator[Printed]:
        """Yield what a block logs, under the step in it where it has one."""
        named = next((name for name in _STEPS if values.get(name) is not None), "")
        counted = values.get(named)
        rest = {name: value for name, value in values.items() if name != named}
        if self.is_of_tracker and (
            named == "train/global_step" or {"train/learning_rate", "train/loss"} <= rest.keys()
        ):
            rest = {name.removeprefix("train/"): value for name, value in rest.items()}
        if self.needs_step and counted is None:
            return
        if is_log_line(rest) and (self.names is not None or len(rest) >= FEWEST_NUMBERS - 1):
            own = max(step, 1 - self.first) if self.begins.groups else None
            yield Printed(rest, own if counted is None else int(counted), total_steps=total)


_PLAIN = NUMBER.replace("[-+]?", "-?")

# ``Detected 95/128 rollouts (zero_advantage=95)``: ``apply_filters`` (src/prime_rl/orchestrator/filters.py).
_DETECTED = re.compile(
    r"Detected [0-9]{1,9}/([1-9][0-9]{0,8})(?: rollouts)? \([^()\n]{0,200}\bzero_advantage=([0-9]{1,9})\b"
)


def _with_filtered(lines: Iterable[str]) -> Iterator[str]:
    """Put the share of rollouts without an advantage on the line of their step, before which it is printed."""
    share = ""
    for line in lines:
        match = _DETECTED.search(line) if "zero_advantage=" in line else None
        if match is not None and int(match[2]) <= int(match[1]):
            share = f" | Zero Advantage {int(match[2]) / int(match[1]):.9f}"
        elif share and "Step " in line and "| Reward" in line:
            yield f"{line.rstrip()}{share}"
            share = ""
        else:
            yield line


# ``train`` (src/prime_rl/trainer/rl/train.py) and ``log_train_batch`` (src/prime_rl/orchestrator/orchestrator.py):
# ``SUCCESS Step 3 | 12s | Loss 0.0123 | ...``; up to 0.6 with a colon behind the label.
PRIME_RL = BlockForm(
    "the console log of prime-rl",
    re.compile(r"\bStep ([0-9]{1,18}) (?=\|)"),
    re.compile(rf"\|\s*([A-Z][\w. ]{{0,30}}?:?) ({_PLAIN}%?)"),
    ("Step ", "|"),
    {
        f"{label}{colon}": name
        for label, now, before in (
            ("Loss", "loss/mean", "loss/mean"),
            ("Entropy", "entropy/all/mean", "entropy/mean"),
            ("Mismatch KL", "mismatch_kl/all/mean", "mismatch_kl/mean"),
            ("Grad. Norm", "optim/grad_norm", "optim/grad_norm"),
            ("LR", "optim/lr", "optim/lr"),
            ("Reward", "train/agg/all/reward/mean", "reward/mean"),
            ("Truncation", "train/agg/all/is_truncated/mean", "is_truncated/mean"),
            ("Time", "time/step", "time/step"),
            ("Zero Advantage", "zero_advantage", ""),
        )
        for colon, name in (("", now), (":", before))
    },
    in_block=False,
    before=_with_filtered,
)

# ``grpo_train`` and ``async_grpo_train`` (nemo_rl/algorithms/grpo.py).
NEMO_RL = BlockForm(
    "the console log of NeMo-RL",
    re.compile(r"={8,64} Step ([0-9]{1,18})/([0-9]{1,18}) ={8,64}"),
    re.compile(rf"(?:^|\s) {{1,3}}• ([A-Z][A-Za-z ]{{1,30}}): ({_PLAIN})s?\s*$"),
    ("= Step", "•"),
    {
        "Loss": "train/loss",
        "Generation KL Error": "train/gen_kl_error",
        "Avg Reward": "train/reward",
        "Avg Total Reward": "train/reward",
        "Mean Generation Length": "train/mean_gen_tokens_per_sample",
        "Total step time": "timing/train/total_step_time",
    },
    is_headless=True,
)

# ``commit`` and ``print_stats`` (areal/utils/stats_logger.py), ``tabulate_stats`` (areal/utils/printing.py); its
# trackers count from 0.
AREAL = BlockForm(
    "the console log of AReaL",
    re.compile(r"Train step ([0-9]{1,18})/([0-9]{1,18}) done"),
    re.compile(rf"[│|] *([\w.-]{{1,100}}/[\w./-]{{1,200}}) *[│|] *({_PLAIN}) *(?=[│|])"),
    ("Train step ", "/"),
    first=1,
)

# ``tabulate`` and ``rich.table`` with a row for each metric, the step among them; ``HumanOutputFormat.write``
# (stable_baselines3/common/logger.py), in sections.
TWO_COLUMNS = BlockForm(
    "tables of names and numbers",
    re.compile(r"^\s*[-+|┏┡╒┌╭├╞┣╔╠][-=+|─━═┬┼┳╇┿╤╪]{4,300}[-+|┓┩╕┐╮┤╡┫╗╣]\s*$"),
    re.compile(
        rf"^\s*[|│┃║] {{0,8}}([A-Za-z][\w./() -]{{0,80}}?) {{0,60}}[|│┃║] {{0,60}}({NUMBER}|) {{0,60}}[|│┃║]\s*$"
    ),
    ("", ""),
    needs_step=True,
)

# ``_footer_history_summary_info`` (wandb/sdk/wandb_run.py).
WANDB_SUMMARY = BlockForm(
    "the summary that wandb prints at the end of a run",
    re.compile(r"^wandb:.{0,40}Run summary:"),
    re.compile(rf"^wandb:\s+([\w./@ -]{{1,200}}?) +({NUMBER})\s*$"),
    ("Run summary:", "wandb:"),
    is_of_tracker=True,
    remarks=("it is the summary of the last step alone; the history of the run is not there",),
)

# ``record_step_stats`` of TRL's PPO trainer before 0.12; a console may have nothing else.
WARNINGS = BlockForm(
    "warnings of TRL's PPO trainer",
    re.compile(r"KL divergence is starting to become (?=negative: )"),
    re.compile(rf"(negative): ({NUMBER})(?=\s)"),
    ("KL divergence", ""),
    {"negative": "objective/kl"},
    in_block=False,
    remarks=("read are warnings alone, which are of the updates with a KL below -1: other updates are not there",),
)
