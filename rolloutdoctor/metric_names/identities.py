"""Identities of trainers' own metrics: what holds between the numbers of one logged line, by the code that makes them.

They are linear but for `whole`, so that they hold as well for means over micro-batches, ranks or steps of metrics that
are averaged alike.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from rolloutdoctor.metric_names.name import ordered

_SIGNS = re.compile(r" (=|<=|within|whole)(?: |$)")
_TERM = re.compile(r"(\[)?(?:([+-]) )?(?:([\d.]+) \* )?(?:\{([^}]+)\} \* )?([^][\s]+)\]?")


@dataclass(frozen=True)
class Term:
    """Term of a side: a number times an option's value times a metric.

    Attributes:
        metric: its name, or a pattern with one star; empty: a constant.
        factor: the number.
        option: the option, or ``one/other``, their quotient; empty: none. ``name|1`` is 1 where it is null.
        optional: the metric is logged only where the term is not 0.
    """

    metric: str
    factor: float
    option: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Relation:
    """Two sides of an identity in a log, sums of terms.

    Attributes:
        sign: ``=``, ``<=``, ``within`` (a sum of which any part of each term may be missing) or ``whole`` (a number
            without a fraction; there is no right side).
        left: terms before the sign.
        right: terms after it.
    """

    sign: str
    left: tuple[Term, ...]
    right: tuple[Term, ...]

    @property
    def words(self) -> str:
        """Such as ``loss = pg_loss - entropy_coef * entropy``."""
        return " ".join(filter(None, (_words(self.left), self.sign, _words(self.right))))

    @property
    def terms(self) -> tuple[Term, ...]:
        """Both sides."""
        return (*self.left, *self.right)


@dataclass(frozen=True)
class Identity:
    """An identity between the metrics of a line.

    Attributes:
        text: sides between signs; a star stands for the same text in all names, after ``within`` for every text in
            turn; ``{option}`` for an option's value; brackets for a term that is 0 where its metric is not logged.
        source: upstream file and function that make it exact.
        since: first release in which it holds, where its names are older; empty: in all with these names.
        exact: it holds for every value of every option.
        each_step: it holds of one generated batch, and not of means over several steps.
        alone: it holds where the star stands for one text only.
        when: option to the value with which it holds, ``{option}`` for that of another one.
        without: start of names of metrics that show that it does not hold.
        cancels: sum of the sizes that numbers have which add up to the metrics and cancel, where those are not the
            metrics' own: rounding in float32 goes by them.
    """

    text: str
    source: str
    since: str = ""
    exact: bool = True
    each_step: bool = False
    alone: bool = False
    when: Mapping[str, object] = field(default_factory=dict)
    without: str = ""
    cancels: str = ""

    def holds_at(self, release: str | None) -> bool:
        """Tell whether it holds in a release; None: in every release with these names.

        >>> Identity("a = b", "", since="1.0").holds_at("0.29.1"), Identity("a = b", "").holds_at(None)
        (False, True)
        """
        return not self.since or (release is not None and ordered(self.since) <= ordered(release))

    def conditions(self) -> str:
        """Say when it holds, if not always.

        >>> Identity("a = b", "", since="1.0", each_step=True).conditions()
        'from 1.0; of lines of one step; '
        """
        conditions = [
            f"from {self.since}" if self.since else "",
            "" if self.exact else "but at the edge of float32",
            "of lines of one step" if self.each_step else "",
            "of one function" if self.alone else "",
            *(f"with {name} = {value}" for name, value in self.when.items()),
            f"without {self.without}*" if self.without else "",
        ]
        return "".join(f"{condition}; " for condition in conditions if condition)

    def relations_in(self, logged: Collection[str]) -> Iterator[Relation]:
        """Yield the relations between metrics that a log has.

        >>> [one.words for one in Identity("*/min <= */max", "").relations_in(["a/min", "a/max", "b/min"])]
        ['a/min <= a/max']
        """
        if self.without and any(name.startswith(self.without) for name in logged):
            return
        for relation in self._relations:
            if relation.sign == "within":
                (term,) = relation.right
                names = sorted(name for name in logged if _stem(term.metric, name) is not None)
                relation = replace(relation, right=tuple(replace(term, metric=name) for name in names))
                relations = [relation] if names else []
            else:
                stems = _stems(relation, logged)
                relations = [] if self.alone and len(stems) > 1 else [_bound(relation, stem, logged) for stem in stems]
            yield from (
                each for each in relations if all(not term.metric or term.metric in logged for term in each.terms)
            )

    @cached_property
    def _relations(self) -> tuple[Relation, ...]:
        """The relations of neighbouring sides, in patterns."""
        first, *rest = _SIGNS.split(self.text)
        sides = [(first, ""), *zip(rest[1::2], rest[::2], strict=True)]
        return tuple(Relation(sign, terms_of(left), terms_of(right)) for (left, _), (right, sign) in pairwise(sides))


def terms_of(side: str) -> tuple[Term, ...]:
    """Read the terms of a side."""
    terms = []
    for bracket, sign, factor, option, name in _TERM.findall(side):
        value = -float(factor or 1) if sign == "-" else float(factor or 1)
        constant = name.replace(".", "", 1).isdigit()
        terms.append(Term("", value * float(name)) if constant else Term(name, value, option, bool(bracket)))
    return tuple(terms)


def _words(terms: tuple[Term, ...]) -> str:
    words = []
    for term in terms:
        number = f"{abs(term.factor):g}" if abs(term.factor) != 1 or not term.metric else ""
        option = "/".join(name.rpartition(".")[2].partition("|")[0] for name in term.option.split("/"))
        words += ["-" if term.factor < 0 else "+", " * ".join(filter(None, (number, option, term.metric)))]
    return " ".join(words[words[:1] == ["+"] :])


def _stem(pattern: str, name: str) -> str | None:
    """Return what a star stands for in a name; None if the name is another."""
    head, star, tail = pattern.partition("*")
    fits = len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail)
    return name[len(head) : len(name) - len(tail)] if star and fits else None


def _stems(relation: Relation, logged: Collection[str]) -> list[str]:
    """What the star may stand for; one empty text where there is none."""
    starred = next((term.metric for term in relation.terms if "*" in term.metric), None)
    if starred is None:
        return [""]
    return sorted(stem for name in logged if (stem := _stem(starred, name)) is not None)


def _bound(relation: Relation, stem: str, logged: Collection[str]) -> Relation:
    """Put a text in place of the star, and drop terms that are 0."""

    def side(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        named = (replace(term, metric=term.metric.replace("*", stem)) for term in terms)
        return tuple(term for term in named if not term.optional or term.metric in logged)

    return Relation(relation.sign, side(relation.left), side(relation.right))


def _spreads(source: str, *names: str) -> tuple[Identity, ...]:
    """Smallest, mean and largest of one sample, for each of some names."""
    return tuple(Identity(f"{name}/min <= {name}/mean <= {name}/max", source) for name in names)


def _clips(source: str) -> tuple[Identity, ...]:
    """Shares of tokens below and above the clip range: an advantage has one sign."""
    return (
        Identity("clip_ratio/region_mean = clip_ratio/low_mean + clip_ratio/high_mean", source),
        Identity("clip_ratio/high_mean <= clip_ratio/high_max", source),
        Identity("0 <= clip_ratio/region_mean <= 1", source),
    )


_GRPO = "trl/trainer/grpo_trainer.py"
_OF_GENERATION, _GENERATE = f"{_GRPO}, _generate_and_score_completions", f"{_GRPO}, _generate"
_TRL_LOSS = f"{_GRPO}, _compute_loss"
_DATA = "verl/trainer/ppo/metric_utils.py, compute_data_metrics"
_OFF_POLICY = "verl/trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics"
_WEIGHTS = "verl/trainer/ppo/rollout_corr_helper.py, compute_is_metrics"
_PPO_LOSS = "verl/workers/utils/losses.py, ppo_loss"
_ACTOR = "actor_rollout_ref.actor"
_SWIFT = "swift/rlhf_trainers/grpo_trainer.py, _prepare_batch_inputs"
_SLIME_LOSS = "slime/backends/megatron_utils/loss.py, policy_loss_function"
_SLIME_SAMPLES = "slime/utils/metric_utils.py, compute_statistics"
_STATS = "src/prime_rl/trainer/utils.py, compute_stats; src/prime_rl/orchestrator/metrics.py, to_dict"
_SOLVED = "src/prime_rl/orchestrator/metrics.py, solve_rates"
_ROLLOUTS, _NEMO = "nemo_rl/experience/rollouts.py, run_multi_turn_rollout", "nemo_rl/algorithms/grpo.py, grpo_train"
_GENERATOR = "skyrl/train/generators/utils.py, get_rollout_metrics"
_FORWARD = "skyrl/train/trainer.py, fwd_logprobs_values_reward"

_ONE_BATCH = {"steps_per_generation": "{gradient_accumulation_steps}"}
"""A step takes one generated batch, and not several."""

# fmt: off
_LENGTHS: tuple[Identity, ...] = (
    Identity("completions/min_length <= completions/mean_length <= completions/max_length", _GENERATE),
    Identity("completions/min_terminated_length <= completions/mean_terminated_length"
        " <= completions/max_terminated_length <= completions/max_length", _GENERATE),
    Identity("0 <= completions/clipped_ratio <= 1", _GENERATE),
    Identity("0 <= frac_reward_zero_std <= 1", _OF_GENERATION),
)
"""What a trainer derived from TRL's takes from TRL."""

