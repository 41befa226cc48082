"""`view`: the server is this machine's and the user's alone, reads the run alone, and ends when it is told to."""

import http.client
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest
from engine.test_processes import INTERRUPTED_AT_A_START, session

from rolloutdoctor.commands.view.query import Inspector
from rolloutdoctor.commands.view.serving import Answer, PageServer
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError

ROOT = Path(__file__).parent.parent.parent
SAMPLE = ROOT / "sample_data" / "verl_rejected.parquet"
VIEW = ["-m", "rolloutdoctor", "view", str(SAMPLE), "--against", str(SAMPLE), "--no-browser"]


@pytest.fixture(scope="module")
def served(started):
    """A server in a process of its own: its address, and how it ends."""
    with Path(os.devnull).open("w") as nowhere:
        one = started(*VIEW[2:], stderr=nowhere)
    with os.fdopen(one.pipe("stdout"), encoding="utf-8") as said:
        yield urlsplit(said.readline().strip()), one
    one.send_signal(signal.SIGINT)
    one.wait()


def ask(address, path, method="GET", host=None):
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_who_knows_the_address_gets_the_page_and_its_answers(served):
    address, _ = served
    assert address.hostname == "127.0.0.1"
    status, page, headers = ask(address, address.path)
    assert (status, page[:15]) == (200, b"<!doctype html>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    for name in ("viewer.js", "viewer.css", "uPlot.iife.min.js", "uPlot.min.css"):
        assert ask(address, address.path + name)[0] == 200
    status, body, _ = ask(address, f"{address.path}api/step?step=46&split=train&fix=rejected-rows")
    assert status == 200
    assert [one["group_id"] for one in orjson.loads(body)["groups"]] == ["45/0", "45/1"]
    status, body, _ = ask(address, f"{address.path}api/group?step=46&split=train&group=45%2F0")
    assert len(orjson.loads(body)["completions"]) == 8
    assert orjson.loads(ask(address, f"{address.path}api/overview")[1])["against"] == str(SAMPLE)
    status, body, _ = ask(address, f"{address.path}api/against?step=46&split=train&group=45%2F0")
    assert [pair["same"] for pair in orjson.loads(body)["pairs"]] == [True] * 8


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/", None),
        ("/index.html", None),
        ("/api/overview", None),
        ("{}api/", None),
        ("{}api/overview/..", None),
        ("{}../../etc/passwd", None),
        ("{}viewer.js/../../html.py", None),
        ("{}..%2f..%2fhtml.py", None),
        ("/api/against?step=46&group=45%2F0", None),
        ("{}", "evil.example"),
        ("{}api/overview", "evil.example:80"),
    ],
)
def test_everybody_else_gets_nothing(served, path, host):
    address, _ = served
    status, body, _ = ask(address, path.format(address.path), host=host)
    assert (status, body) == (404, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(served, method):
    address, _ = served
    assert ask(address, address.path, method)[0] == 501


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("step?step=4x", "not the number of a step"),
        ("step?step=1e9", "not the number of a step"),
        ("step", "not the number of a step"),
        ("step?step=460", "no step 460"),
        ("step?step=46&split=nowhere", "no step 46"),
        ("step?step=46&fix=nothing", "no fix 'nothing'"),
        ("group?step=46&group=nobody", "no group 'nobody'"),
        ("against?step=46&group=nobody", "no group 'nobody'"),
    ],
)
def test_a_wrong_question_gets_a_sentence(served, query, words):
    address, _ = served
    status, body, _ = ask(address, f"{address.path}api/{query}")
    assert status == 400
    assert words in orjson.loads(body)["problem"]


def test_the_run_is_checked_meanwhile_and_ctrl_c_ends_it_all(served):
    address, process = served
    for _ in range(600):
        status, body, _ = ask(address, f"{address.path}api/judged")
        if status != 202:
            break
        assert "words" in orjson.loads(body)
        time.sleep(0.2)
    found = orjson.loads(body)
    assert status == 200
    assert found["findings"][0]["code"] == "RDA001"
    assert found["verdict"].startswith("Fully masked responses shift 296 advantages")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 128 + signal.SIGINT
    with pytest.raises(ConnectionRefusedError):
        ask(address, address.path)


