"""Values, cells and Arrow columns that a file may hold and should not."""

import datetime
import decimal
import math

import numpy as np
import pyarrow as pa

TEXTS = [
    "",
    "a",
    "train",
    "eval",
    "0",
    "007",
    "\x1b[31mred",
    "a\nb",
    "\u202eevil",
    "\x9b31m",
    "é" * 300,
    "@me https://x.y",
]
LONE = ["\ud800", "a\udfffb"]
NUMBERS = [0, 1, -1, 0.5, -0.0, 1e308, -1e308, 1e-320, math.inf, -math.inf, math.nan, 2**31, 2**53 + 1, 2**63, 10**30]


def scalar(draw):
    """Any value that JSON can write."""
    kind = draw.randrange(8)
    if kind == 0:
        return None
    if kind == 1:
        return draw.random() < 0.5
    if kind in (2, 3):
        return draw.choice(NUMBERS)
    if kind == 4:
        return draw.randrange(-3, 12)
    if kind == 5:
        return draw.uniform(-2, 2)
    return draw.choice(TEXTS + LONE)


def anything(draw, depth=2):
    """A value, or lists and objects of values."""
    if depth and draw.random() < 0.35:
        count = draw.randrange(4)
        if draw.random() < 0.5:
            return [anything(draw, depth - 1) for _ in range(count)]
        return {str(draw.choice([*TEXTS, "step", "value"])): anything(draw, depth - 1) for _ in range(count)}
    return scalar(draw)


def places(body, path=()):
    """Every place of a JSON value, inner ones too."""
    found = [path] if path else []
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return found + [place for key, value in inner for place in places(value, (*path, key))]


def edited(draw, body):
    """A JSON value of which one place is removed, renamed or replaced."""
    found = places(body)
    if not found:
        return body
    return _edit(body, draw.choice(found), draw)


def _edit(body, path, draw):
    copy = dict(body) if isinstance(body, dict) else list(body)
    if len(path) > 1:
        copy[path[0]] = _edit(copy[path[0]], path[1:], draw)
        return copy
    how = draw.randrange(5)
    if how == 0:
        del copy[path[0]]
    elif how == 1 and isinstance(copy, dict):
        copy[draw.choice(TEXTS)] = copy.pop(path[0])
    else:
        copy[path[0]] = anything(draw)
    return copy


def odd_types(draw, count):
    """What makes a column of each type that no contract names."""
    day = datetime.datetime(2024, 1, 2, 3, 4, 5)
    numbers = [draw.choice([0, 1, 2, None]) for _ in range(count)]
    lists = [[0, 1][: draw.randrange(3)] for _ in range(count)]
    return [
        lambda: pa.array(numbers, pa.int8()),
        lambda: pa.array(numbers, pa.uint64()),
        lambda: pa.array(numbers, pa.decimal128(10, 2)),
        lambda: pa.array([None if n is None else decimal.Decimal(n) for n in numbers], pa.decimal256(40, 1)),
        lambda: pa.array(np.array([0 if n is None else n for n in numbers], np.float16)),
        lambda: pa.array(numbers, pa.float32()),
        lambda: pa.array([None if n is None else bool(n) for n in numbers]),
        lambda: pa.array([None if n is None else str(n) for n in numbers]).dictionary_encode(),
        lambda: pa.array([None if n is None else float(n) for n in numbers]).dictionary_encode(),
        lambda: pa.array(numbers).dictionary_encode(),
        lambda: pa.array([None if n is None else b"\xff\x00" for n in numbers], pa.binary()),
        lambda: pa.array([b"ab"] * count, pa.binary(2)),
        lambda: pa.array([b"ab"] * count, pa.large_binary()),
        lambda: pa.array([day] * count, pa.timestamp("us")),
        lambda: pa.array([day] * count, pa.timestamp("ns", "UTC")),
        lambda: pa.array([day.date()] * count, pa.date32()),
        lambda: pa.array([day.time()] * count, pa.time64("us")),
        lambda: pa.array(numbers, pa.duration("ms")),
        lambda: pa.nulls(count),
        lambda: pa.array(lists, pa.large_list(pa.int16())),
        lambda: pa.array([[0, 1]] * count, pa.list_(pa.float64(), 2)),
        lambda: pa.array(lists, pa.list_(pa.float16())),
        lambda: pa.array(lists, pa.list_(pa.decimal128(10, 2))),
        lambda: pa.array([[]] * count, pa.list_(pa.null())),
        lambda: pa.array([[[1.0], []]] * count),
        lambda: pa.array([["a", None]] * count),
        lambda: pa.array([{"a": 1, "b": None, "": "x"}] * count),
        lambda: pa.array([{"\x1b[2J" * 9: 1.0}] * count),
        lambda: pa.array([[("a", 1.0), ("a", 2.0)]] * count, pa.map_(pa.string(), pa.float64())),
        lambda: pa.array([[("a", decimal.Decimal(1))]] * count, pa.map_(pa.string(), pa.decimal128(5))),
        lambda: pa.array([[(1, 1.0)]] * count, pa.map_(pa.int32(), pa.float64())),
        lambda: pa.array([{"a": {"b": 1.0}}] * count),
        lambda: pa.array(lists, pa.list_view(pa.int32())),
        lambda: pa.array(["x"] * count, pa.string_view()),
        lambda: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * count, pa.binary(16))),
        lambda: pa.array([[0, 1]] * count, pa.list_(pa.int64())).cast(pa.list_(pa.float32())),
        lambda: pa.array([[day]] * count),
    ]


def odd_column(draw, count):
    """A column of some odd type."""
    return draw.choice(odd_types(draw, count))()
