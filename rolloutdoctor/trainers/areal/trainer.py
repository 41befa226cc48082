"""AReaL: options of its PPO actor, its objective, and its logged metrics.

Read and compared: 1.0.4, 2.0.0, and main of 2026-08 (cbff54d645d2), whose options count as those of 2.0.1. Options are
those of ``PPOActorConfig`` (areal/api/cli_args.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import (
    AdvantageRule,
    Aggregation,
    KlTerm,
    Level,
    Levels,
    Objective,
    OverlongPenalty,
    Surrogate,
)
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.releases import ReadCode, parse_version
from rolloutdoctor.trainers.spec import Choices, Log, OptionRoles, PartOptions, Trainer, every

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_A = "actor"
_REWARD, _ADVANTAGE, _REJECT = f"{_A}.reward_norm", f"{_A}.adv_norm", f"{_A}.rejection_sampling"
_U = "ppo_actor/update"
REFERENCE = "ref.path"
_MOMENT = f"{_A}.m2_threshold"
_DECOUPLED = {f"{_A}.use_decoupled_loss": (True,)}
_LONG = f"{_A}.overlong_"
_TAIL = {f"{_LONG}reward_penalty": (True,)}
_FILTERS = {f"{_REJECT}.level": ("token", "sequence")}
LEVELS = ("batch", "group")
_SECOND = "2.0.0"
_AGGREGATED: dict[str, Literal["geometric", "sequence", "largest"]] = {
    "mean": "geometric",
    "sum": "sequence",
    "max": "largest",
}

Column = Literal["old_log_probs", "rollout_log_probs", "policy_log_probs"]


def _norm(name: str, of: str) -> tuple[Option, ...]:
    """Options of a normalisation; without levels there is none."""
    level = "over which the {} is taken (null: none)"
    return (
        *(
            Option(
                f"{name}.{part}_level",
                "word",
                None,
                f"{of}: {level.format(part)}",
                choices=LEVELS,
            )
            for part in ("mean", "std")
        ),
        Option(f"{name}.mean_leave1out", "flag", False, f"{of}: the mean is that of the others"),
        Option(f"{name}.std_unbiased", "flag", True, f"{of}: the deviation divides by one less"),
        Option(f"{name}.eps", "number", 1e-5, f"{of}: added to the deviation", low=0),
        Option(
            f"{name}.group_size",
            "integer",
            1,
            f"{of}: responses of a group, by which a batch was cut before 2.0.0",
            low=1,
            decides=False,
        ),
    )


OPTIONS = (
    *_norm(_REWARD, "normalisation of rewards"),
    *_norm(_ADVANTAGE, "normalisation of advantages, over the trained tokens"),
    Option(f"{_A}.reward_clip", "number", 20.0, "largest absolute reward", low=0),
    Option(f"{_A}.reward_bias", "number", 0.0, "what is added to rewards first"),
    Option(f"{_A}.reward_scaling", "number", 1.0, "what rewards are multiplied by before the clip"),
    Option(f"{_LONG}reward_penalty", "flag", False, "penalise long responses: the rows have the rewards before it"),
    Option(f"{_LONG}tokens", "integer", None, "length of the penalised tail", low=1, only_with=_TAIL),
    Option(f"{_LONG}penalty_factor", "number", None, "penalty of a whole tail", only_with=_TAIL),
    Option(f"{_A}.max_new_tokens", "integer", 1024, "where the penalised tail ends", low=1, only_with=_TAIL),
    Option(
        f"{_A}.mask_no_eos_with_zero",
        "flag",
        False,
        "rows as long as the longest one of the batch lose their reward",
        computed=(False,),
        why_not="it takes prompts with their padding, which the rows do not have",
    ),
    Option(f"{_A}.discount", "number", 1.0, "discount per trained token", low=0, high=1),
    Option(f"{_A}.gae_lambda", "number", 1.0, "lambda of generalised advantage estimation", low=0, high=1),
    Option(
        f"{_A}.gae_timestep_unit",
        "word",
        "token",
        "what discount and lambda count",
        choices=("token", "turn"),
        computed=("token",),
        why_not="the rows do not say which turn a token is of",
        since="2.0.1",
    ),
    Option(f"{_A}.kl_ctl", "number", 0.1, "coefficient of the KL penalty in the reward", low=0),
    Option(f"{_A}.kl_estimator", "word", "k1", "estimator of that KL", choices=("k1", "k2", "k3")),
    Option(REFERENCE, "any", None, "the reference model (null: none, and its log-probs count as 0)"),
    Option(f"{_A}.eps_clip", "number", 0.2, "lower clip range of the ratio", low=0),
    Option(f"{_A}.eps_clip_higher", "number", None, "upper clip range (null: as the lower)", low=0),
    Option(f"{_A}.c_clip", "number", None, "largest ratio of negative advantages", low=1),
    Option(
        f"{_A}.importance_sampling_level",
        "word",
        "token",
        "one ratio for each token, or the geometric mean of the row",
        choices=("token", "sequence"),
    ),
    Option(
        _MOMENT,
        "number",
        None,
        "drop the tokens of the largest squared log-ratio of proximal and sampling policy, until the mean of a "
        "micro-batch is below this",
        low=0,
        only_with=_DECOUPLED,
    ),
    Option(f"{_A}.use_sapo_loss", "flag", False, "a smooth gate instead of the clip"),
    Option(f"{_A}.sapo_tau_pos", "number", 1.0, "temperature for positive advantages (sapo)", low=0),
    Option(f"{_A}.sapo_tau_neg", "number", 1.05, "temperature for the other advantages (sapo)", low=0),
    Option(f"{_A}.use_cispo_loss", "flag", False, "the log-prob, weighed by the clipped ratio", since=_SECOND),
    Option(f"{_A}.use_decoupled_loss", "flag", False, "compare the policy with a proximal one, not with the sampler"),
    Option(f"{_A}.recompute_logprob", "flag", False, "recompute the log-probs of the sampler"),
    Option(
        f"{_A}.prox_logp_method",
        "word",
        "recompute",
        "where the log-probs of the proximal policy come from",
        choices=("recompute", "loglinear", "metrics", "reuse_train_logp"),
        values_since={"reuse_train_logp": _SECOND},
        computed=("recompute", "metrics", "reuse_train_logp"),
        why_not="it interpolates by the version of the token before, which the rows do not have",
        loss_alone=True,
    ),
    Option(
        f"{_REJECT}.level",
        "word",
        None,
        "weigh the policy term by proximal over sampling policy (null: not at all)",
        choices=("token", "sequence"),
        only_with=_DECOUPLED,
    ),
    Option(
        f"{_REJECT}.action",
        "word",
        "mask",
        "what becomes of a weight out of bounds",
        choices=("mask", "clamp"),
        only_with=_FILTERS,
    ),
    Option(
        f"{_REJECT}.metric",
        "word",
        "ratio",
        "what is bounded",
        choices=("ratio", "kl_k1", "kl_k2", "kl_k3"),
        only_with=_FILTERS,
    ),
    Option(
        f"{_REJECT}.agg",
        "word",
        "mean",
        "what of a row is bounded: geometric mean, product or largest ratio",
        choices=tuple(_AGGREGATED),
        only_with=_FILTERS,
    ),
    Option(f"{_REJECT}.upper", "number", 5.0, "upper bound", only_with=_FILTERS),
    Option(f"{_REJECT}.lower", "number", None, "lower bound", only_with=_FILTERS),
    Option(f"{_A}.ppo_n_minibatches", "integer", 4, "optimizer steps of a batch", low=1, decides=False),
    Option("gconfig.n_samples", "integer", 1, "responses per prompt", low=1, decides=False),
    Option("gconfig.max_new_tokens", "integer", 16384, "largest length of a response", low=1, decides=False),
)


def objective(config: Config) -> Objective:
    """Build what the policy update computes.

    Raises:
        UsageError: for combinations that AReaL itself refuses, or that are not computed.
    """
    behind = behaviour(config)
    coef, by_token = config.number(f"{_A}.kl_ctl"), has_time_axis(config)
    return Objective(
        trainer="areal",
        version=".".join(map(str, config.version)),
        advantage=_advantage(config, by_token=by_token),
        surrogate=_surrogate(config),
        aggregation=Aggregation(mode="token-mean"),
        has_kl_loss=False,
        kl_reward=KlTerm(
            estimator=config.word(f"{_A}.kl_estimator"),
            coef=coef,
            log_probs=behind,
            reference="ref_log_probs" if config[REFERENCE] else None,
            clamp=10.0,
            masked=True,
            of_trained=True,
        )
        if coef
        else None,
        gates=(*_second_moment(config), *_gates(config)),
        unknown_loss=_unknown_moment(config),
        metric_columns=frozenset({"entropy", "rollout_log_probs", "old_log_probs"}),
        # What the log-probs behind are is no part of the loss where nothing weighs by them.
        also_logs=frozenset({f"{_U}/old_logp of {behind}"}),
    )


def has_time_axis(config: Config) -> bool:
    """Tell whether the tokens of a row have advantages of their own."""
    return any(config.number(f"{_A}.{name}") != 1 for name in ("discount", "gae_lambda")) or bool(
        config.number(f"{_A}.kl_ctl")
    )


def behaviour(config: Config) -> Literal["old_log_probs", "rollout_log_probs"]:
    """Return the log-probs that stand for the sampler's: recomputed ones replace them."""
    replaced = config[f"{_A}.recompute_logprob"] and not config[f"{_A}.use_decoupled_loss"]
    return "old_log_probs" if replaced else "rollout_log_probs"


