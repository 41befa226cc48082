"""The entropy bonus of TRL's GRPOTrainer: ``L - coef * H``, the coefficient a constant or adapted from step to step.

Compared: trl 1.8.0 (the first with a bonus) to 1.9.2, and 1.10.0 to 1.16.0, which take H as a mean over the tokens of
each micro-batch for every loss.
"""

from math import inf
from typing import TYPE_CHECKING

from rolloutdoctor.objective.objective import Aggregation, EntropyBonus
from rolloutdoctor.trainers.options import Config
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES, OF_GENERATION

if TYPE_CHECKING:
    from rolloutdoctor.trainers.spec import StepMetrics

APPLIED = "entropy_coef (applied)"
"""The coefficient that a step applied: TRL logs the one that it leaves to the next."""


def entropy_bonus(config: Config) -> EntropyBonus | None:
    """Build the bonus, if there is one."""
    adapts, coef = bool(config["use_adaptive_entropy"]), config.number("entropy_coef")
    if not adapts and coef == 0:
        return None
    by_generation = config.version < (1, 10) and LOSS_TYPES[config.word("loss_type")].aggregation == OF_GENERATION
    before_masks = config.version < (1, 9) and bool(config["mask_truncated_completions"])
    rule = (
        Aggregation(
            mode=OF_GENERATION if config.version >= (1, 9, 1) else f"{OF_GENERATION}-unscaled",
            counted_in_loss=False,
            counted_before_rejection=before_masks,
            eval_batches=True,
        )
        if by_generation
        else Aggregation(mode="micro-batch-token-mean", eval_batches=True)
    )
    return EntropyBonus(coef=coef, aggregation=rule, coef_metric=APPLIED if adapts else None, adapts=adapts)


def applied_coefs(config: Config, logged: "StepMetrics") -> "StepMetrics":
    """Return the coefficient that each step applied, where it adapts and the lines before the step tell.

    A step raises the coefficient by `entropy_coef_delta` where its entropy is at most the target, and else lowers it;
    the next step applies it in the first case, and none in the second. The first step applies none.
    """
    from rolloutdoctor.data.step_key import EVAL

    if "use_adaptive_entropy" not in config.settings or not config["use_adaptive_entropy"]:
        return {}
    left = {key.step: metrics["entropy_coef"] for key, metrics in logged.items() if "entropy_coef" in metrics}
    left[0] = config.number("entropy_coef")
    applied = {1: 0.0}
    for step in sorted(left):
        coefficient = None if step - 1 not in left else _applied_after(left[step - 1], left[step], config)
        if coefficient is not None:
            applied[step + 1] = coefficient
    steps = {key: key.step + (key.split == EVAL) for key in logged}
    return {key: {APPLIED: applied[step]} for key, step in steps.items() if step in applied}


def _applied_after(before: float, after: float, config: Config) -> float | None:
    """Return the coefficient of the next step, where one step moved it from `before` to `after`; None: unclear."""
    delta = config.number("entropy_coef_delta")
    raised = min(before + delta, config.number("entropy_coef_max"))
    lowered = max(before - delta, config.number("entropy_coef_min"))
    gap = abs(raised - lowered) or inf
    if abs(after - raised) < gap / 4:
        return after if gap < inf else None
    return 0.0 if abs(after - lowered) < gap / 4 else None
