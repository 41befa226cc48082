"""RDM004: a logged metric that nothing explains."""

from rolloutdoctor.rules.audited import DiffersRule


class MetricDiffers(DiffersRule):
    """A logged metric is not reproduced by the rows and the trainer's own definition of it.

    ## What it does
    Recomputes every other metric that the trainer defines and that was logged: rewards, lengths, clip fractions,
    statistics of the sampler's log-probs. What disagrees, and is neither a constant factor nor another average, is
    reported here with its shape.

    ## Why it matters
    A metric that the rows do not reproduce misleads whoever tunes the run by it.

    ## How it is measured
    A value agrees if it differs by no more than its rounding radius, plus half a unit of the last digit if the log is
    rounded. If metrics of the rows themselves (rewards, lengths) disagree, and all of them agree with the log at a
    fixed distance (one or two steps earlier or later, or the distance of the first steps of both), the log numbers its
    steps differently: that is the finding, and everything else is compared under the log's numbers.

    ## What to do
    Check that the file holds all rows of the step: if every metric over rows disagrees, rows are missing.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0], [0, 1]])
    >>> diagnose_one("RDM004", batch, trainer="trl", logged={"reward": 0.9})
    'RDM004 error confirmed: values_compared 1'
    """

    code = "RDM004"
    name = "metric-differs"
    references = ("https://github.com/huggingface/trl/issues/5352",)
    stages = ("metrics",)
    what = "logged metrics"
