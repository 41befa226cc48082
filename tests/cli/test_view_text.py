"""What `view` serves: text of files is text in every answer, and every answer forbids what no page of it needs."""

import http.client
import json
import re
import threading
from urllib.parse import quote, urlsplit

import pytest
from engine.runs import TRL, random_columns, write

from rolloutdoctor.commands.view import serving
from rolloutdoctor.commands.view.cli import _overview, _pages
from rolloutdoctor.commands.view.query import Inspector, judge, judged_body
from rolloutdoctor.commands.view.serving import Answer, PageServer
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.trainers.table import ALIASES
from rolloutdoctor.views.viewer_page import asset

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "'\"><svg onload=alert(1)>",
    "javascript:alert(1)//<!--<script>",
    "\u2028<b>&lt;i&gt;",
)
ASSETS = ("", "viewer.js", "viewer.css", "uPlot.iife.min.js", "uPlot.min.css")


def hostile_run(folder, text):
    """A run with the text in its cells, the names of its groups, rows, columns and files, and its metadata."""
    columns = random_columns(3, steps=2, groups=2, size=2, longest=5)
    count = len(columns["reward"])
    columns |= {
        "group_id": [f"{text} {row // 2}" for row in range(count)],
        "sample_id": [f"{text} {row}" for row in range(count)],
        "prompt": [text] * count,
        "response": [text] * count,
        "ground_truth": [text] * count,
        "status": [text] * count,
        "rewards": [{text: 1.0}] * count,
        text: [1.0] * count,
    }
    folder.mkdir()
    path = write(folder / "<b onclick=alert(1)>.parquet", columns, TRL | {"notes": text, "config": TRL["config"]})
    log = [{"step": step, "split": "train", "name": text, "value": 0.5} for step in (0, 1)]
    (folder / "<b onclick=alert(1)>.metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log))
    return str(path)


def opened(path):
    return Inspector(open_run([path], aliases=ALIASES), CheckOptions(device="cpu"), [path])


@pytest.fixture(scope="module", params=HOSTILE)
def served(request, tmp_path_factory):
    """The text, and a way to ask the server of a run that has it everywhere."""
    text, folder = request.param, tmp_path_factory.mktemp("hostile")
    paths = [hostile_run(folder / name, text) for name in "ab"]
    inspector, other = map(opened, paths)
    run = open_run([paths[0]], aliases=ALIASES)
    judged = Answer(json.dumps(judged_body(judge(run, CheckOptions(device="cpu")))).encode())
    api = {"overview": _overview(inspector, paths[1]), "judged": lambda given: judged, **_pages(inspector, other)}
    server = PageServer(0, api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = urlsplit(server.address)

    def ask(path, prefix=address.path):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
        connection.request("GET", prefix + path)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())

    yield text, api, ask
    server.shutdown()
    thread.join()
    server.server_close()


def questions(text):
    """A question for every name of the interface, with the answer's status, and some that are wrong."""
    group = quote(f"{text} 0", safe="")
    here = f"step=0&split=train&group={group}"
    return {
        "overview": ["overview"],
        "judged": ["judged"],
        "step": ["step?step=0&split=train", f"step?step={quote(text)}", f"step?step=0&fix={quote(text)}"],
        "group": [f"group?{here}", f"group?step=0&group={quote(text)}", f"group?step=0&split={quote(text)}"],
        "against": [f"against?{here}", f"against?step=0&group={quote(text)}"],
    }


def strings(value):
    if isinstance(value, dict):
        return [found for key, cell in value.items() for found in (key, *strings(cell))]
    if isinstance(value, list):
        return [found for cell in value for found in strings(cell)]
    return [value] if isinstance(value, str) else []


@pytest.mark.slow
def test_every_answer_is_json_and_text_comes_as_it_is(served):
    text, api, ask = served
    asked = questions(text)
    assert asked.keys() == api.keys()
    for name, queries in asked.items():
        for place, query in enumerate(queries):
            status, body, headers = ask(f"api/{query}")
            assert status == (200 if place == 0 else 400), (query, body)
            guarded(headers, "application/json")
            said = strings(json.loads(body))
            if place == 0 and name != "overview":
                assert any(text in each for each in said), name
            # Nothing is escaped for a page, or it would be shown twice escaped.
            assert not any("&lt;img" in each or "&amp;" in each for each in said)


@pytest.mark.slow
def test_files_and_refusals_have_the_same_policy(served):
    text, _, ask = served
    for name in ASSETS:
        status, body, headers = ask(name)
        assert (status, body) == (200, asset(name or "index.html"))
        guarded(headers)
    for prefix in ("/", f"/{quote(text)}/"):
        status, body, headers = ask("", prefix=prefix)
        assert (status, body) == (404, b"")
        guarded(headers, "text/plain")
    assert set(ASSETS) == set(serving._FILES)


def guarded(headers, kind=None):
    """Insist on what a browser is told of an answer."""
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert kind is None or headers["Content-Type"] == kind


SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function|DOMParser|ContextualFragment"
)


@pytest.mark.parametrize("name", [name for name in ASSETS if name.endswith(".js")])
def test_no_script_of_the_page_makes_markup_of_text(name):
    script = asset(name).decode()
    assert not SINKS.search(script)


def test_links_lead_within_the_page():
    """A text that becomes an address could be a script."""
    script = asset("viewer.js").decode()
    links = re.findall(r"\bhref: *(\w+)|\bsrc: *(\w+)", script)
    assert {first or second for first, second in links} == {"address"}
    made = script[script.index("function address(") :]
    returned = re.findall(r"return (.)(.)", made[: made.index("\n}")])
    assert returned
    assert all(quote_ in "`\"'" and first == "#" for quote_, first in returned)
