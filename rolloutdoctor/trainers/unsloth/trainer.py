"""Unsloth's GRPOTrainer, a dialect of TRL's: its version is that of the TRL under it, its own are options.

It rewrites TRL's trainer as source text and has a loss of its own (unsloth-zoo ``grpo_compute_loss``), of the rank's
own micro-batch; rewards, advantages and the metrics of a generation are those of the TRL that is installed. Read and
compared: unsloth 015bdef0 (2026.8.13) to 2026.10.9, and unsloth-zoo 2026.1.2 to 2026.10.9; `RELEASES` says what came
when. Of unsloth-zoo 2025.2.5 to 2026.1.3 every row is a chunk: the loss is the mean over rows of each row's own,
so that bnpo is grpo and dapo the number of rows too small.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import Aggregation, EntropyBonus, KlTerm, Objective, RowSet
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import Setting
from rolloutdoctor.trainers.options import Config, Option, OptionKind, unknown_loss
from rolloutdoctor.trainers.releases import ReadCode, parse_version
from rolloutdoctor.trainers.spec import Choices, PartOptions, every
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.trl.entropy import entropy_bonus
from rolloutdoctor.trainers.trl.loss_types import LOSS_TYPES, OF_GENERATION
from rolloutdoctor.trainers.trl.options import NOT_RECOMPUTED
from rolloutdoctor.trainers.trl.options import OPTIONS as TRL_OPTIONS

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_DEFAULTS: dict[str, object] = {
    "vllm_importance_sampling_correction": False,
    "num_generations": 8,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "top_k": None,
}
"""Unsloth's own, whatever TRL it patches."""

_ZOO, _OWN = "unsloth_zoo", "unsloth"
_NEWEST = "2026.10.9"
_SAMPLING, _FILLED = "sampling/* over trained tokens", "kl over rows with tokens"

RELEASES = {
    "weights against the sampler": (_ZOO, "2025.10.12"),
    "one chunk": (_ZOO, "2026.1.4"),
    "loss_type = vespo": (_ZOO, "2026.5.1"),
    "loss_type = luspo": (_ZOO, "2026.7.1"),
    "modes of weights": (_ZOO, "2026.7.1"),
    "use_bias_correction_kl": (_ZOO, "2026.9.3"),
    "off-policy mask of the sampler": (_ZOO, "2026.9.7"),
    "bounded KL": (_ZOO, "2026.9.8"),
    "truncated rows stay masked": (_ZOO, "2026.9.8"),
    _FILLED: (_ZOO, "2026.9.8"),
    "tokens shared out over optimizer steps": (_ZOO, "2026.9.8"),
    "luspo of row sums": (_ZOO, "2026.9.8"),
    "a token without a sampler's log-prob has weight 1": (_ZOO, "2026.9.8"),
    "bnpo over the generation": (_ZOO, "2026.9.9"),
    "top_entropy_quantile and entropy_coef": (_ZOO, "2026.10.7"),
    "vllm_importance_sampling_mode = geometric": (_ZOO, "2026.10.7"),
    "weights of rows": (_ZOO, "2026.10.8"),
    "bnpo over the micro-batch again": (_ZOO, _NEWEST),
    "KL bounded after its ratio": (_ZOO, _NEWEST),
    "TRL's defaults": (_OWN, "2026.9.12"),
    "evaluation loss undivided": (_OWN, "2026.9.8"),
    _SAMPLING: (_OWN, "2026.10.4"),
}
"""What came with a release of unsloth-zoo, or of Unsloth itself."""


def _has(config: Config, feature: str) -> bool:
    option, since = RELEASES[feature]
    return parse_version(config.word(option)) >= parse_version(since)


def _follows_trl(settings: Mapping[str, Setting]) -> bool:
    return parse_version(str(settings[_OWN].value)) >= parse_version(RELEASES["TRL's defaults"][1])


def _own_release(settings: Mapping[str, Setting], _: tuple[int, ...]) -> object:
    return settings[_ZOO].value


