"""Columns that a file holds with few digits: what was stored lies within the radius, and proves no fault."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.audit.stored_digits import SOME, coarse_log_probs, digits_stored, stored_radius
from rolloutdoctor.commands.identify.query import identify
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.ops.logged_digits import Digits
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import random_batch

SAMPLES = Path(__file__).parents[2] / "sample_data"
SOME_STEPS = StepRange(0, 20)
LOG_PROBS = ("policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")
STORED = {
    "8 bits": lambda x: torch.tensor(x, dtype=torch.float64).bfloat16().double().numpy(),
    "11 bits": lambda x: torch.tensor(x, dtype=torch.float64).half().double().numpy(),
    "4 decimals": lambda x: np.round(x, 4),
    "4 significant digits": lambda x: np.array([float(f"{each:.4g}") for each in x]),
}


@pytest.mark.parametrize("words", STORED)
@given(values=st.lists(st.floats(0.01, 60), min_size=4, max_size=30, unique=True), sign=st.sampled_from((-1, 1)))
def test_what_was_stored_lies_within_the_radius(words, values, sign):
    exact = sign * np.array(values)
    for held in (torch.tensor(STORED[words](exact)), torch.tensor(STORED[words](exact)).float()):
        moved = stored_radius(held)
        assert moved is not None
        lost = (held.double() - torch.from_numpy(exact)).abs()
        assert bool((lost <= moved * (1 + 1e-6) + held.double().abs() * 2.0**-24).all())


@given(st.integers(0, 2**32))
def test_float32_is_not_taken_for_stored(seed):
    x = torch.randn(200, generator=torch.Generator().manual_seed(seed))
    assert digits_stored(x, SOME) == ()
    assert stored_radius(x) is None


def test_few_values_are_no_strong_evidence():
    x = torch.tensor([-1.0, -1.5, -2.0])
    assert digits_stored(x) == ()
    assert Digits("bits", 8) in digits_stored(x, SOME)
    assert digits_stored(torch.tensor([-2075.0, 296.0, 1.0]), SOME) == ()
    assert digits_stored(torch.zeros(5), SOME) == digits_stored(torch.zeros(0), SOME) == ()
    assert digits_stored(torch.tensor([torch.nan, torch.inf, 0.0]), SOME) == ()


def test_the_columns_are_named():
    batch = random_batch(3, longest=40)
    assert coarse_log_probs(batch) == ""
    tokens = {name: batch.column(name) for name in batch.per_token}
    coarse = {name: tokens[name].bfloat16().float() for name in ("old_log_probs", "ref_log_probs")}
    words = "the file holds old_log_probs and ref_log_probs with 8 bits, and the trainer may have had more"
    assert coarse_log_probs(replace(batch, per_token=tokens | coarse)) == words


def written(folder, name, columns, stored):
    """A sample with some columns stored with few digits, and its metrics as they are."""
    table = pq.read_table(SAMPLES / f"{name}.parquet")
    for column in set(columns) & set(table.column_names):
        chunk = table.column(column).combine_chunks()
        if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
            values = pa.array(stored(chunk.values.to_numpy(zero_copy_only=False).astype(np.float64)), pa.float32())
            chunk = pa.ListArray.from_arrays(chunk.offsets.cast(pa.int32()), values)
        else:
            chunk = pa.array(stored(chunk.to_numpy(zero_copy_only=False)))
        table = table.set_column(table.schema.get_field_index(column), column, chunk)
    pq.write_table(table, folder / f"{name}.parquet")
    (folder / f"{name}.metrics.parquet").write_bytes((SAMPLES / f"{name}.metrics.parquet").read_bytes())
    return open_run([folder / f"{name}.parquet"])


def serious(report):
    return {one.code for one in report.findings if one.severity == Severity.ERROR}


@cache
def as_it_is(name):
    return check(open_run([SAMPLES / f"{name}.parquet"]), CheckOptions(device="cpu", steps=SOME_STEPS))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["healthy", "run", "verl_rejected", "slime_ppo"])
@pytest.mark.parametrize("words", STORED)
def test_advantages_of_few_digits_agree(tmp_path, name, words):
    run = written(tmp_path, name, ("advantage", "advantages"), STORED[words])
    report, exact = check(run, CheckOptions(device="cpu", steps=SOME_STEPS)), as_it_is(name)
    assert [(one.quantity, one.compared, one.agree) for one in report.audit] == [
        (one.quantity, one.compared, one.compared) for one in exact.audit
    ]
    assert serious(report) == serious(exact)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["healthy", "verl_rejected", "slime_ppo"])
@pytest.mark.parametrize("words", ["8 bits", "11 bits", "4 decimals"])
def test_log_probs_of_few_digits_prove_no_fault(tmp_path, name, words):
    run = written(tmp_path, name, LOG_PROBS, STORED[words])
    report = check(run, CheckOptions(device="cpu", steps=SOME_STEPS))
    assert all(one.agree == one.compared for one in report.audit)
    assert any(f"with {words}, and the trainer may have had more" in one.reason for one in report.audit)
    assert serious(report) <= serious(as_it_is(name))


@pytest.mark.slow
def test_a_wrong_advantage_is_seen_all_the_same(tmp_path):
    run = written(tmp_path, "healthy", ("advantage",), lambda x: STORED["8 bits"](1.05 * x))
    report = check(run, CheckOptions(device="cpu", steps=SOME_STEPS))
    assert "RDA004" in serious(report)


@pytest.mark.slow
def test_what_few_digits_cannot_tell_apart_is_one_class(tmp_path):
    run = written(tmp_path, "run", ("advantage",), STORED["8 bits"])
    stage = identify(run, ReadOptions(device="cpu", steps=SOME_STEPS)).stages[0]
    exact = identify(open_run([SAMPLES / "run.parquet"]), ReadOptions(device="cpu", steps=SOME_STEPS)).stages[0]
    assert stage.outcome == "one"
    assert len(stage.classes[0].equivalent) >= len(exact.classes[0].equivalent)
