"""A run file that names a trainer or a release that is not known is checked without its options."""

import pytest
from engine.runs import TRL, small, write
from typer.testing import CliRunner

import rolloutdoctor as rd
from rolloutdoctor.cli.app import app


def checked(path, *options):
    return CliRunner().invoke(app, ["check", str(path), *options])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("config", [{}, {"some_option": 1}])
def test_a_trainer_that_is_not_known_refuses_no_rows(tmp_path, config):
    path = tmp_path / "run.parquet"
    write(path, small(), TRL | {"trainer": "nobody", "trainer_version": "1.0", "config": config})
    done = checked(path)
    assert done.exit_code != 2
    assert "nobody" in " ".join(one.reason for one in rd.check(path).skipped)
    # What the user says is another matter.
    assert checked(path, "--trainer", "nobody").exit_code == 2
    assert checked(path, "--trainer", "trl").exit_code != 2


def test_the_name_of_a_branch_is_no_release(tmp_path):
    write(tmp_path / "main.parquet", small(), TRL | {"trainer_version": "main"})
    report = rd.check(tmp_path / "main.parquet")
    assert report.trainer == "trl"
    assert report.coverage.tested
    assert checked(tmp_path / "main.parquet", "--trainer", "trl@main").exit_code == 2
