"""ms-swift's GRPOTrainer: options of its `swift rlhf --rlhf_type grpo`, its objective, and its logged metrics.

Read and compared: 4.5.0 to 4.5.3, whose functions are those of main of 2026-08 (3602360a5623, 4.6.0.dev0), and 4.6.0.
4.6.0 takes back the engine's mean over micro-batches where it divides by all tokens of the generation, and leaves out
the statistics of a reward function that gave no reward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import eq
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.objective.corrections import RolloutCorrection, TermWeight
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, RowSet, Scope, Surrogate
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.spec import Choices, Log, PartOptions, Trace, Trainer, Updates, every
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.trl.options import END_METRICS, reuse, updates
from rolloutdoctor.trainers.trl.options import OPTIONS as TRL_OPTIONS

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_SHARED = {option.name: option for option in TRL_OPTIONS}

OF_GENERATION = "generation-token-mean"
OVER_MICRO_BATCHES = f"{OF_GENERATION}-over-micro-batches"
FIRST_WHOLE = (4, 6)
"""The first release that does not divide a token mean over the generation by the micro-batches of its steps."""

LOSS_TYPES = {
    "grpo": ("micro-batch-row-mean", "ppo_delta_clip"),
    "bnpo": ("micro-batch-token-mean", "ppo_delta_clip"),
    "dr_grpo": ("micro-batch-fixed-length", "ppo_delta_clip"),
    "dapo": (OF_GENERATION, "ppo_delta_clip"),
    "cispo": (OF_GENERATION, "cispo_capped"),
    "sapo": ("micro-batch-row-mean", "sapo"),
    "fipo": (OF_GENERATION, "ppo_delta_clip"),
}
"""Loss type to its aggregation and its policy term."""

LEVELS: dict[str, Literal["token", "sequence", "sequence-token"]] = {
    "token": "token",
    "sequence": "sequence",
    "sequence_token": "sequence-token",
}

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUND = 20.0
"""Largest absolute log-ratio of the sampler's weights."""

_SAPO: dict[str, tuple[object, ...]] = {"loss_type": ("sapo",)}
_FIPO: dict[str, tuple[object, ...]] = {"loss_type": ("fipo",)}
_TEACHER = "the teacher's log-probs are not in the rows"


def _absent(name: str, kind: Literal["any", "flag", "number"], off: object, meaning: str, why: str) -> Option:
    """Return an option of which no value is computed but the one that switches it off."""
    alone = name in ("use_liger_kernel", "sdar_loss_coef")
    return Option(name, kind, off, meaning, computed=(off,), decides=False, why_not=why, loss_alone=alone)


