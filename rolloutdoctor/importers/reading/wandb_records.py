"""The records of a run-*.wandb file: a log as LevelDB writes it, of protobuf messages.

Source: wandb/sdk/internal/datastore.py up to 0.29, core/pkg/leveldb/record.go, wandb/proto/wandb_internal.proto.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

MAGIC = b":W&B"

_BLOCK = 2**15
_FILE_HEADER = 7
_CHUNK = struct.Struct("<IHB")
"""CRC-32 of kind and data, length of the data, kind."""

_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

_LARGEST = 64 * 2**20
"""Bytes of a record; wandb keeps media in files of their own."""


def records(stream: BinaryIO, damaged: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the records that are whole; after damage reading goes on at the next block, as LevelDB does.

    Args:
        stream: at the beginning of the file.
        damaged: takes the offset of a chunk that is not whole, as is the last one of a run that goes on.
    """
    record: bytearray | None = None
    offset = 0
    while block := stream.read(_BLOCK):
        at = 0 if offset else _FILE_HEADER
        while at + _CHUNK.size <= len(block):
            checksum, length, kind = _CHUNK.unpack_from(block, at)
            end = at + _CHUNK.size + length
            if not (checksum or length or kind):
                break
            is_whole = end <= len(block) and zlib.crc32(block[at + _CHUNK.size - 1 : end]) == checksum
            if not is_whole or len(record or ()) + length > _LARGEST:
                damaged(offset + at)
                record = None
                if not is_whole:
                    break
            elif kind in (_FULL, _FIRST):
                record = bytearray()
            if record is not None:
                record += block[at + _CHUNK.size : end]
                if kind in (_FULL, _LAST):
                    yield bytes(record)
                    record = None
            at = end
        offset += len(block)


def fields(message: bytes) -> dict[int, list[bytes | int]]:
    """Return the values of each field of a protobuf message by its number: bytes, or the integer of a varint.

    Raises:
        ValueError: if it is no such message.
    """
    parts: dict[int, list[bytes | int]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            parts.setdefault(tag >> 3, []).append(value)
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("a field of a kind that proto3 does not have")
        if at + length > len(message):
            raise ValueError("a field that is longer than its message")
        parts.setdefault(tag >> 3, []).append(message[at : at + length])
        at += length
    return parts


def _varint(message: bytes, at: int) -> tuple[int, int]:
    if at < len(message) and message[at] < 128:
        return message[at], at + 1
    value = 0
    for shift in range(10):
        if at + shift >= len(message):
            break
        byte = message[at + shift]
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise ValueError("an integer without an end")
