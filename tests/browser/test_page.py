"""The page in a real browser, at the width of a desk and of a phone, light and dark."""

import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from rolloutdoctor.cli.app import app
from rolloutdoctor.results.figures import KINDS, Gallery
from rolloutdoctor.results.findings import InputSummary, Report
from rolloutdoctor.results.row_views import RowView
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.views.html import Page, render

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow(every=True),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; install Debian's package chromium"),
]

POLICY = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]

# Measures the page from inside: added to a copy, for the page itself has no script.
PROBE = """<script>
const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('.skip, .hidden')
  && !e.closest('svg') && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
const figures = [...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect());
const ink = getComputedStyle(document.body);
document.body.setAttribute('data-seen', JSON.stringify({
  page: document.documentElement.scrollWidth, view: document.documentElement.clientWidth, wide: wide.length,
  figures: figures.length, small: figures.filter(r => r.width < 300 || r.height < 100).length,
  color: ink.color, back: ink.backgroundColor, text: getComputedStyle(document.querySelector('svg text')).fill,
  errors: window.failed || 0}));
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    target = tmp_path_factory.mktemp("page") / "report.html"
    words = ["report", str(SAMPLES / "verl_rejected.parquet"), "-o", str(target)]
    with pytest.raises(SystemExit) as stop:
        app(words)
    assert not stop.value.code
    return target


def with_script(page, script):
    """A copy's text with a script of this test in it, which the page's own policy would not let run."""
    text, policies = POLICY.subn("", page.read_text(encoding="utf-8"))
    assert policies == 1
    return text.replace("</body>", script)


def browse(page, tmp_path, *flags):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=True).stdout


@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_and_everything_is_seen(page, tmp_path, width, dark):
    copy = tmp_path / "copy.html"
    copy.write_text(with_script(page, PROBE), encoding="utf-8")
    mode = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    dom = browse(copy, tmp_path, "--dump-dom", f"--window-size={width},900", *mode)
    found = re.search('data-seen="([^"]*)"', dom)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert seen["view"] <= width
    assert seen["page"] <= seen["view"]
    assert seen["wide"] == 0
    assert (seen["figures"], seen["small"]) == (len(KINDS), 0)
    assert seen["back"] == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
    assert seen["text"] == seen["color"] == ("rgb(232, 233, 234)" if dark else "rgb(26, 26, 27)")


def inside(page, tmp_path, script, width=360):
    """Run a script in the page, in a frame that is narrower than any window of the browser may be."""
    probe = f"<script>addEventListener('load', () => {{ {script} }});</script></body>"
    (tmp_path / "inner.html").write_text(with_script(page, probe), encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<!DOCTYPE html><body><script>addEventListener('message', e => document.body.setAttribute('data-seen', e.data))"
        f"</script><iframe src=inner.html style='border:0;width:{width}px;height:800px'></iframe></body>"
    )
    dom = browse(outer, tmp_path, "--dump-dom", "--virtual-time-budget=5000")
    found = re.search('data-seen="([^"]*)"', dom)
    assert found is not None
    return json.loads(html.unescape(found[1]))


def test_on_a_phone_nothing_but_figures_and_tables_scrolls_sideways(page, tmp_path):
    seen = inside(
        page,
        tmp_path,
        """document.querySelectorAll('details').forEach(each => each.open = true);
        const view = document.documentElement.clientWidth;
        const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('.skip')
          && !e.closest('.hidden') && e.getBoundingClientRect().right > view + 1);
        parent.postMessage(JSON.stringify({view, page: document.documentElement.scrollWidth,
          wide: wide.map(e => e.outerHTML.slice(0, 80)),
          small: [...document.querySelectorAll('svg text')].filter(e => e.getBoundingClientRect().height < 9).length}),
          '*');""",
    )
    assert seen == {"view": 360, "page": 360, "wide": [], "small": 0}


def test_a_link_opens_what_it_leads_to_and_a_keyboard_reaches_everything(page, tmp_path):
    seen = inside(
        page,
        tmp_path,
        """const target = document.querySelector('#steps-RDA001'), before = target.closest('details').open;
        document.querySelector('a[href="#steps-RDA001"]').click();
        setTimeout(() => {
          const odd = [...document.querySelectorAll('a, summary, [tabindex]')].filter(e => e.tabIndex !== 0);
          const scrolling = [...document.querySelectorAll('.scroll')].filter(e => e.tabIndex !== 0);
          parent.postMessage(JSON.stringify({before, after: target.closest('details').open, odd: odd.length,
            scrolling: scrolling.length}), '*');
        }, 300);""",
        1100,
    )
    assert seen == {"before": False, "after": True, "odd": 0, "scrolling": 0}


def test_on_paper_nothing_is_folded_and_nothing_is_dark(page, tmp_path):
    text = page.read_text(encoding="utf-8").replace("@media print", "@media all")
    copy = tmp_path / "paper.html"
    copy.write_text(text, encoding="utf-8")
    seen = inside(
        copy,
        tmp_path,
        """const tables = [...document.querySelectorAll('details:not(.screen) table, details:not(.screen) dl')];
        parent.postMessage(JSON.stringify({
          folded: tables.filter(e => !e.checkVisibility({contentVisibilityAuto: true})).length,
          tables: tables.length > 5,
          back: getComputedStyle(document.body).backgroundColor,
          wide: [...document.querySelectorAll('svg, table')].filter(e => e.getBoundingClientRect().right > 721)
            .map(e => e.outerHTML.slice(0, 300)),
          nav: document.querySelector('nav').checkVisibility()}), '*');""",
        720,
    )
    assert seen == {"folded": 0, "tables": True, "back": "rgb(255, 255, 255)", "wide": [], "nav": False}


def test_nothing_that_a_model_wrote_runs(tmp_path):
    evil = (
        "</pre></script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\u202e\x1b[31m"
    )
    row = RowView(
        1, "train", evil, evil, evil, prompt=evil * 20, response=evil * 1000, ids=(1, 2), gradient=(0.1, -1.0)
    )
    report = Report("0.1.0", "cpu", "float32", InputSummary(), notes=(evil,), trainer=evil, trainer_version=evil)
    target = tmp_path / "evil.html"
    target.write_text(render(Page(evil, report, [], Gallery({}, {"kl": evil}), {}, rows=[row])), encoding="utf-8")
    dom = browse(target, tmp_path, "--dump-dom")
    assert not re.search("<(script|img)", dom)
    assert "<title>run" not in dom
    assert dom.count("<pre") == 2


def test_it_prints(page, tmp_path):
    target = tmp_path / "page.pdf"
    browse(page, tmp_path, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    pages = len(re.findall(rb"/Type\s*/Page\b", target.read_bytes()))
    # Print opens the definitions: four rules or more fit a page.
    assert 5 < pages < 10 + len(RULES) / 4


def test_a_log_alone_has_a_page(tmp_path):
    target = tmp_path / "log.html"
    with pytest.raises(SystemExit) as stop:
        app(["report", str(SAMPLES / "run.metrics.parquet"), "-o", str(target), "--quiet"])
    assert not stop.value.code
    text = target.read_text(encoding="utf-8")
    assert "logged metrics of 100 steps, no rollouts" in text
    assert 'href="#finding-RDG003"' in text
    dom = browse(target, tmp_path, "--dump-dom")
    for tag in ("article", "table", "details", "section"):
        assert len(re.findall(f"<{tag}[ >]", dom)) == len(re.findall(f"<{tag}[ >]", text)), tag


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_can_be_seen(page, tmp_path, width):
    picture = tmp_path / "page.png"
    browse(page, tmp_path, f"--screenshot={picture}", f"--window-size={width},2000")
    content = picture.read_bytes()
    assert struct.unpack(">II", content[16:24]) == (width, 2000)
    assert len(content) > 50_000  # not a blank sheet


def test_a_browser_reads_what_was_written(page, tmp_path):
    dom = browse(page, tmp_path, "--dump-dom")
    text = page.read_text(encoding="utf-8")
    for tag in ("article", "figure", "table", "details", "section", "svg"):
        assert len(re.findall(f"<{tag}[ >]", dom)) == len(re.findall(f"<{tag}[ >]", text)), tag
