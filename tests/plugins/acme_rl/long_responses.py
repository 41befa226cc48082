"""ACME01: responses that are longer than Acme's budget."""

import polars as pl

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Judgement, counted
from rolloutdoctor.rules.table_rule import TableRule


class LongResponses(TableRule):
    """Some responses are longer than Acme's budget of 3 tokens.

    ## What it does
    Counts them.
    """

    code = "ACME01"
    name = "long-responses"
    references = ("https://acme.example/budget",)
    reads = ("tokens",)
    needs_objective = False
    splits = ("train",)

    def columns(self, context):
        """The mask, which says how long a response is."""
        return frozenset({"response_mask"})

    def table(self, run, context):
        """One line for each response."""
        return run.rows.with_columns(long=pl.col("tokens") > 3)

    def quantities(self):
        """How many."""
        return {"long_rows": (pl.sum("long"), "rows")}

    def places(self, table):
        """The longest."""
        return table.filter("long").with_columns(value="tokens")

    def judge(self, run, context):
        """Information where there is one."""
        if not run["long_rows"]:
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"{counted(run.count('long_rows'), 'response')} longer than 3 tokens",
            message="the budget is 3 tokens",
            evidence="the lengths of the rows",
            advice="cap the responses",
        )


RULE = LongResponses()