def proximal(config: Config) -> Column:
    """Return the log-probs that the policy's are compared with."""
    if config[f"{_A}.use_sapo_loss"]:
        return behaviour(config)
    if config.word(f"{_A}.prox_logp_method") == "reuse_train_logp":
        return "policy_log_probs"
    return "old_log_probs" if config[f"{_A}.use_decoupled_loss"] else behaviour(config)


def _advantage(config: Config, *, by_token: bool) -> AdvantageRule:
    """Build how rewards become advantages."""
    of_rows, of_tokens = _levels(config, _REWARD), _levels(config, _ADVANTAGE)
    clip = config.number(f"{_A}.reward_clip")
    whitens = of_tokens == Levels(mean="batch", std="batch", epsilon=of_tokens.epsilon)
    is_normalised = of_tokens.mean is not None or of_tokens.std is not None
    rule = AdvantageRule(
        estimator="raw",
        scale=of_rows.std or "none",
        epsilon=of_rows.epsilon,
        biased_std=not of_rows.unbiased,
        singleton="zero",
        gamma=config.number(f"{_A}.discount"),
        lam=config.number(f"{_A}.gae_lambda"),
        sums_tokens=by_token,
        overlong=_overlong(config),
        reward_shift=config.number(f"{_A}.reward_bias"),
        reward_factor=config.number(f"{_A}.reward_scaling"),
        reward_bounds=(-clip, clip),
        whitened=whitens,
        whitening_epsilon=of_tokens.epsilon if whitens else None,
        token_levels=of_tokens if is_normalised and not whitens else None,
        masked_end="lost",
        groups_of=_groups_of(config, (_REWARD, of_rows), (_ADVANTAGE, of_tokens)),
    )
    name: Literal["grpo", "rloo", "level_scores"]
    match of_rows.mean, of_rows.std, of_rows.of_others:
        case None, None, _:
            return replace(rule, estimator="scores_to_go") if by_token else rule
        case "group", "group" | None, False:
            name = "grpo"
        case "group", None, True:
            name = "rloo"
        case _:
            name = "level_scores"
            rule = replace(rule, row_levels=of_rows)
    if not by_token:
        return replace(rule, estimator=name)
    return replace(rule, estimator="group_scores_to_go", of_group=None if name == "grpo" else name)


