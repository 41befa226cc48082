"""Many logs of one run are compared and joined in time that follows their numbers, not their pairs."""

import random

import pytest

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io import metrics
from rolloutdoctor.io.metrics import LoggedMetrics, check_one_log, joined
from rolloutdoctor.results.errors import SeveralRunsError

STEPS = range(1, 21)


def log(values):
    return LoggedMetrics({StepKey(step, "train"): found for step, found in values.items()})


def of_one_metric(number):
    return log({step: {f"loss_{number}": step / 7} for step in STEPS})


def resumed(number):
    return log({step: {"loss": step / 7} for step in range(10 * number, 10 * number + 10)})


def written_twice(number):
    return log({step: {"loss": step / 7} for step in STEPS})


def of_one_run(number):
    return log({step: {"loss": step / 7 + number} for step in STEPS})


@pytest.fixture
def compared(monkeypatch):
    """Pairs of logs that are compared."""
    pairs, before = [], metrics.contradiction

    def counting(one, other):
        pairs.append((one, other))
        return before(one, other)

    monkeypatch.setattr(metrics, "contradiction", counting)
    return pairs


@pytest.mark.parametrize("make", [of_one_metric, resumed, written_twice])
def test_logs_that_agree_are_not_compared_in_pairs(make, compared):
    check_one_log([(str(number), make(number)) for number in range(200)])
    assert len(compared) == 0


def test_the_first_of_many_other_runs_is_named(compared):
    tables = [(str(number), of_one_run(number)) for number in range(200)]
    with pytest.raises(SeveralRunsError, match=r"^0 and 1 are not of one run: loss at step 1 is 0.142857 in the first"):
        check_one_log(tables)
    assert len(compared) == 1


def test_a_rounded_log_is_compared_with_those_that_are_not(compared):
    whole = log({step: {"loss": step / 7} for step in STEPS})
    rounded = log({step: {"loss": round(step / 7, 3)} for step in STEPS})
    other = log({step: {"loss": round(step / 7 + 0.002, 3)} for step in STEPS})
    check_one_log([("a", whole), ("b", whole), ("c", rounded)])
    assert len(compared) == 2
    with pytest.raises(SeveralRunsError, match=r"^a and d"):
        check_one_log([("a", whole), ("c", rounded), ("d", other)])


@pytest.mark.parametrize("seed", range(5))
def test_several_logs_joined_are_those_joined_one_by_one(seed):
    draw = random.Random(seed)
    names = ["loss", "reward", "kl"]
    tables = [
        log(
            {
                step: {name: round(draw.random(), 2 + number) for name in draw.sample(names, draw.randint(1, 3))}
                for step in draw.sample(STEPS, 12)
            }
        )
        for number in range(4)
    ]
    wanted = {}
    for table in tables:
        for key in table.steps():
            wanted.setdefault(key, {}).update(table.at(key))
    whole = joined(tables)
    assert {key: dict(whole.at(key)) for key in whole.steps()} == wanted
    one_by_one = LoggedMetrics()
    for table in reversed(tables):
        one_by_one = one_by_one.completed_by(table)
    assert {key: one_by_one.at(key) for key in one_by_one.steps()} == wanted
    for name in names:
        assert {*whole.digits().get(name, ())} >= {*tables[-1].digits().get(name, ())}


def test_what_is_the_same_is_looked_at_no_further(monkeypatch):
    """Of one log, or of two that say the same, nobody asks what it was rounded to."""
    monkeypatch.setattr(metrics, "digits_by_name", lambda values: pytest.fail("looked for digits"))
    tables = [("a", written_twice(0)), ("b", written_twice(0))]
    check_one_log(tables)
    check_one_log(tables[:1])
    assert list(metrics.differences(tables[0][1], tables[1][1])) == []