OPTIONS = (
    Option(
        "advantage_estimator",
        "word",
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "rloo", "reinforce_plus_plus"),
    ),
    Option(
        "scale_rewards",
        "word",
        None,
        "what centred rewards are divided by; null: group for grpo, none for rloo, batch for reinforce_plus_plus",
        choices=("group", "batch", "none", "gdpo"),
        spellings={True: "group", False: "none", "none": "none"},
    ),
    Option(
        "kl_in_reward",
        "flag",
        None,
        "subtract the KL of a response from its reward; null: with rloo and reinforce_plus_plus",
        only_with={"scale_rewards": (None, "group", "batch", "none")},
    ),
    Option("beta", "number", 0.04, "coefficient of the KL, in the loss or in the reward", low=0),
    Option(
        "loss_type",
        "word",
        "grpo",
        "how token terms become one loss",
        choices=(*LOSS_TYPES, "real"),
        computed=tuple(LOSS_TYPES),
        why_not="its terms are of the other responses to the prompt",
        loss_alone=True,
    ),
    _SHARED["epsilon"],
    _SHARED["epsilon_high"],
    _SHARED["delta"],
    Option(
        "importance_sampling_level",
        "word",
        "token",
        "one ratio per token or per sequence, or that of the sequence with the gradient of the token's (GSPO-token)",
        choices=tuple(LEVELS),
    ),
    _SHARED["top_entropy_quantile"],
    Option("tau_pos", "number", 1.0, "temperature of the sapo gate for positive advantages", only_with=_SAPO),
    Option("tau_neg", "number", 1.05, "temperature of the sapo gate for the other advantages", only_with=_SAPO),
    Option("fipo_decay_rate", "number", 32.0, "tokens after which a log-ratio counts half (fipo)", only_with=_FIPO),
    Option(
        "fipo_clip_range",
        "number",
        0.2,
        "how far the weight may be from 1 (null: unbounded)",
        only_with=_FIPO,
        optional=True,
        low=0,
    ),
    Option("fipo_clip_high_only", "flag", True, "the weight is 1 or more, where it is bounded", only_with=_FIPO),
    Option(
        "fipo_safety_threshold",
        "number",
        4.0,
        "ratio above which a token of negative advantage weighs 0.8 to 1",
        only_with=_FIPO,
        optional=True,
    ),
    Option(
        "real_tau",
        "number",
        0.5,
        "temperature of the scores (real)",
        decides=False,
        only_with={"loss_type": ("real",)},
    ),
    Option(
        "rollout_importance_sampling_mode",
        "word",
        None,
        "multiply policy and KL term by importance weights (trainer over sampler), truncated or set to 0",
        choices=MODES,
    ),
    Option(
        "rollout_importance_sampling_threshold",
        "number",
        2.0,
        "largest importance weight, of a token or the geometric mean of a row",
        low=0,
        only_with={"rollout_importance_sampling_mode": MODES},
    ),
    Option("log_rollout_offpolicy_metrics", "flag", False, "log rollout_correction/* without weights", decides=False),
    Option(
        "off_policy_sequence_mask_delta",
        "number",
        None,
        "drop rows of negative advantage whose mean log-prob fell by more than this since sampling; null: none",
    ),
    Option("overlong_filter", "flag", False, "fully mask truncated responses in the loss"),
    Option("reward_weights", "numbers", None, "weight of each reward function", decides=False),
    Option(
        "dynamic_sample",
        "flag",
        False,
        "replace groups without a spread of rewards; a run file has the rows that remain",
        decides=False,
    ),
    _SHARED["num_generations"],
    _SHARED["num_generations_eval"],
    _SHARED["max_completion_length"],
    _SHARED["num_iterations"],
    _SHARED["gradient_accumulation_steps"],
    _SHARED["steps_per_generation"],
    replace(_SHARED["logging_steps"], default=5),
    Option("log_entropy", "flag", False, "log entropy/mean, entropy/max and entropy/min", decides=False),
    _SHARED["sync_ref_model"],
    _SHARED["ref_model_sync_steps"],
    _SHARED["ref_model_mixup_alpha"],
    replace(_SHARED["temperature"], default=0.9),
    Option("top_p", "number", 1.0, "probability that the sampler keeps", decides=False),
    Option("top_k", "integer", -1, "tokens that the sampler keeps; -1: all", optional=True, decides=False),
    Option("use_vllm", "flag", False, "sample with vLLM", decides=False),
    _absent("use_liger_kernel", "flag", False, "Liger's fused loss", "the fused loss was not compared"),
    _absent("teacher_model", "any", None, "on-policy distillation from a teacher", _TEACHER),
    _absent("teacher_model_server", "any", None, "on-policy distillation from a teacher", _TEACHER),
    _absent("advantage_reweight", "any", None, "reweigh advantages by a teacher (rlsd)", _TEACHER),
    _absent("sdar_loss_coef", "number", 0.0, "coefficient of a distillation loss", _TEACHER),
    Option(
        "chord_sft_dataset",
        "any",
        None,
        "mix in a supervised loss",
        computed=(None, [], ""),
        decides=False,
        why_not="the supervised rows are not recorded",
        loss_alone=True,
    ),
    _SHARED["router_aux_loss_coef"],
)


