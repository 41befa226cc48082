"""RDT008: steps whose gradient norm stands out, from the trainer's log alone."""

from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, own_name
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.series import chance_limit, is_passing
from rolloutdoctor.rules.table_rule import Measured


class GradientSpike(NumbersRule):
    """The gradient norm of single steps is many times that of all others.

    ## What it does
    Names the steps whose logged gradient norm is far above the median, the largest first.

    ## Why it matters
    Gradient clipping turns such a step into a full-size step in an arbitrary direction; without clipping it moves the
    weights as far as hundreds of other steps do.

    ## How it is measured
    `spike_steps` have a norm above ten times the median of the steps with a gradient, above it by ten times the
    distance of their upper quartile from it, and, of 50 steps or more, above what their upper tail, continued, reaches
    in one run of 1,000. `largest_ratio` is the largest norm over the median. It is a warning; information if more than
    one step in ten is such a step (the norm varies widely, and no step stands out), or if only one is, or fewer than
    one in fifty, and the norm returns to its level. Exposed: a norm proves no harm.

    ## What to do
    Look at the rollouts of these steps; if it happens again, lower `max_grad_norm` or the learning rate. With recorded
    rollouts `rolloutdoctor export --what tokens` shows which tokens carry the gradient.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT008", grad_norm=[0.1, 0.12] * 10 + [4.0])
    'RDT008 warning exposed: grad_norm 0.2952'
    """

    code = "RDT008"
    name = "gradient-spike"
    references = ("https://github.com/huggingface/trl/issues/6702",)
    about = ("grad_norm",)

    times: float = 10.0
    frequent: float = 0.1

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps with a gradient."""
        moving = int((run.table["grad_norm"] > 0).sum())
        if moving >= self.fewest:
            return None
        return Missing(f"needs {self.fewest} steps with a gradient norm above 0; the log has {moving}", LONGER_LOG)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare each step with the median."""
        import numpy as np

        values = series(run, "grad_norm")
        moving = values[values > 0]
        if len(moving) < self.fewest:
            return None
        median, upper = (float(np.quantile(moving, share)) for share in (0.5, 0.75))
        limit = max(self.times * median, median + self.times * (upper - median))
        limit = max(limit, chance_limit(values, limit))
        spikes = np.flatnonzero(values > limit)
        if not len(spikes):
            return None
        largest = [step_at(run, int(place)) for place in spikes[np.argsort(-values[spikes], kind="stable")][:3]]
        top = float(values.max())
        is_frequent = len(spikes) > self.frequent * len(values)
        others = f", then {', '.join(map(str, largest[1:]))}" if len(largest) > 1 else ""
        size = f"{number(top)}, {number(top / median)} times the median"
        return Judgement(
            severity=Severity.INFO if is_frequent or is_passing(values, values > limit) else Severity.WARNING,
            confirmed=False,
            headline=f"gradient-norm spike at step {largest[0]}: {size}",
            message=(
                f"{counted(len(spikes), 'step')} of {len(values):,} have a gradient norm above {number(limit)}: step "
                f"{largest[0]}{others}. The median is {number(median)}."
            ),
            evidence=f"logged gradient norms of {counted(len(moving), 'step')} with a gradient",
            advice=(
                f"inspect the batch of step {largest[0]}; if spikes recur, tighten "
                f"{own_name(context, 'gradient clipping')} or lower {own_name(context, 'the learning rate')}"
            ),
            measures={"spike_steps": Measure(len(spikes), "steps"), "largest_ratio": Measure(top / median, "1")},
        )
