"""The records of a TensorBoard event file: TFRecord frames of protobuf messages.

Source: tensorflow/core/lib/io/record_writer.cc, tensorflow/core/util/event.proto, summary.proto and tensor.proto.
"""

import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import BinaryIO

import numpy as np

from rolloutdoctor.importers.reading.wandb_records import fields

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LARGEST_SCALAR = 2**16
"""Bytes of a record that may hold scalars; images, histograms and graphs are larger, and passed over."""

_POLYNOMIAL = 0x82F63B78
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}
"""DataType of a tensor to how its content is stored (tensorflow/core/framework/types.proto)."""
_VALUES = {5: "<f4", 6: "<f8"}
"""Fields of a TensorProto that hold floats and doubles."""

_STRING = 7
"""DataType of a tensor of texts."""

Scalar = tuple[int, str, float]
"""Step, tag and value."""


def records(stream: BinaryIO, damaged: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the records that may hold scalars; reading ends at the first that is not whole.

    Args:
        stream: at the beginning of the file.
        damaged: takes the offset of a record that is not whole, as is the last one of a run that goes on.
    """
    offset = 0
    while head := stream.read(_LENGTH.size):
        length, checksum = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (0, None)
        if checksum != masked_crc(head[:8]):
            damaged(offset)
            return
        size = length + _CHECKSUM.size
        if length > _LARGEST_SCALAR:
            # What is beyond the end of the file shows at the next read.
            stream.seek(size, 1)
        else:
            body = stream.read(size)
            if len(body) < size or _CHECKSUM.unpack_from(body, length)[0] != masked_crc(body[:length]):
                damaged(offset)
                return
            yield body[:length]
        offset += _LENGTH.size + size


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of some bytes, masked as TFRecord stores it.

    >>> hex(masked_crc(b"123456789"))
    '0xc78ab0e5'
    """
    crc, even = 0xFFFFFFFF, len(data) & ~1
    table = _table()
    for word in memoryview(data)[:even].cast("H"):
        crc = table[(crc ^ word) & 0xFFFF] ^ (crc >> 16)
    if len(data) != even:
        crc = _of_byte((crc ^ data[-1]) & 0xFF) ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


@cache
def _table() -> list[int]:
    words = np.arange(2**16, dtype=np.uint32)
    for _ in range(16):
        words = (words >> 1 ^ (words & 1) * np.uint32(_POLYNOMIAL)).astype(np.uint32)
    table: list[int] = words.tolist()
    return table


def scalars(record: bytes, tags: set[str]) -> Iterator[Scalar]:
    """Yield the scalars of an event.

    Args:
        record: an Event message.
        tags: tags of scalars, which say so once; is added to.

    Raises:
        ValueError: if it is no such message.
    """
    event = fields(record)
    step = next((number for number in event.get(2, ()) if isinstance(number, int)), 0)
    step -= 2**64 if step >= 2**63 else 0
    for parts in _values(record):
        tag = _tag(parts)
        if 9 in parts and _plugin(_bytes(parts[9][-1])) == b"scalars":
            tags.add(tag)
        if 2 in parts:
            yield step, tag, struct.unpack("<f", _bytes(parts[2][-1]))[0]
        elif 8 in parts and tag in tags and (number := _of_tensor(_bytes(parts[8][-1]))) is not None:
            yield step, tag, number


def texts(record: bytes) -> Iterator[tuple[str, str]]:
    """Yield the tags and texts of an event, which is how options are written."""
    for value in _values(record):
        tensors = [fields(_bytes(tensor)) for tensor in value.get(8, ())]
        for text in (text for tensor in tensors if _STRING in tensor.get(1, ()) for text in tensor.get(8, ())):
            yield _tag(value), _bytes(text).decode("utf-8", "replace")


def hparams(record: bytes) -> Iterator[tuple[str, object]]:
    """Yield the names and values that an event holds for the plugin of hyperparameters.

    Source: ``HParamsPluginData`` (tensorboard/plugins/hparams/plugin_data.proto) and ``Value``
    (google/protobuf/struct.proto).
    """
    for value in _values(record):
        held = [data for metadata in value.get(9, ()) for data in fields(_bytes(metadata)).get(1, ())]
        for content in (content for data in held for content in fields(_bytes(data)).get(2, ())):
            if _plugin(_bytes(value[9][-1])) != b"hparams":
                continue
            starts = (fields(_bytes(start)) for start in fields(_bytes(content)).get(3, ()))
            for entry in (fields(_bytes(entry)) for start in starts for entry in start.get(1, ())):
                value_fields = fields(b"".join(map(_bytes, entry.get(2, ()))))
                name = b"".join(map(_bytes, entry.get(1, ()))).decode("utf-8", "replace")
                if 2 in value_fields:
                    yield name, struct.unpack("<d", _bytes(value_fields[2][-1]))[0]
                elif 3 in value_fields:
                    yield name, _bytes(value_fields[3][-1]).decode("utf-8", "replace")
                elif 4 in value_fields:
                    yield name, bool(value_fields[4][-1])


def _values(record: bytes) -> Iterator[dict[int, list[bytes | int]]]:
    for summary in fields(record).get(5, ()):
        yield from (fields(_bytes(value)) for value in fields(_bytes(summary)).get(1, ()))


def _tag(value: dict[int, list[bytes | int]]) -> str:
    return b"".join(map(_bytes, value.get(1, ()))).decode("utf-8", "replace")


def _plugin(metadata: bytes) -> bytes:
    return b"".join(_bytes(name) for data in fields(metadata).get(1, ()) for name in fields(_bytes(data)).get(1, ()))


def _of_tensor(tensor: bytes) -> float | None:
    """Return the only number of a tensor; None if it has several, or none."""
    parts = fields(tensor)
    kind = next((number for number in parts.get(1, ()) if isinstance(number, int)), 0)
    content = b"".join(map(_bytes, parts.get(4, ())))
    pieces = [(_DTYPES[kind], content)] if content and kind in _DTYPES else []
    pieces += [(kind, b"".join(map(_bytes, parts[field]))) for field, kind in _VALUES.items() if field in parts]
    for stored, raw in pieces:
        if len(raw) == np.dtype(stored).itemsize:
            return float(np.frombuffer(raw, stored)[0])
    return None


def _bytes(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else b""
