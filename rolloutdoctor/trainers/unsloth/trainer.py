"""Unsloth's GRPOTrainer, a dialect of TRL's: its version is that of the TRL under it, its own is an option.

It rewrites TRL's trainer as source text and has a loss of its own (unsloth-zoo ``grpo_compute_loss``), of the rank's
own micro-batch; rewards, advantages and the metrics of a generation are those of the TRL that is installed. Read and
compared: unsloth 015bdef0 and unsloth-zoo 2026.8.13, and of unsloth-zoo 2025.2.5 to 2026.1.3 that every row is a
chunk: the loss is the mean over rows of each row's own, so that bnpo is grpo and dapo the number of rows too small.

Accepted and without effect: `top_entropy_quantile`, `use_bias_correction_kl`, `entropy_coef`, and for text models
without a mask of tools `mask_truncated_completions`, whose rows come back into the loss: `check` finds them as masked
tokens in its sums. dapo forces that option on, and `epsilon_high` to 0.28.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import Aggregation, KlTerm, Objective
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.spec import Choices, every
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES, OF_GENERATION
from rolloutdoctor.trainers.trl.options import NOT_RECOMPUTED
from rolloutdoctor.trainers.trl.options import OPTIONS as TRL_OPTIONS

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_DEFAULTS: dict[str, object] = {
    "loss_type": "bnpo",
    "beta": 0.001,
    "vllm_importance_sampling_correction": False,
    "num_generations": 8,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "top_k": None,
}
"""Unsloth's own, whatever TRL it patches."""

_ZOO = "unsloth_zoo"
_ONE_CHUNK, _WITH_MODES, _WITH_WEIGHTS = (2026, 1, 4), (2026, 7, 1), (2025, 10, 12)
"""Releases of unsloth-zoo: the first again with one chunk, with TRL's modes of weights, and with weights."""

_IGNORED = ("top_entropy_quantile", "use_bias_correction_kl", "entropy_coef", "use_adaptive_entropy")
_SINCE = {"luspo": (2026, 7, 1), "vespo": (2026, 5, 1)}
"""Loss types that came with a release of unsloth-zoo."""
_DAPO_HIGH = 0.28


def _option(option: Option) -> Option:
    if option.name in _DEFAULTS:
        option = replace(option, default=_DEFAULTS[option.name], changes=())
    if option.name in _IGNORED:
        return replace(option, decides=False, meaning=f"{option.meaning}; Unsloth ignores it", only_with={})
    return option


OPTIONS = (
    Option(_ZOO, "word", "2026.8.13", "release of unsloth-zoo, which has the loss"),
    *map(_option, TRL_OPTIONS),
)


def objective(config: Config) -> Objective:
    """Build what Unsloth computes.

    Raises:
        UsageError: if an option asks for what is not computed, or ends the run upstream.
    """
    zoo, loss_type = parse_version(config.word(_ZOO)), config.word("loss_type")
    mode, of_rows = LOSS_TYPES[loss_type].aggregation, zoo < _ONE_CHUNK
    if config["off_policy_mask_threshold"] is not None and config.version >= (0, 27, 1):
        raise UsageError("off_policy_mask_threshold ends a run of Unsloth with TRL 0.27.1 or newer: set it to null")
    if zoo < _SINCE.get(loss_type, zoo):
        since = ".".join(map(str, _SINCE[loss_type]))
        raise UsageError(f"loss_type = {loss_type} came with unsloth-zoo {since}, and the run has {config.word(_ZOO)}")
    base = trl.objective(_as_trl(config))
    surrogate = base.surrogate
    if loss_type == "dapo":
        surrogate = replace(surrogate, clip_high=_DAPO_HIGH)
    if of_rows and mode == "micro-batch-token-mean":
        mode = "micro-batch-row-mean"
    length = config.optional_number("max_completion_length")
    plain = mode == OF_GENERATION
    masks, multipliers = plain and _masks_truncated(config), gates(config, zoo)
    return replace(
        base,
        trainer="unsloth",
        advantage=replace(base.advantage, scale="none")
        if loss_type == "dr_grpo" and _divides(config)
        else base.advantage,
        surrogate=surrogate,
        aggregation=Aggregation(
            mode=(f"{mode}-of-rows" if of_rows else f"{mode}-unscaled") if plain else mode,
            length=None if length is None else int(length),
            counted_in_loss=not plain,
            # TRL counts the tokens, with its mask, which the loss makes anew.
            counted_before_rejection=masks and config.version < (1, 9),
            leaves_out_truncated=masks and config.version >= (1, 9),
            needs_micro_batches=(mode == "micro-batch-token-mean" or (plain and of_rows))
            and config["gradient_accumulation_steps"] != 1,
            eval_batches=True,
            eval_divisor=1.0 if plain else config.number("gradient_accumulation_steps"),
        ),
        kl_loss=None if config["beta"] == 0 else KlTerm(estimator="k3", coef=config.number("beta")),
        entropy_bonus=None,
        gates=multipliers,
        unknown_loss=_padded_mean(config, multipliers)
        or base.unknown_loss
        or "; ".join(trl.padding_in_weights(config, multipliers)),
    )


def _padded_mean(config: Config, multipliers: tuple[TermWeight, ...]) -> str:
    """Say why luspo is not computed: with a term of each token its mean is over padded cells; empty where it is."""
    per_token = any(gate.kind == "importance" and gate.level == "token" for gate in multipliers)
    by_row = config.word("importance_sampling_level") == "sequence" and config["beta"] == 0 and not per_token
    if config.word("loss_type") != "luspo" or by_row:
        return ""
    return unknown_loss(
        "loss_type = luspo",
        "unless it has one term per row (importance_sampling_level = sequence, beta = 0, no weight per token) it takes "
        "the mean over padded cells, and the width of the padding is not in the rows",
    )


