"""RDI003: advantages compare rows that are no group."""

from dataclasses import dataclass

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class GroupPartition(CauseRule):
    """The advantages compare rows that are not the responses to one prompt.

    ## What it does
    Where the logged advantages do not follow from the groups in the file, tries other groups: blocks of consecutive
    rows, every n-th row (tiled prompts), the rows of a rank or of a micro-batch, the segments of a trajectory, the
    whole step, every row alone, and the fall-back to the whole step where groups differ in size.

    ## Why it matters
    A baseline over other prompts compares easy prompts with hard ones: the advantage then says how hard the prompt
    was, and not how good the response was. Such runs partly work, which is why nobody looks.

    ## How it is measured
    Every logged advantage is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains, how many rows change, how many advantages change their sign (`sign_flips`), and with
    log-probs how much of the gradient differs: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1, in
    log-prob space.

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
    remedy = "log the advantages: the column advantage (one a row) or advantages (one a token)"
    part_names = (Part.GROUP_BASELINE,)
