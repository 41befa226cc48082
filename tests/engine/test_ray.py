"""A Ray cluster gives the bytes of one process, loses nothing, counts nothing twice, and says why it cannot go on.

Workers die, a node goes, and the driver is killed and started again.
"""

import importlib
import json
import os
import re
import signal
import stat
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine.rays import Faulty, Waiting, two_nodes
from engine.runs import random_columns, write

from rolloutdoctor.commands.diff.formats import RENDERERS as DIFF_RENDERERS
from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.commands.diff.sides import DiffOptions
from rolloutdoctor.commands.export.token_parts import MANIFEST
from rolloutdoctor.engine import ray_cluster
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.gathering import Gathering, measure
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.part_states import StateFolder
from rolloutdoctor.engine.parts import tree_sum
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.ray_cluster import RayCluster
from rolloutdoctor.engine.stored import members_of
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

pytestmark = [pytest.mark.ray, pytest.mark.slow(every=True)]
ray = pytest.importorskip("ray")
STYLE = Style(width=100, color=False, unicode=True, verbose=False)
OPTIONS = CheckOptions(device="cpu")
ROOT = Path(__file__).parents[2]
RUN = ROOT / "sample_data" / "run.parquet"


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with pytest.MonkeyPatch.context() as patch, two_nodes(patch) as both:
        yield both


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Two files; step 3 is in both."""
    folder = tmp_path_factory.mktemp("ray")
    columns = random_columns(3, steps=7)
    rows, half = range(len(columns["step"])), 84
    write(folder / "a.parquet", columns, rows=rows[:half], row_group_size=17)
    write(folder / "b.parquet", columns, rows=rows[half:], row_group_size=17)
    return folder


def rendered(run, executor):
    prepared = prepare(run, OPTIONS)
    report = report_of(prepared, measure(prepared, executor=executor))
    return {name: render(report, STYLE) for name, render in RENDERERS.items()}


def states(run, work, **options):
    return [members_of(state) for state in RayCluster(**options).measure(work, run)]


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
    work = Gathering(CheckOptions(device="cpu", dtype="float64"))
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
    found = states(run, Faulty(OPTIONS, marker=tmp_path, fault=fault))
    assert found == states(run, Gathering(OPTIONS))
    assert len(list(tmp_path.glob("1-*"))) == 2
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", r"the worker of steps 1:2 died \(WorkerCrashedError\); tried 2 times"),
        ("fail", "the disk went away; tried 2 times"),
        ("memory", "the node had no memory left for steps 1:2; tried 2 times"),
    ],
)
def test_a_part_that_always_fails_is_one_sentence(path, tmp_path, monkeypatch, fault, words):
    # To cancel what is in flight would now and then abort this process.
    monkeypatch.delattr(ray, "cancel")
    with pytest.raises(InputError, match=words):
        states(open_run([path]), Faulty(OPTIONS, marker=tmp_path, fault=fault, always=True), attempts=2)


def test_a_part_that_no_node_can_hold_is_refused(path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "BASE_BYTES", 2**50)
    with pytest.raises(InputError, match=r"steps :1 need about 1048576.0 GiB, and no node of the cluster offers more"):
        states(open_run([path]), Gathering(OPTIONS))


def test_a_file_that_disappears_or_changes_is_named(tmp_path):
    columns = random_columns(1, steps=4)
    file = write(tmp_path / "run.parquet", columns, row_group_size=24)
    run = open_run([file])
    file.touch()
    with pytest.raises(InputError, match=r"run\.parquet: the file changed after its footer was read"):
        states(run, Gathering(OPTIONS), attempts=1)
    file.unlink()
    with pytest.raises(InputError, match=r"run\.parquet: .*; every worker has to see the file"):
        states(run, Gathering(OPTIONS), attempts=1)


def test_bad_data_is_not_tried_again(tmp_path):
    columns = random_columns(1, steps=6)
    for row in (30, 100):
        columns["ref_log_probs"][row] = columns["ref_log_probs"][row][:-1]
    run = open_run([write(tmp_path / "run.parquet", columns, row_group_size=24)])
    with pytest.raises(DataError, match="row 30") as caught:
        states(run, Gathering(OPTIONS))
    assert "; tried" not in str(caught.value)


def test_a_worker_of_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "VERSIONS", ("99.0.0", ray_cluster.VERSIONS[1]))
    with pytest.raises(InputError, match=r"a worker has rolloutdoctor \S+ on Python \S+ and this command .* 99\.0\.0"):
        states(open_run([path]), Gathering(OPTIONS))


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
    one = states(run_there, Gathering(OPTIONS))
    for name, made in (
        ("is_initialized", lambda: bool(joined)),
        ("init", join),
        ("shutdown", lambda: print("a node left")),
    ):
        monkeypatch.setattr(ray, name, made)
    monkeypatch.setattr(ray_cluster._Turns, "run", run)
    assert states(run_there, Gathering(OPTIONS), address="there:1") == one
    print("the report")
    printed = capsys.readouterr()
    assert (joined, printed.out) == (["there:1"], "the report\n")
    assert printed.err.splitlines() == ["a node joined", "a node has been marked dead", "a node left"]


def test_a_driver_that_is_killed_goes_on_where_it_stood(nodes, started, tmp_path):
    cluster, _ = nodes
    folder, states = tmp_path / "parts", tmp_path / "states"
    engine = ("--engine", f"ray={cluster.address}", "--state-dir", states, "--format", "json", "--quiet")
    command = ("export", "--what", "tokens", RUN, "--steps", ":24", "-o", f"{folder}/", *engine)
    driver = started(*command)
    end = time.monotonic() + 300
    while time.monotonic() < end and len(list(tmp_path.glob("states/*.state"))) < 3:
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    out, _ = driver.communicate()
    assert (driver.returncode, out) == (-signal.SIGKILL, "")
    assert not (folder / MANIFEST).exists()
    kept = {file: file.stat().st_mtime_ns for file in states.glob("*.state")}
    assert len(kept) >= 3
    again = started(*command)
    out, said = again.communicate(300)
    assert (again.returncode, said) == (0, "")
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    one = started(
        "export", "--what", "tokens", RUN, "--steps", ":24", "-o", tmp_path / "one.parquet", "--format", "json", "-q"
    )
    assert one.communicate()[0] == out
    parts = json.loads((folder / MANIFEST).read_text())["parts"]
    tables = [pq.read_table(folder / part["file"]) for part in parts]
    assert pa.concat_tables(tables).equals(pq.read_table(tmp_path / "one.parquet"))
    assert {each.name for each in folder.iterdir()} == {MANIFEST, *(part["file"] for part in parts)}


def test_a_driver_that_is_asked_to_end_says_so(nodes, started, tmp_path):
    """Ray's own handlers would print a stack and end it with exit code 15."""
    cluster, _ = nodes
    engine = ("--engine", f"ray={cluster.address}", "--state-dir", tmp_path / "states", "--quiet")
    driver = started("export", "--what", "tokens", RUN, "--steps", ":24", "-o", f"{tmp_path / 'parts'}/", *engine)
    end = time.monotonic() + 300
    while time.monotonic() < end and not list(tmp_path.glob("states/*.state")):
        time.sleep(0.02)
    driver.send_signal(signal.SIGTERM)
    out, said = driver.communicate()
    assert (driver.returncode, out) == (128 + signal.SIGTERM, "")
    # What has a name then are the states, and maybe parts; Ray may speak of tasks that were under way.
    assert "SIGTERM" not in said
    assert re.search(r"^rolloutdoctor: terminated; [^\n]* was written before\n\Z", said, re.MULTILINE)


