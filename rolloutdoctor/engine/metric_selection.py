"""Selection of the logged metrics that can be compared with one step."""

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.io.metrics import LoggedMetrics


def comparable(metrics: LoggedMetrics, configured: Configured | None) -> LoggedMetrics:
    """Give training metrics the steps of the rows that they belong to, and leave out means over several steps.

    A trainer that logs every tenth step prints the mean of ten losses under the number of the last one; that is no
    value of this step. What the trainer logs as it is at that step, such as the gradient norm, stays. A generated batch
    that serves several optimizer steps has its rows at the first of them, and lines at all. What follows from the lines
    before is added where each is of one step.
    """
    if configured is None:
        return metrics
    trainer, config = configured.trainer, configured.config
    if trainer.roles.window is None:
        return metrics
    setting = config.settings[trainer.roles.window]
    # Where nothing says how often was logged, the distance of the logged steps does.
    interval = metrics.interval(TRAIN) or 1
    if not setting.assumed and isinstance(setting.value, int | float):
        # A share of the run is an option, too: then the distance says how many steps these are.
        interval = int(setting.value) if setting.value >= 1 else max(interval, 2)
    span = trainer.updates.per_generation(config) or 1
    if interval == span == 1:
        return metrics.with_values(trainer.log.step_values(config, {key: metrics.at(key) for key in metrics.steps()}))
    return metrics.by_batch(interval, span, trainer.log.instant, trainer.log.is_made_once)