def _masks_truncated(config: Config) -> bool:
    return bool(config["mask_truncated_completions"]) or config.word("loss_type") == "dapo"


def _divides(config: Config) -> bool:
    """Tell whether `scale_rewards` is the value True that dr_grpo overrides: the word group it leaves alone."""
    return config.word("scale_rewards") == "group" and config.version < (0, 22)


def _as_trl(config: Config) -> Config:
    """The options that Unsloth ignores at what switches them off, and without the sampler: its weights are its own."""
    off: dict[str, object] = {
        "use_bias_correction_kl": False,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "use_vllm": False,
    }
    off |= {"use_adaptive_entropy": False, "off_policy_mask_threshold": None, "mask_truncated_completions": False}
    settings = {name: replace(one, value=off.get(name, one.value)) for name, one in config.settings.items()}
    return replace(config, settings=settings)


def gates(config: Config, zoo: tuple[int, ...]) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term."""
    found = []
    threshold = config.optional_number("off_policy_mask_threshold")
    if threshold is not None:
        found.append(TermWeight(kind="off_policy", against="old_log_probs", high=threshold))
    if config["use_vllm"] and config["vllm_importance_sampling_correction"] and zoo >= _WITH_WEIGHTS:
        cap = config.optional_number("vllm_importance_sampling_cap")
        if zoo < _WITH_MODES:
            # Every mode was this one.
            return (*found, TermWeight(kind="importance", high=cap))
        level, _, outside = config.word("vllm_importance_sampling_mode").partition("_")
        # What TRL refuses of them ends a run of Unsloth too.
        trl.gates(replace(config, settings={**_as_trl(config).settings, "use_vllm": config.settings["use_vllm"]}))
        low = 0.0 if cap is not None else config.optional_number("vllm_importance_sampling_clip_min")
        high = config.optional_number("vllm_importance_sampling_clip_max") if cap is None else cap
        found.append(
            TermWeight(
                kind="importance",
                level="token" if level == "token" else "sequence",
                low=low,
                high=high,
                outside="cut" if outside == "truncate" else "zero",
                inside=LOSS_TYPES[config.word("loss_type")].weighs_rows,
            )
        )
    return tuple(found)


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """Unsloth's logged metrics: TRL's of a generation, and those of its loss, of the first rank's own rows."""
    from rolloutdoctor.trainers.lazy import LazyMetrics
    from rolloutdoctor.trainers.trl import metrics as trl_metrics

    found = trl_metrics.of_generation(evaluation)
    rows, tokens = evaluation.rows, evaluation.tokens
    if tokens is None or rows is None or rows.length_N is None:
        return LazyMetrics(found)
    counts = trl_metrics.Counts(evaluation, rows, tokens, by_rank=True)
    found |= {"loss": partial(trl_metrics.loss_of, evaluation, tokens, counts)}
    found |= {"kl": partial(_of_rank, evaluation), "completion_length": partial(_of_rank, evaluation)}
    return LazyMetrics(found | {"c": partial(trl_metrics.clips, evaluation, tokens, counts)})


def _of_rank(evaluation: "Evaluation") -> dict[str, float]:
    """Mean length, and mean over rows of the mean KL of their tokens, of the first rank, over its micro-batches."""
    import torch

    batch, rows, tokens = evaluation.batch, evaluation.rows, evaluation.tokens
    assert rows is not None
    assert rows.length_N is not None
    assert tokens is not None
    own_N = torch.ones_like(rows.in_baseline_N)
    if "rank" in batch.per_row:
        own_N = batch.per_row["rank"] == batch.per_row["rank"].min()
    objective = evaluation.objective
    # Without a KL term it is a zero for each token, or one for the row.
    is_row = objective.kl_loss is None and objective.surrogate.level == "sequence"
    kl_N = tokens.kl_N if objective.kl_loss is not None else torch.zeros_like(rows.length_N)
    kl_N = kl_N if is_row else kl_N / rows.length_N
    parts = [own_N & (tokens.layout.micro_N == part) for part in torch.unique(tokens.layout.micro_N[own_N]).tolist()]
    means = {
        name: [float(x_N[part].mean()) for part in parts]
        for name, x_N in (("completion_length", rows.length_N), ("kl", kl_N))
    }
    return {name: sum(values) / len(values) for name, values in means.items() if values}


_TRL = trl.TRAINER

TRAINER = replace(
    _TRL,
    name="unsloth",
    title="Unsloth",
    package="trl",
    newest="0.24.0",
    oldest="0.17.0",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    log=replace(
        _TRL.log,
        marks=(frozenset({"completion_length", "completions/mean_length"}),),
        not_recomputed=NOT_RECOMPUTED
        | {"sampling/*": "they are over padded cells, whose number is not in the rows; so the least ratio is 0"},
        traces=tuple(
            # With beta 0 the KL is logged as 0.
            replace(trace, since="")
            for trace in _TRL.log.traces
            if trace.option != "use_vllm"
        ),
    ),
    choices=Choices(
        advantage=every(scale_rewards=("group", "none")),
        loss=every(loss_type=("grpo", "bnpo", "dr_grpo", "dapo"), unsloth_zoo=("2026.8.13", "2026.1.2")),
    ),
)
