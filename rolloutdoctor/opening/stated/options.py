"""What a file beside the numbers states of a run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rolloutdoctor.opening.stated.settings import titled
from rolloutdoctor.trainers.table import TRAINERS

VERL_TABLE = "actor_rollout_ref"
"""The table of options that every configuration of verl has."""


@dataclass(frozen=True)
class Stated:
    """Options from one place beside the numbers.

    Attributes:
        origin: words for the place.
        trainer: whose they are; None for settings of the run that tell no trainer.
        values: option name to value; names that the trainer does not have are of no consequence.
        version: release of the trainer; None if the place does not say.
        version_origin: words for where that was read.
        remark: what the user should know of how it was read; empty: nothing.
    """

    origin: str
    trainer: str | None
    values: Mapping[str, object]
    version: str | None = None
    version_origin: str = ""
    remark: str = ""


@dataclass(frozen=True)
class ReadLog:
    """What the numbers of a run say of the options beside them.

    Attributes:
        likely: trainers that have names of the log, the likeliest first.
        names: of its metrics.
        begins: where in its text the run begins (`LogNotes.begins`); None: it is no text.
        is_alone: whether the text holds no other run.
    """

    likely: Sequence[str] = ()
    names: Collection[str] = ()
    begins: tuple[int, int] | None = None
    is_alone: bool = False


FEWEST = 3
"""Options of the trainer whose log it is, or settings of a run: one or two any program has."""


def stated_of(
    origin: str, values: Mapping[str, object], likely: Sequence[str] = (), remark: str = "", *, fewest: int = FEWEST
) -> Stated | None:
    """Return options from one place with their trainer; where they tell none, what is a setting of any run.

    Args:
        origin: words for the place.
        values: option name to value.
        likely: trainers whose names the log has, the likeliest first.
        remark: what the user should know of how it was read.
        fewest: settings of a run that are enough where they tell no trainer.
    """
    trainer = trainer_of(values, likely)
    options = values if trainer is not None else titled(values)
    return Stated(origin, trainer, options, remark=remark) if trainer is not None or len(options) >= fewest else None


def trainer_of(names: Mapping[str, object], likely: Sequence[str] = ()) -> str | None:
    """Return the trainer whose options these are; None if that is not certain.

    >>> trainer_of({"num_generations": 8, "beta": 0.0, "scale_rewards": "group"})
    'trl'
    >>> trainer_of({"num_generations": 8, "beta": 0.0, "temperature": 0.7}, ["trl"])
    'trl'

    Args:
        names: option name to value.
        likely: trainers whose names the log has, the likeliest first: few options tell them.
    """
    if names.keys() >= _OF_UNSLOTH:
        return "unsloth"
    if is_other(*names):
        return None
    if any(name.startswith(f"{VERL_TABLE}.") for name in names):
        return "verl"
    for trainer, own_names in _OWN.items():
        if own_names <= names.keys():
            return trainer
    trainers = (name for name in likely if name in TRAINERS)
    return next((name for name in trainers if _common(name, names) >= FEWEST), None)


def _common(trainer: str, names: Mapping[str, object]) -> int:
    """The number of options of a trainer with these names."""
    return sum(option.name in names for option in TRAINERS[trainer].options)


def is_other(*names: str) -> bool:
    """Tell by names a program that has another one's options and computes something of its own."""
    return any(mark in name.lower() for name in names for mark in _OTHERS)


_OF_UNSLOTH = {"num_generations", "beta", "unsloth_num_chunks"}

_OTHERS = ("unsloth", "swift", "miles", "dynamic_sample", "data_producer")

_OWN = {
    "trl": {"num_generations", "beta", "scale_rewards"},
    "trl-rloo": {"num_generations", "beta", "normalize_advantages"},
    "nemo-rl": {"grpo.num_generations_per_prompt", "loss_fn.ratio_clip_min"},
    "prime-rl": {"trainer.loss.adv_tau", "trainer.loss.kl_tau"},
    "skyrl": {"trainer.algorithm.advantage_estimator", "generator.n_samples_per_prompt"},
    "areal": {"actor.eps_clip", "gconfig.n_samples"},
    "openrlhf": {"algo.advantage.estimator", "rollout.n_samples_per_prompt"},
    "open-instruct": {"num_samples_per_prompt_rollout", "beta", "response_length"},
    # But for the last one OpenRLHF's were called so before 0.11.
    "slime": {"rollout_batch_size", "n_samples_per_prompt", "advantage_estimator", "eps_clip", "kl_loss_type"},
}
"""Options that only this trainer's configuration has together."""
