"""RDI017: policy version stamps that cannot be right."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, too_few
from rolloutdoctor.rules.measures.lag_table import LagTable
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


class VersionStamps(TableRule):
    """The stamps that say which policy version sampled a row cannot be right.

    ## What it does
    Looks for stamps that contradict each other, their step, or the log-probs.

    ## Why it matters
    Limits on staleness, off-policy corrections by lag and `stale-policy` go by these stamps. Upstream, the oldest
    version of every dumped trajectory was -1, the placeholder of its prompt tokens, and stamps that were read after the
    response had come back named weights that had not sampled it.

    ## How it is measured
    *Backwards*: the newest version of a row is older than its oldest (an error, confirmed: the row contradicts itself).
    *Placeholder*: the newest version of a row is known and its oldest is below 0, in nine of ten rows or more, so that
    no row has a lag. *Beyond*: a version from after its step, where versions count steps and others are not ahead of
    theirs. *Falling*: in three steps the newest version is below that of an earlier step by more than 2 and by more
    than twice the largest lag until then, and it rises again from there: the counter started over. If the log ends
    before it rises, the rows may be as old as their stamps say; this takes eight steps before the fall. *Constant*: one
    version in eight steps or more, although the sampler's weights changed. They did if the trainer moved away from the
    reference, in the mean absolute difference of log-probs from the first of these steps to the last, by four times the
    gap between sampler and trainer at both ends, and by 0.02 nats: otherwise the sampler would have been left behind.
    Without that evidence a constant stamp is left to `stale-policy`, and this rule is skipped. A row has two stamps,
    not one for each token: a version that changed some tokens earlier than stamped is not seen.

    ## What to do
    Read the version before the request is sent, keep it with the tokens that it sampled, and take the oldest over
    response tokens alone.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> stamps = {"policy_version_min": [5, 5], "policy_version_max": [5, 4]}
    >>> steps = [toy_batch([[1, 0]], per_row=stamps, step=step) for step in range(5, 9)]
    >>> diagnose(steps, trainer=None, select=["RDI017"]).findings[0].headline
    '4 rows have policy_version_max below policy_version_min'
    """

    code = "RDI017"
    name = "version-stamps"
    references = (
        "https://github.com/areal-project/AReaL/pull/1408",
        "https://github.com/areal-project/AReaL/pull/1569",
    )
    reads = ("policy_version_min", "policy_version_max")
    adds = ("tokens", "gap", "apart")
    needs_objective = False
    splits = ("train",)
    needs = ("policy_version_min", "policy_version_max")
    uses = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "response_mask", "optim_step_id")

    fewest: int = 4
    same: int = 8
    share: float = 0.9
    times: float = 4.0
    least: float = 0.02
    """The noise of a bf16 kernel."""

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sum how far the trainer is from the sampler and from the reference."""
        from rolloutdoctor.ops.elementwise import kept

        if not block.has("old_log_probs", "rollout_log_probs", "ref_log_probs"):
            return {}
        gap_T = block.log_ratio("old_log_probs", "rollout_log_probs").abs()
        apart_T = block.log_ratio("old_log_probs", "ref_log_probs").abs()
        known_T = block.trained_T & gap_T.isfinite() & apart_T.isfinite()
        if block.batch.first_update_N is not None:
            known_T &= block.runs.expand(block.batch.first_update_N[block.rows])
        sums = (block.row_sum(kept(x_T, known_T)) for x_T in (gap_T, apart_T))
        return {"tokens": block.row_sum(known_T), **dict(zip(("gap", "apart"), sums, strict=True))}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the stamped rows of each step, and those that contradict themselves or are ahead of their step."""
        oldest, newest = pl.col("policy_version_min"), pl.col("policy_version_max")
        rows = rows.filter(newest >= 0)
        backwards, ahead = (oldest >= 0) & (newest < oldest), newest - pl.col("step")
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(
            pl.sum("tokens", "gap", "apart"),
            rows=pl.len(),
            newest=newest.max(),
            oldest=oldest.filter(oldest >= 0).min(),
            last=newest.last(),
            backwards=backwards.sum(),
            placeholder=(oldest < 0).sum(),
            ahead=(ahead > 1).sum(),
        )
        stamps = ("policy_version_min", "policy_version_max")
        value = pl.when(backwards).then(1e9).when(ahead > 1).then(ahead)
        return with_places(sums, rows.select(*NAMES, *stamps, is_backwards=backwards, value=value), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums and the rows, with what is wrong about the stamps of all rows of a step."""
        step, tokens, is_sum = pl.col("step"), pl.col("tokens"), pl.col("row").is_null()
        means = {name: pl.col(name) / tokens for name in ("gap", "apart")}
        steps = run.rows.filter(is_sum).select(*STEP_KEY, "newest", "oldest", **means)
        stamps = LagTable(steps)
        stopped, fallen = stamps.stopped(self.same), _fallen(steps, self.same)
        moved = None if stopped is None else self._moved(steps.tail(stopped[1]))
        is_beyond = step.is_in(stamps.beyond())
        # Placeholders of some rows are those of rows whose version is not known.
        are_placeholders = pl.sum("placeholder") >= self.share * pl.sum("rows")
        return run.rows.with_columns(
            value=pl.when(pl.col("is_backwards") | is_beyond).then("value"),
            beyond=pl.when(is_beyond).then("ahead"),
            fallen=is_sum & (step >= fallen if fallen is not None else pl.lit(value=False)),
            same=is_sum & (step >= stopped[0] if stopped is not None else pl.lit(value=False)),
            moved=pl.lit(moved, pl.Float64),
            placeholder=pl.when(are_placeholders).then("placeholder").otherwise(0),
        )

    def _moved(self, steps: pl.DataFrame) -> float | None:
        """How far the trainer moved in some steps, if the sampler cannot have stayed; None if nothing says so."""
        first, last = steps.row(0, named=True), steps.row(-1, named=True)
        if first["gap"] is None or last["gap"] is None or not first["gap"] + last["gap"]:
            return None
        moved = float(last["apart"] - first["apart"])
        return moved if moved >= max(self.least, self.times * (first["gap"] + last["gap"])) else None

    def quantities(self) -> Mapping[str, Quantity]:
        """Count rows and steps."""
        same, step = pl.col("same"), pl.col("step")
        return {
            **{f"{name}_rows": (pl.sum(name), "rows") for name in ("backwards", "placeholder", "beyond")},
            "fallen_from": (step.filter("fallen").min(), "step"),
            "same_version_steps": (step.filter(same).n_unique(), "steps"),
            "gap_at_one_version": (pl.col("gap").filter(same).sum() / pl.col("tokens").filter(same).sum(), "nats"),
            "trainer_move": (pl.first("moved"), "nats"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """The stamps."""
        return f"versions {place['policy_version_min']} to {place['policy_version_max']}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps with stamps."""
        steps, remedy = run.table["step"].n_unique(), "record policy_version_min and policy_version_max, or more steps"
        few = too_few(steps, "step", "with version stamps", self.fewest, remedy)
        return None if run["backwards_rows"] else few

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """One version for long, and nothing says whether the sampler's weights changed."""
        if not run["same_version_steps"]:
            return None
        return Missing(
            f"the stamp is the same in {counted(run.count('same_version_steps'), 'step')}, and the log-probs do not "
            "show that the sampler's weights changed",
            "record old_log_probs, rollout_log_probs and ref_log_probs",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where a row contradicts itself, a warning else."""
        table, faults = run.table, list[tuple[str, str]]()
        if run["backwards_rows"]:
            subject = counted(run.count("backwards_rows"), "row")
            faults.append(
                (f"{subject} have policy_version_max below policy_version_min", "set both stamps of a row at once")
            )
        if run["placeholder_rows"]:
            subject = f"{counted(run.count('placeholder_rows'), 'row')} of {int(table['rows'].sum()):,}"
            do = "take the oldest version over response tokens alone: prompt tokens have none"
            faults.append((f"the oldest version is a placeholder below 0 in {subject} whose newest is known", do))
        beyond = sorted(set(table.filter(pl.col("beyond") > 0)["step"].to_list()))
        if beyond:
            steps, first = len(beyond), beyond[0]
            words = f"{counted(steps, 'step')} from {first} on {'holds' if steps == 1 else 'hold'} versions from after"
            faults.append((f"{words} {'it' if steps == 1 else 'them'}", "read the version before the request is sent"))
        if run["fallen_from"] is not None:
            words = _fall(table, int(run["fallen_from"]))
            faults.append((words, "restore the version of the policy when a run is resumed"))
        if run["trainer_move"] is not None:
            same = counted(run.count("same_version_steps"), "step")
            version = table.filter("same")["last"].to_list()[-1]
            faults.append(
                (
                    f"the stamp stays at {version} in {same} in which the trainer moved by "
                    f"{number(run['trainer_move'])} nats and the sampler followed it",
                    "set the version at every weight sync",
                )
            )
        if not faults:
            return None
        is_error = bool(run["backwards_rows"])
        return Judgement(
            severity=Severity.ERROR if is_error else Severity.WARNING,
            confirmed=is_error,
            headline=faults[0][0],
            message="; ".join(words for words, _ in faults),
            evidence="the stamps of the rows"
            + ("" if run["trainer_move"] is None else ", and the log-probs of sampler, trainer and reference"),
            advice="; ".join(do for _, do in faults),
        )


def _fallen(steps: pl.DataFrame, before: int) -> int | None:
    """Step from which on versions are farther below those before than any lag was; None if there is none.

    They rise again from there, or there are so many steps before, and the versions stay as low to the end.

    Args:
        steps: ``step, newest, oldest``, in order.
        before: the least number of steps before a fall after which nothing rises.
    """
    newest, oldest = pl.col("newest"), pl.coalesce("oldest", "newest")
    high, later = newest.cum_max(), newest.reverse()
    lag = (high - oldest).cum_max().shift(fill_value=0)
    below = pl.max_horizontal(2, 2 * lag)
    rises = (high.shift(fill_value=-1) - later.rolling_max(3).reverse() > below) & (newest < later.cum_max().reverse())
    stays = (high.shift(fill_value=-1) - later.cum_max().reverse() > below) & (pl.int_range(pl.len()) >= before)
    return cast(int | None, steps.filter(rises | stays)["step"].min())


def _fall(steps: pl.DataFrame, at: int) -> str:
    """Say from where to where the newest version falls at a step, and what that shows."""
    step = pl.col("step")
    newest = (steps.filter(part)["newest"].max() for part in (step < at, step == at, step > at))
    before, now, later = (cast(int | None, version) for version in newest)
    if now is not None and later is not None and later > now:
        return f"the version counter starts over at step {at}"
    return (
        f"the newest version falls from {before} to {now} at step {at}: the version counter started over, or the rows "
        "are that old"
    )
