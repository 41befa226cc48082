"""One pass: every step is read once and evaluated once, whoever looks at it."""

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest
import torch

from rolloutdoctor.commands.plot.query import check_and_draw
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_device, find_dtype
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.run_steps import StepConsumer, StepDispatcher, run_file_steps
from rolloutdoctor.evaluation import device
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, evaluate_all
from rolloutdoctor.evaluation.joined_steps import StepsTogether
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.figures import KINDS
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


def objective_of(trainer="trl", **options):
    return configure(RunMetadata(), trainer, [Layer("test", options)]).objective


PLAIN = objective_of(beta=0.1)
FIXED = choose("zero-std").apply(PLAIN)


class Looker(StepConsumer):
    """Keeps every step that it is shown."""

    def __init__(self, objectives=None, *, columns=(), per_token=(), split=None):
        self.objectives, self.columns = dict(objectives or {}), frozenset(columns)
        self.per_token, self.split, self.seen = frozenset(per_token), split, []

    def add(self, step):
        self.seen.append(step)


@pytest.fixture
def evaluated(monkeypatch):
    """The objectives of every evaluation of a step, by itself or with others."""
    calls, whole = [], StepsTogether.whole

    def counting(batch, objectives, **kwargs):
        calls.append((batch.key, list(objectives.values()), kwargs["per_token"]))
        return evaluate_all(batch, objectives, **kwargs)

    def counting_all(steps, objectives, per_token):
        found = whole(steps, objectives, per_token)
        calls.extend((batch.key, list(objectives.values()), per_token) for batch in steps.batches if found is not None)
        return found

    monkeypatch.setattr(device, "evaluate_all", counting)
    monkeypatch.setattr(StepsTogether, "whole", counting_all)
    return calls


def test_equal_objectives_are_evaluated_once(evaluated):
    one = Looker({AS_CONFIGURED: PLAIN, "mine": FIXED})
    # equal, not the same; and the reference is not named first
    other = Looker({"theirs": dataclasses.replace(FIXED), "same": PLAIN, AS_CONFIGURED: dataclasses.replace(PLAIN)})
    StepDispatcher([one, other, Looker()], torch.float64).step(toy_batch([[1, 1], [1, 0]], ref=-1.5), {"kl": 0.5})
    assert [(objectives, kept) for _, objectives, kept in evaluated] == [([PLAIN, FIXED], set())]
    (mine,), (theirs,) = one.seen, other.seen
    assert set(mine.evaluations) == {AS_CONFIGURED, "mine"}
    assert set(theirs.evaluations) == {AS_CONFIGURED, "theirs", "same"}
    assert mine.evaluations["mine"] is theirs.evaluations["theirs"]
    assert theirs.evaluations["same"] is mine.evaluations[AS_CONFIGURED]
    assert mine.logged == {"kl": 0.5}
    assert mine.evaluations["mine"].tokens.versus_l1_N.sum() > 0
    assert mine.evaluations[AS_CONFIGURED].tokens.versus_l1_N.sum() == 0


def test_who_asks_for_nothing_is_shown_every_step(evaluated):
    looker = Looker()
    dispatcher = StepDispatcher([looker], torch.float32)
    for step in range(3):
        dispatcher.step(toy_batch([[1, 0]], step=step), {})
    assert [seen.batch.step for seen in looker.seen] == [0, 1, 2]
    assert all(not seen.evaluations and seen.failure is None for seen in looker.seen)
    assert [objectives for _, objectives, _ in evaluated] == [[], [], []]


def test_a_split_is_evaluated_for_those_who_look_at_it(evaluated):
    both, training = Looker({AS_CONFIGURED: PLAIN}), Looker({AS_CONFIGURED: PLAIN, "fixed": FIXED}, split="train")
    dispatcher = StepDispatcher([both, training], torch.float64)
    for split in ("train", "eval"):
        dispatcher.step(toy_batch([[1, 1]], ref=-1.5, split=split), {})
    assert [seen.batch.split for seen in both.seen] == ["train", "eval"]
    assert [seen.batch.split for seen in training.seen] == ["train"]
    assert [objectives for _, objectives, _ in evaluated] == [[PLAIN, FIXED], [PLAIN]]


