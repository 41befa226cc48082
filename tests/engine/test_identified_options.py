"""A run of verl that does not name its estimator is checked with the one that gives its logged advantages."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.engine.identified_options import ORIGIN
from rolloutdoctor.results.errors import UsageError

SAMPLES = Path(__file__).parents[2] / "sample_data"
SAMPLES = Path(__file__).parents[2] / "sample_data"
ESTIMATOR, NORMALISED = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"


@pytest.fixture
def unstated(tmp_path):
    """Write the sample of verl without its estimator, with other options, or with other advantages."""

    def write(edit=None, *, drop=(ESTIMATOR, NORMALISED), metadata=True, **options):
        table = pq.read_table(SAMPLES / "verl_rejected.parquet")
        stated = json.loads(table.schema.metadata[b"rolloutdoctor"])
        config = {name: value for name, value in stated["config"].items() if name not in drop}
        stated["config"] = config | options
        table = edit(table) if edit else table
        own = {b"rolloutdoctor": json.dumps(stated).encode()} if metadata else {}
        path = tmp_path / "run.parquet"
        pq.write_table(table.replace_schema_metadata(own), path)
        (tmp_path / "run.metrics.parquet").write_bytes((SAMPLES / "verl_rejected.metrics.parquet").read_bytes())
        return path

    return write


def codes(report):
    return [(finding.code, finding.headline) for finding in report.findings], report.clean, report.audit


@pytest.mark.slow
def test_the_findings_are_those_of_the_stated_estimator(unstated):
    found = rd.check(rd.open(unstated()))
    assert codes(found) == codes(rd.check(rd.open(SAMPLES / "verl_rejected.parquet")))
    for name, value in ((ESTIMATOR, "grpo"), (NORMALISED, True)):
        setting = found.config[name]
        assert (setting.value, setting.origin, setting.assumed) == (value, ORIGIN, False)


@pytest.mark.slow
def test_recompute_and_diff_take_the_same(unstated):
    stated = rd.open(SAMPLES / "verl_rejected.parquet")
    run = rd.open(unstated())
    assert rd.diff(run, fixes=["rejected-rows"]).effects == rd.diff(stated, fixes=["rejected-rows"]).effects
    assert rd.recompute(run).steps == rd.recompute(stated).steps


@pytest.mark.slow
def test_the_user_may_name_the_trainer_alone(unstated):
    options = {"algorithm.use_kl_in_reward": False}
    found = rd.check(rd.open(unstated(metadata=False)), trainer="verl@0.9.1", options=options)
    assert found.config[ESTIMATOR].value == "grpo"


def without_information(table):
    """Equal rewards get no advantage, whatever was computed."""
    column = table.schema.get_field_index("advantages")
    values = pc.multiply(pc.list_flatten(table.column("advantages")), 0.0)
    lists = pa.ListArray.from_arrays(table.column("advantages").combine_chunks().offsets, values.combine_chunks())
    return table.set_column(column, "advantages", lists)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "case",
    [
        {"edit": without_information},
        {"edit": lambda table: table.drop_columns(["advantages"])},
        {"algorithm.use_kl_in_reward": True},
    ],
    ids=["no advantage differs from 0", "no advantages", "a stated option excludes it"],
)
def test_what_the_log_does_not_show_is_not_taken(unstated, case):
    path = unstated(**case)
    found = rd.check(rd.open(path))
    assert found.trainer == "verl"
    assert not found.config
    with pytest.raises(UsageError, match="too much to assume"):
        rd.check(rd.open(path), trainer="verl")
