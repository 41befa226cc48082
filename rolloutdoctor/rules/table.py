"""Every rule, in the order of their codes, and how `--select` and `--ignore` pick among them."""

from collections.abc import Sequence
from typing import Any

from rolloutdoctor.plugins import offered
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.rules.advantage_blow_up import AdvantageBlowUp
from rolloutdoctor.rules.advantage_mask_mismatch import AdvantageMaskMismatch
from rolloutdoctor.rules.advantages_differ import AdvantagesDiffer
from rolloutdoctor.rules.aggregation_by_micro_batch import AggregationByMicroBatch
from rolloutdoctor.rules.all_truncated import AllTruncated
from rolloutdoctor.rules.clip_saturation import ClipSaturation
from rolloutdoctor.rules.constant_reward import ConstantReward
from rolloutdoctor.rules.dead_groups import DeadGroups
from rolloutdoctor.rules.denominator_counts_dropped import DenominatorCountsDropped
from rolloutdoctor.rules.duplicate_responses import DuplicateResponses
from rolloutdoctor.rules.engine_frozen import EngineFrozen
from rolloutdoctor.rules.entropy_collapse import EntropyCollapse
from rolloutdoctor.rules.entropy_jump import EntropyJump
from rolloutdoctor.rules.entropy_spent import EntropySpent
from rolloutdoctor.rules.eos_not_trained import EosNotTrained
from rolloutdoctor.rules.eval_group_of_one import EvalGroupOfOne
from rolloutdoctor.rules.float_residue import FloatResidue
from rolloutdoctor.rules.gradient_spike import GradientSpike
from rolloutdoctor.rules.group_partition import GroupPartition
from rolloutdoctor.rules.inert_reward_term import InertRewardTerm
from rolloutdoctor.rules.kl_blow_up import KlBlowUp
from rolloutdoctor.rules.kl_clamped import KlClamped
from rolloutdoctor.rules.kl_counted_twice import KlCountedTwice
from rolloutdoctor.rules.kl_gradient import KlGradient
from rolloutdoctor.rules.kl_metric_corrupted import KlMetricCorrupted
from rolloutdoctor.rules.kl_not_held import KlNotHeld
from rolloutdoctor.rules.kl_of_rejected import KlOfRejected
from rolloutdoctor.rules.kl_only_loss import KlOnlyLoss
from rolloutdoctor.rules.kl_without_gradient import KlWithoutGradient
from rolloutdoctor.rules.learning_rate import LearningRate
from rolloutdoctor.rules.learning_rate_stops import LearningRateStops
from rolloutdoctor.rules.length_bias import LengthBias
from rolloutdoctor.rules.length_growth import LengthGrowth
from rolloutdoctor.rules.length_starved import LengthStarved
from rolloutdoctor.rules.level_change import LevelChange
from rolloutdoctor.rules.log_contradicts_itself import LogContradictsItself
from rolloutdoctor.rules.logged_anomaly import LoggedAnomaly
from rolloutdoctor.rules.logprob_placeholder import LogProbPlaceholder
from rolloutdoctor.rules.logprob_shift import LogProbShift
from rolloutdoctor.rules.loss_differs import LossDiffers
from rolloutdoctor.rules.loss_near_zero import LossNearZero
from rolloutdoctor.rules.mask_leak import MaskLeak
from rolloutdoctor.rules.metric_differs import MetricDiffers
from rolloutdoctor.rules.metric_mean_of_means import MetricMeanOfMeans
from rolloutdoctor.rules.metric_scale_factor import MetricScaleFactor
from rolloutdoctor.rules.moe_routing import MoeRouting
from rolloutdoctor.rules.nonfinite_values import NonfiniteValues
from rolloutdoctor.rules.options_refuted import OptionsRefuted
from rolloutdoctor.rules.outlier_dropped import OutlierDropped
from rolloutdoctor.rules.overwritten_completions import OverwrittenCompletions
from rolloutdoctor.rules.packing_leak import PackingLeak
from rolloutdoctor.rules.padding_rows import PaddingRows
from rolloutdoctor.rules.policy_not_moving import PolicyNotMoving
from rolloutdoctor.rules.position_shift import PositionShift
from rolloutdoctor.rules.quantized_logprobs import QuantizedLogProbs
from rolloutdoctor.rules.ratio_noise import RatioNoise
from rolloutdoctor.rules.ratio_not_one import RatioNotOne
from rolloutdoctor.rules.reference_moved import ReferenceMoved
from rolloutdoctor.rules.reference_not_initial import ReferenceNotInitial
from rolloutdoctor.rules.rejected_in_baseline import RejectedInBaseline
from rolloutdoctor.rules.repetition import Repetition
from rolloutdoctor.rules.resumed_data import ResumedData
from rolloutdoctor.rules.retokenized import Retokenized
from rolloutdoctor.rules.reward_at_mask import RewardAtMask
from rolloutdoctor.rules.reward_collapse import RewardCollapse
from rolloutdoctor.rules.reward_contradicts_answer import RewardContradictsAnswer
from rolloutdoctor.rules.reward_follows_length import RewardFollowsLength
from rolloutdoctor.rules.reward_free_step import RewardFreeStep
from rolloutdoctor.rules.reward_from_tool_text import RewardFromToolText
from rolloutdoctor.rules.reward_metric_not_training_reward import RewardMetricNotTrainingReward
from rolloutdoctor.rules.reward_missing_as_zero import RewardMissingAsZero
from rolloutdoctor.rules.reward_not_a_function import RewardNotAFunction
from rolloutdoctor.rules.reward_not_moved import RewardNotMoved
from rolloutdoctor.rules.reward_row_misaligned import RewardRowMisaligned
from rolloutdoctor.rules.sampler_mismatch import SamplerMismatch
from rolloutdoctor.rules.sampler_mismatch_logged import SamplerMismatchLogged
from rolloutdoctor.rules.sequence_is_length_bias import SequenceIsLengthBias
from rolloutdoctor.rules.several_votes import SeveralVotes
from rolloutdoctor.rules.shaped_reward_phantom import ShapedRewardPhantom
from rolloutdoctor.rules.singleton_group import SingletonGroup
from rolloutdoctor.rules.special_token_sampled import SpecialTokenSampled
from rolloutdoctor.rules.spike_attributed import SpikeAttributed
from rolloutdoctor.rules.stale_policy import StalePolicy
from rolloutdoctor.rules.stale_prefix_cache import StalePrefixCache
from rolloutdoctor.rules.std_difficulty_bias import StdDifficultyBias
from rolloutdoctor.rules.sync_corrupts import SyncCorrupts
from rolloutdoctor.rules.table_rule import Rule
from rolloutdoctor.rules.temperature_mismatch import TemperatureMismatch
from rolloutdoctor.rules.throughput_fault import ThroughputFault
from rolloutdoctor.rules.truncated_support import TruncatedSupport
from rolloutdoctor.rules.truncation_hidden import TruncationHidden
from rolloutdoctor.rules.turn_boundary import TurnBoundary
from rolloutdoctor.rules.unbounded_ratio import UnboundedRatio
from rolloutdoctor.rules.version_stamps import VersionStamps
from rolloutdoctor.rules.whitening_over_padding import WhiteningOverPadding
from rolloutdoctor.rules.zero_std_kl import ZeroStdKl
from rolloutdoctor.rules.zero_variance_share import ZeroVarianceShare

