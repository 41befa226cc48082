"""What the rest of the package knows of a trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective import Objective
from rolloutdoctor.trainers.options import Config, Option

if TYPE_CHECKING:
    from rolloutdoctor.evaluation import Evaluation


@dataclass(frozen=True)
class Trainer:
    """One trainer.

    Attributes:
        name: what `--trainer` takes.
        newest: the newest version whose code was read and compared.
        oldest: the oldest version whose semantics are known.
        options: its options, under its own names.
        objective: builds what it computes from a configuration.
        metrics: its logged metrics under its own names, recomputed from an evaluation; a metric whose ingredients
            are missing is left out.
        recording: canonical column to the option or recorder that makes the trainer log it.
        kl_metrics: its metrics that are a KL from the reference.
        loss_metric: the metric that best shows the loss.
        grad_norm_metric: the metric that holds the norm of the parameters' gradient.
        group_size: how many rows a group of a split should have under a configuration, or None if anything goes.
        window_option: the option that says over how many steps a logged line averages, or None if each step is logged.
        instant_metrics: metrics that are of the logged step alone, whatever that option says.
    """

    name: str
    newest: str
    oldest: str
    options: tuple[Option, ...]
    objective: Callable[[Config], Objective]
    metrics: "Callable[[Evaluation], Mapping[str, float]]"
    recording: Mapping[str, str]
    kl_metrics: tuple[str, ...]
    loss_metric: str
    grad_norm_metric: str
    group_size: Callable[[Config, str], int | None]
    window_option: str | None = None
    instant_metrics: frozenset[str] = frozenset()