def _loss_type(settings: Mapping[str, Setting], version: tuple[int, ...]) -> object:
    return "dapo" if _follows_trl(settings) and version >= (0, 22) else "bnpo"


def _beta(settings: Mapping[str, Setting], _: tuple[int, ...]) -> object:
    none = _follows_trl(settings) and settings["loss_type"].value in ("dapo", "dr_grpo")
    return 0.0 if none else 0.001


def _epsilon_high(settings: Mapping[str, Setting], _: tuple[int, ...]) -> object:
    """The paper's, where `loss_type` asks for it and no value is stated."""
    loss_type = settings["loss_type"]
    if not _follows_trl(settings) or not loss_type.is_stated:
        return None
    return {"dapo": _DAPO_HIGH, "cispo": _CISPO_HIGH}.get(str(loss_type.value))


def _mask_truncated(settings: Mapping[str, Setting], _: tuple[int, ...]) -> object:
    return _follows_trl(settings) and settings["loss_type"].is_stated and settings["loss_type"].value == "dapo"


_FOLLOWS = {
    "loss_type": _loss_type,
    "beta": _beta,
    "epsilon_high": _epsilon_high,
    "mask_truncated_completions": _mask_truncated,
}
_DAPO_HIGH, _CISPO_HIGH = 0.28, 5.0
_GEOMETRIC = ("geometric_mask", "geometric_truncate")


def _option(option: Option) -> Option:
    if option.name in _DEFAULTS:
        option = replace(option, default=_DEFAULTS[option.name], changes=())
    if option.name == "vllm_importance_sampling_mode":
        option = replace(option, choices=(*option.choices, *_GEOMETRIC))
    if option.name == "use_adaptive_entropy":
        return replace(option, meaning="adapt the entropy coefficient: Unsloth then leaves out the bonus")
    return replace(option, follows=_FOLLOWS.get(option.name))


def _environment(name: str, default: object, meaning: str, why_not: str) -> Option:
    """An environment variable that changes the loss in a way that is not computed."""
    kind: OptionKind = "flag" if default is False else "word"
    return Option(
        f"UNSLOTH_GRPO_{name}",
        kind,
        default,
        meaning,
        computed=(default,),
        decides=False,
        why_not=why_not,
        loss_alone=True,
    )


_EXCLUDE = "UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE"

OPTIONS = (
    Option(_ZOO, "word", _NEWEST, "release of unsloth-zoo, which has the loss"),
    Option(_OWN, "word", _NEWEST, "release of Unsloth itself: as a rule that of unsloth_zoo", follows=_own_release),
    *map(_option, TRL_OPTIONS),
    Option(_EXCLUDE, "flag", False, "leave groups of equal rewards out of the loss and its count", decides=False),
    _environment("LOSS_AGGREGATION", None, "average by prompt", "the mean over prompts was not compared"),
    _environment("ROLLOUT_RS", None, "reject as verl's rollout_rs does", "its rejections were not compared"),
    _environment(
        "ROLLOUT_LOGPROBS_AS_OLD", False, "the sampler's log-probs as the old ones", "that ratio was not compared"
    ),
)


