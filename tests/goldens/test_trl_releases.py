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


@pytest.mark.parametrize("entries", by_release())
@pytest.mark.parametrize("precision", DTYPES)
def test_release(entries, precision):
    dtype = DTYPES[precision]
    for entry in entries:
        trainer, release, case, _, options = entry
        batch = releases.batch_of(case, release, options)
        mine = objective_of(
            f"{trainer}@{release}",
            max_completion_length=releases.WIDTH,
            gradient_accumulation_steps=releases.ACCUMULATION,
            **options,
        )
        found = evaluate(batch, mine, dtype=dtype, per_token=True)
        words = "/".join(entry[:4])
        agree(found.rows.advantage_N, wanted(entry, f"{precision}/advantages"), dtype, f"{words} advantages")
        grad = wanted(entry, f"{precision}/grad")
        mask_T = batch.column("response_mask")
        own_T = torch.where(mask_T, found.per_token.grad_T, 0.0)
        agree(own_T.abs().sum(), grad[-1], dtype, f"{words} gradient")
        agree(releases.projections(own_T), grad[:-1], dtype, f"{words} gradient", scale=float(grad[-1]))
        loss = float(wanted(entry, f"{precision}/loss"))
        agree(found.loss, loss, dtype, f"{words} loss", scale=float(found.rows.advantage_N.abs().mean()) + abs(loss))
        own = TRAINERS[trainer].metrics(found)
        names = stored()[1][words]["names"]
        for name, value in zip(names, wanted(entry, f"{precision}/metrics").tolist(), strict=True):
            if name in ("clip_ratio", "policy_loss", "entropy_coef") and name not in own:
                continue
            agree(own[name], value, dtype, f"{words} {name}", scale=max(1.0, abs(value)))
