"""The page in a real browser, at the width of a desk and of a phone, light and dark."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from rolloutdoctor.cli.app import app
from rolloutdoctor.results.figures import KINDS

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
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
    "--hide-scrollbars",
]

# Measures the page from inside: added to a copy, for the page itself has no script.
PROBE = """<script>
const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('.skip')
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
    words = ["report", str(SAMPLES / "verl_rejected.parquet"), "--fix", "rejected-rows", "-o", str(target)]
    with pytest.raises(SystemExit) as stop:
        app(words)
    assert not stop.value.code
    return target


def browse(page, tmp_path, *flags):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=True).stdout


@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out_and_everything_is_seen(page, tmp_path, width, dark):
    import html
    import json

    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
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