def objective(config: Config) -> Objective:
    """Build what Unsloth computes.

    Raises:
        UsageError: if an option asks for what is not computed, or ends the run upstream.
    """
    loss_type, of_rows = config.word("loss_type"), not _has(config, "one chunk")
    _refuse(config, loss_type)
    base = trl.objective(_as_trl(config))
    surrogate, forced = base.surrogate, not _has(config, "TRL's defaults") and loss_type == "dapo"
    if forced:
        surrogate = replace(surrogate, clip_high=_DAPO_HIGH)
    multipliers = gates(config, base)
    excludes = bool(config[_EXCLUDE]) and _has(config, "weights of rows") and loss_type in _EXCLUDED_OF
    objective = replace(
        base,
        trainer="unsloth",
        advantage=replace(base.advantage, scale="none")
        if loss_type == "dr_grpo" and _divides(config)
        else base.advantage,
        surrogate=surrogate,
        aggregation=_aggregation(config, of_rows=of_rows, masks=forced, excludes=excludes),
        kl_loss=_kl(config),
        entropy_bonus=_entropy_bonus(config),
        gates=multipliers,
        also_logs=frozenset(name for name in (_SAMPLING, _FILLED) if _has(config, name)),
        unknown_loss=_padded_mean(config, multipliers)
        or ("" if _has(config, "luspo of row sums") and loss_type == "luspo" else base.unknown_loss)
        or "; ".join(trl.padding_in_weights(config, multipliers)),
    )
    if not excludes:
        return objective
    scopes = {name: getattr(objective, name).leaving_out(RowSet.ZERO_STD) for name in ("policy", "kl", "denominator")}
    return replace(objective, **scopes)


_EXCLUDED_OF = ("bnpo", "dapo", "cispo", "vespo")
"""Loss types in which groups of equal rewards can be left out."""


def _refuse(config: Config, loss_type: str) -> None:
    threshold = config["off_policy_mask_threshold"]
    if threshold is not None and config.version >= (0, 27, 1) and not _has(config, "off-policy mask of the sampler"):
        raise UsageError(
            "off_policy_mask_threshold ends a run of unsloth-zoo before 2026.9.7 with TRL 0.27.1 or newer: set it to "
            "null"
        )
    mode = config.word("vllm_importance_sampling_mode")
    for name, feature in (
        ("loss_type", f"loss_type = {loss_type}"),
        ("", f"vllm_importance_sampling_mode = {mode[:9]}"),
    ):
        if feature in RELEASES and not _has(config, feature):
            words = feature if name else f"vllm_importance_sampling_mode = {mode}"
            raise UsageError(
                f"{words} came with unsloth-zoo {RELEASES[feature][1]}, and the run has {config.word(_ZOO)}"
            )


def _aggregation(config: Config, *, of_rows: bool, masks: bool, excludes: bool) -> Aggregation:
    """How token terms become one loss."""
    loss_type, version = config.word("loss_type"), config.version
    mode = LOSS_TYPES[loss_type].aggregation
    if of_rows and mode == "micro-batch-token-mean":
        mode = "micro-batch-row-mean"
    over_all = _has(config, "bnpo over the generation") and not _has(config, "bnpo over the micro-batch again")
    if excludes or (loss_type == "bnpo" and over_all and version >= (0, 22)):
        mode = OF_GENERATION
    plain, length = mode == OF_GENERATION, config.optional_number("max_completion_length")
    masks = plain and (masks or bool(config["mask_truncated_completions"]))
    stay = _has(config, "truncated rows stay masked")
    if plain and not (_has(config, "tokens shared out over optimizer steps")):
        mode = f"{mode}-of-rows" if of_rows else f"{mode}-unscaled"
    divides = not plain and not _has(config, "evaluation loss undivided")
    return Aggregation(
        mode=mode,
        length=None if length is None else int(length),
        counted_in_loss=not plain or excludes,
        # TRL counts the tokens, with its mask, which the loss makes anew before 2026.9.8.
        counted_before_rejection=masks and version < (1, 9),
        leaves_out_truncated=masks and version >= (1, 9) and not stay,
        needs_micro_batches=(mode == "micro-batch-token-mean" or (plain and of_rows) or _selects(config))
        and config["gradient_accumulation_steps"] != 1,
        eval_batches=True,
        eval_divisor=config.number("gradient_accumulation_steps") if divides else 1.0,
    )


def _selects(config: Config) -> bool:
    """Tell whether the entropy mask is on, whose quantile is that of a micro-batch."""
    return _has(config, "top_entropy_quantile and entropy_coef") and config.number("top_entropy_quantile") < 1


