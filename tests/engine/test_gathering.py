"""Pictures, comparisons, diffs and pages of a run in parts are those of the run in one piece, to the byte."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine.runs import full_columns, write

from rolloutdoctor.cli.states import save
from rolloutdoctor.commands.compare.query import compare
from rolloutdoctor.commands.diff.ablation import LeftOut
from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.commands.diff.sides import DiffOptions, asked_of, sides_in
from rolloutdoctor.commands.plot.query import check_and_gather, draw
from rolloutdoctor.commands.view.worst_rows import WorstRows
from rolloutdoctor.commands.why.query import Question, why
from rolloutdoctor.engine.gathering import gather
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.part_states import state_bytes, state_from
from rolloutdoctor.engine.parts import plan_parts
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.saved_run import Saving, saved_parts
from rolloutdoctor.engine.state_file import load_state
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import KINDS
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import choose

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
RUNS = ("run", "healthy", "slime_ppo", "verl_rejected")
OPTIONS = CheckOptions(device="cpu")
# The others look for the causes of what these numbers, which nobody computed, disagree with.
FEW = CheckOptions(device="cpu", rules=tuple(rule for rule in RULES if rule.code in ("RDA001", "RDG001", "RDT001")))


@dataclass(frozen=True)
class Parts:
    """Measures so many parts here, the last one first, each state through its bytes, as a cluster does.

    Attributes:
        count: how many.
        backwards: their states are added in that order, too.
    """

    count: int
    backwards: bool = False

    def measure(self, work, run, steps=None, split=None, progress=None):
        parts = plan_parts(run, steps, split, self.count)
        assert len(parts) == self.count
        states = [state_bytes("part", work.measure(part, progress)) for part in reversed(parts)]
        return [state_from(work, "part", state) for state in (states if self.backwards else reversed(states))]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a run of 7 steps with all log-probs, versions, statuses and logged values, its rows in any order."""
    columns = full_columns()
    rows = np.random.default_rng(1).permutation(len(columns["step"]))
    logged = [(step, name, 0.1 * step) for step in range(7) for name in ("kl", "loss")]
    folder = tmp_path_factory.mktemp("gathering")
    return write(folder / "mixed.parquet", columns, rows=rows, row_group_size=17, logged=logged)


def whole(result):
    """All that a result holds: its own `repr` is a line."""
    return repr(asdict(result))


def from_states(path, folder, command, cuts=(":3", "3:5", "5:")):
    """What a command returns of the saved states of the parts of a run, given the last one first."""
    for number, steps in enumerate(cuts):
        saving = Saving(Processes(1 + number % 2), "plot", partial(save, path=str(folder / f"{number}.state")))
        command(open_run([path]), saving, StepRange.parse(steps))
    run, parts = saved_parts([(str(each), load_state(str(each))) for each in sorted(folder.iterdir(), reverse=True)])
    return command(run, parts, None)


def drawn(path, kind, executor=None, fixes=()):
    try:
        return whole(draw(open_run([path]), kind, OPTIONS, fixes, executor=executor))
    except InputError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fixes"),
    [*((kind, ()) for kind in KINDS), *((kind, (choose("rejected-rows"),)) for kind in ("advantages", "kl", "audit"))],
)
def test_a_picture(path, kind, fixes):
    one = drawn(path, kind, fixes=fixes)
    assert not one.startswith("no picture")
    assert drawn(path, kind, Parts(3), fixes) == one


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_states(path, tmp_path, kind):
    def command(run, executor, steps):
        return whole(draw(run, kind, replace(OPTIONS, steps=steps), executor=executor))

    assert from_states(path, tmp_path, command) == drawn(path, kind)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("metric", ["reward", "entropy", "grad_norm"])
def test_why(path, metric):
    question = Question(metric, at=4, before=3, after=3)
    found = [why(open_run([path]), OPTIONS, question, executor=executor) for executor in (None, Parts(2))]
    assert whole(found[0]) == whole(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["reward", "grad_norm"])
