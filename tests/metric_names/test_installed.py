"""Names of the newest releases stand in the installed packages: a release that renames a metric fails here."""

import importlib.util
import re
from pathlib import Path

import pytest

from rolloutdoctor.metric_names.table import TRAINERS

pytestmark = pytest.mark.parity
LOGGED = [
    pytest.param(one, id=f"{trainer}-{one.pattern}")
    for trainer in ("trl", "verl")
    for one in TRAINERS[trainer]
    if not one.until
]


def source(one):
    """Text of the module that logs a metric, and the function that does."""
    name, _, function = one.source.partition(", ")
    package, _, rest = name.partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(found.submodule_search_locations[0]) / rest
    assert path.exists(), f"{package} has no {rest} any more"
    return path.read_text(encoding="utf-8"), function


@pytest.mark.parametrize("one", LOGGED)
def test_the_installed_package_logs_it(one):
    text, function = source(one)
    name = re.escape(one.pattern).replace(re.escape("*"), r"\{\w+\}")
    # Names of verl's workers get "actor/" or "rollout_corr/" later.
    last = one.pattern.partition("/")[2]
    assert re.search(rf"""["']({name}|{re.escape(last) or "-"})["']""", text), one.pattern
    assert not function or re.search(rf"(def|class) {function}\b", text), function
