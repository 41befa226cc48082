"""Advantage estimators by name: on which axis each gives its advantages, and what it needs for that.

The formulas are in `rolloutdoctor.formulas.advantages.table`, under the same names. A trainer's own name of an
estimator is in the trainer's file.
"""

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Literal


class Axis(Enum):
    """Unit to which an estimator gives one advantage."""

    ROWS = "rows"
    TRAINED_TOKENS = "tokens that the mask keeps"
    ALL_TOKENS = "response tokens, masked ones included"


@dataclass(frozen=True)
class EstimatorSpec:
    """Properties of an estimator beside its formula.

    Attributes:
        name: in `SPECS` and in the table of formulas.
        words: the formula, before it is divided where a scale is set.
        axis: what it gives one advantage to.
        columns: what it reads beyond `reward`, the groups of rows and the mask of tokens.
        takes_weights: the importance weights of the rollout correction enter.
        rewards: what it compares: the score; each reward that `AdvantageRule.reward_keys` names, or the score where
            it names none; every reward that the run has, over the rows that have it; or none at all.
        normalised_over: what the advantages are normalised over in the end, or None.
        divides: it can divide by the standard deviation of a group or of the batch.
        is_standard_score: it is the centred score, divided by that deviation where a scale is set, and nothing else.
        baseline: a mean over other rows or tokens, the score of another row, or None.
        relative: the centred score is divided by that mean.
        weighs_lengths: that mean weighs each row by its trained tokens.
        of_others: mean and standard deviation of a row are those of the other rows of its group.
        discounted: an advantage is the discounted sum of the rewards of the trained tokens from its own on.
        at_end: the score of a row among its group is the reward of its last token.
        of_tokens: the estimator that gives the same to every token of a row; empty: none does.
        within_groups: no row of another group enters an advantage, unless a scale or a whitening is over the batch.
    """

    name: str
    words: str
    _: KW_ONLY
    axis: Axis = Axis.ROWS
    columns: frozenset[str] = frozenset()
    takes_weights: bool = False
    rewards: Literal["score", "named", "every", "none"] = "score"
    normalised_over: Literal["rows", "tokens"] | None = None
    divides: bool = False
    is_standard_score: bool = False
    baseline: Literal["mean", "score"] | None = "mean"
    relative: bool = False
    weighs_lengths: bool = False
    of_others: bool = False
    discounted: bool = False
    at_end: bool = False
    within_groups: bool = False
    of_tokens: str = ""

    @property
    def required_columns(self) -> frozenset[str]:
        """Every column without which there are no advantages."""
        by_axis = "group_id" if self.axis is Axis.ROWS else "response_mask"
        return self.columns | {by_axis} | (set() if self.rewards == "none" else {"reward"})

    @property
    def has_groups(self) -> bool:
        """True if rows of a group are compared with each other."""
        return "group_id" in self.required_columns


_PATH_VARIANCE = frozenset({"group_id", "old_log_probs", "sum_pi_squared"})
_MASK = frozenset({"response_mask"})

