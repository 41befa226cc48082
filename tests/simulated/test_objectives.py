"""Every objective that there is, with every fix, on a simulated GPU: the CPU's numbers, twice the same.

`test_device` says what such a device shows, and what it cannot show.
"""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from device_agreement import (
    TOKEN_VALUES,
    TOLERANCE,
    agree,
    evaluations_agree,
    plain_objective,
    rows_agree,
    trainer_agrees,
    with_every_fix,
)
from evaluation.test_float32 import VALUES, grouped
from simulated.device import WAITS
from simulated.objectives import full_batch, objectives

from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.evaluation import blocks
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all
from rolloutdoctor.formulas.advantages.float32 import residue, zero_std_flags
from rolloutdoctor.formulas.advantages.table import ESTIMATORS, TOKEN_ESTIMATORS
from rolloutdoctor.formulas.losses.surrogates import SURROGATES
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.trainers.table import TRAINERS

OBJECTIVES = objectives()
CHOSEN = [name for name in OBJECTIVES if name.endswith(("dapo", "loss_mode=kl_cov", "loss_mode=clip_cov", "=ppo"))]


def batch_for(name, seed):
    """slime's ppo fails on a row without a token."""
    return full_batch(seed, empty=0.0 if name.endswith("=ppo") else 0.1)


def metrics(name, evaluation):
    return TRAINERS[name.partition(" ")[0]].metrics(evaluation)


def rejected_rows(batch):
    """Rows that have tokens, none of them trained."""
    return int(((batch.trained.diff() == 0) & (batch.rows.diff() > 0)).sum())


def refuses(batch, objective, device):
    """True if a step cannot be computed, with the same sentence on both."""
    try:
        evaluate(batch, objective)
    except CannotComputeError as error:
        with pytest.raises(CannotComputeError, match=re.escape(str(error))):
            evaluate(batch.to(device), objective)
        return True
    return False


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer(device, name, dtype):
    trainer_agrees(name, dtype, device, sizes=(8,) * 8, longest=60)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(device, name):
    batch, fixed = full_batch(4), with_every_fix(OBJECTIVES[name])
    assert rejected_rows(batch) > 0
    if refuses(batch, fixed[""], device):
        batch = full_batch(4, empty=0.0, rejected=0.0)
    others = list(fixed)[1:]
    # One of the fixes, and over all objectives every one many times.
    turn = list(OBJECTIVES).index(name)
    taken = {"": fixed[""]} | {label: fixed[label] for label in others[turn % len(others) :][:1]}
    here, there = evaluations_agree(batch, taken, torch.float32, device)
    if turn % 4 == 0:
        # They take longer than the evaluation.
        agree(metrics(name, here), metrics(name, there))


def test_these_are_all():
    """No estimator and no policy term is left out; `test_every_trainer` has those without a word for them."""
    plain = [plain_objective(name) for name in TRAINERS]
    assert len(OBJECTIVES) > 120
    assert {each.surrogate.kind for each in [*plain, *OBJECTIVES.values()]} == set(SURROGATES)
    found = {each.advantage.estimator for each in [*plain, *OBJECTIVES.values()]}
    assert found >= ESTIMATORS.keys() | TOKEN_ESTIMATORS.keys()


