"""Options of TRL's GRPOConfig, under its own names."""

from math import inf

from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import AdamOptions
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES

_WEIGHTED: dict[str, tuple[object, ...]] = {"use_vllm": (True,), "vllm_importance_sampling_correction": (True,)}

OPTIONS = (
    Option(
        "loss_type",
        "word",
        "dapo",
        "how token terms become one loss",
        choices=tuple(LOSS_TYPES),
        changes=(("0.16", "grpo"), ("0.22", "bnpo")),
        since="0.17",
        values_since={name: loss_type.since for name, loss_type in LOSS_TYPES.items()},
    ),
    Option("beta", "number", 0.0, "coefficient of the KL term in the loss", low=0, changes=(("0.19", 0.04),)),
    Option(
        "use_bias_correction_kl",
        "flag",
        True,
        "multiply the KL by the importance ratio, gradient included",
        changes=(("1.10.0", False),),
        since="0.26",
    ),
    Option(
        "scale_rewards",
        "word",
        "group",
        "which standard deviation divides the centred rewards: group, batch or none",
        choices=("group", "batch", "none"),
        spellings={True: "group", False: "none", "true": "group", "false": "none", "True": "group", "False": "none"},
        since="0.16",
        values_since={"batch": "0.22"},
    ),
    Option(
        "multi_objective_aggregation",
        "word",
        "sum_then_normalize",
        "how several reward functions become one advantage",
        choices=("sum_then_normalize", "normalize_then_sum"),
        since="0.27",
    ),
    Option("reward_weights", "numbers", None, "weight of each reward function", decides=False, since="0.15"),
    Option("epsilon", "number", 0.2, "lower clip range of the importance ratio", low=0, since="0.16"),
    Option(
        "epsilon_high", "number", None, "upper clip range of the importance ratio; null: epsilon", low=0, since="0.16"
    ),
    Option("delta", "number", None, "upper bound of the ratio outside the clip; null: none", low=0, since="0.18"),
    Option(
        "importance_sampling_level",
        "word",
        "token",
        "one ratio per token or per sequence",
        choices=("token", "sequence"),
        since="0.20",
    ),
    Option("num_generations", "integer", 8, "responses per prompt in training", low=2),
    Option(
        "num_generations_eval",
        "integer",
        None,
        "responses per prompt in evaluation; null: as in training",
        low=1,
        since="0.26",
    ),
    Option(
        "max_completion_length",
        "integer",
        512,
        "fixed length that dr_grpo divides by",
        low=1,
        optional=True,
        changes=(("1.10", 256),),
    ),
    Option(
        "generation_batch_size",
        "integer",
        None,
        "responses per generation, of all ranks",
        low=1,
        decides=False,
        since="0.18",
    ),
    Option("mask_truncated_completions", "flag", False, "fully mask truncated responses", decides=False, since="0.17"),
    Option(
        "sync_ref_model",
        "flag",
        False,
        "mix the policy into the reference now and then",
        decides=False,
        since="0.15",
    ),
    Option(
        "ref_model_sync_steps",
        "integer",
        512,
        "optimizer steps from one such sync to the next",
        decides=False,
        changes=(("0.16", 64),),
        since="0.15",
    ),
    Option(
        "ref_model_mixup_alpha",
        "number",
        0.6,
        "share of the policy in such a mixture",
        decides=False,
        changes=(("0.16", 0.9),),
        since="0.15",
    ),
    Option(
        "gradient_accumulation_steps",
        "integer",
        1,
        "micro-batches per optimizer step",
        low=1,
        decides=False,
        changes=(("0.15", 8),),
    ),
    Option("steps_per_generation", "integer", None, "micro-batches per generation", low=1, decides=False, since="0.18"),
    Option(
        "num_iterations",
        "integer",
        1,
        "optimisation passes over each generated batch",
        low=1,
        decides=False,
        since="0.16",
    ),
    Option(
        "logging_steps",
        "number",
        10,
        "optimizer steps that a logged line averages over",
        low=0,
        changes=(("0.19", 500),),
    ),
    Option(
        "top_entropy_quantile",
        "number",
        1.0,
        "share of tokens, by entropy, that carry the policy term",
        low=0,
        high=1,
        since="0.20",
    ),
    Option(
        "off_policy_mask_threshold",
        "number",
        None,
        "mask rows of negative advantage whose mean log-prob dropped by more than this since sampling; null: none",
        since="0.27",
    ),
    *(option for loss_type in LOSS_TYPES.values() for option in loss_type.numbers.values()),
    Option(
        "temperature",
        "number",
        1.0,
        "of the sampler; from 0.16 on logits are divided by it for every log-prob",
        decides=False,
        changes=(("0.18", 0.9),),
    ),
    Option("top_p", "number", 1.0, "probability that the sampler keeps", decides=False, since="0.16"),
    Option(
        "top_k",
        "integer",
        0,
        "tokens that the sampler keeps; 0: all",
        optional=True,
        decides=False,
        changes=(("0.18", 50), ("0.27", None)),
        since="0.16",
    ),
    Option(
        "min_p",
        "number",
        None,
        "share of the largest probability below which the sampler drops a token; null: none",
        decides=False,
        since="0.16",
    ),
    Option("use_vllm", "flag", False, "sample with vLLM", decides=False),
    Option(
        "vllm_importance_sampling_correction",
        "flag",
        True,
        "multiply the policy term by importance weights (trainer over sampler) if vLLM samples",
        only_with={"use_vllm": (True,)},
        changes=(("0.23", False),),
        since="0.23",
    ),
    Option(
        "vllm_importance_sampling_mode",
        "word",
        "sequence_mask",
        "one weight per token or per row; outside the bounds it is truncated or set to 0",
        choices=("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"),
        only_with=_WEIGHTED,
        changes=(("0.26", "token_truncate"),),
        since="0.26",
    ),
    Option(
        "vllm_importance_sampling_clip_max",
        "number",
        3.0,
        "largest weight; null: none",
        optional=True,
        only_with=_WEIGHTED,
        since="1.6",
    ),
    Option(
        "vllm_importance_sampling_clip_min",
        "number",
        None,
        "smallest weight; null: none",
        only_with=_WEIGHTED,
        since="1.6",
    ),
    Option(
        "vllm_importance_sampling_cap",
        "number",
        None,
        "older name of vllm_importance_sampling_clip_max; takes precedence over it",
        only_with=_WEIGHTED,
        changes=(("0.26", 2.0), ("1.6", 3.0)),
        since="0.23",
    ),
    Option(
        "use_liger_kernel",
        "flag",
        False,
        "use Liger's fused kernels; from 0.25 to before 1.14.0 they compute a different loss",
        decides=False,
    ),
    Option(
        "use_liger_loss",
        "flag",
        False,
        "older name of use_liger_kernel, for the loss",
        optional=True,
        decides=False,
        since="0.17",
        until="0.28",
    ),
    Option(
        "entropy_coef",
        "number",
        0.0,
        "coefficient of the entropy bonus; the first one where it adapts",
        since="1.8",
    ),
    Option(
        "use_adaptive_entropy",
        "flag",
        False,
        "adapt the entropy coefficient from step to step",
        decides=False,
        since="1.8",
    ),
    *(
        Option(
            f"entropy_coef_{name}",
            "number",
            default,
            meaning,
            only_with={"use_adaptive_entropy": (True,)},
            since="1.8",
        )
        for name, default, meaning in (
            ("min", 0.0, "smallest entropy coefficient"),
            ("max", 1.0, "largest entropy coefficient"),
            ("delta", 0.005, "how far the entropy coefficient moves at each step"),
        )
    ),
    Option("optim", "word", "adamw_torch_fused", "the optimizer", decides=False, changes=(("0.19", "adamw_torch"),)),
    Option("adam_beta1", "number", 0.9, "decay rate of Adam's first moment", low=0, high=1, decides=False),
    Option(
        "max_grad_norm",
        "number",
        1.0,
        "clip the gradient at this norm; 0 or null: never",
        low=0,
        optional=True,
        decides=False,
    ),
    Option(
        "router_aux_loss_coef",
        "number",
        None,
        "coefficient of the load-balancing loss of a mixture of experts; null: the model's own",
        computed=(0.0, None),
        decides=False,
        why_not="the loss of the router is not in the rows",
        loss_alone=True,
        since="1.7",
    ),
)