AnyRule = Rule[Any]

RULES: tuple[AnyRule, ...] = (
    RejectedInBaseline(),
    SingletonGroup(),
    FloatResidue(),
    AdvantagesDiffer(),
    RewardMissingAsZero(),
    AdvantageMaskMismatch(),
    AdvantageBlowUp(),
    ShapedRewardPhantom(),
    InertRewardTerm(),
    WhiteningOverPadding(),
    DeadGroups(),
    StdDifficultyBias(),
    LengthBias(),
    RewardContradictsAnswer(),
    RewardNotAFunction(),
    RewardFromToolText(),
    EntropySpent(),
    LengthStarved(),
    RewardFollowsLength(),
    OutlierDropped(),
    SeveralVotes(),
    RewardAtMask(),
    ZeroStdKl(),
    LossNearZero(),
    RewardFreeStep(),
    KlOnlyLoss(),
    LossDiffers(),
    AggregationByMicroBatch(),
    KlGradient(),
    KlClamped(),
    KlCountedTwice(),
    DenominatorCountsDropped(),
    ReferenceMoved(),
    ReferenceNotInitial(),
    KlWithoutGradient(),
    SpikeAttributed(),
    PolicyNotMoving(),
    KlOfRejected(),
    NonfiniteValues(),
    OverwrittenCompletions(),
    GroupPartition(),
    RewardRowMisaligned(),
    LogProbPlaceholder(),
    MaskLeak(),
    EosNotTrained(),
    LogProbShift(),
    DuplicateResponses(),
    Retokenized(),
    TruncationHidden(),
    AllTruncated(),
    ResumedData(),
    OptionsRefuted(),
    PaddingRows(),
    TurnBoundary(),
    VersionStamps(),
    SpecialTokenSampled(),
    KlMetricCorrupted(),
    EvalGroupOfOne(),
    LoggedAnomaly(),
    MetricDiffers(),
    MetricMeanOfMeans(),
    RewardMetricNotTrainingReward(),
    MetricScaleFactor(),
    LogContradictsItself(),
    SamplerMismatch(),
    StalePolicy(),
    TemperatureMismatch(),
    TruncatedSupport(),
    QuantizedLogProbs(),
    RatioNotOne(),
    SequenceIsLengthBias(),
    MoeRouting(),
    StalePrefixCache(),
    EngineFrozen(),
    PositionShift(),
    SamplerMismatchLogged(),
    PackingLeak(),
    SyncCorrupts(),
    RatioNoise(),
    UnboundedRatio(),
    ZeroVarianceShare(),
    ConstantReward(),
    EntropyCollapse(),
    KlBlowUp(),
    RewardCollapse(),
    LengthGrowth(),
    ClipSaturation(),
    GradientSpike(),
    LearningRate(),
    ThroughputFault(),
    Repetition(),
    LearningRateStops(),
    LevelChange(),
    EntropyJump(),
    KlNotHeld(),
    RewardNotMoved(),
)

