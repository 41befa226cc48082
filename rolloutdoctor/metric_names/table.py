"""The metrics of every trainer, and which of them a log has."""

import re
from collections.abc import Collection, Mapping
from functools import cache, lru_cache

from rolloutdoctor import packs
from rolloutdoctor.metric_names.generic import generic, is_held_out, taken_for
from rolloutdoctor.metric_names.name import MetricName, ordered
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.plugins import own
from rolloutdoctor.results.errors import UsageError, nearest

TRAINERS: Mapping[str, tuple[MetricName, ...]] = dict(
    zip(packs.METRIC_NAMES, own(packs.METRIC_NAMES.values()), strict=True)
)
"""Name of a trainer to its metrics; of several names of one quantity the best comes first."""

SAME = {"trl-rloo": "trl", "axolotl": "trl"}
"""Trainers that log under the names of another."""

DIALECTS = {
    "unsloth": ("reward", "completion_length"),
    "miles": ("train/pg_loss", "train/ess_ratio"),
    "rlinf": ("actor/grad_norm", "actor/policy_loss"),
    "verifiers": ("reward", "tokens/completion"),
}
"""Trainers with the names of another, which have the second name wherever they have the first."""

_MARKS = {
    "trl": ("completions/mean_terminated_length",),
    "unsloth": ("completions/mean_terminated_length",),
    # With Megatron it prints Megatron's own names beside those of its trainer.
    "ms-swift": ("memory(GiB)", "train_speed(s/it)", "train_speed(iter/s)", "consumed_samples"),
    "llama-factory": ("total_steps", "percentage"),
    "trl-ppo": (
        "objective/non_score_reward",
        "val/clipfrac_avg",
        "val/ratio_var",
        "eps",
        "episode",
    ),
}
"""Names of no quantity that distinguish trainers with the names of each other."""

_BOOKKEEPING = re.compile(
    r"(training/)?epoch|(ppo|grpo)_(ep|epoch|iter)|eps|episode|(\w+/)?step|total_steps|percentage|(elapsed|remaining)_time.*|consumed_samples|global_batch_size"
    r"|total_flos|num_tokens|rollout/zero_std/count_.*|train_(runtime|samples_per_second|steps_per_second)"
    r"|((actor|critic|train)/)?(perf|profiling|system|time|timeperf|timing|timing_s|timing_per_token_ms)/.*"
    r"|global_seqlen/.*|_(runtime|timestamp|step)"
)
"""Counters, clocks, and the use of the machine, which say nothing of the training by themselves."""


def is_bookkeeping(name: str) -> bool:
    """Tell a counter, a clock, a use of the machine, or a name that only says which trainer logs.

    >>> is_bookkeeping("epoch"), is_bookkeeping("val/clipfrac_avg"), is_bookkeeping("train/accuracy")
    (True, True, False)
    >>> is_bookkeeping("timing_s/gen"), is_bookkeeping("actor/perf/max_memory_allocated_gb")
    (True, True)
    """
    return _BOOKKEEPING.fullmatch(name) is not None or name in _no_quantity()


_FEWEST_NAMES = 2
"""Names that decide: a single one anybody may have chosen."""


_OF_ANY_LOOP = frozenset(
    {"loss", "policy_loss", "critic_loss", "reward", "reward_std", "kl", "entropy", "grad_norm", "learning_rate"}
    | {"accuracy", "response_length", "clip_fraction"}
)
"""Quantities that loops of anybody's own log by names that trainers have as well, and that tell no trainer."""

_OF_ANY_TRAINER = frozenset(
    {"accuracy", "reward", "reward_std", "response_length", "learning_rate", "grad_norm", "tool_calls"}
    | {"zero_variance_share"}
)
"""Quantities that mean the same whoever logs them: a number of one's own stands for one that the trainer lacks."""

_OF_LOOPS = re.compile(r"(?:(?:train|rollout)/)?(?!kl_penalty|pg_loss|pg_clipfrac|completion_length)[^/]+")
"""How they name them, but for NeMo-RL's penalty, slime's loss and clipping, and the length of TRL's first releases."""

_OF_TRANSFORMERS = frozenset({"grad_norm", "learning_rate", "epoch"})


def find(trainer: str) -> tuple[MetricName, ...]:
    """Return the metrics of a trainer.

    Raises:
        UsageError: if its metrics are not known.
    """
    name = SAME.get(trainer, trainer)
    if name not in TRAINERS:
        names = [*TRAINERS, *SAME]
        raise UsageError(f"no metric names of {trainer!r} (known: {', '.join(names)}){nearest(trainer, names)}")
    return TRAINERS[name]


