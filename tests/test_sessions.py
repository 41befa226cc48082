"""The pages that are read as a session of Python run as they stand."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("page", "least"), [("contribute/story.md", 30), ("agents.md", 8)])
def test_the_page_runs(monkeypatch, page, least):
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(ROOT / "docs" / page), module_relative=False, encoding="utf-8")
    assert failed == 0
    assert tried > least
