"""Repeated n-grams of packed token ids."""

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.ops.prefix_hash import scramble
from rolloutdoctor.ops.segments import Runs

DOUBLINGS = 4
"""n-grams are of ``2 ** DOUBLINGS`` tokens."""

_ODD = (0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x106689D45497FDB5)
"""Random odd multipliers: a hash of twice the length is one half times such a number plus the other."""


def repeated_ngrams(ids_T: Tensor, told_T: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Count the 16-grams of each row, and those that occurred earlier in it, float64 ``[N]`` each.

    Hashes of 39 bits or more stand for the n-grams: of 32,768 tokens a row has a false repeat once in 1,000 rows.

    Args:
        ids_T: ``[T]`` token ids.
        told_T: ``[T]`` bool, tokens that count; an n-gram counts if all of its tokens do.
        runs: the tokens by row.

    >>> ids = torch.tensor([5, 6, 7, 8] * 10 + list(range(40)))
    >>> [x.tolist() for x in repeated_ngrams(ids, ids >= 0, Runs(torch.tensor([0, 40, 80])))]
    [[25.0, 25.0], [21.0, 0.0]]
    """
    hash_T, row_T = scramble(ids_T.long()), runs.expand(torch.arange(len(runs), device=ids_T.device))
    is_whole_T = told_T.clone()
    for doubling, factor in zip(range(DOUBLINGS), _ODD, strict=True):
        reach = 2**doubling
        hash_T[:-reach] = hash_T[:-reach] * factor + hash_T[reach:]
        is_whole_T[:-reach] = is_whole_T[:-reach] & is_whole_T[reach:]
        is_whole_T[-reach:] = False
    last = 2**DOUBLINGS - 1
    is_whole_T[:-last] &= row_T[:-last] == row_T[last:]
    is_whole_T[-last:] = False
    count_N = runs.total(is_whole_T)
    bits = 63 - max(1, len(runs)).bit_length()
    key = (row_T[is_whole_T] << bits) | ((hash_T[is_whole_T] >> (63 - bits)) & (2**bits - 1))
    key = torch.from_numpy(np.sort(key.numpy())) if key.device.type == "cpu" else key.sort().values
    again = key[1:][key[1:] == key[:-1]] >> bits
    return count_N, torch.bincount(again, minlength=len(runs)).double()
