"""TRL's GRPOTrainer: options of its GRPOConfig, its objective, and its logged metrics.

Read and compared: trl 1.16.0 and every minor release from 1.9.0 on. 1.10.0 changed the default of
`use_bias_correction_kl`, how `dapo`, `cispo` and `vespo` share tokens out over the optimiser steps of one generation
batch, and the mean that `luspo` takes; 1.11.0 lets a sampler give no log-prob for a token; 1.14.0 gave up the loss of
its own that `use_liger_kernel` had. Before 1.9.0 tokens were counted before masks, and metrics were means of ranks.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.errors import UsageError
from rolloutdoctor.objective import AdvantageRule, Aggregation, Gate, KlTerm, Objective, RowSet, Scope, Surrogate
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import LossParts, Trainer

if TYPE_CHECKING:
    from rolloutdoctor.evaluation import Evaluation

EPSILON = 1e-4
"""What TRL adds to the standard deviation of rewards."""

METRIC_COLUMNS = frozenset({"entropy", "rewards", "response_mask_pre", "status"})
"""Columns that TRL's logged metrics are made of, beyond those of the loss."""

METRIC_COLUMNS = frozenset({"entropy", "response_mask_pre", "rewards", "status"})
"""What the metrics are made of beyond the loss."""

_WEIGHTED: dict[str, tuple[object, ...]] = {"use_vllm": (True,), "vllm_importance_sampling_correction": (True,)}
_NO_LOGITS = "the entropy's gradient needs the logits, which are not in the rows"

