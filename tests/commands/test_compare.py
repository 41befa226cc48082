"""`compare`: rows joined and compared with each other, everything else side by side."""

import json

import numpy as np
import pytest
from engine.runs import TRL, random_columns, small, write

import rolloutdoctor as rd
from rolloutdoctor.commands.compare.query import compare
from rolloutdoctor.commands.compare.words import RENDERERS, verdict
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.table import ALIASES
from rolloutdoctor.views.style import Style


@pytest.fixture
def compared(tmp_path):
    def of(a, b, *, metadata=(TRL, TRL), by=None, row_group_size=None, **options):
        paths = []
        for name, columns, said in zip("ab", (a, b), metadata, strict=True):
            paths.append(tmp_path / f"{name}.parquet")
            write(paths[-1], columns, said)
        runs = [open_run([path], aliases=ALIASES) for path in paths]
        return compare(*runs, CheckOptions(**options), by=by, names=("a", "b"))

    return of


def columns():
    found = random_columns(3)
    found["response_ids"] = [list(range(len(row))) for row in found["policy_log_probs"]]
    found["prompt"] = [f"prompt {group}" for group in found["group_id"]]
    return found


@pytest.mark.slow
def test_a_run_is_equal_to_itself(compared):
    found = compared(columns(), columns())
    assert not found.differs
    assert found.first is None
    assert found.joined == 72
    assert [(one.quantity, one.compared, one.equal) for one in found.matched[:3]] == [
        ("prompt", 72, 72),
        ("response", 72, 72),
        ("response_mask", 72, 72),
    ]
    assert verdict(found) == "All 72 rows in 3 steps are equal in both runs."


@pytest.mark.slow
def test_the_order_of_rows_does_not_matter(compared):
    mine = columns()
    order = np.random.default_rng(0).permutation(72)
    other = {name: [values[row] for row in order] for name, values in mine.items()}
    found = compared(mine, other)
    assert not found.differs


@pytest.mark.slow
def test_the_first_difference_is_the_first_in_causal_order_of_the_earliest_step(compared):
    mine, other = columns(), columns()
    other["reward"] = list(other["reward"])
    other["reward"][30] += 1.0
    row = next(row for row in range(30, 48) if len(other["old_log_probs"][row]) > 3)
    other["old_log_probs"][row] = other["old_log_probs"][row].copy()
    other["old_log_probs"][row][2] -= 0.5
    other["response_ids"][60] = [999, *other["response_ids"][60][1:]]
    found = compared(mine, other)
    first = found.first
    assert (first.step, first.quantity, first.sample_id, first.token) == (1, "old_log_probs", f"r{row}", 2)
    assert first.b == pytest.approx(first.a - 0.5)
    assert (first.rows, first.of) == (1, 24)
    counts = {one.quantity: (one.compared, one.equal) for one in found.matched}
    # What follows another response is not compared.
    assert counts == {
        "prompt": (72, 72),
        "response": (72, 71),
        "response_mask": (71, 71),
        "old_log_probs": (71, 70),
        "ref_log_probs": (71, 71),
        "reward": (71, 70),
        "policy_log_probs": (71, 71),
    }
    assert next(one for one in found.matched if one.quantity == "reward").largest == 1.0
    assert "The runs diverge at step 1: old_log_probs differs in 1 of 24 rows" in verdict(found)
    assert "In that step prompt, response and response_mask are equal." in verdict(found)


@pytest.mark.slow
def test_another_length_is_another_response(compared):
    mine, other = columns(), columns()
    row = next(row for row in range(24) if len(other["response_ids"][row]) > 2)
    for name in ("response_ids", "response_mask", "policy_log_probs", "old_log_probs", "ref_log_probs"):
        other[name][row] = other[name][row][:-1]
    found = compared(mine, other)
    assert (found.first.quantity, found.first.sample_id, found.first.token) == ("response", f"r{row}", None)
    assert (found.first.a, found.first.b) == (None, None)


@pytest.mark.slow
def test_nan_equals_nan(compared):
    assert compared(small(), small()).first is None


@pytest.mark.slow
def test_other_options_show_in_the_loss_of_equal_rows(compared):
    other = TRL | {"config": TRL["config"] | {"beta": 0.25}}
    found = compared(columns(), columns(), metadata=(TRL, other))
    assert [(pair.name, pair.a.value, pair.b.value) for pair in found.options] == [("beta", 0.5, 0.25)]
    assert (found.first.quantity, found.first.step, found.first.sample_id) == ("loss", 0, None)
    assert (found.matched[-1].quantity, found.matched[-1].unit, found.matched[-1].equal) == ("loss", "step", 0)
    assert "other options, not other data" in verdict(found)
    assert "The objectives differ" in " ".join(found.notes)


