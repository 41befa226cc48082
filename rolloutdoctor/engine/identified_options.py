"""Options that a run does not state and its logged advantages show."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from rolloutdoctor.engine.configure import FROM_NAMES, layers_of
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.table import SAME, releases_of
from rolloutdoctor.metric_names.table import TRAINERS as NAMES
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.findings import Setting
from rolloutdoctor.search.candidates import Candidate, Known, essence, of_trainer
from rolloutdoctor.search.identify_steps import StepReader
from rolloutdoctor.search.step import Step
from rolloutdoctor.search.trials import try_on
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS

Options = TypeVar("Options", bound=ReadOptions)

ORIGIN = "identified from the logged advantages"

FEWEST_VALUES = 16
"""Logged advantages other than 0 that have to agree, with two different values at least."""


def with_identified(run: Run, options: Options) -> Options:
    """Add options that nothing states: those of the advantages, where they are too much to assume, and those in traces.

    A metric that is logged under one value of an option shows that value. The advantages of some steps are compared
    with every setting of the trainer that contradicts no stated option. One way to compute them has to be left; where
    several are, nothing is added.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    name = (options.trainer or "").partition("@")[0] or run.metadata.trainer or ""
    trainer = TRAINERS.get(name)
    if trainer is None:
        return options
    _date(run, options, trainer)
    options = _with_traced(run, options, trainer)
    if not trainer.roles.must_state or run.metrics_only:
        return options
    layers, version = _stated(run, options, trainer)
    settings = resolve(trainer.options, version, layers, trainer=name).settings
    logged = {"advantage", "advantages"} & run.columns
    if not logged or not any(settings[must].assumed for must in trainer.roles.must_state):
        return options
    with evaluation_mode():
        found = _identified(run, options, trainer, version, layers, settings)
    if found is None:
        return options
    added = {key: value for key, value in found.options.items() if not settings[key].is_stated}
    return replace(options, layers=(*options.layers, Layer(ORIGIN, added)))


def _date(run: Run, options: Options, trainer: Trainer) -> None:
    """Give a run whose release nothing states the newest one that logs metrics of such names, if that is an old one."""
    metadata, named = run.metadata, (options.trainer or "").partition("@")
    if named[2] or metadata.trainer_version or metadata.trainer not in (None, trainer.name):
        return
    # Whether the names of a trainer's metrics are known.
    found = releases_of(run.metrics.names(), trainer.name) if trainer.name in (*NAMES, *SAME) else None
    if found is None or not found[1]:
        return
    major, minor = parse_version(found[1])[:2]
    if minor == 0:
        return
    run.metadata = replace(
        metadata,
        trainer=trainer.name,
        trainer_version=f"{major}.{minor - 1}",
        origins={**metadata.origins, "trainer_version": f"{FROM_NAMES}, which are gone since {found[1]}"},
    )


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
    settings = resolve(trainer.options, version, layers, trainer=trainer.name).settings
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
    return [*options.layers, *(layers_of(run.metadata) if same else [])], parse_version(written or trainer.newest)


def _identified(
    run: Run,
    options: ReadOptions,
    trainer: Trainer,
    version: tuple[int, ...],
    layers: Sequence[Layer],
    settings: Mapping[str, Setting],
) -> Candidate | None:
    """The one way to compute advantages that the first telling steps leave; None if there is none, or several."""
    choices = [choice for choice in trainer.choices.advantage if not _contradicts(choice, settings)]
    candidates = list(of_trainer(trainer, version, choices, layers))
    if not candidates:
        return None
    steps = StepReader(
        run, options, run.metrics, trainer, find_dtype(options.dtype), advantages_alone=True
    ).trial_steps()
    fitting = try_on(steps, candidates, Step.advantages).fitting
    if len({_kind(one) for one in fitting}) != 1 or not _is_telling(steps, fitting[0]):
        return None
    values = {name: one.value for name, one in settings.items()}
    return min(fitting, key=Known(((trainer, version),), settings=values).rank)


def _contradicts(choice: Mapping[str, object], settings: Mapping[str, Setting]) -> bool:
    stated = {name: one.value for name, one in settings.items() if one.is_stated}
    return any(name in stated and stated[name] != value for name, value in choice.items())


def _kind(one: Candidate) -> tuple[object, ...]:
    """Return the options that decide the advantages, less those of single rows and of groups such as 7 and 007."""
    rule = replace(one.objective.advantage, singleton="raw", numeric_ids="never")
    return essence(replace(one.objective, advantage=rule))


def _is_telling(steps: Sequence[Step], one: Candidate) -> bool:
    """True if enough values other than 0 agree: a step of equal rewards fits whatever was computed."""
    found = [step.advantages(one) for step in steps]
    values = torch.cat([each.values[each.values.abs() > each.radii] for each in found if each is not None])
    return len(values) >= FEWEST_VALUES and len(set(values.float().tolist())) > 1
