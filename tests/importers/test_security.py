"""What a dump says is data: paths in it are never opened, nothing it asks for is run, and nothing grows without end."""

import json
import resource
import subprocess
import sys

import pytest
import torch
from importers.importing import DATA, converted, findings, slime_dump

from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError

JSON_DUMPS = {
    "verl": "verl/v1/1.jsonl",
    "nemo-rl": "nemo_rl/grpo/train_data_step1.jsonl",
    "prime-rl-tokens": "prime_rl/token_exports/step_1/rank_0.jsonl",
    "prime-rl-traces": "prime_rl/rollouts/step_1/train/effective/traces.jsonl",
    "open-instruct": "open_instruct/run_rollouts_000000.jsonl",
}
REACHING = {"open", "os.system", "os.exec", "os.listdir", "os.scandir", "os.posix_spawn", "subprocess.Popen"}
REACHING |= {"socket.connect", "urllib.Request"}


@pytest.fixture(scope="module")
def audited():
    """What the process reaches for, as long as this is a list; an audit hook cannot be taken off again."""
    seen = {"events": None}

    def hook(event, arguments):
        if seen["events"] is not None and event in REACHING:
            seen["events"].append(f"{event} {arguments}")

    sys.addaudithook(hook)
    return seen


def texts_replaced(body, text):
    """The same JSON with every text in it, names of fields and of rows apart, replaced."""
    if isinstance(body, dict):
        return {name: each if name in ("id", "uid") else texts_replaced(each, text) for name, each in body.items()}
    if isinstance(body, list):
        return [texts_replaced(each, text) for each in body]
    return text if isinstance(body, str) else body


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("importer", [*sorted(JSON_DUMPS), "slime"])
def test_paths_in_a_dump_are_never_opened(tmp_path, audited, importer):
    secret = tmp_path / "secret-of-the-user"
    secret.write_text("not yours")
    if importer == "slime":
        fields = {"prompt": str(secret), "response": f"file://{secret}", "metadata": {"path": str(secret)}}
        path = slime_dump(tmp_path / "dump", rollouts=(0,), rollout=fields)
    else:
        path = tmp_path / "dump" / JSON_DUMPS[importer]
        path.parent.mkdir(parents=True)
        rows = [json.loads(line) for line in (DATA / JSON_DUMPS[importer]).read_text().splitlines()]
        rows = [texts_replaced(row, str(secret)) | {"file": f"file://{secret}", "path": str(secret)} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    audited["events"] = []
    rows, _ = converted(tmp_path / "run.parquet", path, importer=importer)
    findings(path, importer=importer)
    events, audited["events"] = audited["events"], None
    assert rows
    assert any("dump" in event for event in events)  # the hook sees what is opened
    assert not [event for event in events if secret.name in event]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("importer", sorted(JSON_DUMPS))
def test_json_nested_a_million_deep_is_one_sentence(tmp_path, importer):
    path = tmp_path / JSON_DUMPS[importer]
    path.parent.mkdir(parents=True)
    first = (DATA / JSON_DUMPS[importer]).read_text().splitlines()[0]
    path.write_text(f'{first}\n{{"step": 1, "token_ids": {"[" * 10**6}{"]" * 10**6}}}\n{first}\n')
    with pytest.raises(DataError, match="line 2: ") as error:
        converted(tmp_path / "run.parquet", path, importer=importer)
    assert len(str(error.value)) < 400
    assert not (tmp_path / "run.parquet").exists()


@pytest.mark.slow
def test_hostile_input_stays_in_bounded_memory(tmp_path):
    """One process, with no more memory than it needs anyway: deep JSON, endless lines, and a tensor of a terabyte."""
    (tmp_path / "deep.jsonl").write_text('{"step": 1, "score": ' + '{"a":' * 10**6 + "1" + "}" * 10**6 + "}\n")
    with (tmp_path / "endless.jsonl").open("wb") as file:
        file.write(b'{"step": 1, "score": "')
        file.truncate(8 * 2**30)
    train = {"log_probs": torch.zeros(1).expand(2**38)}
    slime_dump(tmp_path / "dump", rollouts=(0,), train=train)
    script = """
import sys
from pathlib import Path
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.results.errors import RolloutDoctorError
for name, importer in (("deep.jsonl", "mapped"), ("endless.jsonl", "mapped"), ("dump", "slime")):
    try:
        options = ConvertOptions(importer=importer)
        convert(detect_dump([name], options), Path("run.parquet"), options)
    except RolloutDoctorError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30)),
    )
    deep, endless, huge = done.stdout.splitlines()
    assert deep.startswith("deep.jsonl, line 1: ")
    assert endless.startswith("endless.jsonl, line 1: longer than 32 MiB")
    assert "log_probs has 274877906944 values, more than any response" in huge
    assert not (tmp_path / "run.parquet").exists()


def test_what_a_pickle_runs_is_not_run_by_detection(tmp_path):
    """Finding out whose dump it is loads nothing, and reading it says which flag would."""

    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "mark"), "w"))

    (tmp_path / "dump").mkdir()
    torch.save({"samples": [Touch()]}, tmp_path / "dump" / "0.pt")
    assert detect_dump([str(tmp_path / "dump")], ConvertOptions()).importer.name == "slime"
    with pytest.raises(InputError, match="--allow-pickle"):
        findings(tmp_path / "dump")
    assert not (tmp_path / "mark").exists()
