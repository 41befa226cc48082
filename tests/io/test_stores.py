"""Runs in object stores and on web servers: the same report as from a file, or one clear sentence."""

import io
import shutil
import socket
import sys
from pathlib import Path

import pytest
from engine.runs import random_columns, write

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.locations import stores
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.stores import address_of
from rolloutdoctor.io.locations.web import WebFile
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError, UsageError

from .store_server import serving

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder that is served as a bucket: a run in two parts, logged metrics beside them, and other things."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "bucket"
    (folder / "runs" / "deeper").mkdir(parents=True)
    columns = random_columns(2, steps=4)
    for part in (2, 10):
        rows = [row for row, step in enumerate(columns["step"]) if (step < 2) == (part == 2)]
        logged = [(columns["step"][rows[0]], "kl", 0.1)]
        write(folder / "runs" / f"part-{part}.parquet", columns, rows=rows, row_group_size=20, logged=logged)
    (folder / "runs" / "notes.txt").write_text("no run")
    (folder / "runs" / "_temporary.parquet").write_text("not yet")
    shutil.copy(folder / "runs" / "part-2.parquet", folder / "runs" / "deeper" / "other.parquet")
    yield folder
    stores._store.cache_clear()


@pytest.fixture
def server(bucket, monkeypatch):
    with serving(bucket.parent) as found:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.server_port}")
        yield found


def report(paths):
    run = open_run(paths)
    return check(run, CheckOptions(device="cpu")), run


@pytest.mark.slow
def test_s3_gives_the_report_of_the_file(server, bucket):
    local, _ = report([bucket / "runs" / "part-2.parquet"])
    remote, run = report(["s3://bucket/runs/part-2.parquet"])
    assert remote == local
    assert run.files == ("s3://bucket/runs/part-2.parquet",)
    # The metrics beside it were found.
    assert run.metrics.names() == {"kl"}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("given", ["s3://bucket/runs", "s3://bucket/runs/", "s3://bucket/runs/part-*.parquet"])
def test_s3_folders_and_patterns(server, bucket, given):
    run = open_run([given])
    assert run.files == ("s3://bucket/runs/part-2.parquet", "s3://bucket/runs/part-10.parquet")
    assert check(run, CheckOptions(device="cpu")) == report([bucket / "runs"])[0]
    assert run.metrics.names() == {"kl"}


