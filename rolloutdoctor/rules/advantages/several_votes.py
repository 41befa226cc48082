"""RDA021: a trajectory counts several times in the baseline of its group."""

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.rules.known_fault import ReleaseFaultRule, of_fixes, shifts_of

FIXES = ("one-vote-per-rollout:shared",)


class SeveralVotes(ReleaseFaultRule):
    """A trajectory that gives several rows counts once for each of them in the baseline of its group.

    ## What it does
    Where rows have a `trajectory_id`, recomputes the advantages with one reward for each trajectory of a group.

    ## Why it matters
    Agents whose context is compacted, branches or passes to a sub-agent give several rows for one rollout, each with
    its reward. Of rewards 1, 1, 1, 0, the first three of one rollout, the mean over rows is 0.75, that over rollouts
    0.5: a rollout of more rows weighs more.

    ## How it is measured
    `rows_changed` is the number of rows whose advantage differs, `advantage_shift_mean` by how much on average, and
    `relative_change_l1` = |g - g_fixed|_1 / |g_fixed|_1 in log-prob space. It is a warning, or information if that is
    at most 0.001. Confirmed: the logged advantages agree with the mean over rows, and differ from the mean over
    rollouts by more than rounding.

    ## What to do
    Take mean and standard deviation over one reward for each rollout, and give all its rows the result.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 1, 1, 0]], per_row={"trajectory_id": [0, 0, 0, 1]})
    >>> diagnose_one("RDA021", batch, trainer="verl", adv_estimator="grpo", use_v1=False)
    'RDA021 warning exposed: rows_changed 4'
    """

    code = "RDA021"
    name = "several-votes"
    references = ("https://github.com/radixark/miles/pull/2369", "https://github.com/THUDM/slime/pull/2062")
    splits = ("train",)
    stages = ("advantages",)
    part_names = (Part.GROUP_BASELINE,)
    fixes = FIXES
    reads = of_fixes(*FIXES)
    adds = shifts_of(*FIXES)
