"""Logs as people publish them, made anew: the form, the names, the level and the noise of the curves are theirs.

Each says what the first sentence has to be about, or that there is nothing to say.
"""

import html
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolloutdoctor.api import check
from rolloutdoctor.views.verdict import verdict

Row = dict[str, float]


def lines(seed: int, count: int, row: Callable[[random.Random, float], Row], every: int = 1) -> list[Row]:
    """Draw the rows of a log: `row` gets the place in the run, from 0 to 1."""
    draw = random.Random(seed)
    return [{"step": every * (n + 1), **row(draw, n / max(1, count - 1))} for n in range(count)]


def state(folder: Path, rows: list[Row]) -> Path:
    """`trainer_state.json` of a checkpoint."""
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": rows[-1]["step"], "max_steps": rows[-1]["step"], "log_history": rows}))
    return path


def console(folder: Path, rows: list[Row]) -> Path:
    """What the transformers Trainer prints, with its progress bar, rounded to four digits."""
    path, total = folder / "nohup.out", rows[-1]["step"]
    text = "Map: 100%|##########| 7000/7000 [00:00<00:00, 9498.52 examples/s]\n"
    for row in rows:
        shown = {name: float(f"{value:.4g}") for name, value in row.items() if name != "step"}
        text += f" 10%|#         | {row['step']}/{total} [01:21<1:35:58, 51.44s/it]\r{shown}\n"
    path.write_text(text)
    return path


def notebook(folder: Path, rows: list[Row], code: str = "") -> Path:
    """The table that a notebook shows, six decimals."""
    path, names = folder / "GRPO.ipynb", [name for name in rows[0] if name != "step"]
    titles = ["Step", *("Training Loss" if name == "loss" else name.replace("/", " / ") for name in names)]
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        f"<tr><td>{row['step']:.0f}</td>{''.join(f'<td>{row[name]:.6f}</td>' for name in names)}</tr>\n" for row in rows
    )
    table = f'<table border="1" class="dataframe">\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
    output = {"output_type": "display_data", "data": {"text/html": table}, "metadata": {}}
    cell = {"cell_type": "code", "source": code + "\ntrainer.train()", "outputs": [output], "metadata": {}}
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


UNSLOTH = (
    "from unsloth import FastLanguageModel\nfrom trl import GRPOConfig, GRPOTrainer\n"
    "training_args = GRPOConfig(learning_rate = 5e-6, logging_steps = 1, per_device_train_batch_size = 1,\n"
    "    gradient_accumulation_steps = 1, num_generations = 4, max_completion_length = 256)"
)
INSTALLED = "!pip install trl==0.15.2\n"


def unsloth_notebook(folder: Path, rows: list[Row]) -> Path:
    """With the code of a notebook that imports Unsloth and gives its options to TRL's trainer."""
    return notebook(folder, rows, UNSLOTH)


def verl_console(folder: Path, rows: list[Row]) -> Path:
    """verl's console, three decimals."""
    path = folder / "train.log"
    text = ""
    for row in rows:
        shown = " - ".join(f"{name}:{value:.3f}" for name, value in row.items() if name != "step")
        text += f"(TaskRunner pid=41237) step:{row['step']:.0f} - {shown}\n"
    path.write_text(text)
    return path


def loop_with_header(folder: Path, rows: list[Row]) -> Path:
    """JSON Lines of a loop of one's own, whose first line is what it was started with."""
    path = folder / "training_log.jsonl"
    header = {"type": "config", "argv": ["train.py", "--steps", "500"], "args": {"steps": 500, "lr": 2e-5}}
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    return path


def loop_console(folder: Path, rows: list[Row]) -> Path:
    """A loop of one's own that prints a line a step, and a response with steps of its own at times."""
    path, text = folder / "run.out", ""
    for row in rows:
        shown = " ".join(f"{name}={value:.4f}" for name, value in row.items() if name != "step")
        text += f"[Step {row['step']:.0f}/{rows[-1]['step']:.0f}] {shown}\n"
        if row["step"] % 20 == 0:
            text += "sample: Step 1: add 3 to 4. Step 2: so x = 7 (reward=1.000)\nreward: 1.0\n"
    path.write_text(text)
    return path