def _groups_of(config: Config, *norms: tuple[str, Levels]) -> int | None:
    """Return the size of the groups by which a batch is cut, 0 where nothing says; None where groups are as they are.

    Raises:
        UsageError: for groups of one response, which before 2.0.0 have another baseline.
    """
    sizes = {
        int(config.number(f"{name}.group_size")) if config.settings[f"{name}.group_size"].is_stated else 0
        for name, levels in norms
        if "group" in (levels.mean, levels.std)
    }
    if config.version >= parse_version(_SECOND) or not sizes:
        return None
    if 1 in sizes or len(sizes - {0}) > 1:
        raise UsageError(f"group_size = {', '.join(map(str, sorted(sizes)))} is not computed of AReaL before {_SECOND}")
    return max(sizes)


def _levels(config: Config, name: str) -> Levels:
    """Build over what a normalisation is."""
    mean, std = (cast("Level | None", config[f"{name}.{part}_level"]) for part in ("mean", "std"))
    return Levels(
        mean=mean,
        std=std,
        of_others=mean is not None and bool(config[f"{name}.mean_leave1out"]),
        unbiased=bool(config[f"{name}.std_unbiased"]),
        epsilon=config.number(f"{name}.eps") if std is not None else 0.0,
    )


def _overlong(config: Config) -> OverlongPenalty | None:
    """Build the penalty of long rows.

    Raises:
        UsageError: without its length or factor, as AReaL itself.
    """
    if not config[f"{_LONG}reward_penalty"]:
        return None
    span, factor = (config.optional_number(f"{_LONG}{name}") for name in ("tokens", "penalty_factor"))
    if span is None or factor is None:
        raise UsageError("overlong_reward_penalty needs overlong_tokens and overlong_penalty_factor, in AReaL too")
    start = int(config.number(f"{_A}.max_new_tokens") - span)
    return OverlongPenalty(start=start, span=int(span), factor=factor)