def _kl(config: Config) -> KlTerm | None:
    """Build the KL term: from 2026.9.8 on the log-ratio is bounded by 20 and the term by 10."""
    if config["beta"] == 0:
        return None
    weighted = bool(config["use_bias_correction_kl"]) and _has(config, "use_bias_correction_kl")
    level = cast("Literal['token', 'sequence']", config.word("importance_sampling_level"))
    term = KlTerm(estimator="k3", coef=config.number("beta"), ratio_weighted=weighted, ratio_level=level)
    if _has(config, "KL bounded after its ratio"):
        return replace(term, input_bound=20.0, bounds_ratio=False, clamp=10.0)
    return replace(term, estimator="k3_clamped") if _has(config, "bounded KL") else term


def _entropy_bonus(config: Config) -> EntropyBonus | None:
    """TRL's bonus, which 1.9 counts over the generation as 1.8 does."""
    if not _has(config, "top_entropy_quantile and entropy_coef") or config["use_adaptive_entropy"]:
        return None
    bonus = entropy_bonus(config)
    if bonus is None or bonus.aggregation.mode != OF_GENERATION:
        return bonus
    return replace(bonus, aggregation=replace(bonus.aggregation, mode=f"{OF_GENERATION}-unscaled"))


def _padded_mean(config: Config, multipliers: tuple[TermWeight, ...]) -> str:
    """Say why luspo is not computed: with a term of each token its mean is over padded cells; empty where it is."""
    per_token = any(gate.kind == "importance" and gate.level == "token" for gate in multipliers)
    by_row = config.word("importance_sampling_level") == "sequence" and config["beta"] == 0 and not per_token
    if config.word("loss_type") != "luspo" or by_row or _has(config, "luspo of row sums"):
        return ""
    return unknown_loss(
        "loss_type = luspo",
        "unless it has one term per row (importance_sampling_level = sequence, beta = 0, no weight per token) it takes "
        "the mean over padded cells, and the width of the padding is not in the rows",
    )


def _divides(config: Config) -> bool:
    """Tell whether dr_grpo overrides `scale_rewards`: the value True, and later the word group too."""
    overrides = config.version < (0, 22) or _has(config, "TRL's defaults")
    return config.word("scale_rewards") == "group" and overrides


def _as_trl(config: Config) -> Config:
    """The options that Unsloth ignores at what switches them off, and without the sampler: its weights are its own."""
    off: dict[str, object] = {"use_vllm": False, "off_policy_mask_threshold": None, "use_bias_correction_kl": False}
    off |= {"use_adaptive_entropy": False, "entropy_coef": 0.0, "vllm_importance_sampling_mode": "sequence_mask"}
    if not _has(config, "top_entropy_quantile and entropy_coef"):
        off["top_entropy_quantile"] = 1.0
    if not _has(config, "truncated rows stay masked"):
        off["mask_truncated_completions"] = False
    settings = {name: replace(setting, value=off.get(name, setting.value)) for name, setting in config.settings.items()}
    return replace(config, settings=settings)


