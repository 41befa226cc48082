"""RDM006: the reward metric shows another reward."""

from rolloutdoctor.rules.audited import CauseRule


class RewardMetricNotTrainingReward(CauseRule):
    """The logged reward is not the reward that the advantages are made of.

    ## What it does
    Where a logged mean reward disagrees with the rows, tries the reward functions without their weights, with them,
    their mean, the reward before and after the KL penalty, and that of trained rows alone. Where the logged advantages
    disagree, solves for bounds at which the rewards behind them are clipped, and requires that they fit all.

    ## Why it matters
    The curve that everybody watches can then rise while the trained reward falls, and the other way round.

    ## How it is measured
    Every logged value is compared with each definition within its rounding radius. Clean: the logged reward
    metrics agree with the recorded rewards.

    ## What to do
    Log the reward that enters the advantages beside the one that people read.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0], [0, 1]], mask=[[1, 1], [0, 0], [1, 1], [1, 1]])
    >>> diagnose_one("RDM006", batch, trainer="trl", logged={"reward": 0.6666666667})
    'RDM006 error confirmed: values_compared 1'
    """

    code = "RDM006"
    name = "reward-metric-not-training-reward"
    references = ("https://github.com/huggingface/trl/issues/5352",)
    stages = ("metrics",)
    shown_by = frozenset({"rewards"})
    remedy = "log the trainer's metrics of every step beside the run"
