"""A Ray cluster gives the bytes of one process, loses nothing, counts nothing twice, and says why it cannot go on."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine import rays
from engine.runs import random_columns, write

from rolloutdoctor.commands.check import report_of
from rolloutdoctor.commands.diff import diff
from rolloutdoctor.commands.diff_parts import DiffOptions
from rolloutdoctor.engine import ray_cluster
from rolloutdoctor.engine.check_parts import CheckWork, measure_with
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.part_states import StateFolder
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.ray_cluster import RayCluster
from rolloutdoctor.hypotheses.fixes import choose
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.views.diff_table import RENDERERS as DIFF_RENDERERS
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")
STYLE = Style(width=100, color=False, unicode=True, verbose=False)
OPTIONS = CheckOptions(device="cpu")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        rays.surround(patch)
        ray.init(
            address="local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False
        )
        # The works below are of no module that a worker could import.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Two files; step 3 is in both."""
    folder = tmp_path_factory.mktemp("ray")
    columns = random_columns(3, steps=7)
    rows, half = range(len(columns["step"])), 84
    write(folder / "a.parquet", columns, rows=rows[:half], row_group_size=17)
    write(folder / "b.parquet", columns, rows=rows[half:], row_group_size=17)
    return folder


@dataclass(frozen=True)
class Faulty(CheckWork):
    """Does something to the worker before it measures part 1; `marker` notes how often."""

    marker: Path = Path()
    fault: str = ""
    always: bool = False

    def measure(self, part, progress):
        with (self.marker / f"{part.number}-{os.getpid()}-{os.urandom(4).hex()}").open("w"):
            pass
        tries = len(list(self.marker.glob(f"{part.number}-*")))
        if part.number == 1 and (self.always or tries == 1):
            if self.fault == "die":
                os._exit(1)
            if self.fault == "memory":
                raise MemoryError
            raise OSError("the disk went away")
        return super().measure(part, progress)


def rendered(run, executor):
    prepared = prepare(run, OPTIONS)
    report = report_of(prepared, measure_with(executor, prepared))
    return {name: render(report, STYLE) for name, render in RENDERERS.items()}


def states(run, work, **options):
    return [work.dumped(state) for state in RayCluster(**options).measure(work, run)]


def test_bytes_are_those_of_one_process_and_a_folder_of_states_resumes(path, tmp_path):
    run = open_run([path])
    one = rendered(run, None)
    folder = StateFolder(tmp_path / "states")
    assert rendered(run, RayCluster(states=folder)) == one
    kept = sorted(folder.path.iterdir())
    assert len(kept) == 7
    kept[0].unlink()
    kept[1].write_bytes(kept[1].read_bytes()[:-30])
    before = [file.stat().st_mtime_ns for file in kept[2:]]
    assert rendered(run, RayCluster(states=folder)) == one
    assert sorted(folder.path.iterdir()) == kept
    assert [file.stat().st_mtime_ns for file in kept[2:]] == before
    # With other options or files nothing of it is taken.
    calls = []
    work = CheckWork(CheckOptions(device="cpu", dtype="float64"))
    measured = RayCluster(states=folder).measure(work, run, progress=lambda *call: calls.append(call))
    assert len(measured) == 7
    assert calls == sorted(calls)
    assert len(calls) == 7
    assert calls[-1][0] == calls[-1][1] >= run.size()
    assert len(list(folder.path.iterdir())) == 14


def test_a_comparison_has_the_bytes_of_one_process(path, tmp_path):
    run = open_run([path])
    options = DiffOptions(fixes=(choose("zero-std"), choose("rejected-rows")), device="cpu", by="reward", top=3)

    def compared(executor):
        found = diff(run, options, None, executor)
        return {name: render(found, STYLE) for name, render in DIFF_RENDERERS.items()}

    one, folder = compared(None), StateFolder(tmp_path / "states")
    assert compared(RayCluster(states=folder)) == one
    kept = sorted(folder.path.iterdir())
    assert len(kept) == 7
    kept[3].unlink()
    before = [file.stat().st_mtime_ns for file in (*kept[:3], *kept[4:])]
    assert compared(RayCluster(states=folder)) == one
    assert [file.stat().st_mtime_ns for file in (*kept[:3], *kept[4:])] == before


