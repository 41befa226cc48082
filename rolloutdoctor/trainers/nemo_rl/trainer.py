"""NeMo-RL's GRPO: its configuration's dotted keys, its objective, and its logged metrics.

Read and compared: 0.6.0, 0.7.0, and main of 2026-08-22 (7ea279abfbeb, which calls itself 0.6.0 and computes what 0.7.0
does).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.releases import ReadCode
from rolloutdoctor.trainers.spec import Choices, Log, LossParts, OptionRoles, PartOptions, Trace, Trainer, every

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_NAME = "grpo.adv_estimator.name"
_COEF = "loss_fn.reference_policy_kl_penalty"
_TIS = "loss_fn.truncated_importance_sampling"
_RF = {_NAME: ("reinforce_plus_plus",)}
_SCORED = {_NAME: ("grpo", "gdpo")}
_RATIO = {"loss_fn.disable_ppo_ratio": (False,), "loss_fn.force_on_policy_ratio": (False,)}
_NOT_IN_ROWS = "which tokens they are is not in the rows"

OPTIONS = (
    Option(
        _NAME,
        "word",
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "gdpo", "reinforce_plus_plus", "opd"),
        computed=("grpo", "gdpo", "reinforce_plus_plus"),
        why_not="the teacher's log-probs are not in the rows",
    ),
    Option(
        "ppo.adv_estimator.name",
        "any",
        None,
        "the estimator of NeMo-RL's PPO, which is another program",
        computed=(None,),
        decides=False,
        yields=True,
        why_not="NeMo-RL's PPO is not computed",
    ),
    Option(
        "grpo.adv_estimator.normalize_rewards",
        "flag",
        True,
        "divide by the standard deviation where that is above 0",
        only_with=_SCORED,
    ),
    Option(
        "grpo.adv_estimator.use_leave_one_out_baseline",
        "flag",
        True,
        "mean and standard deviation of the other rows, not of the group",
        only_with=_SCORED,
    ),
    Option(
        "grpo.adv_estimator.reward_weights",
        "numbers",
        None,
        "weight of each reward of gdpo, by its name in alphabetical order; null: one",
        only_with={_NAME: ("gdpo",)},
        works_after=("0.7.0", "every reward has weight 1"),
    ),
    Option("grpo.adv_estimator.minus_baseline", "flag", True, "subtract the mean of the group", only_with=_RF),
    Option(
        "grpo.use_leave_one_out_baseline",
        "flag",
        True,
        "the same for what dynamic sampling drops",
        decides=False,
        yields=True,
    ),
    Option("grpo.use_dynamic_sampling", "flag", False, "drop rows whose standard deviation is 0", decides=False),
    Option("grpo.num_prompts_per_step", "integer", 32, "prompts in a step", low=1, decides=False),
    Option("grpo.num_generations_per_prompt", "integer", 16, "responses per prompt", low=1, decides=False),
    Option("grpo.advantage_clip_low", "number", None, "least advantage; null: none"),
    Option("grpo.advantage_clip_high", "number", None, "largest advantage; null: none"),
    Option("grpo.overlong_filtering", "flag", False, "mask responses that were cut off", decides=False),
    Option(
        "grpo.seq_logprob_error_threshold",
        "number",
        None,
        "mask rows whose mean exp |sampler - trainer| is above; null: none",
        low=0,
        decides=False,
    ),
    *(
        Option(
            f"grpo.{name}_advantage",
            "number",
            None,
            f"advantage of {words}; null: as computed",
            computed=(None,),
            why_not=_NOT_IN_ROWS,
        )
        for name, words in (("invalid_tool_call", "invalid tool calls"), ("malformed_thinking", "malformed thinking"))
    ),
    Option(_COEF, "number", 0.01, "coefficient of the KL term", low=0),
    Option(
        "loss_fn.reference_policy_kl_type", "word", "k3", "the KL estimator; of errors, too", choices=("k1", "k2", "k3")
    ),
    Option("loss_fn.kl_input_clamp_value", "number", 20.0, "bound on the log-ratio; null: none", low=0, optional=True),
    Option("loss_fn.kl_output_clamp_value", "number", 10.0, "bound on a token's KL; null: none", low=0, optional=True),
    Option("loss_fn.use_on_policy_kl_approximation", "flag", False, "weigh the KL by the ratio of policy to sampler"),
    Option("loss_fn.use_kl_in_reward", "flag", False, "subtract the KL from the advantages of reinforce_plus_plus"),
    Option("loss_fn.ratio_clip_min", "number", 0.2, "how far the ratio may fall", low=0, only_with=_RATIO),
    Option("loss_fn.ratio_clip_max", "number", 0.2, "how far the ratio may rise", low=0, only_with=_RATIO),
    Option("loss_fn.ratio_clip_c", "number", None, "dual clip; null: none", low=1, only_with=_RATIO),
    Option(
        "loss_fn.use_importance_sampling_correction", "flag", False, "weigh the policy term by trainer over sampler"
    ),
    Option(
        f"{_TIS}_type",
        "word",
        None,
        "what becomes of weights outside of the bounds: cut, 0, or rows masked by their geometric mean",
        choices=("tis", "icepop", "seq-mask-tis"),
    ),
    Option(f"{_TIS}_ratio", "number", None, "upper bound of these weights", low=0),
    Option(f"{_TIS}_ratio_min", "number", None, "lower bound of these weights", low=0),
    Option("loss_fn.sequence_level_importance_ratios", "flag", False, "one ratio, and one weight, for each response"),
    Option("loss_fn.token_level_loss", "flag", True, "a mean over tokens, not over responses of their means"),
    Option("loss_fn.disable_ppo_ratio", "flag", False, "weigh the log-prob itself by the advantage"),
    Option("loss_fn.force_on_policy_ratio", "flag", False, "take the policy at the loss for the old one"),
    Option("loss_fn.use_cispo", "flag", False, "clipped ratio times log-prob", works_after=("0.6.0", "it has none")),
    Option(
        "loss_fn.positive_example_nll_weight",
        "number",
        0.0,
        "weight of the log-likelihood of responses with a reward above 0",
        low=0,
        works_after=("0.7.0", "GRPO's training data has no rewards, without which the term is left out"),
    ),
)


def objective(config: Config) -> Objective:
    """Build what ``ClippedPGLossFn`` and ``_create_advantage_estimator`` make of a configuration.

    Raises:
        UsageError: for combinations that NeMo-RL itself refuses, and for those that are not computed.
    """
    _refuse(config)
    coef, in_reward = config.number(_COEF), bool(config["loss_fn.use_kl_in_reward"])
    estimator, kl_type = config.word(_NAME), config.word("loss_fn.reference_policy_kl_type")
    by_row, forced = bool(config["loss_fn.sequence_level_importance_ratios"]), config["loss_fn.force_on_policy_ratio"]
    kind, new = "ppo_dual_clip", config.version > (0, 6, 0)
    if config["loss_fn.use_cispo"]:
        kind = "cispo_clipped"
    elif config["loss_fn.disable_ppo_ratio"] and not forced:
        kind = "gpg"
    penalised = estimator == "reinforce_plus_plus" and in_reward
    to_sampler = bool(config["loss_fn.use_on_policy_kl_approximation"])
    return Objective(
        trainer="nemo-rl",
        version=".".join(map(str, config.version)),
        advantage=_advantage(config, estimator, penalised=penalised),
        surrogate=Surrogate(
            kind=kind,
            clip_low=config.number("loss_fn.ratio_clip_min"),
            clip_high=config.number("loss_fn.ratio_clip_max"),
            cap=None if forced else config.optional_number("loss_fn.ratio_clip_c"),
            old="policy_log_probs" if forced else "old_log_probs",
            level="sequence" if by_row and kind == "ppo_dual_clip" and not forced else "token",
        ),
        aggregation=Aggregation(mode="token-mean")
        if config["loss_fn.token_level_loss"]
        else Aggregation(mode="trajectory-mean-token-mean", leaves_out_rejected=True),
        # Up to 0.6.0 a KL in the reward stays in the loss as well.
        kl_loss=KlTerm(
            estimator=kl_type,
            coef=coef,
            ratio_weighted=new,
            ratio_to=None if not new else "rollout_log_probs" if to_sampler else "policy_log_probs",
            input_bound=config.optional_number("loss_fn.kl_input_clamp_value"),
            clamp=config.optional_number("loss_fn.kl_output_clamp_value"),
        )
        if coef and not (in_reward and new)
        else None,
        # The clamps of the loss do not reach it.
        kl_reward=KlTerm(estimator=kl_type, coef=coef, log_probs="old_log_probs", input_bound=20.0, clamp=10.0)
        if penalised
        else None,
        gates=_gates(config, by_row=by_row, forced=bool(forced)),
        metric_columns=frozenset({"old_log_probs", "policy_log_probs", "rollout_log_probs", "response_mask_pre"}),
        also_logs=frozenset(
            [
                f"train/gen_kl_error of {kl_type}",
                "train/filtered_reward" if config["grpo.use_dynamic_sampling"] else "train/reward",
                *(["train/max_seq_mult_prob_error"] if config["grpo.seq_logprob_error_threshold"] is None else []),
            ]
        ),
        unknown_loss="; ".join(_losses_not_computed(config)),
    )


def _losses_not_computed(config: Config) -> Iterator[str]:
    """Yield what leaves the loss of a release unknown."""
    name = "loss_fn.positive_example_nll_weight"
    if config.version > (0, 7, 0) and config.number(name):
        yield unknown_loss(f"{name} = {config[name]}", "the term that came after release 0.7.0 was not compared")
    name = "loss_fn.use_on_policy_kl_approximation"
    if config.version <= (0, 6, 0) and config[name]:
        yield unknown_loss(f"{name} = True", "that of release 0.6.0 was not compared")


def _truncation(config: Config) -> tuple[object, float | None, float | None]:
    """Return what becomes of weights outside of the bounds, the upper bound and the lower one.

    Up to 0.6.0 nothing is cut without an upper bound, whatever the configuration of its examples has beside it; 0.7.0
    refuses that, so that a run that states no release is of one before.
    """
    high, low = (config.optional_number(f"{_TIS}_{end}") for end in ("ratio", "ratio_min"))
    if high is None and (config.version <= (0, 6, 0) or not config.is_release):
        return None, None, None
    return config[f"{_TIS}_type"], high, low


def _refuse(config: Config) -> None:
    on = {name for name in config.settings if config[name] is True}
    forced, in_reward = "loss_fn.force_on_policy_ratio", "loss_fn.use_kl_in_reward"
    by_row, cispo, ratio_c = "loss_fn.sequence_level_importance_ratios", "loss_fn.use_cispo", "loss_fn.ratio_clip_c"
    kind, high, low = _truncation(config)
    refused = {
        f"{by_row} needs token_level_loss = false": by_row in on and "loss_fn.token_level_loss" in on,
        f"{cispo} goes with neither of disable_ppo_ratio, force_on_policy_ratio, sequence_level_importance_ratios, "
        "ratio_clip_c and token_level_loss = false": cispo in on
        and (
            bool(on & {"loss_fn.disable_ppo_ratio", forced, by_row})
            or config[ratio_c] is not None
            or "loss_fn.token_level_loss" not in on
        ),
        f"{ratio_c} must be above 1": config[ratio_c] == 1,
        f"{_TIS}_type needs use_importance_sampling_correction": kind is not None
        and "loss_fn.use_importance_sampling_correction" not in on,
        f"{_TIS}_type and {_TIS}_ratio, above 0, need each other": (kind is None) != (not high),
        f"{_TIS}_ratio_min must be set for icepop and seq-mask-tis": kind in ("icepop", "seq-mask-tis") and low is None,
        f"{_TIS}_ratio_min must not be above {_TIS}_ratio": bool(high) and (low or 0.0) > (high or 0.0),
        f"seq-mask-tis goes without {by_row}": kind == "seq-mask-tis" and by_row in on,
        f"{in_reward} needs the log-probs that {forced} leaves out": in_reward in on
        and forced in on
        and config.number(_COEF) != 0
        and config["grpo.seq_logprob_error_threshold"] is None,
    }
    for why, holds in refused.items():
        if holds:
            raise UsageError(f"{why}; NeMo-RL refuses it too")
    if config.version <= (0, 6, 0) and cispo in on:
        raise UsageError(f"{cispo} came after release 0.6.0")


def _advantage(config: Config, estimator: str, *, penalised: bool) -> AdvantageRule:
    others, divided = (
        bool(config[f"grpo.adv_estimator.{name}"]) for name in ("use_leave_one_out_baseline", "normalize_rewards")
    )
    low, high = (config.optional_number(f"grpo.advantage_clip_{name}") for name in ("low", "high"))
    bounds = (
        None
        if low is None and high is None
        else (-float("inf") if low is None else low, float("inf") if high is None else high)
    )
    if estimator == "reinforce_plus_plus":
        centred = bool(config["grpo.adv_estimator.minus_baseline"])
        names = ("penalised_scores", "penalised_group_scores") if penalised else ("raw", "grpo")
        return AdvantageRule(
            estimator=names[centred], scale="none", singleton="zero", whitened=True, variance_floor=True, bounds=bounds
        )
    if estimator == "grpo":
        name = "leave_one_out_score" if others else "grpo"
    else:
        name = "normalised_sum_of_others" if others else "normalised_sum"
    weights = (
        config["grpo.adv_estimator.reward_weights"] if config.version > (0, 7, 0) and estimator == "gdpo" else None
    )
    assert weights is None or isinstance(weights, tuple)
    return AdvantageRule(
        estimator=name,
        scale="group" if divided else "none",
        epsilon=1e-6,
        singleton="zero",
        reward_weights=weights or (),
        # The deviation that is rounding where siblings are equal is what is computed: `loo-std` is its fix.
        one_pass=divided,
        knows_single=divided,
        single=divided,
        bounds=bounds,
    )


def _gates(config: Config, *, by_row: bool, forced: bool) -> tuple[TermWeight, ...]:
    if not config["loss_fn.use_importance_sampling_correction"]:
        return ()
    kind, high, low = _truncation(config)
    weight = partial(TermWeight, kind="importance", of="policy_log_probs" if forced else "old_log_probs", finite=True)
    level: Literal["token", "sequence"] = "sequence" if by_row else "token"
    match kind:
        case "tis":
            # Up to 0.6.0 the lower bound is 0 whatever it says.
            return (weight(level=level, low=(low or 0.0) if config.version > (0, 6, 0) else 0.0, high=high),)
        case "icepop":
            return (weight(level=level, low=low, high=high, outside="zero"),)
        case "seq-mask-tis":
            return (weight(), weight(level="geometric", low=low, high=high, outside="zero", indicator=True))
        case _:
            return (weight(level=level),)


def group_size(config: Config, split: str) -> int | None:
    """Dynamic sampling drops rows of a group, not groups."""
    dropped = split != "train" or config["grpo.use_dynamic_sampling"]
    return None if dropped else int(config.number("grpo.num_generations_per_prompt"))


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """NeMo-RL's logged metrics, `train/*`."""
    from rolloutdoctor.trainers.nemo_rl import metrics as nemo_rl_metrics

    return nemo_rl_metrics.nemo_rl(evaluation)


