"""The page of `view` in a real browser: it finds a group from a finding, colours tokens, and no text of a run acts."""

import html
import json
import re
import shutil
import subprocess
import threading
from base64 import b64encode
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_files import FLOATS, MASK, write

import rolloutdoctor
from rolloutdoctor.cli.app import app
from rolloutdoctor.commands.view.cli import _overview, _pages
from rolloutdoctor.commands.view.query import Inspector, judge, judged_body, shared
from rolloutdoctor.commands.view.serving import Answer, PageServer
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.views.viewer_page import viewer_document

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202e&lt;b&gt;"
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow(every=True),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; install Debian's package chromium"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",
]


def seen(address, *flags):
    """The page as the browser has it after its scripts have run."""
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *flags, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout


@pytest.fixture
def serve():
    """Serves a run, judged beforehand: its address, and the paths that were asked for."""
    servers = []

    def start(path, against=None):
        run = rolloutdoctor.open(path)
        inspector = Inspector(run, CheckOptions(), [Path(path).name])
        judged = orjson.dumps(judged_body(judge(run, CheckOptions())))
        asked = []
        other = (
            None if against is None else Inspector(rolloutdoctor.open(against), CheckOptions(), [Path(against).name])
        )
        beside = None if against is None else Path(against).name
        pages = _pages(inspector, other)
        api = {"overview": _overview(inspector, beside), "judged": lambda given: Answer(judged), **pages}

        def noted(name, answer):
            return lambda given: asked.append(name) or answer(given)

        server = PageServer(0, {name: noted(name, answer) for name, answer in api.items()})
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.address, asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_run_step_and_group(serve, tmp_path):
    address, asked = serve(SAMPLES / "verl_rejected.parquet")
    run = seen(address)
    assert "Fully masked responses shift 296 advantages" in run
    assert run.count('class="chart"') >= 5
    link = re.search(r'href="(#/step/46/train/group/45%2F0)"', run)[1]
    step = seen(f"{address}#/step/46/train?fix=rejected-rows")
    assert step.index("45/0") < step.index("45/1")
    assert "2 fully masked" in step
    assert "RDA001" in step
    group = seen(f"{address}{link}?fix=rejected-rows")
    assert group.count('class="completion"') == 8
    assert "with the fix" in group
    assert group.count('class="masked"') == 6
    assert "background-color: rgb" in group
    assert "larger with the fix" in group
    # 6 of the 8 completions are trained, on three tokens each.
    assert group.count('class="sized"') == 18
    assert "0.0182 → 0.116" in group
    assert 'class="sized"' not in seen(f"{address}{link}?fix=rejected-rows&colour=gradient")
    assert {"overview", "judged", "step", "group"} == set(asked)


def typed(tmp_path, place, script):
    """The shared page of a sample after a script has typed into it."""
    text = viewer_document(shared_of_sample())
    digest = f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    text = text.replace("script-src ", f"script-src {digest} ", 1).replace(
        "</body>", f"<script>{script}</script></body>"
    )
    target = tmp_path / "typed.html"
    target.write_text(text, encoding="utf-8")
    return seen(f"file://{target}{place}")


def test_completions_are_found_by_words_and_reward(tmp_path):
    group = "#/step/46/train/group/45%2F0"
    typing = (
        "setTimeout(() => { const field = document.getElementById('%s'); field.value = '%s';"
        "field.dispatchEvent(new Event('input')); }, 2000);"
    )
    page = typed(tmp_path, group, typing % ("find", "62"))
    assert "4 of 8 completions" in page
    assert page.count('<article class="completion" hidden="">') == 4
    page = typed(tmp_path, group, typing % ("most", "0.9"))
    assert page.count('<article class="completion" hidden="">') == 5


def test_curves_are_smoothed_when_asked(tmp_path):
    page = typed(tmp_path, "", "setTimeout(() => document.getElementById('smooth').click(), 2000);")
    assert 'id="smooth" type="checkbox" checked=""' in page