@pytest.mark.slow
def test_an_interrupt_while_the_check_starts():
    words = [sys.executable, "-c", INTERRUPTED_AT_A_START, *VIEW[2:]]
    with session(words, PYTHONPATH=str(ROOT), INTERRUPTED_AT="2") as process:  # after the tracker
        out, err = process.communicate(timeout=300)
    assert (out, err, process.returncode) == ("", "rolloutdoctor: interrupted; nothing was written\n", 130)


def test_a_browser_that_leaves_before_its_answer_is_not_worth_a_word(capfd):
    asked, left = threading.Event(), threading.Event()

    def slow(given):
        asked.set()
        left.wait()
        return Answer(bytes(2**24))

    server = PageServer(0, {"overview": slow})
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        address = urlsplit(server.address)
        with socket.create_connection((address.hostname, address.port)) as browser:
            browser.sendall(f"GET {address.path}api/overview HTTP/1.0\r\nHost: {address.netloc}\r\n\r\n".encode())
            asked.wait()
            # Closed with a reset, as when a process ends.
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handlers = [one for one in threading.enumerate() if "process_request_thread" in one.name]
        left.set()
        for one in handlers:
            one.join()
        server.shutdown()
    server.server_close()
    assert len(handlers) == 1
    assert capfd.readouterr() == ("", "")


def test_a_port_in_use_is_said(rolloutdoctor):
    server = PageServer(0, {"overview": lambda given: Answer(b"{}")})
    try:
        done = rolloutdoctor("view", SAMPLE, "--no-browser", "--port", server.server_port, "--quiet")
    finally:
        server.server_close()
    assert done.returncode == 2
    assert f"--port {server.server_port}: Address already in use" in done.stderr


@pytest.mark.slow
def test_the_address_is_in_no_argument_of_the_browser(tmp_path):
    """What a process was started with can be listed by everybody; the file that has it is the user's alone."""
    browser = tmp_path / "browser"
    lines = ["#!/bin/sh", 'page="${1#file://}"', f'stat -c %a "$page" > {tmp_path}/mode']
    lines += [f'cat "$page" > {tmp_path}/page', f'echo "$@" > {tmp_path}/said.part']
    lines += [f"mv {tmp_path}/said.part {tmp_path}/said", ""]
    browser.write_text("\n".join(lines))
    browser.chmod(0o700)
    words = [sys.executable, *VIEW[:-1]]
    with session(words, PYTHONPATH=str(ROOT), BROWSER=str(browser), TMPDIR=str(tmp_path)) as one:
        address = urlsplit(one.stdout.readline().strip())
        for _ in range(200):
            if (tmp_path / "said").exists():
                break
            time.sleep(0.1)
        said, page = (tmp_path / "said").read_text(), (tmp_path / "page").read_text()
        assert said.startswith("file://")
        assert address.path.strip("/") not in said
        assert f'url={address.geturl()}"' in page
        assert "default-src 'none'" in page
        assert (tmp_path / "mode").read_text() == "600\n"
        one.send_signal(signal.SIGINT)
        one.wait(60)
    assert not list(tmp_path.glob("rolloutdoctor-*"))


def test_a_run_that_was_replaced_is_not_shown_as_the_one_that_was_opened(tmp_path):
    run = tmp_path / "run.parquet"
    shutil.copy(SAMPLE, run)
    inspector = Inspector(open_run([str(run)]), CheckOptions(device="cpu"), [str(run)])
    assert inspector.step(StepKey(46, "train")).groups
    shutil.copy(ROOT / "sample_data" / "healthy.parquet", tmp_path / "other")
    (tmp_path / "other").replace(run)
    with pytest.raises(InputError, match="the file changed after its footer was read"):
        inspector.step(StepKey(46, "train"))
