"""Every option of the real trainers is understood, refused with a reason, or named here: no number depends on it.

Given rows with their log-probs, masks, rewards and values, most options of a trainer are settled: how rows were sampled
and scored, what model gave the log-probs, how the optimizer went on from the gradient. Those are listed. An option that
a new version brings is in no list, and fails here.
"""

import dataclasses

import pytest

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


def words(text: str) -> set[str]:
    return set(text.split())


SAMPLING = words("""
    cache_implementation chat_template_kwargs generation_kwargs repetition_penalty
    transformers_continuous_batching_config use_transformers_continuous_batching
    use_transformers_paged
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size
""")
"""How completions are sampled; the log-probs in the rows are already at the temperature."""
MODEL = words("""
    disable_dropout ds3_gather_for_generation model_init_kwargs pad_to_multiple_of shuffle_dataset trust_remote_code
""")
"""What gives the log-probs; `ref_log_probs` are those of the reference as it was."""
LOGGING = words("log_completions log_multimodal log_unique_prompts num_completions_to_print")
INERT = {
    "trl": SAMPLING
    | MODEL
    | LOGGING
    | words("cast_lm_head_to_fp32 log_completions_hub_repo max_tool_calling_iterations")
    # Whether a step was above it is in the coefficient that the step logged.
    | words("entropy_target"),
    "trl-rloo": SAMPLING | MODEL | LOGGING,
}
RUNNER = words("""
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta2 adam_epsilon
    auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
    do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
    full_determinism gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
    hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
    include_num_input_tokens_seen label_names label_smoothing_factor learning_rate length_column_name
    liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node
    logging_first_step logging_nan_inf_filter logging_strategy lr_scheduler_kwargs lr_scheduler_type max_steps
    metric_for_best_model neftune_noise_alpha num_train_epochs optim_args optim_target_modules output_dir
    parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
    push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint
    run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics
    tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu warmup_steps weight_decay
""")
"""The runner that TRL's trainers share: which batch on which device, and what the optimizer makes of the gradient. Its
own loss is replaced, and with it go `label_smoothing_factor` and `average_tokens_across_devices`."""

ACTOR = "actor_rollout_ref.actor"
VERL_INERT = {
    # Which groups are sampled again; the rows are those that were kept.
    "algorithm.filter_groups": words("max_inflight_gen_batches max_num_gen_batches"),
    # Only with use_pf_ppo, which is refused; loss_type never reaches the loss.
    "algorithm": words("pf_ppo"),
    "algorithm.rollout_correction": words("loss_type"),
    ACTOR: words("""
        calculate_entropy calculate_sum_pi_squared checkpoint data_loader_seed engine entropy_checkpointing
        entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower fsdp_config
        global_batch_info grad_clip megatron model_config optim pad_to_length
        ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
        ppo_micro_batch_size ppo_micro_batch_size_per_gpu profile profiler qat rollout_n shuffle strategy
        ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels use_prefix_grouper use_remove_padding
        use_rollout_log_probs use_torch_compile
    """),
    # Only in bypass mode, which the trainer's own option of this name turns on.
    f"{ACTOR}.policy_loss.rollout_correction": words("bypass_mode"),
}
VERL_SECTIONS = words("""
    actor_rollout_ref.hybrid_engine actor_rollout_ref.model actor_rollout_ref.nccl_timeout actor_rollout_ref.ref
    custom_reward_function data global_profiler ray_kwargs reward reward_model sandbox_fusion skip transfer_queue
""")
"""Parts of verl's configuration that say how rows are made, placed and scored."""


def own(trainer: str) -> set[str]:
    spec = table.TRAINERS[trainer]
    return {option.name for option in spec.options if option.exists_at(parse_version(spec.newest))}


def names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)} - {"_target_"}


def trl_configs() -> dict[str, type]:
    trl = pytest.importorskip("trl")
    return {"trl": trl.GRPOConfig, "trl-rloo": trl.RLOOConfig}


