"""One log of numbers in every form in which programs keep it. A row is what the transformers Trainer logs at a step."""

import csv
import json
import sqlite3
import struct
import zlib

import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 2**15


def chunk(kind, data):
    """A chunk as LevelDB writes it: CRC-32 of kind and data, length, kind."""
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + data), len(data), kind) + data


def log_of(records):
    """The bytes of a run-*.wandb file with these records."""
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        rest, first = record, True
        while rest or first:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            out += chunk(
                {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not rest], part
            )
            first = False
    return bytes(out)


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number, value):
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def item(name, value):
    return field(1, field(2, name.encode()) + field(16, json.dumps(value).encode()))


def history(row, step):
    return field(2, b"".join(item(name, value) for name, value in row.items()) + field(2, field(1, step)))


def config(values):
    return field(17, field(1, b"r1") + field(4, b"".join(item(name, value) for name, value in values.items())))


def tracked(row):
    """What the callbacks of transformers hand to wandb and trackio."""
    step = {"train/global_step": row["step"]}
    return {**{f"train/{name}": value for name, value in row.items() if name != "step"}, **step}


def trainer_state(folder, rows):
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": rows[-1]["step"], "log_history": rows}))


def console(folder, rows):
    total = rows[-1]["step"]
    with (folder / "train.log").open("w") as file:
        for row in rows:
            file.write(
                f"{row['step']}/{total} [00:01<00:01, 1s/it]{ ({k: v for k, v in row.items() if k != 'step'}) }\n"
            )


def json_lines(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in map(tracked, rows)))


def scanned(folder, rows):
    history = [
        {"_step": n, "_timestamp": 1e9 + n, "h": {"_type": "histogram"}, **tracked(row)} for n, row in enumerate(rows)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))


def csv_table(folder, rows):
    with (folder / "history.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(tracked(rows[0])))
        table.writeheader()
        table.writerows(map(tracked, rows))


def charts(folder, rows):
    for name in (name for name in rows[0] if name != "step"):
        path = folder / f"wandb_export_{name.replace('/', '_')}.csv"
        with path.open("w", newline="") as file:
            table = csv.writer(file, quoting=csv.QUOTE_ALL)
            column = f"calm-1 - train/{name}"
            table.writerow(["train/global_step", column, f"{column}__MIN", f"{column}__MAX"])
            table.writerows([row["step"], *[row[name]] * 3] for row in rows)


def wandb_folder(folder, rows, options=None):
    run = folder / "run-20260101_000000-r1"
    run.mkdir()
    records = [config(options or {"beta": 0.0}), *(history(tracked(row), n) for n, row in enumerate(rows))]
    (run / "run-r1.wandb").write_bytes(log_of(records))
    (run / "files").mkdir()
    console(run / "files", rows)


def trackio(folder, rows, options=None):
    project({"calm-1": list(map(tracked, rows))}, folder / "project.db", options)


def project(runs, path, options=None):
    """A trackio project of some runs."""
    database = sqlite3.connect(path)
    database.execute(
        "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, "
        "run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL)"
    )
    database.execute(
        "CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL, "
        "config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id))"
    )
    for name, rows in runs.items():
        database.execute(
            "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, '')",
            (f"id-{name}", name, json.dumps({**(options or {"beta": 0.04}), "_Username": None}).encode()),
        )
        for step, row in enumerate(rows):
            database.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, '', ?, ?, ?)",
                (f"id-{name}", name, step, json.dumps(row).encode()),
            )
    database.commit()
    database.close()


def parquet(folder, rows):
    table = [{"_step": n, "_timestamp": 1e9 + n, **tracked(row)} for n, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(table), folder / "history.parquet")


def tensorboard(folder, rows):
    import pytest

    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    writer.add_text("args", "{}")
    for row in rows:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(f"train/{name}", value, row["step"], new_style=True)
    writer.close()


FORMS = (
    trainer_state,
    console,
    json_lines,
    scanned,
    csv_table,
    charts,
    wandb_folder,
    trackio,
    parquet,
    tensorboard,
)
