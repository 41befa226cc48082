"""prime-rl: its options, dotted as in its configuration, its objective, and what it logs.

Read and compared: prime-rl 0.3 to 0.8, and its main branch of August 2026 (559b44772), whose options count as those of
0.8.1.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.objective import (
    AdvantageRule,
    Aggregation,
    KlTerm,
    LengthTerm,
    Objective,
    RowSet,
    Scope,
    Surrogate,
)
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.releases import ReadCode
from rolloutdoctor.trainers.spec import Choices, Log, OptionRoles, PartOptions, Trace, Trainer, Updates, every

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_LOSS, _ALGO, _ADVANTAGE = "trainer.loss", "orchestrator.algo", "orchestrator.advantage"
STORED = "stored_advantages"
_FILTER = "orchestrator.train.filter_zero_advantages"
_COEF_PENALTY, _PENALTY = f"{_ADVANTAGE}.length_penalty", f"{_ALGO}.length_penalty"
_RESCALING, _SPAN = f"{_ADVANTAGE}.length_shaping_alpha", "orchestrator.seq_len"
_WEIGHTED_MEAN, _WEIGHTED_BASELINE = (f"{_ADVANTAGE}.length_weighted_{of}" for of in ("mean", "baseline"))
_OTHER_TERMS = "terms of another component of the loss, such as a cross-entropy, are not in the rows"


_DROPPED, _ROW_OUT = "a token is dropped where its probability {} by more", "{} have no policy term"
_BOUNDS: tuple[tuple[str, float, str, str, str, str], ...] = (
    ("dppo_mask_low", 0.2, _DROPPED.format("fell") + ", if it is not", "0.6", "", "default"),
    ("dppo_mask_high", 0.2, _DROPPED.format("rose") + ", if its advantage is positive", "0.6", "", "default"),
    ("ipo_threshold", 0.1, _DROPPED.format("moved"), "0.6", "", "ipo"),
    ("ipo_mask_low", 0.2, _DROPPED.format("fell"), "0.5", "0.6", ""),
    ("ipo_mask_high", 0.2, _DROPPED.format("rose"), "0.5", "0.6", ""),
    ("token_mask_low", 0.125, _ROW_OUT.format("tokens with a ratio below it"), "", "0.5", ""),
    ("token_mask_high", 8.0, _ROW_OUT.format("tokens with a ratio above it"), "", "0.5", ""),
    ("geo_mask_low", 0.1, _ROW_OUT.format("rows whose geometric mean of ratios is below it"), "", "0.5", ""),
    ("geo_mask_high", 10.0, _ROW_OUT.format("rows whose geometric mean of ratios is above it"), "", "0.5", ""),
    ("sequence_mask_low", 0.0, _ROW_OUT.format("rows with a ratio below it"), "", "0.5", ""),
    ("sequence_mask_high", 100.0, _ROW_OUT.format("rows with a ratio above it"), "", "0.5", ""),
    ("sequence_clip_high", 10.0, "largest product of a row's ratios, with ratio_type = sequence", "", "0.5", ""),
    ("adv_tau", 1.0, "the advantages are multiplied by it", "", "", ""),
)
"""Name, default and meaning, the first release with it and the first without, and the loss that it is of."""


_SOURCES = ("orchestrator.train.source", "orchestrator.train.env")


def _bounds() -> Iterator[Option]:
    """Numbers of the loss."""
    for name, default, meaning, since, until, kind in _BOUNDS:
        only_with = {f"{_LOSS}.type": (kind,)} if kind else {}
        yield Option(
            f"{_LOSS}.{name}", "number", default, meaning, since=since, until=until, low=0, only_with=only_with
        )


def _length_options() -> Iterator[Option]:
    """Options that shape rewards and baselines by length; a penalty is there where any of its options is."""
    for name, since, until in ((_WEIGHTED_MEAN, "", "0.5"), (_WEIGHTED_BASELINE, "0.6", "0.7")):
        yield Option(name, "flag", False, "weigh the mean of a group by lengths", since=since, until=until)
    yield Option(
        _RESCALING,
        "number",
        None,
        "rewards are divided by 1 + this times length over mean length",
        since="0.5",
        until="0.6",
        low=0,
    )
    for name, meaning, since, until in (
        (
            f"{_COEF_PENALTY}.coef",
            "share of the mean reward lost for a length of seq_len (0.25 with a penalty)",
            "0.6",
            "0.7",
        ),
        *(
            (
                f"{_PENALTY}.num_{part}_weight",
                f"share of the mean reward lost for the most {words} ({share} with a penalty)",
                "0.7",
                "",
            )
            for part, words, share in (
                ("output_tokens", "sampled tokens", 0.25),
                ("input_tokens", "other tokens", 0.1),
                ("turns", "turns", 0.1),
            )
        ),
    ):
        yield Option(name, "number", None, meaning, since=since, until=until, low=0)
    yield Option(
        f"{_COEF_PENALTY}.gate_by_correctness",
        "flag",
        None,
        "the penalty is multiplied by the reward",
        since="0.6",
        until="0.7",
    )
    yield Option(f"{_PENALTY}.type", "word", None, "the penalty for length", since="0.7", choices=("linear",))
    yield Option(_SPAN, "integer", 2048, "the length that a penalty counts as a whole", since="0.6", until="0.7", low=1)


OPTIONS = (
    Option(
        f"{_LOSS}.type",
        "word",
        "default",
        "the policy loss",
        since="0.4",
        values_since={"ipo": "0.6"},
        choices=("default", "ipo", "sft", "custom"),
        computed=("default", "ipo"),
        why_not="a custom function, or a loss without advantages, is not computed",
        loss_alone=True,
    ),
    *_bounds(),
    Option(
        f"{_LOSS}.kl_tau",
        "number",
        1e-3,
        "coefficient of the squared log-ratio to the sampler; before 0.5 of the log-ratio in the policy term",
        changes=(("0.5", 0.0),),
        low=0,
    ),
    Option(
        f"{_LOSS}.teacher_tau",
        "number",
        0.0,
        "coefficient of the KL to a teacher",
        until="0.6",
        computed=(0.0,),
        why_not="the teacher's log-probs are not in the rows",
        loss_alone=True,
    ),
    Option(
        f"{_LOSS}.ratio_type",
        "word",
        "token",
        "the ratio that weighs: the token's, or the product of its row's",
        until="0.5",
        choices=("token", "sequence"),
    ),
    Option(
        f"{_ALGO}.type",
        "word",
        "grpo",
        "how rewards become advantages",
        since="0.7",
        choices=("grpo", "max_rl", "rae", "hierarchical_grpo", "echo", "opd", "opsd", "sft"),
        values_since={"rae": "0.8", "hierarchical_grpo": "0.8"},
        computed=("grpo", "max_rl", "rae", "hierarchical_grpo"),
        why_not=_OTHER_TERMS,
    ),
    Option(
        f"{_ADVANTAGE}.type",
        "word",
        "default",
        "how rewards become advantages",
        since="0.4",
        until="0.7",
        choices=("default", "custom"),
    ),
    *_length_options(),
    Option(
        STORED,
        "flag",
        False,
        "take the advantages that the file holds: it has no rewards, or their rule is not known; not an option of "
        "prime-rl",
        decides=False,
    ),
    Option(_FILTER, "flag", True, "leave tokens of an advantage of exactly 0 out of the loss", since="0.8.1"),
    Option(
        "orchestrator.post_batch_filters",
        "any",
        None,
        "what is dropped from a batch; null: rows of an advantage of 0",
        since="0.6",
        until="0.8.1",
    ),
    *(
        Option(name, "any", None, "the environments; each may have its own algorithm", decides=False)
        for name in _SOURCES
    ),
    Option("orchestrator.group_size", "integer", 1, "responses per prompt", since="0.6", low=1, decides=False),
    Option("orchestrator.rollouts_per_example", "integer", 1, "the same before 0.8", until="0.8", low=1, decides=False),
)

_NO_ZERO = Scope(frozenset({RowSet.ZERO_ADVANTAGE}))
_SAMPLER: Literal["rollout_log_probs"] = "rollout_log_probs"


def objective(config: Config) -> Objective:
    """Build what prime-rl's trainer computes from what its orchestrator ships.

    Raises:
        UsageError: for advantages whose rule needs more than the rows.
    """
    _refuse_own_algorithms(config)
    early = config.version < (0, 5, 0)
    left_out = _NO_ZERO if _filters(config) else Scope()
    by_row = early and config.word(f"{_LOSS}.ratio_type") == "sequence"
    mode = "token-mean" if config.version >= (0, 6, 0) else "micro-batches-row-mean" if by_row else "rank-token-mean"
    return Objective(
        trainer="prime-rl",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator=_estimator(config),
            scale="none",
            epsilon=0.0,
            singleton="zero",
            length_term=_length_term(config),
            weighs_masked=bool(config[_WEIGHTED_MEAN]),
            # A trace has one advantage, whatever the branches that it is trained in.
            one_vote=True,
        ),
        surrogate=_ratio_masks(config) if early else _band(config),
        aggregation=Aggregation(mode=mode, needs_micro_batches=by_row),
        # Half a square is k2. The squares are of every token, dropped ones included.
        kl_loss=None
        if early
        else KlTerm(estimator="k2", coef=2 * config.number(f"{_LOSS}.kl_tau"), reference=_SAMPLER),
        has_kl_loss=not early,
        baseline_rows=Scope(_not_in_baseline(config)),
        policy=left_out,
        kl=left_out,
        denominator=left_out,
        metric=left_out,
        metric_columns=frozenset({"entropy", "micro_batch_id", "rank"}),
    )


def _not_in_baseline(config: Config) -> frozenset[RowSet]:
    """Return the rows that leave the baseline: rollouts with an error, which before 0.6 lose only their mask."""
    unscored = frozenset({RowSet.UNSCORED})
    return unscored if config.version < (0, 6, 0) else unscored | {RowSet.REJECTED}


def _band(config: Config) -> Surrogate:
    """Build the bounds on probabilities."""
    if config.version < (0, 6, 0):
        kind, low, high = "probability_band", "ipo_mask_low", "ipo_mask_high"
    elif config.word(f"{_LOSS}.type") == "ipo":
        kind, low, high = "probability_band", "ipo_threshold", "ipo_threshold"
    else:
        kind, low, high = "dppo_tv", "dppo_mask_low", "dppo_mask_high"
    return Surrogate(
        kind=kind,
        clip_low=config.number(f"{_LOSS}.{low}"),
        clip_high=config.number(f"{_LOSS}.{high}"),
        old=_SAMPLER,
        coef=config.number(f"{_LOSS}.adv_tau"),
        live_ratio=True,
    )


def _ratio_masks(config: Config) -> Surrogate:
    """Build the masks of ratios that 0.3 and 0.4 have."""
    names = {
        "token_low": "token_mask_low",
        "token_high": "token_mask_high",
        "mean_low": "geo_mask_low",
        "mean_high": "geo_mask_high",
        "row_low": "sequence_mask_low",
        "row_high": "sequence_mask_high",
        "weight_high": "sequence_clip_high",
        "advantage": "adv_tau",
        "pull": "kl_tau",
    }
    numbers = {option: config.number(f"{_LOSS}.{name}") for option, name in names.items()}
    return Surrogate(
        kind="ratio_masked",
        clip_low=1 - numbers["token_low"],
        clip_high=numbers["token_high"] - 1,
        old=_SAMPLER,
        level="sequence-sum" if config.word(f"{_LOSS}.ratio_type") == "sequence" else "token",
        numbers=numbers,
    )


def _estimator(config: Config) -> str:
    """Return the name of the estimator.

    Raises:
        UsageError: where the rows do not hold what the rule needs.
    """
    if config[STORED]:
        return "as_stored"
    rule, custom = config.word(f"{_ALGO}.type"), config.word(f"{_ADVANTAGE}.type") == "custom"
    why = {"rae": "its baseline is a history of earlier steps", "hierarchical_grpo": "the rows do not name agents"}
    if custom or rule in why:
        name = f"{_ADVANTAGE}.type = custom" if custom else f"{_ALGO}.type = {rule}"
        reason = "a custom function is not part of the run file" if custom else why[rule]
        raise UsageError(f"{name}: {reason}; set {STORED} = true to compute the loss from the file's advantages")
    if config[_WEIGHTED_MEAN] or config[_WEIGHTED_BASELINE]:
        return "opo"
    return "relative_to_mean" if rule == "max_rl" else "grpo"


def _length_term(config: Config) -> LengthTerm | None:
    """Build what the length of a response does to its reward: only `grpo` and the default advantage look at it."""

    def number(name: str, default: float) -> float:
        value = config.optional_number(name)
        return default if value is None else value

    if config[STORED] or (config.version >= (0, 7, 0) and config.word(f"{_ALGO}.type") != "grpo"):
        return None
    if config[_RESCALING] is not None:
        return LengthTerm(rescaling=config.number(_RESCALING))
    coef, gated = f"{_COEF_PENALTY}.coef", f"{_COEF_PENALTY}.gate_by_correctness"
    if config[coef] is not None or config[gated] is not None:
        return LengthTerm(output=number(coef, 0.25), span=int(config.number(_SPAN)), gated=bool(config[gated]))
    output, inputs, turns = (f"{_PENALTY}.num_{name}_weight" for name in ("output_tokens", "input_tokens", "turns"))
    if all(config[name] is None for name in (f"{_PENALTY}.type", output, inputs, turns)):
        return None
    return LengthTerm(output=number(output, 0.25), input=number(inputs, 0.1), turns=number(turns, 0.1))


def _refuse_own_algorithms(config: Config) -> None:
    """Refuse environments that do otherwise than the options say.

    Raises:
        UsageError: if there is one.
    """
    for name in _SOURCES:
        sources = config[name]
        for each in sources if isinstance(sources, list | tuple) else ():
            algorithm = each.get("algo") if isinstance(each, Mapping) else None
            if isinstance(algorithm, Mapping) and not config[STORED]:
                rule = algorithm.get("type", config[f"{_ALGO}.type"])
                if rule != config[f"{_ALGO}.type"] or algorithm.get("length_penalty") is not None:
                    raise UsageError(
                        f"{name}: the environment {each.get('name', '')} has its own algorithm ({rule}), which is not "
                        f"computed; set {STORED} = true to compute the loss from the file's advantages"
                    )


def _filters(config: Config) -> bool:
    """Tell whether rows without an advantage are dropped."""
    if config.version >= (0, 8, 1):
        return bool(config[_FILTER])
    filters = config["orchestrator.post_batch_filters"]
    if config.version < (0, 6, 0) or filters is None:
        return config.version >= (0, 6, 0)
    named = [each for each in filters if isinstance(each, Mapping)] if isinstance(filters, list | tuple) else []
    return any(each.get("type") == "zero_advantage" and each.get("enforce", True) for each in named)


def group_size(config: Config, split: str) -> int | None:
    """Return how many responses a prompt gets; one is the default of every environment that may say otherwise."""
    name = "orchestrator.group_size" if config.version >= (0, 6, 0) else "orchestrator.rollouts_per_example"
    size = int(config.number(name))
    return size if size > 1 else None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """prime-rl's logged metrics; see `rolloutdoctor.trainers.prime_rl.metrics`."""
    from rolloutdoctor.trainers.prime_rl import metrics as prime_rl_metrics

    return prime_rl_metrics.prime_rl(evaluation)


