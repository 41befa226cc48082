"""Time and memory of check, diff and recompute against the number of parts, and of processes.

    PYTHONPATH=. python tests/lab/benchmarks/parts.py [TOKENS] [STEPS]

Each line is a process of its own. With 1, 4 and 16 parts one process goes through one part after the other, and adds
the states; with processes the run is cut into four parts for each of them. Peaks are of the largest process.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generate import write_run

COMMANDS = ("check", "diff", "recompute")


class InTurn:
    """Measures parts one after the other in this process."""

    def __init__(self, count):
        self._count = count

    def measure(self, work, run, steps=None, split=None, progress=None):
        from rolloutdoctor.engine.parts import plan_parts

        return [work.measure(part, progress) for part in plan_parts(run, steps, split, self._count)]


def measured(command, path, how, count):
    """Do one thing, and print what it took."""
    from rolloutdoctor.commands.diff.query import diff
    from rolloutdoctor.commands.diff.sides import DiffOptions
    from rolloutdoctor.commands.export.tokens import RecomputeOptions, recompute
    from rolloutdoctor.engine.check import report_of
    from rolloutdoctor.engine.gathering import measure
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.engine.prepare import prepare
    from rolloutdoctor.engine.processes import Processes
    from rolloutdoctor.io.run import open_run
    from rolloutdoctor.search.hypotheses.fixes import choose

    executor = InTurn(count) if how == "parts" else Processes(count)
    run = open_run([path])
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if command == "check":
            prepared = prepare(run, CheckOptions(device="cpu"))
            report_of(prepared, measure(prepared, executor=executor))
        elif command == "diff":
            diff(run, DiffOptions(fixes=(choose("zero-std"),), device="cpu"), None, executor)
        else:
            recompute(run, RecomputeOptions(device="cpu"), f"{folder}/", None, executor)
        seconds = time.perf_counter() - begin
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    print(json.dumps([seconds, peak]))


def main(tokens=8_000_000, steps=16):
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.parquet"
        count = write_run(path, tokens=tokens, steps=steps)
        print(f"{count / 1e6:.1f} M tokens in {steps} steps; seconds, and MiB of the largest process\n")
        print(f"| | {' | '.join(COMMANDS)} |\n| --- | {' | '.join('---:' for _ in COMMANDS)} |")
        for how, number in (("parts", 1), ("parts", 4), ("parts", 16), ("processes", 1), ("processes", 2)):
            cells = []
            for command in COMMANDS:
                words = [sys.executable, __file__, "one", command, str(path), how, str(number)]
                said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
                seconds, peak = json.loads(said.splitlines()[-1])
                cells.append(f"{seconds:.1f} s, {peak:.0f}")
            words = {"parts": "part", "processes": "process"}[how] if number == 1 else how
            print(f"| {number} {words} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        measured(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main(*map(int, sys.argv[1:]))
