"""RDM005: a metric is a mean of means."""

from rolloutdoctor.rules.audited import CauseRule


class MetricMeanOfMeans(CauseRule):
    """A logged metric is the mean of the means of parts, and not the mean over tokens that it is defined as.

    ## What it does
    Where a logged KL or drift disagrees with the trainer's own definition, tries other averages: over tokens, rows,
    micro-batches, optimiser steps, and means of these.

    ## Why it matters
    A mean of means weighs the tokens of short parts more. The curve is off by a share that changes with the
    lengths, and two runs with other micro-batches cannot be compared.

    ## How it is measured
    Every logged value is held against each average within its rounding radius; the finding names the one that gives
    all of them.

    ## What to do
    Log sums and counts, and divide once.
    """

    code = "RDM005"
    name = "metric-mean-of-means"
    references = (
        "https://github.com/huggingface/trl/pull/6380",
        "https://github.com/huggingface/trl/issues/7012",
    )
    stages = ("kl", "loss", "metrics")
    remedy = "log the trainer's metrics of every step beside the run"