def objective(config: Config) -> Objective:
    """Build what GRPOTrainer computes.

    Raises:
        UsageError: if options contradict each other, or ask for what is not computed.
    """
    loss_type, beta = config.word("loss_type"), config.number("beta")
    mode, kind = LOSS_TYPES[loss_type]
    of_generation = mode == OF_GENERATION
    divides_again = of_generation and config.version < FIRST_WHOLE
    if of_generation:
        mode = OVER_MICRO_BATCHES if divides_again else f"{OF_GENERATION}-unscaled"
    length = config.optional_number("max_completion_length")
    if loss_type == "dr_grpo" and length is None:
        raise UsageError("loss_type = dr_grpo divides by max_completion_length: set it to a whole number")
    overlong = bool(config["overlong_filter"])
    advantage, in_reward = _advantage(config), _is_in_reward(config)
    by_micro_batch = divides_again or mode == "micro-batch-token-mean" or config.number("top_entropy_quantile") < 1
    low, high = trl.clip_range(config)
    return Objective(
        trainer="ms-swift",
        version=".".join(map(str, config.version)),
        advantage=advantage,
        surrogate=Surrogate(
            kind=kind,
            clip_low=low,
            clip_high=high,
            cap=config.optional_number("delta"),
            level=LEVELS[config.word("importance_sampling_level")],
            numbers={name: config.number(name) for name in ("tau_pos", "tau_neg") if kind == "sapo"},
        ),
        aggregation=Aggregation(
            mode=mode,
            length=None if length is None else int(length),
            counted_in_loss=not of_generation,
            # The tokens of a generation are counted before truncated responses are masked.
            counted_before_rejection=overlong and of_generation,
            # What the mask of rows takes out leaves the denominator of its micro-batch too.
            counted_in_gates=loss_type == "bnpo" and config["off_policy_sequence_mask_delta"] is not None,
            needs_micro_batches=by_micro_batch and config["gradient_accumulation_steps"] != 1,
            eval_batches=True,
        ),
        kl_loss=None if beta == 0 or in_reward else KlTerm(estimator="k3_clamped", coef=beta),
        kl_reward=KlTerm(estimator="k1", coef=beta, log_probs="old_log_probs", masked=True, of_trained=not overlong)
        if in_reward and beta != 0
        else None,
        correction=RolloutCorrection(rejects=overlong),
        gates=_gates(config),
        reward_weights=cast("tuple[float, ...] | None", config["reward_weights"]),
        baseline_rows=Scope().leaving_out(RowSet.UNSCORED),
        metric_columns=trl.METRIC_COLUMNS | {"rollout_log_probs"},
        unknown_loss="; ".join(_losses_not_computed(config)),
    )


def _losses_not_computed(config: Config) -> Iterator[str]:
    """Yield what of options together leaves the loss unknown."""
    if config["overlong_filter"] and config.number("top_entropy_quantile") < 1:
        yield unknown_loss(
            "top_entropy_quantile with overlong_filter",
            "its quantile is over tokens that the mask of the loss does not have",
        )


def release_decides(config: Config) -> str:
    """Say why the loss depends on the release; empty where it does not."""
    mode, _ = LOSS_TYPES.get(config.word("loss_type"), ("", ""))
    if mode != OF_GENERATION or config["gradient_accumulation_steps"] == 1:
        return ""
    return (
        f"ms-swift before 4.6.0 divides {config['loss_type']} by gradient_accumulation_steps once more, and nothing "
        "states the release: pass it with --trainer ms-swift@VERSION"
    )


def _scale(config: Config) -> str:
    defaults = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
    value = config["scale_rewards"]
    return defaults[config.word("advantage_estimator")] if value is None else str(value)


def _is_in_reward(config: Config) -> bool:
    value = config["kl_in_reward"]
    wanted = config.word("advantage_estimator") != "grpo" if value is None else bool(value)
    return wanted and _scale(config) != "gdpo"


