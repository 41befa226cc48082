"""`Objective`: what a trainer computes from a step, as one frozen value.

Masks have scopes. Which rows count in the *baseline*, which tokens carry the *policy* term, which the *KL* term,
which are counted in a *denominator* and which enter a *metric* are different sets in almost every trainer. Each is
a field here, so that a fix is an edit of one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import nan
from typing import ClassVar, Literal, Self

from rolloutdoctor.objective.corrections import RolloutCorrection, SamplerCorrection, TermWeight
from rolloutdoctor.objective.estimators import SPECS, Axis, EstimatorSpec
from rolloutdoctor.results.errors import CannotComputeError


class RowSet(Enum):
    """A set of rows that a scope can leave out."""

    REJECTED = "rows with no trained token left"
    TRUNCATED = "rows with no trained token left whose status says that they were cut off"
    UNSCORED = "rows whose reward is null"
    ERRORED = "rows whose column error says what failed"
    FAILED = "rows whose status says that they failed"
    ZERO_STD = "train rows of groups of two or more whose rewards are all equal (max - min = 0)"
    ZERO_ADVANTAGE = "rows whose advantage is exactly 0 in the trainer's own float32"
    PADDING = "rows that repeat an earlier row of the step and fill up the batch"
    STD_FLAGGED = "rows of |std| <= 1e-8 in the trainer's own float32, eval rows and groups of one included"


@dataclass(frozen=True)
class Scope:
    """The rows that take part in something: all of them, less some sets."""

    without: frozenset[RowSet] = frozenset()

    def leaving_out(self, rows: RowSet) -> "Scope":
        """Return the scope without `rows`."""
        return Scope(self.without | {rows})


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Penalty of rows with more than `start` trained tokens: `factor` for each `span` tokens beyond."""

    start: int
    span: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class LengthTerm:
    """What the length of a response does to its reward, among the baseline rows of its group.

    Attributes:
        rescaling: the reward is divided by one plus this times its response tokens over their mean; None: it is not.
        output: share of the mean reward that a response loses for its trained tokens.
        input: the same for prompt tokens and masked tokens of the response.
        turns: the same for spans of trained tokens.
        span: the trained tokens count as a share of this number; None: each length is a share of the largest.
        gated: the penalty is multiplied by the reward.
    """

    rescaling: float | None = None
    output: float = 0.0
    input: float = 0.0
    turns: float = 0.0
    span: int | None = None
    gated: bool = False


