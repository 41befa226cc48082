"""RDI003: advantages compare rows that are no group."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import CountedMeasured, CountingRule
from rolloutdoctor.rules.base import Context, Judgement, counted

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


class GroupPartition(CountingRule):
    """The advantages compare rows that are not the responses to one prompt.

    ## What it does
    Where the groups in the file do not reproduce the logged advantages, tries other groups: blocks of consecutive
    rows, every n-th row (tiled prompts), the rows of a rank or of a micro-batch, the segments of a trajectory, the
    whole step, every row alone, and the fall-back to the whole step where groups differ in size. Where the trainer
    makes that fall-back by itself, it reproduces the advantages: then the steps in which it does are counted.

    ## Why it matters
    A baseline over other prompts compares easy prompts with hard ones: the advantage then says how hard the prompt
    was, and not how good the response was. Such runs partly work, which is why nobody looks.

    ## How it is measured
    Every logged advantage is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains, how many rows change, how many advantages change sign (`sign_flips`), and with log-probs how
    far the gradients differ: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1 in log-prob space, with
    g_made for the groups that the log shows.

    If the trainer falls back to one baseline for the step, it is an error where this reproduces all logged advantages,
    and a warning where none is logged: rows may then be missing from the file alone.

    ## What to do
    Group by an explicit prompt id. Never reshape rewards to (prompts, responses) after rows were reordered,
    filtered or gathered from ranks.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> made = [1 / 3, -2 / 3, -2 / 3, 1 / 3, 1 / 3, 1 / 3]
    >>> batch = toy_batch([[1, 0], [0, 1], [1, 1]], per_row={"advantage": made})
    >>> diagnose_one("RDI003", batch, trainer="trl", scale_rewards="none")
    'RDI003 error confirmed: values_compared 6'
    """

    code = "RDI003"
    name = "group-partition"
    references = (
        "https://github.com/PrimeIntellect-ai/prime-rl/issues/600",
        "https://github.com/THUDM/slime/issues/2230",
    )
    stages = ("advantages",)
    part_names = (Part.GROUP_BASELINE,)
    unit = "steps"

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Tell whether a step of several groups is compared as one."""
        evaluation = steps.evaluation
        falls_back = evaluation is not None and evaluation.objective.advantage.batch_if_unequal
        if not falls_back or steps.batch.groups is None or not steps.training:
            return [{} for _ in steps.each]
        # Of a step of which rows may be missing nobody knows how large its groups are.
        return [
            {} if step.omits_rows or len(step.groups) < 2 else {"looked_at": 1, "shown": len(step.compared) == 1}
            for step in steps.each
        ]

    def direct(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """An error where the fall-back reproduces the logged advantages, else a warning."""
        if not run.shown or run.agree < run.compared:
            return None
        is_reproduced = run.is_reproduced
        return Judgement(
            severity=Severity.ERROR if is_reproduced else Severity.WARNING,
            confirmed=is_reproduced,
            headline=f"one baseline over all prompts of the batch in {counted(run.shown, 'step')} of {run.looked_at:,}",
            message=(
                f"in {counted(run.shown, 'step')} the groups differ in size, and the trainer then uses one baseline "
                "for all rows of the step, whatever their prompt"
            ),
            evidence=f"this reproduces all {run.compared:,} logged advantages"
            if is_reproduced
            else "the group sizes in the file; no logged advantage could be compared",
            advice="fill every group to the same number of responses, or group by an explicit prompt id",
        )
