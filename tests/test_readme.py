"""The tables of the README are what the code says. ``UPDATE=1 pytest tests/test_readme.py`` rewrites them."""

import os
import re
from pathlib import Path

import pytest
from proof.table import claimed, markdown

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.hypotheses.fixes import FIXES
from rolloutdoctor.rules.table import RULES

README = Path(__file__).parent.parent / "README.md"


def rules_table() -> str:
    rows = ["| code | name | finds |", "| --- | --- | --- |"]
    rows += [f"| `{rule.code}` | `{rule.name}` | {rule.title()} |" for rule in RULES]
    return "\n".join(rows)


def columns_table() -> str:
    rows = ["| column | type | meaning | also read as |", "| --- | --- | --- | --- |"]
    for column in COLUMNS:
        aliases = ", ".join(f"`{name}`" for name in column.aliases)
        rows.append(f"| `{column.name}` | {column.kind.value} | {column.meaning} | {aliases} |")
    return "\n".join(rows)


def fixes_table() -> str:
    rows = ["| fix | what it changes | trainers | variants (the first is the default) |", "| --- | --- | --- | --- |"]
    for fix in FIXES.values():
        variants = "; ".join(f"`{name}`: {note}" for name, note in fix.notes.items())
        rows.append(f"| `{fix.name}` | {fix.summary} | {', '.join(fix.trainers())} | {variants} |")
    return "\n".join(rows)


def parity_table() -> str:
    return markdown(claimed())


@pytest.mark.parametrize(
    ("name", "table_of"),
    [("rules", rules_table), ("columns", columns_table), ("fixes", fixes_table), ("parity", parity_table)],
    ids=["rules", "columns", "fixes", "parity"],
)
def test_table_is_what_the_code_says(name, table_of):
    table, text = table_of(), README.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + "(.*?)" + re.escape(end), re.DOTALL)
    if os.environ.get("UPDATE"):
        text = pattern.sub(lambda _: f"{begin}{table}\n{end}", text)
        README.write_text(text, encoding="utf-8")
    found = pattern.search(text)
    assert found is not None
    assert found[1].strip() == table
