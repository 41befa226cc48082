"""verl's `actor.policy_loss.loss_mode`: its options, its policy term and the aggregation that some modes force."""

from dataclasses import replace

from rolloutdoctor.objective.corrections import RolloutCorrection
from rolloutdoctor.objective.objective import Aggregation, KlTerm, Surrogate
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.verl import correction as verl_correction

ACTOR = "actor_rollout_ref.actor"
_MODE = f"{ACTOR}.policy_loss.loss_mode"

LOSS_MODES = {
    "vanilla": "ppo_dual_clip",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gspo": "gspo",
    "sapo": "sapo_of_tokens",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geo_mean",
    "dro": "dro",
    "cispo": "cispo_clipped",
}
"""Loss mode to the kind of its policy term."""

_BYPASS = "bypass_mode"

_MODES_SINCE: dict[object, str] = {
    "gpg": "0.5.0",
    **dict.fromkeys(("gspo", "geo_mean"), "0.6.0"),
    **dict.fromkeys(("sapo", "cispo", _BYPASS), "0.7.0"),
    **dict.fromkeys(("dppo_tv", "dppo_kl"), "0.7.1"),
    "dro": "0.9.0",
}
"""Modes that came later than the option, with their first release."""

_INSIDE = f"{ACTOR}.policy_loss.rollout_correction"
_BYPASS_KINDS = {"ppo_clip": "ppo_dual_clip", "reinforce": "reinforce"}
"""Type of loss in bypass mode to the kind of its policy term."""

_NOT_CLAMPED = ("gspo", "clip_cov", "kl_cov", "geo_mean", "dro", "gpg")
"""Modes that take the log-ratio as it is; the others clamp it to +-20."""

BY_MICRO_BATCH = ("kl_cov", "clip_cov", "geo_mean")
"""Modes whose result depends on which rows went through the model together."""

TRIED = ("vanilla", "gspo", "cispo", "geo_mean", "sapo")
"""Modes that logged losses can tell apart."""


def _number(name: str, default: float | None, meaning: str, mode: str, **bounds: float) -> Option:
    """An option of one loss mode."""
    return Option(
        f"{ACTOR}.{name}",
        "number",
        default,
        f"{meaning} ({mode})",
        only_with={_MODE: (mode,)},
        **bounds,  # type: ignore[arg-type]  # bounds alone
    )


OPTIONS = (
    Option(
        _MODE,
        "word",
        "vanilla",
        "the policy term",
        choices=(*LOSS_MODES, _BYPASS),
        since="0.4.1",
        values_since=_MODES_SINCE,
    ),
    Option(
        f"{ACTOR}.clip_ratio",
        "number",
        0.2,
        "clip range, used where clip_ratio_low or clip_ratio_high is null",
        low=0,
        decides=False,
    ),
    Option(
        f"{ACTOR}.clip_ratio_low",
        "number",
        0.2,
        "lower clip range of the importance ratio",
        low=0,
        optional=True,
        since="0.4.0",
    ),
    Option(
        f"{ACTOR}.clip_ratio_high",
        "number",
        0.2,
        "upper clip range of the importance ratio",
        low=0,
        optional=True,
        since="0.4.0",
    ),
    Option(
        f"{ACTOR}.clip_ratio_c",
        "number",
        3.0,
        "dual clip for negative advantages; truncates the ratio (dppo_tv, dppo_kl)",
        since="0.4.0",
        only_with={_MODE: ("vanilla", "dppo_tv", "dppo_kl")},
    ),
    _number("tau_pos", 1.0, "temperature of the gate for positive advantages", "sapo"),
    _number("tau_neg", 1.05, "temperature of the gate for the other advantages", "sapo"),
    _number("policy_loss.dro_beta", None, "coefficient of the squared log-ratio", "dro", low=0),
    _number("policy_loss.kl_cov_ratio", 0.0002, "share of tokens with a KL penalty", "kl_cov", low=0, high=1),
    _number("policy_loss.ppo_kl_coef", 0.1, "coefficient of that penalty", "kl_cov"),
    _number(
        "policy_loss.clip_cov_ratio",
        0.0002,
        "largest share of tokens whose policy term is dropped; if there are more candidates, verl draws them at "
        "random and the step is not computed",
        "clip_cov",
        low=0,
    ),
    _number("policy_loss.clip_cov_lb", 1.0, "tokens with a smaller covariance are never dropped", "clip_cov"),
    _number("policy_loss.clip_cov_ub", 5.0, "tokens with a larger covariance are never dropped", "clip_cov"),
    Option(
        f"{_INSIDE}.loss_type",
        "word",
        "ppo_clip",
        "the loss of bypass_mode",
        choices=tuple(_BYPASS_KINDS),
        only_with={_MODE: (_BYPASS,)},
        yields=True,
    ),
    *(
        replace(
            option,
            name=option.name.replace("algorithm.rollout_correction", _INSIDE),
            default="sequence" if option.name.endswith("rollout_is") else option.default,
            meaning=f"{option.meaning} (inside bypass_mode)",
            only_with={_MODE: (_BYPASS,)},
            yields=True,
        )
        for option in verl_correction.OPTIONS
        if option.name not in (verl_correction.BYPASS, verl_correction.LOSS_TYPE)
    ),
)


