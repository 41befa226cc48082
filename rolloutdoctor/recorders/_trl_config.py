"""TRL options that a run file keeps: those that change the maths, and no others."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from rolloutdoctor.io.metadata import RunMetadata

# An allow-list: a dump of all arguments would carry names, paths and tokens of the user along.
OPTIONS = (
    "loss_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "num_generations",
    "num_generations_eval",
    "scale_rewards",
    "multi_objective_aggregation",
    "reward_weights",
    "normalize_advantages",
    "reward_clip_range",
    "use_bias_correction_kl",
    "importance_sampling_level",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
    "max_completion_length",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "use_liger_kernel",
    "logging_steps",
    "learning_rate",
    "max_grad_norm",
    "optim",
    "adam_beta1",
    "seed",
)

# The trainer fills these in from the others where the arguments leave them open.
_RESOLVED_ON_TRAINER = ("num_generations_eval",)


class Trainer(Protocol):
    """The part of `trl.GRPOTrainer` and `trl.RLOOTrainer` that is read here."""

    args: Any
    accelerator: Any
    model: Any
    state: Any
    num_generations: int
    reward_func_names: list[str]
    reward_weights: Any


def is_rloo(trainer: Trainer) -> bool:
    """Tell TRL's RLOOTrainer and its subclasses."""
    return any(kind.__name__ == "RLOOTrainer" for kind in type(trainer).__mro__)


def metadata_of(trainer: Trainer, version: str) -> RunMetadata:
    """Return what a run file says of `trainer`: its version and the allow-listed options."""
    config: dict[str, object] = {}
    for name in OPTIONS:
        # Older releases lack some of them.
        if hasattr(trainer.args, name):
            config[name] = _json(getattr(trainer.args, name))
    for name in _RESOLVED_ON_TRAINER:
        if hasattr(trainer, name):
            config[name] = _json(getattr(trainer, name))
    if getattr(trainer, "aux_loss_enabled", False):
        # Left open, it is the model's own; the trainer knows. Without the auxiliary loss it means nothing.
        config["router_aux_loss_coef"] = _json(getattr(trainer, "router_aux_loss_coef", None))
    return RunMetadata(trainer="trl-rloo" if is_rloo(trainer) else "trl", trainer_version=version, config=config)


def _json(value: object) -> object:
    if isinstance(value, Enum):
        return _json(value.value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_json(item) for item in value]
    return str(value)
