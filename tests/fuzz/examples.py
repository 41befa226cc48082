"""Hostile input of every kind, each made from a number: what to run, in a folder that holds its files."""

import json
import math
import random
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fuzz import logs, surfaces, values
from fuzz.harness import run

from rolloutdoctor.data.schema import AUTHORS, COLUMNS, Kind
from rolloutdoctor.engine.stored import HEAD
from rolloutdoctor.io.archives import archived, unarchived
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.arrow_types import arrow_type
from rolloutdoctor.packs import RENAMED
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.trainers.table import TRAINERS

DATA = Path(__file__).parents[1] / "importers" / "data"
COMMANDS = ("check", "check", "check", "info", "diff", "recompute", "convert")
FORMATS = {
    "check": ("full", "concise", "json", "jsonl", "github", "junit", "markdown"),
    "diff": ("full", "concise", "json", "jsonl", "markdown"),
    "recompute": ("json", "jsonl", "full"),
    "info": ("full", "json"),
    "merge": ("full", "json", "markdown"),
}


def hostile_numbers(draw, count):
    """Plain numbers, with now and then what no sum survives."""
    odd = draw.random() < 0.4
    return [
        draw.choice(values.NUMBERS[:11]) if odd and draw.random() < 0.3 else draw.uniform(-2, 0) for _ in range(count)
    ]


def turns(draw, length):
    """Turns of a response, of authors in turn."""
    cuts = sorted({0, length, draw.randrange(length + 1)})
    return [
        {"author": draw.choice(AUTHORS), "start": start, "stop": stop, "error": draw.choice([None, "late"])}
        for start, stop in pairwise(cuts)
    ]


