"""Lines that a loop prints again and again, with nothing that counts them, and what stands in for a counter."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.printed import pairs
from rolloutdoctor.importers.logs.repeated_lines import RepeatedBlocks, RepeatedLines
from rolloutdoctor.importers.logs.text_table import TextTable


def steps(lines):
    return [record.values for record in RepeatedLines().records(lines)]


def test_a_loss_is_a_step_with_the_rewards_before_it():
    lines = ["=== Epoch 1/4 ==="]
    for at in range(20):
        lines += [f"reward is {reward}" for reward in (0.5, 0.5, 1.5 if at else 0.5)]
        lines += ["is result truncated? False", f"grpo_loss is 0.{at} and kl is 0.25"]
    found = steps(lines)
    assert len(found) == 20
    assert found[0] == {"grpo_loss": 0.0, "kl": 0.25, "reward": 0.5, "reward_std": 0.0}
    assert found[1]["reward"] == pytest.approx(2.5 / 3)
    assert found[1]["reward_std"] == pytest.approx(1 / 3**0.5)


@pytest.mark.parametrize(("losses", "numbered", "count"), [(20, 5, 20), (19, 0, 0), (20, 6, 0)])
def test_few_losses_or_many_lines_with_more_in_them_are_none(losses, numbered, count):
    lines = [f"loss/total {at}.5" for at in range(losses)] + [f"step {at} of loss: 0.5 today" for at in range(numbered)]
    assert len(steps(lines)) == count


def test_a_sentence_with_a_loss_in_it_is_no_step():
    assert not steps([f"the loss is 0.{at} (best so far)" for at in range(30)])


def cells(*outputs):
    shown = [[{"output_type": "stream", "name": "stdout", "text": text}] for text in outputs]
    code = [{"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "", "outputs": one} for one in shown]
    return json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def block(at):
    rows = f"rewards/mean:\t{at / 10}\t<---- higher is better", f"objective/kl:\t{at / 5}\t<----"
    return "\n".join((f"-------- STEP {at} --------", *rows, "", ""))


@pytest.mark.parametrize(("lengths", "read"), [((20, 20), True), ((20, 5), False)])
def test_blocks_of_two_runs_of_a_notebook_are_no_responses(lengths, read, tmp_path):
    from rolloutdoctor.importers.logs.notebook import NotebookOutputs
    from rolloutdoctor.importers.logs.notes import LogNotes
    from rolloutdoctor.io.locations.paths import Source

    table = "| Step | Training Loss |\n|---|---|\n" + "".join(f"| {at} | 0.5 |\n" for at in range(3))
    path = tmp_path / "ppo.ipynb"
    path.write_text(cells(table, *("".join(map(block, range(length))) for length in lengths)))
    notes = LogNotes(lambda sentence: None)
    names = {name for _, _, values in NotebookOutputs().read(Source(str(path), path.name), notes) for name in values}
    assert ("objective/kl" in names) is read


def blocks(*names, count=5):
    return [line for at in range(count) for line in (*(f"{name}: {at}.5" for name in names), "-" * 99)]


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (blocks("objective/kl", "ppo/returns/mean"), 5),
        (["trainable: 251116800", *blocks("objective/kl", "ppo/returns/mean"), "toxicity: 0.5"], 5),
        (blocks("objective/kl", "ppo/returns/mean", count=4), 0),
        (blocks("objective/kl"), 0),
        (blocks("apples", "pears"), 0),
        ([f"the objective/kl: {at} of this, ppo/returns/mean: {at}" for at in range(9)], 0),
    ],
)
def test_blocks_of_the_same_names_are_steps(lines, count):
    found = [record.values for record in RepeatedBlocks().records(lines)]
    assert found == [{"objective/kl": at + 0.5, "ppo/returns/mean": at + 0.5} for at in range(count)]


def test_blocks_come_before_a_table_of_losses(tmp_path):
    from rolloutdoctor.importers.logs.notebook import NotebookOutputs
    from rolloutdoctor.importers.logs.notes import LogNotes
    from rolloutdoctor.io.locations.paths import Source

    table = "| Step | Training Loss |\n|---|---|\n" + "".join(f"| {at} | 0.5 |\n" for at in range(40))
    path = tmp_path / "ppo.ipynb"
    path.write_text(cells(table, *("\n".join(one) + "\n" for one in [blocks("objective/kl", "ppo/returns/mean")])))
    notes = LogNotes(lambda sentence: None)
    names = {name for _, _, values in NotebookOutputs().read(Source(str(path), path.name), notes) for name in values}
    assert names == {"objective/kl", "ppo/returns/mean"}


def test_rewards_may_be_written_as_texts():
    line = "[step 1/200] correct=3/4 rewards=['0.80', '0.80', '0.01', '0.79'] loss=-0.0051"
    assert float(dict(pairs(line))["rewards"]) == pytest.approx(0.6)


@pytest.mark.parametrize(("line", "steps"), [("2 0.5 - 0.25", [1, 2]), ("5100 - 1500 = 3600", [1])])
def test_a_sum_in_a_response_is_no_row_of_the_table_above_it(line, steps):
    lines = ["Step Loss Reward KL", "1 0.5 1.0 0.25", line]
    names = "step", "loss", "reward", "kl"
    wide = [" ".join((*names, "length")), "1 0.5 1.0 0.25 9", line] if line.startswith("5100") else lines
    assert [record.step for record in TextTable().records(wide)] == steps


def test_a_block_is_of_the_step_that_it_names(tmp_path):
    blocks = [f"Step: {step}\nMean Return (Reward): 0.{step}\nkl: 0.01\n" for step in range(3, 9)]
    found = [*RepeatedBlocks().records("".join(blocks).splitlines())]
    assert [record.step for record in found] == [*range(3, 9)]
    assert found[0].values == {"mean_return_(reward": 0.3, "kl": 0.01}


def test_a_bar_above_each_block_counts_it():
    lines = ["score: 2.5"]
    for step in range(1, 7):
        lines += [f"{step}it [00:01, 1.0s/it]", "objective/kl: 29.5", f"ppo/returns/mean: 0.{step}"]
    assert [record.step for record in RepeatedBlocks().records([*lines, "9it [00:21, 1.9s/it]"])] == [*range(1, 7)]
    skipping = [line.replace("3it [", "4it [") for line in lines]
    assert {record.step for record in RepeatedBlocks().records(skipping)} == {None}


def test_sentences_about_scores_count_nothing():
    sentence = "The student needs a score of 93, as the total score required is 340."
    lines = [f"{sentence}\ngrpo_loss is 0.{n} and kl is 0.0{n}\n[step {n}] steps=20{n % 3}" for n in range(10, 34)]
    lines = [line for block in lines for line in block.split("\n")]
    assert len([*RepeatedLines().records(lines)]) == 24
    # A step in each line with a metric is another form.
    counted = [line.replace("steps=", "reward=") for line in lines]
    assert not [*RepeatedLines().records(counted)]


def test_blocks_of_scores_alone_are_of_evaluations():
    lines = [f"Average Score: {n}.5/100\nJSON: {n}/10" for n in range(10, 20)]
    lines = [line for block in lines for line in block.split("\n")]
    assert not [*RepeatedBlocks().records(lines)]
    assert len([*RepeatedBlocks().records([line.replace("Average Score", "Reward") for line in lines])]) == 10


def test_several_losses_on_a_line_each_are_of_one_block(tmp_path):
    block = ("Learning iteration {n}/300", "Value loss: 0.5", "Surrogate loss: 0.1", "Mean reward: 0.{n}")
    lines = [line.format(n=n) for n in range(10, 22) for line in block]
    assert not [*RepeatedLines().records(lines)]
    path = tmp_path / "out.log"
    path.write_text("\n".join(lines))
    report = rd.check(path)
    assert report.input.steps == 12
    assert {vital.name: (vital.first, vital.last) for vital in report.vitals}["reward"] == (0.1, 0.21)