@pytest.mark.slow
def test_rows_that_share_nothing_are_compared_by_step(compared):
    other = columns()
    other["sample_id"] = [f"x{name}" for name in other["sample_id"]]
    other["step"] = [step + 1 for step in other["step"]]
    found = compared(columns(), other)
    assert (found.steps, found.joined) == ((2, 1, 1), 0)
    assert "share no rows" in verdict(found)
    assert "No row of A has its step and sample_id in B." in found.notes
    reward = next(one for one in found.quantities if one.name == "reward")
    assert reward.steps == (1, 2)
    rewards = np.array(columns()["reward"]).reshape(3, 24).mean(axis=1)
    assert reward.values == tuple((rewards[step], rewards[step - 1]) for step in (1, 2))


@pytest.mark.slow
def test_what_is_not_comparable_is_said(compared):
    mine, other = small(), small()
    del other["ref_log_probs"]
    found = compared(mine, other, metadata=(None, None))
    assert "Not compared, as only one run has them: ref_log_probs." in found.notes
    assert any("rows of one length are taken to be one response" in note for note in found.notes)
    assert any("Nothing is recomputed for A" in note for note in found.notes)
    del other["sample_id"]
    assert "Rows cannot be joined: a run has no column sample_id." in compared(mine, other).notes


@pytest.mark.parametrize(("factor", "words"), [(32, "A is 32 times that of B"), (1 / 4, "B is 4 times that of A")])
def test_a_whole_factor_between_two_logs_is_said(tmp_path, factor, words):
    """A count of micro-batches or ranks: neither counts nor a learning rate of two digits are one, nor 31.9 times."""
    runs = []
    for name, times, off in (("a", factor, 31.9), ("b", 1, 1)):
        path = tmp_path / f"{name}.jsonl"
        lines = [
            {"step": step, "train/loss": times * x, "train/grad": off * x, "lr": 1e-5 * off, "tokens": 64 * times}
            for step, x in enumerate((0.0123456789, -0.0345678912))
        ]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        runs.append(rd.open(path))
    said = verdict(compare(*runs, CheckOptions(), names=("a", "b")))
    assert f"train/loss of {words} in every step (2 steps): a whole number" in said
    assert said.count("times") == 1


def test_a_log_has_steps_and_no_rows(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"step": {step}, "reward": 0.{step}, "kl": 0.1}}\n' for step in range(4)))
    found = compare(rd.open(path), rd.open(path), CheckOptions(), names=("a", "b"))
    text = RENDERERS["full"](found, Style(width=100, color=False, unicode=True, verbose=False))
    assert text.count("4 steps logged, no rollouts") == 2


@pytest.mark.slow
def test_parts(compared):
    found = compared(small(), small(reward=[1.0, 1.0, 1.0, None]), by="reward")
    values = {part.name: part.values for part in found.parts}
    assert list(values) == ["0", "1", "none"]
    assert values["1"]["rows"] == (3, 3)
    assert values["1"]["response_length"] == (pytest.approx(1.0), pytest.approx(5 / 3))
    assert values["0"]["rows_share"] == (0.25, 0)
    by_step = compared(small(), small(reward=[1.0, 1.0, 1.0, 1.0]), by="reward_std")
    assert [part.name for part in by_step.parts] == ["0"]
    assert by_step.parts[0].values["reward_std"] == (pytest.approx(np.std([1, 0, 1, 1])), 0)
    with pytest.raises(UsageError, match="did you mean 'reward_std'"):
        compared(small(), small(), by="reward_sdt")
    many = columns()
    many["reward"] = [float(row) for row in range(72)]
    assert len(compared(many, many, by="reward").parts) == 10


@pytest.mark.slow
def test_every_format_renders(compared):
    found = compared(columns(), small(), by="length")
    style = Style(width=80)
    for name, render in RENDERERS.items():
        text = render(found, style)
        assert text.endswith("\n"), name
    body = json.loads(RENDERERS["json"](found, style))
    assert body["steps"] == {"both": 1, "only_a": 2, "only_b": 0}
    assert body["differs"] is True
    assert all(len(line) <= 80 for line in RENDERERS["full"](found, style).splitlines())
    assert found.frame().columns == ["quantity", "origin", "split", "step", "a", "b", "difference"]
