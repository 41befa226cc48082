"""Hostile dumps of every trainer, databases, notebooks, measured tables, plug-ins, and questions to `view`."""

import io
import json
import pickle
import shutil
import sqlite3
import tempfile
from functools import cache
from pathlib import Path

import log_files
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fuzz import values
from fuzz.harness import PLUGIN, run
from importers.importing import DATA
from importers.test_contract import DUMPS

from rolloutdoctor.importers.reading.pickles import Inert, load_inert
from rolloutdoctor.io.metadata import RunMetadata

SAMPLES = Path(__file__).parents[2] / "sample_data"
SKYRL = b"\x80\x02cskyrl\n_rebuild_tensor_batch\n0"
_OPCODES = b"()0NK}]\x85\x86\x87tuaeqhRbc.\x89\x8f\x90\x94"


def changed_bytes(draw, raw):
    """Some bytes overwritten, or the end cut off."""
    out = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 4])):
        if out:
            at = draw.randrange(len(out))
            part = draw.choice([bytes([draw.randrange(256)]), b"\xff" * 8, b"\0" * 8, draw.randbytes(4)])
            out[at : at + len(part)] = part
    return bytes(out[: draw.randrange(len(out) + 1)] if draw.random() < 0.2 else out)


def changed_json(draw, text):
    """A document, or lines, of which values are replaced; one may be a number or a text of any length."""
    lines = text.splitlines()
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(lines))
        try:
            body = json.loads(lines[at])
        except ValueError:
            continue
        odd = draw.choice(["[" * 9_000, "9" * 4_301, '"' + "x" * 100_000 + '"', "1e400", "[" + "[]," * 50_000 + "[]]"])
        edited = json.dumps(values.edited(draw, body))
        lines[at] = edited if draw.random() < 0.85 else edited.replace("null", odd, 1).replace("0", odd, 1)
    how = draw.randrange(8)
    if how == 0:
        lines *= draw.choice([2, 50])
    elif how == 1:
        lines = lines[: draw.randrange(len(lines) + 1)]
    text = "\n".join(lines) + draw.choice(["\n", ""])
    return (text[: draw.randrange(len(text) + 1)] if how == 2 else text).encode("utf-8", "surrogatepass")


def changed_parquet(draw, raw):
    """A table with a column of another type, without one, or with one twice."""
    found = pq.read_table(io.BytesIO(raw))
    at = draw.randrange(found.num_columns)
    name = found.column_names[at]
    how = draw.randrange(5)
    if how == 0:
        found = found.remove_column(at)
    elif how == 1:
        found = found.append_column(name, found.column(at))
    elif how == 2:
        found = found.slice(0, draw.randrange(3))
    elif how == 3:
        found = pa.concat_tables([found] * draw.choice([2, 40]))
    else:
        found = found.set_column(at, name, values.odd_column(draw, len(found)))
    out = io.BytesIO()
    try:
        pq.write_table(found, out, row_group_size=draw.choice([None, 1, 3]))
    except (pa.ArrowException, ValueError):
        return raw
    return out.getvalue()


def changed_object(draw, body, depth=3):
    """A value of torch or of a pickle, of which one place is replaced."""
    from fuzz.examples import odd_object

    if depth and isinstance(body, (dict, list)) and body and draw.random() < 0.9:
        copy = dict(body) if isinstance(body, dict) else list(body)
        key = draw.choice(list(copy)) if isinstance(copy, dict) else draw.randrange(len(copy))
        how = draw.random()
        if how < 0.1:
            del copy[key]
        elif how < 0.2:
            copy[key] = body
        else:
            copy[key] = changed_object(draw, copy[key], depth - 1)
        return copy
    return draw.choice([odd_object, lambda draw: values.anything(draw, 3)])(draw)


def changed_torch(draw, raw):
    """A file of torch.save with odd objects in it, or with other instructions in its pickle."""
    body = torch.load(io.BytesIO(raw), weights_only=True)
    for _ in range(draw.choice([1, 1, 2])):
        body = changed_object(draw, body)
    out = io.BytesIO()
    try:
        torch.save(body, out)
    except Exception:  # what cannot be written is no input
        return raw
    return out.getvalue()


