"""Pictures of the study: shares by log-probs against those by parameters, and norms against Adam's update."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gradients.statistics import LEAST, Step, of_alone, pairs
from rolloutdoctor.pictures.style import ALARM, DARK, GUIDE, PALE, blank, styled

TICKS = (0.001, 0.01, 0.1, 1.0)


def _diagonal(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    ax.plot((LEAST, 2), (LEAST, 2), color=GUIDE, linewidth=1.2)
    ax.scatter(x, y, s=16, color=color, alpha=0.65, linewidths=0, label=label)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([])
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(3e-4, 1.6)
    ax.set_ylim(3e-4, 1.6)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(TICKS, [f"{100 * tick:g} %" for tick in TICKS])
        axis.set_ticks([], minor=True)


def shares(steps: Sequence[Step], path: Path) -> None:
    """Draw shares of zero-variance groups in log-prob and logit space against those in parameters."""
    with styled():
        figure = blank(
            "Shares by log-probs and by logits are those by parameters up to a factor",
            "One point a step: the share of zero-variance groups (RDG001), L2. On the line both spaces say the same.",
        )
        left, right = figure.subplots(1, 2, sharey=True)
        for ax, space, color in ((left, "log-prob", DARK), (right, "logit", ALARM)):
            x, y = pairs(steps, "RDG001", space)
            _diagonal(ax, x, y, color, space)
            ax.set_xlabel(f"share by {space}s")
        left.set_ylabel("share by parameters")
        figure.savefig(path, metadata={"Software": None})


def moments(steps: Sequence[Step], path: Path) -> None:
    """Draw what a step's own gradient has of Adam's first moment and update, against what the norms say."""
    with styled():
        figure = blank(
            "Logged norms bound a step's share of Adam's first moment, and not of its update",
            "One point an optimizer step after the first; dark: steps whose gradient is that of the KL term alone.",
        )
        left, right = figure.subplots(1, 2, sharey=True)
        alone = of_alone(steps)
        rest = [each for each in steps if each.get("adam") and each["step"] > 1 and each["dead"] < 1]
        for ax, name, words in (
            (left, "own in moment", "of the first moment"),
            (right, "own in update", "of the update"),
        ):
            for found, color, label in ((rest, PALE, "other steps"), (alone, DARK, "KL alone")):
                x = np.array([each["adam"]["own by norm"] for each in found])
                _diagonal(ax, x, np.array([each["adam"][name] for each in found]), color, label)
            ax.set_title(f"share {words}")
            ax.set_xlabel("share of the norms, from the log")
        left.set_ylabel("share of the vector (L2)")
        left.legend(loc="lower right")
        figure.savefig(path, metadata={"Software": None})