def test_s3_options_in_the_address(server, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    query = f"?endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=eu-west-1"
    run = open_run([f"s3://bucket/runs/part-2.parquet{query}"])
    assert run.files == ("s3://bucket/runs/part-2.parquet",)
    assert run.metrics


STORES = {"gs": "gs://anonymous@bucket", "hf": "hf://datasets/owner/repo/bucket"}


@pytest.fixture
def command(started, server):
    """The command in a process of its own: these libraries look at the environment when they are first imported."""
    address = f"http://127.0.0.1:{server.server_port}"

    def ended(*words):
        program = started(*words, env={"STORAGE_EMULATOR_HOST": address, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"})
        return (*program.communicate(), program.returncode)

    return ended


@pytest.mark.slow
@pytest.mark.parametrize("scheme", STORES)
def test_other_stores_give_the_report_of_the_folder(command, bucket, scheme):
    if scheme == "hf":
        pytest.importorskip("huggingface_hub")
    words = ("--format", "json", "--device", "cpu", "--exit-zero")
    local, _, _ = command("check", bucket / "runs", *words)
    remote, said, _ = command("check", f"{STORES[scheme]}/runs", *words)
    assert (remote, said) == (local, "")
    assert '"RDM001"' in remote
    name = f"{STORES[scheme].replace('anonymous@', '')}/runs/none.parquet"
    missing = command("check", f"{STORES[scheme]}/runs/none.parquet")
    assert missing == ("", f"rolloutdoctor: {name}: no such file; check the address\n", 2)


def web(server, path):
    return f"http://127.0.0.1:{server.server_port}/{path}"


@pytest.mark.slow
def test_web_gives_the_report_of_the_file(server, bucket):
    local, _ = report([bucket / "runs" / "part-2.parquet"])
    remote, run = report([web(server, "bucket/runs/part-2.parquet")])
    assert remote == local
    assert run.metrics.names() == {"kl"}


def test_only_what_is_needed_is_fetched(server, bucket):
    columns = random_columns(0, steps=1, groups=40, longest=400)
    path = write(bucket / "large.parquet", columns)
    list(open_run([web(server, "bucket/large.parquet")]).batches(["reward"]))
    spans = [
        span.removeprefix("bytes=").split("-") for _, asked, span in server.requests if asked.endswith("large.parquet")
    ]
    assert sum(int(stop) - int(start) + 1 for start, stop in spans) < path.stat().st_size / 2


def test_secrets_of_an_address_are_not_in_its_name(server):
    source = Source.of("https://user:word@host/runs/a.parquet?X-Amz-Signature=abc")
    assert source.name == "https://host/runs/a.parquet"
    assert source.path.endswith("abc")
    run = open_run([web(server, "bucket/runs/part-2.parquet?token=abc")])
    assert run.files == (web(server, "bucket/runs/part-2.parquet"),)
    assert run.metrics


def refusal(*paths, error=InputError):
    with pytest.raises(error) as caught:
        report(list(paths))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_there(server):
    assert refusal("s3://bucket/runs/none.parquet") == (
        "s3://bucket/runs/none.parquet: no such file; check the address"
    )
    address = web(server, "bucket/none.parquet")
    assert refusal(address) == f"{address}: no such file; check the address"
    assert (
        refusal("s3://bucket/runs/x*.parquet") == "s3://bucket/runs/x*.parquet: no file matches the pattern; check it"
    )
    assert refusal("s3://bucket/runs/*/x", error=UsageError).startswith("s3://bucket/runs/*/x: a pattern can only be")


def test_web_denies(server):
    server.login = True
    assert refusal(web(server, "bucket/runs/part-2.parquet")).endswith(
        "part-2.parquet: access denied; give an address that needs no login"
    )


def test_s3_denies(server, monkeypatch):
    for name in KEYS:
        if name != "AWS_EC2_METADATA_DISABLED":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    server.login = True
    address = "s3://bucket/runs/part-2.parquet"
    remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    assert refusal(address) == f"{address}: access denied; {remedy}"


def test_no_connection(bucket, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setattr(stores, "_SECONDS", 2.0)
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for address in (f"http://127.0.0.1:{port}/run.parquet", "s3://bucket/run.parquet"):
            found = refusal(address)
            assert found.startswith(f"{address}: cannot be reached (")
            assert found.endswith("); check the address and the connection, or copy the file here")


def test_a_server_without_ranges(server):
    server.ranges = False
    found = refusal(web(server, "bucket/runs/part-2.parquet"))
    assert "cannot be reached (the server does not give ranges of bytes, so download the file)" in found


def test_what_is_no_parquet_file(server):
    address = web(server, "bucket/runs/notes.txt")
    assert refusal(address).startswith(f"{address}: not a Parquet file")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("ftp://host/run.parquet", r"no files are read from ftp:// \(known: s3://, gs://, hf://, https://, http://\)"),
        ("s3://", "names no file; write s3://PLACE/NAME.parquet"),
    ],
)
def test_other_addresses(path, words):
    with pytest.raises(UsageError, match=words):
        address_of(path)
    assert address_of("runs/a.parquet") is None
    assert address_of("C:/runs") is None


def test_hf_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    stores._store.cache_clear()
    assert refusal("hf://datasets/a/b/run.parquet", error=UsageError) == (
        "hf:// needs huggingface_hub; install rolloutdoctor[remote], or download the files"
    )


def test_a_web_file_is_a_file(server, bucket):
    wanted = Path(bucket / "runs" / "part-10.parquet").read_bytes()
    with WebFile(web(server, "bucket/runs/part-10.parquet"), 5.0) as file:
        assert file.size() == len(wanted)
        assert file.read(7) == wanted[:7]
        assert file.seek(-9, io.SEEK_END) == len(wanted) - 9
        assert file.read(100) == wanted[-9:]
        assert file.read(1) == b""
        file.seek(3)
        assert file.seek(4, io.SEEK_CUR) == file.tell() == 7
        assert file.read() == wanted[7:]
    (bucket / "empty").touch()
    with WebFile(web(server, "bucket/empty"), 5.0) as file:
        assert file.read() == b""