def _without_names(value):
    """The same with None for what stands for a class."""
    if isinstance(value, dict):
        return {key: _without_names(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_names, value))
    return None if isinstance(value, Inert) else value


def changed_skyrl(draw, raw):
    """A training input with other fields, sizes or bounds, or with other instructions."""
    state = _without_names(load_inert(io.BytesIO(raw), {"_rebuild_tensor_batch": lambda kind, state: state}))
    part = draw.choice(["batch_dict", "metadata"])
    field = draw.choice(list(state[part]))
    if part == "batch_dict" and isinstance(state[part][field], dict) and draw.random() < 0.7:
        sizes = [(2**28, 0), (0,), (1, -1), (2**62, 2**62), [], None, ("a",), (2, 3, 4), (-1, -1)]
        one = {
            "shape": draw.choice(sizes),
            "dtype": draw.choice(["float128", "object", "bool", "int999999999", "float32", "uint8", 3]),
            "data": draw.choice([b"", b"\1" * 7, b"\1" * 2**16, "text", None]),
            "format": draw.choice(["torch", None, "numpy"]),
        }
        key = draw.choice(list(one))
        state[part][field] = {**state[part][field], key: one[key]}
    else:
        pairs = [(draw.randrange(-2, 9), draw.choice([0, 3, 2**62])) for _ in range(draw.choice([1, 4, 2000]))]
        state[part][field] = draw.choice([pairs, [[0, 3], [3, 5]], values.anything(draw, 3)])
    return SKYRL + pickle.dumps(state, draw.choice([2, 4, 5]))[2:]


def changed_pickle(draw, raw):
    """Instructions among which others are put in, and numbers in them that say more than there is."""
    out = bytearray(raw)
    for _ in range(draw.choice([1, 2, 8])):
        at = draw.randrange(2, len(out))
        part = bytes(draw.choice(_OPCODES) for _ in range(draw.choice([1, 2, 60])))
        out[at : at + draw.choice([0, 0, 4])] = draw.choice(
            [part, b"h\0" * 40, b"r\xff\xff\xff\x0f", b"X\xff\xff\xff\x7f"]
        )
    return bytes(out)


CHANGES = {
    ".jsonl": changed_json,
    ".json": changed_json,
    ".parquet": changed_parquet,
    ".pt": changed_torch,
    ".pkl": changed_skyrl,
}


def trainer_dumps(draw, folder):
    """A dump of any trainer, of which a file or two are changed as their kind allows, or by their bytes."""
    from fuzz.examples import command_line

    dump = draw.choice(sorted(DUMPS))
    target = folder / "dump"
    target.mkdir()
    for name in DUMPS[dump]:
        whole = DATA / name
        if whole.is_dir():
            shutil.copytree(whole, target, dirs_exist_ok=True)
        else:
            shutil.copy(whole, target)
    files = sorted(path for path in target.rglob("*") if path.is_file() and path.stat().st_size)
    for file in draw.sample(files, min(len(files), draw.choice([1, 1, 2]))):
        raw, how = file.read_bytes(), draw.random()
        change = CHANGES.get(file.suffix)
        if how < 0.25 or change is None:
            file.write_bytes(changed_bytes(draw, raw))
        elif how < 0.4 and file.suffix == ".pkl":
            file.write_bytes(changed_pickle(draw, raw))
        else:
            file.write_bytes(change(draw, raw.decode() if change is changed_json else raw))
    if draw.random() < 0.1:
        (target / "latest").symlink_to(".")
    words = command_line(draw, "dump", ("check", "check", "convert", "info"))
    name = dump.partition(",")[0]
    return [*words, "--from", name] if draw.random() < 0.3 else words


def _odd_metrics(draw, step):
    row = {"train/global_step": step, "train/loss": 0.5, "train/reward": 0.25, "train/grad_norm": 1.0}
    text = json.dumps(values.edited(draw, row) if draw.random() < 0.3 else row)
    return draw.choice([text] * 8 + [text.encode(), b"\xff\xfe", None, 3, "[" * 9_000, "", "{" * 100])


