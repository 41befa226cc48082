"""One table about a GPU: which it is, how long a check takes there and on the CPU, and how far the two agree."""

import argparse
import platform
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.generate import write_run

from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.evaluation.device import Evaluator
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.io.run import open_run
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.version import __version__

SIZES = ((1_000_000, 50), (25_000_000, 16))
"""Tokens and steps of the runs."""


def about():
    """Yield names and values: the chip, and what drives it."""
    yield "rolloutdoctor", __version__
    yield "torch", torch.__version__
    yield "CUDA or ROCm", torch.version.cuda or torch.version.hip or "none"
    if torch.cuda.is_available():
        chip = torch.cuda.get_device_properties(0)
        yield "chip", f"{chip.name}, {chip.total_memory / 2**30:.0f} GiB"
    yield "processor", platform.processor() or platform.machine()


def seconds(work):
    """Return how long it takes, and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def agreement(run):
    """Largest difference of the first step of each kind, as a share of its rounding error bound."""
    ready = prepare(run, CheckOptions(device="cuda"))
    rules = RuleAccumulator(ready.plan)
    evaluator = Evaluator(find_device("cuda"))
    with evaluation_mode():
        for batch in run.batches(rules.columns, dtype=torch.float32):
            evaluator.evaluate(batch, EvaluationRequest(rules.objectives, torch.float32))
            break
    return max(evaluator.compared.values())


def findings(report):
    """What a report says, without numbers."""
    return [(one.code, one.severity, one.verdict) for one in report.findings]


def lines(folder, sizes=SIZES):
    """Yield the lines of the table."""
    yield "| | |"
    yield "| --- | --- |"
    for name, value in about():
        yield f"| {name} | {value} |"
    yield ""
    yield "| tokens | steps | check, CPU | check, GPU | CPU / GPU | findings | largest difference / bound |"
    yield "| ---: | ---: | ---: | ---: | ---: | --- | ---: |"
    for tokens, steps in sizes:
        path = Path(folder) / f"{tokens}.parquet"
        exact = write_run(path, tokens=tokens, steps=steps)
        run = open_run([path])
        share = agreement(run)
        taken = {name: seconds(lambda: check(run, CheckOptions(device=name))) for name in ("cpu", "cuda")}  # noqa: B023 - called at once
        (here, on_cpu), (there, on_gpu) = taken.values()
        same = "equal" if findings(on_cpu) == findings(on_gpu) else "DIFFERENT"
        yield f"| {exact:,} | {steps} | {here:.1f} s | {there:.1f} s | {here / there:.2f} | {same} | {share:.2g} |"


def main():
    """Print the table as it comes."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no GPU here; install its build for CUDA or ROCm")
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(folder):
            print(line, flush=True)


if __name__ == "__main__":
    main()
