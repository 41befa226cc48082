"""Small steps share a pass, and nothing that comes out shows which ones did."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from objectives import objective_of

from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.commands.diff.sides import DiffOptions
from rolloutdoctor.commands.plot.query import check_and_draw
from rolloutdoctor.engine import run_steps
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.run_steps import StepConsumer, StepDispatcher
from rolloutdoctor.evaluation import joined_steps
from rolloutdoctor.evaluation.device import Evaluator
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, evaluate
from rolloutdoctor.evaluation.token_sums import PerToken
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.results.figures import KINDS
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch

SOME = {"run": StepRange(0, 16), "verl_rejected": StepRange(0, 16), "slime_ppo": StepRange(0, 8)}
FIXES = choose("zero-std"), choose("rejected-rows")
SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


def sample(name):
    return open_run([SAMPLES / f"{name}.parquet"])


def outcomes(name):
    steps = SOME[name]
    return (
        check(sample(name), CheckOptions(device="cpu", steps=steps)),
        diff(sample(name), DiffOptions(device="cpu", steps=steps, fixes=FIXES)),
        check_and_draw(sample(name), KINDS, CheckOptions(device="cpu", steps=steps)),
    )


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", SOME)
def test_nothing_shows_which_steps_shared_a_pass(name, monkeypatch):
    shared, joined = {False: [0], True: [0]}, [0]
    whole, add_all = joined_steps.StepsTogether.whole, RuleAccumulator.add_all

    def counting(self, objectives, per_token=()):
        found = whole(self, objectives, per_token)
        shared[bool(per_token)].append(0 if found is None else len(self.batches))
        return found

    def looking(self, steps):
        joined.append(0 if steps.batch is None else len(steps.steps))
        add_all(self, steps)

    with monkeypatch.context() as patch:
        patch.setattr(joined_steps.StepsTogether, "whole", counting)
        patch.setattr(RuleAccumulator, "add_all", looking)
        every = outcomes(name)
    # GAE has a time axis: its steps are evaluated one by one, and measured by the rules together all the same.
    shares = name != "slime_ppo"
    assert (max(shared[False]) > 10, max(shared[True]) > 5) == (shares, shares)
    assert max(joined) > 4
    for tokens in (0, 150):
        monkeypatch.setattr(run_steps, "TOGETHER", tokens)
        assert repr(outcomes(name)) == repr(every)


class Looker(StepConsumer):
    """Keeps every step that it is shown."""

    columns = frozenset()

    def __init__(self, objective, per_token=()):
        self.objectives, self.per_token, self.seen = {AS_CONFIGURED: objective}, frozenset(per_token), []
        self.whole = None

    def add(self, step):
        self.seen.append(step)

    def add_all(self, steps):
        self.whole = steps
        super().add_all(steps)


@pytest.mark.parametrize(("options", "is_shared"), [({}, True), ({"off_policy_mask_threshold": 0.5}, False)])
def test_consumers_see_each_step_in_order(options, is_shared):
    steps = [(random_batch(number), {"loss": float(number)}) for number in range(3)]
    looker = Looker(objective_of("trl", **options))
    dispatcher = StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype)
    dispatcher.steps(steps)
    assert [(seen.batch, seen.logged["loss"]) for seen in looker.seen] == [
        (batch, logged["loss"]) for batch, logged in steps
    ]
    each = [seen.evaluations[AS_CONFIGURED] for seen in looker.seen]
    assert [one.whole is not None for one in each] == [is_shared] * 3
    policy_N = torch.cat([one.tokens.policy_N for one in each])
    assert torch.equal(looker.whole.evaluations[AS_CONFIGURED].tokens.policy_N, policy_N)
    assert len(looker.whole.batch) == len(policy_N)


def test_one_step_that_cannot_be_computed_leaves_every_step_to_itself(monkeypatch):
    """The others are evaluated all the same, and it says why it was not."""
    steps = [(random_batch(number), {}) for number in range(3)]
    looker, evaluate_one = Looker(objective_of("trl", off_policy_mask_threshold=0.5)), Evaluator.evaluate

    def failing(self, batch, request):
        if batch is steps[1][0]:
            raise CannotComputeError("no")
        return evaluate_one(self, batch, request)

    monkeypatch.setattr(Evaluator, "evaluate", failing)
    StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype).steps(steps)
    assert [seen.failure for seen in looker.seen] == [None, "no", None]
    assert [AS_CONFIGURED in seen.evaluations for seen in looker.seen] == [True, False, True]
    assert looker.whole.batch is None


def test_token_values_of_a_shared_pass_are_those_of_each_step():
    looker = Looker(objective_of("trl"), [AS_CONFIGURED])
    steps = [(random_batch(number), {}) for number in range(3)]
    StepDispatcher([looker], steps[0][0].column("policy_log_probs").dtype).steps(steps)
    for seen, (batch, _) in zip(looker.seen, steps, strict=True):
        its, alone = seen.evaluations[AS_CONFIGURED], evaluate(batch, looker.objectives[AS_CONFIGURED], per_token=True)
        assert its.whole is not None
        assert all(
            torch.equal(getattr(its.per_token, one.name), getattr(alone.per_token, one.name))
            for one in fields(PerToken)
        )
