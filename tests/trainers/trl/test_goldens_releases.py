"""What the real functions of every TRL release from 0.14 on gave, recomputed: advantages, loss, gradient, metrics."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from goldens import trl_releases as releases
from objectives import objective_of
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.loss import loss_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.trainers.table import TRAINERS

SINGLE = Bound(2e-6, 1e-9, "several sums of float32 in another order, and a k3 that cancels")

pytestmark = [compared("golden", SINGLE)]

DTYPES = {"f32": torch.float32, "f64": torch.float64}


@cache
def stored() -> tuple[np.ndarray, dict]:
    with np.load(releases.FILE) as file:
        return file["values"], json.loads(bytes(file["index"]).decode())


def wanted(entry: tuple, name: str) -> torch.Tensor:
    values, index = stored()
    start, count = index["/".join(entry[:4])][name]
    return torch.from_numpy(values[start : start + count])


def by_release() -> list:
    found: dict[tuple[str, str], list] = {}
    for entry in releases.entries():
        found.setdefault(entry[:2], []).append(entry)
    return [
        pytest.param(
            entries,
            id="@".join(key),
            marks=[
                pytest.mark.slow(every=key[1] not in ("0.14.0", "0.22.2")),
                *(covers(key[0], option, value) for entry in entries for option, value in entry[4].items()),
            ],
        )
        for key, entries in found.items()
    ]


NOT_RECOMPUTED = ("clip_ratio",)
"""0.16 counts as clipped what the clip leaves alone; `trainers trl` says so."""


@pytest.mark.parametrize("entries", by_release())
@pytest.mark.parametrize("precision", DTYPES)
def test_release(entries, precision):
    dtype = DTYPES[precision]
    is_single = dtype == torch.float32
    for entry in entries:
        trainer, release, case, _, options = entry
        batch = releases.batch_of(trainer, case, release, options)
        mine = objective_of(
            f"{trainer}@{release}",
            max_completion_length=releases.WIDTH,
            **{"gradient_accumulation_steps": releases.ACCUMULATION} | options,
        )
        found = evaluate(batch, mine, dtype=dtype, per_token=True)
        words = "/".join(entry[:4])
        radius = advantage_radius(found).largest if is_single else 0.0
        agree(found.rows.advantage_N, wanted(entry, f"{precision}/advantages"), dtype, f"{words} adv", rounding=radius)
        radius = float(loss_radius(found)) if is_single else 0.0
        loss = float(wanted(entry, f"{precision}/loss"))
        agree(found.loss, loss, dtype, f"{words} loss", scale=abs(loss), rounding=radius)
        grad = wanted(entry, f"{precision}/grad")
        if not is_single or case != "tiny_spread":
            # There the advantages are what rounding leaves of them.
            own_T = torch.where(batch.column("response_mask"), found.per_token.grad_T, 0.0)
            agree(own_T.abs().sum(), grad[-1], dtype, f"{words} gradient")
            agree(releases.projections(own_T), grad[:-1], dtype, f"{words} gradient", scale=float(grad[-1]))
        spec = TRAINERS[trainer]
        own = spec.metrics(found)
        names = stored()[1][words]["names"]
        assert {name for name in own if name.split("/")[0] not in ("completions", "loss", "entropy_coef")} <= set(names)
        for name, value in zip(names, wanted(entry, f"{precision}/metrics").tolist(), strict=True):
            if name in NOT_RECOMPUTED:
                continue
            radius = float(metric_radius(found, spec.log.kind_of(name), own[name])) if is_single else 0.0
            size = abs(value) if value == value and value else 1.0
            agree(own[name], value, dtype, f"{words} {name}", scale=size, rounding=radius if radius == radius else 0.0)


def test_the_first_patch_of_0_22_has_the_trainer_of_its_minor_release():
    """Their files are the same; 0.22.2 takes the words of `scale_rewards` as they are meant."""
    scales = [objective_of(f"trl@{release}").advantage.scale for release in ("0.22.0", "0.22.1", "0.22.2")]
    assert scales == ["none", "none", "group"]
