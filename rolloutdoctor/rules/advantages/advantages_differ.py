"""RDA004: logged advantages that nothing explains."""

from rolloutdoctor.rules.audited import DiffersRule


class AdvantagesDiffer(DiffersRule):
    """The logged advantages are not reproduced by the rewards, the groups and the recorded options.

    ## What it does
    Recomputes every advantage that was logged, per row, per token or as a metric, and compares it within the rounding
    of float32. Where they disagree, every known cause is tried: other groups, rewards of other rows, another
    estimator, scale, epsilon or standard deviation. What none of them explains is reported here, with its shape.

    ## Why it matters
    The advantage is the direction of the update. If it is not what the rewards and the options say, the run trains on
    something else, however healthy the curves look.

    ## How it is measured
    A value agrees if it differs by no more than its rounding radius: what the trainer's own float32 arithmetic may
    lose. `values_agreeing` of the `values_compared` do. Values of incomplete groups are not compared.

    ## What to do
    Check that the rows belong to the logged steps and that the options are those of the run. Then compare the trainer's
    advantage code with the recorded version.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0], [0, 1]], per_row={"advantage": [9.0, -3.0, 5.0, 2.0]})
    >>> diagnose_one("RDA004", batch, trainer="trl")
    'RDA004 error confirmed: values_compared 4'
    """

    code = "RDA004"
    name = "advantages-differ"
    references = ("https://github.com/NVIDIA-NeMo/RL/issues/1518",)
    stages = ("advantages",)
    shown_by_each = True
    what = "logged advantages"
