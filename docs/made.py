"""Tables that are made when the site is built: as files, every new rule and release would rewrite them."""

import sys
from collections.abc import Callable
from pathlib import Path

from trainer_pages import trainer_part

from rolloutdoctor.commands.explain.terms import TERMS
from rolloutdoctor.metric_names.identities import IDENTITIES
from rolloutdoctor.metric_names.quantities import QUANTITIES
from rolloutdoctor.metric_names.table import TRAINERS
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.bounded import BOUNDED
from rolloutdoctor.search.hypotheses.fixes import FIXES
from rolloutdoctor.search.hypotheses.table import FAMILIES, FIX_CODE, HYPOTHESES

TESTS = Path(__file__).resolve().parent.parent / "tests"


def short_name(url: str) -> str:
    """Return ``trl#5588`` of the address of a thread."""
    _, repository, _, number = url.rsplit("/", 3)
    return f"{repository}#{number}"


def fixes_table() -> str:
    """Return every fix, with its threads upstream and its variants."""
    head = ("fix", "what it changes", "needs", "trainers, releases", "upstream", "variants (the first is the default)")
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for fix in FIXES.values():
        variants = "; ".join(f"`{name}`: {note}" for name, note in fix.notes.items())
        threads = [f"[{short_name(one.url)}]({one.url}) {one.words}" for one in fix.upstream] or [fix.status]
        upstream = "; ".join([*threads, *(["contested"] if fix.contested else [])])
        cells = (f"`{fix.name}`", fix.summary, fix.needs, fix.concerned(), upstream, variants)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def causes_table() -> str:
    """Return every hypothesis that `check` tests where logged values are not reproduced."""
    rows = ["| rule | cause | what the trainer did |", "| --- | --- | --- |"]
    every = (*HYPOTHESES, *FAMILIES, *BOUNDED)
    found = sorted((one for one in every if one.code != FIX_CODE), key=lambda one: one.code)
    rows += [f"| `{one.code}` | `{one.name}` | {one.words} |" for one in found]
    return "\n".join(rows)


def glossary_table() -> str:
    """Return every term with its meaning."""
    rows = ["| term | meaning here |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| {term} | {meaning} |" for term, meaning in TERMS.items())])


def metrics_table() -> str:
    """Return what each trainer calls each quantity."""
    lines = ["| quantity | unit | what it is |", "| --- | --- | --- |"]
    lines += [f"| `{one.name}` | {one.unit} | {one.definition} |" for one in QUANTITIES]
    for trainer, table in TRAINERS.items():
        lines += [
            "",
            f"### {trainer}",
            "",
            "| quantity | name | releases | what it is | where |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{one.quantity}` | `{one.pattern}` | {one.releases()} | {one.definition} | {one.source} |"
            for quantity in dict.fromkeys(one.quantity for one in table)
            for one in table
            if one.quantity == quantity
        ]
        if trainer in IDENTITIES:
            lines += ["", "| identity of its metrics | where |", "| --- | --- |"]
            lines += [f"| `{one.text}` | {one.conditions()}{one.source} |" for one in IDENTITIES[trainer]]
    return "\n".join(lines)


def rules_table() -> str:
    """Return every rule with what it finds."""
    rows = ["| code | name | finds |", "| --- | --- | --- |"]
    rows += [f"| `{rule.code}` | `{rule.name}` | {rule.title()} |" for rule in RULES]
    return "\n".join(rows)


def support_table() -> str:
    """Return what is read from each trainer: of its dumps those that the importers are tested with."""
    sys.path.insert(0, str(TESTS))
    import support

    return support.whole()


TABLES: dict[str, Callable[..., str]] = {
    "causes": causes_table,
    "fixes": fixes_table,
    "glossary": glossary_table,
    "metrics": metrics_table,
    "rules": rules_table,
    "support": support_table,
    "trainer": trainer_part,
}
"""Name of a place in a page, ``<!-- NAME -->`` or ``<!-- NAME ARGUMENT -->``, and what is put there."""
