"""Whatever a dump or a log holds, a command ends by itself: in 20 s of CPU, 2 GB, and heeding signals all the time."""

import json
import pickle
import re
import shutil
import sqlite3
import struct
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from forked import CPU_SECONDS, taken
from importers.importing import DATA
from importers.test_contract import DUMPS

from rolloutdoctor.importers.reading.pickles import check_pickle
from rolloutdoctor.importers.table import IMPORTERS

LONGEST_DEAF = 1.0
"""CPU seconds in which no signal is heeded."""

PUT, GET = b"q", b"h"
TWICE = GET + b"\0" + GET + b"\0"
"""Fetches one value two times."""

PICKLES = {
    "a key that takes 2^45 steps": b"}()" + b"".join(b"q\0h\0\x86" for _ in range(45)) + b"Nu.",
    "tuples in a set": b"\x8f()" + b"".join(b"q\0h\0\x86" for _ in range(45)) + b"\x90.",
    "a memo of 2^28 places": b"Nr\0\0\0\x10.",
    "bytes that are not there": b"\x8e" + struct.pack("<Q", 2**40) + b"ab.",
    "a frame that is not there": b"\x95" + struct.pack("<Q", 2**40) + b"N.",
    "tuples a million deep": b"N" + b"\x85" * 10**6 + b".",
    "marks a million deep": b"(" * 10**6,
    "a list in itself": b"]q\0h\0a.",
    "lists in each other": b"]q\0]q\1h\0ah\1h\0a.",
    "lists that hold each other": b"]q\0" + b"".join(b"](" + TWICE + b"eq\0" for _ in range(45)) + b".",
    "dicts that hold each other": b"}q\0" + b"".join(b"}(K\1h\0K\2h\0uq\0" for _ in range(45)) + b".",
    "a number of a million digits": b"\x8b" + struct.pack("<I", 500_000) + b"\x7f" * 500_000 + b".",
    "a code of another pickle": b"\x82\x01.",
    "nothing": b"",
    "no end": b"]q\0",
    "more than there is": b"\x86.",
}


def shared_many_times(count):
    """A list of 4,095 numbers that is in another one so many times."""
    return b"\x80\x02](" + b"K\1" * 4095 + b"eq\0](" + b"h\0" * count + b"e."


@pytest.fixture
def ended(started, tmp_path):
    """Run a command in the folder of the test, and check that it ended by itself, in words, in time."""

    def run(*words, codes=(0, 1, 2, 3)):
        report = tmp_path.parent / f"{tmp_path.name}.report"
        out, err = (program := started(*words, cwd=tmp_path, report=report)).communicate()
        seconds, _, deaf = taken(report)
        assert program.wait() in codes, (words, err[-600:])
        assert "internal error" not in err, (words, err[-600:])
        assert "out of memory" not in err + out, (words, err[-600:])
        assert not re.search(r"Warning: |\\udc", err + out), (words, err[-600:])
        assert seconds < CPU_SECONDS
        assert deaf < LONGEST_DEAF, (words, deaf)
        return out + err

    return run


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_followed_before_it_is_loaded(name):
    with pytest.raises(ValueError, match=r"^its? "):
        check_pickle(b"\x80\x02" + PICKLES[name] if name != "nothing" else b"")


def test_a_list_in_many_places_is_a_matter_of_their_number():
    # Numbers count by their bytes.
    least = 2**24 // (2 * 4095 + 3)
    check_pickle(shared_many_times(least))
    with pytest.raises(ValueError, match="many times over"):
        check_pickle(shared_many_times(least + 10))


def test_as_deep_as_is_read():
    check_pickle(b"\x80\x02N" + b"\x85" * 100 + b".")
    with pytest.raises(ValueError, match="more than 100 levels"):
        check_pickle(b"\x80\x02N" + b"\x85" * 101 + b".")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_python_pickles_is_accepted(protocol):
    row = {"tokens": list(range(3000)), "log_probs": [0.5, None, -1e9] * 999, "text": "é" * 300, "raw": b"a" * 70_000}
    body = [{**row, "shared": row, "pair": (row, row), "set": {1, 2}, "frozen": frozenset("ab")} for _ in range(9)]
    check_pickle(pickle.dumps(body, protocol))


