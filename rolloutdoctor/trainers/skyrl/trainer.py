"""SkyRL: options of its `trainer.algorithm`, its objective, and its logged metrics.

Read and compared: main of 2026-08 (a9564572eb8e). The loss mask is `response_mask` here: advantages are made of all
response tokens, terms of the trained ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import exp
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, EntropyBonus, KlTerm, Objective, Surrogate
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.releases import ReadCode
from rolloutdoctor.trainers.spec import Choices, Log, LossParts, OptionRoles, PartOptions, Trainer

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_P = "trainer.algorithm"
_LOSS, _TIS, _MASK = (
    f"{_P}.policy_loss_type",
    f"{_P}.off_policy_correction.tis_ratio_type",
    f"{_P}.off_policy_correction",
)
BOUND = 20.0
"""Largest absolute log-ratio."""

ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "maxrl": "grpo", "reinforce++": "response_returns", "gae": "gae"}
LOSSES = {
    "regular": "ppo_dual_clip",
    "dual_clip": "ppo_dual_clip",
    "gspo": "gspo",
    "sapo": "sapo_of_tokens",
    "cispo": "cispo_clipped",
    "rollout_is": "windowed",
    "dppo": "dppo_tv",
    "importance_sampling": "ppo_dual_clip",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
"""Loss to its policy term."""
REDUCTIONS = {
    "token_mean": "token-mean",
    "token_mean_legacy": "micro-batch-token-mean",
    "sequence_mean": "row-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean-token-mean",
}
KL_TYPES = {"k1": "k1", "k2": "k2", "k3": "k3_clamped", "abs": "abs"}
COEFFICIENT_METRIC = "loss/kl_loss_coef"

_UNCORRECTED = ("importance_sampling", "clip_cov", "kl_cov")
"""Losses that no correction enters."""


def _number(name: str, default: float, meaning: str, **only: tuple[object, ...]) -> Option:
    full = {f"{_P}.{key.replace('__', '.')}": values for key, values in only.items()}
    return Option(f"{_P}.{name}", "number", default, meaning, low=0, only_with=full)


def _bound(name: str, default: float | None, meaning: str) -> Option:
    return Option(f"{_MASK}.{name}", "number", default, meaning, low=0)


OPTIONS = (
    Option(
        f"{_P}.advantage_estimator",
        "word",
        "grpo",
        "how scores become advantages",
        choices=tuple(ESTIMATORS),
    ),
    Option(f"{_P}.grpo_norm_by_std", "flag", True, "divide by the group's standard deviation (grpo)"),
    Option(
        f"{_P}.advantage_batch_normalize",
        "flag",
        False,
        "whiten the advantages over the batch, with a mean over padding too",
    ),
    Option(f"{_P}.gamma", "number", 1.0, "discount per token (reinforce++, gae)", low=0, high=1),
    Option(f"{_P}.lambd", "number", 1.0, "lambda of generalised advantage estimation (gae)", low=0, high=1),
    Option(f"{_P}.use_kl_loss", "flag", True, "add a KL term to the loss"),
    Option(f"{_P}.use_kl_in_reward", "flag", False, "subtract a KL penalty from the token rewards"),
    Option(f"{_P}.kl_loss_coef", "number", 0.001, "coefficient of the KL, in loss or reward", low=0),
    Option(f"{_P}.kl_estimator_type", "word", "k3", "estimator of the KL", choices=tuple(KL_TYPES)),
    Option(
        f"{_P}.kl_ctrl.type",
        "word",
        "fixed",
        f"KL coefficient in the reward: fixed, or adaptive (read from the logged {COEFFICIENT_METRIC})",
        choices=("fixed", "adaptive"),
        decides=False,
    ),
    Option(
        _LOSS,
        "word",
        "regular",
        "the policy term",
        choices=(*LOSSES, "cross_entropy"),
        computed=tuple(LOSSES),
        why_not="it has no advantage",
        loss_alone=True,
    ),
    Option(f"{_P}.loss_reduction", "word", "token_mean", "how token terms become one loss", choices=tuple(REDUCTIONS)),
    Option(f"{_P}.max_seq_len", "integer", None, "what seq_mean_token_sum_norm divides by", low=1),
    _number("clip_cov.clip_ratio", 0.0002, "largest share of tokens that are dropped", policy_loss_type=("clip_cov",)),
    _number("clip_cov.clip_cov_lb", 1.0, "lower bound of their covariances", policy_loss_type=("clip_cov",)),
    _number("clip_cov.clip_cov_ub", 5.0, "upper bound of their covariances", policy_loss_type=("clip_cov",)),
    _number("kl_cov.kl_cov_frac", 0.2, "share of tokens that are penalised", policy_loss_type=("kl_cov",)),
    _number("kl_cov.ppo_kl_coef", 1.0, "coefficient of their penalty", policy_loss_type=("kl_cov",)),
    _number("eps_clip_low", 0.2, "lower clip range of the ratio"),
    _number("eps_clip_high", 0.2, "upper clip range of the ratio"),
    _number("clip_ratio_c", 3.0, "largest ratio of negative advantages", policy_loss_type=("dual_clip",)),
    _number("sapo.tau_pos", 1.0, "temperature for positive advantages", policy_loss_type=("sapo",)),
    _number("sapo.tau_neg", 1.05, "temperature for the other advantages", policy_loss_type=("sapo",)),
    _number("cispo.cispo_eps_clip_low", 1.0, "lower clip range of the weight", policy_loss_type=("cispo",)),
    _number("cispo.cispo_eps_clip_high", 4.0, "upper clip range of the weight", policy_loss_type=("cispo",)),
    Option(
        f"{_P}.cispo.cispo_anchor",
        "word",
        "old",
        "what the policy is compared with (cispo)",
        choices=("old", "rollout"),
        only_with={_LOSS: ("cispo",)},
    ),
    Option(
        f"{_P}.dppo.dppo_type",
        "word",
        "binary_tv",
        "the divergence that is bounded (dppo)",
        choices=("binary_tv", "binary_kl"),
        only_with={_LOSS: ("dppo",)},
    ),
    _number("dppo.delta_low", 0.2, "largest divergence downwards", policy_loss_type=("dppo",)),
    _number("dppo.delta_high", 0.2, "largest divergence upwards", policy_loss_type=("dppo",)),
    Option(
        _TIS,
        "word",
        None,
        "importance weights of the policy term (trainer over sampler), truncated",
        choices=("token", "sequence"),
    ),
    _bound("token_tis_ratio_clip_high", 2.0, "largest weight of a token"),
    _bound("sequence_tis_ratio_clip_high", 5.0, "largest weight of a row"),
    Option(
        f"{_MASK}.sequence_mask_metric",
        "word",
        None,
        "drop rows by the geometric mean or the product of their ratios",
        choices=("geometric", "product"),
    ),
    _bound("geo_mask_low", 0.99, "smallest geometric mean that is kept"),
    _bound("geo_mask_high", 1.01, "largest geometric mean that is kept"),
    _bound("product_mask_low", 0.5, "smallest product that is kept"),
    _bound("product_mask_high", 2.0, "largest product that is kept"),
    _bound("outlier_token_is_threshold_low", None, "drop rows with a token of a smaller ratio"),
    _bound("outlier_token_is_threshold_high", None, "drop rows with a token of a larger ratio"),
    _bound("token_mask_is_threshold_low", None, "drop tokens of a smaller ratio; only with the upper bound"),
    _bound("token_mask_is_threshold_high", None, "drop tokens of a larger ratio; only with the lower bound"),
    Option(
        f"{_P}.use_entropy_loss",
        "flag",
        False,
        "subtract an entropy bonus: all but the loss as a whole is computed then",
        decides=False,
    ),
    Option(f"{_P}.entropy_loss_coef", "number", 0.01, "coefficient of the entropy bonus", decides=False),
    Option(
        f"{_P}.zero_variance_filter",
        "flag",
        False,
        "mask groups without a spread of rewards; a run file has the mask after it",
        decides=False,
    ),
    Option("trainer.update_epochs_per_batch", "integer", 1, "passes over each batch", low=1, decides=False),
    Option("trainer.micro_train_batch_size_per_gpu", "integer", 1, "rows of a micro-batch", low=1, decides=False),
    Option("generator.n_samples_per_prompt", "integer", 5, "responses per prompt", low=1, decides=False),
    Option(
        "generator.step_wise_trajectories",
        "flag",
        False,
        "a row for each turn",
        computed=(False,),
        decides=False,
        why_not="a row gets the advantage of the last turn of its trajectory, which the rows do not name",
    ),
)


def objective(config: Config) -> Objective:
    """Build what the policy update computes.

    Raises:
        UsageError: for combinations that SkyRL itself refuses, or that are not computed.
    """
    in_loss, in_reward = bool(config[f"{_P}.use_kl_loss"]), bool(config[f"{_P}.use_kl_in_reward"])
    if in_loss and in_reward:
        raise UsageError("use_kl_loss and use_kl_in_reward are both true, and SkyRL allows only one of them")
    mode = REDUCTIONS[config.word(f"{_P}.loss_reduction")]
    length = config.optional_number(f"{_P}.max_seq_len")
    if mode == "seq-mean-token-sum-norm" and length is None:
        raise UsageError("loss_reduction = seq_mean_token_sum_norm needs max_seq_len, and so does SkyRL")
    estimator, coef = KL_TYPES[config.word(f"{_P}.kl_estimator_type")], config.number(f"{_P}.kl_loss_coef")
    adaptive = config.word(f"{_P}.kl_ctrl.type") == "adaptive"
    return Objective(
        trainer="skyrl",
        version=".".join(map(str, config.version)),
        advantage=_advantage(config),
        surrogate=_surrogate(config),
        # The KL is the mean of row means, whatever the policy term is.
        aggregation=Aggregation(mode="row-mean-token-mean"),
        policy_aggregation=Aggregation(
            mode=mode,
            length=None if length is None else int(length),
            needs_micro_batches=mode == "micro-batch-token-mean",
        ),
        kl_loss=KlTerm(estimator=estimator, coef=coef) if in_loss else None,
        kl_reward=KlTerm(
            estimator=estimator,
            coef=coef,
            log_probs="old_log_probs",
            masked=True,
            of_trained=True,
            coef_metric=COEFFICIENT_METRIC if adaptive else None,
        )
        if in_reward
        else None,
        # The entropies that the loss saw are in no row.
        entropy_bonus=EntropyBonus(
            coef=config.number(f"{_P}.entropy_loss_coef"),
            aggregation=Aggregation(mode="row-mean-token-mean"),
            stored=False,
        )
        if config[f"{_P}.use_entropy_loss"]
        else None,
        gates=_gates(config),
        unknown_loss=_unknown_loss(config),
        metric_columns=frozenset({"entropy", "rollout_log_probs", "old_log_probs"}),
    )


def _advantage(config: Config) -> AdvantageRule:
    name, divides = config.word(f"{_P}.advantage_estimator"), bool(config[f"{_P}.grpo_norm_by_std"])
    if config[f"{_P}.advantage_batch_normalize"]:
        raise UsageError(
            "advantage_batch_normalize = true subtracts a mean over padding too, so that response tokens do not "
            "average to 0; it is not computed by this version"
        )
    scale: Literal["group", "none", "mean"]
    scale = "mean" if name == "maxrl" else "group" if name == "grpo" and divides else "none"
    return AdvantageRule(
        estimator=ESTIMATORS[name],
        scale=scale,
        epsilon=1e-6,
        singleton="zero" if name == "rloo" else "raw",
        gamma=config.number(f"{_P}.gamma"),
        lam=config.number(f"{_P}.lambd"),
        sums_tokens=True,
        whitened=name in ("reinforce++", "gae"),
        whitened_over="response",
    )


def _surrogate(config: Config) -> Surrogate:
    """Build the policy term.

    Raises:
        UsageError: if weights would be counted twice, as SkyRL says.
    """
    name, low, high = config.word(_LOSS), config.number(f"{_P}.eps_clip_low"), config.number(f"{_P}.eps_clip_high")
    plain = Surrogate(kind=LOSSES[name], clip_low=low, clip_high=high, log_ratio_bound=BOUND)
    match name:
        case "dual_clip":
            return replace(plain, cap=config.number(f"{_P}.clip_ratio_c"))
        case "sapo":
            return replace(plain, numbers={tau: config.number(f"{_P}.sapo.{tau}") for tau in ("tau_pos", "tau_neg")})
        case "gspo":
            return replace(plain, log_ratio_bound=None)
        case "importance_sampling":
            return replace(plain, clip_low=float("inf"), clip_high=float("inf"), log_ratio_bound=None)
        case "clip_cov":
            numbers = {"ratio": "clip_ratio", "lower": "clip_cov_lb", "upper": "clip_cov_ub"}
            return _by_covariance(plain, {key: config.number(f"{_P}.{name}.{numbers[key]}") for key in numbers})
        case "kl_cov":
            numbers = {"ratio": "kl_cov_frac", "coef": "ppo_kl_coef"}
            return _by_covariance(plain, {key: config.number(f"{_P}.{name}.{numbers[key]}") for key in numbers})
        case "rollout_is":
            return replace(plain, old="rollout_log_probs")
        case "dppo":
            low, high = config.number(f"{_P}.dppo.delta_low"), config.number(f"{_P}.dppo.delta_high")
            kind = "dppo_tv" if config.word(f"{_P}.dppo.dppo_type") == "binary_tv" else "dppo_kl"
            old: Literal["rollout_log_probs"] = "rollout_log_probs"
            return replace(
                plain, kind=kind, clip_low=low, clip_high=high, old=old, live_ratio=True, numbers={"nonzero_clip": 1.0}
            )
        case "cispo":
            low, high = (config.number(f"{_P}.cispo.cispo_eps_clip_{end}") for end in ("low", "high"))
            anchored = config.word(f"{_P}.cispo.cispo_anchor") == "rollout"
            if anchored and config[_TIS] is not None:
                raise UsageError(
                    "cispo_anchor = rollout with tis_ratio_type counts the weights twice; SkyRL refuses it"
                )
            plain = replace(plain, clip_low=low, clip_high=high)
            return replace(plain, old="rollout_log_probs") if anchored else plain
    return plain


def _by_covariance(plain: Surrogate, numbers: dict[str, float]) -> Surrogate:
    """Build a term that picks tokens by covariances of advantages that are divided already."""
    return replace(plain, log_ratio_bound=None, numbers=numbers, scaled_advantages=True)


def _gates(config: Config) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term alone."""
    if config.word(_LOSS) in _UNCORRECTED:
        return ()
    gates, weight = [], TermWeight(kind="importance", low=exp(-BOUND))

    def bound(name: str) -> float | None:
        value = config.optional_number(f"{_MASK}.{name}")
        return None if value is None else value

    outliers = bound("outlier_token_is_threshold_low"), bound("outlier_token_is_threshold_high")
    tokens = bound("token_mask_is_threshold_low"), bound("token_mask_is_threshold_high")
    statistic, level = config[f"{_MASK}.sequence_mask_metric"], config[_TIS]
    if outliers != (None, None):
        gates.append(TermWeight(kind="outlier", low=outliers[0], high=outliers[1]))
    if None not in tokens:
        gates.append(TermWeight(kind="importance", low=tokens[0], high=tokens[1], outside="zero", indicator=True))
    if level == "token":
        gates.append(replace(weight, high=config.number(f"{_MASK}.token_tis_ratio_clip_high")))
    elif level == "sequence":
        gates.append(replace(weight, level="sequence", high=config.number(f"{_MASK}.sequence_tis_ratio_clip_high")))
    if statistic is not None:
        short = "geo" if statistic == "geometric" else "product"
        mask = replace(weight, level="geometric" if statistic == "geometric" else "sequence")
        low, high = bound(f"{short}_mask_low"), bound(f"{short}_mask_high")
        gates.append(replace(mask, low=low, high=high, outside="zero", indicator=True))
    return tuple(gates)


