"""`diff` in parts gives the bytes of one process, in any order, and from files."""

import numpy as np
import pytest
from engine.runs import random_columns, write

from rolloutdoctor.commands.diff.formats import RENDERERS
from rolloutdoctor.commands.diff.parts import DiffOptions, DiffWork
from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.engine.parts import plan_parts
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.stored import members_of, state_of
from rolloutdoctor.io.run import open_run
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.views.style import Style

STYLE = Style(width=100, color=False, unicode=True, verbose=False)


class Backwards:
    """Measures the parts last first, and stores the states and reads them."""

    def measure(self, work, run, steps=None, split=None, progress=None):
        parts = plan_parts(run, steps, split, 3)
        assert len(parts) == 3
        states = [work.measure(part, None) for part in reversed(parts)]
        return [state_of(work.kind, members_of(state)) for state in states]


def rendered(run, options, executor):
    found = diff(run, options, None, executor)
    return {name: render(found, STYLE) for name, render in RENDERERS.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    columns = random_columns(3, steps=7)
    mixed = np.random.default_rng(0).permutation(len(columns["step"]))
    return write(tmp_path_factory.mktemp("diff") / "mixed.parquet", columns, rows=mixed, row_group_size=17)


def options(**more):
    fixes = (choose("zero-std"), choose("rejected-rows"))
    return DiffOptions(fixes=fixes, device="cpu", top=3, distribution=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize("by", [None, "step", "group", "reward", "length"])
def test_states_add_up_in_any_order_and_from_files(path, by):
    run, how = open_run([path]), options(by=by)
    assert rendered(run, how, Backwards()) == rendered(run, how, None)


def test_adding_leaves_what_is_added(path):
    run, how = open_run([path]), options()
    work = DiffWork(how)
    one, two = (work.measure(part, None) for part in plan_parts(run, None, None, 2))
    before = [members_of(each) for each in (one, two)]
    assert members_of(one + two) == members_of(one + two)
    assert [members_of(each) for each in (one, two)] == before


def test_processes_give_the_bytes_of_one(path):
    run, how = open_run([path]), options(by="reward")
    assert rendered(run, how, Processes(2)) == rendered(run, how, None)
