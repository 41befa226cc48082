"""TRL's RLOOTrainer: options of its RLOOConfig, its objective, and its logged metrics.

Read and compared: trl 1.16.0, and every release from 0.22 on, the first with this class: the one before takes a reward
model, and is another trainer. Before 1.6 rows that no reward function scored have a reward of 0; before 0.27 `reward`,
`reward_std` and `frac_reward_zero_std` are of the rewards less the KL penalty; before 1.9 metrics are means of ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import Choices, Log, PartOptions, Trace, Trainer, every
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.trl.options import END_METRICS, GENERATION_METRICS, NOT_RECOMPUTED
from rolloutdoctor.trainers.trl.options import OPTIONS as SHARED

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_SHARED = {option.name: option for option in SHARED}

OPTIONS = (
    Option("beta", "number", 0.05, "coefficient of the KL penalty in the reward", low=0),
    Option("normalize_advantages", "flag", False, "normalise the advantages over the batch"),
    Option(
        "reward_clip_range", "numbers", None, "bounds that rewards are clamped to before the KL penalty; null: none"
    ),
    _SHARED["reward_weights"],
    _SHARED["epsilon"],
    _SHARED["epsilon_high"],
    Option("num_generations", "integer", 2, "responses per prompt in training", low=2),
    _SHARED["num_generations_eval"],
    Option(
        "max_completion_length",
        "integer",
        512,
        "longest response",
        low=1,
        optional=True,
        decides=False,
        changes=(("1.10", 256),),
    ),
    _SHARED["mask_truncated_completions"],
    _SHARED["sync_ref_model"],
    _SHARED["ref_model_sync_steps"],
    _SHARED["ref_model_mixup_alpha"],
    _SHARED["gradient_accumulation_steps"],
    _SHARED["steps_per_generation"],
    _SHARED["generation_batch_size"],
    _SHARED["num_iterations"],
    _SHARED["logging_steps"],
    _SHARED["temperature"],
    _SHARED["top_p"],
    _SHARED["top_k"],
    _SHARED["min_p"],
    Option("use_vllm", "flag", False, "sample with vLLM; RLOO applies no importance weights for it", decides=False),
    _SHARED["router_aux_loss_coef"],
)


def objective(config: Config) -> Objective:
    """Build what RLOOTrainer computes.

    Raises:
        UsageError: if `reward_clip_range` is not two numbers, the lower one first.
    """
    bounds = cast("tuple[float, ...] | None", config["reward_clip_range"]) or None
    if bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1]):
        raise UsageError(f"reward_clip_range = {bounds}: expected two numbers, the lower one first")
    low, high = trl.clip_range(config)
    beta = config.number("beta")
    return Objective(
        trainer="trl-rloo",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator="rloo",
            scale="none",
            epsilon=trl.EPSILON,
            singleton="zero",
            flags_zero_std=True,
            sums_tokens=True,
            normalised=bool(config["normalize_advantages"]),
            reward_bounds=None if bounds is None else (bounds[0], bounds[1]),
            null_is_zero=config.version < (1, 6),
        ),
        surrogate=Surrogate(
            kind="clipped_row",
            clip_low=low,
            clip_high=high,
            level="sequence-sum",
            empty_share=1.0,
        ),
        aggregation=Aggregation(mode="micro-batch-row-sum", eval_batches=True),
        has_kl_loss=False,
        kl_reward=None
        if beta == 0
        else KlTerm(estimator="k1", coef=beta, log_probs="old_log_probs", masked=True, of_trained=True),
        reward_weights=cast("tuple[float, ...] | None", config["reward_weights"]),
        baseline_rows=trl.baseline_rows(config.version),
        metric_columns=trl.METRIC_COLUMNS,
    )


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """RLOO's logged metrics: `reward*`, `completions/*`, `loss`, `kl`, `clip_ratio/*`."""
    from rolloutdoctor.trainers.trl import metrics as trl_metrics

    return trl_metrics.rloo(evaluation)


_RECORDER = trl.TRAINER.recording["*"]

TRAINER = Trainer(
    name="trl-rloo",
    title="TRL",
    newest="1.16.0",
    oldest="0.22.0",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=trl.group_size,
    log=Log(
        loss="loss",
        grad_norm="grad_norm",
        kl=("kl",),
        loss_is_whole=True,
        zero_std=trl.TRAINER.log.zero_std,
        ends_by_token=True,
        ends=END_METRICS,
        quantities=trl.QUANTITIES | {"kl": "reward_kl"},
        not_recomputed=NOT_RECOMPUTED,
        generation=(*GENERATION_METRICS, "kl"),
        instant=trl.TRAINER.log.instant,
        traces=(Trace("kl", "beta", lambda beta: beta != 0, "where beta is above 0", nonzero=True),),
    ),
    recording={
        "ref_log_probs": f"{_RECORDER}, with beta > 0 so that TRL has a reference model",
        "*": _RECORDER,
        "ground_truth": f"{_RECORDER}, with text (the default) and a column ground_truth, solution or answer",
        "metrics": trl.TRAINER.recording["metrics"],
    },
    roles=replace(trl.TRAINER.roles, kl=None, must_state={}),
    updates=trl.TRAINER.updates,
    parts={
        Part.KL_LOSS: PartOptions(never="RLOO has its KL in the reward, not in the loss"),
        Part.KL_REWARD: PartOptions({"beta": (0,)}),
        Part.GROUP_STD: PartOptions(never="RLOO does not divide by a group's standard deviation"),
    },
    choices=Choices(
        advantage=every(beta=(0.0,), normalize_advantages=(False, True)),
        penalty=every(normalize_advantages=(False, True)),
        penalty_option="beta",
        loss=({},),
    ),
    aliases=trl.ALIASES,
)
