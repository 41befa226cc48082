"""verl's `algorithm`: estimators of the advantage and the KL penalty in the reward."""

from collections.abc import Mapping
from typing import Literal

from rolloutdoctor.objective.estimators import SPECS
from rolloutdoctor.objective.objective import AdvantageRule, KlTerm
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import every

EPSILON = 1e-6
"""Constant that verl adds to the standard deviation of a group."""

_ESTIMATOR = "algorithm.adv_estimator"
_IN_REWARD = "algorithm.use_kl_in_reward"
_CONTROL = "algorithm.kl_ctrl"

ESTIMATORS = {
    "gae": "masked_gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "grpo_passk": "grpo_passk",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "tir_optimal_token_baseline",
}
"""verl's names to those of `rolloutdoctor.formulas.advantages.table`, in the order in which a log is compared."""

UNGROUPED = tuple(name for name, estimator in ESTIMATORS.items() if not SPECS[estimator].has_groups)
"""Estimators without a group baseline."""

UNDIVIDED = tuple(name for name, estimator in ESTIMATORS.items() if not SPECS[estimator].divides)
"""Estimators that divide by no group's standard deviation."""

KL_TYPES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3_clamped",
    "k3": "k3_clamped",
}

KL_SINCE: dict[object, str] = {
    **dict.fromkeys(("k1", "k2", "k3"), "0.4.0"),
    **{f"{name}+": "0.8.0" for name in KL_TYPES},
}
"""Values that came later; 0.6 to 0.7.1 have those with a ``+`` and end the run at them."""

ESTIMATORS_SINCE: dict[object, str] = {
    **dict.fromkeys(("grpo_passk", "opo", "reinforce_plus_plus_baseline"), "0.4.0"),
    "gpg": "0.5.0",
    **dict.fromkeys(("grpo_vectorized", "rloo_vectorized"), "0.6.0"),
    **dict.fromkeys(("gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"), "0.7.1"),
}
"""Estimators that came later, with their first release."""

NUMERIC_IDS: dict[str, Literal["proposed", "always"]] = {
    "grpo_vectorized": "always",
    "rloo_vectorized": "proposed",
}
"""Estimators that read group ids as numbers; rloo_vectorized does so in the pull request of the fix `rejected-rows`."""

COEFFICIENT_METRIC = "actor/reward_kl_penalty_coeff"
"""Metric in which verl logs the coefficient of an adaptive controller at a step."""

_WITH_PENALTY = {_IN_REWARD: (True,)}

OPTIONS = (
    Option(
        _ESTIMATOR,
        "word",
        "gae",
        "how scores become advantages",
        choices=tuple(ESTIMATORS),
        values_since=ESTIMATORS_SINCE,
    ),
    Option(
        "algorithm.norm_adv_by_std_in_grpo",
        "flag",
        True,
        "divide by the group's standard deviation (grpo, grpo_passk)",
        since="0.4.0",
        only_with={_ESTIMATOR: ("grpo", "grpo_passk")},
    ),
    Option(
        "algorithm.gamma",
        "number",
        1.0,
        "discount per token (gae, reinforce_plus_plus)",
        low=0,
        high=1,
        only_with={_ESTIMATOR: ("gae", "reinforce_plus_plus")},
    ),
    Option(
        "algorithm.lam",
        "number",
        1.0,
        "lambda of generalised advantage estimation (gae)",
        low=0,
        high=1,
        only_with={_ESTIMATOR: ("gae",)},
    ),
    Option(
        "algorithm.gdpo_reward_keys",
        "any",
        None,
        "rewards to normalise separately, separated by commas (gdpo)",
        since="0.7.1",
        only_with={_ESTIMATOR: ("gdpo",)},
    ),
    Option(
        "algorithm.gdpo_reward_weights",
        "numbers",
        None,
        "weight of each of these rewards; null: 1 (gdpo)",
        since="0.7.1",
        only_with={_ESTIMATOR: ("gdpo",)},
    ),
    Option(
        "algorithm.filter_groups.enable",
        "flag",
        False,
        "dynamic sampling: drop groups of equal scores before the update; a run file has the rows that remain",
        decides=False,
    ),
    Option(
        "algorithm.filter_groups.metric",
        "word",
        "reward",
        "by which groups are equal: the reward before any KL, or a field of the reward function; null: none",
        changes=(("0.9.1", None),),
        optional=True,
        decides=False,
    ),
    Option(_IN_REWARD, "flag", False, "subtract a KL penalty from the token rewards", since="0.4.0"),
    Option(
        "algorithm.kl_penalty",
        "word",
        "kl",
        "KL estimator of the penalty in the reward",
        choices=(*(name + plus for name in KL_TYPES for plus in ("", "+")), "full"),
        computed=tuple(name + plus for name in KL_TYPES for plus in ("", "+")),
        why_not="verl itself does not implement it",
        values_since=KL_SINCE,
        only_with=_WITH_PENALTY,
    ),
    Option(
        f"{_CONTROL}.type",
        "word",
        "fixed",
        f"KL coefficient in the reward: fixed, or adaptive (read from the logged {COEFFICIENT_METRIC})",
        choices=("fixed", "adaptive"),
        only_with=_WITH_PENALTY,
    ),
    Option(
        f"{_CONTROL}.kl_coef",
        "number",
        0.001,
        "KL coefficient in the reward; the initial one if adaptive",
        low=0,
        only_with=_WITH_PENALTY,
    ),
    Option(f"{_CONTROL}.target_kl", "number", 0.1, "target KL of the adaptive coefficient", decides=False),
    Option(
        f"{_CONTROL}.horizon", "integer", 10000, "horizon of the adaptive coefficient, in rows", low=1, decides=False
    ),
)

