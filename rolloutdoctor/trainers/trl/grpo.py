"""TRL's GRPOTrainer: options of its GRPOConfig, its objective, and its logged metrics.

Read and compared: trl 1.16.0 and every minor release from 0.14.0 on, the first with this class, and the patch releases
that are named here; the others change no arithmetic. Options came, went and changed their defaults as `options.py`
says, metrics as `metrics.py` does. Of the arithmetic:

- 0.14, 0.15: every ratio is 1, row means; rewards that are not numbers spread over their group. 0.16: ratios and their
  clip, the mean over the tokens of a micro-batch, a row that no function scored has a reward of 0. 0.17: `loss_type`.
- 0.20: one ratio a row, the entropy mask, of each rank by itself before 0.21.
- 0.22: `dapo` divides by the tokens of the generation, counted before truncated responses are masked; 0.22.0 and
  0.22.1 do not divide by a deviation where `scale_rewards` is group, its default, and divide by the group's where it is
  batch or none. The loss of an evaluation is divided by the accumulation of training, up to 0.27.0.
- 0.23: weights against the sampler, by token. 0.26: their modes, `cispo` and `sapo`, the KL times the ratio. 0.27:
  rewards normalised one by one, the off-policy mask, which 0.27.0 makes with the old log-probs. 0.28 `luspo`, 1.0
  `vespo`.
- 1.6: rows without a score are left out; lower bounds of weights. 1.8: the entropy bonus. 1.9: tokens are counted
  after masks. 1.9.1: the tokens of a generation are shared out over its optimizer steps. 1.10: the default of
  `use_bias_correction_kl`, the mean of `luspo`, the mean of the entropy bonus. 1.11: the sampler may give no log-prob
  for a token. 1.14: Liger has no loss of its own.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from operator import eq
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, RowSet, Scope, Surrogate
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, unknown_loss
from rolloutdoctor.trainers.spec import (
    Choices,
    Log,
    LossParts,
    OptionRoles,
    PartOptions,
    Trace,
    Trainer,
    Updates,
    every,
)
from rolloutdoctor.trainers.trl.entropy import applied_coefs, entropy_bonus
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES, OF_GENERATION
from rolloutdoctor.trainers.trl.options import (
    ADAM,
    END_METRICS,
    GENERATION_METRICS,
    NOT_RECOMPUTED,
    OPTIONS,
    reuse,
    scored_before,
    single_update,
    updates,
    updates_a_batch,
)

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

FIRST_SHARED = (1, 9, 1)
"""The first release in which the optimizer steps of a generation share out its tokens."""

ALIASES = {"completion_mask": "response_mask"}

EPSILON = 1e-4
"""Constant that TRL adds to the standard deviation of rewards."""

METRIC_COLUMNS = frozenset({"entropy", "response_mask_pre", "rewards", "status"})
"""Columns that the metrics need beyond those of the loss."""


def objective(config: Config) -> Objective:
    """Build what GRPOTrainer computes.

    Raises:
        UsageError: if options contradict each other, or ask for what is not computed.
    """
    version = config.version
    loss_type = config.word("loss_type")
    mode = LOSS_TYPES[loss_type].aggregation
    length = config.optional_number("max_completion_length")
    if mode == "micro-batch-fixed-length" and length is None:
        raise UsageError(f"loss_type = {loss_type} divides by max_completion_length: set it to a whole number")
    beta, term_weights = config.number("beta"), gates(config)
    named = config.word("multi_objective_aggregation") == "normalize_then_sum"
    weights = cast("tuple[float, ...] | None", config["reward_weights"])
    level = cast(Literal["token", "sequence"], config.word("importance_sampling_level"))
    # The tokens of the generation were counted before truncated responses were masked.
    before_masks = mode == OF_GENERATION and version < (1, 9) and bool(config["mask_truncated_completions"])
    by_micro_batch = mode == "micro-batch-token-mean" or config.number("top_entropy_quantile") < 1
    return Objective(
        trainer="trl",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator="normalize_then_sum" if named else "grpo",
            scale=scale(config),
            epsilon=EPSILON,
            singleton="zero",
            flags_zero_std=True,
            knows_single=True,
            reward_weights=(weights or ()) if named else (),
            null_is_zero=(0, 16) <= version < (1, 6),
        ),
        surrogate=surrogate(config),
        aggregation=Aggregation(
            mode=f"{mode}-unscaled" if mode == OF_GENERATION and version < FIRST_SHARED else mode,
            length=None if length is None else int(length),
            counted_in_loss=mode != OF_GENERATION,
            counted_before_rejection=before_masks,
            needs_micro_batches=by_micro_batch and config["gradient_accumulation_steps"] != 1,
            eval_batches=True,
            eval_divisor=eval_divisor(config),
        ),
        kl_loss=None
        if beta == 0
        else KlTerm(
            estimator="k3", coef=beta, ratio_weighted=bool(config["use_bias_correction_kl"]), ratio_level=level
        ),
        entropy_bonus=entropy_bonus(config),
        gates=term_weights,
        reward_weights=weights,
        baseline_rows=baseline_rows(version),
        metric_columns=METRIC_COLUMNS,
        unknown_loss="; ".join(_losses_not_computed(config, term_weights)),
    )


def scale(config: Config) -> Literal["group", "batch", "none"]:
    """Return the standard deviation that divides: before 0.22.2 the words of `scale_rewards` stood for one another."""
    word = cast(Literal["group", "batch", "none"], config.word("scale_rewards"))
    if not (0, 22) <= config.version < (0, 22, 2):
        return word
    return "none" if word == "group" else "group"


def baseline_rows(version: tuple[int, ...]) -> Scope:
    """Return the rows in baselines: before 1.6 those that no reward function scored too, from 0.16 on with 0."""
    return Scope() if version < (1, 6) else Scope().leaving_out(RowSet.UNSCORED)


def eval_divisor(config: Config) -> float:
    """Return what an evaluation's loss is divided by: from 0.22 to before 0.27.1 that of training, accumulation."""
    plain = LOSS_TYPES[config.word("loss_type")].aggregation == OF_GENERATION
    is_divided = (0, 22) <= config.version < (0, 27, 1) and not plain
    return config.number("gradient_accumulation_steps") if is_divided else 1.0