@pytest.mark.parametrize("fault", ["die", "fail", "memory"])
def test_a_part_that_fails_once_is_counted_once(path, tmp_path, fault):
    run = open_run([path])
    found = states(run, Faulty(OPTIONS, tmp_path, fault))
    assert found == states(run, CheckWork(OPTIONS))
    assert len(list(tmp_path.glob("1-*"))) == 2
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", r"the worker of steps 1:2 ended without a word \(WorkerCrashedError\); tried 2 times"),
        ("fail", "the disk went away; tried 2 times"),
        ("memory", "the node had no memory left for steps 1:2; tried 2 times"),
    ],
)
def test_a_part_that_always_fails_is_one_sentence(path, tmp_path, fault, words):
    with pytest.raises(InputError, match=words):
        states(open_run([path]), Faulty(OPTIONS, tmp_path, fault, always=True), attempts=2)


def test_a_part_that_no_node_can_hold_is_refused(path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "BASE_BYTES", 2**50)
    with pytest.raises(InputError, match=r"steps :1 need about 1048576.0 GiB, and no node of the cluster offers more"):
        states(open_run([path]), CheckWork(OPTIONS))


def test_a_file_that_disappears_or_changes_is_named(tmp_path):
    columns = random_columns(1, steps=4)
    file = write(tmp_path / "run.parquet", columns, row_group_size=24)
    run = open_run([file])
    file.touch()
    with pytest.raises(InputError, match=r"run\.parquet: the file changed after its footer was read"):
        states(run, CheckWork(OPTIONS), attempts=1)
    file.unlink()
    with pytest.raises(InputError, match=r"run\.parquet: .*; every worker has to see the file"):
        states(run, CheckWork(OPTIONS), attempts=1)


def test_bad_data_is_not_tried_again(tmp_path):
    columns = random_columns(1, steps=6)
    for row in (30, 100):
        columns["ref_log_probs"][row] = columns["ref_log_probs"][row][:-1]
    run = open_run([write(tmp_path / "run.parquet", columns, row_group_size=24)])
    with pytest.raises(DataError, match="row 30") as caught:
        states(run, CheckWork(OPTIONS))
    assert "; tried" not in str(caught.value)


def test_a_worker_of_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "VERSIONS", ("99.0.0", ray_cluster.VERSIONS[1]))
    with pytest.raises(InputError, match=r"a worker has rolloutdoctor \S+ on Python \S+ and this command .* 99\.0\.0"):
        states(open_run([path]), CheckWork(OPTIONS))


def test_what_ray_prints_does_not_reach_the_report(path, monkeypatch, capsys):
    """A driver prints that a node went away whenever it hears of it, whatever it is told of logs."""
    turn = ray_cluster._Turns.run
    joined = []

    def join(**options):
        joined.append(options["address"])
        print("a node joined")

    def run(self, parts, keep):
        print("a node has been marked dead")
        turn(self, parts, keep)

    run_there = open_run([path])
    one = states(run_there, CheckWork(OPTIONS))
    for name, made in (
        ("is_initialized", lambda: bool(joined)),
        ("init", join),
        ("shutdown", lambda: print("a node left")),
    ):
        monkeypatch.setattr(ray, name, made)
    monkeypatch.setattr(ray_cluster._Turns, "run", run)
    assert states(run_there, CheckWork(OPTIONS), address="there:1") == one
    print("the report")
    printed = capsys.readouterr()
    assert (joined, printed.out) == (["there:1"], "the report\n")
    assert printed.err.splitlines() == ["a node joined", "a node has been marked dead", "a node left"]
