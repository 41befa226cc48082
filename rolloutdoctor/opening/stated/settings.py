"""What a run states of itself beside the options of its objective: learning rate, batch sizes, length, seed."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from rolloutdoctor.metric_names.training_kind import names_distillation
from rolloutdoctor.results.findings import RunSetting

if TYPE_CHECKING:
    from rolloutdoctor.opening.stated.options import Stated

TITLES: Mapping[str, frozenset[str]] = {
    title: frozenset(names.split())
    for title, names in {
        "learning rate": "lr learning_rate actor_lr actor_learning_rate policy_lr lr_policy lr_actor max_lr "
        "policy_learning_rate learning_rate_policy optim.lr optim.optimizer.kwargs.lr",
        "critic learning rate": "critic_lr critic_learning_rate value_lr lr_value lr_critic",
        "smallest learning rate": "min_lr lr_min min_lr_ratio lr_end",
        "learning-rate schedule": "lr_scheduler_type lr_scheduler lr_decay_style lr_scheduler_name warmup_style "
        "lr_schedule scheduler_type scheduler scheduler.name",
        "warmup steps": "warmup_steps lr_warmup_steps num_warmup_steps lr_warmup_iters warmup_iters warmup_step_num",
        "warmup share": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio lr_warmup_fraction warmup_proportion "
        "warmup_steps_proportion",
        "optimizer": "optim optimizer optimizer.name optimizer_type optimizer_name optim_type optim_name",
        "weight decay": "weight_decay l2 wd",
        "Adam": "adam_beta1 adam_beta2 adam_epsilon adam_eps adam_betas betas beta1 beta2 optimizer.kwargs.eps",
        "gradient clipping": "max_grad_norm grad_clip clip_grad_norm clip_grad gradient_clipping max_norm "
        "gradient_clip_val grad_clip_norm",
        "group size": "group_size num_generations num_rollouts n_rollouts rollouts_per_prompt samples_per_prompt "
        "num_rollouts_per_prompt num_generations_per_question num_samples_per_prompt generations_per_prompt "
        "completions_per_prompt n_samples_per_prompt num_completions rollout.n rollout_n num_generations_per_prompt "
        "num_return_sequences_in_group num_return_sequences n_samples n_resp_per_prompt responses_per_prompt "
        "rollouts_per_example num_samples_per_prompt_rollout generations_per_sample gconfig.n_samples",
        "KL coefficient": "kl_coef kl_coeff kl_beta beta beta_kl kl_weight kl_penalty_coef kl_loss_coef "
        "init_kl_coef kl_coefficient kl_penalty_coefficient pref_beta dpo_beta kl_penalty_coeff lambda_kl kl_ctl "
        "kl_ctrl.kl_coef reference_policy_kl_penalty initial_kl_coef ppo_kl_coef kl_lambda kl_ctl_value "
        "algo.kl.init_coef",
        "KL estimator": "kl_loss_type kl_estimator kl_penalty kl_penalty_type reference_policy_kl_type kl_type",
        "KL in the loss": "use_kl_loss add_kl_loss",
        "KL in the reward": "use_kl_in_reward apply_kl_in_reward add_token_level_kl",
        "target KL": "target_kl kl_target ppo_target kl_ctrl.target_kl",
        "KL control": "adap_kl_ctrl kl_horizon horizon target kl_ctrl.horizon kl_ctrl.type use_kl_controller",
        "clip range": "clip_eps clip_epsilon eps_clip clip_range cliprange clip_ratio clip_param epsilon_clip "
        "ppo_clip clip_coef clip_coefficient ppo_epsilon pg_clip policy_clip_range epsilon",
        "lower clip range": "clip_ratio_low eps_clip_low cliprange_low clip_low pg_clip_low ratio_clip_min "
        "epsilon_low eps_clip_lower left_clip_range",
        "upper clip range": "clip_ratio_high eps_clip_high cliprange_high clip_high clip_higher pg_clip_high "
        "ratio_clip_max epsilon_high eps_clip_higher right_clip_range",
        "dual clip": "clip_ratio_c ratio_clip_c dual_clip dual_clip_loss eps_clip_c dual_clip_lower_bound",
        "bound of the ratio": "delta",
        "clip range of the value": "cliprange_value value_clip clip_range_vf vf_clip value_clip_range",
        "entropy coefficient": "entropy_coef entropy_coeff ent_coef entropy_bonus entropy_weight entropy_loss_coef "
        "entropy_coefficient entropy_beta",
        "value coefficient": "vf_coef value_coef critic_coef value_loss_coef value_coefficient",
        "discount": "gamma discount discount_factor gamma_discount",
        "GAE lambda": "lam gae_lambda lambd lambda",
        "advantage estimator": "adv_estimator advantage_estimator advantage_type adv_type estimator",
        "loss": "loss_type loss_agg_mode policy_loss_type loss_mode pg_variant loss_aggregation "
        "importance_sampling_level importance_sampling token_level_loss",
        "scale of the rewards": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards whiten_rewards reward_norm "
        "ppo_score_norm ppo_whiten_rewards reward_scaling use_score_norm use_score_scaling whiten_advantages "
        "normalize_advantages reward_scale norm_mean_type norm_std_type normalize_reward use_leave_one_out_baseline "
        "grpo_std_normalization std_normalization use_std_normalization",
        "epsilon of the advantage": "advantage_eps adv_eps advantage_epsilon",
        "limit of the rewards": "reward_clip cliprange_reward clip_reward_value score_clip advantage_clip adv_clip",
        "temperature": "temperature sampling_temperature rollout_temperature train_temperature",
        "top p": "top_p rollout_top_p",
        "top k": "top_k rollout_top_k",
        "min p": "min_p",
        "repetition penalty": "repetition_penalty",
        "prompt length limit": "max_prompt_length prompt_max_len max_prompt_len prompt_length max_input_length "
        "max_input_seq_length max_prompt_token_length rollout_max_prompt_len prompt_max_length max_prompt_tokens "
        "max_query_length",
        "response length limit": "max_new_tokens max_completion_length max_response_length max_gen_len "
        "response_length max_response_tokens max_answer_seq_len generate_max_len max_response_len "
        "rollout_max_response_len max_gen_tokens max_tokens max_completion_tokens max_output_tokens "
        "generate_max_length max_gen_length completion_length sampling_max_tokens",
        "length limit": "max_seq_length max_seq_len max_length max_model_len max_total_sequence_length "
        "sequence_length cutoff_len max_model_length seq_len seq_length vllm_max_model_length "
        "rollout_max_context_len",
        "passes over a batch": "ppo_epochs num_ppo_epochs n_updates_per_iteration num_iterations ppo_epoch "
        "mu_iterations ppo_buffer_size ppo_n_minibatches num_mini_batches epochs_per_rollout_batch",
        "mini-batch size": "mini_batch_size minibatch_size ppo_mini_batch_size",
        "micro-batch size": "per_device_train_batch_size per_device_training_batch_size micro_batch_size "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu micro_train_batch_size train_micro_batch_size micro_batch_size_per_gpu "
        "micro_batch_size_per_device_for_update per_device_batch_size train_micro_batch_size_per_gpu "
        "device_batch_size",
        "rollout batch size": "rollout_batch_size num_prompts_per_step gen_batch_size generation_batch_size "
        "micro_rollout_batch_size num_unique_prompts_rollout prompts_per_step steps_per_generation "
        "forward_batch_size prompts_per_rollout num_prompts_per_batch local_rollout_forward_batch_size "
        "over_sampling_batch_size examples_per_step",
        "batch size": "batch_size train_batch_size global_batch_size train_global_batch_size total_batch_size",
        "tokens of a micro-batch": "ppo_max_token_len_per_gpu max_tokens_per_gpu use_dynamic_bsz "
        "use_dynamic_batch_size max_tokens_per_mb log_prob_max_token_len_per_gpu",
        "evaluation batch size": "per_device_eval_batch_size eval_batch_size val_batch_size micro_eval_batch_size",
        "gradient accumulation": "gradient_accumulation_steps grad_accum grad_accum_steps grad_accumulation_steps "
        "gradient_accumulation accumulation_steps",
        "steps": "num_steps total_steps max_steps train_steps total_training_steps max_num_steps num_train_steps "
        "num_rollout num_updates num_training_steps max_train_steps n_steps total_train_steps n_grpo_steps",
        "epochs": "num_train_epochs total_epochs max_epochs num_epochs n_epochs num_epoch epochs max_num_epochs "
        "num_episodes total_episodes total_train_epochs train_epochs max_train_epochs",
        "seed": "seed data_seed random_seed random_state rollout_seed torch_seed data_loader_seed",
        "devices": "n_gpus_per_node num_gpus_per_node gpus_per_node num_gpus n_gpus world_size nproc_per_node "
        "num_processes actor_num_gpus_per_node rollout_num_gpus num_devices ref_num_gpus_per_node "
        "critic_num_gpus_per_node vllm_num_engines data_parallel_size num_gpu",
        "nodes": "nnodes num_nodes n_nodes actor_num_nodes num_machines ref_num_nodes critic_num_nodes",
        "model parallelism": "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size zero_stage "
        "actor.strategy strategy_name pipeline_model_parallel_size ulysses_sequence_parallel_size "
        "context_parallel_size rollout_num_gpus_per_engine expert_model_parallel_size",
        "precision": "bf16 fp16 dtype torch_dtype precision model_dtype param_dtype tf32 load_in_4bit load_in_8bit "
        "compute_dtype mixed_precision reduce_dtype pure_bf16 bnb_4bit_compute_dtype",
        "LoRA": "lora_rank lora_alpha lora_r lora_dropout max_lora_rank lora_target use_lora",
        "memory of the sampler": "gpu_memory_utilization vllm_gpu_memory_utilization",
        "sampler": "use_vllm vllm_mode vllm_importance_sampling_correction vllm_importance_sampling_cap "
        "rollout.name enforce_eager max_num_seqs max_num_batched_tokens enable_chunked_prefill free_cache_engine",
        "gradient checkpointing": "gradient_checkpointing enable_gradient_checkpointing use_gradient_checkpointing",
        "logging": "logging_steps log_interval log_freq logging_interval",
        "evaluation": "eval_steps test_freq val_period eval_freq eval_interval val_freq evaluation_steps "
        "val_before_train do_eval",
        "saving": "save_steps save_freq save_interval save_period checkpoint_interval save_total_limit",
        "truncated responses": "mask_truncated_completions overlong_filter filter_overlong_prompts "
        "overlong_filtering overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor "
        "overlong_buffer_len max_length_mask",
        "reference model": "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha disable_dropout",
        "reward weights": "reward_weights",
        "dynamic sampling": "use_dynamic_sampling dynamic_filtering filter_groups.enable filter_groups.metric "
        "filter_groups.max_num_gen_batches dynamic_filtering_reward_range dynamic_sampling",
        "warmup of the critic": "critic_warmup freezing_actor_steps",
        "offloading": "param_offload optimizer_offload grad_offload adam_offload offload_optimizer colocate_all_models",
        "padding": "use_remove_padding packing_samples sequence_packing",
    }.items()
}
"""What a setting is to the names that trainers and loops give it, in lower case; with a dot, the ends of names."""

_OF_A_CLASS = frozenset(
    name
    for names in (
        "optim optimizer scheduler lr_scheduler estimator lambda l2 wd delta epsilon beta1 beta2 betas dtype precision",
        "target bf16 fp16 tf32 max_length max_seq_length max_tokens top_k min_p repetition_penalty loss_type seed",
        "random_state save_steps logging_steps eval_steps epochs world_size kl_penalty prompt_length n_samples",
        "completion_length num_iterations num_return_sequences max_norm horizon scheduler_type n_steps seq_len",
    )
    for name in names.split()
)
"""Names that mean what they say among options, and may be anything in the code of a loop."""

_PARTS = {
    "critic": "of the critic",
    "ref": "of the reference",
    "reference": "of the reference",
    "ref_model": "of the reference",
    "reward": "of the reward model",
    "reward_model": "of the reward model",
    "rewards": "of the reward model",
    "rm": "of the reward model",
    "val_kwargs": "in evaluation",
    "validation": "in evaluation",
    "validate": "in evaluation",
    "eval": "in evaluation",
    "val": "in evaluation",
    "evaluation": "in evaluation",
    "teacher": "of the teacher",
}
"""Parts of a dotted name that say of what it is, where that is not the policy in training."""

_METHODS = ("grpo_", "ppo_", "rloo_", "rl_")
"""What loops put before the name of a setting of the method."""

_LONGEST, _MOST_PARTS = 60, 8
_WORD = re.compile(r"[\w .:+-]*")
"""Of a value: a path, or what names its user, is none of a setting."""


@cache
def _by_name() -> Mapping[str, str]:
    return {name: title for title, names in TITLES.items() for name in names}


def title_of(name: str) -> str:
    """Return what a setting is, by the end of its name; empty for any other.

    >>> title_of("actor_rollout_ref.actor.optim.lr"), title_of("critic.optim.lr"), title_of("Learning-Rate")
    ('learning rate', 'learning rate of the critic', 'learning rate')
    >>> title_of("actor_rollout_ref.rollout.n"), title_of("trainer.project_name"), title_of("GRPO_EPSILON")
    ('group size', '', 'clip range')
    """
    parts = name.lower().replace("-", "_").split(".")
    ends = [".".join(parts[at:]) for at in range(len(parts))]
    bare = [ends[-1].removeprefix(method) for method in _METHODS if ends[-1].startswith(method)]
    # ``grpo_epsilon`` is that of the method; ``ppo_horizon`` is not that of the KL.
    ends += [end for end in bare if end == "epsilon" or end not in _OF_A_CLASS]
    title = next((known_title for end in ends if (known_title := _by_name().get(end, ""))), "")
    whose = next((words for part in parts[:-1] if (words := _PARTS.get(part, ""))), "")
    return f"{title} {whose}".rstrip() if title else ""


def titled(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that are settings: numbers, flags, words, and lists of them."""
    return {name: value for name, value in values.items() if _is_setting(name, value)}


