"""Hostile logs, journals and files of options: what is read beside a run, or in its place."""

import json
import struct
import zlib
from functools import cache

import pyarrow as pa
from fuzz import values

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.io.write.writer import metrics_table

LONG = (20, 4_301, 100_000)
_COMMANDS = (["info"], ["check", "--trainer", "trl"], ["check", "--trainer", "verl", "--set", "adv_estimator=grpo"])


def number_text(draw):
    """A number as nobody prints it."""
    digits = draw.choice("0179") * draw.choice(LONG)
    odd = [
        "1_000",
        "\u0661\u0662",
        "1e999",
        "-1",
        "nan",
        "inf",
        "0x10",
        "0b" + "1" * 5000,
        "1:1:1",
        "",
        digits,
        "-" + digits,
    ]
    return draw.choice([str(draw.randrange(9)), str(draw.random()), *odd])


def _trl(draw, step):
    names = ["loss", "grad_norm", "reward", "kl", draw.choice(values.TEXTS)]
    return "{" + ", ".join(f"'{name}': {number_text(draw)}" for name in names) + f", 'epoch': {step}}}"


def _verl(draw, step):
    return f"(pid) step:{draw.choice([step, number_text(draw)])} - critic/score:{number_text(draw)} - actor/loss:0.5"


def _slime(draw, step):
    return f"x] step {draw.choice([step, number_text(draw)])}: {{'train/loss': {number_text(draw)}, 'a': '\\d'}}"


def _noise(draw, step):
    bar = f"{number_text(draw)}/{number_text(draw)} [00:01<00:00]"
    long = draw.choice([" step 1: {", "1", "1/", "np.a(", "\x1b[0", "{'", "step:1 - ", "(", "[", "-", "0:"])
    return draw.choice([bar, f"{step}/9 [", "{'a': " + "[" * 300, long * draw.choice([1, 1000, 100_000 // len(long)])])


def console_logs(draw, folder):
    """What a trainer printed, with numbers that nobody prints and lines of any length."""
    kind = draw.choice([_trl, _verl, _slime])
    lines = [draw.choice([kind, kind, kind, _noise])(draw, step) for step in range(draw.randrange(1, 7))]
    text = draw.choice(["\n", "\n", "\r"]).join(lines)
    (folder / "t.log").write_text(text, encoding="utf-8", errors="surrogatepass")
    command, *more = draw.choice(_COMMANDS)
    return [command, "t.log", *more]


def tables(draw, folder):
    """CSV and JSON Lines of logged numbers, with names twice, rows that do not fit and numbers of every kind."""
    names = draw.choices(["step", "loss", "kl", "reward", "train/loss", "global_step", "", *values.TEXTS], k=4)
    names = draw.choice([names, ["step", *names]])
    count = draw.randrange(1, 5)
    if draw.random() < 0.5:
        rows = [
            [number_text(draw) for _ in range(max(0, len(names) + draw.choice([0, 0, 0, 1, -1])))] for _ in range(count)
        ]
        text = "".join(",".join(row) + "\n" for row in [names, *rows])
        name = "log.csv"
    else:
        cells = [
            [f"{json.dumps(name)}{draw.choice(['', ' '])}: {json.dumps(values.anything(draw))}" for name in names]
            for _ in range(count)
        ]
        text = "".join("{" + ", ".join(row) + "}\n" for row in cells)
        name = draw.choice(["log.jsonl", "run.metrics.jsonl"])
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    command, *more = draw.choice(_COMMANDS)
    return [command, name, *more]


def tensorboard(draw, folder):
    """Event files of scalars that are none."""
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    with (folder / "events.out.tfevents.1.x").open("wb") as file:
        writer = RecordWriter(file)
        for step in range(draw.randrange(1, 4)):
            tensor = tensor_pb2.TensorProto(
                dtype=draw.choice(types_pb2.DataType.values()),
                tensor_content=draw.randbytes(draw.choice([0, 1, 4, 8])),
                string_val=draw.choice([[], [b"text"]]),
                float_val=draw.choice([[], [], [0.5], [0.5, 1.5]]),
                tensor_shape=tensor_shape_pb2.TensorShapeProto(
                    dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)] * draw.choice([0, 0, 1, 3, 70])
                ),
            )
            kind = summary_pb2.SummaryMetadata(
                plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars")
            )
            value = summary_pb2.Summary.Value(tag=draw.choice(["loss", "train/kl", ""]), tensor=tensor, metadata=kind)
            if draw.random() < 0.2:
                value = summary_pb2.Summary.Value(tag="loss", simple_value=draw.choice([0.5, float("nan")]))
            event = event_pb2.Event(
                step=draw.choice([step, step, -1, 2**62]), summary=summary_pb2.Summary(value=[value])
            )
            writer.write(event.SerializeToString())
    command, *more = draw.choice(_COMMANDS)
    return [command, "events.out.tfevents.1.x", *more]


def entry(content):
    """An entry of a journal, with its mark, size and checksum."""
    return struct.pack("<4sQI", b"RDJ1", len(content), zlib.crc32(content)) + content


def _stream(table, compression=None):
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return buffer.getvalue().to_pybytes()


def _rows(draw, step):
    columns = {"step": [step] * 2, "split": ["train"] * 2, "group_id": ["a"] * 2, "reward": [0.0, 1.0]}
    columns |= {"response_mask": [[1], [1, 1]], "policy_log_probs": [[-0.5], [-0.5, -0.25]], "sample_id": ["0", "1"]}
    found = run_table(columns, where="fuzz")
    if draw.random() < 0.2:
        name = draw.choice(found.column_names)
        found = found.set_column(found.column_names.index(name), name, values.odd_column(draw, 2))
    return found


def journals(draw, folder):
    """Journals with sound checksums around what no recorder writes."""
    said = {
        "world_size": draw.choice([0, 2, 2**40, values.anything(draw)]),
        "ranks": draw.choice([[0], values.anything(draw)]),
    }
    header = RunMetadata("trl", "1.16.0", {"beta": 0.04}, recording=said).encode()
    entries = [_stream(pa.schema([]).empty_table().replace_schema_metadata(header))]
    for step in range(draw.randrange(1, 4)):
        try:
            entries.append(_stream(_rows(draw, step), draw.choice([None, None, None, "zstd", "lz4"])))
            split = draw.choice(["train", "train", "eval", "x", "\x1b[0m"])
            entries.append(_stream(metrics_table(draw.choice([step, -1]), split, {"loss": 0.5})))
        except (pa.ArrowException, ValueError):
            return None
        if draw.random() < 0.4:
            note = draw.choice(
                ['[[[1e999, "train"]], 0]', '[[["1", "x"]], 0]', json.dumps(values.anything(draw)), "[" * 9000]
            )
            entries.append(
                _stream(pa.schema([]).empty_table().replace_schema_metadata({"rolloutdoctor.dropped": note}))
            )
    (folder / "run.rank0.parquet.journal").write_bytes(b"".join(map(entry, entries)))
    path = draw.choice(["run.rank0.parquet.journal", ".", "run.rank*"])
    return draw.choice(
        [["check", path], ["info", path], ["check", "--each", path], ["check", path, "--follow", "--until-idle", "0"]]
    )


@cache
def _run():
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    columns = {"step": [0, 0], "group_id": ["a", "a"], "reward": [0.0, 1.0]}
    metadata = RunMetadata("trl", "1.16.0", {"beta": 0.0}).encode()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), buffer)
    return buffer.getvalue().to_pybytes()