def table(draw):
    """A small run, of which some columns are wrong in some way."""
    rows, steps = draw.randrange(1, 9), draw.randrange(1, 4)
    lengths = [draw.choice([0, 1, 1, 2, 3]) for _ in range(rows)]
    all_masked = draw.random() < 0.15
    columns = {"step": pa.array(sorted(draw.randrange(steps) for _ in range(rows)))}
    for column in COLUMNS[1:]:
        if draw.random() < 0.25 and column.name not in ("reward", "response_mask", "group_id"):
            continue
        if column.kind is Kind.FLOATS:
            cells = pa.array([hostile_numbers(draw, length) for length in lengths], pa.list_(pa.float32()))
        elif column.kind is Kind.MASK:
            cells = pa.array(
                [[0 if all_masked else int(draw.random() < 0.8) for _ in range(length)] for length in lengths],
                pa.list_(pa.uint8()),
            )
        elif column.kind is Kind.TOKENS:
            cells = pa.array([[draw.randrange(9) for _ in range(length)] for length in lengths], pa.list_(pa.int32()))
        elif column.kind is Kind.NUMBER:
            cells = pa.array(hostile_numbers(draw, rows), pa.float64())
        elif column.kind is Kind.INTEGER:
            cells = pa.array([draw.randrange(3) for _ in range(rows)])
        elif column.kind is Kind.NAMED_NUMBERS:
            cells = pa.array([{"a": each, draw.choice(["b", "\x1b[0m"]): 1.0} for each in hostile_numbers(draw, rows)])
        elif column.kind is Kind.TURNS:
            cells = pa.array([turns(draw, length) for length in lengths], arrow_type(column))
        elif column.name == "sample_id":
            cells = pa.array([f"{row}{draw.choice(values.TEXTS)}" for row in range(rows)])
        elif column.name == "group_id":
            cells = pa.array([str(row // 2) for row in range(rows)])
        elif column.name == "split":
            cells = pa.array([draw.choice(["train", "train", "eval"]) for _ in range(rows)])
        else:
            cells = pa.array([draw.choice(values.TEXTS) for _ in range(rows)])
        columns[column.name] = cells
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        name = draw.choice(list(columns))
        how = draw.randrange(4)
        if how == 0:
            columns[name] = values.odd_column(draw, rows)
        elif how == 1:
            is_null = np.array([draw.random() < 0.3 for _ in range(rows)])
            columns[name] = pa.array(
                [None if null else cell for null, cell in zip(is_null, columns[name].to_pylist(), strict=True)],
                columns[name].type,
            )
        elif how == 2:
            cells = columns[name].to_pylist()
            cells[draw.randrange(rows)] = cells[draw.randrange(rows)]
            columns[name] = pa.array(cells, columns[name].type)
        else:
            columns[draw.choice([*values.TEXTS[1:], "old_per_token_logps", "uid", "x" * 5000])] = columns.pop(name)
    return pa.table(columns)


def metadata(draw):
    """What a file says of itself, or tries to."""
    name = draw.choice(list(TRAINERS))
    trainer = TRAINERS[name]
    options = {option.name: option for option in trainer.options}
    config = {}
    for option in draw.sample(sorted(options), min(len(options), draw.randrange(4))):
        known = options[option].computed
        config[option] = draw.choice(list(known)) if known and draw.random() < 0.7 else values.scalar(draw)
    if name == "verl":
        config.setdefault("algorithm.adv_estimator", "grpo")
    if name == "slime":
        config.setdefault("advantage_estimator", "grpo")
    body = {"schema_version": 1, "trainer": name, "trainer_version": trainer.newest, "config": config}
    if draw.random() < 0.2:
        body["recording"] = {"dropped_steps": [[0, "\x1b[2Jtrain"], values.anything(draw)]}
    if draw.random() < 0.25:
        body = values.edited(draw, body)
    return {b"rolloutdoctor": json.dumps(body).encode()}


def command_line(draw, path, commands=COMMANDS):
    """A command on a file, with options that may be right."""
    command = draw.choice(commands)
    # Under its name of today.
    words = [*RENAMED.get(command, (command,)), path]
    if command == "diff" or (command == "recompute" and draw.random() < 0.4):
        words += ["--fix", draw.choice(["zero-std", "zero-std:pr5640", "rejected-rows", "kl-inplace", "zero-std:x"])]
    if command == "recompute" and draw.random() < 0.6:
        words += ["-o", "recomputed.parquet"]
    if command == "convert":
        return [*words, "-o", "converted.parquet"]
    if command in FORMATS and not (command == "recompute" and "-o" not in words):
        words += ["--format", draw.choice(FORMATS[command])]
    elif command == "recompute":
        words += ["--format", "json"]
    if command != "info":
        words += ["--device", "cpu"]
        if draw.random() < 0.2:
            words += ["--dtype", "float64"]
    if draw.random() < 0.3:
        name = draw.choice(list(TRAINERS))
        words += ["--trainer", name]
        if name == "slime":
            words += ["--set", "advantage_estimator=grpo"]
    return words


def write_run(draw, folder):
    """A run file, and perhaps its metrics; None where Parquet has no place for it."""
    found = table(draw)
    if draw.random() < 0.85:
        found = found.replace_schema_metadata(metadata(draw))
    try:
        pq.write_table(found, folder / "run.parquet", row_group_size=draw.choice([None, 1, 3]))
    except (pa.ArrowException, ValueError):
        return None
    if draw.random() < 0.4:
        lines = [
            {"step": step, "split": "train", "name": name, "value": draw.choice([*values.NUMBERS, 0.1, None])}
            for step in range(3)
            for name in ("loss", "kl", "actor/kl_loss", "grad_norm", "train/kl_loss", "reward")
        ]
        if draw.random() < 0.3:
            lines[0] = values.anything(draw)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "run.metrics.jsonl").write_text(text, encoding="utf-8", errors="surrogatepass")
    return "run.parquet"


def run_files(draw, folder):
    """Values, types, nulls and metadata of run files."""
    path = write_run(draw, folder)
    return None if path is None else command_line(draw, path)


JSON_DUMPS = {
    "nemo-rl": "nemo_rl/dynamic_sync/train_data_step1.jsonl",
    "prime-rl-tokens": "prime_rl/token_exports/step_1/rank_0.jsonl",
    "prime-rl-traces": "prime_rl/rollouts/step_1/train/effective/traces.jsonl",
    "open-instruct": "open_instruct/run_rollouts_000000.jsonl",
    "tinker-cookbook": "tinker_cookbook/iteration_000001/train_rollout_summaries.jsonl",
    "areal": "areal/rollout/1/4.jsonl",
    "verl": "verl/v1/1.jsonl",
}


@cache
def _rows_of(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()[:6]]


def json_dumps(draw, folder):
    """Dumps of JSON Lines of every importer, with anything in some places."""
    importer = draw.choice(sorted(JSON_DUMPS))
    name = Path(JSON_DUMPS[importer])
    rows = list(_rows_of(str(name)))
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(rows))
        if isinstance(rows[place], dict):
            rows[place] = values.edited(draw, rows[place])
    (folder / name).parent.mkdir(parents=True)
    text = "".join(json.dumps(row, ensure_ascii=draw.random() < 0.5) + "\n" for row in rows)
    cut = draw.choice([0, 0, 0, 1, 5])
    (folder / name).write_text(text[: len(text) - cut], encoding="utf-8", errors="surrogatepass")
    return [*command_line(draw, str(name), ("convert", "check", "info")), "--from", importer]


def mapped_lines(draw, folder):
    """JSON Lines of nobody's, with --map."""
    fields = ("step", "uid", "score", "mask", "ids", "logp", "info", "text")

    def row(number):
        length = draw.randrange(3)
        body = {
            "step": number // 3,
            "uid": str(number // 2),
            "score": draw.uniform(0, 1),
            "mask": [1] * length,
            "ids": list(range(length)),
            "logp": [-0.5] * length,
            "info": {"score": 1.0, "parts": {"a": 1, "b": 0.5}},
            "text": draw.choice(values.TEXTS),
        }
        return values.edited(draw, body) if draw.random() < 0.15 else body

    rows = [row(number) for number in range(draw.randrange(1, 7))]
    text = "".join(json.dumps(each, ensure_ascii=draw.random() < 0.5) + "\n" for each in rows)
    (folder / "mine.jsonl").write_text(text, encoding="utf-8", errors="surrogatepass")
    names = [column.name for column in COLUMNS]
    pairs = {"reward": "score", "group_id": "uid", "response_mask": "mask", "old_log_probs": "logp"}
    for _ in range(draw.randrange(3)):
        pairs[draw.choice([*names, "x"])] = draw.choice([*fields, "info.score", "info.parts", "info.nothing.here", "["])
    maps = [word for name, where in pairs.items() for word in ("--map", f"{name}={where}")]
    return [*command_line(draw, "mine.jsonl", ("convert", "check", "info")), *maps]


def trl_completions(draw, folder):
    """TRL's completions, with columns that are null, of another type, absent or renamed in some step."""
    target = folder / "out" / "completions"
    source = DATA / "trl" / draw.choice(["two_passes", "mixed"])
    shutil.copytree(source / "completions", target)
    state = next(source.rglob("trainer_state.json"), None)
    if state is not None and draw.random() < 0.8:
        body = json.loads(state.read_text())
        for _ in range(draw.choice([0, 1, 2])):
            body = values.edited(draw, body)
        (folder / "out" / "trainer_state.json").write_text(json.dumps(body), errors="surrogatepass")
    for path in draw.sample(sorted(target.iterdir()), draw.choice([1, 1, 2])):
        found = pq.read_table(path)
        name = draw.choice(found.column_names)
        at = found.column_names.index(name)
        how = draw.randrange(5)
        if how == 0:
            found = found.remove_column(at)
        elif how == 1:
            found = found.set_column(at, name, pa.nulls(len(found)))
        elif how == 2:
            found = found.set_column(at, name, pa.array([draw.choice(values.TEXTS) for _ in range(len(found))]))
        elif how == 3:
            found = found.set_column(at, name, values.odd_column(draw, len(found)))
        else:
            cells = found[name].to_pylist()
            cells[draw.randrange(len(cells))] = draw.choice([None, cells[0]])
            found = found.set_column(at, name, pa.array(cells, found[name].type))
        try:
            pq.write_table(found, path)
        except (pa.ArrowException, ValueError):
            return None
    words = command_line(draw, "out/completions", ("convert", "check", "info"))
    return [*words, "--map", f"reward={draw.choice(['exact', 'exact+0.5*digits', '1e308*exact', 'x*'])}"] * (
        draw.random() < 0.3
    ) or words


def odd_object(draw):
    """What `torch.load` may give where a list or a tensor was expected."""
    makers = [
        lambda: torch.zeros(draw.randrange(4)),
        lambda: torch.zeros(2, 2),
        lambda: torch.tensor(float("nan")),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.zeros(3, dtype=torch.bfloat16),
        lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
        lambda: torch.zeros(3, dtype=torch.uint16),
        lambda: torch.tensor([2**62, -1, 5]),
        lambda: torch.tensor([True, False]),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.zeros(4).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.zeros(3, requires_grad=True),
        lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        lambda: torch.full((3,), math.inf),
        lambda: [torch.zeros(2), torch.zeros(1)],
        lambda: (1, 2.5, None),
        lambda: {1: 2, "a": [3]},
        lambda: {1, 2},
        lambda: b"bytes",
        lambda: 3 + 4j,
        lambda: torch.float32,
        lambda: torch.Size([1, 2]),
        lambda: torch.nn.Parameter(torch.zeros(2)),
        lambda: bytearray(b"ab"),
        lambda: values.anything(draw),
        lambda: "\ud800",
    ]
    return draw.choice(makers)()


@cache
def _slime():
    return {
        kind: torch.load(DATA / "slime" / kind / "0.pt", weights_only=True) for kind in ("train_data", "rollout_data")
    }


def slime_dumps(draw, folder):
    """slime's dumps with odd objects anywhere."""
    for kind, body in _slime().items():
        if draw.random() < 0.1:
            continue
        copy = {**body, "samples": [dict(sample) for sample in body["samples"]]}
        for _ in range(draw.choice([0, 1, 1, 2])):
            where = draw.choice([copy, draw.choice(copy["samples"])])
            if where is copy and draw.random() < 0.5:
                where = copy["samples"][-1]
            where[draw.choice([*where, "reward", "tokens"])] = odd_object(draw)
            if not isinstance(copy.get("samples"), list) or not copy["samples"]:
                break
            if not all(isinstance(sample, dict) for sample in copy["samples"]):
                break
        (folder / "dump" / kind).mkdir(parents=True)
        try:
            torch.save(copy, folder / "dump" / kind / "0.pt")
        except Exception:  # what cannot be written is no input
            return None
    return command_line(draw, "dump", ("convert", "check", "info"))


@cache
def _state():
    import tempfile

    draw = random.Random(7)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = 12
        lists = pa.array([[-0.5, -0.25]] * rows, pa.list_(pa.float32()))
        cells = {
            "step": pa.array([row // 4 for row in range(rows)]),
            "group_id": pa.array([str(row // 2) for row in range(rows)]),
            "reward": pa.array([draw.choice([0.0, 1.0]) for _ in range(rows)]),
            "response_mask": pa.array([[1, row % 2] for row in range(rows)], pa.list_(pa.uint8())),
            "old_log_probs": lists,
            "ref_log_probs": lists,
            "advantage": pa.array([0.5] * rows),
        }
        found = pa.table(cells).replace_schema_metadata(RunMetadata("trl", "1.16.0", {"beta": 0.04}).encode())
        pq.write_table(found, folder / "run.parquet")
        for name, steps in (("a.state", "0:2"), ("b.state", "2:")):
            code, _, err, _ = run(["check", "run.parquet", "--steps", steps, "--save-state", name], folder)
            assert code in (0, 1), err
        return [unarchived((folder / name).read_bytes()) for name in ("a.state", "b.state")]


def states(draw, folder):
    """States of a check that somebody edited."""
    bodies = [json.loads(members[HEAD]) for members in _state()]
    for _ in range(draw.choice([1, 1, 2])):
        which = draw.randrange(2)
        if isinstance(bodies[which], dict):
            bodies[which] = values.edited(draw, bodies[which])
    for name, members, body in zip(("a.state", "b.state"), _state(), bodies, strict=True):
        text = json.dumps(body).encode("utf-8", "surrogatepass")
        content = bytearray(archived(members | {HEAD: text}))
        if draw.random() < 0.1:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(content)
    names = draw.choice([["a.state", "b.state"], ["a.state", "b.state"], ["a.state"], ["b.state", "a.state"]])
    words = ["merge", *names, "--format", draw.choice(FORMATS["merge"])]
    if draw.random() < 0.2:
        words += ["--select", draw.choice([rule.code for rule in RULES])]
    return words


def option_words(draw, folder):
    """Options with anything behind them."""
    draw_run = random.Random(draw.randrange(3))
    path = write_run(draw_run, folder)
    if path is None:
        return None
    name = draw.choice(list(TRAINERS))
    option = draw.choice([each.name for each in TRAINERS[name].options])
    value = draw.choice([*values.TEXTS, *map(str, values.NUMBERS), "null", "true", "[1,2]", "{}", "x" * 20_000])
    words = command_line(draw, path)
    extra = draw.choice(
        [
            ["--trainer", name, "--set", f"{option}={value}"],
            ["--trainer", f"{name}@{value}"],
            ["--set", value],
            ["--steps", draw.choice(["1:2", ":", "::", "1e3", "-1:", "5:1", f"{10**30}:", value])],
            ["--select", draw.choice(["RDI", "RDG001", "x", value])],
            ["--fix", value],
            ["--format", value],
            ["--against", value],
            ["--by", value],
            ["--top", value],
            ["--from", value],
            ["--map", f"{value}={value}"],
            [value],
            [f"--{value}"],
        ]
    )
    # An argument of a process has no null character.
    return [word.replace("\x00", "") for word in [*words, *extra]]


KINDS = {
    "run_files": (run_files, 8),
    "json_dumps": (json_dumps, 3),
    "mapped_lines": (mapped_lines, 3),
    "trl_completions": (trl_completions, 2),
    "slime_dumps": (slime_dumps, 2),
    "states": (states, 3),
    "option_words": (option_words, 3),
    "console_logs": (logs.console_logs, 2),
    "tables": (logs.tables, 2),
    "tensorboard": (logs.tensorboard, 1),
    "journals": (logs.journals, 2),
    "option_files": (logs.option_files, 2),
    **surfaces.KINDS,
}


def make(seed, number, folder):
    """The kind of an example and its command line; no command line where nothing could be written."""
    draw = random.Random(f"{seed}/{number}")
    kinds = list(KINDS)
    kind = draw.choices(kinds, [KINDS[name][1] for name in kinds])[0]
    return kind, KINDS[kind][0](draw, folder)
