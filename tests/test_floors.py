"""The lowest releases that this package permits have no known hole that matters here."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

ADVISORIES = {
    # 2.6.0 had ended CVE-2025-32434, code that torch.load executes with weights_only=True.
    "torch": ("2.10.0", "CVE-2026-24747: a file that torch.load reads with weights_only=True writes over memory"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a template leaves the sandbox by the filter attr"),
    # 2.52.0 had ended CVE-2025-62593, code that such a page executes.
    "ray": ("2.54.0", "CVE-2026-27482: a page in a browser deletes jobs by the dashboard"),
    # CVE-2026-25087 (up to 23.0.0) is of files of Arrow IPC read with pre-buffering, and none is read here.
    "pyarrow": ("14.0.1", "CVE-2023-47248: an extension type in a file executes code"),
    # 3.9.15 had ended CVE-2024-27454, the same of what is read.
    "orjson": ("3.11.6", "CVE-2025-67221: deep nesting of what is written ends the process"),
}
"""Package to the first release without a hole, and which; looked up in November 2026."""


def requirements():
    extras = [text for group in PROJECT["optional-dependencies"].values() for text in group]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *extras)]


@pytest.mark.parametrize("name", ADVISORIES)
def test_no_release_with_a_known_hole_is_permitted(name):
    fixed, hole = ADVISORIES[name]
    (named,) = {str(one.specifier) for one in requirements() if one.name.lower() == name}
    floor = re.search(r">=([\d.]+)", named)
    assert floor, f"{name} has no lowest release"
    assert Version(floor[1]) >= Version(fixed), hole


def test_what_is_tested_is_permitted():
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for one in requirements():
        if one.name in pinned:
            assert one.specifier.contains(pinned[one.name], prereleases=True), one