IDENTITIES: Mapping[str, tuple[Identity, ...]] = {
    "trl": (
        *_LENGTHS,
        Identity("{generation_batch_size} * completions/clipped_ratio whole", _GENERATE, each_step=True,
            when=_ONE_BATCH),
        Identity("{generation_batch_size/num_generations} * frac_reward_zero_std whole", _OF_GENERATION,
            each_step=True, when=_ONE_BATCH),
        # A row that a function returned None for is in the function's mean no more, but still in the sum's.
        Identity("reward within {reward_weights|1} * rewards/*/mean", _OF_GENERATION, "1.0", each_step=True,
            when=_ONE_BATCH, cancels="reward_std"),
        # From 1.6 on a row that no function scored is in neither.
        Identity("reward = {reward_weights|1} * rewards/*/mean", _OF_GENERATION, "1.6", alone=True,
            cancels="reward_std"),
        *_clips(_TRL_LOSS),
        Identity("sampling/importance_sampling_ratio/min <= sampling/importance_sampling_ratio/mean"
            " <= sampling/importance_sampling_ratio/max", _OF_GENERATION),
        Identity("sampling/sampling_logp_difference/mean <= sampling/sampling_logp_difference/max", _OF_GENERATION),
    ),
    "unsloth": (*_LENGTHS, *_clips("unsloth/models/rl_replacements.py, grpo_trainer_compute_loss")),
    "ms-swift": (
        *_clips("swift/rlhf_trainers/grpo_trainer.py, _compute_loss_and_metrics"),
        Identity("completions/min_length <= completions/mean_length <= completions/max_length", _SWIFT),
        Identity("0 <= completions/clipped_ratio <= 1", _SWIFT),
    ),
    "verl": (
        *_spreads(_DATA, "critic/score", "critic/rewards", "critic/advantages", "critic/returns", "critic/values",
            "response_length", "response_length_non_aborted", "prompt_length", "num_turns", "tool_call_counts"),
        Identity("response_length_non_aborted/max = response_length/max", _DATA),
        Identity("0 <= response_length/clip_ratio <= 1", _DATA),
        Identity("critic/score/mean = critic/rewards/mean", "verl/trainer/ppo/ray_trainer.py, fit",
            when={"algorithm.use_kl_in_reward": False}),
        Identity("0 <= actor/pg_clipfrac <= 1", "verl/trainer/ppo/core_algos.py, compute_policy_loss_vanilla"),
        Identity(f"actor/loss = actor/pg_loss [- {{{_ACTOR}.entropy_coeff}} * actor/entropy_loss]"
            f" [+ {{{_ACTOR}.kl_loss_coef}} * actor/kl_loss]", _PPO_LOSS, "0.8", without="actor/distillation/",
            when={f"{_ACTOR}.loss_agg_mode": "token-mean"}, cancels="1 + critic/advantages/max"),
        Identity("training/rollout_probs_diff_mean <= training/rollout_probs_diff_max",
            "verl/utils/debug/metrics.py, calculate_debug_metrics"),
        Identity("*rollout_corr/log_ppl_diff = *rollout_corr/training_log_ppl - *rollout_corr/rollout_log_ppl",
            _OFF_POLICY),
        Identity("*mismatch/mismatch_log_ppl_diff = *mismatch/mismatch_training_log_ppl"
            " - *mismatch/mismatch_rollout_log_ppl", "verl/trainer/ppo/mismatch_helper.py, compute_mismatch_metrics"),
        Identity("*log_ppl_diff_min <= *log_ppl_diff <= *log_ppl_diff_max", _OFF_POLICY),
        Identity("*log_ppl_diff <= *log_ppl_abs_diff", _OFF_POLICY),
        Identity("*rollout_is_seq_min <= *rollout_is_seq_mean <= *rollout_is_seq_max", _WEIGHTS),
        # Above 1 where the mean weight is of the size of the 1e-8 that it is divided by.
        Identity("*rollout_is_eff_sample_size <= 1", _WEIGHTS, exact=False),
    ),
    "slime": (
        *_spreads(_SLIME_SAMPLES, "rollout/response_len", "rollout/non_generation_time"),
        Identity("rollout/response_len/min <= rollout/response_len/median <= rollout/response_len/max", _SLIME_SAMPLES),
        Identity("0 <= rollout/truncated_ratio <= 1", "slime/ray/rollout.py, compute_metrics_from_samples"),
        Identity("train/loss = train/pg_loss - {entropy_coef} * train/entropy_loss"
            " [+ {kl_loss_coef} * train/kl_loss]", _SLIME_LOSS, cancels="1 + rollout/raw_reward"),
        Identity("0 <= train/pg_clipfrac <= 1", _SLIME_LOSS),
    ),
    "miles": _spreads("miles/utils/metric_utils.py, compute_statistics", "rollout/response_len"),
    "prime-rl": (
        Identity("*/min <= */mean <= */max", _STATS),
        Identity("*/min <= */median <= */max", _STATS),
        # Two equal halves of a population, or a sample of two (1/sqrt(2) of the range), are spread most.
        Identity("*/std <= 0.7072 * */max - 0.7072 * */min", _STATS),
        Identity("*/solved_none + */solved_all + */solved_some = 1", _SOLVED),
    ),
    "nemo-rl": (
        Identity("*advantages/min <= *advantages/mean <= *advantages/max", _NEMO),
        Identity("*mean_gen_tokens_per_sample <= *max_gen_tokens_per_sample", _ROLLOUTS),
        Identity("*avg_turns_per_sample <= *max_turns_per_sample", _ROLLOUTS),
    ),
    "skyrl": (
        Identity("generate/min_num_tokens <= generate/avg_num_tokens <= generate/max_num_tokens", _GENERATOR),
        Identity("generate/min_assistant_tokens <= generate/avg_assistant_tokens <= generate/max_assistant_tokens",
            _GENERATOR),
        Identity("policy/rollout_train_logprobs_abs_diff_min <= policy/rollout_train_logprobs_abs_diff_mean"
            " <= policy/rollout_train_logprobs_abs_diff_max", _FORWARD),
    ),
}
"""Trainer to its identities."""
# fmt: on
