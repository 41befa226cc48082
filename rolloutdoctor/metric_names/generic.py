"""Names that people give to metrics in loops of their own, and what they are taken for: no trainer's.

What is read by them is said: a name here says what a number is about, and not how it was made.
"""

import re
from collections.abc import Collection
from functools import cache, lru_cache

from rolloutdoctor.metric_names.name import MetricName
from rolloutdoctor.metric_names.quantities import BY_NAME

SPELLINGS: dict[str, tuple[str, ...]] = {
    "reward": (
        *("reward", "rewards", "reward_score", "rew", "ep_rew", "ep_reward", "episode_reward", "score", "scores"),
        *("total_reward", "total_rewards", "reward_total", "r_total", "batch_reward", "episode_return", "ep_return"),
        *("episode_score", "ep_score", "final_reward"),
        *("rollout_reward", "rollout_rewards", "r"),
    ),
    "accuracy": (
        *("accuracy", "accuracies", "acc", "batch_accuracy", "pass@1", "solve_rate", "success_rate", "win_rate"),
        *(
            f"{share}_of_correct_{of}"
            for share in ("percentage", "fraction")
            for of in ("example", "answer", "response")
        ),
    ),
    "gold_reward": (
        *("gold", "gold_reward", "gold_score", "gold_rm", "gold_rm_score", "gold_reward_score"),
        *("true_reward", "true_score", "ground_truth_reward"),
    ),
    "correctness": tuple(
        f"{name}{suffix}"
        for name in ("correctness", "correctness_reward", "reward_correctness", "correctness_score")
        for suffix in ("", "_f", "_fn", "_func")
    ),
    "reward_std": ("reward_std", "std_reward", "rewards_std", "rollout_reward_std", "total_rewards_std"),
    "zero_variance_share": (
        *("frac_zero_variance", "frac_zero_std", "zvf"),
        # What says no share may be a count: ``dead_groups``; advantages of 0 may be of responses or tokens.
        *(
            f"{of}_{share}"
            for of in (
                *("zero_adv_group", "zero_advantage_group", "dead_group"),
                *("zero_std", "zero_std_group", "zero_var", "zero_var_group", "zero_variance", "zero_variance_group"),
                *("degenerate", "degenerate_group", "zero_reward_std", "reward_zero_std"),
            )
            for share in ("fraction", "frac", "ratio", "share", "rate")
        ),
    ),
    "kl": ("kl", "kl_div", "kl_divergence", "kl_ref", "ref_kl", "exact_kl", "kls", "kl_penalty"),
    "ppo_kl": ("approx_kl", "approxkl"),
    "entropy": ("entropy", "policy_entropy", "token_entropy", "dist_entropy", "ent"),
    "loss": ("loss", "losses", "total_loss", "loss_total", "loss/total", "grpo_loss", "ppo_loss", "rl_loss"),
    "policy_loss": (
        "policy_loss",
        "pg_loss",
        "loss_pg",
        "actor_loss",
        "loss_actor",
        "act_loss",
        "action_loss",
        "policy_gradient_loss",
    ),
    "critic_loss": ("critic_loss", "cri_loss", "value_loss", "vf_loss", "v_loss"),
    "grad_norm": (
        *("grad_norm", "gradnorm", "gradient_norm", "gnorm", "grad"),
        # An L2 norm that says no more may be of the weights.
        *("grad_l2_norm", "gradient_l2_norm", "total_grad_norm"),
    ),
    # A ratio that is truncated is an importance weight.
    "truncated_share": tuple(
        f"{of}_{share}" for of in ("truncated", "truncation") for share in ("rate", "fraction", "frac", "share")
    ),
    "ratio": (
        *("importance_ratio", "prefix_importance_ratio", "sequence_importance_ratio", "prob_ratio", "policy_ratio"),
        *(f"{part}/importance_ratio" for part in ("optim", "loss", "policy", "actor", "actions")),
    ),
    "ratio_max": ("importance_ratio_max", "prefix_importance_ratio_max", "prob_ratio_max", "policy_ratio_max"),
    "ratio_min": ("importance_ratio_min", "prob_ratio_min", "policy_ratio_min"),
    "clip_fraction": ("clip_frac", "clipfrac", "clip_fraction", "clip_ratio", "pg_clipfrac", "pg_clip_frac"),
    "response_length": (
        *("response_length", "response_len", "resp_len", "completion_length", "completion_len"),
        *("reply_length", "reply_len", "generation_length", "gen_length", "gen_len", "comp_len"),
        *("mean_length", "avg_length", "mean_len", "avg_len"),
    ),
    "learning_rate": ("lr", "learning_rate"),
    "tool_calls": ("tool_calls", "num_tool_calls"),
}
"""Quantity to the names that are taken for it, in lower case, with or without a word of `_AROUND`."""

_AROUND = re.compile(
    r"^(train|rollout|ppo|grpo|env|losses|performance|[\w-]{1,40}\.(?:ai|com|io|org))/|(?<![a-z])(mean|avg|average|training|train|pct)_|_(mean|avg|average|pct|percent|history|stats|latest|curve|log|trace|list|values|series|at_step|per_(?:episode|step|iteration|epoch|update))(?![a-z])|/(mean|avg|average|train)$"
)
"""What says that a number is a mean, of the training, or whose: ``skyrl.ai/grad_norm``."""