def frame(folder: Path, rows: list[Row]) -> Path:
    """A frame that pandas printed, with a share in percent and names one space apart."""
    body = "".join(f"{row['step']:5.0f} {100 * row['reward']:9.2f}% {row['loss']:11.6f}\n" for row in rows)
    printed = {"output_type": "stream", "name": "stdout", "text": f" Step Reward_pct        Loss\n{body}"}
    cell = {"cell_type": "code", "source": "print(frame)", "outputs": [printed], "metadata": {}}
    path = folder / "plots.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def json_lines(folder: Path, rows: list[Row]) -> Path:
    """JSON Lines of numbers, the last of which was cut."""
    path = folder / "train_metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows)[:-20])
    return path


def dicts_and_table(folder: Path, rows: list[Row]) -> Path:
    """A notebook that shows a table of losses, and prints all metrics as dicts."""
    path = notebook(folder, [{"step": row["step"], "loss": row["loss"]} for row in rows])
    body = json.loads(path.read_text())
    text = "".join(f"{ {**row, 'epoch': row['step'] / rows[-1]['step']} }\n" for row in rows)
    body["cells"][0]["outputs"].append({"output_type": "stream", "name": "stdout", "text": text})
    path.write_text(json.dumps(body))
    return path


def old_trl(reward: Callable[[random.Random, float], float], dead: float = 0.0, **changed: float) -> Callable:
    """Names of TRL before 0.17, one prompt a line; `dead`: share of lines whose rewards are equal."""

    def row(draw: random.Random, at: float) -> Row:
        is_dead = draw.random() < dead
        return {
            "loss": 0.0,
            "reward": reward(draw, at),
            "reward_std": 0.0 if is_dead else 0.4 + 0.3 * draw.random(),
            "completion_length": 150 + draw.gauss(0, 12),
            "kl": 0.0005 + 0.04 * at * (1 + 0.3 * draw.random()),
            **changed,
        }

    return row


def new_trl(reward: Callable[[random.Random, float], float], dead: float = 0.0, **changed: float) -> Callable:
    """Names of TRL since 0.17, several prompts a line."""

    def row(draw: random.Random, at: float) -> Row:
        return {
            "loss": draw.gauss(0, 0.01),
            "grad_norm": 0.2 + 0.03 * draw.random(),
            "learning_rate": 1e-6 * (1 - 0.9 * at),
            "completions/mean_length": 240 + draw.gauss(0, 8),
            "completions/clipped_ratio": 0.0625 * draw.random(),
            "reward": reward(draw, at),
            "reward_std": 0.4 + 0.05 * draw.random(),
            "frac_reward_zero_std": min(1.0, max(0.0, dead + draw.gauss(0, 0.05))) if dead else 0.0,
            "entropy": 0.6 + 0.02 * draw.random(),
            **changed,
        }

    return row


def rises(draw: random.Random, at: float) -> float:
    return 0.2 + 1.4 * at + draw.gauss(0, 0.15)


def stands(draw: random.Random, at: float) -> float:
    return -0.25 + draw.gauss(0, 0.2)


def with_functions(**values: float) -> Callable:
    """A rising reward with functions that are one value in every line."""
    base = old_trl(rises)

    def row(draw: random.Random, at: float) -> Row:
        made = base(draw, at)
        return {**made, "rewards/correctness": made["reward"], **{f"rewards/{one}": it for one, it in values.items()}}

    return row


def collapses(draw: random.Random, at: float) -> Row:
    """Rewards that reach 0 where every response begins to be cut off."""
    late = at > 0.4
    row = new_trl(lambda draw, at: 0.9 + draw.gauss(0, 0.03))(draw, at)
    late_row = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0}
    late_row |= {"completions/mean_length": 512.0, "completions/clipped_ratio": 1.0}
    return {**row, **late_row} if late else row


def cut(draw: random.Random, at: float) -> Row:
    """Every response at the limit, and nothing correct."""
    row = new_trl(lambda draw, at: 0.66 + draw.gauss(0, 0.05))(draw, at)
    lengths = dict.fromkeys(("completions/mean_length", "completions/min_length", "completions/max_length"), 256.0)
    return {**row, **lengths, "completions/clipped_ratio": 1.0}


def drifts(draw: random.Random, at: float) -> Row:
    """A KL that rises to more than a nat in a tenth of the run and stays."""
    row = old_trl(lambda draw, at: 0.68 + draw.gauss(0, 0.02))(draw, at)
    return {**row, "loss": 0.02, "kl": 2.5 * min(1.0, 6 * at) * (1 + 0.1 * draw.random())}


