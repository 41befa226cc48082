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
        "val/num_eos_tokens",
        "val/ratio_var",
        "eps",
        "episode",
    ),
}
"""Names of no quantity that distinguish trainers with the names of each other."""

_BOOKKEEPING = re.compile(
    r"epoch|(ppo|grpo)_(ep|epoch|iter)|eps|episode|(\w+/)?step|total_steps|percentage|(elapsed|remaining)_time.*|consumed_samples|global_batch_size"
    r"|total_flos|num_tokens|rollout/zero_std/count_.*|train_(runtime|samples_per_second|steps_per_second)"
)
"""Counters and clocks, which say nothing of the training by themselves."""


def is_bookkeeping(name: str) -> bool:
    """Tell a counter, a clock, or a name that only says which trainer logs.

    >>> is_bookkeeping("epoch"), is_bookkeeping("val/num_eos_tokens"), is_bookkeeping("train/accuracy")
    (True, True, False)
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

_OF_LOOPS = re.compile(r"(?:(?:train|rollout)/)?(?!kl_penalty|pg_loss|completion_length)[^/]+")
"""How they name them, but for NeMo-RL's penalty, slime's loss and the length of TRL's first releases."""

_OF_TRANSFORMERS = frozenset({"grad_norm", "learning_rate", "epoch"})


def find(trainer: str) -> tuple[MetricName, ...]:
    """Return the metrics of a trainer.

    Raises:
        UsageError: if its metrics are not known.
    """
    name = SAME.get(trainer, trainer)
    if name not in TRAINERS:
        known = [*TRAINERS, *SAME]
        raise UsageError(f"no metric names of {trainer!r} (known: {', '.join(known)}){nearest(trainer, known)}")
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
    known = {one: name for name in by_rank for _, one in _owners(name)}
    found: dict[str, tuple[str, MetricName]] = {}
    for one in table:
        if one in known and (release is None or one.logged_at(release)):
            found.setdefault(one.quantity, (known[one], one))
    # A loop of one's own may share some names with a trainer; beside any trainer one may print what is one's own.
    own = {known[one] for one in table if one in known}
    more = _agreed([name for name in names if name not in own])
    is_own = trainer is None or not found
    beside = {
        quantity: each
        for quantity, each in more.items()
        if quantity not in found and (is_own or quantity in _OF_ANY_TRAINER)
    }
    return _with_total(names, _with_stand_ins(found | beside))


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


def _with_total(names: Collection[str], found: dict[str, tuple[str, MetricName]]) -> dict[str, tuple[str, MetricName]]:
    """Add the reward that a function of this name gave, where no other name tells it.

    >>> understood(["loss", "rewards/json/mean", "rewards/reward/mean"])["reward"][0]
    'rewards/reward/mean'
    >>> understood(["loss", "reward", "rewards/reward/mean"])["reward"][0]
    'reward'
    >>> understood(["proxy", "gold", "kl"])["reward"][0], understood(["proxy", "kl"]).get("reward")
    ('proxy', None)
    """
    known = (*_TOTALS, _PROXY) if "gold_reward" in found else _TOTALS
    total = next((name for name in known if name in names), "")
    if "reward" in found or not total:
        return found
    return {"reward": (total, MetricName(total, "reward", BY_NAME["reward"].definition, ""))} | found


def taken_names(names: Collection[str]) -> dict[str, str]:
    """Return the names that are taken for a quantity, by its title, alone or by what stands beside them.

    >>> taken_names(["proxy", "gold"]), taken_names(["proxy"])
    ({'gold': 'gold reward', 'proxy': 'reward'}, {})
    """
    total = understood(names).get("reward", ("", None))[0]
    beside = {total: BY_NAME["reward"].title} if total in (*_TOTALS, _PROXY) else {}
    return taken_for(names) | beside


_STANDS_FOR = {"penalised_reward": "reward"}
"""Quantity to another for which it is taken where that is not logged."""


