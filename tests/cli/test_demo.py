"""`rolloutdoctor demo`: the runs that come with the package."""

import pytest

from rolloutdoctor.commands.demo.cli import DEMOS, folder


@pytest.mark.slow
def test_without_a_name_all_runs_give_their_verdict(rolloutdoctor):
    done = rolloutdoctor("demo")
    assert done.returncode == 0
    verdicts = [done.stdout.partition(f"check {one.file} ")[2].splitlines()[1] for one in DEMOS.values()]
    assert verdicts[0].startswith("Every reward is 0 from step 61 on, so every group is zero-variance")
    assert verdicts[1].startswith("Fully masked responses shift 296 advantages")
    assert verdicts[2].startswith("Healthy: ")
    assert "rolloutdoctor.recorders.trl" in done.stdout


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", DEMOS)
def test_with_a_name_it_is_what_check_says(rolloutdoctor, name):
    whole = rolloutdoctor("demo", name)
    checked = rolloutdoctor("check", folder() / DEMOS[name].file, "--exit-zero")
    assert whole.stdout.partition("\n")[2].strip() == checked.stdout.strip()
    assert whole.stderr == ""


def test_files_are_copied_and_nothing_is_overwritten(rolloutdoctor, tmp_path):
    target = tmp_path / "runs"
    done = rolloutdoctor("demo", "rejected", "--copy-to", target)
    names = ["verl_rejected.parquet", "verl_rejected.metrics.parquet"]
    assert done.stdout.split() == [str(target / name) for name in names]
    for name in names:
        assert (target / name).read_bytes() == (folder() / name).read_bytes()
    again = rolloutdoctor("demo", "--copy-to", target)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert sorted(path.name for path in target.iterdir()) == sorted(names)


def test_an_unknown_name_is_refused(rolloutdoctor):
    done = rolloutdoctor("demo", "helthy")
    assert done.returncode == 2
    assert "did you mean 'healthy'" in done.stderr