def surrogate(config: Config) -> Surrogate:
    """Build the policy term."""
    loss_type = LOSS_TYPES[config.word("loss_type")]
    low, high = clip_range(config)
    return Surrogate(
        kind=loss_type.kind,
        clip_low=low,
        clip_high=high,
        cap=config.optional_number("delta"),
        level=cast(Literal["token", "sequence"], config.word("importance_sampling_level")),
        # Before 0.16 there is no old policy, and no clip.
        old="old_log_probs" if config.version >= (0, 16) else "policy_log_probs",
        numbers={name: config.number(option.name) for name, option in loss_type.numbers.items()},
    )


def clip_range(config: Config) -> tuple[float, float]:
    """Return how far below and above one the ratio may fall and rise."""
    low, high = config.number("epsilon"), config.optional_number("epsilon_high")
    return low, low if high is None else high


def gates(config: Config) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term.

    Raises:
        UsageError: if bounds of weights contradict each other.
    """
    term_weights = []
    # Before 1.11.0 a sampler that gives no log-prob for a token ends the run.
    lenient = config.version >= (1, 11)
    threshold = config.optional_number("off_policy_mask_threshold")
    if threshold is not None:
        against: Literal["rollout_log_probs", "old_log_probs"]
        sampled = config["use_vllm"] and config.version >= (0, 27, 1)
        against = "rollout_log_probs" if sampled else "old_log_probs"
        term_weights.append(TermWeight(kind="off_policy", against=against, high=threshold, nan_is_one=lenient))
    share = config.number("top_entropy_quantile")
    if share < 1:
        term_weights.append(TermWeight(kind="high_entropy", high=share, of_rank=config.version < (0, 21)))
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
        inside = LOSS_TYPES[config.word("loss_type")].weighs_rows
        term_weights.append(
            TermWeight(
                kind="importance",
                level=cast(Literal["token", "sequence"], level),
                low=low,
                high=high,
                outside="cut" if outside == "truncate" else "zero",
                nan_is_one=lenient,
                inside=inside,
            )
        )
    return tuple(term_weights)


def _losses_not_computed(config: Config, term_weights: tuple[TermWeight, ...]) -> Iterator[str]:
    """Yield why the loss is not computed: a fused one, or padding that enters it, whose width is not in the rows."""
    kernel = config["use_liger_kernel"] and (0, 25) <= config.version < (1, 14)
    if kernel or config["use_liger_loss"]:
        name = "use_liger_kernel" if kernel else "use_liger_loss"
        yield unknown_loss(f"{name} = True", "the fused loss of TRL before 1.14.0 was not compared")
    loss_type = LOSS_TYPES[config.word("loss_type")]
    per_token = any(gate.kind != "off_policy" and gate.level == "token" for gate in term_weights)
    by_token = config.word("importance_sampling_level") == "token" or config.number("beta") != 0 or per_token
    if loss_type.aggregation == "micro-batch-row-sum" and config.version < (1, 10) and by_token:
        yield unknown_loss(
            f"loss_type = {config['loss_type']} before TRL 1.10.0",
            "unless it has one term per row (importance_sampling_level = sequence, beta = 0, no weight or mask per "
            "token) it takes the mean over padded cells, and the width of the padding is not in the rows",
        )
    yield from padding_in_weights(config, term_weights)


def padding_in_weights(config: Config, term_weights: tuple[TermWeight, ...]) -> Iterator[str]:
    """Yield why the loss is not computed where a bound of a weight of rows counts padded cells."""
    if any(
        gate.inside and ((gate.low is not None and gate.low > 1) or (gate.high is not None and gate.high < 1))
        for gate in term_weights
    ):
        yield unknown_loss(
            "a bound of the importance weight that leaves out one",
            f"it puts the padding of a batch into {config['loss_type']}'s weights, and its width is not in the rows",
        )


def group_size(config: Config, split: str) -> int | None:
    """Rows of a group."""
    wanted = config["num_generations_eval"] if split == "eval" else None
    return cast(int, config["num_generations"] if wanted is None else wanted)


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """TRL's logged metrics: `reward*`, `completions/*`, `loss`, `kl`, `clip_ratio/*` or their like, `sampling/*`."""
    from rolloutdoctor.trainers.trl import metrics as trl_metrics

    return trl_metrics.grpo(evaluation)