@pytest.mark.parametrize("trainer", INERT)
def test_every_field_of_trl(trainer):
    from transformers import TrainingArguments

    fields, runner = names(trl_configs()[trainer]), names(TrainingArguments)
    understood = own(trainer)
    assert understood <= fields
    assert fields - runner - understood == INERT[trainer]
    # RLOOTrainer has no fused loss, and no KL term whose share of Adam's first moment could be told.
    of_grpo = {"use_liger_kernel", "optim", "adam_beta1", "max_grad_norm"}
    assert runner - RUNNER - understood == (of_grpo if trainer == "trl-rloo" else set())
    assert not RUNNER & own("trl")


@pytest.mark.parametrize("trainer", INERT)
def test_defaults_of_trl(trainer):
    defaults = {field.name: field.default for field in dataclasses.fields(trl_configs()[trainer])}
    spec = table.TRAINERS[trainer]
    for option in spec.options:
        if not option.exists_at(parse_version(spec.newest)):
            continue
        upstream = defaults[option.name]
        assert option.default_at(parse_version(spec.newest)) == option.read(upstream, "upstream"), option.name


def verl_sections() -> dict[str, set[str]]:
    """Fields of the dataclasses that verl makes of its configuration, by the section's name."""
    pytest.importorskip("verl.trainer.config")
    from verl.trainer.config import algorithm
    from verl.workers import config

    actors = (config.ActorConfig, config.FSDPActorConfig, config.McoreActorConfig)
    return {
        "algorithm": names(algorithm.AlgoConfig),
        "algorithm.kl_ctrl": names(algorithm.KLControlConfig),
        "algorithm.filter_groups": names(algorithm.FilterGroupsConfig),
        "algorithm.rollout_correction": names(algorithm.RolloutCorrectionConfig),
        ACTOR: set().union(*map(names, actors)),
        f"{ACTOR}.policy_loss": names(config.PolicyLossConfig),
        f"{ACTOR}.policy_loss.rollout_correction": names(algorithm.RolloutCorrectionConfig),
    }


def test_every_field_of_verl():
    sections, understood = verl_sections(), own("verl")
    for section, fields in sections.items():
        nested = {each.removeprefix(f"{section}.") for each in sections if each.startswith(f"{section}.")}
        known = {name.removeprefix(f"{section}.") for name in understood if name.rpartition(".")[0] == section}
        assert known <= fields, section
        inert = VERL_INERT.get(section, set())
        assert fields - known - nested <= inert <= fields, section


def test_every_section_of_verl():
    yaml = pytest.importorskip("yaml")
    from pathlib import Path

    import verl.trainer.config

    folder = Path(verl.trainer.config.__file__).parent
    whole = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8"))
    sections = {name for name in whole if name != "actor_rollout_ref"}
    sections |= {f"actor_rollout_ref.{name}" for name in whole["actor_rollout_ref"]}
    walked = {"algorithm", ACTOR, "actor_rollout_ref.rollout", "critic", "trainer", "distillation"}
    assert sections - walked == VERL_SECTIONS

    def default(name):
        found = whole
        for part in name.split("."):
            found = found[part] if isinstance(found, dict) and part in found else pytest
        return found

    spec, compared = table.TRAINERS["verl"], set()
    for option in spec.options:
        upstream = default(option.name)
        # A reference to another option is not a value.
        if upstream is not pytest and not str(upstream).startswith("${"):
            mine = option.default_at(parse_version(spec.newest))
            assert mine is None or mine == option.read(upstream, "upstream"), option.name
            compared.add(option.name)
    assert len(compared) > 30


@pytest.mark.parametrize("trainer", table.TRAINERS)
def test_what_is_not_computed_is_an_error_with_a_reason(trainer):
    """In a file of the trainer's own too, where other options are passed over."""
    spec = table.TRAINERS[trainer]
    refused = [option for option in spec.options if option.computed is not None]
    if not refused:
        pytest.skip("it refuses no option by its value alone")
    for option in refused:
        assert option.why_not != type(option).why_not, option.name
        others = {"flag": True, "number": 0.25, "integer": 7, "any": "mine.py"}
        choices = [choice for choice in option.choices if choice not in option.computed]
        value = choices[0] if choices else others.get(option.kind, "mine.py")
        for strict in (True, False):
            layer = Layer("test", {option.name: value}, strict=strict)
            if option.loss_alone:
                continue  # `test_unknown_loss.py`
            with pytest.raises(UsageError, match="computed: "):
                resolve(spec.options, parse_version(spec.newest), [layer], trainer=trainer)