def spikes(draw: random.Random, at: float) -> Row:
    """One KL of 40 times its neighbours in a run that learns."""
    row = old_trl(rises)(draw, at)
    return {**row, "kl": 4.6 if 0.2 < at < 0.2035 else 0.01 + 0.1 * min(1.0, 4 * at) * (1 + 0.2 * draw.random())}


def verl(draw: random.Random, at: float) -> Row:
    score = 0.07 + 0.17 * at + draw.gauss(0, 0.02)
    return {
        "actor/entropy": 0.18 + 0.08 * at,
        "actor/pg_loss": draw.gauss(0, 0.002),
        "actor/pg_clipfrac": 0.0,
        "actor/ppo_kl": 0.0,
        "actor/grad_norm": 0.1 + 0.01 * draw.random(),
        "critic/score/mean": score,
        "critic/rewards/mean": score,
        "response_length/mean": 420 + draw.gauss(0, 15),
        "response_length/clip_ratio": 0.0,
    }


def verl_stands(draw: random.Random, at: float) -> Row:
    score = 0.1 + draw.gauss(0, 0.05)
    return {**verl(draw, at), "critic/score/mean": score, "critic/rewards/mean": score}


def loop(draw: random.Random, at: float) -> Row:
    return {"mean_reward": min(1.0, 0.02 + at + draw.gauss(0, 0.03)), "loss": 0.8 * (1 - at), "accuracy": 0.5 + at / 2}


def own(reward: Callable[[random.Random, float], float]) -> Callable:
    """Names of a loop of one's own, with averages under names of its own."""

    def row(draw: random.Random, at: float) -> Row:
        length = 350 + draw.gauss(0, 60)
        return {"loss": draw.gauss(0, 5), "reward_avg": reward(draw, at), "avg_resp_len": length}

    return row


def several(reward: Callable[[random.Random, float], float]) -> Callable:
    """A mean reward and its parts, named as nobody else names them."""

    def row(draw: random.Random, at: float) -> Row:
        total = reward(draw, at)
        return {"reward": total, "valid_action": 1.0, "answer_reward": total / 2, "penalty": -0.1, "judge_errors": 0.0}

    return row


def with_trl_names(draw: random.Random, at: float) -> Row:
    """A loop of one's own of which two names are TRL's."""
    return {"policy_loss": 0.0, "learning_rate": 1e-5, "reward_mean": 0.0, "reward_std": 0.0, "kl_mean": 0.01 * at}


def from_another(draw: random.Random, at: float) -> Row:
    """A KL that is as large in the first steps as later."""
    return {**new_trl(rises)(draw, at), "kl": 0.45 + 0.1 * draw.random()}


@dataclass(frozen=True)
class Made:
    """A log, and what has to be said of it.

    Attributes:
        name: of the case.
        form: how it is kept.
        rows: what was logged.
        says: a rule, the first that has to be named; empty: no fault.
        words: words of the first sentence.
        options: how many options have to be found in it.
    """

    name: str
    form: Callable[[Path, list[Row]], Path]
    rows: list[Row]
    says: str = ""
    words: str = ""
    options: int = 0


