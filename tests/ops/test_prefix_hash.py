"""Hashes of prefixes: equal for equal prefixes wherever they are, different for all others."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.ops import prefix_hash as module
from rolloutdoctor.ops.prefix_hash import PrefixHashes, scramble
from rolloutdoctor.ops.segments import Runs

ROWS = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8)


def hashes(rows, seeds=None):
    ids_T = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    runs = Runs(torch.tensor([0, *map(len, rows)]).cumsum(0))
    return PrefixHashes.of(ids_T, runs, None if seeds is None else torch.tensor(seeds))


def prefixes(rows, found):
    """Every prefix of every row with its hash."""
    cuts = found.runs.offsets.tolist()
    for row, seed, (start, stop) in zip(rows, found.seed_N.tolist(), pairwise(cuts), strict=True):
        for length, value in enumerate([seed, *found.through_T[start:stop].tolist()]):
            yield (seed, *row[:length]), value


@given(ROWS)
def test_hashes_are_equal_where_prefixes_are(rows):
    found = hashes(rows, [len(row) % 2 for row in rows])
    by_prefix = list(prefixes(rows, found))
    assert len({value for _, value in by_prefix}) == len({prefix for prefix, _ in by_prefix})
    assert len(set(by_prefix)) == len({prefix for prefix, _ in by_prefix})


@given(ROWS, st.integers(0, 8))
def test_a_block_changes_nothing(rows, cut):
    whole = hashes(rows)
    for part, start in ((rows[:cut], 0), (rows[cut:], sum(map(len, rows[:cut])))):
        if part:
            found = hashes(part)
            assert found.through_T.tolist() == whole.through_T[start : start + len(found.through_T)].tolist()
            assert found.row_N.tolist() == whole.row_N[: len(part)].tolist() or start


def test_by_hand():
    found = hashes([[5, 6], [], [6, 5], [5]], [1, 2, 1, 1])
    places = [(token, place) for token in (5, 6) for place in (0, 1)]
    weight = [int(scramble(torch.tensor([place + 1]))) | 1 for place in (0, 1)]
    term = {(token, place): (token + 1) * weight[place] for token, place in places}
    wrapped = [
        (1 + term[5, 0], 0),
        (1 + term[5, 0] + term[6, 1], 1),
        (1 + term[6, 0], 2),
        (1 + term[6, 0] + term[5, 1], 3),
        (1 + term[5, 0], 4),
    ]
    for value, place in wrapped:
        assert (int(found.through_T[place]) - value) % 2**64 == 0
    assert found.row_N.tolist() == [found.through_T[1], 2, found.through_T[3], found.through_T[4]]
    # The context of a token is what precedes it.


def test_the_prompt_tells_equal_responses_apart():
    one, other, again = hashes([[5, 6]] * 3, [1, 2, 1]).row_N.tolist()
    assert one == again != other


def test_a_million_prefixes_do_not_collide():
    draw = torch.Generator().manual_seed(0)
    rows, length = 1000, 1000
    # Few ids, so that sums of the same terms in another order are among them.
    ids_T = torch.randint(0, 4, (rows * length,), generator=draw)
    found = PrefixHashes.of(ids_T, Runs(torch.arange(0, rows * length + 1, length)))
    long = found.through_T.reshape(rows, length)[:, 40:]
    assert len(torch.unique(long)) == long.numel()
    # And each of the bits is a fair choice.
    for bit in (0, 1, 31, 62):
        assert float(((long >> bit) & 1).double().mean()) == pytest.approx(0.5, abs=0.005)


def test_scramble_is_the_finaliser_of_splitmix64():
    # First numbers of splitmix64 with seed 0 (Vigna's reference code).
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in scramble(torch.tensor([1, 2, 3])).tolist()] == expected


def test_without_unsigned_integers_it_is_the_same():
    x = torch.tensor([0, 1, -1, 2**62, -(2**63), 12345])
    assert module._mixed_on_gpu(x).tolist() == scramble(x).tolist()
