"""Google's storage without credentials is one sentence at once, wherever credentials could have come from."""

import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from rolloutdoctor.io.locations import google, stores
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    """No credentials in the environment or at home, and nobody at the address of the metadata server."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_GCLOUD_ADC_PATH_OVERRIDE", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("APPDATA", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("GCE_METADATA_ROOT", place)
    yield tmp_path
    stores._store.cache_clear()


def answering(header):
    """A server on loopback that answers as the metadata server does, with or without saying whose it is."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            if header:
                self.send_header("Metadata-Flavor", header)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_the_sentence_says_how_to_give_some(nothing):
    with pytest.raises(InputError) as refused:
        open_run(["gs://user@bucket/run.parquet"])
    assert str(refused.value) == (
        "gs://bucket/run.parquet: no credentials were found; run 'gcloud auth application-default login' or set "
        "GOOGLE_APPLICATION_CREDENTIALS, or write gs://anonymous@BUCKET for a public one"
    )


@pytest.mark.parametrize(("header", "known"), [("Google", True), ("", False), ("Other", False)])
def test_only_a_machine_of_google_has_its_own(nothing, monkeypatch, header, known):
    server = answering(header)
    monkeypatch.setenv("GCE_METADATA_ROOT", f"127.0.0.1:{server.server_port}")
    try:
        assert google.has_credentials() is known
    finally:
        server.shutdown()
        server.server_close()


def test_those_of_the_environment_and_of_gcloud_are_found(nothing, monkeypatch):
    assert not google.has_credentials()
    left = nothing / ".config" / "gcloud" / "application_default_credentials.json"
    if google.os.name == "nt":
        left = nothing / "gcloud" / left.name
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    assert google.has_credentials()
    left.unlink()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(nothing / "key.json"))
    assert google.has_credentials()


@pytest.mark.parametrize(("query", "account"), [("", "anonymous"), ("?endpoint_override=127.0.0.1:1", "")])
def test_public_buckets_and_other_endpoints_need_none(nothing, query, account):
    assert stores._store("gs", query, account).type_name == "gcs"