def test_a_node_that_goes_loses_nothing(nodes, tmp_path):
    cluster, node = nodes
    run = open_run([write(tmp_path / "run.parquet", random_columns(3, steps=7), row_group_size=17)])
    options = CheckOptions(device="cpu")
    plain = Gathering(options)
    work = Waiting(options, marker=tmp_path, doomed=node.node_id)

    def take_away():
        while not list(tmp_path.glob(f"{node.node_id}-*")):
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    taker = threading.Thread(target=take_away, daemon=True)
    taker.start()
    found = RayCluster().measure(work, run)
    taker.join(300)
    assert list(tmp_path.glob(f"{node.node_id}-*"))
    assert members_of(tree_sum(found)) == members_of(tree_sum(Processes(1).measure(plain, run)))
    assert len(found) == 7


@pytest.mark.parametrize(
    ("command", "more", "address"), [("check", ["--exit-zero"], "local"), ("diff", ["--fix", "zero-std"], "")]
)
def test_a_command_on_a_cluster(nodes, started, command, more, address):
    words = [command, RUN, "--steps", ":5", *more, "--format", "json", "--quiet"]
    one, _ = started(*words).communicate()
    there = started(*words, "--engine", f"ray={address or nodes[0].address}")
    # Of the node that went in the test before, Ray may speak now: on standard error.
    several, said = there.communicate(300)
    assert (there.returncode, several) == (0, one), said
    assert one


def test_a_cluster_of_its_own_is_reached_by_nobody_else(monkeypatch):
    """Ray has no login; what it asks and where it listens was seen with strace."""
    given = {}
    services = importlib.import_module("ray._private.services")
    start = services.start_api_server

    class Fake:
        def is_initialized(self):
            return False

        def init(self, **how):
            given.update(how, api=services.start_api_server(), mode=stat.S_IMODE(Path(how["_temp_dir"]).stat().st_mode))

        def shutdown(self):
            given["left"] = True

    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "1")
    ray_cluster._imported(alone=True)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    with ray_cluster._Connection(Fake(), "local"):
        assert given["_node_ip_address"] == "127.0.0.1"
        assert (given["mode"], given["api"], given["include_dashboard"]) == (0o700, (None, None), False)
        # A path of a socket has 107 bytes, and Ray's own part of it 62.
        assert len(given["_temp_dir"]) <= len(tempfile.gettempdir()) + 41
    assert given["left"]
    assert not Path(given["_temp_dir"]).exists()
    assert services.start_api_server is start
