"""Options that decide a stage of a run: another value of theirs changes what the trainer computes in it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.stages import DECIDED_BY, STAGES
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import Trainer


@dataclass(frozen=True)
class Deciding:
    """The options that decide a stage under a configuration.

    Attributes:
        assumed: those that nothing states.
        stated: those that the run or the user states.
    """

    assumed: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()

    def __or__(self, other: "Deciding") -> "Deciding":
        """Return the options of both."""
        both = ((*mine, *theirs) for mine, theirs in ((self.assumed, other.assumed), (self.stated, other.stated)))
        return Deciding(*(tuple(dict.fromkeys(names)) for names in both))


def deciding_options(trainer: Trainer, config: Config) -> Mapping[str, Deciding]:
    """Return stage to the options that decide it, beyond the stages before it.

    No table says which option belongs where: the objective is built anew with another value of one option, and the
    parts that change are what it decides. An option that only decides together with others counts under the values
    that these have.
    """
    base = _parts(trainer, config)
    decided: dict[str, dict[bool, list[str]]] = {stage: {True: [], False: []} for stage in STAGES}
    for option in trainer.options:
        setting = config.settings[option.name]
        if not (option.decides and option.exists_at(config.version)) or option.is_idle(config.settings):
            continue
        changed = set[str]()
        for value in _others(option, setting.value):
            parts = _parts(trainer, _with_value(config, option, value))
            changed |= {stage for stage in parts if parts[stage] != base.get(stage)}
        for stage in changed:
            # What the log itself showed is neither.
            if setting.assumed or (setting.is_stated and not setting.origin.startswith("identified")):
                decided[stage][setting.assumed].append(option.name)
    return {stage: Deciding(tuple(names[True]), tuple(names[False])) for stage, names in decided.items()}


def alternatives(trainer: Trainer, config: Config, names: Iterable[str]) -> Iterator[Objective]:
    """Yield the objectives that other values of some options make, one option at a time."""
    for option in trainer.options:
        for value in _others(option, config.settings[option.name].value) if option.name in names else ():
            try:
                yield trainer.objective_of(_with_value(config, option, value))
            except (UsageError, CannotComputeError, AssertionError):
                continue


def _with_value(config: Config, option: Option, value: object) -> Config:
    setting = replace(config.settings[option.name], value=value)
    return replace(config, settings={**config.settings, option.name: setting})


def _parts(trainer: Trainer, config: Config) -> dict[str, object]:
    """Stage to what decides it; nothing where the configuration is refused."""
    try:
        objective = trainer.objective_of(config)
    except (UsageError, CannotComputeError, AssertionError):
        return {}
    return {stage: part(objective) for stage, part in DECIDED_BY.items()}


def _others(option: Option, value: object) -> Iterator[object]:
    """Yield other values of an option, enough that one of them changes what it decides."""
    if option.kind == "flag":
        values: tuple[object, ...] = (True, False)
    elif option.kind in ("number", "integer"):
        is_integer = option.kind == "integer"
        numbers = (1, 2, 8) if is_integer else (0.0, 0.5, 1.0, 2.0)
        values = tuple(x for x in numbers if _inside(option, x))
    else:
        values = option.choices if option.computed is None else option.computed
    for other in (*values, *((None,) if option.optional else ())):
        if other != value or type(other) is not type(value):
            yield other


def _inside(option: Option, value: float) -> bool:
    return (option.low is None or value >= option.low) and (option.high is None or value <= option.high)
