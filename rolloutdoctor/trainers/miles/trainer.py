"""miles, a dialect of slime: its flags with underscores, its objective, and its logged metrics.

Read and compared: release 0.1.0, whose formulas are those of main of 2026-08 (31f1ca96). Beside slime it bounds the
log-ratio, takes what is not finite for 0, groups by `group_index`, and gives all segments of one rollout one vote
(commits before 2026-08-12 gave every segment one).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rolloutdoctor.objective.objective import KlTerm, Objective
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.releases import ReadCode
from rolloutdoctor.trainers.slime import trainer as slime
from rolloutdoctor.trainers.slime.mis import MIS

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

BOUND = 20.0
"""Largest absolute log-ratio, of the policy term and of low_var_kl."""

ESTIMATORS = ("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")

_LATEST_SLIME = (0, 3, 2)
"""After slime's release 0.3.1, whose options work as miles' do."""

_HELPER = "examples/infra_features/train_infer_mismatch_helper/mis"
_SPELLINGS: dict[object, object] = {
    "miles.backends.training_utils.loss_hub.corrections.icepop_function": slime.ICEPOP,
    f"{_HELPER}.py:compute_mis_weights_with_cp": MIS,
    f"{_HELPER.replace('/', '.')}.compute_mis_weights_with_cp": MIS,
}

_NOT_IN_FILE = "a custom function is not part of the run file"


_SLICES = (
    "ranks that every row is cut over; above 1 normalize_advantages whitens the slices of each rank by themselves, "
    "which needs prompt_ids"
)


def _option(option: Option) -> Option:
    match option.name:
        case "advantage_estimator":
            return replace(option, choices=ESTIMATORS)
        case "custom_tis_function_path":
            return replace(option, spellings={**option.spellings, **_SPELLINGS})
        case "eps_clip_c":
            return replace(option, works_after=None, meaning="dual clip for negative advantages; null: none")
        case "context_parallel_size":
            return replace(option, meaning=_SLICES)
    return option


def _refused(name: str, meaning: str, why_not: str = _NOT_IN_FILE, default: object = None) -> Option:
    return Option(
        name,
        "any" if default is None else "flag",
        default,
        meaning,
        computed=(default,),
        decides=False,
        why_not=why_not,
    )


OPTIONS = (
    *(_option(option) for option in slime.OPTIONS if option.name != "custom_advantage_function_path"),
    Option(
        "skip_actor_forward_only",
        "flag",
        False,
        "the log-probs at the loss are the old ones too, so that every ratio is 1, unless use_rollout_logprobs",
        decides=False,
    ),
    Option(
        "qkv_format",
        "word",
        "thd",
        "rows that are packed, or padded to one length: then normalize_advantages with context parallelism is refused",
        choices=("thd", "bshd"),
        decides=False,
    ),
    Option("observe_training_entropy", "flag", False, "log train/entropy_loss, which is 0 without", decides=False),
    _refused("custom_reward_post_process_path", "a custom normalisation of rewards"),
    _refused("custom_convert_samples_to_train_data_path", "a custom conversion of samples"),
    _refused("multi_lora", "several adapters", "each adapter has a batch size of its own", default=False),
)


_NAMES = {"gae": "gae_of_trained", "discounted_token_returns": "discounted_returns_all_penalised"}
"""slime's estimators to those of miles, where they differ."""


def objective(config: Config) -> Objective:
    """Build what miles computes.

    Raises:
        UnstatedError: if nothing says which estimator it is.
        UsageError: for combinations that miles itself refuses.
    """
    config.needs("advantage_estimator")
    try:
        base = slime.objective(Config(_LATEST_SLIME, config.settings))
    except UsageError as error:
        raise UsageError(str(error).replace("slime", "miles")) from None
    assert base.kl_reward is not None  # slime's always has one
    skips = bool(config["skip_actor_forward_only"])
    if skips and (config.number("kl_coef") != 0 or config["use_rollout_entropy"]):
        raise UsageError("skip_actor_forward_only leaves nothing for kl_coef and use_rollout_entropy; miles refuses it")
    if skips and (config["use_opsm"] or base.sampler_correction is not None):
        raise UsageError("skip_actor_forward_only with use_opsm or mis is not computed by this version")
    surrogate = replace(base.surrogate, log_ratio_bound=BOUND, finite=True)
    if skips and not config["use_rollout_logprobs"]:
        surrogate = replace(surrogate, old="policy_log_probs")
    name = base.advantage.estimator
    rule = replace(base.advantage, estimator=_NAMES.get(name, name), batch_if_unequal=False, one_vote=True)
    if rule.whitened and rule.context_ranks > 1 and config["qkv_format"] != "thd":
        raise UsageError("normalize_advantages of slices of rows that are padded (qkv_format = bshd) is not computed")
    if rule.context_ranks > 1:
        rule = rule.whitened_by_slice(rule.context_ranks) or rule
    return replace(
        base,
        trainer="miles",
        version=".".join(map(str, config.version)),
        advantage=rule,
        surrogate=surrogate,
        kl_loss=None if base.kl_loss is None else _bounded(base.kl_loss),
        kl_reward=_bounded(base.kl_reward),
        gates=tuple(replace(gate, of="policy_log_probs") for gate in base.gates) if skips else base.gates,
        context_slices=1,
    )