RULES += offered("rolloutdoctor.rules", ("code", "judge", "quantities"), (rule.code for rule in RULES), "code")

FAMILIES = {
    "RDA": "advantages and baselines",
    "RDG": "gradients and KL",
    "RDI": "integrity",
    "RDM": "metrics",
    "RDO": "off-policy",
    "RDT": "dynamics of the training",
}


def pick(select: Sequence[str], ignore: Sequence[str]) -> tuple[AnyRule, ...]:
    """Return the rules that `select` names (all if it is empty) less those that `ignore` names.

    A name is a code, the start of one (``RDA``), or a rule's name.

    Raises:
        UsageError: if a name matches no rule.
    """
    for word in [*select, *ignore]:
        if not any(_matches(rule, word) for rule in RULES):
            known = [rule.code for rule in RULES] + [rule.name for rule in RULES]
            raise UsageError(f"no rule {word!r}{nearest(word, known)}; `rolloutdoctor rule` lists them")
    chosen = [rule for rule in RULES if not select or any(_matches(rule, word) for word in select)]
    return tuple(rule for rule in chosen if not any(_matches(rule, word) for word in ignore))


def find(word: str) -> AnyRule:
    """Return one rule by code or name.

    Raises:
        UsageError: if there is none.
    """
    for rule in RULES:
        if word.upper() == rule.code or word == rule.name:
            return rule
    known = [rule.code for rule in RULES] + [rule.name for rule in RULES]
    raise UsageError(
        f"no rule {word!r}{nearest(word.upper(), known) or nearest(word, known)}; `rolloutdoctor rule` lists them"
    )


def family(rule: AnyRule) -> str:
    """Return what a rule is about; of a rule of another package, that package."""
    return FAMILIES.get(rule.code[:3]) or f"of the package {type(rule).__module__.partition('.')[0]}"


def _matches(rule: AnyRule, word: str) -> bool:
    is_start = word[:2].upper() == "RD" or word.upper() == rule.code
    return rule.name == word or (is_start and rule.code.startswith(word.upper()))