Level = Literal["group", "batch"]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Mean and deviation of a normalisation, each over the group, over the batch, or left out.

    Attributes:
        mean: over what the mean is taken; None: nothing is subtracted.
        std: over what the deviation is taken; None: nothing divides.
        of_others: the mean is that of the others.
        unbiased: the variance divides by one less.
        epsilon: added to the deviation.
    """

    mean: Level | None
    std: Level | None
    of_others: bool = False
    unbiased: bool = True
    epsilon: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdvantageRule:
    """Rule that turns scores into advantages.

    Attributes:
        estimator: name in `rolloutdoctor.objective.estimators`.
        scale: the standard deviation that centred scores are divided by: of the group, of the batch, or none; or the
            mean of the group, with its sign.
        epsilon: added to that standard deviation.
        biased_std: the standard deviation divides by the number of rows, not by one less.
        epsilon_in_root: epsilon is added to the variance, before the root.
        singleton: the advantage of a row that is the only baseline row of its group: its raw score, or zero.
        gamma: discount per token, for estimators with a time axis.
        lam: lambda of generalised advantage estimation.
        one_pass: the trainer takes the standard deviation as ``sqrt(E[x^2] - E[x]^2)`` in float32, NaN being 0, and
            a deviation of 0 divides nothing.
        batch_if_unequal: where groups differ in size the whole batch is one group (rewards reshaped by position).
        numeric_ids: group ids that are whole numbers are compared as numbers, so that "7" and "007" are one group:
            never, never but in a change that is proposed upstream, or always.
        flags_zero_std: the trainer flags the rows of `RowSet.STD_FLAGGED`.
        knows_single: `formulas.advantages.float32` has the trainer's own float32 statistics, sum by sum.
        single: statistics are these, rounding of equal rewards included; False: float64.
        exact_zero: rows of `RowSet.ZERO_STD` have an advantage of exactly 0, and no rounding of equal rewards.
        sums_tokens: the score of a row is the unmasked sum of its token rewards (`token_rewards` where the file has
            them), the KL penalty inside the reward included; False: it is `reward` as logged.
        reward_keys: the reward functions that are normalised one by one; none: the score alone.
        reward_weights: their weights; none: all one.
        normalised: the advantages are centred over the step's baseline rows and divided by their standard deviation.
        overlong: what long rows lose of their reward before all else; None: nothing.
        length_term: what the length of a response does to its reward, before any baseline; None: nothing.
        weighs_masked: estimators that weigh by lengths count the masked tokens of a response too.
        reward_shift: added to the rewards, before `reward_factor` and `reward_bounds`.
        reward_factor: what they are multiplied by then.
        reward_bounds: what the rewards are clamped to before any KL penalty; None: nothing.
        null_is_zero: a row whose reward is null has a reward of 0.
        whitened: the advantages are whitened over the trained tokens of the step.
        variance_floor: the variance of that divides by the number of tokens and is at least 1e-8, where it else divides
            by one less and has 1e-8 added.
        whitened_over: what mean and variance of any whitening are over: the trained tokens of the step; those of the
            row's rank; those of the token's slice of context parallelism; all response tokens; or all positions of
            rows padded to the longest, where every one that is not trained counts as 0.
        context_ranks: over how many ranks of context parallelism every row is cut; 1: over none.
        whitened_moments: which of the two are over that, the other being over the trained tokens; and whether the
            variance is about the mean of its own tokens, not about the one that is subtracted.
        bounds: what the advantages are clamped to in the end; None: nothing.
        row_levels: how the estimator of levels normalises rewards; None: of other estimators.
        token_levels: how advantages are normalised over the trained tokens, where that is no whitening of the step;
            None: they are not.
        whitening_epsilon: added to the standard deviation that a whitening divides by; None: 1e-8 to its square.
        centres_only: whitening subtracts the mean and divides by nothing.
        of_group: estimators that give a score among its group to the tokens: how it is made, by the name of the
            estimator; its epsilon and scale are those of the rule.
        score_bounds: what that score is clamped to before it is given to the tokens; None: nothing.
        zero_tail: no baseline where the only longest row of a group is beyond every other (optimal token baselines).
        one_vote: rows of one trajectory (`trajectory_id`) count once in the baselines and scales of their group, with
            the score that they share, and all get its advantage; "last": that of the trajectory's last row, which the
            rows do not name, so that its mask has to be like theirs, empty or not.
        resets_at_mask: a discounted return over the trained tokens starts anew before every masked span.
        groups_of: the trainer cuts the batch into groups of so many rows by position, whichever they are of; 0: of a
            number that nothing says; None: groups are those of their ids.
        masked_end: the score of a row whose last response token is masked counts; or it enters the baseline and is lost
            to the row's own advantage; or it is 0; or, of estimators over the trained tokens, it lies on the last of
            these.
        empty_is_zero: the score of a row without a response token is 0.
        by_task: rows of one `task_id` are compared, whatever their group id.
        drawn: rows were drawn with replacement once the advantages were made, and every row has the advantages of one
            that was drawn in its place, or its mask too, where `response_mask_pre` is its own; or it has its own
            advantages and such a mask; None: neither. Which row it is the logged advantages say. Of `masked_gae`.
    """

    estimator: str
    scale: Literal["group", "batch", "none", "mean"] = "group"
    epsilon: float = 1e-6
    biased_std: bool = False
    epsilon_in_root: bool = False
    singleton: Literal["raw", "zero"] = "raw"
    gamma: float = 1.0
    lam: float = 1.0
    one_pass: bool = False
    batch_if_unequal: bool = False
    numeric_ids: Literal["never", "proposed", "always"] = "never"
    flags_zero_std: bool = False
    knows_single: bool = False
    single: bool = False
    exact_zero: bool = False
    sums_tokens: bool = False
    reward_keys: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    normalised: bool = False
    overlong: OverlongPenalty | None = None
    length_term: LengthTerm | None = None
    weighs_masked: bool = False
    reward_shift: float = 0.0
    reward_factor: float = 1.0
    reward_bounds: tuple[float, float] | None = None
    null_is_zero: bool = False
    whitened: bool = False
    variance_floor: bool = False
    whitened_over: Literal["trained", "rank", "context-slice", "response", "padded"] = "trained"
    context_ranks: int = 1
    whitened_moments: Literal["both", "mean", "variance", "mean-own-centre", "variance-own-centre"] = "both"
    bounds: tuple[float, float] | None = None
    row_levels: Levels | None = None
    token_levels: Levels | None = None
    whitening_epsilon: float | None = None
    centres_only: bool = False
    of_group: str | None = None
    score_bounds: tuple[float, float] | None = None
    zero_tail: bool = True
    one_vote: bool | Literal["last"] = False
    resets_at_mask: bool = False
    masked_end: Literal["counts", "lost", "zero", "last"] = "counts"
    empty_is_zero: bool = False
    groups_of: int | None = None
    by_task: bool = False
    drawn: Literal["advantages", "masks", "masks alone"] | None = None

    @property
    def spec(self) -> EstimatorSpec:
        """Return the properties of the estimator."""
        return SPECS[self.estimator]

    def whitened_by_slice(self, ranks: int) -> Self | None:
        """Return the rule that whitens the slices of each context-parallel rank by themselves; None: there is none.

        Source: slime ``compute_advantages_and_returns`` up to 0.3.1; miles ``normalize_advantages``.
        """
        name = self.estimator if self.spec.axis is not Axis.ROWS else self.spec.of_tokens
        if not name or not (self.whitened or self.spec.normalised_over == "tokens"):
            return None
        of_group = self.estimator if self.spec.is_standard_score else self.of_group
        return replace(self, estimator=name, of_group=of_group, whitened_over="context-slice", context_ranks=ranks)

    @property
    def draws_advantages(self) -> bool:
        """True if a row has the advantages of another one, which was drawn."""
        return self.drawn in ("advantages", "masks")

    @property
    def draws_masks(self) -> bool:
        """True if a row has the mask of another one, and its own in `response_mask_pre`."""
        return self.drawn in ("masks", "masks alone")

    @property
    def is_group_score(self) -> bool:
        """True if an advantage is the standard score of its group, and nothing is done to it afterwards."""
        return (
            self.spec.is_standard_score
            and self.scale == "group"
            and not (self.whitened or self.normalised or self.token_levels)
        )


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The policy term.

    Attributes:
        kind: name in `rolloutdoctor.formulas.losses.surrogates`.
        clip_low: how far below one the ratio may fall.
        clip_high: how far above one it may rise.
        cap: largest ratio, as `kind` says: of negative advantages (dual clip) or of all (delta clip); None: no cap.
        log_ratio_bound: the log-ratio is clamped to this absolute value; None: not clamped.
        finite: a log-ratio that is not finite counts as 0 and has no derivative; False: it goes through.
        old: the column that the policy's log-probs are compared with; their own: every ratio is 1.
        level: one ratio per token, or per row: the geometric mean or the product of its tokens' ratios; or the value
            of the mean with the derivative of the token's own ratio (sequence-token).
        coef: what the term is multiplied by in the loss.
        row_advantages: the advantage of a token is the mean of its row's, over the tokens that the ratio is of.
        scaled_advantages: the weights of rows are in their advantages before anything else, and terms are added up: a
            part without an advantage is not weighed.
        live_ratio: of kinds that weigh the log-prob by a detached ratio: the term is the ratio itself instead. The
            derivative is the same, but for a log-ratio beyond its bound, where there is none.
        empty_share: a row without a trained token has a term too: minus this share of its advantage. A share of 0
            lets only NaN and infinity through, as 0 times the advantage does; None: such a row has no term.
        nan_log_prob: what a log-prob of `old` that is NaN counts as; None: NaN goes through.
        numbers: further parameters, by the names that the function of the kind documents.
    """

    kind: str
    clip_low: float
    clip_high: float
    cap: float | None = None
    log_ratio_bound: float | None = None
    finite: bool = False
    old: Literal["old_log_probs", "rollout_log_probs", "policy_log_probs"] = "old_log_probs"
    level: Literal["token", "sequence", "sequence-sum", "sequence-token"] = "token"
    coef: float = 1.0
    row_advantages: bool = False
    scaled_advantages: bool = False
    live_ratio: bool = False
    empty_share: float | None = None
    nan_log_prob: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def bounds_probabilities(self) -> bool:
        """True if the clip range bounds the difference of probabilities, and not the ratio."""
        return self.kind in ("dppo_tv", "probability_band")

    @property
    def clips_by_sign(self) -> bool:
        """True if ratios of tokens are clipped on the side to which the advantage pushes; `cap` is for the other."""
        kinds = ("ppo_delta_clip", "ppo_dual_clip")
        return self.kind in kinds and self.level == "token" and self.old != "policy_log_probs"

    @property
    def moves_without_advantage(self) -> bool:
        """True if a token whose advantage is zero can have a policy gradient."""
        return self.kind in ("dro", "kl_cov", "ratio_masked")