def loss_parts(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    """Take the loss apart: its KL term is the coefficient times the logged KL."""
    if config is None or not {"train/loss", "train/kl_penalty"} <= logged.keys():
        return None
    kl = config.number(_COEF) * logged["train/kl_penalty"]
    return LossParts(policy=logged["train/loss"] - kl, kl=kl)


_NOT_RECOMPUTED = {
    "train/grad_norm, train/lr, train/wd, train/moe/*, train/mtp/*, train/draft_*": "they need the parameters",
    "train/baseline_reward/*": "they compare float32 means of rewards with 0 and 1",
    "train/advantages/sum": "it is over padding and prompts as well",
    "train/total_num_tokens, train/mean_prompt_length, train/global_valid_*": "they count prompts and padding",
    "train/*gen_tokens*, train/*turn*, train/truncation_rate, train/natural_termination_rate": "they are of all "
    "rollouts, before any is left out",
    "train/dynamic_sampling_*, train/num_mask*, train/masked_correct_pct": "they are of rows that were left out",
    "validation/*": "evaluation rows are not written",
    "performance/*, timing/*, refit/*, ray/*": "they are timings",
}

_DUMP = "NeMo-RL writes train_data_step*.jsonl to logger.log_dir unless NeMo-Gym logs the responses"
_ADD = (
    "in nemo_rl/algorithms/grpo.py, before log_batched_dict_as_jsonl, add log_data[NAME] = train_data[NAME].tolist() "
    "for NAME in"
)

TRAINER = Trainer(
    name="nemo-rl",
    title="NeMo-RL",
    newest="0.7.0",
    oldest="0.6.0",
    read=(ReadCode("0.6.0", "0.7.0", commit="81aa43dda476"),),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="train/loss",
        grad_norm="train/grad_norm",
        kl=("train/kl_penalty",),
        loss_is_whole=True,
        quantities={
            "train/loss": "loss",
            "train/kl_penalty": "kl",
            "train/reward": "rewards",
            "train/filtered_reward": "rewards",
            "train/advantages/*": "advantages",
            "train/token_mult_prob_error": "sampler_gap",
            "train/*_seq_mult_prob_error*": "sampler_gap",
            "train/*_kl_error": "sampler_gap",
            "train/js_divergence_error": "sampler_gap",
            "train/sampling_importance_ratio": "sampler_gap",
            "train/approx_entropy": "entropy",
        },
        not_recomputed=_NOT_RECOMPUTED,
        traces=(Trace("train/is_oob_ratio", f"{_TIS}_type", bool, f"with a {_TIS}_type"),),
        loss_parts=loss_parts,
    ),
    recording={
        "ref_log_probs": f"{_ADD} reference_policy_logprobs",
        "policy_log_probs": f"{_DUMP}; log-probs at the loss are in no file, and prev_logprobs are taken for them",
        "rewards": f"{_ADD} the names of the rewards in repeated_batch, reward/NAME",
        "*": _DUMP,
        "metrics": "NeMo-RL logs to W&B, TensorBoard or MLflow (logger.wandb_enabled and its like): give an export too",
    },
    roles=OptionRoles(
        kl=_COEF,
        total_steps=("grpo.max_num_steps",),
        group={"train": "grpo.num_generations_per_prompt"},
        truncation="grpo.overlong_filtering",
        must_state={"grpo.adv_estimator.name": "grpo"},
        advised={
            "gradient clipping": "policy.max_grad_norm",
            "the learning rate": "policy.optimizer.kwargs.lr",
            "the KL coefficient": _COEF,
            "the upper clip range": "loss_fn.ratio_clip_max",
            "the response length limit": "policy.max_total_sequence_length",
        },
    ),
    parts={
        Part.KL_LOSS: PartOptions({_COEF: (0,), "loss_fn.use_kl_in_reward": (True,)}),
        Part.KL_REWARD: PartOptions({"loss_fn.use_kl_in_reward": (False,), _NAME: ("grpo", "gdpo")}),
        Part.KL_ESTIMATOR: PartOptions({"loss_fn.reference_policy_kl_type": ()}),
        Part.GROUP_BASELINE: PartOptions({_NAME: (), "grpo.adv_estimator.minus_baseline": (False,)}),
        Part.GROUP_STD: PartOptions(
            {_NAME: ("reinforce_plus_plus",), "grpo.adv_estimator.normalize_rewards": (False,)}
        ),
        Part.POLICY_LOSS: PartOptions({"loss_fn.token_level_loss": (), "loss_fn.disable_ppo_ratio": ()}),
    },
    choices=Choices(
        advantage=(
            *every(
                grpo__adv_estimator__name=("grpo",),
                grpo__adv_estimator__use_leave_one_out_baseline=(True, False),
                grpo__adv_estimator__normalize_rewards=(True, False),
            ),
            *every(
                grpo__adv_estimator__name=("reinforce_plus_plus",), grpo__adv_estimator__minus_baseline=(True, False)
            ),
        ),
        kl=every(
            loss_fn__reference_policy_kl_type=("k1", "k2", "k3"),
            loss_fn__use_on_policy_kl_approximation=(False, True),
            loss_fn__token_level_loss=(True, False),
        ),
        loss=every(loss_fn__token_level_loss=(True, False), loss_fn__ratio_clip_max=(0.2, 0.28)),
    ),
    aliases={"prev_logprobs": "old_log_probs", "generation_logprobs": "rollout_log_probs"},
    masks_by_product=True,
)
