"""Every format by name."""

from collections.abc import Callable

from rolloutdoctor.results.findings import Report
from rolloutdoctor.views import concise, github, junit, markdown, sarif, structured, terminal
from rolloutdoctor.views.style import Style

RENDERERS: dict[str, Callable[[Report, Style], str]] = {
    "full": terminal.render,
    "concise": concise.render,
    "json": structured.as_json,
    "jsonl": structured.as_json_lines,
    "markdown": markdown.render,
    "github": github.render,
    "junit": junit.render,
    "sarif": sarif.render,
}
