"""Memory of the tables of a run against its responses: made-up rows of all rules, kept within `--memory`, and judged.

    PYTHONPATH=. python tests/lab/benchmarks/tables.py [SIZE] [RESPONSES[/ROWS]...]

Four steps of 512 responses with all that a recorder writes are measured once. Their tables come again and again, as
later steps with other names, numbers and responses, to prompts that recur every hundred steps, until there are as many
responses, the first ROWS of each step; no token is evaluated for them. Each line is a process of its own: peaks are
beyond what it has before the first copy, in MiB.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.generate import write_run
from benchmarks.measure import forget_peak, memory_mib

STEPS, ROWS = 4, 512


def write_template(path):
    """Write a run with token ids, prompts, entropies, policy versions, ranks and micro-batches."""
    write_run(path, tokens=835 * ROWS * STEPS, steps=STEPS, ids=True)
    table = pq.read_table(path)
    mask, step = table.column("response_mask").combine_chunks(), table.column("step").to_numpy()
    row = np.arange(table.num_rows)
    entropy = np.random.default_rng(1).exponential(0.5, len(mask.values)).astype(np.float32)
    more = {
        "entropy": pa.ListArray.from_arrays(mask.offsets, pa.array(entropy)),
        "policy_version_min": pa.array(step - row % 3),
        "policy_version_max": pa.array(step),
        "rank": pa.array(row % 8),
        "micro_batch_id": pa.array(row // 32 % 16),
        "optim_step_id": pa.array(step),
    }
    for name, column in more.items():
        table = table.append_column(name, column)
    pq.write_table(table, path, row_group_size=ROWS)


def others(part, copy):
    """Return the hashes of other responses, and of the prompts of one of 25 batches, as expressions."""
    hashes = [name for name, kind in part.schema.items() if kind == pl.Int64 and (part[name].max() or 0) > 2**40]
    again = ("prompt", "context")
    return {name: pl.col(name) ^ (copy % 25 if any(word in name for word in again) else copy) for name in hashes}


def simulated(path, size, responses, rows=ROWS):
    """Make the tables of a long run, judge them, and print what that took."""
    from rolloutdoctor.data.step_key import StepKey
    from rolloutdoctor.engine import judge as judging
    from rolloutdoctor.engine.gathering import measure
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.engine.prepare import prepare
    from rolloutdoctor.engine.run_state import RunState
    from rolloutdoctor.engine.tables import Tables
    from rolloutdoctor.engine.tables_on_disk import DiskPart, MemoryBound, TableFrames
    from rolloutdoctor.evaluation.run_tables import TABLES
    from rolloutdoctor.io.run import open_run
    from rolloutdoctor.results.findings import InputSummary

    prepared = prepare(open_run([path]), CheckOptions(device="cpu"))
    template = measure(prepared)
    frames, seen = TableFrames(MemoryBound.parse(size)), []
    forget_peak()
    start, begun = memory_mib("VmRSS"), time.perf_counter()
    for copy in range(responses // (STEPS * rows)):
        later, factor = pl.col("step") + STEPS * copy, 1 + 1e-3 * np.sin(copy)
        for part in template.tables.rows:
            names = {"step": later, "sample_id": pl.format("{}/{}", later, "row")} | others(part, copy)
            part = part if rows == ROWS else part.filter(pl.col("row") < rows)
            frames.add("rows", part.with_columns(pl.col(pl.Float64) * factor, **names))
        for one in template.tables.metrics:
            frames.add("metrics", one.with_columns(later, logged=pl.col("logged") * factor))
        for one in template.tables.audit:
            frames.add("audit", one.with_columns(later))
        seen += [StepKey(key.step + STEPS * copy, key.split) for key in template.seen]
    tables = Tables(**frames.taken())
    state = RunState(
        InputSummary(responses, len(seen), 0, 0), seen=tuple(sorted(seen)), audit=template.audit, tables=tables
    )
    files = [part for name in TABLES for part in getattr(tables, name) if isinstance(part, DiskPart)]
    disk = sum(part._path.stat().st_size for part in files) / 2**20
    measured, seconds, begun = memory_mib("VmHWM") - start, time.perf_counter() - begun, time.perf_counter()
    peaks = {}
    look, own = judging._seen_by, [("", 0.0)]

    def peaking(rule, *given):
        name, before = own[0]
        peaks[name] = memory_mib("VmHWM") - before
        forget_peak()
        own[0] = rule.code, memory_mib("VmRSS")
        peaks["all"] = max(peaks.get("all", 0.0), peaks[name] + before - start if name else measured)
        return look(rule, *given)

    judging._seen_by = peaking
    judging.judge(prepared.plan, state, prepared.configured, device="cpu", dtype="float32")
    widest = max((peak, name) for name, peak in peaks.items() if name not in ("", "all"))
    print(json.dumps([measured, disk, seconds, peaks["all"], *widest, time.perf_counter() - begun]))


def main(size="1GB", *counts):
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.parquet"
        write_template(path)
        print(f"--memory {size}; MiB beyond start-up, and seconds\n")
        print("| responses | steps | peak, measured | on disk | s | peak, judged | widest rule | s |")
        print(f"| ---: {'| ---: ' * 5}| --- | ---: |")
        for count in counts or ("1_000_000", "4_000_000"):
            responses, _, rows = count.partition("/")
            words = [sys.executable, __file__, "one", str(path), size, responses, rows or str(ROWS)]
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            measured, disk, seconds, peak, wide, name, more = json.loads(said.splitlines()[-1])
            cells = f"{measured:,.0f} | {disk:,.0f} | {seconds:.0f} | {peak:,.0f} | {name}, {wide:,.0f} | {more:.0f}"
            steps = int(responses) // (STEPS * int(rows or ROWS)) * STEPS
            print(f"| {int(responses):,} | {steps:,} | {cells} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        simulated(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main(*sys.argv[1:])
