import os
from pathlib import Path

import pytest

from rolloutdoctor.io.locations.paths import expand, natural_key
from rolloutdoctor.results.errors import InputError, UsageError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*names):
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x")


def files(*paths):
    return [source.name for source in expand(paths).files]


def metrics(*paths):
    return [source.name for source in expand(paths).metrics]


def test_files_keep_the_order_and_the_names_given(here):
    touch("b.parquet", "a.parquet", "odd.pq")
    assert files("b.parquet", "./a.parquet", Path("odd.pq")) == ["b.parquet", "./a.parquet", "odd.pq"]
    assert files(here / "a.parquet") == [str(here / "a.parquet")]


def test_directory_gives_its_parquet_files_in_natural_order(here):
    touch("run/p10.parquet", "run/p9.parquet", "run/deeper/p0.parquet", "run/notes.txt")
    touch("run/.p1.parquet", "run/_p1.parquet", "run/p1.tmp.parquet", "run/p1.parquet.tmp", "run/p1.parquet~")
    touch("run/p9.metrics.parquet", "run/all.metrics.jsonl", "run/.x.metrics.jsonl")
    assert files("run") == ["run/p9.parquet", "run/p10.parquet"]
    assert files("run/") == ["run/p9.parquet", "run/p10.parquet"]
    assert metrics("run") == ["run/all.metrics.jsonl", "run/p9.metrics.parquet"]


def test_metrics_are_taken_beside_each_file(here):
    touch("a.parquet", "a.metrics.parquet", "a.metrics.jsonl", "b.parquet", "b.metrics.jsonl", "c.metrics.jsonl")
    assert metrics("a.parquet") == ["a.metrics.parquet", "a.metrics.jsonl"]
    assert metrics("a.parquet", "b.parquet") == ["a.metrics.parquet", "a.metrics.jsonl", "b.metrics.jsonl"]
    # What a shell makes of *.parquet, and one by name.
    assert files("a.metrics.parquet", "a.parquet", "c.metrics.jsonl") == ["a.parquet"]
    assert metrics("a.metrics.parquet", "a.parquet", "c.metrics.jsonl") == [
        "a.metrics.parquet",
        "a.metrics.jsonl",
        "c.metrics.jsonl",
    ]


def test_globs(here):
    touch("x/r2.parquet", "x/r10.parquet", "x/y/r1.parquet", "x/r2.metrics.parquet", "x/.h/r.parquet", "x/readme.md")
    assert files("x/*.parquet") == ["x/r2.parquet", "x/r10.parquet"]
    assert files("x/*") == ["x/r2.parquet", "x/r10.parquet"]
    assert files("x/**/*.parquet") == ["x/r2.parquet", "x/r10.parquet", "x/y/r1.parquet"]
    assert files("x/**") == ["x/r2.parquet", "x/r10.parquet", "x/y/r1.parquet"]
    assert files("./x/r[0-9].parquet") == ["./x/r2.parquet"]
    assert files(f"{here}/x/r?.parquet") == [f"{here}/x/r2.parquet"]
    assert metrics("x/*.parquet") == ["x/r2.metrics.parquet"]


def test_a_file_whose_name_looks_like_a_glob(here):
    touch("run[1].parquet", "run1.parquet")
    assert files("run[1].parquet") == ["run[1].parquet"]


def test_a_file_reached_twice_is_read_once(here):
    touch("run/a.parquet")
    Path("run/b.parquet").symlink_to("a.parquet")
    Path("run/loop").symlink_to(".")
    assert files("run", "run/*.parquet", "run/../run/a.parquet", "run/**/*.parquet") == ["run/a.parquet"]


def test_names_that_are_not_text_can_be_printed(here):
    touch(os.fsdecode(b"r\xff.parquet"))
    (source,) = expand([b"r\xff.parquet".decode("utf-8", "surrogateescape")]).files
    assert source.name == "r\\xff.parquet"
    assert source.name.encode()
    assert Path(source.path).is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no.parquet"], "no.parquet: no such file or directory; check the path"),
        (["empty"], "empty: the directory is empty; check the path"),
        (["no*.parquet"], "no*.parquet: no file matches the pattern; check it, and quote it if the shell expands it"),
        ([], "no run file was given; name a Parquet file, a directory or a pattern"),
        (["m.metrics.jsonl"], "m.metrics.jsonl: logged metrics, not rollouts; give the run file as well"),
        (["loop"], "loop: cannot be read (too many levels of symbolic links); check the path"),
        (["a.parquet/b"], "a.parquet/b: cannot be read (not a directory); check the path"),
        (["pipe"], "pipe: neither a file nor a directory; a run has to be a regular Parquet file"),
        (["a\0b"], "'a\\x00b': not a path; it holds a null character"),
        (["n" * 300], f"{'n' * 300}: cannot be read (file name too long); check the path"),
    ],
)
def test_nothing_to_read(here, given, message):
    touch("a.parquet", "m.metrics.jsonl")
    Path("empty").mkdir()
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    with pytest.raises(InputError) as caught:
        expand(given)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_malformed_pattern(here):
    with pytest.raises(UsageError, match=r"a\*\*b: not a pattern that can be matched"):
        expand(["a**b"])


def test_natural_key_orders_any_names():
    assert sorted(["²", "a10", "a", "1", "a1b", ""], key=natural_key) == ["", "1", "a", "a1b", "a10", "²"]


def test_a_pipe_in_a_folder_is_passed_over(tmp_path):
    """Nobody may ever write to it, and whoever opens it waits."""
    os.mkfifo(tmp_path / "a.parquet")
    os.mkfifo(tmp_path / "b.metrics.parquet")
    with pytest.raises(InputError, match="holds no run file"):
        expand([tmp_path])
    (tmp_path / "c.parquet").write_bytes(b"")
    (tmp_path / "d.parquet").symlink_to("c.parquet")
    found = expand([tmp_path])
    assert [Path(source.path).name for source in found.files] == ["c.parquet"]
    assert not found.metrics