def _surrogate(config: Config) -> Surrogate:
    """Build the policy term.

    Raises:
        UsageError: for combinations that AReaL itself refuses.
    """
    sapo, cispo = config[f"{_A}.use_sapo_loss"], config[f"{_A}.use_cispo_loss"]
    sequence = config.word(f"{_A}.importance_sampling_level") == "sequence"
    if sapo and (cispo or config[f"{_A}.use_decoupled_loss"]):
        raise UsageError("use_sapo_loss excludes use_cispo_loss and use_decoupled_loss, and so does AReaL")
    low, high = config.number(f"{_A}.eps_clip"), config.optional_number(f"{_A}.eps_clip_higher")
    if cispo and (sequence or not high):
        raise UsageError("use_cispo_loss needs eps_clip_higher above 0 and a ratio of each token, and so does AReaL")
    plain = Surrogate(
        kind="cispo_clipped" if cispo else "sapo" if sapo else "ppo_dual_clip",
        clip_low=low,
        clip_high=low if high is None else high,
        cap=None if cispo or sapo else config.optional_number(f"{_A}.c_clip"),
        old=proximal(config),
        level="sequence" if sequence else "token",
        row_advantages=sequence and has_time_axis(config),
    )
    taus = {f"tau_{sign}": config.number(f"{_A}.sapo_tau_{sign}") for sign in ("pos", "neg")}
    return replace(plain, numbers=taus) if sapo else plain


def _second_moment(config: Config) -> tuple[TermWeight, ...]:
    """Build what drops tokens by their second moment (M2PO); nothing without proximal log-probs of their own."""
    bound, old = config.optional_number(_MOMENT), proximal(config)
    if bound is None or not config[f"{_A}.use_decoupled_loss"] or old == "rollout_log_probs":
        return ()
    return (TermWeight(kind="second_moment", of=old, level="pack", high=bound, outside="zero"),)