def table() -> Iterator[Made]:
    """Give the logs, from the healthy ones to the collapsed."""
    yield Made("rises-notebook", notebook, lines(1, 250, old_trl(rises)))
    yield Made("rises-unsloth", unsloth_notebook, lines(2, 250, old_trl(rises)), options=4)
    yield Made("rises-state", state, lines(3, 200, new_trl(rises)))
    yield Made("rises-console", console, lines(4, 60, new_trl(rises), every=5))
    yield Made("rises-verl", verl_console, lines(5, 300, verl))
    yield Made("rises-own-loop", loop_with_header, lines(6, 30, loop, every=50))
    yield Made("spike-passes", notebook, lines(7, 300, spikes))
    yield Made("stands-verl", verl_console, lines(8, 80, verl_stands), "RDT016")
    yield Made("stands-state", state, lines(9, 160, new_trl(stands)), "RDT016")
    yield Made("zero-std-notebook", notebook, lines(10, 100, old_trl(rises, dead=0.93)), "RDT001", "train nothing")
    yield Made(
        "zero-std-unsloth", unsloth_notebook, lines(11, 250, old_trl(rises, dead=0.7)), "RDT001", "train nothing", 4
    )
    yield Made("zero-variance", state, lines(12, 40, new_trl(rises, dead=0.75), every=5), "RDT001", "train nothing")
    yield Made(
        "function-0", state, lines(13, 250, with_functions(soft_format=0.0)), "RDT002", "soft_format is constant at 0"
    )
    yield Made(
        "function-0-notebook", notebook, lines(14, 250, with_functions(strict_format=0.0)), "RDT002", "strict_format"
    )
    yield Made(
        "function-low", unsloth_notebook, lines(15, 100, with_functions(check_answer=-2.0)), "RDT002", "check_answer", 4
    )
    yield Made(
        "reward-0",
        console,
        lines(16, 50, old_trl(lambda draw, at: 0.0, dead=1.1, kl=0.0, grad_norm=0.0, completion_length=256.0)),
        "RDT002",
        "reward is 0",
    )
    yield Made("truncated", notebook, lines(17, 25, cut), "RDI012", "truncated at 256 tokens")
    yield Made("kl-leaves", console, lines(18, 94, drifts, every=20), "RDT004", "KL")
    yield Made("collapse", console, lines(19, 60, collapses, every=5), "RDT006", "truncated")
    yield Made("collapse-state", state, lines(20, 100, collapses), "RDT006", "truncated")
    yield Made(
        "length-stays", notebook, lines(21, 150, old_trl(rises, completion_length=32.0)), "RDI012", "32 tokens long"
    )
    yield Made("zero-std-40", console, lines(22, 200, old_trl(rises, dead=0.45)), "RDT001")
    yield Made(
        "truncated-40",
        notebook,
        lines(23, 10, new_trl(rises, **{"completions/clipped_ratio": 0.43}), every=5),
        "RDI012",
    )
    yield Made("truncated-once", state, lines(24, 1, new_trl(rises, **{"completions/clipped_ratio": 0.91})), "RDI012")
    yield Made("stands-own-console", loop_console, lines(25, 50, own(stands)), "RDT016")
    yield Made("stands-frame", frame, lines(26, 50, old_trl(lambda draw, at: 0.01 * draw.random())), "RDT016")
    yield Made("stands-own-lines", json_lines, lines(27, 150, several(stands)), "RDT016")
    yield Made("reward-0-own", json_lines, lines(28, 12, with_trl_names), "RDT002", "reward is 0")
    yield Made("kl-from-the-start", state, lines(29, 135, from_another, every=2), "RDG012")
    yield Made(
        "function-0-dicts",
        dicts_and_table,
        lines(30, 12, with_functions(soft_format=0.0)),
        "RDT002",
        "soft_format is constant at 0",
    )


@pytest.mark.parametrize("made", list(table()), ids=lambda made: made.name)
def test_a_log_as_people_publish_them(made, tmp_path):
    report = check(made.form(tmp_path, made.rows))
    faults = [one.code for one in report.causes if one.severity.label in ("warning", "error")]
    first = (faults or [one.code for one in report.findings] or [""])[0]
    assert first == made.says if made.says else not faults, [(one.code, one.headline) for one in report.findings]
    assert made.words in verdict(report).split(" To fix it")[0].split(" Too little")[0]
    found = [name for name, one in report.config.items() if "code of" in one.origin]
    assert len(found) >= made.options


@pytest.mark.parametrize(("dead", "severity"), [(0.0, "error"), (0.7, "info")])
def test_the_last_steps_are_an_error_only_where_they_are_no_chance(dead, severity, tmp_path):
    rows = lines(21, 100, old_trl(rises, dead=dead))
    rows = [
        {**row, "reward_std": 0.0 if n >= 94 else max(row["reward_std"], 0.2 * (n == 93))} for n, row in enumerate(rows)
    ]
    (found,) = [one for one in check(state(tmp_path, rows)).findings if one.code == "RDT001"]
    assert found.severity.label == severity


def test_options_of_a_release_that_is_too_old_take_no_number_away(tmp_path):
    made = lines(14, 250, with_functions(strict_format=0.0))
    report = check(notebook(tmp_path, made, INSTALLED + UNSLOTH))
    assert [one.code for one in report.causes][:1] == ["RDT002"]
    assert {"num_generations", "max_completion_length"} <= report.config.keys()


def test_a_collapse_is_no_reward_that_has_not_moved(tmp_path):
    draw = random.Random(22)
    rows = lines(22, 60, old_trl(lambda _, at: 0.5))
    for n, row in enumerate(rows):
        row["reward"] = (20.6 if 5 <= n < 25 else 8.3) + draw.gauss(0, 0.3)
    codes = [one.code for one in check(state(tmp_path, rows)).findings]
    assert "RDT005" in codes
    assert "RDT016" not in codes