def names_of(trainer: str, quantity: str) -> tuple[str, ...]:
    """Return the names under which the newest release of a trainer logs a quantity, the best first.

    >>> names_of("verl", "kl")[0], names_of("tinker-cookbook", "grad_norm")
    ('actor/kl_loss', ())
    """
    table = TRAINERS.get(SAME.get(trainer, trainer), ())
    newest = [metric for metric in table if metric.quantity == quantity and not metric.until]
    return tuple("".join(metric.spellings[0]) for metric in newest)


def understood(
    names: Collection[str], trainer: str | None = None, release: str | None = None
) -> dict[str, tuple[str, MetricName]]:
    """Return which canonical quantities a log has.

    Args:
        names: of the logged metrics.
        trainer: who logged them; None, or one whose metrics are not known: the one that the names tell. Where they tell
            none, the quantities on which all trainers agree that log such a name, with no definition but theirs.
        release: of that trainer; None: any, the newest first.

    Returns:
        Canonical quantity to the name in the log and what it means, in the order of the trainer's table.
    """
    table = TRAINERS.get(SAME.get(trainer or "", trainer or "")) or TRAINERS.get(whose(names) or "")
    if table is None:
        return _with_total(names, _agreed(names))
    # Where a metric has its own name, another order of its words is none.
    by_rank = sorted(sorted(names, reverse=True), key=lambda name: name in _literal())
    logged_as = {metric: name for name in by_rank for _, metric in _owners(name)}
    by_quantity: dict[str, tuple[str, MetricName]] = {}
    for metric in table:
        if metric in logged_as and (release is None or metric.logged_at(release)):
            by_quantity.setdefault(metric.quantity, (logged_as[metric], metric))
    # A loop of one's own may share some names with a trainer; beside any trainer one may print what is one's own.
    own_names = {logged_as[metric] for metric in table if metric in logged_as}
    more = _agreed([name for name in names if name not in own_names])
    is_own = trainer is None or not by_quantity
    others = {
        quantity: each
        for quantity, each in more.items()
        if quantity not in by_quantity and (is_own or quantity in _OF_ANY_TRAINER)
    }
    return _with_total(names, _with_stand_ins(by_quantity | others))


_TOTALS = (
    *("rewards/reward/mean", "rewards/reward", "rewards/total/mean", "rewards/total", "rewards/total_reward/mean"),
    *("proxy_reward", "proxy_score", "reward_proxy", "reward/proxy"),
    *("mean_ret", "avg_ret", "mean_return", "avg_return", "average_return"),
    *("reward/selected_mean", "reward/selected/mean", "reward/selected", "selected_reward_mean", "selected_reward"),
)
"""Names of what a function gave that is called the reward, a proxy, an episode's return, or the reward of the responses
that a loop selects to train on: where no other is."""
_PROXY = "proxy"
"""The same beside what it stands for, the gold reward."""
_KL_LOSS = "kl_loss"
"""Without a reward it may be one to a teacher, or of an autoencoder."""


def _with_total(
    names: Collection[str], by_quantity: dict[str, tuple[str, MetricName]]
) -> dict[str, tuple[str, MetricName]]:
    """Add the reward that a function of this name gave, and the KL that a loss is, where no other name tells it.

    >>> understood(["loss", "rewards/json/mean", "rewards/reward/mean"])["reward"][0]
    'rewards/reward/mean'
    >>> understood(["loss", "reward", "rewards/reward/mean"])["reward"][0]
    'reward'
    >>> understood(["proxy", "gold", "kl"])["reward"][0], understood(["proxy", "kl"]).get("reward")
    ('proxy', None)
    >>> [understood(names).get("kl", ("",))[0] for names in (["score", "kl_loss"], ["loss", "kl_loss"])]
    ['kl_loss', '']
    >>> understood(["score", "kl_loss", "kl"])["kl"][0]
    'kl'
    """
    if _KL_LOSS in names and "reward" in by_quantity:
        by_quantity = {"kl": (_KL_LOSS, MetricName(_KL_LOSS, "kl", BY_NAME["kl"].definition, ""))} | by_quantity
    totals = (*_TOTALS, _PROXY) if "gold_reward" in by_quantity else _TOTALS
    total = next((name for name in totals if name in names), "")
    if "reward" in by_quantity or not total:
        return by_quantity
    return {"reward": (total, MetricName(total, "reward", BY_NAME["reward"].definition, ""))} | by_quantity


