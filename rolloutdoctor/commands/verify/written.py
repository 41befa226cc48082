"""Write cases and expected numbers as a pytest file for numpy and torch alone, to be reviewed like any test."""

from collections.abc import Sequence
from dataclasses import replace
from pprint import pformat

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.arguments import PARAMETERS
from rolloutdoctor.commands.verify.cases import CASES, Case
from rolloutdoctor.commands.verify.losses import ROUNDINGS, UNIT
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation, evaluate_rows
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.trainers.options import Layer

_COLUMNS = {"reward_baselines": "reward_baseline"}
"""Inputs of a function to the columns that they are made of, where the names differ."""

_RUNNER = '''

def arguments(function, case):
    """The tensors of a case by the names of a function's parameters; other parameters keep their defaults."""
    found = {{}}
    for name, parameter in inspect.signature(function).parameters.items():
        canonical = next((known for known, names in NAMES.items() if name in names), None)
        if canonical is not None and canonical in case:
            value = case[canonical]
            found[name] = np.array(value, dtype=object) if canonical == "index" else torch.tensor(value)
        elif name in MORE:
            found[name] = MORE[name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            pytest.fail(f"give {{name}} in MORE, or name it as one of NAMES")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_advantages(case):
    found = FUNCTION(**arguments(FUNCTION, case))
    while isinstance(found, (tuple, list)):
        found = found[0]
    expected, radius = torch.tensor(case["expected"]), torch.tensor(case["radius"])
    mask = torch.tensor(case["response_mask"]).bool()
    if found.dim() == 2:
        found = torch.where(mask, found, 0.0) if found.shape == mask.shape else found.expand(mask.shape) * mask
        if expected.dim() == 1:
            expected, radius = expected[:, None] * mask, radius[:, None].expand(mask.shape)
    off = (found.double() - expected).abs() > radius
    where = off.nonzero()[:1].tolist()
    assert not off.any(), f"differs first at {{where}}: {{found.tolist()}}, expected {{expected.tolist()}}"
'''


def written_test(trainer: str, layers: Sequence[Layer], function: str = "") -> str:
    """Return a pytest file that checks the advantages of a trainer's function.

    Args:
        trainer: ``NAME@RELEASE``.
        layers: its options.
        function: ``MODULE:NAME`` of the function; empty: the file says where it goes.

    Raises:
        UsageError: if no trainer is given, or its options compute no advantages.
    """
    if not trainer:
        raise UsageError("--write needs --trainer NAME@RELEASE: whose numbers are expected")
    configured = configure(RunMetadata(), trainer, layers)
    assert configured is not None
    if "rewards" in advantage_columns(configured.objective):
        raise UsageError(f"{trainer}: a file has no rewards by function; check it with the fixture rollout_cases")
    cases = [written for case in CASES if (written := _written(case, configured.objective)) is not None]
    if not cases:
        raise UsageError(f"{trainer}: these options compute no advantages of the cases")
    module, _, name = function.partition(":")
    if function and not name:
        raise UsageError(f"--function {function}: expected MODULE:NAME, such as my_trainer.advantages:compute_grpo")
    chosen = f"from {module} import {name} as FUNCTION" if function else "FUNCTION = None  # the function under test"
    settings = {key: value for layer in reversed(layers) for key, value in layer.values.items()}
    options = ", ".join(f"{key}={value}" for key, value in settings.items())
    used = {name: PARAMETERS[name] for name in PARAMETERS if name in cases[0]}
    return "\n".join(
        [
            f'"""Advantages as {trainer} computes them{f" with {options}" if options else ""}.',
            "",
            f"Written by rolloutdoctor {__version__}; it needs pytest and torch. `expected` are the exact values and "
            "`radius` what",
            "float32 may round off, one of each response [N] or token [N, L].",
            '"""',
            "",
            "import inspect",
            "",
            "import numpy as np",
            "import pytest",
            "import torch",
            "",
            chosen,
            "MORE = {}  # further arguments of the function",
            f"NAMES = {pformat(used, width=118, sort_dicts=False)}",
            f"CASES = {pformat(cases, width=118, sort_dicts=False)}",
            _RUNNER.format(),
        ]
    )


def _written(case: Case, objective: Objective) -> dict[str, object] | None:
    """A case as plain lists with what is expected; None where the trainer itself fails, or nothing is expected."""
    batch, without_kl = case.given_to(objective), replace(objective, kl_loss=None)
    try:
        single, double = (evaluate_rows(batch, without_kl, dtype) for dtype in (torch.float32, torch.float64))
    except CannotComputeError:
        return None
    if single is None or double is None:
        return None
    if double.advantage_N is not None:
        view = StepView(batch, {}, evaluations={AS_CONFIGURED: Evaluation(batch, objective, single, None)})
        expected, radius = double.advantage_N, view.advantage_radius()
    else:
        assert single.advantage_T is not None
        assert double.advantage_T is not None
        exact_T = double.advantage_T.double() * case.batch.column("response_mask")
        lost_T = (single.advantage_T.double() - double.advantage_T.double()).abs()
        expected, radius = case.pad(exact_T), case.pad(lost_T + ROUNDINGS * UNIT * (1 + exact_T.abs()))
    inputs = {name: case.column(name) for name in ("values", "old_log_probs", "sum_pi_squared")}
    inputs["reward_baselines"] = case.reward_baselines
    needed = advantage_columns(objective)
    taken: dict[str, object] = {
        "name": case.name,
        "rewards": _numbers(case.rewards),
        "token_level_rewards": _numbers(case.token_level_rewards),
        "response_mask": case.response_mask.tolist(),
        "index": case.index.tolist(),
        "group_index": case.group_index.tolist(),
        "group_size": case.group_size,
        **{name: _numbers(x) for name, x in inputs.items() if _COLUMNS.get(name, name) in needed},
        "expected": _numbers(expected),
        "radius": _numbers(radius, 3),
    }
    return {name: value for name, value in taken.items() if value != 0}


def _numbers(x: Tensor, digits: int = 9) -> object:
    """Numbers as lists, with the digits that float32 needs."""
    if x.dim():
        return [_numbers(row, digits) for row in x]
    return float(f"{float(x):.{digits}g}")