def gates(config: Config, base: Objective) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term, beyond what TRL does without a sampler."""
    term_weights = list(base.gates)
    threshold = config.optional_number("off_policy_mask_threshold")
    if threshold is not None:
        sampled = config["use_vllm"] and _has(config, "off-policy mask of the sampler")
        against: Literal["rollout_log_probs", "old_log_probs"] = "rollout_log_probs" if sampled else "old_log_probs"
        lenient = config.version >= (1, 11)
        term_weights.append(TermWeight(kind="off_policy", against=against, high=threshold, nan_is_one=lenient))
    weighs = config["use_vllm"] and config["vllm_importance_sampling_correction"]
    if weighs and _has(config, "weights against the sampler"):
        cap = config.optional_number("vllm_importance_sampling_cap")
        if not _has(config, "modes of weights"):
            # Every mode was this one.
            return (*term_weights, TermWeight(kind="importance", high=cap))
        level, _, outside = config.word("vllm_importance_sampling_mode").partition("_")
        # What TRL refuses of them ends a run of Unsloth too.
        sampler_settings = {name: config.settings[name] for name in ("use_vllm", "vllm_importance_sampling_mode")}
        trl.gates(replace(config, settings={**_as_trl(config).settings, **sampler_settings}))
        high = config.optional_number("vllm_importance_sampling_clip_max")
        low = config.optional_number("vllm_importance_sampling_clip_min")
        if cap is not None:
            low, high = 0.0, cap
        term_weights.append(
            TermWeight(
                kind="importance",
                level=cast("Literal['token', 'sequence', 'geometric']", level),
                low=low,
                high=high,
                outside="cut" if outside == "truncate" else "zero",
                nan_is_one=_has(config, "a token without a sampler's log-prob has weight 1"),
                inside=LOSS_TYPES[config.word("loss_type")].weighs_rows,
            )
        )
    return tuple(term_weights)


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """Unsloth's logged metrics: TRL's of a generation, and those of its loss, of the first rank's own rows."""
    from rolloutdoctor.trainers.lazy import LazyMetrics
    from rolloutdoctor.trainers.trl import metrics as trl_metrics

    metrics = trl_metrics.of_generation(evaluation)
    rows, tokens = evaluation.rows, evaluation.tokens
    if tokens is None or rows is None or rows.length_N is None:
        return LazyMetrics(metrics)
    counts = trl_metrics.Counts(evaluation, rows, tokens, by_rank=True)
    metrics |= {"loss": partial(trl_metrics.loss_of, evaluation, tokens, counts)}
    metrics |= {"kl": partial(_of_rank, evaluation), "completion_length": partial(_of_rank, evaluation)}
    if _SAMPLING in evaluation.objective.also_logs:
        metrics |= {"sampling/": partial(trl_metrics.sampling_of_updates, evaluation, tokens.layout.forward_N)}
    return LazyMetrics(metrics | {"c": partial(trl_metrics.clips, evaluation, tokens, counts)})


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
    filled = _FILLED in objective.also_logs
    kl_N = kl_N if is_row else kl_N / (rows.length_N.clamp(min=1) if filled else rows.length_N)
    parts = [own_N & (tokens.layout.micro_N == part) for part in torch.unique(tokens.layout.micro_N[own_N]).tolist()]
    counted = [int((rows.length_N[part] > 0).sum().clamp(min=1)) if filled else int(part.sum()) for part in parts]
    means = {
        "completion_length": [float(rows.length_N[part].mean()) for part in parts],
        "kl": [float(kl_N[part].sum()) / count for part, count in zip(parts, counted, strict=True)],
    }
    return {name: sum(values) / len(values) for name, values in means.items() if values}


_TRL = trl.TRAINER

TRAINER = replace(
    _TRL,
    name="unsloth",
    title="Unsloth",
    package="trl",
    newest="1.15.0",
    oldest="0.17.0",
    further={name: (ReadCode("2025.2.5", _NEWEST),) for name in (_ZOO, _OWN)},
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    parts={**_TRL.parts, Part.GROUP_STD: PartOptions({"scale_rewards": ("batch", "none"), "loss_type": ("dr_grpo",)})},
    log=replace(
        _TRL.log,
        marks=(frozenset({"completion_length", "completions/mean_length"}),),
        not_recomputed=NOT_RECOMPUTED
        | {
            "sampling/* before 2026.10.4": "they are over padded cells, whose number is not in the rows; so the least "
            "ratio is 0"
        },
        traces=tuple(
            # With beta 0 the KL is logged as 0.
            replace(trace, since="")
            for trace in _TRL.log.traces
            if trace.option != "use_vllm"
        ),
    ),
    choices=Choices(
        advantage=every(scale_rewards=("group", "none")),
        loss=every(loss_type=("grpo", "bnpo", "dr_grpo", "dapo"), unsloth_zoo=(_NEWEST, "2026.8.13", "2026.1.2")),
    ),
)