@pytest.mark.parametrize("path", ["healthy.parquet", "verl_rejected.parquet"])
def test_the_bar_is_green_for_a_healthy_run_alone(serve, path):
    address, _ = serve(SAMPLES / path)
    assert ('<h1 id="verdict" class="healthy">' in seen(address)) == (path == "healthy.parquet")


def test_the_bar_is_neutral_while_a_run_is_checked():
    run = rolloutdoctor.open(SAMPLES / "healthy.parquet")
    inspector = Inspector(run, CheckOptions(), ["healthy.parquet"])
    pending = Answer(b'{"words": "40 %"}', HTTPStatus.ACCEPTED)
    server = PageServer(0, {"overview": _overview(inspector), "judged": lambda given: pending})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = seen(server.address, "--virtual-time-budget=2000")
    server.shutdown()
    server.server_close()
    assert "Checking the run: 40 %" in page
    assert '<h1 id="verdict">' in page


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_at_the_width_of_a_phone(serve, tmp_path, dark):
    address, _ = serve(SAMPLES / "verl_rejected.parquet")
    target = tmp_path / "shot.png"
    flags = [f"--screenshot={target}", "--window-size=420,900", *(["--force-dark-mode"] if dark else [])]
    page = seen(f"{address}#/step/46/train/group/45%2F0", *flags)
    assert page.count('class="completion"') == 8
    assert target.stat().st_size > 10_000


def hostile_run(tmp_path):
    columns = {
        "step": [1, 1],
        "group_id": [HOSTILE, HOSTILE],
        "sample_id": [HOSTILE, "1"],
        "reward": [0.0, 1.0],
        "prompt": [HOSTILE] * 2,
        "response": [HOSTILE] * 2,
        "status": [HOSTILE, "stop"],
        "response_ids": pa.array([[7, 8]] * 2, pa.list_(pa.int32())),
        "response_mask": pa.array([[1, 1]] * 2, MASK),
        "old_log_probs": pa.array([[-0.5, -0.1]] * 2, FLOATS),
    }
    options = {"beta": 0.0, "num_generations": 2}
    recording = {"token_text": {"7": HOSTILE}}
    metadata = RunMetadata(trainer="trl", trainer_version="1.16.0", config=options, recording=recording)
    return write(tmp_path / "run.parquet", metadata=metadata, **columns)


def test_hostile_text_is_text(serve, tmp_path):
    address, _ = serve(hostile_run(tmp_path))
    group = quote(HOSTILE, safe="!'()*-._~")
    for page in (seen(address), seen(f"{address}#/step/1/train"), seen(f"{address}#/step/1/train/group/{group}")):
        assert "<title>owned" not in page
        assert "<img" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;document.title") >= 4


@pytest.mark.parametrize("dark", [False, True])
def test_a_trajectory_turn_by_turn(serve, tmp_path, dark):
    table = pq.read_table(hostile_run(tmp_path))
    turns = [
        [
            {"author": "model", "start": 0, "stop": 1, "turn": 4, "version": 3, "status": HOSTILE, "error": None},
            {"author": "tool", "start": 1, "stop": 2, "turn": 5, "version": None, "status": None, "error": HOSTILE},
        ],
        [{"author": "model", "start": 0, "stop": 2}],
    ]
    more = {"turns": turns, "trajectory_id": [9, 9], "error": [HOSTILE, None]}
    path = write(
        tmp_path / "turns.parquet",
        metadata=RunMetadata(**orjson.loads(table.schema.metadata[b"rolloutdoctor"])),
        **{name: table[name].combine_chunks() for name in table.column_names},
        **more,
    )
    address, _ = serve(path)
    group, target = quote(HOSTILE, safe="!'()*-._~"), tmp_path / "shot.png"
    flags = [f"--screenshot={target}", "--window-size=420,900", *(["--force-dark-mode"] if dark else [])]
    page = seen(f"{address}#/step/1/train/group/{group}", *flags)
    assert "1 trajectory, turn by turn" in page
    assert "3 turns in 2 rows, 4 tokens, 4 trained" in page
    assert page.count('class="completion"') == 2
    assert page.count('<tr class="row">') == 2
    assert page.count('class="mark author') == 2
    assert re.search(r'class="mark author tool"[^>]*>5 tool<', page)
    assert "<title>owned" not in page
    assert "<img" not in page


