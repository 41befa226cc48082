"""Where results may go: never into a file that is read, through links to their targets, into devices and pipes."""

import os
import shutil
import stat
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fuzz.harness import run

SAMPLES = Path(__file__).parents[2] / "sample_data"
DUMP = Path(__file__).parents[1] / "importers" / "data" / "trl" / "mixed"
TOML = 'reward = "score"\n'

# Every command with an output: its words, the option that names the output, and what its file is called.
COMMANDS = {
    "check": (["check", "run.parquet"], "--output-file", "out.txt"),
    "check --save-state": (["check", "run.parquet"], "--save-state", "out.json"),
    "diff": (["diff", "run.parquet", "--fix", "zero-std"], "--output-file", "out.txt"),
    "info": (["info", "run.parquet"], "--output-file", "out.txt"),
    "recompute": (["export", "--what", "tokens", "run.parquet"], "-o", "out.parquet"),
    "recompute --format": (
        ["export", "--what", "tokens", "run.parquet", "--format", "json"],
        "--output-file",
        "out.json",
    ),
    "plot": (["plot", "kl", "run.parquet"], "-o", "out.svg"),
    "report": (["report", "run.parquet"], "-o", "out.html"),
    "merge": (["merge", "state.json"], "--output-file", "out.txt"),
    "convert": (["export", "--what", "run", "rows.jsonl", "--map", "reward=score"], "-o", "out.parquet"),
}
FEW = ["--steps", "0:3"]
PARQUET = ("recompute", "convert")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The saved state of a check."""
    path = tmp_path_factory.mktemp("state") / "state.json"
    code, _, said, _ = run(["check", "run.parquet", *FEW, "--save-state", str(path), "--exit-zero"], SAMPLES)
    assert code == 0, said
    return path


@pytest.fixture
def folder(state, tmp_path):
    for name in ("run.parquet", "run.metrics.parquet"):
        shutil.copy(SAMPLES / name, tmp_path)
    shutil.copy(state, tmp_path)
    (tmp_path / "trainer.json").write_text('{"beta": 0.04}')
    (tmp_path / "rolloutdoctor.toml").write_text("quiet = true\n")
    (tmp_path / "map.toml").write_text(TOML)
    lines = [f'{{"step": 1, "group_id": "a", "score": {reward}}}' for reward in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def words_of(name, target=None):
    words, option, out = COMMANDS[name]
    words = [*words, *([] if name in ("merge", "convert") else FEW)]
    if words[0] not in ("info", "plot", "report", "export", "diff"):
        words.append("--exit-zero")
    return [*words, option, target or out]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def inputs_of(name):
    if name == "merge":
        return ["state.json"]
    if name == "convert":
        return ["rows.jsonl", "map.toml"]
    return ["run.parquet", "run.metrics.parquet", "trainer.json", "rolloutdoctor.toml"]


CASES = [(name, given) for name in COMMANDS for given in inputs_of(name)]


@pytest.mark.parametrize("how", ["itself", "symbolic link", "hard link", "another spelling"])
@pytest.mark.parametrize(("name", "given"), CASES)
def test_an_input_is_never_an_output(rolloutdoctor, folder, name, given, how):
    suffix = Path(COMMANDS[name][2]).suffix
    target = f"link{suffix}"
    if how == "symbolic link":
        (folder / target).symlink_to(given)
    elif how == "hard link":
        (folder / target).hardlink_to(folder / given)
    elif suffix == Path(given).suffix or name not in ("plot", "report", "convert"):
        target = given if how == "itself" else f"../{folder.name}/./{given}"
    else:
        # These ask for a suffix, so that only a link has the name.
        (folder / target).symlink_to(folder / given)
    words = words_of(name, target)
    if given == "trainer.json":
        words += ["--trainer-config", given]
    if given == "map.toml":
        words = [*words[:4], "--map-file", given, *words[6:]]
    before = contents(folder)
    found = rolloutdoctor(*words, cwd=folder)
    if name == "convert" and given.endswith(".metrics.parquet"):
        assert "is called NAME.parquet" in found.stderr
    else:
        assert "is a file of the run itself" in found.stderr or "is a file that is read" in found.stderr
    assert (found.returncode, found.stdout, found.stderr.count("rolloutdoctor: ")) == (2, "", 1)
    assert contents(folder) == before


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_link_stays_one_and_permissions_stay(rolloutdoctor, folder, name):
    out = COMMANDS[name][2]
    (folder / "far").mkdir()
    real = folder / "far" / out
    real.write_text("before")
    real.chmod(0o640)
    (folder / out).symlink_to(f"far/{out}")
    found = rolloutdoctor(*words_of(name), cwd=folder)
    assert found.returncode == 0, found.stderr
    assert (folder / out).is_symlink()
    assert real.read_bytes() not in (b"", b"before")
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [path.name for path in (folder / "far").iterdir()] == [out]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in PARQUET])
def test_a_pipe_is_written_into(rolloutdoctor, folder, name):
    out = COMMANDS[name][2]
    assert rolloutdoctor(*words_of(name), cwd=folder).returncode == 0
    wanted = (folder / out).read_bytes()
    (folder / out).unlink()
    os.mkfifo(folder / out)
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / out).read_bytes()), daemon=True)
    reader.start()
    assert rolloutdoctor(*words_of(name), cwd=folder).returncode == 0
    reader.join(20)
    assert read == [wanted]
    assert stat.S_ISFIFO((folder / out).stat().st_mode)


@pytest.mark.parametrize("name", PARQUET)
@pytest.mark.parametrize("what", ["a pipe", "a device"])
def test_what_does_not_stream_is_refused_there(rolloutdoctor, folder, name, what):
    target = folder / "out.parquet"
    if what == "a pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(os.devnull)
    found = rolloutdoctor(*words_of(name), cwd=folder)
    assert found.returncode == 2
    assert f"out.parquet is {what}, and a Parquet file has to be a file" in " ".join(found.stderr.split())
    assert not stat.S_ISREG(target.stat().st_mode)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("", "'' names no file"),
        ("folder{}", "is a folder"),
        ("nowhere/x{}", "there is no folder nowhere"),
        ("run.parquet/x{}", "there is no folder run.parquet"),
        ("x" * 5000 + "{}", "File name too long"),
        ("round{}", "Too many levels of symbolic links"),
    ],
)
def test_where_nothing_can_be_written(rolloutdoctor, folder, name, target, part):
    suffix = Path(COMMANDS[name][2]).suffix
    (folder / f"round{suffix}").symlink_to(f"round{suffix}")
    (folder / f"folder{suffix}").mkdir()
    before = contents(folder)
    words = words_of(name)
    found = rolloutdoctor(*words[:-1], target.format(suffix), cwd=folder)
    assert (found.returncode, found.stdout) == (2, "")
    said = " ".join(found.stderr.split())
    if target or name not in ("convert", "plot", "report"):  # these ask for a suffix first
        assert part in said
    assert len(said) < 600
    assert found.stderr.count("rolloutdoctor: ") == 1
    assert "internal" not in said
    assert contents(folder) == before


def test_two_results_do_not_go_into_one_file(rolloutdoctor, folder):
    (folder / "b.txt").symlink_to("a.txt")
    for words in (["check", "run.parquet", "--save-state"], ["export", "--what", "tokens", "run.parquet", "-o"]):
        found = rolloutdoctor(*words, "a.txt", "--output-file", "b.txt", cwd=folder)
        assert "two results would go there" in found.stderr
        assert found.returncode == 2
    assert not (folder / "a.txt").exists()


def test_a_conversion_does_not_replace_metrics_of_something_else(rolloutdoctor, folder):
    words = ["export", "--what", "run", str(DUMP), "-o", "mine.parquet"]
    shutil.copy(folder / "run.metrics.parquet", folder / "mine.metrics.parquet")
    before = contents(folder)
    found = rolloutdoctor(*words, cwd=folder)
    assert found.returncode == 2
    assert "mine.metrics.parquet is there without mine.parquet" in " ".join(found.stderr.split())
    assert contents(folder) == before
    (folder / "mine.metrics.parquet").unlink()
    for _ in range(2):  # its own are replaced
        assert rolloutdoctor(*words, cwd=folder).returncode == 0
    assert pq.read_table(folder / "mine.parquet").num_rows


def test_a_log_that_is_given_is_not_replaced_by_the_metrics(rolloutdoctor, folder):
    """The second file of a conversion is looked at as the first is."""
    (folder / "out.parquet").write_bytes(b"older")
    (folder / "out.metrics.parquet").hardlink_to(folder / "rows.jsonl")
    before = contents(folder)
    found = rolloutdoctor(*words_of("convert"), cwd=folder)
    assert (found.returncode, "out.metrics.parquet is a file that is read" in found.stderr) == (2, True)
    assert contents(folder) == before
