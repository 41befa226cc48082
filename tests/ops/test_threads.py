"""Threads over blocks give the bits that one thread gives."""

import threading
from dataclasses import fields

import pytest
import torch

from rolloutdoctor import token_blocks
from rolloutdoctor.evaluation import evaluate_all
from rolloutdoctor.fixes import choose
from rolloutdoctor.ops.threads import block_threads, over_blocks
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import find


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_order_and_threads(two_threads):
    seen = set()

    def work(number):
        seen.add(threading.get_ident())
        assert torch.get_num_threads() == 1
        return number * number

    with block_threads():
        assert over_blocks(work, range(50)) == [number * number for number in range(50)]
    assert threading.get_ident() not in seen
    assert torch.get_num_threads() == 2


def test_an_error_of_a_block_comes_out(two_threads):
    with block_threads(), pytest.raises(ZeroDivisionError):
        over_blocks(lambda number: 1 // number, [1, 0, 2])
    assert torch.get_num_threads() == 2


def test_the_same_bits(two_threads, monkeypatch):
    monkeypatch.setattr(token_blocks, "BLOCK_TOKENS", 50)
    trl = find("trl")
    config = resolve(trl.options, parse_version(trl.newest), [Layer("", {"beta": 0.04})], trainer="trl")
    objective = trl.objective(config)
    fixed = {name: choose(name).apply(objective) for name in ("zero-std", "rejected-rows")}
    objectives = {"": objective, **fixed}
    batch = random_batch(3, sizes=(4,) * 40, longest=40)
    alone = evaluate_all(batch, objectives, per_token=True)
    with block_threads():
        together = evaluate_all(batch, objectives, per_token=True)
    for name in objectives:
        for part in ("tokens", "per_token"):
            one, other = getattr(alone[name], part), getattr(together[name], part)
            for field in fields(one):
                if isinstance(getattr(one, field.name), torch.Tensor):
                    assert torch.equal(getattr(one, field.name), getattr(other, field.name)), (name, field.name)
