"""What readers left out is said, once, with every result in which a number might have been another one."""

import json

import pytest

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.reader_notes import ReaderNotes

CSV = "step,loss,reward,grad_norm,kl\n" + "".join(f"{step},0.{step:02},0.5,1.0,0.1\n" for step in range(1, 13))


def test_each_kind_is_one_sentence():
    notes = ReaderNotes()
    for line in (3, 7):
        notes.no_number("a.csv", "loss", f"line {line}", "'oops'")
    notes.no_number("a.csv", "reward", "line 2", "'n/k'")
    notes.numbers("a.csv", ["loss"])
    notes.repeated("a.csv", StepKey(3, "train"), "kl", 0.5, 0.25)
    notes.repeated("a.csv", StepKey(4, "eval"), "kl", 0.5, 0.25)
    notes("anything")
    notes("anything")
    assert notes.sentences == (
        "anything",
        "a.csv: 2 cells of loss (line 3: 'oops') are no numbers and are left out",
        "a.csv: not read, as no cell of reward is a number (line 2: 'n/k')",
        "a.csv: steps 3, 4 (eval) are there twice with other values (kl at step 3 is 0.5 and then 0.25; the last "
        "counts): a run that was resumed?",
    )
    assert dict(notes.unread) == {"reward": "'n/k' in a.csv, line 2"}


@pytest.mark.parametrize(
    ("name", "first", "last", "is_said"),
    [
        ("time/step", 98.0, 289.5, False),
        ("step_time", 98.0, 289.5, False),
        ("timeliness", 98.0, 289.5, True),
        ("accuracy", 0.65, 65.6, False),
        ("accuracy", 0.65, 65.7, True),
        ("accuracy", 65, 0.65, False),
        ("reward", 0.0, 0.5, True),
    ],
)
def test_times_and_percentages_of_a_step_are_no_run_that_was_resumed(name, first, last, is_said):
    notes = ReaderNotes()
    notes.repeated("a.log", StepKey(3, "train"), name, first, last)
    assert bool(notes.sentences) is is_said


FORMS = {
    "log.csv": CSV,
    "log.jsonl": "".join(
        json.dumps({"step": step, "loss": step / 8, "reward": 0.5, "grad_norm": 1.0, "kl": 0.1}) + "\n"
        for step in range(1, 13)
    ),
    "trainer_state.json": json.dumps(
        {
            "log_history": [
                {"step": step, "loss": step / 8, "reward": 0.5, "grad_norm": 1.0, "kl": 0.1} for step in range(1, 13)
            ]
        }
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("text", ["soon", "1,5", "NaN?"])
def test_a_cell_that_is_no_number_is_said(rolloutdoctor, tmp_path, name, text):
    if name == "log.csv":
        changed = FORMS[name].replace("5,0.05,0.5", f'5,0.05,"{text}"')
    else:
        parts = FORMS[name].split('"reward": 0.5')
        changed = '"reward": 0.5'.join(parts[:5]) + f'"reward": "{text}"' + '"reward": 0.5'.join(parts[5:])
    (tmp_path / name).write_text(changed)
    notes = json.loads(rolloutdoctor("check", tmp_path / name, "--format", "json").stdout)["notes"]
    assert any("1 cell of reward (" in note and repr(text) in note for note in notes)


@pytest.mark.parametrize("name", FORMS)
def test_a_column_of_text_is_said_and_is_no_absent_one(rolloutdoctor, tmp_path, name):
    changed = FORMS[name].replace(",0.5,", ",half,").replace('"reward": 0.5', '"reward": "half"')
    (tmp_path / name).write_text(changed)
    found = json.loads(rolloutdoctor("check", tmp_path / name, "--format", "json").stdout)
    assert any("no cell of reward is a number" in note and "'half'" in note for note in found["notes"])
    lacking = [one for one in found["skipped"] if "no metric for the reward" in one["reason"]]
    assert lacking
    assert all("logged, but not as a number: reward is 'half'" in one["reason"] for one in lacking)
    assert all(one["remedy"].startswith("log reward as a number") for one in lacking)


def test_a_reward_that_is_text_is_no_log_of_losses_alone(rolloutdoctor, tmp_path):
    """Of supervised fine-tuning nothing is checked; beside a reward the loss is one of reinforcement learning."""
    lines = [{"step": step, "loss": step / 8, "grad_norm": 0.1, "reward": "half"} for step in range(12)]
    for name, left_out in (("text", ()), ("without", ("reward",))):
        kept = ({key: x for key, x in line.items() if key not in left_out} for line in lines)
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    said = [rolloutdoctor("check", tmp_path / f"{name}.jsonl").stdout for name in ("text", "without")]
    assert ["not checked" in text for text in said] == [False, True]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("value", "is_said"), [("0.75", True), ("0.5", False)])
def test_a_step_twice_is_said_where_its_values_differ(rolloutdoctor, tmp_path, name, value, is_said):
    again = {
        "log.csv": lambda text: f"{text}3,0.03,{value},1.0,0.1\n",
        "log.jsonl": lambda text: text + text.splitlines(keepends=True)[2].replace("0.5", value),
        "trainer_state.json": lambda text: json.dumps(
            {"log_history": [*(rows := json.loads(text)["log_history"]), {**rows[2], "reward": float(value)}]}
        ),
    }[name]
    (tmp_path / name).write_text(again(FORMS[name]))
    notes = json.loads(rolloutdoctor("check", tmp_path / name, "--format", "json").stdout)["notes"]
    assert (
        any("step 3 is there twice" in note and "(reward at step 3 is 0.5 and then 0.75" in note for note in notes)
        == is_said
    )


def test_two_logs_with_two_values_of_a_step(rolloutdoctor, tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    later = [f"{step},0.{step:02},0.5,1.0,0.1\n" for step in range(13, 24)]
    (tmp_path / "b.csv").write_text("step,loss,reward,grad_norm,kl\n12,0.99,0.5,1.0,0.1\n" + "".join(later))
    found = rolloutdoctor("check", tmp_path / "a.csv", tmp_path / "b.csv", "--format", "json")
    notes = json.loads(found.stdout)["notes"]
    assert any(
        "step 12 is there twice with other values (loss at step 12 is 0.12 and then 0.99" in note for note in notes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "--format", "concise"],
        ["check", "--format", "markdown"],
        ["check", "--format", "junit"],
        ["check", "--format", "github"],
        ["check", "--list", "RDM003"],
        ["info"],
        ["identify"],
        ["why", "--metric", "loss"],
        ["report", "-o", "page.html"],
        ["plot", "overview", "-o", "plot.svg"],
    ],
    ids=" ".join,
)
def test_every_command_says_it(rolloutdoctor, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text(CSV + "3,0.5,0.5,1.0,0.1\n")
    command, *options = words
    paths = ["overview", "log.csv"] if command == "plot" else ["log.csv"]
    found = rolloutdoctor(command, *paths, *[word for word in options if word != "overview"])
    page = (tmp_path / "page.html").read_text() if command == "report" else ""
    said = " ".join((found.stdout + found.stderr + page).split()).replace("\\", "")
    assert "twice with other values" in said, said
