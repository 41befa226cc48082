"""The pytest plugin of the proof table: the marks, what the running test claims, and the file that holds it all."""

import json
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from proof.claims import RUNNING, Claim, claims_of

CLAIMS: dict[Claim, None] = {}
"""Of the tests that are to run."""
COLLECTED: dict[Claim, None] = {}
"""Of all tests that were collected."""
LEFT_OUT: list[pytest.Item] = []
"""Tests that were collected and are not to run."""
SEEN: set[Path] = set()
"""Files that tests were collected from, as a whole."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", metavar="FILE", help="write what the tests cover, and the worst errors, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(trainer, option, *values): what the test proves")
    config.addinivalue_line("markers", "compared(against, bound, **quantities): with what, and how closely")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    LEFT_OUT.extend(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    CLAIMS.update((claim, None) for item in session.items for claim in claims_of(item))
    COLLECTED.update(CLAIMS)
    COLLECTED.update((claim, None) for item in LEFT_OUT for claim in claims_of(item))
    if not any("::" in word for word in session.config.args):
        SEEN.update(item.path for item in [*session.items, *LEFT_OUT])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    RUNNING.claims, RUNNING.compared = claims_of(item), 0
    found = yield
    assert RUNNING.compared or not RUNNING.claims, "the test is marked as a proof, and compares nothing with `agree`"
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--proof")
    if target is None:
        return
    errors = [
        {"claim": claim.plain(), "what": what, "precision": precision, "error": error, "used": used}
        for (claim, what, precision), (error, used) in RUNNING.errors.items()
    ]
    text = json.dumps({"claims": [claim.plain() for claim in CLAIMS], "errors": errors})
    Path(target).write_text(text, encoding="utf-8")
