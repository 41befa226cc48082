"""Advantage estimators by name: on which axis each gives its advantages, and what it needs for that.

The formulas are in `rolloutdoctor.formulas.advantages.table`, under the same names. A trainer's own name of an
estimator is in the trainer's file.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Axis(Enum):
    """What an estimator gives one advantage to."""

    ROWS = "rows"
    TRAINED_TOKENS = "tokens that the mask keeps"
    ALL_TOKENS = "response tokens, masked ones included"


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec:
    """What is known of an estimator beside its formula.

    Attributes:
        name: in `SPECS` and in the table of formulas.
        axis: what it gives one advantage to.
        columns: what it reads beyond `reward`, the groups of rows and the mask of tokens.
        takes_weights: the importance weights of the rollout correction enter.
        every_reward: it normalises every reward that the run has by itself, over the rows that have it; False: the
            rewards that `AdvantageRule.reward_keys` names, or the score.
        normalised_over: what the advantages are normalised over in the end, or None.
        divides: it can divide by the standard deviation of a group or of the batch.
        is_standard_score: it is the centred score, divided by that deviation where a scale is set, and nothing else.
        subtracts_mean: its baseline is made of sums; False: it is a stored score.
        weighs_lengths: these sums weigh each row by its trained tokens.
        within_groups: no row of another group enters an advantage, unless a scale or a whitening is over the batch.
    """

    name: str
    axis: Axis = Axis.ROWS
    columns: frozenset[str] = frozenset()
    takes_weights: bool = False
    every_reward: bool = False
    normalised_over: Literal["rows", "tokens"] | None = None
    divides: bool = False
    is_standard_score: bool = False
    subtracts_mean: bool = True
    weighs_lengths: bool = False
    within_groups: bool = False

    @property
    def required_columns(self) -> frozenset[str]:
        """Every column without which there are no advantages."""
        by_axis = "group_id" if self.axis is Axis.ROWS else "response_mask"
        return self.columns | {"reward", by_axis}

    @property
    def has_groups(self) -> bool:
        """True if rows of a group are compared with each other."""
        return "group_id" in self.required_columns


_PATH_VARIANCE = frozenset({"group_id", "old_log_probs", "sum_pi_squared"})
_MASK = frozenset({"response_mask"})

SPECS: dict[str, EstimatorSpec] = {
    spec.name: spec
    for spec in (
        EstimatorSpec(name="gdpo", columns=_MASK, normalised_over="tokens", divides=True),
        EstimatorSpec(name="gpg"),
        EstimatorSpec(name="grpo", divides=True, is_standard_score=True, within_groups=True),
        EstimatorSpec(name="grpo_passk", divides=True, subtracts_mean=False, within_groups=True),
        EstimatorSpec(
            name="normalize_then_sum",
            columns=frozenset({"rewards"}),
            every_reward=True,
            normalised_over="rows",
            divides=True,
        ),
        EstimatorSpec(name="opo", columns=_MASK, weighs_lengths=True, within_groups=True),
        EstimatorSpec(name="raw", within_groups=True),
        EstimatorSpec(name="reinforce_plus_plus_baseline", columns=_MASK, normalised_over="tokens"),
        EstimatorSpec(name="rloo", within_groups=True),
        EstimatorSpec(
            name="masked_gae", axis=Axis.TRAINED_TOKENS, columns=frozenset({"values"}), normalised_over="tokens"
        ),
        EstimatorSpec(
            name="optimal_token_baseline", axis=Axis.TRAINED_TOKENS, columns=_PATH_VARIANCE, takes_weights=True
        ),
        EstimatorSpec(name="reinforce_plus_plus", axis=Axis.TRAINED_TOKENS, normalised_over="tokens"),
        EstimatorSpec(name="remax", axis=Axis.TRAINED_TOKENS, columns=frozenset({"reward_baseline"})),
        EstimatorSpec(
            name="tir_optimal_token_baseline", axis=Axis.TRAINED_TOKENS, columns=_PATH_VARIANCE, takes_weights=True
        ),
        EstimatorSpec(name="discounted_token_returns", axis=Axis.ALL_TOKENS),
        EstimatorSpec(name="gae", axis=Axis.ALL_TOKENS, columns=frozenset({"values"})),
        EstimatorSpec(name="penalised_group_scores", axis=Axis.ALL_TOKENS, columns=frozenset({"group_id"})),
    )
}
