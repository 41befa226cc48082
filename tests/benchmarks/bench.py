"""Speed and memory as ratios taken in one run: ``make bench``, or ``python tests/benchmarks/bench.py --quick``.

Each line compares two things that are measured in turn, several times, on the same machine; the ratio is that of the
medians. The processes get the machine's cores as they are.
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
DECODE = """
import sys, pyarrow.parquet as pq
file = pq.ParquetFile(sys.argv[1])
columns = [name for name in file.schema_arrow.names]
for group in range(file.num_row_groups):
    file.read_row_group(group, columns=columns)
"""


def interleaved(repeats, *works):
    """Median seconds of each work, measured in turn."""
    found = [[] for _ in works]
    for _ in range(repeats):
        for work, seconds in zip(works, found, strict=True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in found]


def process(*words):
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def peak_mib(*words):
    """Peak resident memory of a process of its own, MiB."""
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *map(str, words)], capture_output=True, check=True
    )
    return int(found.stdout) / 1024


def reading(path, repeats):
    """Full check against decoding the same columns, in a warm process and as processes of their own."""
    import pyarrow.parquet as pq

    from rolloutdoctor.engine.check import CheckOptions, check
    from rolloutdoctor.io.run import open_run

    file = pq.ParquetFile(path)

    def decode():
        for group in range(file.num_row_groups):
            file.read_row_group(group)

    warm = interleaved(repeats, decode, lambda: check(open_run([path]), CheckOptions(device="cpu")))
    shell = ("-m", "rolloutdoctor", "check", path, "--quiet", "--device", "cpu")
    cold = interleaved(repeats, lambda: process("-c", DECODE, path), lambda: process(*shell))
    return warm, cold


def advantages(repeats, rows=32_768, width=1024):
    """Our estimators against verl's on the padded tensors they need; seconds of verl by seconds of ours."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import numpy as np
    import torch
    from verl.trainer.ppo import core_algos

    from rolloutdoctor.batch import Groups
    from rolloutdoctor.row_pass import evaluate_rows
    from rolloutdoctor.testing import random_batch
    from rolloutdoctor.trainers.options import Layer, parse_version, resolve
    from rolloutdoctor.trainers.table import find

    batch = random_batch(0, sizes=(16,) * (rows // 16), longest=64, adjacent=True)
    assert isinstance(batch.groups, Groups)
    index = np.array([str(group) for group in batch.groups.index_N.tolist()], dtype=object)
    lengths = batch.rows.diff().clamp(min=1)
    mask = (torch.arange(width) < (lengths * 16)[:, None]).float()
    scores = torch.zeros(rows, width)
    scores[torch.arange(rows), (lengths * 16 - 1).clamp(max=width - 1)] = batch.column("reward").float()
    verl = find("verl")
    ratios = {}
    for name in ("grpo", "rloo", "opo", "gpg"):
        config = resolve(verl.options, parse_version(verl.newest), [Layer("", {"adv_estimator": name})], trainer="verl")
        objective = verl.objective(config)
        theirs_function = core_algos.get_adv_estimator_fn(name)

        def theirs(function=theirs_function):
            function(token_level_rewards=scores, response_mask=mask, index=index, config=None)

        def ours(objective=objective):
            evaluate_rows(batch, objective)

        slow, fast = interleaved(repeats, theirs, ours)
        ratios[name] = slow / fast
    return ratios


def converting(folder, sizes, repeats):
    """Converting JSON Lines against `json.loads` of the lines alone, MB a second, and peak memory by size."""
    import json

    from dumps import write_dump

    from rolloutdoctor.engine.convert import ConvertOptions, convert, detect_dump

    paths = [folder / f"{size}.jsonl" for size in sizes]
    written = [write_dump(path, megabytes=size) for path, size in zip(paths, sizes, strict=True)]
    found = detect_dump([str(paths[0])], ConvertOptions())

    def parse():
        with paths[0].open("rb") as file:
            for line in file:
                json.loads(line)

    parsing, seconds = interleaved(repeats, parse, lambda: convert(found, folder / "dump.parquet", ConvertOptions()))
    words = ("-m", "rolloutdoctor", "convert", "--quiet", "-o", folder / "dump.parquet")
    peaks = [peak_mib(*words, path) for path in paths]
    return seconds / parsing, written[0] / 1e6 / seconds, peaks


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small files and few repeats")
    options = parser.parse_args()
    sizes, repeats = ((2_000_000, 8_000_000), 2) if options.quick else ((15_000_000, 60_000_000), 3)
    sys.path.insert(0, str(HERE))
    from generate import write_run

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        measured = []
        for tokens in sizes:
            path = Path(folder) / f"{tokens}.parquet"
            exact = write_run(path, tokens=tokens)
            warm, cold = reading(path, repeats)
            measured.append((exact, *cold))
            rows.append((f"check, {exact / 1e6:.1f} M tokens, warm", "decoding the columns", warm[1] / warm[0], "2.0"))
            rows.append(
                (f"check, {exact / 1e6:.1f} M tokens, from the shell", "the same as a process", cold[1] / cold[0], "3")
            )
        (_, decode_small, check_small), (_, decode_large, check_large) = measured
        marginal = (check_large - check_small) / (decode_large - decode_small)
        rows.append(("a further token in check", "the same for decoding", marginal, "2.0"))
        peaks = []
        for steps in (1, 4, 16):
            path = Path(folder) / f"{steps}steps.parquet"
            write_run(path, tokens=sizes[0] // 16 * steps, steps=steps)
            peaks.append(peak_mib("-m", "rolloutdoctor", "check", path, "--quiet", "--device", "cpu"))
        rows.append(("peak memory, 16 steps", "1 step", peaks[2] / peaks[0], "1.15"))
        dumps = (60, 240) if options.quick else (250, 2000)
        slower, rate, (small, large) = converting(Path(folder), dumps, repeats)
        rows.append((f"convert, {dumps[0]} MB of JSON Lines", "json.loads of the lines alone", slower, "1.5"))
        rows.append(("convert, MB a second", "80", rate / 80, ">= 1"))
        rows.append((f"peak memory of convert, {dumps[1]} MB", f"{dumps[0]} MB", large / small, "1.15"))
    for name, ratio in advantages(repeats).items():
        rows.append((f"verl's {name}, 32k rows", "ours", ratio, ">= 50"))
    help_seconds, typer_seconds = interleaved(
        5, lambda: process("-m", "rolloutdoctor", "--help"), lambda: process("-c", "import typer")
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "pyarrow", "polars"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    print(f"own peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB\n")
    print("| what | against | ratio | aim |\n| --- | --- | --- | --- |")
    for what, against, ratio, aim in rows:
        print(f"| {what} | {against} | {ratio:.2f} | {aim} |")
    print(f"| `--help` | `import typer` | +{help_seconds - typer_seconds:.2f} s | +0.1 s |")


if __name__ == "__main__":
    main()