def loss_share(evaluation: "Evaluation") -> float | None:
    """Return the share of the step's loss that is logged; None where the micro-batches are not known."""
    from rolloutdoctor.trainers.prime_rl import metrics as prime_rl_metrics

    return prime_rl_metrics.loss_share(evaluation)


_NOT_RECOMPUTED = {
    "*/median, */std, */min": "medians, deviations and least values; means and largest values are recomputed",
    "optim/grad_norm, optim/lr, optim/zero_grad_ratio": "they need the parameters and the schedule",
    "ref_kl*, nll/*, teacher_kl/*": "they are of other components of the loss",
    "train/*, eval/*, batch/*, off_policy/*, reward/*, is_truncated/*, *_len/*": "they are over traces, shipped or not",
    "max_vio/*, routing_confidence/*": "they are of the router of a mixture of experts",
    "trainer_probs/*, inference_probs/*": "they are dropped before they are logged, or show no more than the rows",
    "perf/*, time/*, progress/*, system/*": "they are timings and counts",
}

_EXPORT = "set trainer.enable_token_export = true: prime-rl then writes token_exports/"
_TRACES = (
    "give prime-rl's traces (rollouts/) as well as its token exports, or record with rolloutdoctor.recorders.own_loop"
)

TRAINER = Trainer(
    name="prime-rl",
    title="prime-rl",
    newest="0.8.1",
    oldest="0.3.0",
    read=(
        ReadCode("0.3.0", "0.8.0", commit="60bc29547a88"),
        ReadCode("0.8.1", commit="559b44772e47", main_of="2026-08-21", tag="0.8.1.dev67"),
    ),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="loss/mean",
        grad_norm="optim/grad_norm",
        quantities={
            "loss/mean": "loss",
            "kl_ent_ratio/mean": "k3_over_entropy",
            "mismatch_kl/*": "sampler_k3",
            "masked_mismatch_kl/*": "chosen_k3",
            "unmasked_mismatch_kl/*": "chosen_k3",
            "entropy/*": "entropy",
            "is_masked*": "row_share",
            "masked_advantage_*": "row_share",
            "geo_*": "mean",
            "sequence_masked_*": "mean",
        },
        not_recomputed=_NOT_RECOMPUTED,
        traces=(
            Trace(
                "masked_advantage_positive/mean",
                f"{_LOSS}.type",
                # A function of the user's own may return any metric.
                lambda value: value in ("default", "custom"),
                "with trainer.loss.type = default",
                value="default",
            ),
        ),
        loss_share=loss_share,
        file="metrics.jsonl",
    ),
    recording={
        "reward": _TRACES,
        "group_id": _TRACES,
        "ref_log_probs": "prime-rl has no reference model in RL",
        "old_log_probs": _EXPORT,
        "*": _EXPORT,
        "metrics": "prime-rl logs to metrics.jsonl (monitors.file), and to W&B: give either as well",
    },
    agents=dict.fromkeys(("trajectory_id", "task_id", "turns", "status", "error"), _TRACES),
    roles=OptionRoles(
        group={"train": "orchestrator.group_size"},
        must_state={f"{_ALGO}.type": "grpo"},
        total_steps=("trainer.max_steps", "max_steps"),
    ),
    # The old log-probs are the sampler's: no pass over the rows comes before the loss.
    updates=Updates(single=lambda config: True),
    parts={
        Part.KL_LOSS: PartOptions({f"{_LOSS}.kl_tau": (0,)}),
        Part.KL_REWARD: PartOptions(never="prime-rl has no KL penalty in the reward"),
        Part.KL_ESTIMATOR: PartOptions({f"{_LOSS}.kl_tau": (0,)}),
        Part.GROUP_BASELINE: PartOptions({STORED: (True,)}),
        Part.GROUP_STD: PartOptions(never="prime-rl divides by no standard deviation"),
        Part.POLICY_LOSS: PartOptions({f"{_LOSS}.type": ()}),
    },
    choices=Choices(
        advantage=every(orchestrator__algo__type=("grpo", "max_rl")),
        loss=(
            *every(
                trainer__loss__type=("default",),
                trainer__loss__kl_tau=(1e-3, 0.0),
                orchestrator__train__filter_zero_advantages=(True, False),
            ),
            *every(trainer__loss__type=("ipo",), trainer__loss__ipo_threshold=(0.1, 0.2)),
        ),
    ),
)