def _with_stand_ins(found: dict[str, tuple[str, MetricName]]) -> dict[str, tuple[str, MetricName]]:
    return {other: found[one] for one, other in _STANDS_FOR.items() if one in found} | found


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
        known = [one for one in find(trainer) if one.matches(name)]
        if known:
            since = max(since, min((one.since for one in known), key=ordered), key=ordered)
            ends = [one.until for one in known]
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
    """
    return {*names} >= _OF_TRANSFORMERS or any(
        name in _no_quantity() or (is_named(name) and _owners(name) and not _is_of_any_loop(name)) for name in names
    )


def _is_of_any_loop(name: str) -> bool:
    known = generic(name) if _OF_LOOPS.fullmatch(name) else None
    return known is not None and known.quantity in _OF_ANY_LOOP


def whose(names: Collection[str]) -> str | None:
    """Return the trainer a release of which has more of these names than any other trainer; None in a tie.

    >>> whose(["critic/score/mean", "response_length/mean", "response_length/clip_ratio"])
    'verl'
    """
    found = writers(names)
    return found[0] if len(found) == 1 else None


def writers(names: Collection[str]) -> tuple[str, ...]:
    """Return the trainers that most likely logged these names: several in a tie, none where any loop has them.

    >>> writers(["reward", "kl", "completions/mean_length", "clip_ratio/low_mean"])
    ('trl', 'ms-swift')
    """
    return namesakes(names) if tell_a_trainer(names) else ()


def namesakes(names: Collection[str]) -> tuple[str, ...]:
    """Return the trainers a release of which has most of these names: several in a tie, none where a name is too few.

    >>> namesakes(["train/loss", "train/lr"]), writers(["train/loss", "train/lr"])
    (('nemo-rl',), ())
    """
    known: dict[str, list[tuple[str, MetricName]]] = {}
    for name in names:
        for trainer, one in _owners(name):
            known.setdefault(trainer, []).append((name, one))
    counts = {
        trainer: max(
            len({name for name, one in here if one.logged_at(release)}) for release in {one.since for _, one in here}
        )
        + (len({*_MARKS.get(trainer, ())} & {*names}) if any(one.quantity == "reward" for _, one in here) else 0)
        for trainer, here in known.items()
        if (mark := DIALECTS.get(trainer)) is None or mark[0] not in names or mark[1] in names
    }
    best = max(counts.values(), default=0)
    return tuple(one for one in TRAINERS if counts.get(one) == best) if best >= _FEWEST_NAMES else ()


def functions(names: Collection[str]) -> dict[str, tuple[str, str | None]]:
    """Return the reward functions of a log, each with the metrics of its mean and of its standard deviation.

    >>> functions(["rewards/format/mean", "rewards/format/std", "reward"])
    {'format': ('rewards/format/mean', 'rewards/format/std')}
    """
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        for _, one in _owners(name)[:1]:
            head, star, tail = one.spellings[0]
            if star and one.quantity.startswith("function_"):
                found.setdefault(name[len(head) : len(name) - len(tail)], {})[one.quantity] = name
    return {
        function: (own["function_reward"], own.get("function_reward_std"))
        for function, own in found.items()
        if "function_reward" in own
    }


def metric_quantities(names: Collection[str]) -> dict[str, str]:
    """Return logged name to its quantity, of the names that a trainer's table has; else what such a name is taken for.

    >>> metric_quantities(["train/loss", "mine", "rewards/format/mean"])
    {'train/loss': 'loss', 'rewards/format/mean': 'function_reward'}
    >>> metric_quantities(["rewards/mean", "rewards/format"])
    {'rewards/mean': 'reward', 'rewards/format': 'function_reward'}
    """
    metrics = {name: next((one for _, one in _owners(name)), None) or generic(name) for name in names}
    return {name: metric.quantity for name, metric in metrics.items() if metric is not None}


@cache
def _literal() -> dict[str, list[tuple[str, MetricName]]]:
    """Trainers and metrics of the names without a star."""
    found: dict[str, list[tuple[str, MetricName]]] = {}
    for trainer, table in TRAINERS.items():
        for one in table:
            for head, star, _ in one.spellings:
                found.setdefault(star or head, []).append((trainer, one))
    return found


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
    return {words: owners for words, owners in ordered_names.items() if len({one.quantity for _, one in owners}) == 1}


def is_named(name: str) -> bool:
    """Tell whether a trainer's table has a name."""
    return name in _literal() or any(one.matches(name) for _, one in _literal()["*"])


_OF_ALL_REWARDS = frozenset(f"rewards/{of}" for of in ("mean", "std", "min", "max"))
"""A loop's own of all rewards; no function is called so."""


@lru_cache(2**16)
def _owners(name: str) -> list[tuple[str, MetricName]]:
    """Trainers that log a name, each with its metric, or metrics of different releases."""
    if name in _no_quantity() or name in _OF_ALL_REWARDS:
        return []
    starred = [(trainer, one) for trainer, one in _literal()["*"] if one.matches(name)]
    return _literal().get(name, []) + starred or _of_words().get(_words(name), [])


def _agreed(names: Collection[str]) -> dict[str, tuple[str, MetricName]]:
    """Quantities on which all trainers agree that log such a name."""
    places = {one: place for place, one in enumerate(one for table in TRAINERS.values() for one in table)}
    found: list[tuple[int, str, MetricName]] = []
    for name in names:
        metrics = [one for _, one in _owners(name)]
        if not metrics and (taken := generic(name)) is not None:
            found.append((len(places) + (not is_held_out(name)), name, taken))
        # An entropy loss of one trainer is the entropy, and minus the entropy in loops of one's own.
        is_told = not name.rpartition("/")[2].startswith("entropy_loss")
        stand_in = _STANDS_FOR if len({one.quantity for one in metrics}) > 1 else {}
        if (
            is_told
            and len({(stand_in.get(one.quantity, one.quantity), one.factor, one.offset) for one in metrics}) == 1
        ):
            one, is_off = metrics[0], any(one.zero_when_off for one in metrics)
            quantity = stand_in.get(one.quantity, one.quantity)
            is_least = any(one.lower_bound for one in metrics)
            plain = MetricName(
                name,
                quantity,
                BY_NAME[quantity].definition,
                "",
                factor=one.factor,
                offset=one.offset,
                lower_bound=is_least,
                zero_when_off=is_off,
                before_update=all(one.before_update for one in metrics),
            )
            found.append((places[one], name, plain))
    by_place = sorted(found, key=lambda each: each[:2], reverse=True)
    return _with_stand_ins({one.quantity: (name, one) for _, name, one in by_place})
