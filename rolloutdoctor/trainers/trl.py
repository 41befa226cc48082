"""TRL's GRPOTrainer: options of its GRPOConfig, its objective, and its logged metrics.

Read and compared: trl 1.16.0. Versions before 1.10.0 differ in the default of `use_bias_correction_kl` and in how
`dapo` shares tokens out over the optimiser steps of one generation batch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.errors import UsageError
from rolloutdoctor.objective import AdvantageRule, Aggregation, KlTerm, Objective, RowSet, Scope, Surrogate
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluate import Evaluation

EPSILON = 1e-4
"""What TRL adds to the standard deviation of rewards."""

OPTIONS = (
    Option(
        "loss_type",
        "word",
        "dapo",
        "how token terms become one loss",
        choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
        computed=("grpo", "bnpo", "dr_grpo", "dapo"),
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
        computed=("sum_then_normalize",),
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
        computed=("token",),
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
        "top_entropy_quantile",
        "number",
        1.0,
        "share of tokens that carry the policy term",
        low=0,
        high=1,
        computed=(1.0,),
    ),
    Option("off_policy_mask_threshold", "number", None, "drop off-policy rows", optional=True, computed=(None,)),
    Option("use_vllm", "flag", False, "sample with vLLM", decides=False),
    Option(
        "vllm_importance_sampling_correction",
        "flag",
        True,
        "weight the policy term by trainer over sampler, where vLLM samples",
        decides=False,
    ),
    Option("entropy_coef", "number", 0.0, "coefficient of the entropy bonus", computed=(0.0,), decides=False),
    Option("use_adaptive_entropy", "flag", False, "adapt that coefficient", computed=(False,), decides=False),
    Option(
        "router_aux_loss_coef",
        "number",
        0.0,
        "coefficient of the load-balancing loss of a mixture of experts",
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
    if config["use_vllm"] and config["vllm_importance_sampling_correction"]:
        raise UsageError(
            "use_vllm with vllm_importance_sampling_correction weights the policy term, and this version does not "
            "compute that weight; only runs with vllm_importance_sampling_correction = false can be checked"
        )
    mode = config.word("loss_type")
    length = config.optional_number("max_completion_length")
    if mode == "dr_grpo" and length is None:
        raise UsageError("loss_type = dr_grpo divides by max_completion_length: set it to a whole number")
    if mode == "dapo" and config.version < (1, 10):
        mode = "dapo-before-1.10"
    low = config.number("epsilon")
    high = config.optional_number("epsilon_high")
    beta = config.number("beta")
    weights = config["reward_weights"]
    return Objective(
        trainer="trl",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator="grpo",
            scale=cast(Literal["group", "batch", "none"], config.word("scale_rewards")),
            epsilon=EPSILON,
            lone="zero",
        ),
        surrogate=Surrogate(
            kind="ppo_delta_clip",
            clip_low=low,
            clip_high=low if high is None else high,
            cap=config.optional_number("delta"),
        ),
        aggregation=Aggregation(
            mode=f"trl/{mode}",
            length=None if length is None else int(length),
            counted_in_loss=not mode.startswith("dapo"),
            needs_micro_batches=mode == "bnpo" and config["gradient_accumulation_steps"] != 1,
            eval_batches=True,
        ),
        kl_loss=None
        if beta == 0
        else KlTerm(estimator="k3", coef=beta, ratio_weighted=bool(config["use_bias_correction_kl"])),
        reward_weights=cast("tuple[float, ...] | None", weights),
        vote=Scope().leaving_out(RowSet.UNSCORED),
    )


def group_size(config: Config, split: str) -> int | None:
    """Rows of a group."""
    wanted = config["num_generations_eval"] if split == "eval" else None
    return cast(int, config["num_generations"] if wanted is None else wanted)


def metrics(evaluation: "Evaluation") -> dict[str, float]:
    """TRL's logged metrics: `reward`, `reward_std`, `frac_reward_zero_std`, `loss`, `kl`, `clip_ratio/*`.

    Token metrics are token means over each micro-batch of all ranks, then means over micro-batches.
    """
    found: dict[str, float] = {}
    rows, tokens, batch = evaluation.rows, evaluation.tokens, evaluation.batch
    if rows is not None and batch.groups is not None:
        from rolloutdoctor.advantages.float32 import trl_flags

        means, stds = zip(*(_mean_and_std(scores) for scores in _generations(evaluation, rows.score_N)), strict=True)
        found["reward"], found["reward_std"] = _nanmean(means), _nanmean(stds)
        flags = trl_flags(rows.score_N, batch.groups, evaluation.objective.advantage.scale)
        found["frac_reward_zero_std"] = float(flags.double().mean())
    if tokens is None or rows is None or rows.length_N is None:
        return found
    found["loss"] = evaluation.loss
    in_metric_N = evaluation.in_scope(evaluation.objective.metric)
    length_N = rows.length_N * in_metric_N
    layout = tokens.layout

    def token_mean(sum_N: "Tensor") -> float:
        means_N = layout.forward_total(sum_N * in_metric_N) / layout.forward_total(length_N).clamp(min=1)
        # Every micro-batch has the same say, however many rows it has.
        share_N = 1 / layout.forward_rows_N
        return float((means_N * share_N).sum() / share_N.sum())

    if evaluation.objective.kl_loss is not None:
        found["kl"] = token_mean(tokens.kl_N)
    found["clip_ratio/low_mean"] = token_mean(tokens.low_clipped_N)
    found["clip_ratio/high_mean"] = token_mean(tokens.high_clipped_N)
    found["clip_ratio/region_mean"] = token_mean(tokens.low_clipped_N + tokens.high_clipped_N)
    return found


def _generations(evaluation: "Evaluation", score_N: "Tensor") -> "list[Tensor]":
    """Scores of each generation batch: one in training, one for each batch of an evaluation."""
    micro_N = evaluation.batch.per_row.get("micro_batch_id")
    if evaluation.batch.split == "train" or micro_N is None:
        return [score_N]
    return [score_N[micro_N == micro] for micro in sorted(set(micro_N.tolist()))]


def _mean_and_std(score_N: "Tensor") -> tuple[float, float]:
    scored = score_N[~score_N.isnan()]
    mean = float(scored.mean()) if len(scored) else float("nan")
    return mean, float(scored.std()) if len(scored) > 1 else float("nan")


def _nanmean(values: "Sequence[float]") -> float:
    """Mean of the values that are not NaN, as TRL averages what it logged since the last line."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else float("nan")


_RECORDER = 'record the run with rolloutdoctor.recorders.trl: `record(trainer, "run.parquet")`'

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
        "*": _RECORDER,
    },
    kl_metrics=("kl",),
    loss_metric="loss",
    grad_norm_metric="grad_norm",
    group_size=group_size,
    window_option="logging_steps",
    instant_metrics=frozenset({"grad_norm", "learning_rate", "epoch", "num_tokens"}),
)
