"""The rules inside a real TRL training: what they find is among its metrics, and nothing of the training changes."""

import warnings

import pytest
from recorders.trl_runs import make_trainer, torch

from rolloutdoctor.callbacks import trl as callback
from rolloutdoctor.callbacks.trl import watch
from rolloutdoctor.recorders.trl import record
from rolloutdoctor.results.errors import UsageError

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


class Clock:
    """Goes on by a second whenever it is read, so that no test depends on how busy the machine is."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(callback, "time", found)
    return found


def ones(completions, **kwargs):
    return [1.0] * len(completions)


def trained(folder, *, watched=True, steps=6, broken=None, rewards=None, **options):
    folder.mkdir()
    trainer = make_trainer(folder, steps=steps, **({"rewards": rewards} if rewards else {}))
    recorder = record(trainer, folder / "run.parquet")
    watching = watch(trainer, recorder, **{"share": 1.0, **options}) if watched else None
    if broken is not None:
        watching._follower.look = broken
    trainer.train()
    assert not recorder.recording
    return trainer, watching


def entries(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_findings_are_among_the_metrics(tmp_path):
    # Every group has equal rewards: the KL term is all there is.
    trainer, watching = trained(tmp_path / "run", rewards=[ones])
    assert watching.steps >= 2
    last = entries(trainer)[-1]
    assert last["rolloutdoctor/steps"] >= 2
    found = {one.code: one for one in watching.report.findings}
    assert "RDA011" in found
    assert last["rolloutdoctor/RDA011"] == float(found["RDA011"].severity)
    assert last["rolloutdoctor/RDA011/dead_share"] == 1.0
    assert last["rolloutdoctor/worst"] == float(watching.report.worst())
    assert watching.watching


@pytest.mark.slow
def test_training_is_bit_identical(tmp_path):
    plain, _ = trained(tmp_path / "plain", watched=False)
    watched, watching = trained(tmp_path / "watched")
    assert watching.steps
    ours, theirs = watched.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for one, other in zip(entries(watched), entries(plain), strict=True):
        kept = {name: value for name, value in one.items() if not name.startswith("rolloutdoctor/")}
        timed = ("step_time", "time", "second")
        assert {n: v for n, v in kept.items() if not any(word in n for word in timed)} == {
            n: v for n, v in other.items() if not any(word in n for word in timed)
        }


@pytest.mark.slow
def test_it_stops_only_if_asked(tmp_path):
    trainer, watching = trained(tmp_path / "goes on", rewards=[ones])
    assert trainer.state.global_step == 6
    assert watching.report.worst() is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = trained(tmp_path / "stops", rewards=[ones], stop_on="info")
    assert trainer.state.global_step < 6
    assert any("stops the training, as stop_on asks: " in str(one.message) for one in caught)


@pytest.mark.slow
def test_a_failure_leaves_training_alone(tmp_path):
    def broken():
        raise KeyError("something")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, watching = trained(tmp_path / "quiet", broken=broken)
    assert trainer.state.global_step == 6
    assert not watching.watching
    assert sum("stopped watching" in str(one.message) for one in caught) == 1
    with pytest.raises(KeyError, match="something"):
        trained(tmp_path / "loud", broken=broken, raise_errors=True)


@pytest.mark.slow
def test_time_is_bounded(tmp_path, clock):
    trainer, watching = trained(tmp_path / "run", steps=40, share=0.1)
    # A look is begun only where the share has room for one that lasts as long as the one before: a second, of which
    # the clock has one for each step that is passed over and two for one that is looked at.
    assert watching.steps == 4
    assert entries(trainer)[-1]["rolloutdoctor/steps"] == watching.steps
    assert watching.seconds == 4.0 <= 0.1 * clock.now


@pytest.mark.parametrize(
    ("options", "words"), [({"stop_on": "never"}, "stop_on='never': expected"), ({"share": 0}, "share=0: expected")]
)
def test_refusals(tmp_path, options, words):
    trainer = make_trainer(tmp_path)
    with record(trainer, tmp_path / "run.parquet") as recorder, pytest.raises(UsageError, match=words):
        watch(trainer, recorder, **options)
