"""A KL coefficient below 0, as the run states it."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, number
from rolloutdoctor.rules.numbers_rule import step_at
from rolloutdoctor.rules.table_rule import Measured

_SWITCH = "use_kl_loss"
"""Option of many trainers without which the coefficient is not read."""


def negative_kl(run: Measured, context: Context) -> Judgement | None:
    """Warn of a KL term that rewards the distance from the reference; confirmed where the trainer is known.

    What an unknown trainer subtracts may be named so, too: its coefficient is only exposed.
    """
    of_trainer = _of_trainer(context)
    setting = of_trainer or _of_settings(context)
    if setting is None or not len(run.table):
        return None
    name, value = setting
    words = f"the KL coefficient is {number(value)}: the loss rewards distance from the reference"
    return Judgement(
        severity=Severity.WARNING,
        confirmed=of_trainer is not None and not context.unread_release,
        headline=words,
        message=f"{name} is {number(value)}: a KL term with a negative coefficient lowers the loss as the KL grows.",
        evidence=f"the stated option {name}",
        advice=f"set {name} above 0, or to 0 for no KL term, unless the distance is the aim",
        measures={"kl_coefficient": Measure(value, "1"), "onset": Measure(step_at(run, 0), "step")},
        why="A KL term is to hold the policy near the reference; this one pushes it away, without a bound.",
    )


def _of_trainer(context: Context) -> tuple[str, float] | None:
    """The option of the trainer, where the KL term is on."""
    name = None if context.trainer is None else context.trainer.roles.kl
    refused = None if name is None or context.config is None else context.config.unusable.get(name)
    if name is None or refused is None or refused.below is None or refused.below >= 0 or _is_off(context):
        return None
    return name, refused.below


def _is_off(context: Context) -> bool:
    """Tell a trainer whose switch leaves the KL term out; the coefficient that stands for the refused one may be 0."""
    is_switched = context.trainer is not None and any(
        option.name.endswith(_SWITCH) for option in context.trainer.options
    )
    return is_switched and (context.objective is None or context.objective.kl_loss is None)


def _of_settings(context: Context) -> tuple[str, float] | None:
    if _is_off(context):
        return None
    for setting in context.settings:
        if setting.title == "KL coefficient" and isinstance(setting.value, int | float) and setting.value < 0:
            return setting.name, float(setting.value)
    return None
