"""RDM005: a metric is a mean of means."""

from rolloutdoctor.rules.audited import CauseRule


class MetricMeanOfMeans(CauseRule):
    """A logged metric is the mean of the means of parts, and not the mean over tokens that it is defined as.

    ## What it does
    Where a logged KL or drift disagrees with the trainer's own definition, tries other averages: over tokens, rows,
    micro-batches, optimizer steps, and means of these.

    ## Why it matters
    A mean of means gives the tokens of short parts more weight. The curve is off by a share that changes with the
    lengths, and two runs with other micro-batches cannot be compared.

    ## How it is measured
    Every logged value is compared with each average within its rounding radius; the finding names the one that gives
    all of them. Clean: every logged KL and drift agrees with the trainer's own average.

    ## What to do
    Log sums and counts, and divide once.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> ref = [[-1.0, -1.1, -1.2], [-1.3, -1.4], [-1.5, -1.6, -1.7, -1.8, -1.9], [-2.0]]
    >>> cut = {"micro_batch_id": [0, 0, 1, 1]}
    >>> batch = toy_batch([[1, 0], [0, 1]], lengths=[3, 2, 5, 1], ref=ref, per_row=cut)
    >>> diagnose_one("RDM005", batch, trainer="trl", beta=0.1, logged={"kl": 0.1373101962})
    'RDM005 error confirmed: values_compared 1'
    """

    code = "RDM005"
    name = "metric-mean-of-means"
    references = (
        "https://github.com/huggingface/trl/pull/6380",
        "https://github.com/huggingface/trl/issues/7012",
    )
    stages = ("kl", "loss", "metrics")
    shown_by = frozenset({"kl", "drift"})
    shown_by_each = True
    remedy = "log the trainer's metrics of every step beside the run"
