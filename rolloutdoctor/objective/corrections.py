"""Corrections of log-probs that differ: weights, rejections and other multipliers of the policy term."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """Weights of the policy term that correct for the sampler's log-probs differing from the trainer's.

    Attributes:
        level: one weight for each token, or one for each row.
        high: the largest weight.
        low: None: weights are cut at `high`; else weights outside of both bounds are 0 (IcePop).
        normalised: weights are divided by their mean over the step.
    """

    level: Literal["token", "sequence"]
    high: float
    low: float | None = None
    normalised: bool = False


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A bound on how far the sampler's log-probs may be from the trainer's.

    Attributes:
        statistic: name in `rolloutdoctor.formulas.corrections.rejection`.
        high: largest statistic that is kept.
        low: smallest statistic that is kept, or None.
    """

    statistic: str
    high: float
    low: float | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Correction for different log-probs of sampler and trainer.

    Attributes:
        weights: importance weights of the policy term, or None.
        rejects: tokens or rows are rejected, and the run's mask is the one after it.
        rejections: by what.
        weighs: False: the weights are computed for their metrics alone.
    """

    weights: ImportanceWeights | None = None
    rejects: bool = False
    rejections: tuple[Rejection, ...] = ()
    weighs: bool = True


@dataclass(frozen=True, kw_only=True)
class TermWeight:
    """A detached multiplier of the policy term: what it takes out keeps its place in denominators, and its KL term.

    Attributes:
        kind: name in `rolloutdoctor.formulas.losses.gates`.
        against: the log-probs that the trainer's are compared with.
        of: the trainer's, of importance weights.
        level: one weight per token, or per row: the product, the geometric mean or the largest of its tokens' ratios;
            or one per micro-batch, which is a packed sequence: the geometric mean over its tokens, or their mean
            distance of the ratio from 1, of a divergence, or their mean squared log-ratio, of a second moment, which
            takes what it drops out of the micro-batch's denominator too.
        low: smallest weight, or None.
        high: largest weight, or None; of an off-policy mask the largest drift, of an entropy mask the share kept, of a
            second moment what that of the tokens left is below.
        outside: weights outside of the bounds are cut to them, or 0.
        measure: what is compared with the bounds where `judged` says of what: the ratio, a KL estimator of it, or the
            divergence of the two probabilities of the sampled token: KL of token or not (binary), total variation.
        judged: of what: the token, or the row's sum (of a ratio the product), mean (geometric) or largest token; None:
            the weight itself is compared.
        narrows: the ratio of a row in the policy term is that of the tokens that this leaves.
        indicator: what is within the bounds has weight 1, not its own.
        finite: a ratio that is not finite counts as 0.
        log_ratio_bound: the log-ratio of each token is clamped to this absolute value; None: not clamped.
        on_kl: the KL term is multiplied too.
        rejects_kl: what it takes out of the policy term loses its KL term too.
        nan_is_one: where there is nothing to compare with, the log-probs count as equal; False: NaN goes through.
        nan_log_prob: what a log-prob of `against` that is NaN counts as, of importance weights; None: NaN.
        inside: the policy term takes the weights in by itself.
        decay: of a sum over the tokens that follow, per token.
        cap: ratio above which a token adds nothing to that sum; None: every token adds.
        safe_ratio: ratio above which a token of negative advantage has a weight within 0.8 to 1 there; None: none has.
        of_rank: a quantile is that of the micro-batch of the rank, not of the micro-batches of all ranks together.
    """

    kind: Literal["importance", "off_policy", "high_entropy", "outlier", "divergence", "future_kl", "second_moment"]
    against: Literal["old_log_probs", "rollout_log_probs"] = "rollout_log_probs"
    of: Literal["old_log_probs", "policy_log_probs"] = "old_log_probs"
    level: Literal["token", "sequence", "geometric", "largest", "pack"] = "token"
    low: float | None = None
    high: float | None = None
    outside: Literal["cut", "zero"] = "cut"
    measure: Literal["ratio", "k1", "k2", "k3", "binary_kl", "tv"] = "ratio"
    judged: Literal["token", "sequence", "geometric", "largest"] | None = None
    narrows: bool = False
    indicator: bool = False
    finite: bool = False
    log_ratio_bound: float | None = None
    on_kl: bool = False
    rejects_kl: bool = False
    nan_is_one: bool = False
    nan_log_prob: float | None = None
    inside: bool = False
    decay: float = 1.0
    cap: float | None = None
    safe_ratio: float | None = None
    of_rank: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Weights and rejections that the loss makes of the sampler's log-probs differing from the trainer's.

    A ratio is trainer over sampler: of the token, or the product (sequence) or geometric mean of its row.

    Attributes:
        weighs: False: nothing is weighted or rejected, and only metrics are logged.
        level: of the ratio that weighs.
        mode: weights are cut at `high`, cut at both bounds, or tokens outside of both are rejected.
        low: smallest weight.
        high: largest weight.
        reject_level: of the ratio that rejects; None: nothing more is rejected.
        reject_low: smallest ratio that is kept.
        reject_high: largest ratio that is kept.
        veto: a row with a token of a smaller ratio is rejected; None: none is.
        normalised: weights are divided by their mean over the micro-batch.
    """

    weighs: bool
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    low: float = 0.0
    high: float = float("inf")
    reject_level: Literal["token", "sequence", "geometric"] | None = None
    reject_low: float = 0.0
    reject_high: float = float("inf")
    veto: float | None = None
    normalised: bool = False
