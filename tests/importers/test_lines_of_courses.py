"""Lines of loops that students write: rewards of a step, and the accuracy of its evaluation, a share or in percent."""

import pytest

import rolloutdoctor as rd


def accuracy(step):
    return round(10 + 0.2 * step, 1)


EVALUATIONS = {
    "below": lambda step: f"eval accuracy: {accuracy(step)}%\n",
    "correct": lambda step: f"Percentage of correct examples: {accuracy(step)}%\n",
    "with the step": lambda step: f"Step {step}: validation accuracy = {accuracy(step)}%\n",
    "at the step": lambda step: f"Eval accuracy at step {step}: {accuracy(step) / 100:.4f}\n",
    "after the step": lambda step: f"Validation accuracy after step {step} = {accuracy(step)}%\n",
}
LINES = {
    "a colon": lambda step: f"Step {step}: train/reward {0.2 + 0.005 * step:.4f}, loss {0.01 * (-1) ** step:.4f}\n",
    "bars": lambda step: (
        f"Step {step} | Mean reward: {0.2 + 0.005 * step:.4f} | Std: 0.4{step % 10} | Format: 0.8 | Answer: 0.3 | "
        f"Loss: {0.01 * (-1) ** step:.4f}\n"
    ),
    "a step above": lambda step: (
        f"=== GRPO step {step}/40 ===\nMean reward: {0.2 + 0.005 * step:.4f}\nLoss: {0.01 * (-1) ** step:.4f}\n"
    ),
}


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("line", LINES)
def test_the_accuracy_of_an_evaluation_is_of_its_step(tmp_path, line, evaluation):
    path = tmp_path / "train.log"
    steps = range(1, 41)
    path.write_text(
        "".join(LINES[line](one) + (EVALUATIONS[evaluation](one) if one % 10 == 0 else "") for one in steps)
    )
    vitals = {vital.name: vital for vital in rd.check(path).vitals}
    assert vitals["accuracy"].steps == (10, 20, 30, 40)
    assert vitals["accuracy"].series == pytest.approx([accuracy(step) / 100 for step in (10, 20, 30, 40)])
    assert (vitals["reward"].steps, vitals["reward"].series[0]) == (tuple(steps), 0.205)


def test_steps_of_responses_above_lines_count_nothing(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"Step {1 + step % 2}\nreward: 0.{step % 9}\nloss: 0.{step}\n" for step in range(1, 41)))
    assert any("nothing counts the lines" in note for note in rd.check(path).notes)


def test_rewards_of_responses_below_a_step_are_averaged(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"Step {step}\nreward: 0.5\nreward: 0.25\nloss: 0.{step}\n" for step in range(1, 41)))
    (reward,) = (vital for vital in rd.check(path).vitals if vital.name == "reward")
    assert {*reward.series} == {0.375}


def test_a_loop_with_bars_is_not_the_console_of_prime_rl(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"Step {step} | Loss: 0.0{step} | Reward: 0.{step}\n" for step in range(1, 9)))
    assert any("no known trainer uses these metric names" in note for note in rd.check(path).notes)


def test_a_response_that_speaks_of_steps_has_no_accuracy(tmp_path):
    path = tmp_path / "train.log"
    said = "Step 1: the accuracy of the scale at step 2: 7\nStep 2: accuracy = 3\n"
    path.write_text("".join(LINES["a colon"](step) + (said if step % 10 == 0 else "") for step in range(1, 41)))
    assert "accuracy" not in {vital.name for vital in rd.check(path).vitals}


@pytest.mark.parametrize(
    "line",
    [
        "step {step} -- mean_reward: (-0.{step:02d}) -- decoding 2 samples:\n\t0: 5 -> 7 -- Reward: 2.85   \n\n",
        "Step {step} | reward: (-0.{step:02d}) | loss: (0.5)\n",
        "step {step} - reward=(-0.{step:02d}), kl=(0.125)\n",
    ],
    ids=["with samples below", "bars", "commas"],
)
def test_a_number_in_brackets_is_read(tmp_path, line):
    path = tmp_path / "train.log"
    path.write_text("".join(line.format(step=step) for step in range(1, 41)))
    (reward,) = (vital for vital in rd.check(path).vitals if vital.name == "reward")
    assert reward.series == pytest.approx([-step / 100 for step in range(1, 41)])


def test_several_numbers_in_brackets_are_no_reward(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {step} - loss=0.5, kl=0.1, reward=(0.{step}, 0.5)\n" for step in range(1, 41)))
    assert not [vital for vital in rd.check(path).vitals if vital.name == "reward"]