def taken_names(names: Collection[str]) -> dict[str, str]:
    """Return the names that are taken for a quantity, by its title, alone or by what stands beside them.

    >>> taken_names(["proxy", "gold"]), taken_names(["proxy"])
    ({'gold': 'gold reward', 'proxy': 'reward'}, {})
    """
    logged_as = {quantity: name for quantity, (name, _) in understood(names).items() if quantity in ("reward", "kl")}
    totals = {
        name: BY_NAME[quantity].title for quantity, name in logged_as.items() if name in (*_TOTALS, _PROXY, _KL_LOSS)
    }
    return taken_for(names) | totals


_STANDS_FOR = {"penalised_reward": "reward"}
"""Quantity to another for which it is taken where that is not logged."""


def _with_stand_ins(by_quantity: dict[str, tuple[str, MetricName]]) -> dict[str, tuple[str, MetricName]]:
    return {
        other: by_quantity[stand_in] for stand_in, other in _STANDS_FOR.items() if stand_in in by_quantity
    } | by_quantity


def releases_of(names: Collection[str], trainer: str) -> tuple[str, str] | None:
    """Return the first release of a trainer that logs all of these names, and the first that does not any more.

    Empty where nothing tells; None where no release has all of them, or the trainer's names are not known.

    >>> releases_of(["reward", "completion_length", "num_tokens"], "trl")
    ('0.16', '0.17')
    """
    if trainer not in TRAINERS and trainer not in SAME:
        return None
    since = until = ""
    for name in names:
        metrics = [metric for metric in find(trainer) if metric.matches(name)]
        if metrics:
            since = max(since, min((metric.since for metric in metrics), key=ordered), key=ordered)
            ends = [metric.until for metric in metrics]
            last = "" if "" in ends else max(ends, key=ordered)
            until = min(filter(None, (until, last)), key=ordered, default="")
    return None if until and ordered(since) >= ordered(until) else (since, until)


def tell_a_trainer(names: Collection[str]) -> bool:
    """Tell whether names are more than those that any loop has; the Trainer of transformers logs three at once.

    The words of a trainer's name in another order are anybody's.

    >>> tell_a_trainer(["loss", "reward", "kl"]), tell_a_trainer(["loss", "reward", "completion_length"])
    (False, True)
    >>> tell_a_trainer(["train/loss", "train/reward", "train/grad_norm"]), tell_a_trainer(["train/loss", "train/lr"])
    (False, False)
    >>> tell_a_trainer(["critic_loss", "reward", "entropy_loss"]), tell_a_trainer(["reward", "train/entropy_loss"])
    (False, True)
    >>> tell_a_trainer(["loss", "frac_reward_zero_std"]), tell_a_trainer(["loss", "frac_reward_zero_std", "avg_reward"])
    (True, False)
    """
    if _has_own_reward(names):
        return False
    return {*names} >= _OF_TRANSFORMERS or any(
        name in _no_quantity() or (is_named(name) and _owners(name) and not _is_of_any_loop(name)) for name in names
    )


def _is_of_any_loop(name: str) -> bool:
    if name == "entropy_loss":
        # Minus the entropy, where it is not OpenRLHF's.
        return True
    metric = generic(name) if _OF_LOOPS.fullmatch(name) else None
    return metric is not None and metric.quantity in _OF_ANY_LOOP


def whose(names: Collection[str]) -> str | None:
    """Return the trainer a release of which has more of these names than any other trainer; None in a tie.

    >>> whose(["critic/score/mean", "response_length/mean", "response_length/clip_ratio"])
    'verl'
    """
    owners = writers(names)
    return owners[0] if len(owners) == 1 else None


def writers(names: Collection[str]) -> tuple[str, ...]:
    """Return the trainers that most likely logged these names: several in a tie, none where any loop has them.

    >>> writers(["reward", "kl", "completions/mean_length", "clip_ratio/low_mean"])
    ('trl', 'ms-swift')
    >>> writers(["mean_reward", "reward_std", "frac_reward_zero_std"])
    ()
    """
    return namesakes(names) if tell_a_trainer(names) else ()


def _has_own_reward(names: Collection[str]) -> bool:
    """Tell plain names with a reward that no trainer calls so: the others are those that people choose as well."""
    is_named = any(metric.quantity in _OF_REWARDS for name in names for _, metric in _owners(name))
    rewards = (metric for name in names if (metric := generic(name)) and metric.quantity == "reward")
    return not is_named and not any("/" in name for name in names) and any(rewards)