_IN_PERCENT = re.compile(r"(?<![a-z])(?:pct|percent)(?![a-z])")
_SHARES = frozenset(name for name, quantity in BY_NAME.items() if quantity.definition.startswith("share")) - {
    "accuracy"
}
"""Quantities that are compared with numbers between 0 and 1: in percent they would be a hundred times as large."""

_BRACKETED = re.compile(r"([^()]{1,100}?)_?\(([^()]{1,100})\)?")

_OF_NO_STEP = frozenset({"before", "after"})
"""Words in brackets of what is measured once, around the training: ``rewards (before)``."""

_HELD_OUT = re.compile(r"^(?:eval|evaluation|val|valid|validation|test|held_?out|val-core/[^/]{1,100})[_/]")
"""How the name of a metric of evaluations begins; verl's has the data source."""

_OF_EVALUATIONS = {"accuracy": "accuracy", "reward": "held_out_reward"}
"""Quantity to what it is of an evaluation."""

_OF_MANY = re.compile(r"/mean@[0-9]{1,4}$")

_OF_ANY_LOG = frozenset(
    {
        "loss",
        "losses",
        "reward",
        "rewards",
        "score",
        "scores",
        "kl",
        "entropy",
        "rew",
        "ent",
        "return",
        "returns",
        "advantage",
        "advantages",
    }
    | {"accuracy", "accuracies", "acc", "perplexity", "ppl", "logps"}
)
"""Words in the names of metrics, which no option and no clock has."""


_OF_OPTIONS = {"coef", "coeff", "weight", "weights", "type", "target", "dict", "sequences"}
"""Words in the names of options, which may have one of these beside: ``kl_coef``, ``return_dict``."""


_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")


def snake(name: str) -> str:
    """Return a name in lower case, with an underscore where a word begins within it.

    >>> snake("avgReward"), snake("Grad Norm"), snake("KL")
    ('avg_reward', 'grad norm', 'kl')
    """
    return _HUMP.sub("_", name).lower()


@cache
def _by_spelling() -> dict[tuple[str, ...], str]:
    return {_words(name): quantity for quantity, names in SPELLINGS.items() for name in names}


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a name in the order of letters, in the singular: ``loss/policy`` is ``policy_losses``."""
    words = (word[:-2] if word.endswith("sses") else word for word in re.split(r"[/_]", name))
    return tuple(sorted(word if word.endswith("ss") else word.removesuffix("s") for word in words))


def _bare(name: str) -> str:
    """Return a name without what is around it; ``reward/train_avg`` has two words of it."""
    return _AROUND.sub("", _AROUND.sub("", name))


@lru_cache(2**12)
def _spelled(name: str) -> str | None:
    return _by_spelling().get(_words(name)) or _by_spelling().get(_words(_bare(name)))


def is_held_out(name: str) -> bool:
    """Tell a metric of evaluations from one of the training."""
    return _HELD_OUT.match(name.lower()) is not None


@lru_cache(2**14)
def generic(name: str) -> MetricName | None:
    """Return what a name that is no trainer's is taken for; None if it says too little.

    >>> generic("Avg_Reward").quantity, generic("train/reward_mean").quantity, generic("beta")
    ('reward', 'reward', None)
    >>> generic("mean_return_(reward)").quantity, generic("reward_(train)").quantity
    ('reward', 'reward')
    >>> generic("rewards (before)"), generic("rewards_(after"), generic("S(r)")
    (None, None, None)
    >>> generic("eval/accuracy").quantity, generic("val-core/gsm8k/acc/mean@1").quantity, generic("eval/loss")
    ('accuracy', 'accuracy', None)
    >>> generic("eval/mean_reward").quantity
    'held_out_reward'
    """
    lower = snake(name).replace("-", "_")
    # Words in brackets say the name again, or add to it: ``Mean Return (Reward)``.
    bracketed = _BRACKETED.fullmatch(lower)
    if bracketed is not None and bracketed[2] in _OF_NO_STEP:
        return None
    # A letter there is what a function is of: S(r) is no reward r.
    parts = (lower, *(part for part in (bracketed.groups() if bracketed else ()) if len(part) > 1))
    quantity = next((spelled for part in parts if (spelled := _spelled(part)) is not None), None)
    if quantity is None and is_held_out(name):
        # Its loss is not that of the training.
        of = _bare(_OF_MANY.sub("", _HELD_OUT.sub("", name.lower())).replace("-", "_"))
        quantity = _OF_EVALUATIONS.get(_by_spelling().get(_words(of), ""))
    if quantity is None or (quantity in _SHARES and _IN_PERCENT.search(lower) is not None):
        return None
    return MetricName(name, quantity, BY_NAME[quantity].definition, "")


def taken_for(names: Collection[str]) -> dict[str, str]:
    """Return the names that are taken for a quantity, by its title."""
    metrics = {name: metric for name in sorted(names) if (metric := generic(name)) is not None}
    return {name: BY_NAME[metric.quantity].title for name, metric in metrics.items()}


@lru_cache(2**14)
def is_metric(name: str) -> bool:
    """Tell the name of a metric by a word in it, or that of an accuracy.

    >>> is_metric("train/policy_gradient_loss"), is_metric("kl_coef"), is_metric("batch_size"), is_metric("solve_rate")
    (True, False, False, True)
    """
    words = [*snake(name).replace("/", "_").replace("@", "_").replace(" ", "_").replace(".", "_").split("_")]
    is_told = not _OF_ANY_LOG.isdisjoint(words) or _spelled(snake(name)) == "accuracy"
    return is_told and not _OF_OPTIONS & {*words}
