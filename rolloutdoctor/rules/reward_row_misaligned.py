"""RDI004: rewards belong to other rows."""

from dataclasses import dataclass

from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class RewardRowMisaligned(CauseRule):
    """The rewards that made the advantages are those of other rows.

    ## What it does
    Where the logged advantages do not follow from the rewards in the file, tries the same rewards on other rows:
    one row or one group late or early, rotated within their groups, reversed, sorted, and in the order of length or
    rank.

    ## Why it matters
    Every response is then pushed for what another one did. The mean reward is unchanged, so no curve shows it.

    ## How it is measured
    Every logged advantage is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains, how many rows change, how many advantages change their sign (`sign_flips`), and with
    log-probs how much of the gradient differs: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1, in
    log-prob space.

    ## What to do
    Join rewards to rows by sample id. Look where rows are sorted by length, filtered, or gathered from ranks
    between generation and scoring.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> made = [1 / 3, 1 / 3, -2 / 3, 0, 0, 0]
    >>> batch = toy_batch([[1, 0, 0], [0, 0, 1]], per_row={"advantage": made})
    >>> diagnose_one("RDI004", batch, trainer="trl", scale_rewards="none")
    'RDI004 error confirmed: values_compared 6'
    """

    code = "RDI004"
    name = "reward-row-misaligned"
    references = (
        "https://github.com/volcengine/verl/issues/2185",
        "https://github.com/huggingface/trl/issues/3098",
    )
    stages = ("advantages",)
    remedy = "log the advantages: the column advantage (one a row) or advantages (one a token)"