def surrogate(config: Config) -> Surrogate:
    """Build the policy term.

    Raises:
        UsageError: if verl itself refuses the options.
    """
    mode = config.word(_MODE)
    kind = _BYPASS_KINDS[config.word(f"{_INSIDE}.loss_type")] if mode == _BYPASS else LOSS_MODES[mode]
    width = config.optional_number(f"{ACTOR}.clip_ratio")
    low = config.optional_number(f"{ACTOR}.clip_ratio_low")
    high = config.optional_number(f"{ACTOR}.clip_ratio_high")
    cap = config.number(f"{ACTOR}.clip_ratio_c")
    if kind == "ppo_dual_clip" and cap <= 1:
        raise UsageError(f"{ACTOR}.clip_ratio_c = {cap:g}: verl's vanilla loss refuses values up to 1")
    return Surrogate(
        kind=kind,
        clip_low=low if low is not None else width or 0.0,
        clip_high=high if high is not None else width or 0.0,
        cap=cap if kind in ("ppo_dual_clip", "dppo_tv", "dppo_kl") else None,
        log_ratio_bound=None if mode in _NOT_CLAMPED or kind == "reinforce" else 20.0,
        old="rollout_log_probs" if config[verl_correction.BYPASS] else "old_log_probs",
        # The mean advantage of a row without a token is 0 times the advantage.
        empty_share=0.0 if kind == "geo_mean" else None,
        numbers=_numbers(config, mode),
    )


def _numbers(config: Config, mode: str) -> dict[str, float]:
    """The further parameters of a mode."""
    if mode == "sapo":
        return {name: config.number(f"{ACTOR}.{name}") for name in ("tau_pos", "tau_neg")}
    if mode == "dro":
        beta = config.optional_number(f"{ACTOR}.policy_loss.dro_beta")
        if not beta:
            raise UsageError(f"loss_mode = dro needs {ACTOR}.policy_loss.dro_beta > 0, and so does verl")
        return {"beta": beta}
    if mode == "kl_cov":
        names = {"ratio": "kl_cov_ratio", "coef": "ppo_kl_coef"}
    elif mode == "clip_cov":
        names = {"ratio": "clip_cov_ratio", "lower": "clip_cov_lb", "upper": "clip_cov_ub"}
    else:
        return {}
    numbers = {name: config.number(f"{ACTOR}.policy_loss.{option}") for name, option in names.items()}
    if numbers.get("ratio") == 0:
        raise UsageError(f"loss_mode = {mode} needs {ACTOR}.policy_loss.{names['ratio']} > 0, and so does verl")
    return numbers


def aggregations(config: Config, configured: Aggregation) -> tuple[Aggregation, Aggregation | None]:
    """Return the aggregation of all terms, and that of the policy terms where the mode forces another one on them.

    sapo takes the mean of row means whatever is set, and so did gspo before 0.9.1; geo_mean has one term per row and
    no denominator of the mini-batch. The bypass loss takes the mean of a row over the tokens that it keeps, while
    rejected tokens stay in the count of token-mean. The KL term follows the configuration always.
    """
    mode = config.word(_MODE)
    configured = replace(configured, needs_micro_batches=mode in BY_MICRO_BATCH)
    if mode == "geo_mean":
        return configured, replace(configured, mode="micro-batch-row-mean-added", counted_before_rejection=False)
    if mode == "sapo" or (mode == "gspo" and config.version < (0, 9, 1)):
        return configured, replace(configured, mode="seq-mean-token-mean", counted_before_rejection=False)
    if mode == _BYPASS and configured.mode == "seq-mean-token-mean":
        return configured, replace(configured, counted_in_policy=True)
    return configured, None


def correction(config: Config) -> RolloutCorrection | None:
    """The correction inside the bypass loss: rejection, and importance weights.

    The weights are multiplied in if the loss is reinforce; that of ppo_clip has the ratio in it, and logs them alone.

    Raises:
        UsageError: if verl itself refuses the options.
    """
    if config.word(_MODE) != _BYPASS:
        return None
    return RolloutCorrection(
        weights=verl_correction.weights(config, _INSIDE),
        rejections=verl_correction.rejections(config, _INSIDE),
        weighs=config.word(f"{_INSIDE}.loss_type") == "reinforce",
    )


def against_sampler(config: Config, term: KlTerm | None) -> KlTerm | None:
    """The KL penalty inside the reward: in bypass mode the sampler's log-probs stand in for the old ones there too."""
    if term is None or not config[verl_correction.BYPASS]:
        return term
    return replace(term, log_probs="rollout_log_probs")