OPTIONS = (
    Option(
        "loss_type",
        "word",
        "dapo",
        "how token terms become one loss",
        choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    ),
    Option("beta", "number", 0.0, "coefficient of the KL term in the loss", low=0),
    Option(
        "use_bias_correction_kl",
        "flag",
        True,
        "multiply the KL by the importance ratio, gradient included",
        changes=("1.10.0", False),
    ),
    Option(
        "scale_rewards",
        "word",
        "group",
        "whose standard deviation divides the centred rewards",
        choices=("group", "batch", "none"),
        spellings={True: "group", False: "none", "true": "group", "false": "none", "True": "group", "False": "none"},
    ),
    Option(
        "multi_objective_aggregation",
        "word",
        "sum_then_normalize",
        "how several reward functions become one advantage",
        choices=("sum_then_normalize", "normalize_then_sum"),
    ),
    Option("reward_weights", "numbers", None, "weight of each reward function", optional=True, decides=False),
    Option("epsilon", "number", 0.2, "how far below one the ratio may fall", low=0),
    Option("epsilon_high", "number", None, "how far above one it may rise; null: epsilon", low=0, optional=True),
    Option("delta", "number", None, "upper bound of the ratio outside the clip; null: none", low=0, optional=True),
    Option(
        "importance_sampling_level",
        "word",
        "token",
        "one ratio per token or per sequence",
        choices=("token", "sequence"),
    ),
    Option("num_generations", "integer", 8, "rows of a training group", low=2),
    Option(
        "num_generations_eval", "integer", None, "rows of an eval group; null: as in training", low=1, optional=True
    ),
    Option("max_completion_length", "integer", 512, "fixed length that dr_grpo divides by", low=1, optional=True),
    Option("mask_truncated_completions", "flag", False, "truncated rows get an empty mask", decides=False),
    Option("gradient_accumulation_steps", "integer", 1, "micro-batches of an optimiser step", low=1, decides=False),
    Option(
        "steps_per_generation", "integer", None, "micro-batches of a generation", low=1, optional=True, decides=False
    ),
    Option("num_iterations", "integer", 1, "passes over a generation", low=1, decides=False),
    Option("logging_steps", "number", 10, "optimiser steps that a logged line averages over", low=0),
    Option(
        "top_entropy_quantile", "number", 1.0, "share of tokens, by entropy, that carry the policy term", low=0, high=1
    ),
    Option(
        "off_policy_mask_threshold",
        "number",
        None,
        "drift beyond which rows of negative advantage lose the policy term; null: none do",
        optional=True,
    ),
    *(
        Option(name, "number", default, meaning, only_with={"loss_type": (loss_type,)})
        for name, default, meaning, loss_type in (
            ("sapo_temperature_pos", 1.0, "steepness of sapo for positive advantages", "sapo"),
            ("sapo_temperature_neg", 1.05, "steepness of sapo for the others", "sapo"),
            ("vespo_k_pos", 2.0, "exponent of vespo's weight for advantages >= 0", "vespo"),
            ("vespo_lambda_pos", 3.0, "decay of vespo's weight for advantages >= 0", "vespo"),
            ("vespo_k_neg", 3.0, "exponent of vespo's weight for negative advantages", "vespo"),
            ("vespo_lambda_neg", 2.0, "decay of vespo's weight for negative advantages", "vespo"),
        )
    ),
    Option("use_vllm", "flag", False, "sample with vLLM", decides=False),
    Option(
        "vllm_importance_sampling_correction",
        "flag",
        True,
        "weight the policy term by trainer over sampler, where vLLM samples",
        only_with={"use_vllm": (True,)},
    ),
    Option(
        "vllm_importance_sampling_mode",
        "word",
        "sequence_mask",
        "one weight per token or per row; outside of the bounds it is cut, or 0",
        choices=("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"),
        only_with=_WEIGHTED,
    ),
    Option(
        "vllm_importance_sampling_clip_max",
        "number",
        3.0,
        "largest weight; null: none",
        optional=True,
        only_with=_WEIGHTED,
    ),
    Option(
        "vllm_importance_sampling_clip_min",
        "number",
        None,
        "smallest weight; null: none",
        optional=True,
        only_with=_WEIGHTED,
    ),
    Option(
        "vllm_importance_sampling_cap",
        "number",
        None,
        "older name of the largest weight; it wins",
        optional=True,
        only_with=_WEIGHTED,
    ),
    Option("use_liger_kernel", "flag", False, "fused kernels; before 1.14.0 with a loss of their own", decides=False),
    Option(
        "entropy_coef",
        "number",
        0.0,
        "coefficient of the entropy bonus",
        computed=(0.0,),
        decides=False,
        why_not=_NO_LOGITS,
    ),
    Option(
        "use_adaptive_entropy",
        "flag",
        False,
        "adapt that coefficient",
        computed=(False,),
        decides=False,
        why_not=_NO_LOGITS,
    ),
    Option(
        "router_aux_loss_coef",
        "number",
        None,
        "coefficient of the load-balancing loss of a mixture of experts; null: the model's own",
        optional=True,
        computed=(0.0, None),
        decides=False,
        why_not="the loss of the router is not in the rows",
    ),
)


def objective(config: Config) -> Objective:
    """Build what GRPOTrainer computes.

    Raises:
        UsageError: if options contradict each other, or ask for what is not computed.
    """
    if config["use_liger_kernel"] and config.version < (1, 14):
        raise UsageError(
            "use_liger_kernel before TRL 1.14.0 computes the loss in a fused kernel, which this package has not "
            "compared; set it to false to see what the plain loss would be"
        )
    mode = config.word("loss_type")
    length = config.optional_number("max_completion_length")
    if mode == "dr_grpo" and length is None:
        raise UsageError("loss_type = dr_grpo divides by max_completion_length: set it to a whole number")
    beta, found = config.number("beta"), gates(config)
    if mode == "luspo" and config.version < (1, 10):
        _refuse_padding(config, found)
    named = config.word("multi_objective_aggregation") == "normalize_then_sum"
    weights = cast("tuple[float, ...] | None", config["reward_weights"])
    level = cast(Literal["token", "sequence"], config.word("importance_sampling_level"))
    by_micro_batch = mode == "bnpo" or config.number("top_entropy_quantile") < 1
    return Objective(
        trainer="trl",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator="normalize_then_sum" if named else "grpo",
            scale=cast(Literal["group", "batch", "none"], config.word("scale_rewards")),
            epsilon=EPSILON,
            lone="zero",
            reward_weights=(weights or ()) if named else (),
        ),
        surrogate=surrogate(config),
        aggregation=Aggregation(
            mode=_aggregation(mode, config.version),
            length=None if length is None else int(length),
            counted_in_loss=mode not in ("dapo", "cispo", "vespo"),
            needs_micro_batches=by_micro_batch and config["gradient_accumulation_steps"] != 1,
            eval_batches=True,
        ),
        kl_loss=None
        if beta == 0
        else KlTerm(
            estimator="k3", coef=beta, ratio_weighted=bool(config["use_bias_correction_kl"]), ratio_level=level
        ),
        gates=found,
        reward_weights=weights,
        vote=Scope().leaving_out(RowSet.UNSCORED),
        metric_columns=METRIC_COLUMNS,
    )