@pytest.mark.parametrize("name", CHOSEN)
def test_blocks(device, name, monkeypatch):
    """Blocks are cut in other places than on the CPU; a fix is compared with the reference block by block."""
    monkeypatch.setattr(blocks, "DEVICE_BLOCK_TOKENS", 30)
    batch, objective = batch_for(name, 4), OBJECTIVES[name]
    assert sum(1 for _ in blocks.blocks_of(batch.to(device), torch.float32)) > 3
    evaluations_agree(batch, with_every_fix(objective), torch.float32, device)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_columns_in_chunks(device, split):
    """Columns come in as many chunks as pieces were read; some are empty, and types of chunks can differ."""
    batch = full_batch(5, split=split)
    cuts = [0, 0, batch.tokens // 3, batch.tokens // 3, batch.tokens]
    chunks = {name: [column[a:b] for a, b in pairwise(cuts)] for name, column in batch.per_token.items()}
    chunks["entropy"][1] = chunks["entropy"][1].double()
    moved = replace(batch, per_token=TokenColumns(chunks)).to(device)
    for name, column in batch.per_token.items():
        assert moved.per_token[name].device.type == device
        assert moved.per_token[name].tolist() == column.tolist()
        assert moved.tokens_of(name, slice(3, 9)).tolist() == column[3:9].tolist()
    for name in CHOSEN:
        if refuses(batch, OBJECTIVES[name], device):
            continue
        here, there = (evaluate(each, OBJECTIVES[name]) for each in (batch, moved))
        rows_agree(here, there, torch.float32, name)
        agree(metrics(name, here), metrics(name, there))


def masked():
    batch = full_batch(6)
    masks = {name: torch.zeros_like(batch.column(name)) for name in ("response_mask", "response_mask_pre")}
    return replace(batch, per_token={**batch.per_token, **masks})


def without_tokens():
    batch = full_batch(6)
    empty = {name: column[:0] for name, column in batch.per_token.items()}
    return replace(batch, rows=torch.zeros_like(batch.rows), per_token=empty)


def without_rows():
    batch = full_batch(6)
    return replace(
        batch,
        rows=batch.rows[:1],
        groups=Groups.of(torch.zeros(0, dtype=torch.int64)),
        per_row={name: column[:0] for name, column in batch.per_row.items()},
        rewards={name: column[:0] for name, column in batch.rewards.items()},
        per_token={name: column[:0] for name, column in batch.per_token.items()},
        **dict.fromkeys(("group_ids", "sample_ids", "statuses"), ()),
    )


@pytest.mark.parametrize("make", [masked, without_tokens, without_rows])
def test_steps_without_anything(device, make):
    batch, ran = make(), 0
    moved = batch.to(device)
    for name, objective in list(OBJECTIVES.items())[::6]:
        if not refuses(batch, objective, device):
            rows_agree(evaluate(batch, objective), evaluate(moved, objective), torch.float32, name)
            ran += 1
    assert ran > 12


@pytest.mark.parametrize("name", CHOSEN)
def test_twice_the_same(device, name):
    batch = batch_for(name, 7).to(device)
    one, other = (evaluate(batch, OBJECTIVES[name], per_token=True) for _ in range(2))
    for field in TOKEN_VALUES:
        values, again = (getattr(each.per_token, field).cpu().numpy().tobytes() for each in (one, other))
        assert values == again, field


@pytest.mark.parametrize("size", [2, 7, 8, 23, 64])
def test_float32_arithmetic(device, size):
    """The flags are those of the CPU; a residue may be another one, but of the same groups and as small."""
    score_N, groups = grouped(size)
    moved = replace(groups, index_N=groups.index_N.to(device), order_N=groups.order_N.to(device))
    moved = replace(moved, offsets=groups.offsets.to(device))
    there_N = score_N.to(device)
    for scale in ("group", "none", "batch"):
        assert zero_std_flags(there_N, moved, scale).tolist() == zero_std_flags(score_N, groups, scale).tolist()
    assert residue(there_N, moved, 1e-6).tolist() == residue(score_N, groups, 1e-6).tolist()
    assert len(there_N) == size * len(VALUES)


def test_the_host_waits_no_more_often_for_longer_rows(device):
    """What it asks the device for does not grow with the tokens of a block."""
    asked = []
    for repeat in (1, 4):
        batch = full_batch(8)
        lengths = batch.rows.diff()
        order_T = torch.cat([place.repeat(repeat) for place in torch.arange(batch.tokens).split(lengths.tolist())])
        columns = {name: column[order_T] for name, column in batch.per_token.items()}
        moved = replace(batch, rows=batch.rows * repeat, per_token=columns).to(device)
        WAITS.clear()
        evaluate_all(moved, with_every_fix(OBJECTIVES["trl loss_type=dapo"]))
        asked.append(sum(WAITS.values()))
    assert 0 < asked[0] == asked[1]