ADAM = AdamOptions("optim", frozenset({"adamw_torch", "adamw_torch_fused"}), "adam_beta1", "max_grad_norm")

NOT_RECOMPUTED = {
    "grad_norm": "the norm of the parameters' gradient needs the model",
    "learning_rate, epoch, step_time": "they come from the schedule and the clock",
    "num_tokens": "it is a running total over the whole training, prompt tokens included",
    "aux_loss": "the loss of the router is not in the rows",
    "eval_loss on several ranks": "ranks repeat rows to fill their batches, and no column says which",
}
"""Metrics that both trainers log and no row gives."""


END_METRICS = (
    "completions/clipped_ratio",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_length",
)
"""Metrics of how responses ended: TRL counts those without an end-of-sequence token as clipped, whatever ended them."""


def scored_before(config: Config, *, numbered: bool, generated: bool) -> bool:
    """Before the first update policy and old log-probs are of one model on one batch: equal to the bit."""
    settings = config.settings
    if not reuse(config) and updates(config) == 1:
        return True
    stated = all(settings[name].is_stated for name in _REUSE)
    # A batch that ends within an optimizer step has later passes beside the first one of the next.
    is_whole = config.number("gradient_accumulation_steps") <= (config.optional_number("steps_per_generation") or inf)
    once = settings["num_iterations"].value == 1
    first = once or (generated and settings["logging_steps"].is_stated and settings["logging_steps"].value == 1)
    return numbered and stated and is_whole and first and updates(config) > 0


