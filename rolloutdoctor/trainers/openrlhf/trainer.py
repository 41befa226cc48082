"""OpenRLHF: options of its command line, its objective, and its logged metrics.

Read and compared: 0.11.0 (3c3be6234e0c) and 0.11.2. 0.11.1 brought `unbiased_gradient`; 0.11.2 says by level, mode and
gating what a correction does, that was on or off and of a type before, and brought `flash_reinforce` and
`loss_agg_mode`. A reward is the one after its length penalties, as it trains with it. Groups
are the responses to a prompt, in the order of the rollout.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import (
    AdvantageRule,
    Aggregation,
    EntropyBonus,
    KlTerm,
    Levels,
    Objective,
    Surrogate,
)
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.releases import ReadCode, parse_version
from rolloutdoctor.trainers.spec import Choices, Log, OptionRoles, PartOptions, Trainer, every

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_A, _KL = "algo.advantage", "algo.kl"
_ESTIMATOR, _CORRECTS, _TYPE = f"{_A}.estimator", f"{_A}.is_correction_enable", f"{_A}.is_correction_type"
_LEVEL, _MODE, _GATING = (f"{_A}.is_correction_{name}" for name in ("level", "mode", "gating"))
_BY_LEVEL = "0.11.2"
"""The release in which a correction is said by its level, mode and gating."""
BOUND = 20.0
"""Largest absolute log-ratio of ppo."""

GROUPED = {"rloo": "rloo", "reinforce_baseline": "grpo", "group_norm": "grpo", "dr_grpo": "grpo"}
"""Estimator to how the score of a row is made among its group."""
WHITENED = ("gae", "reinforce", "reinforce_baseline")
FLASH = "flash_reinforce"
KL_TYPES = ("k1", "k2", "k3")
SLOPE_BOUND = 10.0
"""Largest ratio that `unbiased_gradient` weighs by."""
_BOTH = "low,high"

_OF_LEVEL: dict[str, tuple[object, ...]] = {_LEVEL: ("token", "seq"), "actor.policy_loss_type": ("ppo",)}

OPTIONS = (
    Option(
        _ESTIMATOR,
        "word",
        "gae",
        "how scores become advantages",
        choices=("gae", "reinforce", *GROUPED, FLASH),
        values_since={FLASH: _BY_LEVEL},
    ),
    Option(f"{_A}.gamma", "number", 1.0, "discount per token (gae, reinforce)", low=0, high=1),
    Option(f"{_A}.lambd", "number", 1.0, "lambda of generalised advantage estimation (gae)", low=0, high=1),
    Option(
        f"{_A}.no_std_norm",
        "flag",
        False,
        "subtract the mean of the advantages and divide by nothing",
        only_with={_ESTIMATOR: WHITENED},
    ),
    Option(
        "reward.clip_range",
        "numbers",
        (-10.0, 10.0),
        f"what scores are clamped to, after their group's mean is subtracted: {_BOTH}",
        optional=True,
    ),
    Option(f"{_KL}.init_coef", "number", 0.01, "coefficient of the KL, in the reward or in the loss", low=0),
    Option(f"{_KL}.estimator", "word", "k1", "estimator of the KL, clamped to 10", choices=KL_TYPES),
    Option(f"{_KL}.use_loss", "flag", False, "the KL is a term of the loss instead of a penalty in the reward"),
    Option(
        f"{_KL}.unbiased_gradient",
        "flag",
        False,
        "the gradient of the KL in the loss is the ratio times k1",
        only_with={f"{_KL}.use_loss": (True,)},
        since="0.11.1",
    ),
    Option(
        f"{_KL}.target",
        "number",
        None,
        "target of an adaptive coefficient",
        computed=(None,),
        why_not="the coefficient of a step is not logged",
    ),
    Option("actor.policy_loss_type", "word", "ppo", "one ratio a token, or a row", choices=("ppo", "gspo")),
    Option(
        "actor.loss_agg_mode",
        "word",
        "token-mean",
        "how the policy's token terms become one loss; gspo takes the mean over rows",
        choices=("token-mean", "seq-mean-token-mean"),
        only_with={"actor.policy_loss_type": ("ppo",)},
        since=_BY_LEVEL,
    ),
    Option("actor.eps_clip", "number", 0.2, "clip range of the ratio", low=0),
    Option("actor.eps_clip_low_high", "numbers", None, f"{_BOTH} clip range; null: actor.eps_clip"),
    Option("actor.dual_clip", "number", None, "largest ratio of negative advantages; null: none", low=1),
    Option(
        "actor.entropy_coef",
        "number",
        None,
        "coefficient of the entropy bonus (all but the loss as a whole is computed then); 0: log it; null: neither",
        decides=False,
    ),
    Option(
        "actor.aux_loss_coef",
        "number",
        0.0,
        "coefficient of the loss that balances experts",
        computed=(0.0,),
        decides=False,
        why_not="it is made of the router's logits, which are not in the rows",
        loss_alone=True,
    ),
    Option(
        _CORRECTS,
        "flag",
        False,
        "weigh the policy term by trainer over sampler; with gspo compare with the sampler",
        until=_BY_LEVEL,
    ),
    Option(
        _LEVEL,
        "word",
        "off",
        "what a correction judges: each token, or the mean of a row; with gspo it compares with the sampler",
        choices=("off", "token", "seq"),
        since=_BY_LEVEL,
    ),
    Option(
        _MODE,
        "word",
        "mask",
        "weights outside of the thresholds: 0, or cut",
        choices=("mask", "clip"),
        only_with=_OF_LEVEL,
        since=_BY_LEVEL,
    ),
    Option(
        _GATING,
        "word",
        "ratio",
        "what is compared with the thresholds",
        choices=("ratio", "binary_kl", "tv"),
        only_with=_OF_LEVEL,
        since=_BY_LEVEL,
    ),
    Option(
        _TYPE,
        "word",
        "tis",
        "weights outside of the thresholds: cut, 0, or kept where the row's geometric mean is inside",
        choices=("tis", "icepop", "seq-mask-tis"),
        only_with={_CORRECTS: (True,), "actor.policy_loss_type": ("ppo",)},
        until=_BY_LEVEL,
    ),
    Option(
        f"{_A}.is_correction_threshold",
        "numbers",
        (0.5, 5.0),
        f"thresholds of a correction: {_BOTH}; from {_BY_LEVEL} on one number is an upper bound",
        only_with={"actor.policy_loss_type": ("ppo",)},
    ),
    Option("rollout.n_samples_per_prompt", "integer", 1, "responses per prompt", low=1, decides=False),
    Option(
        "train.max_epochs",
        "integer",
        1,
        "passes over a rollout; above 1 metrics of the update are not recomputed",
        low=1,
        decides=False,
    ),
    Option(
        "train.dynamic_batch_enable",
        "flag",
        False,
        "micro-batches of as many tokens; it changes the logged policy_loss alone",
        decides=False,
    ),
    *(
        Option(name, "any", None, meaning, decides=False)
        for name, meaning in (
            ("reward.overlong_buffer_len", "penalty of long responses, in the rewards already"),
            ("reward.overlong_penalty_factor", "its size"),
            ("reward.stop_properly_penalty_coef", "penalty of truncated responses, in the rewards already"),
        )
    ),
)


def _pair(config: Config, name: str) -> tuple[float, float] | None:
    """Both ends of a range.

    Raises:
        UsageError: if there are not two.
    """
    value = config[name]
    if value is None:
        return None
    ends = cast(tuple[float, ...], value)
    if len(ends) != 2 or (ends[0] > ends[1] and "clip_low" not in name):
        raise UsageError(f"{name} = {value} is no {_BOTH}")
    return ends[0], ends[1]


def objective(config: Config) -> Objective:
    """Build what the actor computes.

    Raises:
        UnstatedError: if nothing says which estimator it is.
        UsageError: for combinations that OpenRLHF itself refuses.
    """
    config.needs(_ESTIMATOR)
    coef, in_loss = config.number(f"{_KL}.init_coef"), bool(config[f"{_KL}.use_loss"])
    term = KlTerm(estimator=config.word(f"{_KL}.estimator"), coef=coef, clamp=10.0)
    in_loss_term = replace(term, weighted_slope=SLOPE_BOUND) if config[f"{_KL}.unbiased_gradient"] else term
    penalty = None
    if coef > 0 and not in_loss:
        penalty = replace(term, log_probs="old_log_probs", masked=True, of_trained=True)
    ratio_of_rows, corrects = config.word("actor.policy_loss_type") == "gspo", _corrects(config)
    by_rows = ratio_of_rows or config.word("actor.loss_agg_mode") != "token-mean"
    eps = config.number("actor.eps_clip")
    low, high = _pair(config, "actor.eps_clip_low_high") or (eps, eps)
    token_mean = Aggregation(mode="token-mean")
    logs = {"update"} if config.number("train.max_epochs") == 1 else set()
    entropy = config.optional_number("actor.entropy_coef")
    if entropy is not None:
        logs.add("entropy")
    if config["train.dynamic_batch_enable"]:
        logs.add("dynamic")
    return Objective(
        trainer="openrlhf",
        version=".".join(map(str, config.version)),
        advantage=_advantage(config, penalised=penalty is not None),
        surrogate=Surrogate(
            kind="ppo_dual_clip",
            clip_low=low,
            clip_high=high,
            cap=config.optional_number("actor.dual_clip"),
            log_ratio_bound=None if ratio_of_rows else BOUND,
            old="rollout_log_probs" if ratio_of_rows and corrects else "old_log_probs",
            level="sequence" if ratio_of_rows else "token",
        ),
        aggregation=token_mean,
        policy_aggregation=Aggregation(mode="filled-row-mean-token-mean") if by_rows else None,
        kl_loss=in_loss_term if in_loss and coef > 0 else None,
        kl_reward=penalty,
        # The entropies that the loss saw are in no row.
        entropy_bonus=EntropyBonus(coef=entropy, aggregation=token_mean, stored=False) if entropy else None,
        gates=_gates(config) if corrects and not ratio_of_rows else (),
        metric_columns=frozenset({"entropy", "rollout_log_probs", "ref_log_probs", "old_log_probs", "status"}),
        also_logs=frozenset(logs),
    )


def _advantage(config: Config, *, penalised: bool) -> AdvantageRule:
    name, bounds = config.word(_ESTIMATOR), _pair(config, "reward.clip_range")
    rule = AdvantageRule(
        estimator="returns_of_scores",
        scale="group" if name == "group_norm" else "none",
        epsilon=1e-9,
        singleton="zero",
        gamma=1.0 if name in GROUPED else config.number(f"{_A}.gamma"),
        lam=config.number(f"{_A}.lambd"),
        whitened=name in WHITENED,
        variance_floor=True,
        centres_only=name in WHITENED and bool(config[f"{_A}.no_std_norm"]),
        score_bounds=bounds,
    )
    if name == "gae":
        return replace(rule, estimator="gae_of_masked")
    if name == FLASH:
        rule = replace(rule, row_levels=Levels(mean="batch", std=None), gamma=1.0)
        if penalised:
            return replace(rule, estimator="returns_of_group_scores", of_group="level_scores")
        return replace(rule, estimator="level_scores", bounds=bounds, score_bounds=None)
    if name == "reinforce":
        return rule
    of_group = "rloo" if name == "rloo" else "grpo"
    if penalised or rule.whitened:
        return replace(rule, estimator="returns_of_group_scores", of_group="rloo" if name == "rloo" else "grpo")
    # Without a penalty or a whitening every token has the score of its row.
    return replace(rule, estimator=of_group, bounds=bounds, score_bounds=None)


def _corrects(config: Config) -> bool:
    return config[_LEVEL] != "off" if config.version >= parse_version(_BY_LEVEL) else bool(config[_CORRECTS])


def _gates(config: Config) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term.

    Raises:
        UsageError: for combinations that OpenRLHF itself refuses.
    """
    name, weight = f"{_A}.is_correction_threshold", TermWeight(kind="importance")
    by_level = config.version >= parse_version(_BY_LEVEL)
    single = by_level and isinstance(config[name], tuple) and len(cast(tuple[float, ...], config[name])) == 1
    low, high = (0.0, cast(tuple[float, ...], config[name])[0]) if single else _pair(config, name) or (None, None)
    if by_level:
        return _gates_by_level(config, replace(weight, low=low, high=high))
    match config.word(_TYPE):
        case "tis":
            return (replace(weight, low=low, high=high),)
        case "icepop":
            return (replace(weight, low=low, high=high, outside="zero"),)
    return weight, replace(weight, level="geometric", low=low, high=high, outside="zero", indicator=True)


