"""RDA029: rewards that lie on masked tokens, or behind them."""

from rolloutdoctor.rules.known_fault import ReleaseFaultRule, of_fixes, shifts_of

FIXES = ("masked-end:last-trained", "tool-spans:carried", "zero-length-reward:empty")


class RewardAtMask(ReleaseFaultRule):
    """The reward of a response is lost where its last token is masked, or does not reach what lies before a mask.

    ## What it does
    Finds rewards that the trainer puts where no token is trained: on the last token of a response that ends in the
    output of a tool, behind a masked span that sets a discounted return to 0, or on a response without a token.

    ## Why it matters
    A trajectory that ends in an observation is trained as if it had no reward, or its first turns are; the reward of a
    response without a token moves the baseline of the others.

    ## How it is measured
    The objective is evaluated as the release computes it and with those of the fixes `masked-end`, `tool-spans` and
    `zero-length-reward` that concern it. `rows_changed` is the number of rows whose advantages differ,
    `advantage_shift_mean` by how much on average, and `relative_change_l1` = |g - g_fixed|_1 / |g_fixed|_1 in log-prob
    space. It is a warning, or information if that is at most 0.001. Confirmed: the logged advantages agree with the
    release, and differ from the fixed ones by more than rounding.

    ## What to do
    Put the reward on the last trained token, and carry returns over masked spans.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0]], mask=[[1, 1, 0], [1, 1, 1]])
    >>> diagnose_one("RDA029", batch, trainer="verl", adv_estimator="reinforce_plus_plus")
    'RDA029 warning exposed: rows_changed 2'
    """

    code = "RDA029"
    name = "reward-at-mask"
    references = (
        "https://github.com/verl-project/verl/issues/7278",
        "https://github.com/verl-project/verl/issues/6476",
        "https://github.com/radixark/miles/pull/1827",
    )
    splits = ("train",)
    stages = ("advantages",)
    fixes = FIXES
    reads = of_fixes(*FIXES)
    adds = shifts_of(*FIXES)
