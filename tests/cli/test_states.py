"""``--save-state`` of commands other than ``check``, and their states in the place of a run."""

from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent.parent / "sample_data" / "run.parquet"
PARTS = {"a.state": ":20", "b.state": "20:"}


@pytest.fixture
def saved(rolloutdoctor, tmp_path):
    """Return what saves the states of both parts."""

    def states(*words):
        for name, steps in PARTS.items():
            found = rolloutdoctor(*words, RUN, "--steps", steps, "--save-state", tmp_path / name, "-q")
            assert (found.returncode, found.stderr) == (0, "")
        return [tmp_path / name for name in PARTS]

    return states


@pytest.mark.slow
@pytest.mark.parametrize("words", [("kl",), ("audit", "--fix", "zero-std"), ("overview",)])
def test_a_picture_of_states_is_that_of_the_run(rolloutdoctor, saved, tmp_path, words):
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for paths, target in ((saved("plot", *words), one), ([RUN], other)):
        found = rolloutdoctor("plot", *words, *paths, "-o", target)
        assert (found.returncode, found.stderr) == (0, "")
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("diff", "--fix", "zero-std", "--fix", "rejected-rows", "--top", "4"),
        ("why", "--metric", "response_length", "--format", "json"),
        ("diff", "--all-fixes", "--format", "json"),
        ("diff", "--against", "beta=0.1", "--by", "reward", "--format", "markdown"),
    ],
)
def test_what_is_printed_of_states_is_that_of_the_run(rolloutdoctor, saved, words):
    asked = ("--at", "24") if "why" in words else ()
    one, other = (rolloutdoctor(*words, *paths, *asked) for paths in (saved(*words), [RUN]))
    assert (one.stdout, one.stderr, one.returncode) == (other.stdout, other.stderr, 0)
    assert one.stdout


@pytest.mark.slow(every=True)
def test_the_page_of_states_is_that_of_the_run_while_this_is_there(rolloutdoctor, tmp_path):
    run, pages = tmp_path / "run.parquet", [tmp_path / f"{number}.html" for number in range(3)]
    metrics = run.with_name("run.metrics.parquet")
    for source, target in ((RUN, run), (RUN.with_name(metrics.name), metrics)):
        target.write_bytes(source.read_bytes())
    for name, steps in PARTS.items():
        rolloutdoctor("report", run, "--steps", steps, "--save-state", tmp_path / name, "-o", pages[0], "-q")
    states = [tmp_path / name for name in PARTS]
    for paths, page in (([run], pages[0]), (states, pages[1])):
        found = rolloutdoctor("report", *paths, "--groups", "2", "-o", page, "-q")
        assert (found.returncode, found.stderr) == (0, "")
    run.rename(tmp_path / "gone.parquet")
    assert rolloutdoctor("report", *states, "--groups", "2", "-o", pages[2], "-q").returncode == 0
    whole, of_states, of_gone = (page.read_text() for page in pages)
    assert whole == of_states
    assert "no rows are shown" in of_gone
    assert "no rows are shown" not in whole


@pytest.fixture
def state(rolloutdoctor, tmp_path):
    """Return the state of a part, saved with a fix."""
    path = tmp_path / "a.state"
    words = ("--fix", "zero-std", "--trainer", "trl", "--steps", ":3", "--save-state", path)
    assert rolloutdoctor("plot", "gradient", RUN, *words, "-q").stderr == ""
    return path


def test_states_that_do_not_fit_are_refused_in_a_sentence(rolloutdoctor, state, tmp_path):
    def refusal(*words):
        found = rolloutdoctor(*words)
        assert (found.returncode, found.stdout) == (2, "")
        return found.stderr.removeprefix("rolloutdoctor: ")

    picture, fix = ("-o", tmp_path / "x.png"), ("--fix", "zero-std", "--trainer", "trl")
    other = "a.state was saved by `plot gradient --trainer trl --fix zero-std`: give the command the same options again"
    assert other in refusal("plot", "gradient", state, *picture)
    assert other in refusal("plot", "kl", state, *fix, *picture)
    assert "which reads it; name states that check saved" in refusal("check", state)
    assert "the state is given twice" in refusal("plot", "gradient", state, state, *fix, *picture)
    assert "leave --steps and --workers out" in refusal(
        "plot", "gradient", state, "--steps", ":2", "--workers", "2", *picture
    )
    found = rolloutdoctor("plot", "gradient", state, *fix, *picture, env={"ROLLOUTDOCTOR_STEPS": ":2"})
    assert "leave --steps out" in found.stderr
    assert "nothing to write" in refusal("plot", "gradient", state)
    again = tmp_path / "b.state"
    rolloutdoctor("plot", "gradient", RUN, "--steps", "2:4", *fix, "--save-state", again)
    assert "both hold train rows of step 2" in refusal("plot", "gradient", state, again, *fix, *picture)
    rolloutdoctor("plot", "gradient", RUN.with_name("healthy.parquet"), *fix, "--save-state", again)
    assert "are not parts of one run" in refusal("plot", "gradient", state, again, *fix, *picture)
    rolloutdoctor("check", RUN, "--steps", "3:4", "--save-state", again)
    assert "is the state of a check" in refusal("plot", "gradient", state, again, *fix, *picture)
    assert "--save-state: a log alone" in refusal(
        "plot", "overview", RUN.with_name("verifier_dies.log"), "--save-state", again
    )
    assert "--at is asked of the states: leave it out" in refusal("why", RUN, "--at", "20", "--save-state", again)
    log = rolloutdoctor("why", RUN, "--metric", "epoch", "--save-state", tmp_path / "c.state")
    assert (log.returncode, "measured no row" in log.stderr) == (2, True)
    state.write_bytes(state.read_bytes()[:-100])
    assert "no state of a run" in refusal("plot", "gradient", state, *fix, *picture)
    assert not (tmp_path / "x.png").exists()