def _gates_by_level(config: Config, weight: TermWeight) -> tuple[TermWeight, ...]:
    of_rows, gating = config[_LEVEL] == "seq", config.word(_GATING)
    if config[_MODE] == "clip":
        if of_rows or gating != "ratio":
            raise UsageError(f"{_MODE} = clip needs {_LEVEL} = token and {_GATING} = ratio: OpenRLHF refuses others")
        return (weight,)
    if gating != "ratio":
        if weight.low:
            raise UsageError(
                f"{_A}.is_correction_threshold of {_GATING} = {gating} is an upper bound alone: one number"
            )
        measure = cast(Literal["binary_kl", "tv"], gating)
        return (replace(weight, measure=measure, judged="geometric" if of_rows else "token", outside="zero"),)
    if not of_rows:
        return (replace(weight, outside="zero"),)
    return TermWeight(kind="importance"), replace(weight, level="geometric", outside="zero", indicator=True)


def group_size(config: Config, split: str) -> int | None:
    """Return the responses per prompt."""
    return int(config.number("rollout.n_samples_per_prompt")) if split == "train" else None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """OpenRLHF's logged metrics, under the names of its trackers."""
    from rolloutdoctor.trainers.openrlhf import metrics as own

    return own.openrlhf(evaluation)


def loss_share(evaluation: "Evaluation") -> float | None:
    """Return how many times the policy loss of the step is logged."""
    from rolloutdoctor.trainers.openrlhf import metrics as own

    return own.loss_share(evaluation)