def _yaml(draw):
    tags = (
        "int",
        "float",
        "bool",
        "timestamp",
        "null",
        "binary",
        "set",
        "omap",
        "pairs",
        "seq",
        "map",
        "str",
        "python/none",
    )
    value = draw.choice(
        ["''", "x", "[1]", "{a: 1}", "0b" + "1" * 100_000, ":".join("1" * 9_999), ".inf", number_text(draw)]
    )
    if draw.random() < 0.2:
        levels = [f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 9)}]}}" for i in range(1, 12)]
        return "\n".join(["l0: &l0 {x: 1}", *levels])
    key = draw.choice(["beta", "? [a, b]\n", "? {a: b}\n", number_text(draw), f"!!{draw.choice(tags)} x"])
    return f"{key}: !!{draw.choice(tags)} {value}" if draw.random() < 0.7 else f"{key}: {value}"


def _json(draw):
    return draw.choice(
        [
            '{"beta": ' + number_text(draw) + "}",
            '{"beta": 0, "beta": 1}',
            '{"beta": ' + "[" * 100_000,
            json.dumps({"k" * 10**6: {f"a{number}": 1 for number in range(10_000)}}),
            json.dumps({"reward_weights": values.anything(draw), "beta": values.anything(draw)}),
        ]
    )


def _baseline(draw):
    finding = {"code": "RDI001", "name": "x", "severity": "error", "cause": None}
    finding[draw.choice(list(finding))] = values.anything(draw)
    return draw.choice(
        ["[" * 100_000, json.dumps({"baseline": 1, "findings": [finding]}), json.dumps(values.anything(draw))]
    )


def option_files(draw, folder):
    """Files of options, versions and mappings."""
    (folder / "run.parquet").write_bytes(_run())
    files = {"c.yaml": _yaml(draw), "c.json": _json(draw), "b.json": _baseline(draw)}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    more = draw.choice(
        [
            ["--trainer-config", "c.yaml"],
            ["--trainer-config", "c.json"],
            ["--baseline", "b.json"],
            ["--trainer", f"trl@{number_text(draw)}"],
            ["--map", "step=" + "[" * 5000],
            [
                "--set",
                f"reward_weights={draw.choice(['[1', '1]', '(1,2', '[[1]]', '1e999', '1,nan', number_text(draw)])}",
            ],
            ["--set", f"beta={number_text(draw)}"],
        ]
    )
    return ["check", "run.parquet", *more]