SPECS: dict[str, EstimatorSpec] = {
    spec.name: spec
    for spec in (
        EstimatorSpec(
            "grpo",
            "reward - mean",
            divides=True,
            is_standard_score=True,
            within_groups=True,
            of_tokens="group_scores_of_tokens",
        ),
        EstimatorSpec("relative_to_mean", "(reward - mean) / mean", relative=True, within_groups=True),
        EstimatorSpec("rloo", "reward - mean of the other rows", within_groups=True),
        EstimatorSpec("rloo_scaled", "(reward - mean of the other rows) / deviation", divides=True),
        EstimatorSpec(
            "leave_one_out_score", "reward - mean of the other rows", divides=True, of_others=True, within_groups=True
        ),
        EstimatorSpec("level_scores", "reward - mean, over the deviation, each of its own level", divides=True),
        EstimatorSpec(
            "raw", "reward, without a baseline", baseline=None, within_groups=True, of_tokens="scores_of_tokens"
        ),
        EstimatorSpec("gpg", "alpha (reward - mean)"),
        EstimatorSpec(
            "opo", "reward - mean weighted by length", columns=_MASK, weighs_lengths=True, within_groups=True
        ),
        EstimatorSpec(
            "reinforce_plus_plus_baseline",
            "reward - mean, whitened over the trained tokens",
            columns=_MASK,
            normalised_over="tokens",
        ),
        EstimatorSpec(
            "gdpo",
            "every reward a standard score in its group, added and whitened",
            columns=_MASK,
            rewards="named",
            normalised_over="tokens",
            divides=True,
        ),
        EstimatorSpec(
            "grpo_passk",
            "best - second best reward for the best row",
            divides=True,
            baseline="score",
            within_groups=True,
        ),
        EstimatorSpec(
            "normalize_then_sum",
            "every reward a standard score in its group, added and normalised over the batch",
            columns=frozenset({"rewards"}),
            rewards="every",
            normalised_over="rows",
            divides=True,
        ),
        *(
            EstimatorSpec(
                name,
                f"every reward a standard score {among}, added and normalised over the rows",
                columns=frozenset({"rewards"}),
                rewards="every",
                normalised_over="rows",
                divides=True,
                of_others=name.endswith("others"),
            )
            for name, among in (
                ("normalised_sum", "in its group"),
                ("normalised_sum_of_others", "among the other rows of its group"),
            )
        ),
        EstimatorSpec(
            "masked_gae",
            "generalised advantage estimation over the trained tokens",
            axis=Axis.TRAINED_TOKENS,
            columns=frozenset({"values"}),
            normalised_over="tokens",
        ),
        EstimatorSpec(
            "optimal_token_baseline",
            "reward to go - optimal token baseline",
            axis=Axis.TRAINED_TOKENS,
            columns=_PATH_VARIANCE,
            takes_weights=True,
        ),
        EstimatorSpec(
            "tir_optimal_token_baseline",
            "reward to go - optimal token baseline over turns",
            axis=Axis.TRAINED_TOKENS,
            columns=_PATH_VARIANCE,
            takes_weights=True,
        ),
        EstimatorSpec(
            "reinforce_plus_plus",
            "discounted rewards to go, whitened",
            axis=Axis.TRAINED_TOKENS,
            discounted=True,
            normalised_over="tokens",
        ),
        EstimatorSpec(
            "scores_to_go",
            "reward at the last token, less the KL penalty, discounted to go",
            axis=Axis.TRAINED_TOKENS,
            baseline=None,
        ),
        EstimatorSpec(
            "group_scores_to_go",
            "reward - mean at the last token, less the KL penalty, discounted to go",
            axis=Axis.TRAINED_TOKENS,
            columns=frozenset({"group_id"}),
            divides=True,
            at_end=True,
        ),
        EstimatorSpec(
            "as_stored",
            "the advantages that the file holds",
            axis=Axis.TRAINED_TOKENS,
            columns=frozenset({"advantages"}),
            rewards="none",
            baseline=None,
        ),
        EstimatorSpec(
            "remax", "reward - greedy reward", axis=Axis.TRAINED_TOKENS, columns=frozenset({"reward_baseline"})
        ),
        EstimatorSpec("discounted_token_returns", "discounted rewards to go", axis=Axis.ALL_TOKENS),
        EstimatorSpec(
            "discounted_returns_all_penalised",
            "discounted rewards to go, less the KL penalty of every token to come",
            axis=Axis.ALL_TOKENS,
        ),
        EstimatorSpec(
            "returns_of_scores", "discounted rewards to go, the score at the last trained token", axis=Axis.ALL_TOKENS
        ),
        EstimatorSpec(
            "returns_of_group_scores",
            "discounted rewards to go, a score among its group at the last trained token",
            axis=Axis.ALL_TOKENS,
            columns=frozenset({"group_id"}),
            divides=True,
        ),
        EstimatorSpec(
            "gae_of_masked",
            "generalised advantage estimation, masked tokens having neither reward nor value",
            axis=Axis.ALL_TOKENS,
            columns=frozenset({"values"}),
        ),
        EstimatorSpec("response_returns", "discounted rewards to go over all tokens", axis=Axis.ALL_TOKENS),
        EstimatorSpec("gae", "generalised advantage estimation", axis=Axis.ALL_TOKENS, columns=frozenset({"values"})),
        EstimatorSpec(
            "gae_of_trained",
            "generalised advantage estimation over the trained tokens, before any whitening",
            axis=Axis.ALL_TOKENS,
            columns=frozenset({"values"}),
        ),
        EstimatorSpec(
            "penalised_group_scores",
            "reward - mean, less the KL penalty of each token",
            axis=Axis.ALL_TOKENS,
            columns=frozenset({"group_id"}),
        ),
        EstimatorSpec(
            "group_scores_of_tokens",
            "reward - mean, for each token",
            axis=Axis.ALL_TOKENS,
            columns=frozenset({"group_id"}),
            divides=True,
        ),
        EstimatorSpec("scores_of_tokens", "reward, for each token", axis=Axis.ALL_TOKENS, baseline=None),
        EstimatorSpec(
            "penalised_scores", "reward, less the KL penalty of each token", axis=Axis.ALL_TOKENS, baseline=None
        ),
    )
}