def _is_setting(name: str, value: object, options: Collection[str] = ()) -> bool:
    return names_distillation(name, value) or bool((title_of(name) or name in options) and _is_plain(value))


def own_title(name: str) -> str:
    """Return what a name in the code of a loop of one's own is; empty where it may be anything."""
    return "" if name.lower() in _OF_A_CLASS else title_of(name)


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= _MOST_PARTS and all(_is_plain(part) for part in value)
    if isinstance(value, str):
        return 0 < len(value.strip()) <= _LONGEST and _WORD.fullmatch(value) is not None and value not in _NOTHING
    return isinstance(value, (bool, int, float)) and abs(value) < 2**63


_NOTHING = ("None", "null", "none", "nil", "???")


def settings_of(
    stated: "Iterable[Stated]", used: Collection[str], options: Collection[str], tell: Callable[[str], None]
) -> tuple[RunSetting, ...]:
    """Return what places state beside the options of the objective; of two values of a name the first counts.

    Args:
        stated: the most certain first.
        used: names of options that the objective is made with.
        options: names of all options of the trainer.
        tell: takes what is not used, and why.
    """
    settings: dict[str, RunSetting] = {}
    for config in stated:
        for name, value in _of_place(config.values, options):
            if name in used:
                continue
            first = settings.setdefault(name, RunSetting(name, title_of(name), value, config.origin))
            if not _is_same(first.value, value):
                tell(f"{name} is {first.value} in {first.origin} and {value} in {config.origin}: the first is used")
    order = [*TITLES]
    return tuple(
        sorted(
            settings.values(), key=lambda setting: order.index(_of_any(setting.title)) if setting.title else len(order)
        )
    )


def _of_any(title: str) -> str:
    """Return a title without what it is of."""
    return next(prefix for prefix in sorted(TITLES, key=len, reverse=True) if title.startswith(prefix))


def _of_place(values: Mapping[str, object], options: Collection[str]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if _is_setting(name, value, options):
            yield name, read(value)


def read(value: object) -> object:
    """Return the number or the flag that a text is.

    >>> read("1e-6"), read("8"), read("True"), read("adamw_8bit"), read([1, "0.5"])
    (1e-06, 8, True, 'adamw_8bit', [1, 0.5])
    """
    if isinstance(value, list):
        return [read(part) for part in value]
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text) if "_" not in text and text.lower() not in ("nan", "inf", "infinity") else text
        except ValueError:
            continue
    return text


def _is_same(left: object, right: object) -> bool:
    return left == right or str(left) == str(right)
