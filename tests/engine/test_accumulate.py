import dataclasses
import itertools

import pytest
import torch
from rules.checking import folded, report_on

from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.testing import toy_batch

WHITENED = {"trainer": "verl", "adv_estimator": "reinforce_plus_plus_baseline"}


def judged(plan, state, configured):
    return judge(plan, state, configured, device="cpu", dtype="float64")


def without(batch, column):
    tokens = {name: values for name, values in batch.per_token.items() if name != column}
    return dataclasses.replace(batch, per_token=tokens)


def test_input_is_counted():
    batches = [toy_batch([[1, 0], [1]], lengths=[1, 2, 3]), toy_batch([[1]], lengths=4, step=1, split="eval")]
    assert report_on(batches, trainer="trl").input == InputSummary(rows=4, steps=2, groups=3, tokens=10)
    no_groups = dataclasses.replace(batches[0], groups=None, group_ids=())
    assert report_on(no_groups, trainer="trl").input == InputSummary(rows=3, steps=1, groups=0, tokens=6)


# Steps that cannot be looked at.


def test_column_that_is_null_in_some_steps():
    batches = [toy_batch([[1, 1], [1, 0]], ref=-1.5, step=step) for step in range(4)]
    batches[1] = without(batches[1], "ref_log_probs")
    batches[2] = without(batches[2], "ref_log_probs")
    report = report_on(batches, trainer="trl", beta=0.1, select=["RDG001"])
    assert "RDG001 could not look at 2 steps, where a column it needs is null" in report.notes
    assert [row["step"] for row in report.findings[0].per_step] == [0, 3]


def test_column_that_is_null_in_all_steps():
    batches = [without(toy_batch([[1, 1]], ref=-1.5, step=step), "ref_log_probs") for step in range(2)]
    eval_rows = toy_batch([[1, 1]], ref=-1.5, split="eval")  # has the column, and is not looked at
    (skipped,) = report_on([*batches, eval_rows], trainer="trl", beta=0.1, select=["RDG001"]).skipped
    assert skipped.reason == "a column it needs is null in all of 2 steps"
    assert skipped.remedy


def test_step_that_the_trainer_itself_cannot_compute():
    # One trained token: verl's whitening fails, and so does this; the other step is measured.
    batches = [toy_batch([[1, 0]], mask=[[1], [0]], step=3), toy_batch([[1, 1], [1, 0]], step=5)]
    report = report_on(batches, select=["RDA001", "RDI001"], **WHITENED)
    assert report.notes[0].startswith("1 step could not be evaluated, the first is step 3: whitening needs")
    assert (
        "RDA001 could not look at 1 step, where a column it needs is null, or which could not be evaluated"
        in report.notes
    )
    # What was not looked at may hold a fault.
    assert [(one.code, "other step" in one.reason) for one in report.skipped] == [("RDA001", True)]
    assert ("RDI001", "nonfinite-values") in report.clean


def test_no_step_can_be_computed():
    batches = [toy_batch([[1, 0]], mask=[[1], [0]], step=step) for step in (4, 3)]
    report = report_on(batches, select=["RDA001", "RDI001"], **WHITENED)
    (skipped,) = report.skipped
    assert skipped.reason.startswith("step 3 could not be evaluated: whitening needs at least two trained tokens")
    assert [code for code, _ in report.clean] == ["RDI001"]


@pytest.mark.slow
def test_failures_do_not_depend_on_the_order_of_steps():
    masks = {1: [[1], [0]], 2: [[0], [0]], 3: [[1], [0]]}
    reports = {
        repr(report_on([toy_batch([[1, 0]], mask=masks[step], step=step) for step in order], **WHITENED))
        for order in itertools.permutations(masks)
    }
    assert len(reports) == 1


def test_only_rows_of_another_split():
    report = report_on(toy_batch([[1]], split="eval"), trainer="trl", select=["RDG002"])
    assert report.nothing_checked
    assert report.skipped[0].reason == "no training rows were read"


# States.


@pytest.mark.slow
def test_examples_are_the_same_in_one_fold_and_in_parts():
    batches = [toy_batch([[100 + step % 3, 1]] * 4, mask=[[0], [1]] * 4, step=step) for step in range(6)]
    options = {"trainer": "verl", "adv_estimator": "rloo", "select": ["RDA001"]}
    plan, fold, configured = folded(batches, **options)
    (whole,) = judged(plan, fold.state(), configured).findings
    assert [(one.step, one.group_id, one.weight) for one in whole.examples] == [
        *[(2, f"g{group}", 102.0) for group in range(4)],
        (5, "g0", 102.0),
    ]
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        state = RunState()
        for index in order:
            state = state + folded([batches[index]], **options)[1].state()
        assert judged(plan, state, configured).findings == (whole,)


def test_run_states_add_up():
    one = RunState(InputSummary(1, 2, 3, 4), 1, {"x": (5, 2), "y": (1, 1)})
    other = RunState(InputSummary(10, 20, 30, 40), 2, {"x": (3, 1)})
    found = one + other
    assert found.input == InputSummary(11, 22, 33, 44)
    assert found.odd_groups == 3
    assert found.failures == {"x": (3, 3), "y": (1, 1)} == (other + one).failures
    assert RunState() + one == one == one + RunState()


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_order_of_arrival():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(7, 4, generator=generator).tolist()
    batches = [toy_batch([row, [1, 1]], lengths=1, ref=-1.3, step=step) for step, row in enumerate(rewards)]
    options = {"trainer": "trl", "beta": 0.1, "logged": {"kl": 0.1}}
    reports = {
        repr(report_on([batches[index] for index in order], **options))
        for order in ([*range(7)], [6, 2, 4, 0, 1, 5, 3])
    }
    assert len(reports) == 1


# What a report rests on.


def test_groups_of_another_size_are_noted():
    batches = [toy_batch([[1, 0, 1, 0], [1, 0]]), toy_batch([[1], [0]], split="eval")]
    report = report_on(batches, trainer="trl", num_generations=4, num_generations_eval=1)
    assert any(note.startswith("1 group of another size than configured") for note in report.notes)
    clean = report_on(batches[1:], trainer="trl", num_generations=4, num_generations_eval=1)
    assert not [note for note in clean.notes if "of another size" in note]


@pytest.mark.slow
def test_layout_is_noted_where_it_is_missing():
    words = "no micro_batch_id or optim_step_id"
    assert any(words in note for note in report_on(toy_batch([[1, 0]]), trainer="trl").notes)
    cut = toy_batch([[1, 0]], per_row={"micro_batch_id": [0, 1]})
    assert not any(words in note for note in report_on(cut, trainer="trl").notes)
    assert not any(words in note for note in report_on(toy_batch([[1, 0]]), trainer="trl", select=["RDA003"]).notes)


def test_report_is_sorted():
    batch = toy_batch([[100, 1], [1, 1], [1]], mask=[[0], [1], [1], [1], [1]], ref=-1.5)
    report = report_on(batch, trainer="trl", beta=0.1)
    keys = [(-finding.severity, finding.code) for finding in report.findings]
    assert keys == sorted(keys)
    assert len({severity for severity, _ in keys}) > 1
    assert [one.code for one in report.skipped] == sorted(one.code for one in report.skipped)
    assert report.worst() == report.findings[0].severity


def test_devices():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device cuda: torch finds no CUDA device here; use --device cpu"):
            find_device("cuda")
