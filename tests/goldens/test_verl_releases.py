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
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.tokens import advantage_tokens
from rolloutdoctor.results.errors import UsageError

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
                *(covers("verl", option, value) for entry in entries for option, value in entry[4].items()),
            ],
        )
        for release, entries in found.items()
    ]


def mine(entry: tuple):
    options = {name: value for name, value in entry[4].items() if name != "use_dynamic_bsz"}
    return objective_of(f"verl@{entry[1].removesuffix('.post1')}", **options)