def test_token_values_are_kept_if_anyone_wants_them():
    batch = toy_batch([[1, 0]], ref=-1.5)
    both = {AS_CONFIGURED: PLAIN, "mine": FIXED}
    for wanted in ([], [AS_CONFIGURED], ["mine"], [AS_CONFIGURED, "mine"]):
        plain, keen = Looker({AS_CONFIGURED: PLAIN}), Looker(both, per_token=wanted)
        StepDispatcher([plain, keen], torch.float64).step(batch, {})
        kept = [label for label, seen in keen.seen[0].evaluations.items() if seen.per_token is not None]
        assert kept == wanted


WHITENED = objective_of("verl", adv_estimator="reinforce_plus_plus_baseline")
GROUPED = dataclasses.replace(WHITENED, advantage=objective_of("verl", adv_estimator="rloo").advantage)


def test_who_can_be_served_does_not_go_without():
    """One trained token: whitening fails for who asks for it, and for nobody else."""
    batch = toy_batch([[1, 0]], mask=[[1], [0]], step=3)
    one, other = Looker({AS_CONFIGURED: GROUPED}), Looker({AS_CONFIGURED: GROUPED, "whitened": WHITENED})
    nothing = Looker()
    StepDispatcher([one, other, nothing], torch.float64).step(batch, {})
    assert one.seen[0].failure is None
    assert one.seen[0].evaluations[AS_CONFIGURED].loss == pytest.approx(evaluate_all(batch, {"": GROUPED})[""].loss)
    assert other.seen[0].failure.startswith("whitening needs at least two trained tokens")
    assert other.seen[0].evaluations == {}
    assert nothing.seen[0].failure is None


def test_all_compare_with_one_objective():
    dispatcher = StepDispatcher([Looker({AS_CONFIGURED: PLAIN}), Looker({AS_CONFIGURED: FIXED})], torch.float32)
    with pytest.raises(ValueError, match="one and the same objective"):
        dispatcher.step(toy_batch([[1, 0]]), {})
    with pytest.raises(ValueError, match="one and the same objective"):
        StepDispatcher([Looker({"only": PLAIN})], torch.float32).step(toy_batch([[1, 0]]), {})


def test_the_columns_of_all_are_read():
    run = open_run([SAMPLES / "run.parquet"])
    one, other = Looker(columns={"reward"}), Looker(columns={"response_mask"})
    run_file_steps(run, [one, other], CheckOptions(steps=None), LoggedMetrics())
    assert all(seen.batch.has("reward", "response_mask") for seen in [*one.seen, *other.seen])
    assert not any(seen.batch.has("policy_log_probs") for seen in one.seen)
    assert len(one.seen) == len(other.seen) > 1


@pytest.mark.slow
def test_rules_and_pictures_share_one_evaluation_of_a_step(evaluated):
    run = open_run([SAMPLES / "verl_rejected.parquet"])
    report, _ = check_and_draw(run, KINDS, CheckOptions())
    steps = [key for key, _, _ in evaluated]
    assert len(steps) == len(set(steps)) == report.input.steps
    assert all(len(objectives) == len(set(map(repr, objectives))) for _, objectives, _ in evaluated)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["run", "healthy", "verl_rejected", "slime_ppo"])
def test_a_report_says_what_a_check_says(name):
    path = SAMPLES / f"{name}.parquet"
    report, _ = check_and_draw(open_run([path]), KINDS, CheckOptions(rules=RULES[3:5]))
    assert report == check(open_run([path]), CheckOptions(rules=RULES[3:5]))


def test_devices_and_types():
    assert find_dtype("float64") is torch.float64
    for call, name in ((find_dtype, "float16"), (find_device, "tpu")):
        with pytest.raises(UsageError, match=f"no d(type|evice) '{name}' \\(known: "):
            call(name)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["verl_rejected", "healthy"])
def test_no_step_outlives_its_rules(name, monkeypatch):
    """What a step holds goes with it: a cycle of references would keep it until garbage is collected."""
    run, seen = open_run([SAMPLES / f"{name}.parquet"]), []
    batches = run.batches

    def watched(*args, **kwargs):
        for batch in batches(*args, **kwargs):
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    monkeypatch.setattr(run, "batches", watched)
    gc.collect()
    gc.disable()
    try:
        check(run, CheckOptions(device="cpu"))
        assert len(seen) >= 100
        assert not [each for each in seen if each() is not None]
    finally:
        gc.enable()