def updates(config: Config) -> int:
    """Optimizer steps of one pass over a generated batch; 1 where a step takes several batches, 0 for a fraction."""
    accumulation = int(config.number("gradient_accumulation_steps"))
    per_generation = int(config.optional_number("steps_per_generation") or accumulation)
    if per_generation % accumulation:
        return 0 if accumulation % per_generation else 1
    return per_generation // accumulation


GENERATION_METRICS = (
    *("reward", "reward_std", "rewards/*", "frac_reward_zero_std", "completions/*", "sampling/*", "tools/*"),
    "num_tokens",
)
"""Metrics that both trainers log once for a generated batch."""


_REUSE = ("num_iterations", "steps_per_generation", "gradient_accumulation_steps")
"""Options that decide how often a generated batch is trained on."""


def reuse(config: Config) -> str:
    """Say why a step may have trained on rows of an earlier generation; empty if the options rule it out."""
    settings = config.settings
    unstated = [name for name in _REUSE if not settings[name].is_stated]
    once = settings["num_iterations"].value == 1 and updates(config) > 0
    if once and not unstated:
        return ""
    why = f"nothing states {', '.join(unstated)}" if once else "generations are reused"
    return f"{why}, and what belongs to a generation is logged once for it"


def updates_a_batch(config: Config) -> int | str:
    """Passes over a generated batch times optimizer steps of one; of a fraction, 2."""
    unstated = [name for name in _REUSE if not config.settings[name].is_stated]
    return ", ".join(unstated) or int(config.number("num_iterations")) * (updates(config) or 2)


def single_update(config: Config) -> bool:
    """Without vLLM the old log-probs are then those at the loss; with it they are of a forward pass of their own."""
    return not reuse(config) and updates(config) == 1 and not config["use_vllm"]
