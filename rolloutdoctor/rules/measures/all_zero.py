"""Rewards that are all 0, and whether something else than these trains, for `constant-reward`."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import step_at
from rolloutdoctor.rules.table_rule import Measured


def all_zero(run: Measured, context: Context, lasting: int) -> Judgement | None:
    """Judge few lines in which every reward, advantage and return is 0: one is enough."""
    names, table = [name for name in ("reward", "advantage", "return") if name in context.quantities], run.table
    extremes = table["reward_min"] == table["reward_max"]
    equal = [extremes, table["reward_std"] == 0, table["zero_variance_share"] == 1]
    proved = any(flags.fill_null(value=False).all() for flags in equal)
    names = names[:1] if proved else names
    # No reward is so small that it is printed as 0, but a mean of few rewards above 0 may be.
    is_zero = [(table[name] == 0).all() and (proved or not is_rounded(context, name)) for name in names]
    if not len(table) or not is_zero or not all(is_zero) or (len(names) < 2 and not proved):
        return None
    first = step_at(run, 0)
    where = f"step {first}" if len(table) == 1 else f"all {len(table):,} logged steps"
    differ = advantages_differ(run)
    is_error = proved and len(table) >= lasting and not differ
    return Judgement(
        severity=Severity.ERROR if is_error else Severity.WARNING,
        confirmed=proved,
        headline=f"every reward of {where} is 0, {differ or 'so every advantage is 0 and nothing is trained'}",
        message=f"The logged means of {', '.join(names)} are exactly 0 in {where}.",
        evidence="the logged rewards and their spread"
        if proved
        else "rewards that are not negative have a mean of 0 only if each is 0",
        advice="run the reward function on some responses: check what it returns and which exceptions it swallows",
        measures={"onset": Measure(first, "step")},
    )


def advantages_differ(run: Measured) -> str:
    """Say that something else than these rewards trains, in half of the lines or more; empty where nothing does."""
    differs = (run.table["advantage_max"] > run.table["advantage_min"]).fill_null(value=False)
    from_elsewhere = "although advantages are not 0: a KL penalty, a value model or a teacher is all that trains"
    return from_elsewhere if len(differs) and differs.sum() >= len(differs) / 2 else ""
