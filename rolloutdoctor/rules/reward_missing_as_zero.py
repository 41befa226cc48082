"""RDA005: rows without a reward count as 0."""

from dataclasses import dataclass

from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class RewardMissingAsZero(CauseRule):
    """Rows that could not be scored enter the baseline with a reward of 0.

    ## What it does
    Where rows have no reward (null or NaN) and the logged advantages do not follow without them, tries a reward of
    0 for each of them.

    ## Why it matters
    A reward function that timed out says nothing about the response. As a 0 it is a failure: it lowers the baseline
    of its siblings and is itself pushed away.

    ## How it is measured
    Every logged advantage is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains, how many rows change, how many advantages change their sign (`sign_flips`), and with
    log-probs how much of the gradient differs: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1, in
    log-prob space.

    ## What to do
    Leave rows that could not be scored out of the baseline, and give them an advantage of 0.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, float("nan"), 0.5]], per_row={"advantage": [0.5, -0.5, 0.0]})
    >>> diagnose_one("RDA005", batch, trainer="trl", scale_rewards="none")
    'RDA005 error confirmed: values_compared 3'
    """

    code = "RDA005"
    name = "reward-missing-as-zero"
    references = (
        "https://github.com/huggingface/trl/issues/5773",
        "https://github.com/huggingface/trl/issues/6427",
    )
    stages = ("advantages",)
    remedy = "log the advantages: the column advantage (one a row) or advantages (one a token)"