def _bounded(term: KlTerm) -> KlTerm:
    # The estimator alone is bounded, and the ratio keeps its derivative.
    return replace(term, input_bound=None if term.clamp is None else BOUND, bounds_ratio=False, finite=True)


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """miles' logged metrics: slime's but for `rollout/kl`, and those that it makes in another way."""
    from rolloutdoctor.trainers.lazy import LazyMetrics

    return LazyMetrics({"rollout/": partial(_rollout, evaluation), "train/": partial(_train, evaluation)})


def _rollout(evaluation: "Evaluation") -> dict[str, float]:
    from rolloutdoctor.trainers.slime import metrics as slime_metrics

    metrics, rows = slime_metrics.rollout(evaluation), evaluation.rows
    if metrics.pop("rollout/entropy", None) is not None and rows is not None and rows.length_N is not None:
        entropy_T = evaluation.batch.column("entropy").to(evaluation.dtype)
        metrics["rollout/entropy"] = slime_metrics.row_means(evaluation, rows, entropy_T)
    return metrics


def _train(evaluation: "Evaluation") -> dict[str, float]:
    import torch

    from rolloutdoctor.evaluation.scores import sampler_correction_of
    from rolloutdoctor.formulas import kl
    from rolloutdoctor.ops import segments as seg
    from rolloutdoctor.trainers.slime import metrics as slime_metrics

    metrics = slime_metrics.train(evaluation)
    metrics.pop("train/entropy_loss", None)
    rows, tokens = evaluation.rows, evaluation.tokens
    if tokens is None or rows is None or rows.length_N is None:
        return metrics
    batch, objective, dtype = evaluation.batch, evaluation.objective, evaluation.dtype
    mask_T, length_N = batch.column("response_mask"), rows.length_N.clamp(min=1)

    def column(name: str) -> torch.Tensor:
        return torch.where(mask_T, batch.column(name).to(dtype), 0.0)

    def finite(x_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T & x_T.isfinite(), x_T, 0.0)

    # Rejected tokens are in no number of the loss.
    correction = sampler_correction_of(batch, objective, tokens.layout.micro_N, dtype)
    kept_T = mask_T if correction is None else correction.kept_T

    def reduced(x_T: torch.Tensor, where_T: torch.Tensor = kept_T) -> float:
        return float((seg.total(torch.where(where_T, x_T, 0.0), batch.rows) * tokens.weight_N).sum())

    old_T = column(objective.surrogate.old)
    drift_T = old_T - column("policy_log_probs")
    if objective.surrogate.level == "sequence":
        drift_T = seg.expand(seg.total(drift_T, batch.rows) / length_N, batch.rows).to(dtype)
    drift_T = finite(drift_T)
    metrics["train/ppo_kl"] = reduced(drift_T)
    if "train/ois" in metrics:
        metrics["train/ois"] = reduced(drift_T.neg().exp(), mask_T)
    if "rollout_log_probs" in batch.per_token:
        gap_T = old_T - column("rollout_log_probs")
        metrics["train/train_rollout_logprob_abs_diff"] = reduced(finite(gap_T.abs()))
        value_T = kl.term("k3", -gap_T, input_bound=BOUND, clamp=10.0, finite=True)[0]
        metrics["train/train_rollout_kl"] = reduced(finite(value_T))
    weight_T = torch.where(mask_T, drift_T.clamp(-BOUND, BOUND).neg().exp(), 0.0)
    square_N = seg.total(weight_T.square(), batch.rows).clamp(min=1e-8)
    # A row's share of its own tokens is reduced as a value that each of them has.
    share_N = seg.total(weight_T, batch.rows).square() / (length_N * square_N)
    of_tokens = objective.aggregation.mode.startswith("token-mean")
    row_weight_N = length_N * tokens.weight_N if of_tokens else tokens.layout.share_N / tokens.layout.trajectories_N
    metrics["train/ess_ratio"] = float((share_N * row_weight_N).sum())
    return metrics


_SLIME = slime.TRAINER

TRAINER = replace(
    _SLIME,
    name="miles",
    title="miles",
    newest="0.1.0",
    oldest="0.1.0",
    read=(ReadCode("0.1.0", commit="31f1ca961a94"),),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    log=replace(
        _SLIME.log,
        kl=("train/kl_loss",),
        marks=(frozenset({"train/ess_ratio"}), frozenset({"train/train_rollout_kl"})),
        quantities={name: kind for name, kind in _SLIME.log.quantities.items() if name != "rollout/kl"}
        | {"train/train_rollout_kl": "sampler_gap", "train/ess_ratio": "mean"},
        not_recomputed={name: why for name, why in _SLIME.log.not_recomputed.items() if not name.startswith("eval")}
        | {
            "train/entropy_loss": "it is 0, or with observe_training_entropy of the pass at the loss, which no row has",
            "rollout/zero_std/all_*, rollout/weight_version/*, rollout/tito_*": "they round rewards as Python writes "
            "them, or are not of the loss",
            "eval/*": "their names contain dataset names, which are not recorded",
        },
    ),
    recording={name: words.replace("slime", "miles") for name, words in _SLIME.recording.items()},
    roles=replace(_SLIME.roles, must_state={"advantage_estimator": "grpo"}),
    stored_kl=None,
)