def _unknown_loss(config: Config) -> str:
    """Say why the loss is not computed, where corrections are made of what others leave; empty where it is."""
    names = [f"{kind}_is_threshold_{end}" for kind in ("outlier_token", "token_mask") for end in ("low", "high")]
    of_outliers, of_tokens = names[:2], names[2:]
    is_set = {name: config[f"{_MASK}.{name}"] is not None for name in names}
    masks = any(is_set[name] for name in of_outliers) or all(is_set[name] for name in of_tokens)
    of_rows = config[f"{_MASK}.sequence_mask_metric"] is not None or config[_TIS] == "sequence"
    if not masks or not of_rows or config.word(_LOSS) in _UNCORRECTED:
        return ""
    return unknown_loss(
        "a mask of tokens or outliers with sequence_mask_metric or tis_ratio_type = sequence",
        "these are made of the tokens that it leaves",
    )


def group_size(config: Config, split: str) -> int | None:
    """SkyRL groups by uid, whatever the size."""
    return None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """SkyRL's logged metrics: `policy/*`, `loss/*`, `reward/*`."""
    from rolloutdoctor.trainers.skyrl import metrics as skyrl_metrics

    return skyrl_metrics.skyrl(evaluation)


def loss_parts(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    """The policy term, and what the loss has beside it."""
    names = ("policy/policy_loss", "policy/final_loss", "policy/policy_kl")
    has_bonus = config is not None and config[f"{_P}.use_entropy_loss"]
    if has_bonus or any(name not in logged for name in names):
        return None
    return LossParts(logged[names[0]], logged[names[1]] - logged[names[0]])


_DUMP = "run SkyRL with trainer.dump_data_batch=true, and give {export_path}/dumped_data"

TRAINER = Trainer(
    name="skyrl",
    title="SkyRL",
    newest="0.3.0",
    oldest="0.3.0",
    read=(ReadCode("0.3.0", commit="a9564572eb8e"),),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="policy/final_loss",
        grad_norm="policy/grad_norm",
        kl=("policy/policy_kl", "loss/avg_kl"),
        loss_is_whole=True,
        quantities={
            "policy/final_loss": "loss",
            "policy/policy_loss": "policy_loss",
            "policy/policy_kl": "kl",
            "policy/policy_entropy": "entropy",
            "policy/loss_metrics/clip_ratio": "clip_share",
            "policy/loss_metrics/*": "sampler_gap",
            "loss/avg_kl": "reward_kl",
            "loss/avg_raw_advantages*": "advantages",
            "loss/avg_final_rewards": "rewards",
            "reward/*": "rewards",
        },
        not_recomputed={
            "policy/grad_norm, policy/raw_grad_norm": "the norm of the parameters' gradient needs the model",
            "policy/policy_lr, timing/*, generate/*, async/*, trainer/*": "they come from schedule, clock and engine",
            "policy/rollout_train_*, policy/minibatch_*": "they compare the sampler over padded or merged batches",
            "policy/loss_metrics/is_ratio_std, policy/loss_metrics/is_ratio_min": "masked positions count as 0 in them",
            "policy/loss_metrics/tis_*, policy/loss_metrics/*_mask*, policy/loss_metrics/outlier_*": "shares of one "
            "comparison in float32 each",
            "policy/loss_metrics/cispo/*, policy/loss_metrics/importance_ratio": "means of the ratio that is clipped",
            "critic/*": "the critic's values at its update are not in the rows",
            "loss/avg_kl_max, loss/kl_loss_coef": "a largest KL of each row; the controller's state",
        },
        loss_parts=loss_parts,
    ),
    recording={
        "ref_log_probs": f"{_DUMP}; use_kl_loss or use_kl_in_reward makes SkyRL compute them",
        "policy_log_probs": "the dump has the log-probs before the update; those at the loss are in the worker alone: "
        "record them with rolloutdoctor.recorders.own_loop",
        "*": _DUMP,
        "metrics": "give the log of SkyRL's tracker (trainer.logger) as well",
    },
    agents={
        "trajectory_id": "only a dump of FullyAsyncRayPPOTrainer has is_last_step: record the batch of "
        "compute_advantages_and_returns with rolloutdoctor.recorders.own_loop, with the number of True in is_last_step "
        "before each row",
        "turns": "SkyRL keeps only loss_mask: turns are derived from it",
    },
    roles=OptionRoles(
        kl=f"{_P}.kl_loss_coef",
        group={"train": "generator.n_samples_per_prompt"},
        advised={
            "gradient clipping": "trainer.policy.optimizer_config.max_grad_norm",
            "the learning rate": "trainer.policy.optimizer_config.lr",
            "the KL coefficient": f"{_P}.kl_loss_coef",
            "the upper clip range": f"{_P}.eps_clip_high",
        },
    ),
    parts={
        Part.KL_LOSS: PartOptions({f"{_P}.use_kl_loss": (False,), f"{_P}.kl_loss_coef": (0,)}),
        Part.KL_REWARD: PartOptions({f"{_P}.use_kl_in_reward": (False,)}),
        Part.KL_ESTIMATOR: PartOptions({f"{_P}.kl_estimator_type": ()}),
        Part.GROUP_BASELINE: PartOptions({f"{_P}.advantage_estimator": ("reinforce++", "gae")}),
        Part.GROUP_STD: PartOptions(
            {f"{_P}.advantage_estimator": ("rloo", "maxrl", "reinforce++", "gae"), f"{_P}.grpo_norm_by_std": (False,)}
        ),
        Part.POLICY_LOSS: PartOptions({_LOSS: (), f"{_P}.loss_reduction": ()}),
    },
    choices=Choices(
        advantage=(
            *({f"{_P}.advantage_estimator": "grpo", f"{_P}.grpo_norm_by_std": on} for on in (True, False)),
            *({f"{_P}.advantage_estimator": name} for name in ("rloo", "maxrl", "reinforce++", "gae")),
        ),
        kl=tuple({f"{_P}.use_kl_loss": True, f"{_P}.kl_estimator_type": name} for name in KL_TYPES),
        loss=tuple(
            {f"{_P}.loss_reduction": reduction, _LOSS: name}
            for reduction in ("token_mean", "sequence_mean", "prompt_mean", "token_mean_legacy")
            for name in LOSSES
        ),
    ),
    aliases={"loss_mask": "response_mask", "action_log_probs": "old_log_probs"},
)
