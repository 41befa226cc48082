"""RDA015: equal responses to one prompt with different rewards."""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import prompt_columns, response_columns
from rolloutdoctor.results.exact import ratio
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, excluded_share, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, of_smallest

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

FOLLOWED = 2**16
"""Responses that are compared across groups and steps: 10 MB a function."""


class RewardNotAFunction(TableRule):
    """The same response to the same prompt got different rewards.

    ## What it does
    Compares the rewards of responses of a group that are equal token by token, for every reward function, and of equal
    responses to one prompt in other groups and steps.

    ## Why it matters
    A group baseline turns a difference between equal responses into advantages of opposite sign: noise that no response
    earned. It comes from a judge model that samples, a verifier that runs into a time limit, a random test, or rewards
    joined to the wrong rows.

    ## How it is measured
    `differing` are copies in a group whose reward differs from that of the previous copy by more than 1 % of the
    function's range. `noise_share` is the mean squared difference of copies divided by that of any two responses of
    their groups: 0 for a function of the response, 1 if equal responses agree no better than different ones.
    `elsewhere` counts equal responses to the prompt in other groups and steps, where a reward with scheduled weights, a
    reward relative to its group, or another reference answer differs by design. The measures are those of the function
    with the most differing copies. Responses that are part of a trajectory are left out. In a run with more than 65,536
    different responses, that many, chosen by hash, are followed across groups and steps.

    A penalty for length, truncation or format is a function of the response and never differs. It is information, since
    noise may be intended; a warning if half of what the function distinguishes within groups is noise, by three
    standard errors, with ten differing copies or more. The rule does not claim that either reward is the right one.

    ## What to do
    Score the responses listed once more. If their rewards change, set the judge's temperature to 0, average several
    verdicts, or raise the time limit of the verifier; if not, the rewards are those of other rows (`RDI004`).

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0, 0, 1]], lengths=2, per_token={"response_ids": [[5, 6], [5, 6], [5, 7], [8, 6]]})
    >>> diagnose_one("RDA015", batch, trainer=None)
    'RDA015 info exposed: differing 1'
    """

    code = "RDA015"
    name = "reward-not-a-function"
    references = ("https://arxiv.org/abs/2510.00915",)
    reads = ("reward", "rewards", "prompt", "trajectory_id")
    adds = ("response",)
    needs_objective = False
    splits = ("train",)

    rounding: float = 0.01
    """Share of a function's range in the run below which a difference is one of a reward model's bfloat16."""

    limit: float = 0.1
    warn_above: float = 0.5
    fewest: int = 10
    errors: float = 3.0

    def columns(self, context: Context) -> frozenset[str]:
        """The responses, their groups and rewards."""
        return response_columns(context.columns) | {"group_id", "reward"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Rewards by function, prompts, and what belongs to one trajectory."""
        return prompt_columns(context.columns) | {"rewards", "trajectory_id"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Hash each response: 0 for one without tokens or text."""
        has_ids = block.is_logged("response_ids")
        return {"response": block.prefixes.at_lengths_NK[:, -1] if has_ids else block.row_column("response")}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Lines of reward functions: ranges, copies with another reward, sums over the others, and first responses.

        `at_group` is a copy of a response of the group; those of no copy are compared with those of other groups.
        """
        is_there, part = pl.col("response") != 0, (*STEP_KEY, "trajectory_id")
        is_whole = pl.col("trajectory_id").is_null() | (pl.len().over(part) == 1)
        named = [name for name in rows.columns if name.startswith("rewards/")] or ["reward"]
        index = [*STEP_KEY, "row", "group", "group_id", "sample_id", "prompt", "response"]
        value, at_group, of_step = pl.col("value"), pl.col("at_group"), [*STEP_KEY, "function"]
        group, kind = [*STEP_KEY, "group", "function"], [*STEP_KEY, "group", "function", "response"]
        size, centred = pl.len().over(group), (value - value.mean().over(group)) ** 2
        lines = (
            rows.filter(is_there & is_whole)
            .unpivot(named, index=index, variable_name="function")
            .with_columns(value.cast(pl.Float64), pl.col("function").str.strip_prefix("rewards/"))
            .filter(value.is_finite())
            .with_columns(
                at_group=~pl.struct(kind).is_first_distinct(),
                chance=(size * centred + centred.sum().over(group)) / (size - 1),
            )
        )
        ranges = lines.group_by(of_step, maintain_order=True).agg(low=value.min(), high=value.max())
        copies, chance = _with_before(lines, kind).filter(at_group), pl.col("chance")
        equal = copies.filter(pl.col("apart") == 0).group_by(of_step, maintain_order=True)
        sums = equal.agg(equal=pl.len(), equal_chance=chance.sum(), equal_squares=(chance**2).sum())
        first = lines.filter(~at_group, pl.col("prompt") != 0)
        joined = pl.concat([ranges, sums, copies.filter(pl.col("apart") > 0), first], how="diagonal")
        return joined.sort(STEP_KEY, maintain_order=True)

    def thinned(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Follow the first responses of the smallest hashes."""
        is_first = (~pl.col("at_group")).fill_null(value=False)
        rest, first = lines.filter(~is_first), of_smallest("response", FOLLOWED, lines.filter(is_first))
        return pl.concat([rest, first]).sort(STEP_KEY, maintain_order=True)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Copies, of a group and of other groups and steps, by function; differences far below its range are none."""
        function, at_group, differs = pl.col("function"), pl.col("at_group"), pl.col("differs")
        ranges = run.rows.group_by("function").agg(range=pl.max("high") - pl.min("low")).filter(pl.col("range") > 0)
        lines = run.rows.join(ranges, on="function", how="inner", maintain_order="left")
        across = _with_before(lines.filter(~at_group), ["prompt", "response", "function"])
        joined = pl.concat(
            [lines.filter(at_group.fill_null(value=False) | (pl.col("equal") > 0)), across], how="diagonal"
        )
        differing = differs.sum().over("function")
        is_off = (pl.col("apart") > (self.rounding * pl.col("range")) ** 2).fill_null(value=False)
        return (
            joined.with_columns(differs=is_off)
            .with_columns(most=(differing * 2 - (differs & ~at_group).sum().over("function")))
            .sort(pl.col("most"), function, *STEP_KEY, "row", descending=[True, False, False, False, False])
            .with_columns(chosen=function == function.first())
            .drop("most")
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of copies, and of those with another reward."""
        chosen, differs, at_group = pl.col("chosen"), pl.col("differs"), pl.col("at_group")
        inside = chosen & at_group
        equal = {name: pl.col(name).filter(chosen).sum() for name in ("equal", "equal_chance")}
        copies, chance = inside.sum() + equal["equal"], pl.col("chance").filter(inside).sum()
        return {
            "differing": ((inside & differs).sum(), "rows"),
            "copies": (copies, "rows"),
            "differing_share": ((inside & differs).sum() / copies, "share"),
            "noise_share": (pl.col("apart").filter(inside).sum() / (chance + equal["equal_chance"]), "share"),
            "differing_elsewhere": ((chosen & ~at_group & differs).sum(), "rows"),
            "copies_elsewhere": ((chosen & ~at_group).sum(), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Copies whose rewards differ most."""
        return table.filter("chosen", "differs").with_columns(value=pl.col("apart").sqrt())

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the other copy and its reward."""
        return f"{number(place['value_of'])}, and {number(place['before'])} for the same response in {place['twin']}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No response that repeats another one."""
        if len(run.table):
            return None
        return Missing("no response with a reward that varies repeats another one to its prompt", "widen --steps")

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the share of copies with another reward."""
        copies = run.count("copies") + run.count("copies_elsewhere")
        return excluded_share(
            self.code,
            "a share of equal responses with another reward",
            0,
            copies,
            limit=self.limit,
            of="repeated responses",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information, and a warning where noise is half of what a function distinguishes."""
        inside, elsewhere = run.count("differing"), run.count("differing_elsewhere")
        if not inside and not elsewhere:
            return None
        function, noise = run.table["function"][0], percent(run["noise_share"])
        others = run.table.filter("differs", ~pl.col("chosen"))["function"].unique().sort().to_list()
        off = pl.col("apart") - self.warn_above * pl.col("chance")
        inner = run.table.filter("chosen", "at_group")
        equal, squares_of_equal = run.table.filter("chosen").select(pl.sum("equal_chance", "equal_squares")).row(0)
        total, squares = inner.select(total=off.sum(), squares=(off**2).sum()).row(0)
        total, squares = total - self.warn_above * equal, squares + self.warn_above**2 * squares_of_equal
        is_noise = inside >= self.fewest and (ratio(total, sqrt(squares)) or 0.0) >= self.errors
        if inside:
            repeated = f"{counted(inside, 'response')} of {run.count('copies'):,} that repeat another in their group"
            message = f"noise is {noise} of the squared differences of {function} within groups"
            evidence = "equal responses; the file does not say whether the reward is noisy by design or of another row"
            advice = "score the responses listed once more: if their rewards change, make the reward deterministic or "
            advice += "average several verdicts; if not, look at how rewards are joined to rows"
        else:
            copies = run.count("copies_elsewhere")
            repeated = f"{counted(elsewhere, 'response')} of {copies:,} that recur in another group or step"
            message = "equal responses of one group have equal rewards"
            evidence = "a schedule, a reward relative to its group, or another reference answer looks the same"
            advice = "keep it if the reward is meant to change between steps or groups"
        return Judgement(
            severity=Severity.WARNING if is_noise else Severity.INFO,
            confirmed=False,
            headline=f"{repeated} have another {function}"
            + (f": {noise} of its differences are noise" if is_noise else ""),
            message=message + (f"; {', '.join(others)} differ, too" if others else ""),
            evidence=evidence,
            advice=advice,
        )


def _with_before(lines: pl.DataFrame, kind: list[str]) -> pl.DataFrame:
    """Return the responses that repeat one of their kind, beside the reward and name of the one before.

    `apart` is the squared difference of the rewards.
    """
    value = pl.col("value")
    before = {"before": value.shift(1).over(kind), "twin": pl.col("sample_id").shift(1).over(kind)}
    return (
        lines.with_columns(**before)
        .drop_nulls("before")
        .with_columns(apart=(value - pl.col("before")) ** 2, value_of=value)
    )
