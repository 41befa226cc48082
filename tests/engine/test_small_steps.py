"""Small steps share a pass, and nothing that comes out shows which ones did."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rolloutdoctor.commands.check import check
from rolloutdoctor.commands.diff import diff
from rolloutdoctor.commands.diff_parts import DiffOptions
from rolloutdoctor.commands.identify import identify
from rolloutdoctor.commands.plot import check_and_draw
from rolloutdoctor.engine import identify_steps, run_steps
from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.engine.run_steps import AS_CONFIGURED, StepConsumer, StepDispatcher
from rolloutdoctor.evaluation import together
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.token_sums import PerToken
from rolloutdoctor.hypotheses.fixes import choose
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.figures import KINDS
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
        check_and_draw(sample(name), KINDS, CheckOptions(device="cpu", steps=SOME)),
    )


@pytest.mark.parametrize("name", ["run", "verl_rejected"])
def test_nothing_shows_which_steps_shared_a_pass(name, monkeypatch):
    shared = {False: [], True: []}
    whole = together.StepsTogether.whole

    def counting(self, objectives, per_token=()):
        found = whole(self, objectives, per_token)
        shared[bool(per_token)].append(0 if found is None else len(self.batches))
        return found

    monkeypatch.setattr(together.StepsTogether, "whole", counting)
    every = outcomes(name)
    assert max(shared[False]) > 20
    assert max(shared[True]) > 10
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


@pytest.mark.parametrize(("options", "is_shared"), [({}, True), ({"loss_type": "sapo"}, False)])
def test_consumers_see_each_step_in_order(options, is_shared):
    steps = [(random_batch(number), {"loss": float(number)}) for number in range(3)]
    looker = Looker(objective_of(**options))
    dispatcher = StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype)
    dispatcher.steps(steps)
    assert [(seen.batch, seen.logged["loss"]) for seen in looker.seen] == [
        (batch, logged["loss"]) for batch, logged in steps
    ]
    assert [seen.evaluations[AS_CONFIGURED].whole is not None for seen in looker.seen] == [is_shared] * 3


def test_token_values_of_a_shared_pass_are_those_of_each_step():
    looker = Looker(objective_of(), [AS_CONFIGURED])
    steps = [(random_batch(number), {}) for number in range(3)]
    StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype).steps(steps)
    for seen, (batch, _) in zip(looker.seen, steps, strict=True):
        its, alone = seen.evaluations[AS_CONFIGURED], evaluate(batch, looker.objectives[AS_CONFIGURED], per_token=True)
        assert its.whole is not None
        assert all(
            torch.equal(getattr(its.per_token, one.name), getattr(alone.per_token, one.name))
            for one in fields(PerToken)
        )
