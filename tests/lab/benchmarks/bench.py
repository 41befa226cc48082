"""Speed and memory as ratios taken in one run: ``make bench``, or ``python tests/lab/benchmarks/bench.py --quick``.

Each line compares two things that are measured in turn, several times, on the same machine; the ratio is that of the
medians. The processes get the machine's cores as they are. ``--write`` puts the table into results.md.
"""

import argparse
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rolloutdoctor.cli.process import prepare_process  # noqa: E402 - called before the imports below

# Before anything heavy is imported, as the command line does it.
prepare_process()

import converting  # noqa: E402
import gpu  # noqa: E402
import reading  # noqa: E402
import recording  # noqa: E402
import upstream  # noqa: E402

SECTIONS = {
    "check": reading.checks,
    "rules": reading.rules,
    "memory": reading.memory,
    "layouts": reading.layouts,
    "advantages": upstream.advantages,
    "loss": upstream.loss,
    "convert": converting.rows,
    "recording": recording.trl_steps,
    "gpu": gpu.evaluation,
    "start": reading.start,
}


def machine():
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU"
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "pyarrow", "polars", "numpy"))
    return f"{model}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {versions}"


def _lines(path):
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="small files and few repeats")
    parser.add_argument("--write", action="store_true", help="put the table into results.md")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))} (known: {', '.join(SECTIONS)})")
    lines = [machine(), "", "| what | against | ratio | aim |", "| --- | --- | --- | --- |"]
    print(*lines, sep="\n", flush=True)
    for name in options.sections or SECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            for row in SECTIONS[name](options.quick, Path(folder)):
                lines.append("| " + " | ".join(row) + " |")
                print(lines[-1], flush=True)
    if options.write:
        title = "# What was measured last\n\n`make bench` measures again. "
        (HERE / "results.md").write_text(title + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