def surrogate(config: Config) -> Surrogate:
    """Build the policy term."""
    mode = config.word("loss_type")
    low, high = clip_range(config)
    numbers: dict[str, float] = {}
    if mode == "sapo":
        numbers = {"tau_pos": config.number("sapo_temperature_pos"), "tau_neg": config.number("sapo_temperature_neg")}
    if mode == "vespo":
        numbers = {name: config.number(f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    return Surrogate(
        kind=f"trl_{mode}" if mode in ("cispo", "sapo", "vespo") else "ppo_delta_clip",
        clip_low=low,
        clip_high=high,
        cap=config.optional_number("delta"),
        level=cast(Literal["token", "sequence"], config.word("importance_sampling_level")),
        numbers=numbers,
    )


def clip_range(config: Config) -> tuple[float, float]:
    """How far below and above one the ratio may fall and rise."""
    low, high = config.number("epsilon"), config.optional_number("epsilon_high")
    return low, low if high is None else high


def gates(config: Config) -> tuple[Gate, ...]:
    """Build what multiplies the policy term.

    Raises:
        UsageError: if bounds of weights contradict each other, or padding would enter the loss.
    """
    found = []
    # Before 1.11.0 a sampler that gives no log-prob for a token ends the run.
    lenient = config.version >= (1, 11)
    threshold = config.optional_number("off_policy_mask_threshold")
    if threshold is not None:
        against: Literal["rollout_log_probs", "old_log_probs"]
        against = "rollout_log_probs" if config["use_vllm"] else "old_log_probs"
        found.append(Gate(kind="off_policy", against=against, high=threshold, nan_is_one=lenient))
    share = config.number("top_entropy_quantile")
    if share < 1:
        found.append(Gate(kind="high_entropy", high=share))
    if config["use_vllm"] and config["vllm_importance_sampling_correction"]:
        level, _, outside = config.word("vllm_importance_sampling_mode").partition("_")
        low = config.optional_number("vllm_importance_sampling_clip_min")
        high = config.optional_number("vllm_importance_sampling_clip_max")
        cap = config.optional_number("vllm_importance_sampling_cap")
        high = high if cap is None else cap
        if low is not None and high is not None and low >= high:
            raise UsageError(f"vllm_importance_sampling_clip_min = {low:g} is not below the largest weight, {high:g}")
        if outside == "truncate" and low is None and high is None:
            raise UsageError(
                "a *_truncate vllm_importance_sampling_mode needs vllm_importance_sampling_clip_min or _clip_max"
            )
        vespo = config.word("loss_type") == "vespo"
        if vespo and ((low is not None and low > 1) or (high is not None and high < 1)):
            raise UsageError(
                "bounds of the importance weight that leave out one would put the padding of a batch into vespo's "
                "weights, and its width is not in the rows"
            )
        found.append(
            Gate(
                kind="importance",
                level=cast(Literal["token", "sequence"], level),
                low=low,
                high=high,
                outside="cut" if outside == "truncate" else "zero",
                nan_is_one=lenient,
                inside=vespo,
            )
        )
    return tuple(found)


def _aggregation(mode: str, version: tuple[int, ...]) -> str:
    """Mode of aggregation of a loss type."""
    if mode in ("dapo", "cispo", "vespo"):
        return "trl/dapo" if version >= (1, 10) else "trl/dapo-before-1.10"
    return {"sapo": "trl/grpo", "luspo": "trl/row-sums"}.get(mode, f"trl/{mode}")


def _refuse_padding(config: Config, found: tuple[Gate, ...]) -> None:
    """Refuse luspo before 1.10.0 wherever it takes its mean over padded cells.

    Raises:
        UsageError: unless it has one term per row.
    """
    per_token = any(gate.kind != "off_policy" and gate.level == "token" for gate in found)
    if config.word("importance_sampling_level") == "token" or config.number("beta") != 0 or per_token:
        raise UsageError(
            "loss_type = luspo before TRL 1.10.0 takes the mean over padded cells unless it has one term per row "
            "(importance_sampling_level = sequence, beta = 0, no weight or mask per token), and the width of the "
            "padding is not in the rows"
        )


def group_size(config: Config, split: str) -> int | None:
    """Rows of a group."""
    wanted = config["num_generations_eval"] if split == "eval" else None
    return cast(int, config["num_generations"] if wanted is None else wanted)


def metrics(evaluation: "Evaluation") -> dict[str, float]:
    """TRL's logged metrics: `reward*`, `completions/*`, `loss`, `kl`, `clip_ratio/*` or their like, `sampling/*`."""
    from rolloutdoctor.trainers import trl_metrics

    return trl_metrics.grpo(evaluation)


def reward_free(logged: Mapping[str, float]) -> bool | None:
    """True where every group's rewards had a standard deviation of (isclose) 0: a mean of shares is 1 if each is."""
    share = logged.get("frac_reward_zero_std")
    return None if share is None else share == 1


def loss_parts(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    """The loss less beta times the KL, where beta is stated; means over several steps add up as well."""
    if config is None or config.settings["beta"].assumed or not config["beta"] or not {"loss", "kl"} <= logged.keys():
        return None
    kl = config.number("beta") * logged["kl"]
    return LossParts(logged["loss"] - kl, kl)


_RECORDER = 'record the run with rolloutdoctor.recorders.trl: `record(trainer, "run.parquet")`'

NOT_RECOMPUTED = {
    "grad_norm": "the norm of the parameters' gradient needs the model",
    "learning_rate, epoch, step_time": "they are of the schedule and the clock, not of the rows",
    "num_tokens": "it counts tokens, the prompts' too, since training began",
    "aux_loss": "the loss of the router is not in the rows",
}
"""What both trainers log and no row gives."""

TRAINER = Trainer(
    name="trl",
    newest="1.16.0",
    oldest="1.9.0",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    recording={
        "ref_log_probs": f"{_RECORDER}, with beta > 0 so that TRL has a reference model",
        "kl": "TRL does not store a per-token KL; its `kl` metric is compared instead",
        "entropy": f"{_RECORDER}, with the entropies of the tokens",
        "rollout_log_probs": f"{_RECORDER}, with use_vllm so that the sampler gives log-probs",
        "rewards": f"{_RECORDER}; it writes one number for each reward function",
        "*": _RECORDER,
        "metrics": "give OUTPUT_DIR/checkpoint-N/trainer_state.json as well, with logging_steps=1",
    },
    kl_metrics=("kl",),
    loss_metric="loss",
    grad_norm_metric="grad_norm",
    group_size=group_size,
    window_option="logging_steps",
    instant_metrics=frozenset({"grad_norm", "learning_rate", "epoch", "num_tokens"}),
    not_recomputed=NOT_RECOMPUTED
    | {
        "policy_loss, entropy_coef": f"they are logged with an entropy bonus alone; {_NO_LOGITS}",
        "tools/*": "calls of tools are not in the rows",
    },
    reward_free=reward_free,
    loss_parts=loss_parts,
    loss_is_whole=True,
)
