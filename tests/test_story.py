"""docs/story.md runs as it stands."""

import doctest
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_story_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(ROOT / "docs" / "story.md"), module_relative=False, encoding="utf-8")
    assert failed == 0
    assert tried > 30
