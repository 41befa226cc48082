"""What a GPU must give: the CPU's numbers. Shared by the tests on a GPU and those on a simulated one."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from rolloutdoctor.commands.check import check
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_all
from rolloutdoctor.evaluation.token_sums import TokenSums
from rolloutdoctor.hypotheses.fixes import FIXES, ChosenFix
from rolloutdoctor.io.run import Run, StepRange, open_run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.findings import Report
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import TRAINERS

SAMPLE_FILES = Path(__file__).parent.parent / "sample_data"
SAMPLES = ("run", "verl_rejected", "slime_ppo", "healthy")
DTYPES = ("float32", "float64")
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
"""Of a value per token, relative to the largest one of the step."""

RELATIVE, ABSOLUTE = 1e-4, 1e-7
"""Of a number that a user sees."""

TOKEN_VALUES = ("advantage_T", "kl_T", "ratio_T", "loss_T", "grad_T")
ROW_VALUES = tuple(each.name for each in dataclasses.fields(TokenSums) if each.name != "layout")


def sample(name: str) -> Run:
    """One of the runs that come with the source."""
    return open_run([SAMPLE_FILES / f"{name}.parquet"])


def objective_of(name: str, options: Mapping[str, object]) -> Objective:
    """What the newest version of a trainer computes."""
    trainer = TRAINERS[name]
    config = resolve(trainer.options, parse_version(trainer.newest), [Layer("test", options)], trainer=name)
    return trainer.objective(config)


def with_every_fix(objective: Objective) -> dict[str, Objective]:
    """An objective, and the same with each fix that applies to it."""
    chosen = [ChosenFix(fix, variant) for fix in FIXES.values() for variant in fix.variants]
    return {"": objective} | {one.label: one.apply(objective) for one in chosen if one.applies_to(objective)}


def plain_objective(name: str) -> Objective:
    """A trainer's own defaults, with a KL term."""
    options = {"verl": {"adv_estimator": "grpo", "use_kl_loss": True}, "trl": {"beta": 0.1}}
    return objective_of(name, options.get(name, {}))


def checks_agree(name: str, dtype: str, device: str, steps: StepRange | None = None) -> Report:
    """Check a sample on both: the same findings, and the same measures within the tolerance; the device's report."""
    run = sample(name)
    here, there = (check(run, CheckOptions(device=each, dtype=dtype, steps=steps)) for each in ("cpu", device))
    assert there.device == device
    found = [[(one.code, one.severity, one.verdict) for one in each.findings] for each in (here, there)]
    assert found[0] == found[1]
    for one, other in zip(here.findings, there.findings, strict=True):
        agree(one.measures, other.measures, one.code)
    return there


def trainer_agrees(name: str, dtype: torch.dtype, device: str, sizes: Sequence[int], longest: int) -> None:
    """Evaluate a random step on both, with a trainer's defaults and with each fix."""
    batch = random_batch(0, sizes=sizes, longest=longest, dtype=dtype)
    for objective in with_every_fix(plain_objective(name)).values():
        tokens_agree(batch, objective, dtype, device)


def evaluations_agree(
    batch: RolloutBatch, objectives: Mapping[str, Objective], dtype: torch.dtype, device: str
) -> tuple[Evaluation, Evaluation]:
    """Evaluate a step on both, all objectives together, the first with the values of the tokens; returns its two."""
    first = next(iter(objectives))
    here, there = (evaluate_all(each, objectives, dtype=dtype, per_token={first}) for each in (batch, batch.to(device)))
    for label in objectives:
        rows_agree(here[label], there[label], dtype, label)
    tokens_compared(here[first], there[first], dtype)
    return here[first], there[first]


def tokens_agree(batch: RolloutBatch, objective: Objective, dtype: torch.dtype, device: str) -> None:
    """Evaluate a step on both, with the values of the tokens."""
    here, there = (evaluate(each, objective, dtype=dtype, per_token=True) for each in (batch, batch.to(device)))
    tokens_compared(here, there, dtype)


def tokens_compared(here: Evaluation, there: Evaluation, dtype: torch.dtype) -> None:
    """Compare the values of the tokens."""
    for field in TOKEN_VALUES:
        values_agree(getattr(here.per_token, field), getattr(there.per_token, field), dtype, field)


def rows_agree(here: Evaluation, there: Evaluation, dtype: torch.dtype, label: str) -> None:
    """Compare the values per row, and the losses."""
    assert here.tokens is not None
    assert there.tokens is not None
    for field in ROW_VALUES:
        values_agree(getattr(here.tokens, field), getattr(there.tokens, field), dtype, f"{label} {field}")
    for name in ("loss", "grad_l1", "grad_l2"):
        one, other = getattr(here, name), getattr(there, name)
        assert math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE), (label, name)


def values_agree(wanted: torch.Tensor | None, found: torch.Tensor | None, dtype: torch.dtype, what: str) -> None:
    """Compare tensors; `found` is on the device."""
    assert (wanted is None) == (found is None), what
    if wanted is None or found is None:
        return
    assert found.device.type == "cuda", what
    found = found.cpu()
    assert wanted.dtype == found.dtype, what
    assert torch.equal(wanted.isnan(), found.isnan()), what
    wanted, found = wanted.double().nan_to_num(0.0), found.double().nan_to_num(0.0)
    scale = float(wanted.abs().max().clamp(min=1e-30)) if wanted.numel() else 1.0
    assert float((found - wanted).abs().sum() and (found - wanted).abs().max()) <= TOLERANCE[dtype] * scale, what


def agree(one: object, other: object, path: str = "") -> None:
    """Compare results of any shape, number by number; only the name of the device may differ."""
    if path.endswith(".device"):
        return
    if isinstance(one, bool | str | int | None) and not isinstance(other, float):
        assert one == other, f"{path}: {one} != {other}"
    elif isinstance(one, int | float):
        assert isinstance(other, int | float), path
        same = (one != one and other != other) or math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        assert same, f"{path}: {one} != {other}"
    elif isinstance(one, torch.Tensor | np.ndarray):
        agree(one.tolist(), other.tolist(), path)
    elif isinstance(one, Mapping):
        assert isinstance(other, Mapping)
        assert list(one) == list(other), path
        for name, value in one.items():
            agree(value, other[name], f"{path}[{name!r}]")
    elif isinstance(one, Sequence | set | frozenset):
        assert isinstance(other, type(one))
        assert len(one) == len(other), path
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            agree(mine, theirs, f"{path}[{number}]")
    else:
        assert type(one) is type(other), path
        names = [each.name for each in dataclasses.fields(one)] if dataclasses.is_dataclass(one) else vars(one)
        for name in names:
            agree(getattr(one, name), getattr(other, name), f"{path}.{name}")