_OF_REWARDS = frozenset({"reward", "penalised_reward", "function_reward"})


def namesakes(names: Collection[str]) -> tuple[str, ...]:
    """Return the trainers a release of which has most of these names: several in a tie, none where a name is too few.

    >>> namesakes(["train/loss", "train/lr"]), writers(["train/loss", "train/lr"])
    (('nemo-rl',), ())
    """
    by_trainer: dict[str, list[tuple[str, MetricName]]] = {}
    for name in names:
        for trainer, metric in _owners(name):
            by_trainer.setdefault(trainer, []).append((name, metric))
    counts = {
        trainer: max(
            len({name for name, metric in members if metric.logged_at(release)})
            for release in {metric.since for _, metric in members}
        )
        + (
            len({*_MARKS.get(trainer, ())} & {*names})
            if any(metric.quantity == "reward" for _, metric in members)
            else 0
        )
        for trainer, members in by_trainer.items()
        if (mark := DIALECTS.get(trainer)) is None or mark[0] not in names or mark[1] in names
    }
    best = max(counts.values(), default=0)
    return tuple(trainer for trainer in TRAINERS if counts.get(trainer) == best) if best >= _FEWEST_NAMES else ()


def functions(names: Collection[str]) -> dict[str, tuple[str, str | None]]:
    """Return the reward functions of a log, each with the metrics of its mean and of its standard deviation.

    >>> functions(["rewards/format/mean", "rewards/format/std", "reward"])
    {'format': ('rewards/format/mean', 'rewards/format/std')}
    >>> functions(["reward/total", "reward/format", "reward/std"])
    {'format': ('reward/format', None)}
    """
    by_function: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        for _, metric in _owners(name)[:1]:
            head, star, tail = metric.spellings[0]
            if star and metric.quantity.startswith("function_"):
                by_function.setdefault(name[len(head) : len(name) - len(tail)], {})[metric.quantity] = name
    for name, (function, quantity) in _flattened(names).items():
        by_function.setdefault(function, {})[quantity] = name
    return {name.partition("/")[2]: (name, None) for name in _parts_of_total(names)} | {
        function: (by_quantity["function_reward"], by_quantity.get("function_reward_std"))
        for function, by_quantity in by_function.items()
        if "function_reward" in by_quantity
    }