def _advantage(config: Config) -> AdvantageRule:
    """Build how rewards become advantages."""
    estimator, scale = config.word("advantage_estimator"), _scale(config)
    plus_plus = estimator == "reinforce_plus_plus"
    named = scale == "gdpo" and not plus_plus
    weights = cast("tuple[float, ...] | None", config["reward_weights"])
    # reinforce_plus_plus divides by the deviation of what is centred by group; it knows no gdpo, and divides nothing.
    of_batch = plus_plus and scale == "batch"
    divisor = scale if scale in ("group", "batch") and not of_batch else "none"
    leave_one_out = "rloo" if divisor == "none" else "rloo_scaled"
    return AdvantageRule(
        estimator="normalize_then_sum" if named else leave_one_out if estimator == "rloo" else "grpo",
        scale=cast(Literal["group", "batch", "none"], divisor),
        epsilon=1e-8 if named else trl.EPSILON,
        singleton="zero",
        sums_tokens=_is_in_reward(config),
        normalised=of_batch,
        reward_weights=(weights or ()) if named else (),
    )


def _gates(config: Config) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term and the KL term."""
    gates = []
    share, drift = config.number("top_entropy_quantile"), config.optional_number("off_policy_sequence_mask_delta")
    if config.word("loss_type") == "fipo":
        gates.append(_influence(config))
    if share < 1:
        gates.append(TermWeight(kind="high_entropy", high=share, of_rank=True))
    mode = config["rollout_importance_sampling_mode"]
    high = config.number("rollout_importance_sampling_threshold")
    weight = TermWeight(kind="importance", high=high, log_ratio_bound=BOUND, on_kl=True)
    if mode in ("token_truncate", "token_mask"):
        gates.append(replace(weight, outside="cut" if mode == "token_truncate" else "zero"))
    elif mode == "sequence_truncate":
        gates.append(replace(weight, level="geometric"))
    elif mode == "sequence_mask":
        gates += [replace(weight, high=None), replace(weight, level="geometric", outside="zero", indicator=True)]
    if drift is not None:
        against: Literal["rollout_log_probs", "old_log_probs"]
        against = "rollout_log_probs" if config["use_vllm"] else "old_log_probs"
        gates.append(TermWeight(kind="off_policy", against=against, high=drift, on_kl=True))
    return tuple(gates)


def _influence(config: Config) -> TermWeight:
    """Build fipo's weight by the tokens that follow.

    Raises:
        UsageError: for a decay rate of 0 or less, by which ms-swift divides.
    """
    rate = config.number("fipo_decay_rate")
    if rate <= 0:
        raise UsageError(f"fipo_decay_rate = {rate:g}: a number of tokens above 0 is expected")
    span = config.optional_number("fipo_clip_range")
    low = 1.0 if config["fipo_clip_high_only"] else 1 - (span or 0.0)
    return TermWeight(
        kind="future_kl",
        decay=2 ** (-1 / rate),
        low=low if span else None,
        high=1 + span if span else None,
        cap=config.optional_number("delta"),
        safe_ratio=config.optional_number("fipo_safety_threshold"),
    )


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """ms-swift's logged metrics: `reward*`, `completions/*`, `loss`, `kl`, `clip_ratio/*`, `rollout_correction/*`."""
    from rolloutdoctor.trainers.ms_swift import metrics as swift_metrics

    return swift_metrics.grpo(evaluation)


_RECORDER = (
    "log_completions = true writes texts, rewards and advantages; record the rest with "
    "rolloutdoctor.recorders.own_loop in GRPOTrainer._compute_loss_and_metrics"
)
_STATE = "give OUTPUT_DIR/logging.jsonl or OUTPUT_DIR/checkpoint-N/trainer_state.json as well"

_MARKS = ("train_speed(s/it)", "global_step/max_steps", "entropy/mean", "rollout_correction/kl")
"""Metrics that TRL, whose other names it has, does not log."""

