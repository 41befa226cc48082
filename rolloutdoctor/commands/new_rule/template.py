"""Skeleton of a rule and of its test, which run and pass as they are.

It counts trained tokens whose two log-probs differ, until its author says what it should measure instead.
"""

RULE = '''"""@CODE@: one line that says what is found."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


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
        tokens = int(run.table["found"].sum())
        if not tokens:
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=f"{counted(tokens, 'trained token')} ({percent(run['tokens_share'])}) with different log-probs",
            message="say what this does to the update",
            evidence="say which logged value proves it",
            advice="say what to change",
        )
'''

INSTANCE = """

RULE = @CLASS@()
"""
"""What a package offers by an entry point."""

TEST = """from rolloutdoctor.testing import diagnose_one, toy_batch


def test_found():
    outcome = diagnose_one("@CODE@", toy_batch([[1, 0]], rollout=-1.5), trainer="trl")
    assert outcome == "@CODE@ info exposed: tokens_share 1"


def test_clean():
    assert diagnose_one("@CODE@", toy_batch([[1, 0]], rollout=-1.0, policy=-1.0), trainer="trl") == "@CODE@ clean"


def test_not_applicable():
    batch = toy_batch([[1, 0]], rollout=-1.5, mask=[[0], [0]])
    assert diagnose_one("@CODE@", batch, trainer="trl") == "@CODE@ not applicable: no token is trained"
"""


def filled(text: str, name: str, code: str) -> str:
    """Fill in the name, in kebab case, and the code."""
    for key, value in {"@CODE@": code, "@NAME@": name, "@CLASS@": class_of(name)}.items():
        text = text.replace(key, value)
    return text


def class_of(name: str) -> str:
    """Return the class of a rule of a name in kebab case.

    >>> class_of("certain-tokens")
    'CertainTokens'
    """
    return name.title().replace("-", "")
