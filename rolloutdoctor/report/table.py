"""Every format by name."""

from collections.abc import Callable

from rolloutdoctor.report import concise, github, junit, markdown, structured, terminal
from rolloutdoctor.report.style import Style
from rolloutdoctor.results.findings import Report

RENDERERS: dict[str, Callable[[Report, Style], str]] = {
    "full": terminal.render,
    "concise": concise.render,
    "json": structured.as_json,
    "jsonl": structured.as_json_lines,
    "markdown": markdown.render,
    "github": github.render,
    "junit": junit.render,
}