@dataclass(frozen=True, kw_only=True)
class KlTerm:
    """A KL estimator with its coefficient.

    Attributes:
        estimator: name in `rolloutdoctor.formulas.kl`.
        coef: what it is multiplied by.
        straight_through: the derivative is that of k2.
        weighted_slope: the derivative is that of k2 times the detached ratio of policy and old log-probs, at most this,
            and no clamp stops it. None: it is that of the value.
        ratio_weighted: multiplied by the importance ratio, not detached.
        ratio_level: that ratio is the token's, or the geometric mean of the row's.
        ratio_to: the log-probs that this ratio compares the policy's with, where they are not those of the surrogate: a
            ratio that is not finite then counts as 0. To the policy's own it is 1 and still has a derivative, so that
            the term's value is k and its derivative k' + k.
        input_bound: bound on the absolute log-ratio to the reference, before any estimator; None: none.
        bounds_ratio: beyond that bound a ratio has no derivative either.
        clamp: bound on the absolute value after weighting.
        finite: a value that is not finite counts as 0 and has no derivative; False: it goes through.
        log_probs: the column compared with the reference; in the loss only the policy's have a derivative.
        reference: the column that they are compared with: the reference's, or those of another engine or pass; inside
            the reward it may be none, and the log-probs are compared with 0.
        masked: inside the reward, only tokens of the mask before rejection are penalised; False: every token is.
        of_trained: that mask is the one after it.
        coef_metric: the logged metric that holds the coefficient of each step; None: it is `coef` in every step.
    """

    estimator: str
    coef: float
    straight_through: bool = False
    weighted_slope: float | None = None
    ratio_weighted: bool = False
    ratio_level: Literal["token", "sequence"] = "token"
    ratio_to: Literal["policy_log_probs", "rollout_log_probs"] | None = None
    input_bound: float | None = None
    bounds_ratio: bool = True
    clamp: float | None = None
    finite: bool = False
    log_probs: Literal["policy_log_probs", "old_log_probs", "rollout_log_probs"] = "policy_log_probs"
    reference: Literal["ref_log_probs", "old_log_probs", "rollout_log_probs"] | None = "ref_log_probs"
    masked: bool = False
    of_trained: bool = False
    coef_metric: str | None = None

    def at_step(self, logged: Mapping[str, float]) -> "KlTerm":
        """Return the term with the coefficient of one step, given the metrics logged at it.

        Raises:
            CannotComputeError: if the coefficient changes from step to step, and the step's was not logged.
        """
        if self.coef_metric is None:
            return self
        if self.coef_metric not in logged:
            raise CannotComputeError(
                f"the coefficient of the KL penalty in the reward depends on every step before, and the metric "
                f"{self.coef_metric} that holds it was not logged"
            )
        return replace(self, coef=logged[self.coef_metric], coef_metric=None)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Aggregation of token terms to one loss.

    Attributes:
        mode: name in `rolloutdoctor.formulas.losses.aggregation`.
        length: the fixed length that sums are divided by (Dr. GRPO), or None.
        counted_in_loss: True if the token count of the denominator is taken from the mask that the loss sees, False
            if it was counted over the batch before; a fix that edits the loss's mask changes only the former.
        counted_before_rejection: True if token counts are those of the mask before rejection.
        needs_micro_batches: True if the number depends on how the step was cut into micro-batches, and it was.
        eval_batches: True if every evaluation batch is a loss of its own, averaged by rows.
        leaves_out_rejected: True if rows that rejection left no token are not counted where rows are.
        leaves_out_truncated: True if the tokens of rows whose status says that they were cut off are trained and not
            counted.
        counted_in_policy: True if token counts are those of the tokens that the correction inside the policy term
            keeps.
        counted_in_gates: True if token counts are those of the rows that an off-policy mask keeps.
        eval_divisor: what the loss of an evaluation is divided by.
    """

    mode: str
    length: float | None = None
    counted_in_loss: bool = True
    counted_before_rejection: bool = False
    needs_micro_batches: bool = False
    eval_batches: bool = False
    leaves_out_rejected: bool = False
    leaves_out_truncated: bool = False
    counted_in_policy: bool = False
    counted_in_gates: bool = False
    eval_divisor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """Bonus subtracted from the loss: a coefficient times the mean entropy of the tokens with the policy term.

    Its gradient is one of all logits of a position: of the sampled token's log-prob it has no derivative.

    Attributes:
        coef: what the mean is multiplied by; NaN where that is not known of a step.
        aggregation: how the entropies of tokens become the mean.
        coef_metric: the metric that holds the coefficient of each step; None: it is `coef` in every step.
        adapts: the coefficient is not the same in every step.
        stored: False if no column has the entropies that the loss saw, so that the bonus is NaN.
    """

    coef: float
    aggregation: Aggregation
    coef_metric: str | None = None
    adapts: bool = False
    stored: bool = True

    no_gradient: ClassVar[str] = "the gradient of the entropy bonus needs the logits, which are not in the rows"

    @property
    def remedy(self) -> str:
        """What to do about the missing gradient."""
        also = "; the audit compares the loss, the bonus included" if self.stored else ""
        return f"nothing records it{also}"

    def at_step(self, logged: Mapping[str, float]) -> "EntropyBonus":
        """Return the bonus with the coefficient of one step, given the metrics logged at it."""
        if self.coef_metric is None:
            return self
        return replace(self, coef=logged.get(self.coef_metric, nan), coef_metric=None)


class KlBuffer(Enum):
    """Buffer that the stored KL metric comes from."""

    COPY = "a copy of the KL"
    REWARD = "the reward buffer: -coef * KL, with the reward added to the last token"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Everything that decides a step's numbers.

    Attributes:
        trainer: name of the trainer.
        version: its version, as given or assumed.
        advantage: how scores become advantages.
        surrogate: the policy term.
        aggregation: how token terms become one loss.
        policy_aggregation: how the terms of the policy do, where the trainer forces another way on them; or None.
        kl_loss: the KL term of the loss, or None.
        has_kl_loss: the trainer has a KL term for its loss, configured or not.
        kl_reward: the KL penalty inside the reward, or None.
        entropy_bonus: what the loss loses for the entropy of the policy, or None.
        correction: what is done about sampler and trainer differing.
        policy_correction: the same inside the policy term, with the log-probs at the loss against those that the term
            compares them with: what it rejects keeps its KL term; or None.
        sampler_correction: weights of the policy term and rejections that take out the KL term too, made inside the
            loss; or None.
        gates: what else the policy term is multiplied by.
        reward_weights: weight of each reward function, or None for all one.
        baseline_rows: rows that enter baselines and scales.
        policy: rows whose tokens carry the policy term.
        kl: rows whose tokens carry the KL term.
        denominator: rows whose tokens are counted in denominators.
        metric: rows whose tokens enter the loss's metrics.
        kl_buffer: what the stored KL metric is.
        metric_columns: columns that metrics are made of where they are there, beyond those of the loss.
        also_logs: metrics that an option switches on.
        context_slices: over how many slices of every row the trainer adds up the metric of the stored KL.
        unknown_loss: why the loss cannot be computed, the option first: then `surrogate`, `aggregation` and what else
            is of the loss say nothing, and what comes before it holds. Empty where it can.
    """

    trainer: str
    version: str
    advantage: AdvantageRule
    surrogate: Surrogate
    aggregation: Aggregation
    policy_aggregation: Aggregation | None = None
    kl_loss: KlTerm | None = None
    has_kl_loss: bool = True
    kl_reward: KlTerm | None = None
    entropy_bonus: EntropyBonus | None = None
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    policy_correction: RolloutCorrection | None = None
    sampler_correction: SamplerCorrection | None = None
    gates: tuple[TermWeight, ...] = ()
    reward_weights: tuple[float, ...] | None = None
    baseline_rows: Scope = field(default_factory=Scope)
    policy: Scope = field(default_factory=Scope)
    kl: Scope = field(default_factory=Scope)
    denominator: Scope = field(default_factory=Scope)
    metric: Scope = field(default_factory=Scope)
    kl_buffer: KlBuffer = KlBuffer.COPY
    metric_columns: frozenset[str] = frozenset()
    also_logs: frozenset[str] = frozenset()
    context_slices: int = 1
    unknown_loss: str = ""

    def with_singleton_rule(self, singleton: Literal["raw", "zero"]) -> "Objective":
        """Return the objective with another rule for the only row in the baseline of a group."""
        return replace(self, advantage=replace(self.advantage, singleton=singleton))

    def in_single(self) -> "Objective":
        """Return the objective with the trainer's own float32 group statistics, where they are known."""
        return replace(self, advantage=replace(self.advantage, single=self.advantage.knows_single))

    @property
    def stores_kl(self) -> bool:
        """True if the trainer stores the KL of its penalty for a metric: that of one on every token, masked or not."""
        return self.kl_reward is not None and not self.kl_reward.masked

    @property
    def step_metric(self) -> str | None:
        """The logged metric without which no step can be evaluated, or None."""
        return None if self.kl_reward is None else self.kl_reward.coef_metric

    @property
    def changes_by_step(self) -> bool:
        """True if a coefficient is that of the step, as logged."""
        return any(term is not None and term.coef_metric is not None for term in (self.kl_reward, self.entropy_bonus))

    def at_step(self, logged: Mapping[str, float]) -> "Objective":
        """Return the objective of one step: what changes from step to step is taken from its logged metrics.

        Raises:
            CannotComputeError: if a metric that holds such a value was not logged.
        """
        penalty, bonus = self.kl_reward, self.entropy_bonus
        if not self.changes_by_step:
            return self
        return replace(
            self,
            kl_reward=None if penalty is None else penalty.at_step(logged),
            entropy_bonus=None if bonus is None else bonus.at_step(logged),
        )
