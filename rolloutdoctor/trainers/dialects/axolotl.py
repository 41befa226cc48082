"""axolotl's YAML: TRL's GRPOTrainer with `rl: grpo` or `rl: gdpo`.

Read: axolotl 067b021c, which requires TRL 1.8.0. ``HFRLTrainerBuilder._build_training_arguments``
(src/axolotl/core/builders/rl.py), ``GRPOStrategy.set_training_args_kwargs`` (core/trainers/grpo/__init__.py) and
``TRLConfig`` (utils/schemas/trl.py). Its ``AxolotlGRPOTrainer`` adds a scheduler, an optimizer and checkpoints to
TRL's; the other two trainers of it have advantages or a loss of their own.
"""

from rolloutdoctor.trainers.dialects.spec import Dialect

_SAME = (
    *("max_completion_length", "num_generations", "generation_batch_size", "scale_rewards", "reward_weights"),
    *("loss_type", "importance_sampling_level", "mask_truncated_completions", "num_iterations", "epsilon"),
    *("epsilon_high", "temperature", "top_p", "top_k", "min_p", "multi_objective_aggregation", "use_vllm"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "vllm_importance_sampling_correction"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_cap", "off_policy_mask_threshold"),
    *("use_bias_correction_kl", "beta"),
)
"""Keys of its section `trl` that are TRL's."""

_ASYNC = "axolotl's asynchronous GRPO has a loss of its own, which this version does not compute"
_PARALLEL = "axolotl's trainer for parallel contexts has advantages of its own, which this version does not compute"

DIALECT = Dialect(
    title="axolotl",
    trainer="trl",
    marks=frozenset({"base_model", "rl"}),
    names={
        "orpo_alpha": "beta",
        "rl_beta": "beta",
        **{f"trl.{name}": name for name in _SAME},
        "trl.use_liger_loss": "use_liger_kernel",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "logging_steps": "logging_steps",
    },
    implied={("rl", "gdpo"): {"multi_objective_aggregation": "normalize_then_sum"}},
    # It hands on the length even where that is null.
    defaults={"max_completion_length": None, "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64},
    only={
        "rl": (("grpo", "gdpo"), "axolotl runs no GRPO with it"),
        "trainer_cls": ((None,), "what a trainer of another package computes is not known here"),
        "trl.async_prefetch": ((False, None), _ASYNC),
        "trl.use_data_producer": ((False, None), _ASYNC),
        "async_prefetch": ((False, None), _ASYNC),
        "use_data_producer": ((False, None), _ASYNC),
        "context_parallel_size": ((1, None), _PARALLEL),
        "sequence_parallel_degree": ((1, None), _PARALLEL),
        "batch_size": ((None,), "write gradient_accumulation_steps instead, which axolotl computes from it"),
    },
    needed={"logging_steps": "the number of steps"},
    package="axolotl",
)