TRAINER = Trainer(
    name="ms-swift",
    title="ms-swift",
    newest="4.6.0",
    oldest="4.5.0",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=trl.group_size,
    release_decides=release_decides,
    log=Log(
        loss="loss",
        grad_norm="grad_norm",
        kl=("kl",),
        loss_is_whole=True,
        zero_std="frac_reward_zero_std",
        ends=END_METRICS,
        quantities={
            "loss": "loss",
            "kl": "kl",
            "reward": "rewards",
            "reward_std": "rewards",
            "frac_reward_zero_std": "zero_std",
            "entropy/*": "entropy",
            "rewards/*": "rewards",
            "rollout_correction/*": "sampler_gap",
            "fipo/*": "mean",
            "clip_ratio/*_mean": "clip_share",
            "clip_ratio/*": "clip_extreme",
            "cispo_clip_ratio": "clip_share",
        },
        not_recomputed={
            "grad_norm": "the norm of the parameters' gradient needs the model",
            "learning_rate, epoch, memory*, train_speed*, global_step/max_steps": "they come from schedule and clock",
            "sdar/*, teacher_kl, rlsd_lambda, clip_ratio": "they belong to losses that are not computed",
            "num_turns": "turns are not in the rows",
        },
        generation=("reward", "reward_std", "rewards/*", "frac_reward_zero_std", "completions/*"),
        instant=trl.TRAINER.log.instant,
        traces=(
            Trace("kl", "beta", lambda beta: beta != 0, "where beta is above 0", nonzero=True),
            Trace("cispo_clip_ratio", "loss_type", partial(eq, "cispo"), "with loss_type = cispo", value="cispo"),
        ),
        # TRL's names but for these; `num_tokens` is TRL's own.
        marks=tuple(frozenset({mark}) for mark in (*_MARKS, "memory(GiB)")),
        file="logging.jsonl",
    ),
    recording={
        "ref_log_probs": f"{_RECORDER}, with beta > 0 so that there is a reference model",
        "rollout_log_probs": f"{_RECORDER}, with use_vllm so that the sampler gives log-probs",
        "*": _RECORDER,
        "metrics": _STATE,
    },
    roles=replace(
        trl.TRAINER.roles,
        truncation="overlong_filter",
        must_state={"advantage_estimator": "grpo", "scale_rewards": None},
    ),
    updates=Updates(per_generation=updates, reuse=reuse),
    parts={
        Part.KL_LOSS: PartOptions({"beta": (0,), "kl_in_reward": (True,)}),
        Part.KL_REWARD: PartOptions({"beta": (0,), "kl_in_reward": (False,), "scale_rewards": ("gdpo",)}),
        Part.GROUP_STD: PartOptions({"scale_rewards": ("batch", "none")}),
        Part.POLICY_LOSS: PartOptions({"loss_type": ()}),
    },
    choices=Choices(
        advantage=(
            *every(
                advantage_estimator=("grpo",), scale_rewards=("group", "batch", "none", "gdpo"), kl_in_reward=(False,)
            ),
            *every(advantage_estimator=("rloo",), scale_rewards=("none",), kl_in_reward=(False,)),
            *every(advantage_estimator=("reinforce_plus_plus",), scale_rewards=("batch",), kl_in_reward=(False,)),
        ),
        penalty=(
            *every(advantage_estimator=("grpo",), scale_rewards=("group",), kl_in_reward=(True,)),
            *every(advantage_estimator=("rloo",), scale_rewards=("none",), kl_in_reward=(True,)),
            *every(advantage_estimator=("reinforce_plus_plus",), scale_rewards=("batch",), kl_in_reward=(True,)),
        ),
        penalty_option="beta",
        weights_option="reward_weights",
        kl=every(kl_in_reward=(False,)),
        loss=every(loss_type=tuple(LOSS_TYPES), importance_sampling_level=tuple(LEVELS)),
    ),
    aliases=trl.ALIASES,
    masks_by_product=True,
)