def in_torch_file(path, body):
    """A file of torch.save with another pickle in it."""
    source = DATA / "slime" / "train_data" / "0.pt"
    with zipfile.ZipFile(source) as real, zipfile.ZipFile(path, "w") as archive:
        for name in real.namelist():
            archive.writestr(name, body if name.endswith("data.pkl") else real.read(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", PICKLES)
def test_dumps_that_are_pickles(ended, tmp_path, name):
    mark = b"\x80\x02cskyrl\n_rebuild_tensor_batch\n0"
    for place in ("slime/train_data", "miles/train_data", "trl"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "global_step_1_training_input.pkl").write_bytes(mark + PICKLES[name])
    in_torch_file(tmp_path / "slime" / "train_data" / "0.pt", b"\x80\x02" + PICKLES[name])
    in_torch_file(tmp_path / "miles" / "train_data" / "0_0.pt", b"\x80\x02" + PICKLES[name])
    in_torch_file(tmp_path / "trl" / "training_args.bin", b"\x80\x02" + PICKLES[name])
    (tmp_path / "trl" / "train.log").write_text("{'loss': 0.5, 'reward': 0.25, 'epoch': 0.5}\n")
    assert "not a readable pickle" in ended("check", "global_step_1_training_input.pkl", codes=[2])
    for dump in ("slime", "miles"):
        assert "not a pickle of a dump" in ended("check", dump, codes=[2])
    ended("check", "trl")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_mask": ((2**28, 0), b"")},
        {"response_mask": ((2,), b"\1\1")},
        {"sequences": ((4,), b"\1\1\1\1")},
        {"sequences": ((1, 2, 2), b"\1\1\1\1")},
        {"sequences": ((1, 4), b"\1\1\1\1")},
        {"action_log_probs": ((2**62, 2**62), b"\1\1\1\1")},
        {"metadata": {"policy_mini_batch_boundaries": [(0, 2)] * 100_000}},
        {"metadata": {"policy_prompt_boundaries": [(0, 1), (1, 2**62)]}},
        {"metadata": {"pad_size": 2}},
        {"metadata": {"pad_size": True}},
    ],
)
def test_arrays_that_are_not_what_they_say(ended, tmp_path, fields):
    def array(shape, data):
        return {"format": "numpy", "dtype": "uint8", "shape": shape, "data": data}

    names = ("response_mask", "loss_mask", "sequences", "attention_mask")
    arrays = dict.fromkeys(names, ((2, 2), b"\1\1\1\1"))
    metadata = fields.pop("metadata", {})
    arrays |= fields
    if "response_mask" in fields:
        arrays["loss_mask"] = fields["response_mask"]
    if "sequences" in fields:
        arrays["attention_mask"] = fields["sequences"]
    state = {"batch_dict": {name: array(*each) for name, each in arrays.items()}, "metadata": metadata}
    body = pickle.dumps(state, 2)[2:-1]
    mark = b"\x80\x02cskyrl\n_rebuild_tensor_batch\n0"
    (tmp_path / "global_step_1_training_input.pkl").write_bytes(mark + body + b".")
    ended("export", "--what", "run", ".", "-o", "run.parquet")


DEEP = "[" * 100_000
VALUES = [DEEP, '"x"', "-1", "1e999", "9" * 4301, "[[1],[2,[3]]]", '{"a":{"b":[]}}', "[" + "0," * 99_999 + "0]", "null"]


