"""What a text says of the steps of its run beside its numbers: how long it is, and how far its lines are apart."""

import pytest

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import read_log
from rolloutdoctor.io.locations.paths import Source

STEPS = "".join(f"step {n} | loss: 0.{n:02} | reward: 0.5\n" for n in range(1, 13))


PAIRS = "".join(f"loss: 0.{n} | reward: 0.5 | kl: 0.1\n" for n in range(8))


def read_log_of(path, text):
    """Steps in their order, and the notes."""
    path.write_text(text)
    notes = LogNotes()
    return [step for step, _, _ in read_log(Source.of(str(path)), notes)], notes


def dicts(first=1):
    rows = [
        {"loss": 0.1 * n, "grad_norm": 0.5, "learning_rate": 1e-6, "reward": 0.5, "epoch": round(0.1 * n, 2)}
        for n in range(first, first + 8)
    ]
    return "".join(f"{row}\n" for row in rows)


@pytest.mark.parametrize(
    ("line", "length"),
    [
        ("Steps : 30", 30),
        ("Num steps: 30", 30),
        ("  Total optimization steps = 1,250", 1250),
        ("Total training steps: 250", 250),
        ("  * max_steps: 12", 12),
        # Below the last step it counts something else.
        ("Steps: 11", None),
        ("Steps: 30\nSteps: 40", None),
        ("Warmup steps: 30", None),
        ("steps: 30 done", None),
    ],
)
def test_the_length_that_a_line_says(tmp_path, line, length):
    _, notes = read_log_of(tmp_path / "a.log", f"{line}\n{STEPS}")
    assert notes.total_steps == length


@pytest.mark.parametrize(
    ("head", "lines", "steps"),
    [
        ("{'logging_steps': 10, 'beta': 0.04}", dicts(), range(10, 90, 10)),
        ("logging_steps=10,", dicts(), range(10, 90, 10)),
        # Two values, or lines that do not begin at the first, leave it open.
        ("logging_steps=10,\nlogging_steps=5,", dicts(), range(1, 9)),
        ("logging_steps=10,", dicts(first=2), range(1, 9)),
        ("logging_steps = 10\nmax_steps: 80", PAIRS, range(10, 90, 10)),
        ("logging_steps = 10\nmax_steps: 90", PAIRS, range(1, 9)),
    ],
)
def test_lines_are_as_far_apart_as_the_options_say(tmp_path, head, lines, steps):
    found, _ = read_log_of(tmp_path / "a.log", f"{head}\n{lines}")
    assert found == [*steps]