def loss_parts(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    """The loss less beta times the KL, where beta is stated; means over several steps add up as well."""
    if config is None or config.settings["beta"].assumed or not config["beta"] or not {"loss", "kl"} <= logged.keys():
        return None
    if entropy_bonus(config) is not None:
        return None
    kl = config.number("beta") * logged["kl"]
    return LossParts(logged["loss"] - kl, kl)


_RECORDER = 'record the run with rolloutdoctor.recorders.trl: `record(trainer, "run.parquet")`'

AGENTS = {
    "trajectory_id": "TRL trains one row for each trajectory",
    "task_id": "TRL has none: rows of equal prompts are taken to be of one task",
    "turns": f"{_RECORDER}; it writes them with tools, an environment_factory or an env_mask",
    "error": "TRL has no rollout that fails: the errors of tools are in turns",
}
"""Columns of agents, and what would record them."""

_STATE = "give OUTPUT_DIR/checkpoint-N/trainer_state.json as well"

QUANTITIES = {
    "loss": "loss",
    "policy_loss": "loss",
    "kl": "kl",
    "reward": "rewards",
    "reward_std": "rewards",
    "frac_reward_zero_std": "zero_std",
    "entropy": "entropy",
    "rewards/*": "rewards",
    "sampling/*": "sampler_gap",
    "clip_ratio/*_mean": "clip_share",
    "clip_ratio/*": "clip_extreme",
    **{name: quantity for loss_type in LOSS_TYPES.values() for name, quantity in loss_type.logs.items()},
}
"""Kinds of its metrics, as far as they are no means of values of one sign."""

TRAINER = Trainer(
    name="trl",
    title="TRL",
    newest="1.16.0",
    oldest="0.14.0",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="loss",
        grad_norm="grad_norm",
        kl=("kl",),
        loss_is_whole=True,
        zero_std="frac_reward_zero_std",
        ends_by_token=True,
        ends=END_METRICS,
        quantities=QUANTITIES,
        not_recomputed=NOT_RECOMPUTED
        | {
            "entropy_coef with use_adaptive_entropy": "it moves with the entropies of every step before",
            "clip_ratio": "0.16 counts the tokens that the clip leaves alone, and Liger's kernel has its own",
            "kl with beta = 0 before 0.16": "the log-probs of the reference are in no loss then",
            "tools/*": "calls of tools are not in the rows",
        },
        generation=GENERATION_METRICS,
        instant=frozenset({"grad_norm", "learning_rate", "epoch", "num_tokens"}),
        traces=(
            Trace("kl", "beta", lambda beta: beta != 0, "where beta is above 0", nonzero=True, since="0.16"),
            *(
                Trace(metric, "loss_type", partial(eq, name), f"with loss_type = {name}", value=name)
                for name, loss_type in LOSS_TYPES.items()
                for metric in loss_type.logs
            ),
            Trace("sampling/importance_sampling_ratio/mean", "use_vllm", bool, "with use_vllm = true", value=True),
        ),
        step_values=applied_coefs,
        loss_parts=loss_parts,
        file="trainer_state.json",
    ),
    recording={
        "ref_log_probs": f"{_RECORDER}, with beta > 0 so that TRL has a reference model",
        "kl": "TRL does not store a per-token KL; its `kl` metric is compared instead",
        "entropy": f"{_RECORDER}, with the entropies of the tokens",
        "rollout_log_probs": f"{_RECORDER}, with use_vllm so that the sampler gives log-probs",
        "rewards": f"{_RECORDER}; it writes one number for each reward function",
        "*": _RECORDER,
        "ground_truth": f"{_RECORDER}, with text (the default) and a column ground_truth, solution or answer",
        "metrics": _STATE,
    },
    agents=AGENTS,
    roles=OptionRoles(
        kl="beta",
        group={"train": "num_generations", "eval": "num_generations_eval"},
        length="max_completion_length",
        truncation="mask_truncated_completions",
        sync="sync_ref_model",
        adam=ADAM,
        window="logging_steps",
        must_state={"scale_rewards": "group"},
        advised={
            "gradient clipping": "max_grad_norm",
            "the learning rate": "learning_rate",
            "the KL coefficient": "beta",
            "the upper clip range": "epsilon_high",
            "the response length limit": "max_completion_length",
        },
    ),
    updates=Updates(
        per_generation=updates,
        reuse=reuse,
        single=single_update,
        a_batch=updates_a_batch,
        scored_before=scored_before,
    ),
    parts={
        Part.KL_LOSS: PartOptions({"beta": (0,)}),
        Part.KL_REWARD: PartOptions(never="GRPO has no KL penalty in the reward"),
        Part.GROUP_STD: PartOptions({"scale_rewards": ("batch", "none")}),
        Part.POLICY_LOSS: PartOptions({"loss_type": ()}),
    },
    choices=Choices(
        advantage=(
            *every(scale_rewards=("group", "batch", "none")),
            *every(multi_objective_aggregation=("normalize_then_sum",)),
        ),
        weights_option="reward_weights",
        kl=every(use_bias_correction_kl=(False, True)),
        loss=every(
            loss_type=tuple(LOSS_TYPES),
            importance_sampling_level=("token", "sequence"),
        ),
    ),
    aliases=ALIASES,
    masks_by_product=True,
)
