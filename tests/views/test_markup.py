"""Text of a run is text in every format, wherever it comes from."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from rolloutdoctor.results.figures import Gallery
from rolloutdoctor.results.findings import Example, Finding, InputSummary, Measure, Report, Setting, Severity, Skipped
from rolloutdoctor.views.html import Page
from rolloutdoctor.views.html import render as page_of
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS
from rolloutdoctor.views.viewer_page import policy, viewer_document

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</summary><script>alert(1)</script>",
    "</td></table><iframe srcdoc='<script>alert(1)</script>'>",
    '"><svg onload=alert(1)>',
    "&lt;img src=x onerror=alert(1)&gt; &#60;b>",
    "]]><a xmlns='x'/>",
    "x\n::error title=x::y",
]
RAW = re.compile(r"<\s*/?\s*(img|script|iframe|svg|a|b|table)\b", re.IGNORECASE)


def report_with(text):
    """A report with the text wherever a file, a log, an option or a plug-in can put one."""
    finding = Finding(
        code="RDA001",
        name="rejected-in-baseline",
        severity=Severity.WARNING,
        verdict="confirmed",
        headline=text,
        message=text,
        evidence=text,
        advice=text,
        measures={"share": Measure(0.5, "1")},
        per_step=(),
        examples=(Example(1, text, text, 0.5, text),),
        fix=None,
        references=(),
    )
    return Report(
        version="0.2.0",
        device="cpu",
        dtype="float32",
        input=InputSummary(1, 1, 1, 1),
        trainer=text,
        trainer_version=text,
        config={"beta": Setting(text, text)},
        findings=(finding,),
        skipped=(Skipped("RDA002", "singleton-group", text, text),),
        notes=(text,),
    )


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown(text):
    rendered = RENDERERS["markdown"](report_with(text), Style(color=False))
    outside = re.sub(r"(`+) ?[^\n]*? ?\1", "", rendered)
    assert not RAW.search(outside), outside


@pytest.mark.parametrize("text", HOSTILE)
def test_junit(text):
    root = ElementTree.fromstring(RENDERERS["junit"](report_with(text), Style(color=False)))
    assert {one.tag for one in root.iter()} <= {
        "testsuites",
        "testsuite",
        "testcase",
        "failure",
        "system-out",
        "skipped",
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_github(text):
    rendered = RENDERERS["github"](report_with(text), Style(color=False))
    commands = [line for line in rendered.splitlines() if line.startswith("::")]
    assert len(commands) == 1
    assert not any(line.startswith("::error title=x") for line in commands)


@pytest.mark.parametrize("text", HOSTILE)
def test_html(text):
    rendered = page_of(Page(text, report_with(text), (), Gallery({}, {}), {}))
    seen = Tags()
    seen.feed(rendered)
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & set(seen.tags)
    assert not [name for name in seen.attributes if name.startswith("on")]
    assert f'content="{policy(with_viewer=False)}"' in rendered.replace("&#39;", "'")


def test_the_scripts_of_the_viewer_alone_run():
    document = viewer_document({"step?step=1": {"text": "</script><script>alert(1)</script>"}})
    assert "unsafe-inline" not in re.search(r"script-src [^;]*", document)[0]
    seen = Tags()
    seen.feed(document)
    assert seen.tags.count("script") == 3
    assert policy(with_viewer=True).count("sha256-") == 2
    assert replace(report_with("x"), notes=()).notes == ()