def trackio(draw, folder):
    """A trackio project with runs of any names, metrics of any kind, other tables, and damaged pages."""
    from fuzz.examples import command_line

    path = folder / "p.db"
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA page_size = {draw.choice([512, 1024, 4096])}")
        kind = draw.choice(["TEXT", "BLOB", "", "INTEGER"])
        columns = (
            f"id INTEGER PRIMARY KEY, run_id {kind}, timestamp TEXT, run_name {kind}, step INTEGER, metrics {kind}"
        )
        database.execute(f"CREATE TABLE metrics ({columns})")
        database.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_id TEXT, run_name TEXT, config TEXT)")
        if draw.random() < 0.5:
            database.execute("CREATE INDEX idx ON metrics (run_name, step)")
        names = [
            draw.choice([*values.TEXTS, "a/b", b"\xff", None, 3, "x" * 9_000]) for _ in range(draw.choice([1, 1, 2]))
        ]
        for step in range(draw.choice([1, 8, 60])):
            row = (draw.choice(names), "", draw.choice(names), draw.choice([step, step, -1, None, "x", 2**62]))
            cells = (*row, _odd_metrics(draw, step))
            database.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?,?,?,?,?)", cells
            )
        text = draw.choice(['{"beta": 0.04}', "[", "{}", json.dumps({"beta": values.anything(draw)})])
        database.execute("INSERT INTO configs (run_id, run_name, config) VALUES (?, ?, ?)", (names[0], names[0], text))
    database.close()
    raw = path.read_bytes()
    if draw.random() < 0.6:
        out = bytearray(raw)
        for _ in range(draw.choice([1, 1, 3, 20])):
            # Headers of pages say what their children are.
            at = draw.choice([draw.randrange(len(out)), draw.randrange(0, len(out), 512) + draw.randrange(40)])
            out[at] = draw.choice([0, 1, 2, 5, 13, 255, draw.randrange(256)])
        path.write_bytes(out)
    if draw.random() < 0.1:
        (folder / "p.db-wal").write_bytes(draw.randbytes(200))
    given = draw.choice(["p.db", "p.db", ".", "p.db/a"])
    return command_line(draw, given, ("check", "check", "info"))


def _odd_record(draw, record):
    """A message whose checksum is right, with other bytes, cut, or in itself many times over."""
    how = draw.randrange(4)
    if how == 0:
        return changed_bytes(draw, record)
    if how == 1:
        return log_files.history(values.edited(draw, {"loss": 0.5, "reward": 0.25}), draw.choice([0, 2**63 - 1]))
    if how == 2:
        for _ in range(draw.choice([3, 2_000])):
            record = log_files.field(2, record)
    return record * draw.choice([1, 2, 400])


