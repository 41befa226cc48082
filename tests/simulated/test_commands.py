"""What the commands compute with ``--device cuda``, on a simulated GPU: the CPU's numbers, twice the same bytes.

`test_device` says what such a device shows, and what it cannot show.
"""

import json

import polars as pl
import pytest
from device_agreement import DTYPES, SAMPLE_FILES, SAMPLES, agree, checks_agree, sample

import rolloutdoctor as rd
from rolloutdoctor.cli import main
from rolloutdoctor.commands.breakdown import PARTS
from rolloutdoctor.commands.plot import draw
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import StepRange
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import KINDS

FIX = {
    "run": "zero-std",
    "verl_rejected": "rejected-rows",
    "slime_ppo": "kl-inplace",
    "healthy": "zero-std:renormalised",
}
STEPS = {"run": "14:16", "verl_rejected": "3:5", "slime_ppo": "3:5", "healthy": "20:22"}
"""Of two samples with an evaluation among them."""


def both(run):
    """The same on the CPU and on the device."""
    here, there = (run(device) for device in ("cpu", "cuda"))
    agree(here, there)
    return there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAMPLES)
def test_check(device, name, dtype):
    steps = StepRange.parse(STEPS[name])
    report = checks_agree(name, dtype, device, steps)
    assert report.device == device
    assert report.input.steps >= 2
    assert report.coverage.tested > 2


@pytest.mark.parametrize(
    ("name", "by"),
    [*((name, None) for name in SAMPLES), *(("run", by) for by in PARTS)],
)
def test_diff(device, name, by):
    run, top = sample(name), 2 if by is None else 0
    found = both(lambda where: rd.diff(run, fixes=[FIX[name]], by=by, top=top, steps=STEPS[name], device=where))
    assert found.device == device


@pytest.mark.parametrize("split", ["train", "eval"])
def test_diff_of_a_split(device, split):
    run = sample("run")
    both(lambda where: rd.diff(run, against={"beta": 0.3}, steps=STEPS["run"], split=split, device=where))


@pytest.mark.parametrize("name", SAMPLES)
def test_pictures(device, name):
    run, drawn = sample(name), 0
    for kind in KINDS:
        try:
            here = draw(run, kind, CheckOptions(steps=StepRange.parse(STEPS[name]), device="cpu"))
        except InputError as error:
            with pytest.raises(type(error)):
                draw(run, kind, CheckOptions(steps=StepRange.parse(STEPS[name]), device=device))
            continue
        agree(here, draw(run, kind, CheckOptions(steps=StepRange.parse(STEPS[name]), device=device)))
        drawn += 1
    assert drawn >= 3


@pytest.mark.parametrize("name", SAMPLES)
def test_recompute(device, name, tmp_path):
    run, files = sample(name), [tmp_path / f"{each}.parquet" for each in ("here", "there", "again")]
    results = [
        rd.recompute(run, path, fixes=[FIX[name]], steps=STEPS[name], device=where)
        for path, where in zip(files, ("cpu", device, device), strict=True)
    ]
    agree(results[0], results[1])
    here, there = (pl.read_parquet(path).to_dict(as_series=False) for path in files[:2])
    agree(here, there)
    assert sum(len(cells) for cells in here["grad_re"]) > 80
    assert files[1].read_bytes() == files[2].read_bytes()


@pytest.mark.parametrize("words", [["check"], ["diff", "--fix", "zero-std"], ["recompute"]], ids=lambda words: words[0])
def test_command_line(device, words, monkeypatch, capsys):
    said = {}
    for attempt in ("cpu", device, f"{device} again"):
        where = attempt.partition(" ")[0]
        line = [
            "rolloutdoctor",
            *words,
            str(SAMPLE_FILES / "run.parquet"),
            "--device",
            where,
            "--steps",
            STEPS["run"],
            "--format",
            "json",
        ]
        monkeypatch.setattr("sys.argv", line)
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (None, 0, 1)
        said[attempt] = capsys.readouterr().out
    here, there = json.loads(said["cpu"]), json.loads(said[device])
    assert (here.pop("device"), there.pop("device")) == ("cpu", device)
    agree(here, there)
    assert said[device] == said[f"{device} again"]
