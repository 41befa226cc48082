"""RDA027: rows of a trajectory with the advantage of another of its steps."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, baseline_per_token, counted, percent
from rolloutdoctor.rules.measures.step_advantages import PLACES, RELATIONS, TRAJECTORY, held_against, zero_places
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

_SAME = "every row of a trajectory has the same advantage"


class AdvantageOfAnotherTurn(TableRule):
    """Rows of a trajectory have the advantage of another of its turns.

    ## What it does
    Where a trajectory gives several rows, one for each turn (`trajectory_id`), compares the logged advantage of each
    row with its own and with those of other turns: the last, the first, the next and the one before, and of the next
    row that ends any trajectory.

    ## Why it matters
    Step-wise training computes an advantage for a turn, or for the last one, and hands it to rows. Where rows are
    paired wrongly, a turn is reinforced for what another one did; where the last turn's masked tokens are copied, what
    is longer than that turn gets 0 and learns nothing. No metric shows it.

    ## How it is measured
    Whole steps are tested: a relation between rows explains a step if every logged advantage is, within its rounding
    radius, the recomputed one of the row that the relation leads to, and some of these are not the row's own. Copied
    tokens are recognised from the logged advantages alone: in every row exactly the trained tokens beyond the length of
    the last turn's response have 0, counted from the end or from the beginning, and the others have the last turn's
    advantage. A finding requires eight such rows (`moved_rows`) and is an error. Rows whose trajectory has one
    advantage throughout cannot show it.

    ## What to do
    Hand over the scalar advantage, times the row's own mask, and find the turns of a trajectory by its id, not by
    their order.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> rewards = [[row % 5 for row in range(16)]]
    >>> per_row = {"trajectory_id": [row // 4 for row in range(16)]}
    >>> last = [rewards[0][row // 4 * 4 + 3] - sum(rewards[0]) / 16 for row in range(16)]
    >>> batch = toy_batch(rewards, per_row={**per_row, "advantage": last})
    >>> diagnose_one("RDA027", batch, trainer="trl", scale_rewards="none")
    'RDA027 error confirmed: moved_rows 12'
    """

    code = "RDA027"
    name = "advantage-of-another-turn"
    references = (
        "https://github.com/NovaSky-AI/SkyRL/issues/1492",
        "https://github.com/NovaSky-AI/SkyRL/pull/1507",
        "https://github.com/NovaSky-AI/SkyRL/pull/1281",
    )
    reads = ("trajectory_id", "advantage", "tokens")
    adds = ("logged", "radius", *PLACES)
    needs_objective = False
    splits = ("train",)
    stages = ("advantages",)
    needs = ("trajectory_id",)

    fewest: int = 8
    """Rows that have an advantage of another turn: fewer may agree by chance."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """What advantages are made of, and those that were logged."""
        columns = frozenset() if context.objective is None else advantage_columns(context.objective)
        return columns | {"advantage", "advantages", "response_mask"}

    def unavailable_reason(self, context: Context) -> Missing | None:
        """No advantages to look at, or none for each row."""
        if not context.columns & {"advantage", "advantages"}:
            return Missing("no advantages were logged", "log the advantage of each row, or advantages, one a token")
        return baseline_per_token(context)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Places of trained tokens with an advantage of 0, and of the others."""
        return zero_places(block) if block.has("advantages", "response_mask") else {}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The logged advantages, and the radius of the recomputed ones."""
        is_known = step.rows is not None and step.rows.advantage_N is not None
        return {"logged": step.logged_advantages(), "radius": step.advantage_radius() if is_known else None}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return sums over the rows of trajectories of several, and the rows that each relation moves."""
        rows = held_against(rows.filter(pl.col("trajectory_id") >= 0, pl.len().over(TRAJECTORY) > 1))
        is_own, could_show = pl.col("is_own").fill_null(value=False), pl.col("could_show")
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(
            could_show.sum(),
            own_shown=(is_own & could_show).sum(),
            same=(is_own & ~could_show).sum(),
            rows=pl.len(),
            known=pl.col("advantage").count(),
            **{f"{name}/moved": pl.col(f"{name}/moves").sum() for name in RELATIONS},
            **{f"{name}/of": pl.col("trajectory_id").filter(f"{name}/moves").n_unique() for name in RELATIONS},
        )
        size = pl.col("logged").abs()
        places = [rows.filter(f"{name}/moves").select(*NAMES, relation=pl.lit(name), value=size) for name in RELATIONS]
        return with_places(sums, pl.concat(places), context, "relation")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Choose the relation that explains most rows: how many these are, and where."""
        counts = {name: int(run.rows[f"{name}/moved"].sum() or 0) for name in RELATIONS}
        best = max(counts, key=lambda name: counts[name])
        lines = run.rows.filter((pl.col("relation") == best).fill_null(value=True))
        return lines.with_columns(
            moved=pl.col(f"{best}/moved"), trajectories=pl.col(f"{best}/of"), relation=pl.lit(best)
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Rows with another's advantage, and those of which it could show."""
        moved, could_show = pl.sum("moved"), pl.sum("could_show")
        return {
            "moved_rows": (moved, "rows"),
            "moved_share": (moved / could_show, "share"),
            "rows_compared": (could_show, "rows"),
            "trajectories": (pl.sum("trajectories"), "trajectories"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Whose advantage it has."""
        return f"has the advantage of {RELATIONS[place['relation']]}"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """One row for each trajectory, or one advantage."""
        if not len(run.table):
            return "every trajectory has one row"
        return _SAME if run.table["same"].sum() == run.table["rows"].sum() else None

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Advantages that are neither the rows' own nor those of another turn."""
        tested, own_shown, known_turns = run.table.select(pl.sum("could_show", "own_shown", "known")).row(0)
        if tested and own_shown == tested:
            return None
        if not known_turns:
            return Missing("the advantages of the rows themselves are not recomputed", context.unstated)
        remedy = "give the options of the run with --set, or record the rewards of the turns"
        return Missing("the logged advantages are not those of these rows, nor of others of their trajectories", remedy)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error: rows are trained with what another turn earned."""
        rows = run.count("moved_rows")
        if rows < self.fewest:
            return None
        whose = RELATIONS[run.table["relation"][0]]
        copied = run.table["relation"][0] == "tokens"
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"{rows:,} rows of trajectories have the advantage of {whose}, not their own",
            message=(
                f"{counted(rows, 'row')} of {run.count('rows_compared'):,} of which it could show "
                f"({percent(run['moved_share'])}) have the advantage of {whose}"
                + ("" if copied else ": they are trained for what another turn did")
            ),
            evidence=(
                "the logged advantages of the tokens: 0 begins exactly where the last step's response ends"
                if copied
                else "every logged advantage of these steps is the recomputed one of that row"
            ),
            advice="hand over the scalar advantage times the row's own mask, and pair turns by the trajectory's id",
        )