def _flattened(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the names of TRL's reward functions that an export wrote with underscores, each function's pair of two.

    >>> _flattened(["rewards_format_mean", "rewards_format_std", "rewards_mean"])
    {'rewards_format_mean': ('format', 'function_reward'), 'rewards_format_std': ('format', 'function_reward_std')}
    """
    found = [match for name in sorted(names) if (match := _OF_FUNCTION.fullmatch(name))]
    pairs = [match[1] for match in found if f"rewards_{match[1]}_std" in names]
    ends = {"mean": "function_reward", "std": "function_reward_std"}
    return {f"rewards_{each}_{end}": (each, quantity) for each in pairs for end, quantity in ends.items()}


_OF_FUNCTION = re.compile(r"rewards_(\w{1,200})_mean")


def _parts_of_total(names: Collection[str]) -> list[str]:
    """Return the names of the parts of a reward that a loop logs as an object, with the total or the mean of them."""
    holders = {name.partition("/")[0] for name in _WHOLE_REWARDS if name in names}
    parts = [name for name in sorted(names) if name.count("/") == 1 and name.partition("/")[0] in holders]
    return [name for name in parts if name.partition("/")[2] not in _OF_A_WHOLE and not _owners(name)]


_WHOLE_REWARDS = tuple(f"{holder}/{whole}" for holder in ("reward", "rewards") for whole in ("total", "mean"))
_OF_A_WHOLE = frozenset({"total", "mean", "std", "min", "max", "median", "var", "count", "n"})
"""What else is said of a reward of several parts than these."""


def metric_quantities(names: Collection[str]) -> dict[str, str]:
    """Return logged name to its quantity, of the names that a trainer's table has; else what such a name is taken for.

    >>> metric_quantities(["train/loss", "mine", "rewards/format/mean"])
    {'train/loss': 'loss', 'rewards/format/mean': 'function_reward'}
    >>> metric_quantities(["rewards/mean", "rewards/format"])
    {'rewards/mean': 'reward', 'rewards/format': 'function_reward'}
    """
    metrics = {name: next((metric for _, metric in _owners(name)), None) or generic(name) for name in names}
    parts = dict.fromkeys(_parts_of_total(names), "function_reward")
    parts |= {name: quantity for name, (_, quantity) in _flattened(names).items()}
    return parts | {name: metric.quantity for name, metric in metrics.items() if metric is not None}


@cache
def _literal() -> dict[str, list[tuple[str, MetricName]]]:
    """Trainers and metrics of the names without a star."""
    spellings: dict[str, list[tuple[str, MetricName]]] = {}
    for trainer, table in TRAINERS.items():
        for metric in table:
            for head, star, _ in metric.spellings:
                spellings.setdefault(star or head, []).append((trainer, metric))
    return spellings


@cache
def _no_quantity() -> frozenset[str]:
    """Names that are those of a trainer and no quantity, which patterns with a star would take for one."""
    return frozenset().union(*_MARKS.values()) - _literal().keys()


@cache
def names_with_a_split() -> frozenset[str]:
    """Return names that begin with ``train/`` as trainers log them, and are no other trainer's without it.

    >>> {"train/kl_loss", "train/loss"} & names_with_a_split()
    {'train/kl_loss'}
    """

    def trainers(name: str) -> set[str]:
        return {trainer for trainer, _ in _owners(name)}

    begun = (name for name in _literal() if name.startswith("train/"))
    return frozenset(name for name in begun if trainers(name.removeprefix("train/")) <= trainers(name))


_FEWEST_WORDS = 3
"""Words of a name that say what it is in any order."""


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a name, in the order of letters and in the singular."""
    return tuple(sorted(word.removesuffix("s") for word in re.split(r"[/_ ]", name.lower()) if word))


@cache
def _of_words() -> dict[tuple[str, ...], list[tuple[str, MetricName]]]:
    """Trainers and metrics by the words of their names: releases in development had them in another order."""
    ordered_names: dict[tuple[str, ...], list[tuple[str, MetricName]]] = {}
    for name, owners in _literal().items():
        if len(words := _words(name)) >= _FEWEST_WORDS:
            ordered_names.setdefault(words, []).extend(owners)
    # Words that two quantities share say nothing.
    return {
        words: owners for words, owners in ordered_names.items() if len({metric.quantity for _, metric in owners}) == 1
    }


def is_named(name: str) -> bool:
    """Tell whether a trainer's table has a name."""
    return name in _literal() or any(metric.matches(name) for _, metric in _literal()["*"])


_OF_ALL_REWARDS = frozenset(f"rewards/{of}" for of in ("mean", "std", "min", "max"))
"""A loop's own of all rewards; no function is called so."""


@lru_cache(2**16)
def _owners(name: str) -> list[tuple[str, MetricName]]:
    """Trainers that log a name, each with its metric, or metrics of different releases."""
    if name in _no_quantity() or name in _OF_ALL_REWARDS:
        return []
    starred = [(trainer, metric) for trainer, metric in _literal()["*"] if metric.matches(name)]
    return _literal().get(name, []) + starred or _of_words().get(_words(name), [])


def _agreed(names: Collection[str]) -> dict[str, tuple[str, MetricName]]:
    """Quantities on which all trainers agree that log such a name."""
    places = {metric: place for place, metric in enumerate(metric for table in TRAINERS.values() for metric in table)}
    agreed: list[tuple[int, str, MetricName]] = []
    for name in names:
        metrics = [metric for _, metric in _owners(name)]
        if not metrics and (taken := generic(name)) is not None:
            agreed.append((len(places) + (not is_held_out(name)), name, taken))
        # An entropy loss of one trainer is the entropy, and minus the entropy in loops of one's own.
        is_told = not name.rpartition("/")[2].startswith("entropy_loss")
        stand_in = _STANDS_FOR if len({metric.quantity for metric in metrics}) > 1 else {}
        if (
            is_told
            and len(
                {(stand_in.get(metric.quantity, metric.quantity), metric.factor, metric.offset) for metric in metrics}
            )
            == 1
        ):
            metric, is_off = metrics[0], any(metric.zero_when_off for metric in metrics)
            quantity = stand_in.get(metric.quantity, metric.quantity)
            is_least = any(metric.lower_bound for metric in metrics)
            plain = MetricName(
                name,
                quantity,
                BY_NAME[quantity].definition,
                "",
                factor=metric.factor,
                offset=metric.offset,
                lower_bound=is_least,
                zero_when_off=is_off,
                before_update=all(metric.before_update for metric in metrics),
            )
            agreed.append((places[metric], name, plain))
    by_place = sorted(agreed, key=lambda each: each[:2], reverse=True)
    return _with_stand_ins({metric.quantity: (name, metric) for _, name, metric in by_place})