def _unknown_moment(config: Config) -> str:
    """Say which losses with such tokens are not computed: of rows that are judged by the tokens that are left."""
    by_row = config[f"{_REJECT}.level"] == "sequence" or config.word(f"{_A}.importance_sampling_level") == "sequence"
    if config[_MOMENT] is None or not (by_row or not config[f"{_A}.use_decoupled_loss"]):
        return ""
    why = "with ratios or rejections of rows, or without use_decoupled_loss, it was not compared"
    return unknown_loss(f"{_MOMENT} = {config[_MOMENT]}", why)


def _gates(config: Config) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term: the weight, and what is dropped.

    Raises:
        UsageError: for bounds that AReaL itself refuses.
    """
    level = config[f"{_REJECT}.level"]
    if level is None or not config[f"{_A}.use_decoupled_loss"]:
        return ()
    masks, metric = config.word(f"{_REJECT}.action") == "mask", config.word(f"{_REJECT}.metric")
    _refuse_bounds(config, masks=masks, metric=metric)
    old = proximal(config)
    assert old != "rollout_log_probs"  # a decoupled loss has its own
    of_rows, is_ratio = level == "sequence", metric == "ratio"
    weight = TermWeight(
        kind="importance",
        of=old,
        # Of a KL the weights stay those of tokens.
        level="geometric" if of_rows and is_ratio else "token",
        low=config.optional_number(f"{_REJECT}.lower"),
        high=config.number(f"{_REJECT}.upper"),
        outside="zero" if masks else "cut",
        nan_is_one=True,
        narrows=masks and config.word(f"{_A}.importance_sampling_level") == "sequence",
    )
    judged = _AGGREGATED[config.word(f"{_REJECT}.agg")] if of_rows else "token"
    if is_ratio and judged in ("token", "geometric"):
        return (weight,)
    measure = cast(Literal["ratio", "k1", "k2", "k3"], metric.removeprefix("kl_"))
    return (replace(weight, judged=judged, measure=measure),)


def _refuse_bounds(config: Config, *, masks: bool, metric: str) -> None:
    """Refuse the bounds of a rejection that AReaL refuses.

    Raises:
        UsageError: naming the option.
    """
    low, high = config.optional_number(f"{_REJECT}.lower"), config.number(f"{_REJECT}.upper")
    least = {"ratio": 1.0, "kl_k2": 0.0, "kl_k3": 0.0}.get(metric, -inf)
    if high <= least:
        raise UsageError(f"{_REJECT}.upper = {high:g} is not above {least:g}, as metric = {metric} needs in AReaL")
    if low is not None and (low > high or (metric == "ratio" and low <= 0)):
        words = f"above upper = {high:g}" if low > high else "not above 0"
        raise UsageError(f"{_REJECT}.lower = {low:g} is {words}, which AReaL refuses")
    if not masks and metric != "ratio":
        raise UsageError(f"{_REJECT}.action = clamp needs metric = ratio, and so does AReaL: {metric} was set")


def group_size(config: Config, split: str) -> int | None:
    """AReaL takes the groups as they are, failed responses left out."""
    return None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """AReaL's logged metrics; see `rolloutdoctor.trainers.areal.metrics`."""
    from rolloutdoctor.trainers.areal import metrics as own

    return own.areal(evaluation)


_RECORD = (
    "AReaL's dump holds texts and rewards: record tokens and log-probs in the trainer with "
    "rolloutdoctor.recorders.own_loop"
)

