"""Every format of a comparison by name."""

from collections.abc import Callable

from rolloutdoctor.commands.diff import markdown as diff_markdown
from rolloutdoctor.commands.diff import terminal as diff_terminal
from rolloutdoctor.results.comparison import Comparison
from rolloutdoctor.views import structured
from rolloutdoctor.views.style import Style

RENDERERS: dict[str, Callable[[Comparison, Style], str]] = {
    "full": diff_terminal.full,
    "concise": diff_terminal.concise,
    "json": structured.as_json,
    "jsonl": structured.as_json_lines,
    "markdown": diff_markdown.as_markdown,
}
