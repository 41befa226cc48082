"""A few of the kills and signals of `fuzz.kills`, which ends every command as often as one likes."""

import pytest
from fuzz.kills import COMMANDS, hashed, run, shares


@pytest.mark.slow
def test_a_result_is_whole_or_not_there(started, tmp_path):
    said = []
    trials = run(started, tmp_path, 6, 4, "suite", ["measure", "convert", "check --save-state"], said.append)
    assert (trials.figures["kills"], trials.figures["signals"]) == (6, 4)
    assert trials.faults == 0, said


@pytest.mark.slow
def test_it_sees_what_is_wrong(started, tmp_path):
    """A half-written file, a changed input, and a temporary file that nobody removes."""
    said = []
    trials = run(started, tmp_path, 0, 0, "suite", ["info"], said.append)
    assert trials.faults == 0, said
    (trials.out / "a.txt").write_bytes(b"half")
    trials.is_whole("info", None, "info")
    (tmp_path / "other.parquet").write_bytes(b"")
    trials.same_inputs("info")
    (trials.out / ".a.txt.1-2-0123456789-01234567.part").write_bytes(b"")
    trials.next_run("info")
    faults = {kind: count for kind, count in trials.figures.items() if kind in ("half-written", "inputs", "stale")}
    assert faults == {"half-written": 1, "inputs": 1, "stale": 1}


def test_trials_are_shared_out():
    for count in (0, 1, 40, 100):
        assert sum(shares(count, list(COMMANDS)).values()) == count


def test_what_is_not_there_has_no_digest(tmp_path):
    assert hashed(tmp_path / "x") is None
    (tmp_path / ".hidden").write_text("")
    assert hashed(tmp_path) == {}
