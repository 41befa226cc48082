"""Write the skeleton of a rule: ``make rule NAME=kebab-case-name CODE=RDO001``.

It writes the rule and its test in the folders of their family, and enters the rule in `rolloutdoctor/packs.py`. What
it writes runs and passes as it is: it counts trained tokens whose two log-probs differ, until you say what it should
measure instead.
"""

import re
import subprocess
import sys
from pathlib import Path

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

RULE = '''"""@CODE@: one line that says what is found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


@dataclass(frozen=True)
class @CLASS@(TableRule):
    """One line that says what is found.

    ## What it does
    Counts trained tokens whose log-probs of the sampler and of the trainer differ.

    ## Why it matters
    Say what it does to the update, with the thread or paper that shows it.

    ## How it is measured
    Say what each measure is, in which unit, and what makes the verdict confirmed rather than exposed.

    ## What to do
    Say which option of the trainer to set, or what to change.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("@CODE@", toy_batch([[1, 0]], rollout=-1.5), trainer="trl")
    '@CODE@ info exposed: tokens_share 1'
    """

    code = "@CODE@"
    name = "@NAME@"
    references = ("https://github.com/huggingface/trl",)
    reads = ("trained_tokens",)
    adds = ("found",)
    needs_objective = False
    splits = ("train",)
    needs = ("old_log_probs", "rollout_log_probs", "response_mask")
    # A rule about a part of the objective names it in `part_names`: what leaves it out makes the rule not applicable.

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the trained tokens of each row whose log-probs differ."""
        found_T = block.log_ratio("old_log_probs", "rollout_log_probs") != 0
        return {"found": block.row_sum(found_T & block.trained_T)}

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each response with a trained token."""
        return run.rows.filter(pl.col("trained_tokens") > 0)

    def quantities(self) -> Mapping[str, Quantity]:
        """The share of such tokens."""
        return {"tokens_share": (pl.sum("found") / pl.sum("trained_tokens"), "share")}

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Responses with most of them."""
        return table.with_columns(value="found")

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the number of such tokens."""
        return f"{counted(place['found'], 'token')} of {place['trained_tokens']}"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No token to compare."""
        return None if len(run.table) else "no token is trained"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information, if there is one such token."""
        found = int(run.table["found"].sum())
        if not found:
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=f"{counted(found, 'trained token')} ({percent(run['tokens_share'])}) with different log-probs",
            message="say what this does to the update",
            evidence="say which logged value proves it",
            advice="say what to change",
        )
'''

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
        raise SystemExit("make rule NAME=kebab-case-name CODE=RDO001 (a family of A, G, I, M, O, T and three digits)")
    module, class_name, family = name.replace("-", "_"), name.title().replace("-", ""), FAMILIES[code[:3]]
    rule = PACKS.parent / "rules" / family / f"{module}.py"
    test = ROOT / "tests" / "rules" / family / f"test_{module}.py"
    codes = {_entry(path): _code(path) for path in (PACKS.parent / "rules").glob("*/*.py") if _code(path)}
    if code in codes.values() or rule.exists() or test.exists():
        raise SystemExit(f"{code} or {name} is there already; see rolloutdoctor/packs.py")
    for path, text in ((rule, RULE), (test, TEST)):
        for key, value in {"@CODE@": code, "@NAME@": name, "@CLASS@": class_name}.items():
            text = text.replace(key, value)
        path.write_text(text, encoding="utf-8")
    codes[_entry(rule)] = code
    start, rest = PACKS.read_text(encoding="utf-8").split("RULES = (\n", 1)
    end = rest.split("\n)\n", 1)[1]
    lines = "".join(f'    "{entry}",\n' for entry in sorted(codes, key=codes.__getitem__))
    PACKS.write_text(f"{start}RULES = (\n{lines})\n{end}", encoding="utf-8")
    written = [str(path) for path in (rule, test)]
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "--fix", *written], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *written], check=True)
    print(f"wrote {rule.relative_to(ROOT)} and {test.relative_to(ROOT)}, and one line in rolloutdoctor/packs.py")
    print("run UPDATE=1 pytest tests/test_readme.py for the table of rules in docs")


def _code(path: Path) -> str:
    found = re.search(r'^    code = "(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def _entry(path: Path) -> str:
    """Return the line of a rule in the table: its module and its class."""
    found = re.search(r"^class (\w+)\(\w*Rule\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    return f"rules.{path.parent.name}.{path.stem}:{found[1] if found else ''}"


if __name__ == "__main__":
    main(*sys.argv[1:3]) if len(sys.argv) == 3 else main("", "")
