"""Text of a run is text in the Markdown of every command, from its metadata, options, ids, texts, metrics and name."""

import re
from html.parser import HTMLParser

import growing
import pytest
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.writer import MetricsWriter, RunWriter, metrics_path

HOSTILE = "<img src=x onerror=alert(1)></summary><script>alert(2)</script>"
_CODE = re.compile(r"^```.*?^```|(`+)[^\n]*?\1", re.MULTILINE | re.DOTALL)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def handle_starttag(self, tag, attrs):
        self.seen |= {tag, *(name for name, _ in attrs if name.startswith("on"))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ, with hostile text wherever a file can have any."""
    folder = tmp_path_factory.mktemp("runs")
    paths = []
    for seed in (0, 1):
        path = folder / f"<img src=x onerror=alert({seed})>.parquet"
        config = growing.CONFIG | {"loss_type": "grpo", HOSTILE: f"{HOSTILE}{seed}", "run_name": HOSTILE * (seed + 1)}
        with RunWriter(path, RunMetadata("trl", f"1.16.0{HOSTILE if seed else ''}", config)) as run:
            for step in range(1, 7):
                own = {name: list(cells) for name, cells in growing.columns(step, seed=seed, fault_from=3).items()}
                for name in ("group_id", "sample_id"):
                    own[name] = [f"{cell}{HOSTILE}" for cell in own[name]]
                texts = {name: [HOSTILE] * growing.ROWS for name in ("prompt", "response", "status")}
                run.write({"step": [step] * growing.ROWS} | own | texts)
        with MetricsWriter(metrics_path(path)) as table:
            for step in range(1, 7):
                table.write(step, "train", growing.logged(step) | {HOSTILE: float(step + seed)})
        paths.append(str(path))
    return paths


COMMANDS = [
    ("check", 1, ()),
    ("check", 1, ("--verbose",)),
    ("diff", 1, ("--all-fixes",)),
    ("diff", 1, ("--fix", "zero-std", "--by", "group")),
    ("compare", 2, ()),
    ("diff", 1, ("--against", "beta=0", "--by", "group")),
    ("why", 1, ("--at", "4")),
    ("why", 1, ("--at", "4", "--metric", HOSTILE)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "count", "more"), COMMANDS, ids=lambda each: str(each))
def test_markdown(runs, command, count, more):
    done = CliRunner().invoke(app, [command, *runs[-count:], *more, "--format", "markdown"])
    assert done.exit_code in (0, 1), done.output
    assert "img" in done.stdout
    tags = Tags()
    tags.feed(_CODE.sub("", done.stdout))
    assert tags.seen <= {"details", "summary", "br"}, done.stdout


@pytest.mark.parametrize("command", ["export", "identify", "info", "compare", "diff", "why"])
def test_every_format_with_markup_is_in_this_law(command):
    """Those without one have none to break."""
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    formats = set(re.findall(r"markdown|html", said))
    assert formats <= {"markdown"}
    assert ("markdown" in formats) == (command in {name for name, _, _ in COMMANDS})
