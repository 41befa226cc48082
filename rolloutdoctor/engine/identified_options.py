"""Options that a run does not state and its logged advantages show."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from rolloutdoctor.engine.configure import FROM_NAMES, FROM_OPTIONS, layers_of
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.name import ordered
from rolloutdoctor.metric_names.table import releases_of
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import is_version, parse_version
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS

Options = TypeVar("Options", bound=ReadOptions)

ORIGIN = "identified from the logged advantages"


def with_identified(run: Run, options: Options) -> tuple[Run, Options]:
    """Add options that nothing states: those of the advantages, where they are too much to assume, and those in traces.

    The run comes back with the release that the names of its metrics date it to, where it states none. A metric that is
    logged under one value of an option shows that value. The advantages of some steps are compared with every setting
    of the trainer that contradicts no stated option. One way to compute them has to be left; where several are, nothing
    is added.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    if run.metadata.trainer_version and not is_version(run.metadata.trainer_version):
        # The name of a branch dates nothing.
        run = run.with_metadata(replace(run.metadata, trainer_version=""))
    name = (options.trainer or "").partition("@")[0] or run.metadata.trainer or ""
    trainer = TRAINERS.get(name)
    if trainer is None:
        return run, options
    run = _dated(run, options, trainer)
    options = _with_traced(run, options, trainer)
    if not trainer.roles.must_state or run.metrics_only:
        return run, options
    layers, version = _stated(run, options, trainer)
    settings = resolve(trainer.options, version, layers, trainer=name, lenient=True).settings
    logged = {"advantage", "advantages"} & run.columns
    if not logged or not any(settings[must].assumed for must in trainer.roles.must_state):
        return run, options
    from rolloutdoctor.engine.identified_advantages import identified

    identification = identified(run, options, trainer, version, layers, settings)
    if identification is None:
        return run, options
    added = {key: value for key, value in identification.options.items() if not settings[key].is_stated}
    return run, replace(options, layers=(*options.layers, Layer(ORIGIN, added)))


def _dated(run: Run, options: Options, trainer: Trainer) -> Run:
    """Return the run with the newest release that has such options and metrics, if it states none and that is old."""
    metadata, named = run.metadata, (options.trainer or "").partition("@")
    if named[2] or metadata.trainer_version or metadata.trainer not in (None, trainer.name):
        return run
    stated = {**metadata.config, **{name: value for layer in options.layers for name, value in layer.values.items()}}
    guess = _by_options(stated, trainer) or _by_names(run.metrics.names(), trainer)
    guess = _with_all(stated, trainer, guess)
    if guess is None:
        return run
    version, origin = guess
    origins = {**metadata.origins, "trainer_version": origin}
    return run.with_metadata(replace(metadata, trainer=trainer.name, trainer_version=version, origins=origins))


def _by_options(stated: Collection[str], trainer: Trainer) -> tuple[str, str] | None:
    """Newest release whose whole configuration lacks the options that these lack, with words for why."""
    release = None
    for option, before in trainer.roles.came_after.items() if trainer.roles.always_listed <= set(stated) else ():
        if option in stated:
            break
        release = before, f"{FROM_OPTIONS}, which has no {option}"
    return release


def _with_all(stated: Mapping[str, object], trainer: Trainer, guess: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return a release that has all stated options, with words for why: a guess gives way to what is stated."""
    version = parse_version(trainer.newest if guess is None else guess[0])
    later = ended = ""
    for option in trainer.options:
        value = stated.get(option.name)
        if value is None or value == option.default_at(version):
            continue
        came = max(
            option.since, option.values_since.get(value, "") if isinstance(value, str | bool) else "", key=ordered
        )
        if came and parse_version(came) > version:
            later = max(later, came, key=ordered)
        if option.until and parse_version(option.until) <= version:
            ended = min(filter(None, (ended, option.until)), key=ordered)
    if later:
        before = ".".join(map(str, version))
        return later, f"{FROM_OPTIONS}; {before} to {later} have it"
    major, minor = parse_version(ended)[:2] if ended else (0, 0)
    return (f"{major}.{minor - 1}", f"{FROM_OPTIONS}, which is gone since {ended}") if minor else guess


def _by_names(names: Collection[str], trainer: Trainer) -> tuple[str, str] | None:
    """Newest release that logs metrics of these names, with words for why."""
    release = releases_of(names, trainer.name)
    major, minor = parse_version(release[1])[:2] if release is not None and release[1] else (0, 0)
    if release is None or minor == 0:
        return None
    return f"{major}.{minor - 1}", f"{FROM_NAMES}, which are gone since {release[1]}"


def _with_traced(run: Run, options: Options, trainer: Trainer) -> Options:
    """Add the options of which a logged metric shows the value."""
    names = run.metrics.names()
    layers, version = _stated(run, options, trainer)
    traces = [
        trace
        for trace in trainer.log.traces
        if trace.value is not None and trace.metric in names and trace.tells_at(version)
    ]
    if not traces:
        return options
    settings = resolve(trainer.options, version, layers, trainer=trainer.name, lenient=True).settings
    # What is stated goes over it, and is refuted.
    added = [
        Layer(f"identified from the logged {trace.metric}", {trace.option: trace.value})
        for trace in traces
        if not settings[trace.option].is_stated
    ]
    return replace(options, layers=(*options.layers, *added)) if added else options


def _stated(run: Run, options: ReadOptions, trainer: Trainer) -> tuple[list[Layer], tuple[int, ...]]:
    same = not options.trainer or options.trainer.partition("@")[0] == run.metadata.trainer
    written = (options.trainer or "").partition("@")[2] or (run.metadata.trainer_version if same else None)
    numbers = trainer.release(written).numbers if written else parse_version(trainer.newest)
    return [*options.layers, *(layers_of(run.metadata) if same else [])], numbers
