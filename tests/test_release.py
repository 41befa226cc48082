"""A release states one version everywhere."""

import re
from pathlib import Path

import yaml

from rolloutdoctor import __version__

ROOT = Path(__file__).parent.parent


def test_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert (cited["version"], str(cited["date-released"])) == released[0]
    assert cited["version"] == __version__


def test_the_action_uses_nothing_that_can_move():
    for file in ("action.yml", "docs/SKILL.md"):
        used = re.findall(r"uses: (\S+)", (ROOT / file).read_text(encoding="utf-8"))
        assert all(one.startswith("./") or re.search(r"@[0-9a-f]{40}$", one) for one in used), used
