"""A Ray cluster of two nodes: one of them goes, and the driver is killed and started again."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine import rays
from engine.runs import random_columns, write

from rolloutdoctor.commands.recompute_parts import MANIFEST
from rolloutdoctor.engine.check_parts import CheckWork
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Serial, tree_sum
from rolloutdoctor.engine.ray_cluster import RayCluster
from rolloutdoctor.io.run import open_run

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
RUN = ROOT / "sample_data" / "run.parquet"
STORE = 80 * 2**20


@pytest.fixture(scope="module")
def nodes():
    """Two raylets on this machine, each with one processor."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        rays.surround(patch)
        arguments = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=arguments)
        yield cluster, cluster.add_node(num_cpus=1, object_store_memory=STORE)
        ray.shutdown()
        cluster.shutdown()


def test_a_driver_that_is_killed_goes_on_where_it_stood(nodes, started, tmp_path):
    cluster, _ = nodes
    folder, states = tmp_path / "parts", tmp_path / "states"
    engine = ("--engine", f"ray={cluster.address}", "--state-dir", states, "--format", "json", "--quiet")
    command = ("recompute", RUN, "--steps", ":24", "-o", f"{folder}/", *engine)
    driver = started(*command)
    end = time.monotonic() + 120
    while time.monotonic() < end and len(list(tmp_path.glob("states/*.json"))) < 3:
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    out, _ = driver.communicate()
    assert (driver.returncode, out) == (-signal.SIGKILL, "")
    assert not (folder / MANIFEST).exists()
    kept = {file: file.stat().st_mtime_ns for file in states.glob("*.json")}
    assert len(kept) >= 3
    again = started(*command)
    out, said = again.communicate(300)
    assert (again.returncode, said) == (0, "")
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    one = started("recompute", RUN, "--steps", ":24", "-o", tmp_path / "one.parquet", "--format", "json", "-q")
    assert one.communicate()[0] == out
    parts = json.loads((folder / MANIFEST).read_text())["parts"]
    tables = [pq.read_table(folder / part["file"]) for part in parts]
    assert pa.concat_tables(tables).equals(pq.read_table(tmp_path / "one.parquet"))
    assert {each.name for each in folder.iterdir()} == {MANIFEST, *(part["file"] for part in parts)}


@dataclass(frozen=True)
class Waiting(CheckWork):
    """Says on which node it is, and waits on one that will go; on the other, until that one has something to do."""

    marker: Path = Path()
    doomed: str = ""

    def measure(self, part, progress):
        here = ray.get_runtime_context().get_node_id()
        (self.marker / f"{here}-{part.number}-{os.urandom(4).hex()}").touch()
        if here == self.doomed:
            time.sleep(600)
        end = time.monotonic() + 60
        while not list(self.marker.glob(f"{self.doomed}-*")) and time.monotonic() < end:
            time.sleep(0.02)
        return super().measure(part, progress)


def test_a_node_that_goes_loses_nothing(nodes, tmp_path):
    cluster, node = nodes
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    # The work is of no module that a worker could import.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    run = open_run([write(tmp_path / "run.parquet", random_columns(3, steps=7), row_group_size=17)])
    options = CheckOptions(device="cpu")
    plain = CheckWork(options)
    work = Waiting(options, tmp_path, node.node_id)

    def take_away():
        while not list(tmp_path.glob(f"{node.node_id}-*")):
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    taker = threading.Thread(target=take_away, daemon=True)
    taker.start()
    found = RayCluster().measure(work, run)
    taker.join(60)
    assert list(tmp_path.glob(f"{node.node_id}-*"))
    assert plain.dumped(tree_sum(found)) == plain.dumped(tree_sum(Serial().measure(plain, run)))
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