def hostile_lines(text):
    """JSON Lines, of which each has one field of another kind, or is torn, or repeats another."""
    row = next(line for line in text.splitlines() if line.strip())
    body = json.loads(row)
    names = list(body) if isinstance(body, dict) else []
    yield row[: len(row) // 2] + "\n"
    yield (row + "\n") * 300
    for number, changed in enumerate(names):
        for value in (VALUES[number % len(VALUES)], VALUES[(number + 4) % len(VALUES)]):
            fields = (f"{json.dumps(name)}:{value if name == changed else json.dumps(body[name])}" for name in names)
            yield "{" + ",".join(fields) + "}\n"


def cut_and_changed(raw):
    """The bytes of a file, cut, and with a part overwritten by what declares much."""
    yield raw[: len(raw) // 2]
    for start in range(0, len(raw), max(1, len(raw) // 5)):
        yield raw[:start] + b"\xff" * 16 + raw[start + 16 :]


def folder_of(tmp_path, sources):
    """A copy of a dump, with links that lead back to it."""
    target = tmp_path / "dump"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in sources:
        whole = DATA / name
        if whole.is_dir():
            shutil.copytree(whole, target, dirs_exist_ok=True)
        else:
            shutil.copy(whole, target)
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        for name in ("0", "latest"):
            (folder / name).exists() or (folder / name).symlink_to(".")
    return target


def files_in(folder):
    """Its files, without those that links repeat."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_every_importer_is_tried():
    tried = {name.partition(",")[0] for name in DUMPS}
    absent = {each.name for each in IMPORTERS} - {"journal", "mapped", "responses"} - tried
    assert not absent, f"{absent}: a line each in DUMPS of importers/test_contract.py"
    assert tried <= {each.name for each in IMPORTERS}


@pytest.mark.slow
@pytest.mark.parametrize("dump", sorted(DUMPS, key=lambda dump: dump != "skyrl"))
def test_every_importer_ends(ended, tmp_path, dump):
    target = folder_of(tmp_path, DUMPS[dump])
    ended("check", "dump", codes=[0, 1, 3])
    ended("check", "--each", "dump")
    kinds = {}
    for file in files_in(target):
        kinds.setdefault((file.suffix, re.sub("[0-9]+", "0", file.name)), file)
    for file in kinds.values():
        raw = file.read_bytes()
        changed = list(cut_and_changed(raw))
        if file.suffix == ".jsonl":
            changed = [text.encode() for text in hostile_lines(raw.decode())]
        for number, content in enumerate(changed):
            file.write_bytes(content)
            ended(*(["check", "dump"] if number < 3 else ["export", "--what", "run", "dump", "-o", "run.parquet"]))
        file.write_bytes(raw)


def test_a_column_that_is_there_twice_is_one_sentence(ended, tmp_path):
    source = next((DATA / "trl" / "mixed").rglob("completions_*.parquet"))
    table = pq.read_table(source)
    name = table.column_names[3]
    pq.write_table(table.append_column(name, table.column(3)), tmp_path / source.name)
    assert f"two columns are called {name}; keep one of them" in ended("check", source.name, codes=[2])


def trackio_tree(path):
    """A database of 100 kB, the table of which has 10^12 rows: its pages are children of each other."""
    size = 4096
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA page_size = {size}")
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        rows = [('{"loss": 0.1, "x": "' + "y" * 3000 + '"}',)] * 400
        database.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES ('r', 1, ?)", rows)
        root = database.execute("SELECT rootpage FROM sqlite_master").fetchone()[0]
    database.close()
    raw = path.read_bytes()
    page = raw[(root - 1) * size : root * size]
    (count,) = struct.unpack(">H", page[3:5])
    cells = [struct.unpack(">H", page[12 + 2 * each : 14 + 2 * each])[0] for each in range(count)]
    (leaf,) = struct.unpack(">I", page[cells[0] : cells[0] + 4])

    def inner(child):
        changed = bytearray(page)
        for cell in [*cells, 8]:
            changed[cell : cell + 4] = struct.pack(">I", child)
        return bytes(changed)

    out, child = bytearray(raw[: max(root, leaf) * size]), leaf
    for _ in range(8):
        out += inner(child)
        child = len(out) // size
    out[(root - 1) * size : root * size] = inner(child)
    out[28:32] = struct.pack(">I", len(out) // size)
    path.write_bytes(out)


def many_runs(path):
    """A project of 60,000 runs, of which none is named."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        rows = [(f"r{number}", '{"loss": 0.1}') for number in range(60_000)]
        database.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, 1, ?)", rows)
    database.close()


def name_of_bytes(path):
    """A column, and a table, of names that are not UTF-8."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        database.execute("CREATE TABLE placeholder (a)")
    database.close()
    path.write_bytes(path.read_bytes().replace(b"placeholder", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6\xf5"))


@pytest.mark.parametrize("make", [trackio_tree, name_of_bytes])
def test_databases_that_no_program_writes(ended, tmp_path, make):
    make(tmp_path / "p.db")
    for command in ("info", "check"):
        assert "p.db" in ended(command, "p.db", codes=[2])


def test_of_many_runs_one_has_to_be_named(ended, tmp_path):
    many_runs(tmp_path / "p.db")
    assert "60,000 trackio runs (r0, r1, r2, ...)" in ended("info", "p.db", codes=[2])
    ended("info", "p.db/r7", codes=[0])


LOGS = {
    "long dicts": "{'loss': 0.1, 'grad_norm': 0.2, 'epoch': 0.1}\n"
    + ("{'loss': 0.1, 'epoch': [\n" + ("[]," * 21_000 + "\n") * 38 + "]}\n") * 8,
    "brackets": "{'loss': 0.1, 'epoch': " + "(" * 60_000 + "}\n",
    "minus signs": "{'loss': " + "-" * 60_000 + "1, 'epoch': 0.1}\n",
    "a line of a megabyte": "step:1 - " + "actor/loss:0.5 - " * 60_000 + "\n",
    "quotes": "{'loss': 0.1, 'epoch': '" + "\\'" * 400_000 + "}\n",
    "bars": "".join(f"\r{n}/{n + 1} [" for n in range(60_000)) + "{'loss': 0.1, 'epoch': 0.1}\n",
    "rows of HTML": "<table>" + "<tr></tr>" * 60_000 + "\n" + "<td>1</td>" * 60_000 + "\n",
    "tags that are not closed": "<td " * 200_000 + "\n" + "<th>" * 200_000,
    "JSON without an end": '{"step": 1, "loss": ' + "[" * 900_000,
    "a notebook": '{"cells": [' + '{"outputs": [{"text": ["{\'loss\': 0.1, \'epoch\': 1}"]}]},' * 20_000 + "{}]}",
    "a table of many columns": ",".join(f"c{n}" for n in range(60_000)) + "\n" + "1," * 60_000 + "\n",
    "pipes": "|" * 900_000 + "\n| step | loss |\n| 1 | 0.5 |\n",
    "pairs": " ".join(f"a{n}=1" for n in range(90_000)) + "\n",
    "one name": " ".join(["loss=1"] * 90_000) + "\nstep=1 loss=2 reward=3\n",
    "colours": "\x1b[0" * 200_000 + "\n",
    "a summary": "wandb: " + "loss 0.5 " * 60_000 + "\nwandb: Run summary:\n" + "wandb: loss 0.5\n" * 20_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGS)
def test_every_text_ends(ended, tmp_path, name):
    for file in ("train.log", "t.json", "t.csv", "t.ipynb", "t.jsonl", "trainer_state.json"):
        (tmp_path / file).write_text(LOGS[name])
        ended("info", file)
    ended("check", "train.log")


GROWING = {
    "t.csv": lambda count: "step,loss\n" + "".join(f"{step},0.5\n" for step in range(count)),
    "wide.csv": lambda count: "\n".join(
        ",".join([first, *(f"m{n}" if first == "step" else "1" for n in range(count))]) for first in ("step", "1", "2")
    ),
    "t.log": lambda count: "".join(f"{{'m{step}': 0.5, 'loss': 1, 'epoch': {step}}}\n" for step in range(count)),
    "pairs.log": lambda count: "".join(f"step={step} loss=0.5 reward={step % 7}\n" for step in range(count)),
    "t.md": lambda count: "".join(f"| step | loss | m{step} |\n| 1 | 0.5 | 1 |\n\n" for step in range(count)),
    "bars.log": lambda count: "".join(f"\r{n}/{n + 1} [" for n in range(count)) + "{'loss': 0.1, 'epoch': 0.1}\n",
    "runs.log": lambda count: "".join(f"{{'loss': 0.5, 'reward': 1, 'epoch': {n % 3}}}\n" for n in range(count)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_time_follows_the_size(started, tmp_path, name):
    seconds = []
    for count in (3_000, 24_000):
        (tmp_path / name).write_text(GROWING[name](count))
        started("check", name, cwd=tmp_path, report=tmp_path / "report").communicate()
        seconds.append(taken(tmp_path / "report")[0])
    # Eight times the lines; the square would be 64.
    assert seconds[1] < 20 * max(seconds[0], 0.1)


def linked(tmp_path):
    """Two runs, each with a link to the folder of both."""
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        columns = {"step": [0, 0], "group_id": ["g", "g"], "reward": [0.0, 1.0]}
        pq.write_table(pa.table(columns), tmp_path / "runs" / name / "run.parquet")
        (tmp_path / "runs" / name / "all").symlink_to("..")
        (tmp_path / "runs" / name / "again").symlink_to("../../runs")


@pytest.mark.parametrize("given", ["runs", "runs/**", "runs/**/*.parquet", "runs/a"])
def test_a_folder_is_searched_once_however_many_links_lead_to_it(ended, tmp_path, given):
    linked(tmp_path)
    out = ended("check", "--each", given)
    assert len(re.findall(r"^\S*run\.parquet", out, re.MULTILINE)) == 2


COMMANDS = [
    *(["check"], ["check", "--each"], ["info"], ["why"], ["identify"], ["diff", "--fix", "zero-std"]),
    *(
        ["export", "--what", "tokens", "-o", "out.parquet"],
        ["export", "--what", "run", "-o", "out.parquet"],
        ["export", "--what", "tables", "-o", "tables"],
    ),
    *(["report", "-o", "out.html"], ["plot", "overview", "-o", "out.png"], ["compare", "run.parquet"]),
    ["view", "--no-browser"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_shows_a_name_that_is_not_utf8(ended, tmp_path, command):
    sample = pq.read_table(Path(__file__).parents[2] / "sample_data" / "healthy.parquet")
    name = b"run\xff\xe9.parquet".decode("utf-8", "surrogateescape")
    pq.write_table(sample.filter(pc.field("step") < 3), tmp_path / "run.parquet")
    shutil.copy(tmp_path / "run.parquet", tmp_path / name)
    words = [*command[:1], name, *command[1:]] if command[0] != "plot" else ["plot", "overview", name, *command[2:]]
    if command[0] == "view":
        pytest.skip("it serves until it is interrupted; the fuzzer asks it")
    ended(*words)
