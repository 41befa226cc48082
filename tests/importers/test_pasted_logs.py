"""Consoles as people paste them: broken lines, lost braces, prose around them, tables of notebooks."""

import time
import tracemalloc

import pytest

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log, runs_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.metric_names.table import understood

TRANSFORMERS = "the console log of the transformers Trainer"


def read(tmp_path, text, name="pasted.txt"):
    """The kind of a text, what was logged by step and split, and what the reader said."""
    path, told, found = tmp_path / name, [], {}
    path.write_text(text)
    for step, split, values in read_log(Source.of(str(path)), LogNotes(told.append)):
        found.setdefault((step, split), {}).update(values)
    return kind_of(path), found, told


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nwhat I get:\n{'loss': 0.5, 'reward': 1.25, 'epoch': 0.5}\n```\n",
        "'loss': 0.5, 'reward': 1.25, 'epoch': 0.5}\n",
        "{'loss': 0.5, \n'reward': 1.25, \n\n'epoch': 0.5}\n{'loss': 0.0, 'grad_norm': 0.0, 'lear\n",
        "a terminal cuts: {'loss': 0.5, 'rew\nard': 1.25, 'epoch': 0.5}\n",
        '日志如下：\n{"loss": 0.5, "reward": 1.25, "epoch": 0.5, "percentage": "2 %", "kl": null}\n',
    ],
    ids=["fence", "brace lost", "broken by hand", "broken by a terminal", "JSON in prose"],
)
def test_a_line_of_the_transformers_trainer(text, tmp_path):
    kind, found, _ = read(tmp_path, text)
    nulls = {"kl": None} if "null" in text else {}
    assert (kind, found) == (TRANSFORMERS, {(1, "train"): {"loss": 0.5, "reward": 1.25, "epoch": 0.5} | nulls})


WHOLE = "{'loss': 0.5, 'reward': 1.25, 'kl': 0.1, 'epoch': 0.5}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WHOLE + "{'loss': 0.0, 'reward': 0.0, 'kl': 0.0, 'epo", {"loss": 0.0, "reward": 0.0, "kl": 0.0}),
        (WHOLE + "{'loss': 0.0, 'reward': 0.0, 'kl': 0.0}\n", {"loss": 0.0, "reward": 0.0, "kl": 0.0}),
        (WHOLE + "{'loss': 0.0, 'reward': 0.0, 'kl': 0.", None),
        (WHOLE + "{'loss': 0.5, 'reward': 1.25, 'kl': 0.1}\n", None),
        (WHOLE + "{'kl': 0.0, 'loss': 0.0, 'reward': 0.0}\n", None),
    ],
    ids=["no brace", "a brace of one's own", "too few", "printed again", "another dict"],
)
def test_the_whole_pairs_of_a_line_that_lost_its_end_are_read(text, expected, tmp_path):
    kind, found, _ = read(tmp_path, text)
    assert kind == TRANSFORMERS
    assert found.get((2, "train")) == expected


def test_a_line_that_a_terminal_cut_keeps_its_place(tmp_path):
    text = WHOLE + "{'loss': 0.0, 'reward': 0.0, 'kl': 0.0, 'epo\n" + WHOLE.replace("0.5", "1.5")
    _, found, _ = read(tmp_path, text)
    assert [values["loss"] for values in found.values()] == [0.5, 0.0, 1.5]


@pytest.mark.parametrize(
    "text",
    [
        "(TaskRunner pid=7) step:3 - critic/score/mean:0.25 - actor\n/pg_loss:-0.5 - actor/lr:1e-06\n",
        "step:3 - critic/score/mean:0.2\n5 - actor/pg_loss:-0.5 -\nactor/lr:1e-06\n",
        "step:3 - critic/score/mean:0.25\n- actor/pg_loss:\n-0.5 - actor/lr:1e-06\nINFO - saved\n",
        "step:3\n - critic/score/mean:0.25\n - actor/pg_loss:np.float64(-0.5)\n - actor/lr:1e-06\n\n- done: 3\n",
    ],
    ids=["in a name", "in a number", "after a colon", "a metric on each line"],
)
def test_a_line_of_verl_that_is_cut(text, tmp_path):
    kind, found, _ = read(tmp_path, text)
    assert kind == "the console log of verl"
    assert found == {(3, "train"): {"critic/score/mean": 0.25, "actor/pg_loss": -0.5, "actor/lr": 1e-6}}


def test_dicts_of_slime_over_several_lines(tmp_path):
    text = (
        "run:\nstep 0: {'train/loss': 0.5,\n         'train/grad_norm': 1.5}\nrollout 1: {'rollout/raw_reward': 0.25}\n"
    )
    kind, found, _ = read(tmp_path, text)
    assert kind == "the console log of slime"
    assert found[0, "train"] == {"train/loss": 0.5, "train/grad_norm": 1.5}
    assert found[1, "train"] == {"rollout/raw_reward": 0.25}


def test_a_dict_that_never_ends_hides_none_of_the_next_lines(tmp_path):
    opened = "{'loss': 0.5, 'rew\n" + "some text\n" * 60
    _, found, _ = read(tmp_path, f"{opened}{{'loss': 0.25, 'epoch': 0.5}}\n")
    assert found == {(1, "train"): {"loss": 0.25, "epoch": 0.5}}


@pytest.mark.parametrize("page", ["<table><tr></tr></table>\n", "</tr>\n", "</tr></tr>\n<tr>\n</tr>\n"])
def test_a_row_of_html_before_any_table_is_no_row(page, tmp_path):
    text = f"{page}{{'loss': 0.25, 'reward': 0.5, 'epoch': 0.5}}\n"
    assert read(tmp_path, text)[:2] == (TRANSFORMERS, {(1, "train"): {"loss": 0.25, "reward": 0.5, "epoch": 0.5}})
    (tmp_path / "page.md").write_text(page)
    assert kind_of(tmp_path / "page.md") is None


def test_of_a_very_long_dict_the_numbers_are_read(tmp_path):
    samples = "[" + "{'loss': 9.5, 'text': 'a \\'reward\\': 7.5, b'}, " * 3000 + "]"
    text = f"{{'loss': 0.25, 'samples': {samples}, \"reward\": -1e-3, 'kl': nan, 'epoch': 0.5}}\n"
    kind, found, _ = read(tmp_path, text)
    assert kind == TRANSFORMERS
    values = found[1, "train"]
    assert values.pop("kl") != 0
    assert values == {"loss": 0.25, "reward": -1e-3, "epoch": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["[]," * 21_000, "'\\'" * 16_000, "(" * 65_000])
def test_long_dicts_over_many_lines_take_little(part, tmp_path):
    text = "{'loss': 0.5, 'epoch': 0.5}\n" + ("{'loss': 0.1, 'epoch': [\n" + f"{part}\n" * 38 + "]}\n") * 4
    before = time.process_time()
    tracemalloc.start()
    _, found, _ = read(tmp_path, text)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == {(1, "train"): {"loss": 0.5, "epoch": 0.5}}
    assert time.process_time() - before < 10
    assert most < 2e8


def bars(steps, total, lines):
    """Progress bars, with the line that was logged after some of them."""
    return "".join(f"\r {step}/{total} [00:01<00:09]{lines.get(step, '')}" for step in range(1, steps + 1))


def test_a_training_that_still_runs_has_the_steps_of_its_progress_bar(tmp_path):
    lines = {step: f"\n{{'loss': 0.5, 'reward': {step}, 'epoch': {step / 100}}}\n" for step in (1, 10, 20, 30)}
    _, found, told = read(tmp_path, bars(37, 100, lines))
    assert {step: values["reward"] for (step, _), values in found.items()} == {1: 1, 10: 10, 20: 20, 30: 30}
    assert told == []


@pytest.mark.parametrize("at", [20, 60, 85, 105, 119])
def test_a_bar_that_the_terminal_broke_is_put_together(tmp_path, at):
    shown = (
        "[losses/total_loss: 0.{0} | losses/policy_loss: -0.15 | losses/value_loss: 3.41]:  54%|█████     | 3{0}/6400 "
    )
    drawn = [f"{shown.format(place)}[14:30:53<3:14:06,  3.96s/it]" for place in (10, 20, 30)]
    text = "".join(f"{line[:at]}\n{line[at:]}[RANK 0] Collecting rollouts\n" for line in drawn)
    _, found, _ = read(tmp_path, text)
    assert [step for step, _ in found] == [310, 320, 330]
    assert [values["losses/total_loss"] for values in found.values()] == [0.1, 0.2, 0.3]
    assert {understood(values)["policy_loss"][0] for values in found.values()} == {"losses/policy_loss"}


def test_lines_that_come_later_than_their_bars_are_counted(tmp_path):
    """Standard output into a file is written in blocks, and the bars of standard error are not."""
    logged = [f"{{'loss': 0.5, 'reward': {step}, 'epoch': {round(step / 107, 2)}}}\n" for step in range(5, 107, 5)]
    _, found, told = read(tmp_path, f"{bars(107, 107, {})}\n{''.join(logged)}")
    assert [(step, values["reward"]) for (step, _), values in found.items()] == [(n, n) for n in range(5, 107, 5)]
    assert told == []


def test_a_first_step_that_is_logged_as_well_is_no_share_of_the_steps(tmp_path):
    steps = (1, 10, 20, 30, 40)
    logged = [f"{{'loss': 0.5, 'epoch': {step / 40}}}\n" for step in steps]
    _, found, told = read(tmp_path, f"{bars(40, 40, {})}\n{''.join(logged)}")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert "numbered from 1" in told[0]


@pytest.mark.parametrize("digits", [2, 6])
def test_a_console_that_was_resumed_within_an_epoch(digits, tmp_path):
    """Steps 60, 70, ..., 100 of 100, in two epochs; only the last progress bar is in it."""
    lines = [f"{{'loss': 0.5, 'epoch': {round(step / 50, digits)}}}" for step in range(60, 101, 10)]
    _, logged, told = read(tmp_path, "\n".join([*lines, "100%|#| 100/100 [01:00<00:00]\n"]))
    assert [step for step, _ in logged] == [60, 70, 80, 90, 100]
    assert not any("numbered" in sentence for sentence in told)


def test_epochs_that_cannot_tell_the_step_of_a_resumed_console(tmp_path):
    """A hundredth of an epoch is as many steps as the lines are apart."""
    lines = [f"{{'loss': 0.5, 'epoch': {round(step / 1000, 2)}}}" for step in range(500, 1001, 10)]
    _, logged, told = read(tmp_path, "\n".join([*lines, "100%|#| 1000/1000 [01:00<00:00]\n"]))
    assert [step for step, _ in logged][:2] == [1, 2]
    assert any("numbered from 1" in sentence for sentence in told)


PIPES = """\
This is what it shows:

Step | Training Loss | reward | rewards / exact / mean | kl | entropy
-- | -- | -- | -- | -- | --
1 | -0.012500 | 1.250000 | 0.250000 | nan | 0
2 | -0.025000 | 1.500000 | 0.500000 | 0.125000 | No Log
3 | -0.0125
"""
FRAMED = "\n".join(f"| {line} |" if "|" in line else line for line in PIPES.splitlines())
TABS = PIPES.replace(" | ", "\t")


def html(text):
    """The table as the file of a notebook has it."""
    found = ["<table>"]
    for number, line in enumerate(line for line in text.splitlines() if line[:1] in "S123" and line.count("|") == 5):
        tag = "td" if number else "th"
        found += [" <tr>", *(f"  <{tag}>{cell}</{tag}>" for cell in line.split(" | ")), " </tr>"]
    return '{\n "cells": [\n' + ",\n".join(f'   "{line}\\n"' for line in found) + "\n ]\n}\n"


@pytest.mark.parametrize("text", [PIPES, FRAMED, TABS, html(PIPES)], ids=["Markdown", "framed", "tabs", "notebook"])
def test_a_table(text, tmp_path):
    kind, found, told = read(tmp_path, text)
    assert (kind, told) == ("a table of logged numbers", [])
    first, second = found[1, "train"], found[2, "train"]
    assert first.pop("kl") != first["reward"]
    assert first == {"loss": -0.0125, "reward": 1.25, "rewards/exact/mean": 0.25, "entropy": 0.0}
    assert second == {"loss": -0.025, "reward": 1.5, "rewards/exact/mean": 0.5, "kl": 0.125}
    assert len(found) == 2


@pytest.mark.parametrize("line", ["| {} |", "<tr><td>{}</td></tr>", "{}"])
def test_text_in_place_of_a_number_is_said(line, tmp_path):
    """Not what stands where nothing was logged: the transformers Trainer writes "No Log" before the first loss."""
    between = {"| {} |": " | ", "<tr><td>{}</td></tr>": "</td><td>", "{}": "\t"}[line]
    rows = [["Step", "Training Loss", "reward", "kl"], ["1", "No Log", "0.5", "-"], ["2", "0.25", "oops", "0.1"]]
    rows += [[str(step), "0.25", "0.5", "n/a"] for step in (3, 4)]
    path = tmp_path / "table.md"
    path.write_text("".join(line.format(between.join(row)) + "\n" for row in rows))
    notes = ReaderNotes()
    found = list(read_log(Source.of(str(path)), LogNotes(notes)))
    assert [len(values) for _, _, values in found] == [1, 2, 2, 2]
    assert list(notes.sentences) == [f"{path}: 1 cell of reward (step 2: 'oops') is no number and is left out"]


@pytest.mark.parametrize("line", ["{}|{}|{}|{}", "|{}|{}|{}|{}|", "| {} | {} | {} | {} |", "{}\t{}\t{}\t{}"])
@pytest.mark.parametrize("empty", [{1}, {2}, {3}, {2, 3}, {1, 3}])
def test_a_row_with_empty_cells_anywhere_keeps_its_other_values(empty, line, tmp_path):
    names = ["step", "loss", "reward", "kl"]
    rows = [[str(step), *("" if place in empty else f"0.{place}" for place in (1, 2, 3))] for step in (1, 2)]
    rows += [["3", "0.1", "0.2", "0.3"]]
    _, found, told = read(tmp_path, "".join(f"{line.format(*row)}\n" for row in [names, *rows]))
    assert told == []
    for step in (1, 2):
        assert found[step, "train"] == {names[place]: place / 10 for place in (1, 2, 3) if place not in empty}
    assert found[3, "train"] == {"loss": 0.1, "reward": 0.2, "kl": 0.3}


def test_the_table_of_a_training_before_is_none_of_this_one(tmp_path):
    before = "Step\tTraining Loss\tValidation Loss\n5\t2.5\t3.5\n"
    _, found, told = read(tmp_path, f"{before}\n{TABS}")
    assert sorted(found) == [(1, "train"), (2, "train")]
    assert "2 runs one after another, of 2 lines (losses alone), 2 lines (rewards): the 2nd is read" in told[0]
    assert read(tmp_path, before)[1] == {(5, "train"): {"loss": 2.5}, (5, "eval"): {"loss": 3.5}}


@pytest.mark.parametrize(
    "text",
    [
        "step | who\n--|--\n1 | me\n",
        "| step | a | b |\n| 1 | 2 | 3 |\n",
        "a | b\n1 | 2\n",
        "step\treward\tkl\tprompt\n1\t0.5\t0.1\tx\n",
    ],
)
def test_other_tables_are_no_logs(text, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(text)
    assert kind_of(path) is None


def test_the_card_of_a_model_is_no_second_log_of_its_training(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlibrary_name: x\n---\n\n| Training Loss | Step |\n|:-:|:-:|\n| 0.5 | 10 |\n")
    assert kind_of(card) == "a table of logged numbers"
    (tmp_path / "trainer_state.json").write_text("{}")
    assert kind_of(card) is None


PRIME_OLD = """\
16:43:41 SUCCESS Step 13 | Time: 7.50s | Reward: 0.7500 | Throughput: 1800.4 tokens/s | Seq. Length: 104.9
16:43:41    INFO Starting orchestrator step 14
"""
PRIME_NEW = """\
\x1b[32m16:43:41 SUCCESS\x1b[0m Step 13 |     12s | Loss 0.0125 | Entropy 0.2500 | Grad. Norm 0.0500 | LR 1.00e-06 | Th
16:43:50 SUCCESS Step 13 |   1m 2s | Reward 0.7500 | Trainable 6/8 (75.0%) | Turns 1.0 | Truncation 12.5%
\t\t ╰─ math | Ratio 100.0% | Reward 0.2500 | Turns 1.0
"""
NEMO = """\
========================= Step 3/100 =========================
📊 Training Results:
  • Loss: -0.0125
  • Generation KL Error: 0.0010
  • Avg Reward: 0.7500
  • Mean Generation Length: 201.2500

⏱️  Timing:
  • Total step time: 35.50s
  • policy_training: 10.97s (30.7%)
"""
OPENRLHF = """\
(P pid=9) INFO ✨ Global step 4: {'policy_loss': -0.0125, 'reward': 0.75, 'actor_lr': 1e-06, 'timing': {'a': 1}}
"""
AREAL = """\
20260101-10:00:00 StatsLogger INFO: Epoch 1/10 Step 3/29 Train step 3/290 done.
╒════════════════════════════╤════════════╤══════════════════════════════╤════════════╕
│ ppo_actor/task_reward/avg  │ 7.5000e-01 │ ppo_actor/update/grad_norm   │ 5.0000e-02 │
├────────────────────────────┼────────────┼──────────────────────────────┼────────────┤
│ ppo_actor/update/lr        │ 1.0000e-06 │                              │            │
╘════════════════════════════╧════════════╧══════════════════════════════╧════════════╛
"""


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (PRIME_OLD, "prime-rl", {13: {"reward/mean": 0.75, "time/step": 7.5}}),
        (str(PRIME_OLD.splitlines()), "prime-rl", {13: {"reward/mean": 0.75, "time/step": 7.5}}),
        (
            PRIME_NEW,
            "prime-rl",
            {
                13: {
                    "loss/mean": 0.0125,
                    "entropy/all/mean": 0.25,
                    "optim/grad_norm": 0.05,
                    "optim/lr": 1e-6,
                    "train/agg/all/reward/mean": 0.75,
                    "train/agg/all/is_truncated/mean": 0.125,
                }
            },
        ),
        (
            NEMO,
            "NeMo-RL",
            {
                3: {
                    "train/loss": -0.0125,
                    "train/gen_kl_error": 0.001,
                    "train/reward": 0.75,
                    "train/mean_gen_tokens_per_sample": 201.25,
                    "timing/train/total_step_time": 35.5,
                }
            },
        ),
        (OPENRLHF, "OpenRLHF", {4: {"train/policy_loss": -0.0125, "train/reward": 0.75, "train/actor_lr": 1e-6}}),
        (
            AREAL,
            "AReaL",
            {
                2: {
                    "ppo_actor/task_reward/avg": 0.75,
                    "ppo_actor/update/grad_norm": 0.05,
                    "ppo_actor/update/lr": 1e-6,
                }
            },
        ),
    ],
    ids=["prime-rl", "prime-rl as a list", "prime-rl today", "NeMo-RL", "OpenRLHF", "AReaL"],
)
def test_consoles_in_words_and_blocks(text, name, expected, tmp_path):
    kind, found, _ = read(tmp_path, text)
    assert kind == f"the console log of {name}"
    assert found == {(step, "train"): values for step, values in expected.items()}


def test_the_rollouts_without_an_advantage_that_prime_rl_counts(tmp_path):
    counted = "16:43:40    INFO Detected 97/128 rollouts (gibberish=1, zero_advantage=96), enforced 96\n"
    later = PRIME_OLD.replace("Step 13", "Step 14")
    _, logged, _ = read(
        tmp_path, f"{counted}16:43:40 INFO Step 13 | Time: 7.50s | Loss: 0.5 | LR: 1e-6\n{PRIME_OLD}{later}"
    )
    assert logged[13, "train"] == {"loss/mean": 0.5, "optim/lr": 1e-6, "zero_advantage": 0.75} | {
        "reward/mean": 0.75,
        "time/step": 7.5,
    }
    assert "zero_advantage" not in logged[14, "train"]
    assert understood(logged[13, "train"], "prime-rl")["zero_variance_share"][0] == "zero_advantage"


def test_several_tables_of_a_step_of_areal_are_steps_of_their_own(tmp_path):
    head, _, table = AREAL.partition("\n")
    tables = (
        f"{head}\nStats (1/2):\n{table}Stats (2/2):\n{table}{head.replace('3/290', '4/290')}\nStats (1/1):\n{table}"
    )
    assert [step for step, _ in read(tmp_path, tables)[1]] == [2, 3, 4]


def test_blocks_of_nemo_rl_without_their_steps(tmp_path):
    block = NEMO.partition("\n")[2]
    assert [step for step, _ in read(tmp_path, block + block)[1]] == [1, 2]


RUNTIME = "{'train_runtime': 9.5, 'train_loss': 0.25, 'epoch': 0.3}\n"


@pytest.mark.parametrize(
    ("epoch", "tokens", "between", "is_another"),
    [
        (0.4, 99, RUNTIME, True),
        (0.4, 300, RUNTIME, False),
        (0.4, 301, RUNTIME, False),
        (0.4, 99, "", False),
        (0.2, 99, "", True),
        (0.2, 301, "", False),
    ],
)
def test_trainings_without_steps_are_told_apart_by_their_tokens(epoch, tokens, between, is_another, tmp_path):
    line = "{{'loss': 0.5, 'reward': {}, 'num_tokens': {}, 'epoch': {}}}\n"
    first = "".join(line.format(n / 8, 100 * n, n / 10) for n in range(1, 4))
    second = "".join(line.format(n / 4, tokens + n, epoch + n / 100) for n in range(5))
    _, found, told = read(tmp_path, first + between + second + RUNTIME)
    assert len(found) == (5 if is_another else 8)
    assert is_another is any("2 runs one after another, of 3 lines (rewards), 5 lines" in said for said in told)


@pytest.mark.parametrize(("again", "runs"), [("nan", ["1"]), ("0.2", ["1", "2"])])
def test_a_second_table_of_the_same_steps_is_of_the_same_run(tmp_path, again, runs):
    """A KL that is NaN in both has not changed; numbers that differ are of another run."""
    rows = [f"{step} | -0.28 | {13 - step} | nan" for step in range(1, 5)]
    more = [f"{step} | -0.28 | {13 - step} | {again} | 0.5" for step in range(1, 5)]
    heads = ("Step | Training Loss | reward | kl", "Step | Training Loss | reward | kl | completions / clipped_ratio")
    path = tmp_path / "log.txt"
    path.write_text("\n".join([heads[0], *rows, "", heads[1], *more, ""]))
    assert runs_of(path) == runs
