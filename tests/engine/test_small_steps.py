"""Small steps share a pass, and nothing that comes out shows which ones did."""

from pathlib import Path

import pytest

from rolloutdoctor.commands.check import check
from rolloutdoctor.commands.diff import diff
from rolloutdoctor.commands.diff_parts import DiffOptions
from rolloutdoctor.commands.identify import identify
from rolloutdoctor.engine import identify_steps, run_steps
from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.engine.run_steps import AS_CONFIGURED, StepConsumer, StepDispatcher
from rolloutdoctor.evaluation import together
from rolloutdoctor.hypotheses.fixes import choose
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import find

SOME = StepRange(0, 30)
FIXES = choose("zero-std"), choose("rejected-rows")
SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


def sample(name):
    return open_run([SAMPLES / f"{name}.parquet"])


def outcomes(name):
    return (
        check(sample(name), CheckOptions(device="cpu", steps=SOME)),
        diff(sample(name), DiffOptions(device="cpu", steps=SOME, fixes=FIXES)),
        identify(sample(name), ReadOptions(device="cpu", steps=SOME)),
    )


@pytest.mark.parametrize("name", ["run", "verl_rejected"])
def test_nothing_shows_which_steps_shared_a_pass(name, monkeypatch):
    shared = []
    whole = together.StepsTogether.whole

    def counting(self, objectives):
        found = whole(self, objectives)
        shared.append(0 if found is None else len(self.batches))
        return found

    monkeypatch.setattr(together.StepsTogether, "whole", counting)
    every = outcomes(name)
    assert max(shared) > 20
    for tokens in (0, 150):
        monkeypatch.setattr(run_steps, "TOGETHER", tokens)
        monkeypatch.setattr(identify_steps, "TOGETHER", tokens)
        assert repr(outcomes(name)) == repr(every)


class Looker(StepConsumer):
    """Keeps every step that it is shown."""

    columns = frozenset()

    def __init__(self, objective, per_token=()):
        self.objectives, self.per_token, self.seen = {AS_CONFIGURED: objective}, frozenset(per_token), []

    def add(self, step):
        self.seen.append(step)


def objective_of(**options):
    trainer = find("trl")
    return trainer.objective(
        resolve(trainer.options, parse_version(trainer.newest), [Layer("test", options)], trainer="trl")
    )


@pytest.mark.parametrize(("options", "per_token", "is_shared"), [({}, (), True), ({"loss_type": "sapo"}, (), False)])
def test_consumers_see_each_step_in_order(options, per_token, is_shared):
    steps = [(random_batch(number), {"loss": float(number)}) for number in range(3)]
    looker = Looker(objective_of(**options), per_token)
    dispatcher = StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype)
    dispatcher.steps(steps)
    assert [(seen.batch, seen.logged["loss"]) for seen in looker.seen] == [
        (batch, logged["loss"]) for batch, logged in steps
    ]
    assert [seen.evaluations[AS_CONFIGURED].whole is not None for seen in looker.seen] == [is_shared] * 3


def test_token_values_are_kept_step_by_step():
    looker = Looker(objective_of(), [AS_CONFIGURED])
    steps = [(random_batch(number), {}) for number in range(3)]
    StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype).steps(steps)
    assert all(seen.evaluations[AS_CONFIGURED].per_token is not None for seen in looker.seen)