_PLAIN = tuple(
    name for name in ESTIMATORS if not any(name in option.only_with.get(_ESTIMATOR, ()) for option in OPTIONS)
)
"""Estimators without an option of their own."""

CHOICES: tuple[Mapping[str, object], ...] = (
    *every(algorithm__adv_estimator=("grpo", "grpo_passk"), algorithm__norm_adv_by_std_in_grpo=(True, False)),
    *every(algorithm__adv_estimator=_PLAIN),
    *every(algorithm__adv_estimator=("reinforce_plus_plus",), algorithm__gamma=(1.0, 0.99, 0.95)),
    *every(
        algorithm__adv_estimator=("gae",),
        algorithm__gamma=(1.0, 0.99, 0.95),
        algorithm__lam=(1.0, 0.99, 0.97, 0.95, 0.9, 0.0),
    ),
)
"""Settings that logged advantages can tell apart."""


def advantage_rule(config: Config) -> AdvantageRule:
    """Build how scores become advantages.

    Raises:
        UsageError: if verl itself refuses the options.
    """
    estimator = config.word(_ESTIMATOR)
    # The trainer hands the flag to grpo alone; passk reads it itself; the vectorised form and gdpo always normalise.
    normalised = bool(config["algorithm.norm_adv_by_std_in_grpo"]) or estimator in ("grpo_vectorized", "gdpo")
    scale: Literal["group", "none"] = "group" if normalised else "none"
    keys, weights = _rewards(config) if estimator == "gdpo" else ((), ())
    return AdvantageRule(
        estimator=ESTIMATORS[estimator],
        scale=scale,
        epsilon=EPSILON,
        singleton="zero" if estimator == "rloo_vectorized" else "raw",
        gamma=config.number("algorithm.gamma"),
        lam=config.number("algorithm.lam"),
        numeric_ids=NUMERIC_IDS.get(estimator, "never"),
        sums_tokens=True,
        one_vote="last" if estimator == "grpo" and config["trainer.use_v1"] else False,
        resets_at_mask=config.version < (0, 9),
        reward_keys=keys,
        reward_weights=weights,
    )


def _rewards(config: Config) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names and weights of gdpo's rewards."""
    value = config["algorithm.gdpo_reward_keys"]
    parts = value.strip("[]() ").split(",") if isinstance(value, str) else value or ()
    if not isinstance(parts, list | tuple):
        raise UsageError(f"algorithm.gdpo_reward_keys = {value!r}: expected names separated by commas")
    keys = tuple(name for part in parts if (name := str(part).strip(" '\"")))
    if not keys:
        raise UsageError(
            "adv_estimator = gdpo needs algorithm.gdpo_reward_keys, and so does verl: the names, in column rewards, of "
            "the rewards that are normalised one by one"
        )
    weights = config["algorithm.gdpo_reward_weights"]
    assert weights is None or isinstance(weights, tuple)
    if weights is not None and len(weights) < len(keys):
        raise UsageError(f"algorithm.gdpo_reward_weights has {len(weights)} weights for {len(keys)} rewards")
    return keys, weights or ()


def kl_reward(config: Config) -> KlTerm | None:
    """Build the KL penalty in the reward. A ``+`` changes the derivative alone, and none flows through a reward."""
    if not config[_IN_REWARD]:
        return None
    return KlTerm(
        estimator=KL_TYPES[config.word("algorithm.kl_penalty").rstrip("+")],
        coef=config.number(f"{_CONTROL}.kl_coef"),
        log_probs="old_log_probs",
        masked=True,
        coef_metric=COEFFICIENT_METRIC if config[f"{_CONTROL}.type"] == "adaptive" else None,
    )
