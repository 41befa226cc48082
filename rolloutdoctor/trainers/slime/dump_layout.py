"""Layout of a slime rollout in optimizer steps and micro-batches: `dp_shards` of its train data."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

Cut = tuple[int, int]
"""Optimizer step of the rollout, and micro-batch of that step on the sample's rank."""

_MOST = 10**7


def cuts(train: Mapping[str, object]) -> dict[int, Cut] | None:
    """Return the cut of each `rollout_position`; None if the dump does not say it whole and without contradiction.

    A shard lists the positions of its samples (`partition`), its micro-batches as numbers into that list
    (`micro_batch_indices`, ``DataIterator`` of slime/backends/megatron_utils/data.py), and how many of them each
    optimizer step takes, one after another (`num_microbatches`, ``train`` of slime/backends/megatron_utils/model.py).

    Args:
        train: the train data of one rollout, format version 2.
    """
    shards, samples = train.get("dp_shards"), train.get("samples")
    if not isinstance(shards, list) or not shards or not isinstance(samples, list):
        return None
    cuts: dict[int, Cut] = {}
    for shard in shards:
        of_shard = _shard(shard) if isinstance(shard, dict) else None
        if of_shard is None or cuts.keys() & of_shard.keys():
            return None
        cuts |= of_shard
    positions = [sample.get("rollout_position") if isinstance(sample, dict) else None for sample in samples]
    is_complete = len(positions) == len(cuts) and all(_is_count(each) and each in cuts for each in positions)
    return cuts if is_complete and len(set(positions)) == len(positions) else None


def _shard(shard: Mapping[str, object]) -> dict[int, Cut] | None:
    partition, counts = shard.get("partition"), shard.get("num_microbatches")
    micro_batches = shard.get("micro_batch_indices")
    if not _counts(partition) or not _counts(counts) or not isinstance(micro_batches, (list, tuple)):
        return None
    if not all(_counts(each) for each in micro_batches) or sum(counts) != len(micro_batches):
        return None
    if sorted(index for each in micro_batches for index in each) != list(range(len(partition))):
        return None
    places = [(step, number) for step, count in enumerate(counts) for number in range(count)]
    by_index = {partition[index]: place for place, each in zip(places, micro_batches, strict=True) for index in each}
    return by_index if len(by_index) == len(partition) else None


def _counts(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and all(map(_is_count, value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
