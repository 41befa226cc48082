"""One way to compute advantages that some steps of a run leave, of all that its trainer has."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.stages import essence
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.findings import Setting
from rolloutdoctor.search.candidates import Candidate, Known, of_trainer
from rolloutdoctor.search.identify_steps import StepReader
from rolloutdoctor.search.step import Step
from rolloutdoctor.search.trials import try_on
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.spec import Trainer

FEWEST_VALUES = 16
"""Logged advantages other than 0 that have to agree, with two different values at least."""


def identified(
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
    reader = StepReader(run, options, run.metrics, trainer, find_dtype(options.dtype), advantages_alone=True)
    with evaluation_mode():
        steps = reader.trial_steps()
        fitting = try_on(steps, candidates, Step.advantages).fitting
        if len({_kind(candidate) for candidate in fitting}) != 1 or not _is_telling(steps, fitting[0]):
            return None
    values = {name: setting.value for name, setting in settings.items()}
    return min(fitting, key=Known(((trainer, version),), settings=values).rank)


def _contradicts(choice: Mapping[str, object], settings: Mapping[str, Setting]) -> bool:
    stated = {name: setting.value for name, setting in settings.items() if setting.is_stated}
    return any(name in stated and stated[name] != value for name, value in choice.items())


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """Return the options that decide the advantages, less those of single rows and of groups such as 7 and 007."""
    rule = replace(candidate.objective.advantage, singleton="raw", numeric_ids="never")
    return essence(replace(candidate.objective, advantage=rule))


def _is_telling(steps: Sequence[Step], candidate: Candidate) -> bool:
    """True if enough values other than 0 agree: a step of equal rewards fits whatever was computed."""
    advantages = [step.advantages(candidate) for step in steps]
    values = torch.cat([each.values[each.values.abs() > each.radii] for each in advantages if each is not None])
    return len(values) >= FEWEST_VALUES and len(set(values.float().tolist())) > 1
