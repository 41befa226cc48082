"""The run that benchmarks are timed on has no fault: a check that ends with 1 would end them."""

import pytest
from benchmarks.generate import write_run

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.findings import Severity


@pytest.mark.parametrize("ids", [False, True])
def test_the_generated_run_has_no_fault(tmp_path, ids):
    path = tmp_path / "run.parquet"
    assert write_run(path, tokens=60_000, steps=4, ids=ids) > 30_000
    report = check(open_run([path]), CheckOptions(device="cpu"))
    assert report.worst() in {Severity.INFO, Severity.WARNING}
