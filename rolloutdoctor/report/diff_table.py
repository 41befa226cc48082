"""Every format of a comparison by name."""

from collections.abc import Callable

from rolloutdoctor.report import diff_markdown, diff_structured, diff_terminal
from rolloutdoctor.report.style import Style
from rolloutdoctor.results.comparison import Comparison

RENDERERS: dict[str, Callable[[Comparison, Style], str]] = {
    "full": diff_terminal.full,
    "concise": diff_terminal.concise,
    "json": diff_structured.as_json,
    "jsonl": diff_structured.as_json_lines,
    "markdown": diff_markdown.as_markdown,
}
