import random
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytest

from rolloutdoctor.ops.sketch import CONTEXTS, VERSIONS, add, add_all, records, sketch, sketch_each
from rolloutdoctor.ops.tally import Sums, sketches


@dataclass(frozen=True)
class Kept(Sums):
    seen: str = sketches()


def part(seed, contexts, rows=300):
    draw = np.random.default_rng(seed)
    pool = np.random.default_rng(99).integers(-(2**63), 2**63 - 1, contexts)
    context = draw.choice(pool, rows)
    return context, draw.integers(0, 5, rows), draw.normal(size=(rows, 3))


def test_parts_add_up_to_the_whole_in_any_order():
    parts = [part(seed, contexts=400) for seed in range(9)]
    whole = sketch(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    texts = [Kept(sketch(*each)) for each in parts]
    for seed in range(5):
        random.Random(seed).shuffle(texts)
        assert Kept.of_all(texts).seen == whole
        total = Kept()
        for one in texts:
            total = one + total
        assert total.seen == whole


def test_several_steps_have_what_each_has_alone():
    parts = [part(seed, contexts=400, rows=rows) for seed, rows in enumerate([300, 0, 2000, 1])]
    together = sketch_each(
        *(np.concatenate(each) for each in zip(*parts, strict=True)), sizes=[len(each[0]) for each in parts]
    )
    assert together == [sketch(*each) for each in parts]
    assert not together[1]


def test_all_records_of_the_smallest_contexts_are_kept():
    context, version, values = part(0, contexts=400, rows=5000)
    seen = records(sketch(context, version, values))
    smallest = np.unique(context.view(np.uint64))[:CONTEXTS]
    assert np.unique(seen.context).tolist() == smallest.tolist()
    for one in smallest[:5]:
        here = context.view(np.uint64) == one
        for each in np.unique(version[here]):
            found = seen.sums[(seen.context == one) & (seen.version == each)]
            assert found[0] == pytest.approx(values[here & (version == each)].sum(0), abs=1e-4)


def test_size_is_bounded():
    assert len(sketch(*part(1, contexts=10**6, rows=10**5))) < 11_000


def test_a_context_that_comes_again_for_weeks_stays_small_in_any_order():
    count = 5 * VERSIONS
    texts = [sketch(np.array([7, 9]), np.full(2, at), np.full((2, 1), float(at))) for at in range(count)]
    whole = add_all(texts)
    for seed in range(3):
        random.Random(seed).shuffle(texts)
        assert reduce(add, texts) == add_all(texts) == whole
    seen = records(whole)
    ends = [*range(VERSIONS), *range(count - VERSIONS, count)]
    assert seen.version.tolist() == ends * 2
    assert seen.sums[:, 0].tolist() == [float(at) for at in ends] * 2


def test_nothing():
    assert sketch(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3))) == ""
    assert len(records("").context) == 0
    assert (Kept() + Kept()).seen == ""
