"""Write the skeleton of a rule: ``make rule NAME=kebab-case-name CODE=RDO001``.

It writes the rule and its test in the folders of their family, and enters the rule in `rolloutdoctor/packs.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

from rolloutdoctor.commands.new_rule import template

ROOT = Path(__file__).parent.parent
PACKS = ROOT / "rolloutdoctor" / "packs.py"
FAMILIES = {
    "RDA": "advantages",
    "RDG": "gradients",
    "RDI": "integrity",
    "RDM": "metrics",
    "RDO": "off_policy",
    "RDT": "dynamics",
}

TEST = """import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch


def test_found():
    found = found_by("@CODE@", toy_batch([[1, 0]], rollout=-1.5), trainer="trl")
    assert values(found) == pytest.approx({"tokens_share": 1.0})


def test_clean():
    report = report_on(toy_batch([[1, 0]], rollout=-1.0, policy=-1.0), select=["@CODE@"], trainer="trl")
    assert outcomes(report) == {"@CODE@": "clean"}


def test_not_applicable():
    report = report_on(toy_batch([[1, 0]], rollout=-1.5, mask=[[0], [0]]), select=["@CODE@"], trainer="trl")
    assert outcomes(report) == {"@CODE@": "not applicable"}
"""


def main(name: str, code: str) -> None:
    """Write the files, and enter the rule in the table."""
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name) or not re.fullmatch(r"RD[AGIMOT]\d{3}", code):
        families = ", ".join(f"{start[2]} {family}" for start, family in FAMILIES.items())
        raise SystemExit(f"make rule NAME=kebab-case-name CODE=RDO001 (RD, a family and three digits: {families})")
    module, family = name.replace("-", "_"), FAMILIES[code[:3]]
    rule = PACKS.parent / "rules" / family / f"{module}.py"
    test = ROOT / "tests" / "rules" / family / f"test_{module}.py"
    codes = {_entry(path): _code(path) for path in (PACKS.parent / "rules").glob("*/*.py") if _code(path)}
    if code in codes.values() or rule.exists() or test.exists():
        raise SystemExit(f"{code} or {name} is there already; see rolloutdoctor/packs.py")
    for path, text in ((rule, template.RULE), (test, TEST)):
        path.write_text(template.filled(text, name, code), encoding="utf-8")
    codes[_entry(rule)] = code
    start, rest = PACKS.read_text(encoding="utf-8").split("RULES = (\n", 1)
    end = rest.split("\n)\n", 1)[1]
    lines = "".join(f'    "{entry}",\n' for entry in sorted(codes, key=codes.__getitem__))
    PACKS.write_text(f"{start}RULES = (\n{lines})\n{end}", encoding="utf-8")
    written = [str(path) for path in (rule, test)]
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "--fix", *written], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *written], check=True)
    print(f"wrote {rule.relative_to(ROOT)} and {test.relative_to(ROOT)}, and one line in rolloutdoctor/packs.py")
    print("it counts tokens; for a rule over logged numbers see docs/contribute/rule.md, A rule over the log")
    print("run UPDATE=1 pytest tests/test_readme.py for the numbers of rules in README and docs")


def _code(path: Path) -> str:
    found = re.search(r'^    code = "(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def _entry(path: Path) -> str:
    """Return the line of a rule in the table: its module and its class, the one that has a code."""
    before = path.read_text(encoding="utf-8").partition("\n    code = ")[0]
    *_, name = re.findall(r"^class (\w+)", before, re.MULTILINE)
    return f"rules.{path.parent.name}.{path.stem}:{name}"


if __name__ == "__main__":
    main(*sys.argv[1:3]) if len(sys.argv) == 3 else main("", "")
