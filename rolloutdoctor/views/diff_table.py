"""Every format of a comparison by name."""

from collections.abc import Callable

from rolloutdoctor.results.comparison import Comparison
from rolloutdoctor.views import diff_markdown, diff_structured, diff_terminal
from rolloutdoctor.views.style import Style

RENDERERS: dict[str, Callable[[Comparison, Style], str]] = {
    "full": diff_terminal.full,
    "concise": diff_terminal.concise,
    "json": diff_structured.as_json,
    "jsonl": diff_structured.as_json_lines,
    "markdown": diff_markdown.as_markdown,
}
