"""RDM007: a metric is off by a constant factor."""

from dataclasses import dataclass

from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class MetricScaleFactor(CauseRule):
    """A logged metric is a constant factor times what the rows give.

    ## What it does
    Where logged values of a metric disagree with the rows, looks for one factor that carries all of these within
    their rounding radii, and for what it is: a whole number of micro-batches, ranks or accumulation steps, one over
    such a number, or the base of a logarithm.

    ## Why it matters
    The shape of the curve is right and its height is not: coefficients that are tuned by it, and comparisons with
    other runs, are off by that factor. If the loss itself is scaled, so is the learning rate.

    ## How it is measured
    The interval of factors that fit all of them is narrower than one part in ten thousand and holds the factor. Where
    the values of other steps agree as they are, the chance that it holds one is at most 1 in 256: a mean of few
    rewards or counts is twice another one too often. Clean:
    every logged value that was compared agrees as it is.

    ## What to do
    Divide once: look for the count of that size in the trainer's logging, and in the loss.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0, 0], [0, 0, 0]])
    >>> diagnose_one("RDM007", batch, trainer="trl", logged={"reward": 4 / 6})
    'RDM007 error confirmed: values_compared 1'
    """

    code = "RDM007"
    name = "metric-scale-factor"
    references = ("https://github.com/volcengine/verl/issues/4711", "https://github.com/volcengine/verl/issues/3691")
    stages = ("kl", "loss", "metrics")
    remedy = "log the trainer's metrics of every step beside the run"