TRAINER = Trainer(
    name="areal",
    title="AReaL",
    newest="2.0.1",
    oldest="1.0.4",
    read=(ReadCode("1.0.4", "2.0.0"), ReadCode("2.0.1", commit="cbff54d645d2", main_of="2026-08")),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss=f"{_U}/actor_loss/avg",
        grad_norm=f"{_U}/grad_norm",
        quantities={
            f"{_U}/actor_loss/avg": "policy_mean",
            f"{_U}/importance_weight/*": "ratio",
            f"{_U}/approx_kl/*": "drift",
            f"{_U}/logp_*": "sampler_drift",
            f"{_U}/entropy/*": "entropy",
            f"{_U}/clip_ratio/avg": "clip_share",
            f"{_U}/dual_clip_ratio/avg": "clip_share",
            f"{_U}/behave_approx_kl/*": "sampler_gap",
            f"{_U}/behave_imp_weight/*": "sampler_gap",
            f"{_U}/compute_logp/kl_div_dual/avg": "sampler_k3",
            f"{_U}/compute_logp/kl_div_*": "sampler_drift",
            f"{_U}/*_logp/*": "mean",
            f"{_U}/behave_filtered_ratio/avg": "mean",
            "ppo_actor/advantages/*": "advantages",
            "ppo_actor/task_reward/*": "rewards",
        },
        not_recomputed={
            f"{_U}/grad_norm, {_U}/lr, {_U}/update_*": "they need the parameters and the schedule",
            f"{_U}/actor_loss/m*, {_U}/*clip_ratio/m*, {_U}/clipped_*": "they are of one token, or of the clipped ones",
            f"{_U}/version_stats/*, {_U}/n_*, {_U}/*_tokens*, {_U}/masked_*, {_U}/rs_*": "they count cells or versions",
            "ppo_actor/kl_rewards/*, ppo_actor/final_reward/*": "they are of the next token's cell",
            "ppo_actor/no_eos_ratios/*, ppo_actor/*_len/*": "they count prompts and padding",
            "rollout/*, eval-rollout/*, timeperf/*": "they are of rollouts and clocks",
        },
    ),
    recording={
        "*": _RECORD,
        "reward": "set rollout.dump_to_file = true: AReaL then writes rollout/VERSION/TASK.jsonl in its log folder",
        "metrics": "give the log of AReaL's tracker (stats_logger) as well",
    },
    roles=OptionRoles(
        group={"train": "gconfig.n_samples"},
        length="gconfig.max_new_tokens",
        must_state={f"{_REWARD}.mean_level": "group", f"{_REWARD}.std_level": "group", f"{_A}.kl_ctl": 0.0},
    ),
    parts={
        Part.KL_LOSS: PartOptions(never="AReaL has its KL penalty in the reward"),
        Part.KL_REWARD: PartOptions({f"{_A}.kl_ctl": (0,)}),
        Part.KL_ESTIMATOR: PartOptions({f"{_A}.kl_estimator": ()}),
        Part.GROUP_BASELINE: PartOptions({f"{_REWARD}.mean_level": (None,)}),
        Part.GROUP_STD: PartOptions({f"{_REWARD}.std_level": (None, "batch")}),
        Part.POLICY_LOSS: PartOptions({f"{_A}.use_sapo_loss": (), f"{_A}.use_cispo_loss": ()}),
    },
    choices=Choices(
        advantage=(
            *every(
                actor__reward_norm__mean_level=("group",),
                actor__reward_norm__std_level=("group", None),
                actor__adv_norm__mean_level=(None,),
                actor__adv_norm__std_level=(None,),
                actor__kl_ctl=(0.0,),
            ),
            *every(
                actor__reward_norm__mean_level=("group",),
                actor__reward_norm__std_level=("group", None),
                actor__adv_norm__mean_level=("batch",),
                actor__adv_norm__std_level=("batch",),
                actor__kl_ctl=(0.0,),
            ),
        ),
        loss=(
            *every(actor__use_decoupled_loss=(False, True), actor__recompute_logprob=(False, True)),
            *every(actor__use_sapo_loss=(True,)),
        ),
    ),
    aliases={"logprobs": "rollout_log_probs", "prox_logp": "old_log_probs", "loss_mask": "response_mask"},
)
