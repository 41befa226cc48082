"""Loss: its policy and KL parts, and how much of it is the KL part alone."""

import math

from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import DARK, GUIDE, INK, above, blank, empty, finite, line, many, step_axis
from rolloutdoctor.results.figures import LossData

KL_ALONE = 0.005
"""Share of the KL part that the policy part may have where the loss is called the KL part alone."""


def title(data: LossData) -> str:
    """Summarise the picture in a sentence."""
    pairs = [(p, k) for p, k in zip(data.policy, data.kl, strict=True) if math.isfinite(p) and math.isfinite(k)]
    if not pairs:
        return "The loss is not finite in any step" if data.steps else "No step could be evaluated"
    alone = sum(abs(policy) <= KL_ALONE * abs(kl) for policy, kl in pairs if kl)
    steps = many(len(pairs), "step")
    return f"The loss is the KL term alone in {alone:,} of {steps}: there it is no measure of progress"


def draw(data: LossData) -> Figure:
    """Draw the KL part above, the policy part below: one is some orders of magnitude smaller than the other."""
    note = (
        "on-policy the policy part is minus the mean advantage: near 0 for centred advantages, whatever its gradient "
        "(`plot gradient`)"
    )
    figure = blank(title(data), note, 6.8)
    if not any(finite(data.policy)) and not any(finite(data.kl)):
        empty(figure.add_subplot(), title(data))
        return figure
    upper, lower = figure.subplots(2, 1, sharex=True)
    if finite(data.logged):
        line(upper, data.steps, data.logged, color=GUIDE, linewidth=1.2, label="loss as logged")
    line(upper, data.steps, data.kl, color=DARK, linewidth=1.8, label="KL part")
    upper.set_ylabel("loss")
    above(upper)
    line(lower, data.steps, data.policy, color=INK, linewidth=1.4, label="policy part")
    lower.axhline(0, color=GUIDE, linewidth=1.0, linestyle=(0, (1, 2)))
    lower.set_ylabel("policy part\nof the loss")
    step_axis(lower, data.steps)
    figure.align_ylabels([upper, lower])
    return figure
