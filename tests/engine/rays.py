"""A Ray cluster of two nodes on this machine, and works that something happens to; see `test_ray`."""

import os
import secrets
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.engine import ray_cluster
from rolloutdoctor.engine.gathering import Gathering

TOKEN = secrets.token_hex(32)
"""Of the clusters of this process, which reads it once. Ray would else make one in the home of the user."""

STORE = 80 * 2**20


@contextmanager
def two_nodes(patch):
    """Two nodes with one processor each, joined by this process; gives the cluster, and the node that can go."""
    import ray
    from ray.cluster_utils import Cluster

    patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    patch.setenv("RAY_AUTH_TOKEN", TOKEN)
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    patch.setattr(ray_cluster, "BASE_BYTES", 2**20)
    each = {"num_cpus": 1, "object_store_memory": STORE}
    # Nobody looks at it, reads its logs, or wants it to grow.
    alone = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={**each, **alone})
    try:
        node = cluster.add_node(**each)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        # The works below are of no module that a worker could import.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield cluster, node
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclass(frozen=True)
class Faulty(Gathering):
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


@dataclass(frozen=True)
class Waiting(Gathering):
    """Says on which node it is, and waits on one that will go; on the other, until that one has something to do."""

    marker: Path = Path()
    doomed: str = ""

    def measure(self, part, progress):
        import ray

        here = ray.get_runtime_context().get_node_id()
        (self.marker / f"{here}-{part.number}-{os.urandom(4).hex()}").touch()
        if here == self.doomed:
            time.sleep(600)
        end = time.monotonic() + 300
        while not list(self.marker.glob(f"{self.doomed}-*")) and time.monotonic() < end:
            time.sleep(0.02)
        return super().measure(part, progress)