_RECORDER = "rolloutdoctor.recorders.openrlhf.record (a run of OpenRLHF writes no rollouts)"

TRAINER = Trainer(
    name="openrlhf",
    title="OpenRLHF",
    newest="0.11.2",
    oldest="0.11.0",
    read=(ReadCode("0.11.0", commit="3c3be6234e0c"), ReadCode("0.11.1", "0.11.2")),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="train/policy_loss",
        grad_norm="train/actor_grad_norm",
        kl=("train/kl",),
        critic=("train/critic_loss", "train/critic_grad_norm"),
        # TRL's names are these in a tracker that puts train/ before them.
        marks=(frozenset({"train/policy_loss", "train/actor_grad_norm"}),),
        loss_share=loss_share,
        share_is=(
            "weighs micro-batches by their tokens twice, so that its size and even its sign may be others",
            "compare runs by their gradient norm or clip fraction, or by the loss that `rolloutdoctor export --what "
            "tokens` gives",
        ),
        quantities={
            "train/policy_loss": "token_weighted_loss",
            "train/kl": "token_weighted_kl",
            "train/ppo_kl": "drift",
            "train/ppo_clip_ratio": "clip_share",
            "train/vllm_kl": "sampler_gap",
            "train/is_filter_ratio": "clip_share",
            "train/entropy_loss": "entropy",
            "train/reward": "rewards",
            "train/group_reward_std": "rewards",
            "train/rollout/reward*": "rewards",
        },
        not_recomputed={
            "train/actor_grad_norm, train/actor_lr, train/timing/*": "they come from parameters, schedule and clock",
            "train/total_length, train/response_length, train/rollout/response_length_mean": "they count the tokens of "
            "prompts and of the environment, which rows need not have",
            "train/critic_*, train/values": "the critic's values at its update are not in the rows",
            "train/logprobs_diff, train/return": "a mean difference of log-probs; a sum of rewards after the penalty",
            "train/rollout/num_samples, train/scores, train/response_clip_ratio": "counts, or of the environment",
            "train/dynamic_filtering_pass_rate": "it counts prompts that were dropped",
            "eval/*": "their names contain dataset names, which are not recorded",
        },
    ),
    recording={
        "*": _RECORDER,
        "policy_log_probs": "the recorder has the log-probs before the update; those at the loss are in the workers "
        "alone: record them with rolloutdoctor.recorders.own_loop",
        "micro_batch_id": "its workers shuffle rows into micro-batches: record with rolloutdoctor.recorders.own_loop",
        "metrics": "OpenRLHF logs to W&B or TensorBoard: give an export of that as well",
    },
    roles=OptionRoles(
        kl=f"{_KL}.init_coef",
        group={"train": "rollout.n_samples_per_prompt"},
        must_state={_ESTIMATOR: "gae"},
    ),
    parts={
        Part.KL_LOSS: PartOptions({f"{_KL}.use_loss": (False,), f"{_KL}.init_coef": (0,)}),
        Part.KL_REWARD: PartOptions({f"{_KL}.use_loss": (True,), f"{_KL}.init_coef": (0,)}),
        Part.KL_ESTIMATOR: PartOptions({f"{_KL}.estimator": ()}),
        Part.GROUP_BASELINE: PartOptions({_ESTIMATOR: ("gae", "reinforce")}),
        Part.GROUP_STD: PartOptions({_ESTIMATOR: ("gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo", FLASH)}),
        Part.POLICY_LOSS: PartOptions({"actor.policy_loss_type": ()}),
    },
    choices=Choices(
        advantage=(
            *({_ESTIMATOR: name, f"{_KL}.init_coef": 0.0} for name in GROUPED),
            *({_ESTIMATOR: name, f"{_KL}.init_coef": 0.0} for name in ("gae", "reinforce")),
        ),
        penalty=tuple(
            {_ESTIMATOR: name, f"{_KL}.use_loss": False, f"{_KL}.estimator": kl}
            for name in ("gae", "reinforce", *GROUPED)
            for kl in KL_TYPES
        ),
        penalty_option=f"{_KL}.init_coef",
        kl=every(algo__kl__use_loss=(True,), algo__kl__estimator=KL_TYPES),
        loss=every(actor__policy_loss_type=("ppo", "gspo")),
    ),
    aliases={
        "action_mask": "response_mask",
        "action_log_probs": "old_log_probs",
        "base_action_log_probs": "ref_log_probs",
    },
)
