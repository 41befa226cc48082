"""``check --workers``, ``check --save-state`` and ``merge``: the bytes and codes of one check."""

from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent.parent / "sample_data" / "run.parquet"
STEPS = ("--steps", ":24")
FORMATS = ("full", "json")


@pytest.fixture
def states(rolloutdoctor, tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    paths = [folder / "a.json", folder / "b.json"]
    for path, steps in zip(paths, (":9", "9:24"), strict=True):
        found = rolloutdoctor("check", RUN, "--steps", steps, "--save-state", path, "--exit-zero")
        assert (found.returncode, found.stderr) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json"]
    return paths


@pytest.mark.slow
def test_merge_prints_what_one_check_prints(rolloutdoctor, states):
    for format_ in FORMATS:
        one = rolloutdoctor("check", RUN, *STEPS, "--format", format_)
        merged = rolloutdoctor("merge", *states, "--format", format_)
        assert (merged.stdout, merged.stderr, merged.returncode) == (one.stdout, one.stderr, one.returncode)
        assert one.stdout


@pytest.mark.slow
def test_merge_has_the_codes_of_check(rolloutdoctor, states):
    codes = set()
    for words in (["--fail-on", "info"], ["--fail-on", "info", "--exit-zero"], ["--select", "RDM001"]):
        one = rolloutdoctor("check", RUN, *STEPS, *words)
        merged = rolloutdoctor("merge", *states, *words)
        assert (merged.stdout, merged.returncode) == (one.stdout, one.returncode)
        codes.add(one.returncode)
    assert codes == {0, 1}


@pytest.mark.slow
def test_refusals(rolloutdoctor, states, tmp_path):
    first, _ = states
    twice = rolloutdoctor("merge", first, first)
    assert (twice.returncode, twice.stdout) == (2, "")
    assert "the state is given twice" in twice.stderr
    assert rolloutdoctor("check", RUN, "--workers", "0").returncode == 2
    assert rolloutdoctor("check", RUN, "--save-state", tmp_path / "no" / "a.json").returncode == 2
    target = tmp_path / "run.parquet"
    target.write_bytes(RUN.read_bytes())
    assert "is a file of the run itself" in rolloutdoctor("check", target, "--save-state", target).stderr
    assert target.read_bytes() == RUN.read_bytes()


@pytest.mark.slow
def test_workers_print_what_one_process_prints(rolloutdoctor):
    one, several = (rolloutdoctor("check", RUN, *STEPS, *words) for words in ([], ["--workers", "3"]))
    assert (several.stdout, several.stderr, several.returncode) == (one.stdout, one.stderr, one.returncode)
