"""TRL's `loss_type`: the policy term and the aggregation of each, its own options and its own metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolloutdoctor.trainers.options import Option

OF_GENERATION = "generation-token-mean"


@dataclass(frozen=True)
class LossType:
    """One loss type.

    Attributes:
        aggregation: mode of its aggregation.
        kind: of its policy term.
        numbers: further parameters of the term, and the options that set them.
        logs: metrics that no other type logs: name to what it is.
        weighs_rows: the importance weights enter a weight of the row, and are no multiplier of the term.
        since: the first release that has it.
    """

    aggregation: str
    kind: str = "ppo_delta_clip"
    numbers: Mapping[str, Option] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    weighs_rows: bool = False
    since: str = "0.17"


def _number(loss_type: str, name: str, since: str, default: float, meaning: str) -> Option:
    only_with: dict[str, tuple[object, ...]] = {"loss_type": (loss_type,)}
    return Option(f"{loss_type}_{name}", "number", default, meaning, only_with=only_with, since=since)


LOSS_TYPES = {
    "grpo": LossType("micro-batch-row-mean"),
    "dapo": LossType(OF_GENERATION, since="0.22"),
    "bnpo": LossType("micro-batch-token-mean"),
    "dr_grpo": LossType("micro-batch-fixed-length"),
    "cispo": LossType(OF_GENERATION, "cispo_capped", logs={"cispo_clip_ratio": "clip_share"}, since="0.26"),
    "sapo": LossType(
        "micro-batch-row-mean",
        "sapo",
        numbers={
            "tau_pos": _number(
                "sapo", "temperature_pos", "0.26", 1.0, "temperature of the sapo gate for positive advantages"
            ),
            "tau_neg": _number(
                "sapo", "temperature_neg", "0.26", 1.05, "temperature of the sapo gate for the other advantages"
            ),
        },
        since="0.26",
    ),
    "luspo": LossType("micro-batch-row-sum", since="0.28"),
    "vespo": LossType(
        OF_GENERATION,
        "vespo",
        numbers={
            "k_pos": _number("vespo", "k_pos", "1.0", 2.0, "exponent of vespo's weight for advantages >= 0"),
            "lambda_pos": _number("vespo", "lambda_pos", "1.0", 3.0, "decay of vespo's weight for advantages >= 0"),
            "k_neg": _number("vespo", "k_neg", "1.0", 3.0, "exponent of vespo's weight for negative advantages"),
            "lambda_neg": _number("vespo", "lambda_neg", "1.0", 2.0, "decay of vespo's weight for negative advantages"),
        },
        logs={"vespo/phi_seq_mean": "row_weight"},
        weighs_rows=True,
        since="1.0",
    ),
}
"""Every loss type, in the order in which a log is compared with them."""