def test_why_of_states(path, tmp_path, metric):
    def command(run, executor, steps):
        at = 4 if steps is None else None
        return whole(why(run, replace(OPTIONS, steps=steps), Question(metric, at, 2, 2), executor=executor))

    assert from_states(path, tmp_path, command) == whole(why(open_run([path]), OPTIONS, Question(metric, 4, 2, 2)))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("by", ["reward", "status"])
def test_a_comparison(path, by):
    runs = [open_run([path]), open_run([path])]
    assert whole(compare(*runs, FEW, by=by, executor=Parts(3))) == whole(compare(*runs, FEW, by=by))


FIXES = (choose("zero-std"), choose("rejected-rows"))
SIDES = {
    "fixes": {"fixes": FIXES},
    **{f"by {by}": {"fixes": FIXES, "by": by} for by in ("step", "group", "reward", "length")},
    "another option": {"against": ("beta=0.1",)},
    "every fix": {"all_fixes": True, "top": 0, "distribution": False},
    "without rows": {"without": LeftOut(names=("r3", "r40"), rows=1)},
    "without tokens": {"without": LeftOut(tokens=2, afresh=True)},
}


@pytest.mark.slow
@pytest.mark.parametrize("sides", SIDES)
def test_a_diff(path, sides):
    options = DiffOptions(**{"device": "cpu", "top": 3, "distribution": True} | SIDES[sides])
    one = whole(diff(open_run([path]), options))
    assert whole(diff(open_run([path]), options, executor=Parts(3))) == one
    assert whole(diff(open_run([path]), options, executor=Parts(3, backwards=True))) == one


@pytest.mark.slow
@pytest.mark.parametrize("sides", SIDES)
def test_a_diff_of_states(path, tmp_path, sides):
    options = DiffOptions(**{"device": "cpu", "top": 3, "text": True, "distribution": True} | SIDES[sides])

    def command(run, executor, steps):
        return whole(diff(run, replace(options, steps=steps), executor=executor))

    assert from_states(path, tmp_path, command) == whole(diff(open_run([path]), options))


def test_what_a_diff_keeps_of_a_run_does_not_grow_with_its_rows(path):
    """One line a step and side, and eight rows of each of the groups that moved most."""
    options = DiffOptions(device="cpu", top=2, fixes=FIXES, split="train")
    ready = prepare(open_run([path]), CheckOptions(device="cpu", rules=(), split="train"), lenient=False)
    _, (sides,) = gather(ready, sides_in, *asked_of(options), measured=False, lenient=False)
    lengths = {name: len(frame) for name, frame in sides.gathered().tables.items()}
    metrics = sides.table("metrics")["metric"].n_unique()
    assert lengths == {"steps": 21, "parts": 0, "metrics": 21 * metrics, "moved": 8, "seen": 7}


def gathered(path, options, executor=None):
    """What a page is made of."""
    report, gallery, worst = check_and_gather(open_run([path]), KINDS, options, executor=executor, beside=WorstRows)
    return whole(report), whole(gallery), repr(worst.places(report.findings))


@pytest.mark.slow
def test_what_a_page_shows(path):
    assert gathered(path, FEW, Parts(3)) == gathered(path, FEW)


@pytest.mark.slow
def test_what_a_page_of_states_shows(path, tmp_path):
    def command(run, executor, steps):
        options = replace(FEW, steps=steps)
        report, gallery, worst = check_and_gather(run, KINDS, options, executor=executor, beside=WorstRows)
        return whole(report), whole(gallery), repr(worst.views(report.findings, options))

    assert from_states(path, tmp_path, command) == command(open_run([path]), None, None)


def test_processes(path):
    options = DiffOptions(device="cpu", fixes=FIXES, by="reward")
    one, other = (diff(open_run([path]), options, executor=executor) for executor in (None, Processes(2)))
    assert whole(one) == whole(other)
    assert drawn(path, "lengths", Processes(2)) == drawn(path, "lengths")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_a_sample(name, kind):
    sample = SAMPLES / f"{name}.parquet"
    assert drawn(sample, kind, Parts(3)) == drawn(sample, kind)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", RUNS)
def test_what_the_page_of_a_sample_shows(name):
    path = SAMPLES / f"{name}.parquet"
    assert gathered(path, OPTIONS, Parts(3)) == gathered(path, OPTIONS)