def wandb_runs(draw, folder):
    """A folder of wandb, whose records, blocks or files are changed."""
    from fuzz.examples import command_line

    (folder / "wandb").mkdir()
    rows = [{"loss": 0.5, "reward": 0.25, "grad_norm": 1.0, "step": step} for step in range(draw.choice([1, 8, 60]))]
    log_files.wandb_folder(folder / "wandb", rows)
    (run_folder,) = (folder / "wandb").iterdir()
    records = [log_files.config({"beta": 0.04}), *(log_files.history(row, n) for n, row in enumerate(rows))]
    for _ in range(draw.choice([0, 1, 3])):
        at = draw.randrange(len(records))
        records[at] = _odd_record(draw, records[at])[: 2**20]
    raw = log_files.log_of(records)
    (run_folder / "run-r1.wandb").write_bytes(changed_bytes(draw, raw) if draw.random() < 0.3 else raw)
    for name in ("config.yaml", "wandb-summary.json"):
        text = draw.choice(['{"loss": 0.5}', "[" * 9_000, "a: &a [*a]", json.dumps(values.anything(draw))])
        (run_folder / "files" / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    given = draw.choice(["wandb", ".", f"wandb/{run_folder.name}", f"wandb/{run_folder.name}/run-r1.wandb"])
    return command_line(draw, given, ("check", "check", "info"))


def notebooks(draw, folder):
    """A notebook with outputs of every kind, of which places are replaced."""
    lines = ["{'loss': 0.5, 'reward': 0.25, 'grad_norm': 1.0, 'epoch': 0.1}\n"] * draw.choice([1, 6])
    table = "<table><tr><th>Step</th><th>Training Loss</th><th>reward</th></tr>" + "".join(
        f"<tr><td>{step}</td><td>0.5</td><td>{draw.choice(['0.25', 'nan', '', 'x', '9' * 400])}</td></tr>"
        for step in range(4)
    )
    code = "args = GRPOConfig(beta=0.04, num_generations=8, output_dir='x')\ntrainer = GRPOTrainer(args=args)\n"
    odd = draw.choice(
        [code, "x = " + "(" * 9_000, "GRPOConfig(" * 3_000, "GRPOConfig(**{" + "'a': [" * 500, "\0", "def"]
    )
    cells = [
        {
            "cell_type": "code",
            "source": [code, odd],
            "outputs": [{"output_type": "stream", "name": "stdout", "text": lines}],
        },
        {"cell_type": "code", "source": odd, "outputs": [{"data": {"text/html": [table], "text/plain": "x"}}]},
        {"cell_type": "markdown", "source": ["# GRPO\n", table]},
    ]
    body = {"cells": cells * draw.choice([1, 1, 30]), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        body = values.edited(draw, body) if isinstance(body, (dict, list)) and body else body
    text = json.dumps(body, indent=draw.choice([None, 1]))
    if draw.random() < 0.15:
        text = text[: draw.randrange(len(text))]
    (folder / "n.ipynb").write_text(text, encoding="utf-8", errors="surrogatepass")
    return [draw.choice(["check", "info", "identify", "why"]), draw.choice(["n.ipynb", "n.ipynb", "."])]


def small_run(folder):
    """A run of three steps."""
    rows = 12
    lists = pa.array([[-0.5, -0.25]] * rows, pa.list_(pa.float32()))
    cells = {
        "step": pa.array([row // 4 for row in range(rows)]),
        "group_id": pa.array([str(row // 2) for row in range(rows)]),
        "reward": pa.array([float(row % 3 == 0) for row in range(rows)]),
        "response_mask": pa.array([[1, row % 2] for row in range(rows)], pa.list_(pa.uint8())),
        "old_log_probs": lists,
        "ref_log_probs": lists,
        "advantage": pa.array([0.5] * rows),
    }
    found = pa.table(cells).replace_schema_metadata(RunMetadata("trl", "1.16.0", {"beta": 0.04}).encode())
    pq.write_table(found, folder / "run.parquet")


@cache
def _measured():
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        small_run(folder)
        code, _, err, _ = run(["export", "--what", "tables", "run.parquet", "-o", "tables"], folder)
        assert code in (0, 1), err
        return {path.name: path.read_bytes() for path in (folder / "tables").iterdir()}


def changed_frame(draw, raw):
    """A table of ours with a column of another type, name or order, fewer rows, or odd values."""
    frame = pl.read_parquet(raw)
    how, name = draw.randrange(6), draw.choice(frame.columns)
    if how == 0:
        frame = frame.drop(name)
    elif how == 1:
        frame = frame.head(draw.randrange(3))
    elif how == 2:
        frame = frame.rename({name: draw.choice([*values.TEXTS[1:], "step2"])}, strict=False)
    elif how == 3:
        frame = frame.with_columns(pl.lit(draw.choice([None, "x", -1, float("nan"), 2**62, [1]])).alias(name))
    elif how == 4:
        frame = pl.concat([frame] * draw.choice([2, 9]))
    else:
        frame = frame.sample(fraction=1.0, shuffle=True, seed=draw.randrange(99))
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def measured_tables(draw, folder):
    """Tables of `measure`, of which one or the manifest is changed."""
    (folder / "tables").mkdir()
    files = dict(_measured())
    for name in draw.sample(sorted(files), draw.choice([1, 1, 2])):
        if draw.random() < 0.25:
            files[name] = changed_bytes(draw, files[name])
        elif name.endswith(".parquet"):
            files[name] = changed_frame(draw, files[name])
        else:
            files[name] = changed_json(draw, files[name].decode())
    for name, content in files.items():
        (folder / "tables" / name).write_bytes(content)
    command = draw.choice(
        [["check"], ["check"], ["merge"], ["why"], ["report", "-o", "o.html"], ["plot", "overview", "-o", "o.png"]]
    )
    return [
        *command[:1],
        *(["overview"] if command[0] == "plot" else []),
        "tables",
        *command[1 + (command[0] == "plot") :],
    ]


_PLUGIN_CODES = [
    "raise SystemExit(0)",
    "def f(): f()\nf()",
    "import sys; sys.setrecursionlimit(10**6)\nRULE = 1",
    "RULE = type('R', (), {'code': property(lambda self: 1 / 0), 'name': 'x'})()",
    "RULE = IMPORTER = TRAINER = type('R', (), {'code': 3, 'name': None, 'detect': 1, 'read': 2})()",
    "class R:\n    code, name = 'RDX999', '\\x1b[2J'\n    def __getattr__(self, name): raise MemoryError\n"
    "RULE = IMPORTER = TRAINER = R()",
    "class R:\n    name = 'mine'\n    def detect(self, path): raise ValueError('x')\n    def read(self, *given): pass\n"
    "IMPORTER = R()",
    "RULE = IMPORTER = TRAINER = __import__('threading').Lock()",
    "raise ImportError('\\x1b[31m' * 999)",
    "syntax error(",
]


def plugins(draw, folder):
    """An installed package that offers what is no rule, trainer or importer."""
    info = folder / "site" / "odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    group = draw.choice(["rules", "trainers", "importers"])
    name = draw.choice(["odd", "odd thing", "RDI001", "trl", "x" * 500, "\u202eodd"])
    attribute = {"rules": "RULE", "trainers": "TRAINER", "importers": "IMPORTER"}[group]
    where = draw.choice([f"odd:{attribute}", f"odd:{attribute}", "odd", "nowhere:X", "odd:", "odd:A.B"])
    (info / "entry_points.txt").write_text(f"[rolloutdoctor.{group}]\n{name} = {where}\n", encoding="utf-8")
    (folder / "site" / "odd.py").write_text(draw.choice(_PLUGIN_CODES))
    small_run(folder)
    return [
        PLUGIN,
        *draw.choice([["check", "run.parquet"], ["info", "run.parquet"], ["explain", "trainers"], ["check", "."]]),
    ]


def view_questions(draw, folder):
    """A run, for the page of `view`, and questions to it: paths, parameters, methods and headers."""
    shutil.copy(SAMPLES / draw.choice(["healthy.parquet", "verl_rejected.parquet"]), folder / "run.parquet")
    if draw.random() < 0.5:
        from fuzz.examples import write_run

        if write_run(draw, folder) is None:
            return None
    odd = [*values.TEXTS, "%00", "%ff", "..", "9" * 5_000, "-1", "1e9", "a" * 60_000, "0&step=1", "%F0%9F", "[", "nan"]

    def word():
        return (
            draw.choice([*odd, str(draw.randrange(4))])
            .encode("utf-8", "surrogatepass")
            .replace(b" ", b"+")
            .decode("latin1")
        )

    asked = []
    for _ in range(6):
        page = draw.choice(["step", "group", "overview", "judged", "against", word()])
        query = "&".join(
            f"{draw.choice(['step', 'split', 'group', 'fix', word()])}={word()}" for _ in range(draw.randrange(4))
        )
        method = draw.choice(["GET", "GET", "GET", "POST", "HEAD", word()])
        version, more = draw.choice([0, 1, 9]), draw.choice(["", "X: y\r\n"])
        first = f"{method} {{prefix}}api/{page}?{query} HTTP/1.{version}"
        asked.append(f"{first}\r\nHost: {{host}}\r\n{more}\r\n")
    (folder / "asked.json").write_text(json.dumps(asked))
    return ["view", "run.parquet", "--no-browser"]


def more_states(draw, folder):
    """A state of which a frame is changed."""
    from fuzz.examples import _state

    from rolloutdoctor.io.archives import archived

    members = dict(draw.choice(_state()))
    frames = [name for name in members if name.endswith(".parquet")]
    for name in draw.sample(frames, min(len(frames), draw.choice([1, 2]))):
        change = draw.choice([changed_frame, changed_frame, changed_bytes])
        members[name] = change(draw, members[name])
    if draw.random() < 0.2:
        members.pop(draw.choice(sorted(members)))
    (folder / "a.state").write_bytes(archived(members))
    return ["merge", "a.state", "--format", draw.choice(["full", "json", "markdown"])]


def _line(draw, step):
    number = draw.choice(["0.5", "nan", "inf", "-1e-3", "1e999", "", "x", "9" * 400, "None", "tensor(0.5)"])
    names = ["loss", "reward", "kl", "grad_norm", "lr", draw.choice(values.TEXTS)]
    pairs = [(name, number) for name in draw.sample(names, draw.randrange(2, 6))]
    return draw.choice(
        [
            f"step {step}: " + ", ".join(f"{name} {value}" for name, value in pairs),
            f"Step {step}/{draw.choice([9, 0, '9' * 30])} | " + " | ".join(f"{name}: {value}" for name, value in pairs),
            f"[{step}] " + " ".join(f"{name}={value}" for name, value in pairs),
            f"iteration {step:8}/ 100 | consumed samples: 8 | lm loss: {number} | grad norm: {number} |",
            f"step:{step} - " + " - ".join(f"actor/{name}:{value}" for name, value in pairs),
            json.dumps({"step": step, **dict(pairs)}),
            str({**dict(pairs), "epoch": step}),
            f"========== Step {step} ==========\n" + "\n".join(f"  • {name}: {value}" for name, value in pairs),
            f"wandb: {draw.choice(names)} {number}",
            f"<tr><td>{step}</td><td>{number}</td></tr>",
            f"| {step} | {number} | {number} |",
            f"{step},{number},{number}",
            f"\x1b[32mINFO\x1b[0m Training {number}/{step} [00:0{step}<00:01, loss={number}]",
            draw.choice(["{", "'", "(", "[", "|", "=", ":", "\t", "<td>", "\0", "a=1 "]) * draw.choice([1, 50, 30_000]),
        ]
    )


def any_log(draw, folder):
    """Lines of every kind that trainers and people print, mixed."""
    head = draw.choice(
        [
            "",
            "| step | loss | reward |\n|---|---|---|\n",
            "step,loss,reward\n",
            "wandb: Run summary:\n",
            "{'actor_rollout_ref': {'a': 1,\n",
        ]
    )
    if draw.random() < 0.5:
        lines = [_line(draw, step) for step in range(draw.choice([2, 8, 40]))]
    else:
        state = draw.getstate()
        lines = []
        for step in range(draw.choice([2, 8, 40])):
            draw.setstate(state)
            lines.append(_line(draw, step))
    text = head + draw.choice(["\n", "\n", "\r\n", "\r"]).join(lines)
    name = draw.choice(["train.log", "train.log", "out.txt", "t.md", "t.csv", "t.tsv", "t.json", "t.jsonl"])
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return [draw.choice(["check", "info", "identify", "why"]), draw.choice([name, name, "."])]


KINDS = {
    "trainer_dumps": (trainer_dumps, 8),
    "trackio": (trackio, 3),
    "wandb_runs": (wandb_runs, 2),
    "notebooks": (notebooks, 3),
    "measured_tables": (measured_tables, 3),
    "more_states": (more_states, 2),
    "any_log": (any_log, 5),
    "plugins": (plugins, 1),
    "view_questions": (view_questions, 1),
}
