"""What the driver of a very large check costs: plans over thousands of made-up footers, and the sum of small states.

    python tests/lab/benchmarks/far_end.py 1000 10000 100000

One small file is written and its footer is read; the other files are that one under other names, with steps of their
own in the statistics. For each number of files: seconds and bytes of cutting the run into parts, of naming and packing
the parts, and the peak of the process. Nothing is read beyond the one footer.
"""

import pickle
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.engine.gathering import Gathering
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.part_states import part_name, run_identity
from rolloutdoctor.engine.parts import plan_parts
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import Run, open_run

STEPS_PER_FILE = 4


def made_up(folder: Path, count: int) -> Run:
    """A run of many files, all with the footer of one but for the ends of their steps."""
    path = folder / "one.parquet"
    steps = np.repeat(np.arange(STEPS_PER_FILE), 64)
    tokens = pa.array([[0.0] * 8] * len(steps), pa.list_(pa.float32()))
    names = ("old_log_probs", "ref_log_probs", "policy_log_probs", "rollout_log_probs", "advantages")
    columns = {"step": steps, "reward": np.ones(len(steps)), "group_id": steps} | dict.fromkeys(names, tokens)
    pq.write_table(pa.table(columns), path, row_group_size=64)
    (one,) = open_run([path]).stored_files()
    (place,) = one.leaves["step"]
    files = []
    for number in range(count):
        groups = []
        for group, chunks in enumerate(one.chunks):
            end = (number * STEPS_PER_FILE + group).to_bytes(8, "little")
            groups.append([each._replace(ends=(end, end)) if at == place else each for at, each in enumerate(chunks)])
        files.append(replace(one, source=Source(f"/far/{number:06d}.parquet", f"{number:06d}.parquet"), chunks=groups))
    return Run(files, one.metadata, LoggedMetrics())


def measure(count: int) -> None:
    """Print one line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        run = made_up(Path(folder), count)
    before = _peak()
    began = time.perf_counter()
    parts = plan_parts(run, None, None, max(64, count // 4))
    planned = time.perf_counter()
    work, whole = Gathering(CheckOptions(device="cpu")), run_identity(run)
    for part in parts:
        part_name(work, part, whole)
    named = time.perf_counter()
    sizes = [len(pickle.dumps((work, part))) for part in parts]
    packed = time.perf_counter()
    print(
        f"| {count:,} | {len(parts):,} | {planned - began:.2f} | {named - planned:.2f} | {packed - named:.2f} "
        f"| {sum(sizes) / len(sizes) / 1024:.0f} | {before:.0f} | {_peak():.0f} |"
    )


def _peak() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(int(sys.argv[1]))
    else:
        print("| files | parts | plan, s | name, s | pack, s | part, KiB | footers, MiB | peak, MiB |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
        for size in sys.argv[1:]:
            subprocess.run([sys.executable, __file__, size], check=True)
