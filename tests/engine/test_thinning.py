"""Long runs: the series of a rule are thinned; states add up to the same bytes in any order and parts."""

import dataclasses
import itertools
import random

import growing
import pytest

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine import run_state
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.gathering import measure
from rolloutdoctor.engine.merged import merged, saved_state
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.state_file import load_state
from rolloutdoctor.engine.stored import members_of
from rolloutdoctor.io.archives import archived
from rolloutdoctor.io.run import StepRange, open_run

STEPS = 37


@pytest.fixture
def prepared(tmp_path):
    path = tmp_path / "run.parquet"
    growing.write(path, range(1, STEPS + 1), fault_from=30)
    return prepare(open_run([path]), CheckOptions())


def part(prepared, first, last):
    return measure(dataclasses.replace(prepared, options=CheckOptions(steps=StepRange(first, last))))


@pytest.mark.slow
def test_any_order_and_parts_give_the_same_bytes(prepared, monkeypatch, tmp_path):
    full = report_of(prepared, measure(prepared))
    monkeypatch.setattr(run_state, "KEEP_STEPS", 4)
    whole = measure(prepared)
    content = archived(members_of(saved_state(prepared, whole)))
    for seed in range(4):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(2, STEPS + 1), 6))
        parts = [part(prepared, *ends) for ends in zip([1, *cuts], [*cuts, STEPS + 1], strict=True)]
        draw.shuffle(parts)
        total = parts[0] + (parts[1] + parts[2]) + ((parts[3] + parts[4]) + parts[5]) + parts[6]
        assert archived(members_of(saved_state(prepared, total))) == content
    # Back from a file it is the same, and so is what is judged.
    path = tmp_path / "a.state"
    path.write_bytes(content)
    assert archived(members_of(load_state(str(path)))) == content
    assert load_state(str(path)).state == whole
    thin = report_of(prepared, whole)
    assert [(one.code, one.message) for one in full.findings] == [(one.code, one.message) for one in thin.findings]
    assert full.clean == thin.clean
    assert any("thinned to about one step in " in note for note in thin.notes)
    assert not any("thinned" in note for note in full.notes)
    assert len(thin.findings[0].per_step) <= 4
    assert merged([("one", load_state(str(path)))]).input == full.input


@pytest.mark.parametrize(("first", "stride"), [(0, 1), (1, 2), (7, 10), (3, 64), (1, 1024)])
def test_steps_of_any_stride_are_kept_evenly(first, stride):
    steps = range(first, first + 20_000 * stride, stride)
    every, found = run_state.thinned([StepKey(step, "train") for step in steps])
    kept = [steps.index(key.step) for key in found]
    assert run_state.KEEP_STEPS / 3 < len(kept) <= run_state.KEEP_STEPS
    assert max(later - earlier for earlier, later in itertools.pairwise(kept)) < 4 * every
