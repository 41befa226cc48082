"""What the real functions of verl 0.3 to 0.8 gave, recomputed: advantages, and gradients of the first actor."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from goldens import trl_releases
from goldens import verl_releases as releases
from objectives import objective_of
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.trainers.releases import parse_version

SINGLE = Bound(2e-6, 1e-9, "several sums of float32 in another order, and a k3 that cancels")

pytestmark = [compared("golden", SINGLE)]

DTYPES = {"f32": torch.float32, "f64": torch.float64}


@cache
def stored() -> tuple[np.ndarray, dict]:
    with np.load(releases.FILE) as file:
        return file["values"], json.loads(bytes(file["index"]).decode())


def wanted(entry: tuple, precision: str, name: str) -> torch.Tensor:
    values, index = stored()
    kind, release, case, configuration, _ = entry
    start, count = index[f"{release}/{kind}/{case}/{configuration}/{precision}/{name}"]
    return torch.from_numpy(values[start : start + count])


def known(entry: tuple) -> dict:
    """The options of ours: micro-batches of varying size are in the rows."""
    return {name: value for name, value in entry[4].items() if name != "use_dynamic_bsz"}


def by_release(kind: str) -> list:
    found: dict[str, list] = {}
    for entry in releases.entries():
        if entry[0] == kind:
            found.setdefault(entry[1], []).append(entry)
    return [
        pytest.param(
            entries,
            id=release,
            marks=[
                pytest.mark.slow(every=release not in ("0.3.0.post1", "0.6.1")),
                *(covers("verl", option, value) for entry in entries for option, value in known(entry).items()),
            ],
        )
        for release, entries in found.items()
    ]


def mine(entry: tuple):
    return objective_of(f"verl@{entry[1]}", **known(entry))


@pytest.mark.parametrize("entries", by_release("advantages"))
@pytest.mark.parametrize("precision", DTYPES)
def test_advantages(entries, precision):
    dtype = DTYPES[precision]
    for entry in entries:
        batch = releases.step_of(entry[2])
        found = evaluate(batch, mine(entry), dtype=dtype).rows
        mask_T = batch.column("response_mask")
        own_T = found.advantage_T
        if own_T is None:
            own_T = torch.repeat_interleave(found.advantage_N, batch.rows.diff())
        if entry[2] == "tiny_spread" and dtype == torch.float32:
            # There the advantages are what rounding leaves of them.
            continue
        agree(own_T, wanted(entry, precision, "advantages"), dtype, "/".join(entry[:4]), where=mask_T)


@pytest.mark.parametrize("entries", by_release("loss"))
@pytest.mark.parametrize("precision", DTYPES)
def test_gradient_of_the_first_actor(entries, precision):
    dtype = DTYPES[precision]
    for entry in entries:
        if entry[2] == "tiny_spread" and dtype == torch.float32:
            continue
        batch = releases.step_of(entry[2])
        micro_N = wanted(entry, precision, "micro").long()
        batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": micro_N})
        found = evaluate(batch, mine(entry), dtype=dtype, per_token=True)
        grad = wanted(entry, precision, "grad")
        own_T = torch.where(batch.column("response_mask"), found.per_token.grad_T, 0.0)
        words, size = "/".join(entry[:4]), float(grad[-1])
        # Before 0.7 a count has 1e-8 added, which float32 loses.
        added = 1e-8 * size if dtype == torch.float64 and parse_version(entry[1]) < (0, 7) else 0.0
        agree(own_T.abs().sum(), size, dtype, words, rounding=added)
        agree(trl_releases.projections(own_T), grad[:-1], dtype, words, scale=size, rounding=2 * added)