def test_two_runs_side_by_side(serve, tmp_path):
    sample = SAMPLES / "verl_rejected.parquet"
    address, asked = serve(sample, sample)
    page = seen(f"{address}#/step/46/group/45%2F0?against")
    assert "8 completions, 8 the same in both" in page
    assert page.count('class="completion"') == 16
    assert "against" in asked
    assert "group" not in asked
    assert re.search(r'href="#/step/46/train/group/45%2F1\?against"', page)
    address, _ = serve(hostile_run(tmp_path), hostile_run(tmp_path))
    group = quote(HOSTILE, safe="!'()*-._~")
    target = tmp_path / "shot.png"
    page = seen(f"{address}#/step/1/train/group/{group}?against", f"--screenshot={target}", "--window-size=420,900")
    assert "<title>owned" not in page
    assert "<img" not in page
    assert page.count('class="completion"') == 4


def test_a_shared_page_shows_its_groups_without_a_server(tmp_path):
    for path in (SAMPLES / "verl_rejected.parquet", hostile_run(tmp_path)):
        run = rolloutdoctor.open(path)
        report = rolloutdoctor.check(run)
        data = shared(Inspector(run, CheckOptions(), ["run.parquet"]), report, 2)
        target = tmp_path / "page.html"
        target.write_text(viewer_document(data), encoding="utf-8")
        page = seen(f"file://{target}")
        assert "<title>owned" not in page
        assert json.loads(orjson.dumps(data))["judged"]["verdict"][:20] in page
    target.write_text(viewer_document(shared_of_sample()), encoding="utf-8")
    page = seen(f"file://{target}#/step/46/train/group/45%2F0")
    assert page.count('class="completion"') == 8


def test_the_groups_in_a_report_run_under_the_policies_of_both_pages(tmp_path):
    """The page is as written but for two scripts of this test, whose digests are added to its policies."""
    target = tmp_path / "report.html"
    with pytest.raises(SystemExit) as stop:
        app(["report", str(SAMPLES / "verl_rejected.parquet"), "--groups", "2", "-o", str(target)])
    assert not stop.value.code
    inner = (
        "const refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective));"
        "addEventListener('load', () => setTimeout(() => parent.postMessage(JSON.stringify({refused,"
        "text: document.body.innerText}), '*'), 2000));"
    )
    outer = (
        "const broken = []; addEventListener('securitypolicyviolation', e => broken.push(e.violatedDirective));"
        "addEventListener('message', e => document.body.setAttribute('data-seen',"
        "JSON.stringify({...JSON.parse(e.data), broken})));"
    )
    digests = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in (inner, outer))
    text = target.read_text(encoding="utf-8").replace("script-src ", f"script-src {digests} ")
    assert text.count(digests) == 2
    head = f"&lt;script&gt;{inner.replace('&', '&amp;')}&lt;/script&gt;"
    before, frame, after = text.partition("srcdoc=")
    assert "&lt;main" in after
    text = before + frame + after.replace("&lt;main", f"{head}&lt;main", 1)
    target.write_text(text.replace("</head>", f"<script>{outer}</script></head>", 1), encoding="utf-8")
    # A frame of a process of its own has a time of its own, which nothing waits for.
    together = ("--disable-site-isolation-trials", "--disable-features=IsolateSandboxedIframes")
    found = re.search('data-seen="([^"]*)"', seen(f"file://{target}", *together))
    assert found is not None
    page = json.loads(html.unescape(found[1]))
    assert (page["refused"], page["broken"]) == ([], [])
    assert "rules tested" in page["text"]


def shared_of_sample():
    run = rolloutdoctor.open(SAMPLES / "verl_rejected.parquet")
    return shared(Inspector(run, CheckOptions(), ["run.parquet"]), rolloutdoctor.check(run), 2)
