"""The run file of a recorded TRL run reproduces every metric that TRL logged: GRPO and RLOO, one rank and two."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from recorders.trl_runs import check_no_cause, close, make_bf16_model, make_trainer, read, run, sometimes, trl
from typer.testing import CliRunner

import rolloutdoctor as rd
from rolloutdoctor.cli.app import app
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.recorders.trl import record

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

NOT_OF_THE_ROWS = {
    "grad_norm": "the norm of the parameters' gradient needs the model",
    "learning_rate": "of the schedule",
    "epoch": "of the data loader",
    "step_time": "a clock's",
    "runtime": "a clock's",
    "samples_per_second": "a clock's",
    "steps_per_second": "a clock's",
    "train_runtime": "a clock's",
    "train_samples_per_second": "a clock's",
    "train_steps_per_second": "a clock's",
    "train_loss": "the mean of the logged losses over the whole training",
    "num_tokens": "a sum over all steps so far; follows from the lengths of prompt_ids and response_ids, see below",
}
"""Every logged name that `recompute` does not give, and why."""

GRPO_ALWAYS = {
    *("loss", "kl", "entropy", "reward", "reward_std", "frac_reward_zero_std"),
    *(f"completions/{each}_length" for each in ("mean", "min", "max")),
    *(f"completions/{each}_terminated_length" for each in ("mean", "min", "max")),
    "completions/clipped_ratio",
}
CLIPPED = {f"clip_ratio/{each}" for each in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}


def shade(completions, **kwargs):
    """A reward that hardly ever ties, so that no advantage is a rounding error of equal rewards."""
    return [
        sum(int(character) * 0.11 for character in text if character.isdigit()) / (1 + len(text))
        for text in completions
    ]


def check_every_metric(paths, logged):
    """Compare every logged number; return the names that were compared."""
    recomputed = rd.recompute(rd.open(paths), dtype="float32")
    expected = ("no KL term", "statistics of groups and batches", "group statistics are float32")
    assert not [note for note in recomputed.notes if not any(words in note for words in expected)]
    steps = {(step.step, step.split): step.before.metrics for step in recomputed.steps}
    compared = set()
    for key, values in logged.items():
        for name, value in values.items():
            if name in NOT_OF_THE_ROWS:
                assert name not in steps.get(key, {})
                continue
            found = steps[key][name]
            # Where TRL had no value to average it logs None.
            assert math.isnan(found) if value is None else close(found, value), (key, name, found, value)
            compared.add((key[1], name))
    passes_the_audit(paths)
    return compared


def passes_the_audit(paths):
    """What the real trainer logged follows from what was recorded, and no cause is found for anything."""
    report = rd.check(rd.open(paths), dtype="float32")
    assert report.audit
    assert not [entry for entry in report.audit if not entry.agrees or entry.with_fixes or entry.not_compared]
    assert {"advantages", "loss"} <= {entry.quantity for entry in report.audit}
    check_no_cause(report)


GRPO = {
    "evaluation": {"evaluate": True, "eval_prompts": 8},
    # The last batch of an evaluation counts for what is left of the prompts, however many responses they got.
    "a remainder": {"evaluate": True, "eval_prompts": 7, "loss_type": "grpo"},
    "iterations": {"num_iterations": 2, "steps": 4},
    "bnpo": {"loss_type": "bnpo", "num_iterations": 2, "steps": 2},
    "bf16": {"bf16": True, "model": make_bf16_model, "num_iterations": 2, "steps": 4},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "steps": 2, "epsilon_high": 0.1},
    "sapo": {"loss_type": "sapo", "num_iterations": 2, "steps": 2},
    "vespo": {"loss_type": "vespo", "num_iterations": 2, "steps": 2},
    "rows": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "steps": 2},
    "truncated": {"mask_truncated_completions": True, "evaluate": True, "eval_prompts": 8},
    # Every batch of an evaluation is scaled by itself.
    "batch": {"scale_rewards": "batch", "evaluate": True, "eval_prompts": 7},
    "two rewards": {"rewards": (shade, sometimes), "reward_weights": [0.5, 2.0]},
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", GRPO)
def test_grpo(tmp_path, name):
    options = {"rewards": (shade,), **GRPO[name]}
    _, rows, logged = run(tmp_path, **options)
    compared = check_every_metric(tmp_path / "run.parquet", logged)
    always = GRPO_ALWAYS | {
        f"rewards/{each.__name__}/{kind}" for each in options["rewards"] for kind in ("mean", "std")
    }
    own = {"cispo": {"cispo_clip_ratio"}, "vespo": {"vespo/phi_seq_mean"}, "sapo": set()}.get(name, CLIPPED)
    splits = ("train", "eval") if options.get("evaluate") else ("train",)
    assert compared == {(split, each) for split in splits for each in always | own}
    if "num_iterations" in options:
        # Off the policy, or the clip ratios say nothing.
        assert any(values.get(each, 1) > 0 for values in logged.values() for each in own or {"kl"})
    total, counted = 0, set()
    for step in sorted(step for step, split in logged if split == "train" and "num_tokens" in logged[step, split]):
        batch = [row for row in rows if (row["step"], row["split"]) == (step, "train")]
        # A batch that is trained on again was generated, and counted, once.
        fresh = [row for row in batch if row["sample_id"] not in counted]
        counted |= {row["sample_id"] for row in batch}
        total += sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in fresh)
        assert logged[step, "train"]["num_tokens"] == total or not fresh


@pytest.mark.slow
def test_what_the_trainer_printed_agrees_with_the_rows(tmp_path, capsys):
    """A run file without its metrics, and the console of the training, which has four significant digits."""
    _, _, logged = run(tmp_path, rewards=(shade,), loss_type="grpo")
    (tmp_path / "train.log").write_text(capsys.readouterr().out)
    (tmp_path / "run.metrics.parquet").unlink()
    paths = [str(tmp_path / name) for name in ("run.parquet", "train.log")]
    found = CliRunner().invoke(app, ["check", *paths, "--format", "json", "--exit-zero"])
    report = json.loads(found.stdout)
    compared = {entry["quantity"]: (entry["compared"], entry["agree"]) for entry in report["audit"]}
    assert all(count == agree for count, agree in compared.values())
    assert {"loss", "kl", "reward", "completions/mean_length"} <= compared.keys()
    assert compared["loss"] == (len(logged), len(logged))
    assert any(note.startswith("the log holds 4 significant digits") for note in report["notes"])


RLOO = {
    "evaluation": {"evaluate": True, "eval_prompts": 8},
    "a remainder": {"evaluate": True, "eval_prompts": 7, "steps": 2},
    "normalised": {"normalize_advantages": True, "num_iterations": 2, "steps": 4, "evaluate": True, "eval_prompts": 7},
    "clamped": {"reward_clip_range": [0.1, 0.4], "steps": 3},
    "no reference": {"beta": 0.0, "num_iterations": 2, "steps": 2},
    "truncated": {"mask_truncated_completions": True, "evaluate": True, "eval_prompts": 8},
    "two rewards": {"rewards": (shade, sometimes), "reward_weights": [0.5, 2.0], "steps": 2},
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", RLOO)
def test_rloo(tmp_path, name):
    options = {"rewards": (shade,), "learning_rate": 5e-2, **RLOO[name]}
    _, rows, logged = run(tmp_path, cls=trl.RLOOTrainer, **options)
    import pyarrow.parquet as pq

    metadata = RunMetadata.decode(pq.read_schema(tmp_path / "run.parquet").metadata, "")
    assert metadata.trainer == "trl-rloo"
    assert metadata.config["reward_clip_range"] == options.get("reward_clip_range")
    compared = check_every_metric(tmp_path / "run.parquet", logged)
    always = (GRPO_ALWAYS | CLIPPED) - ({"kl"} if options.get("beta") == 0 else set())
    always |= {f"rewards/{each.__name__}/{kind}" for each in options["rewards"] for kind in ("mean", "std")}
    splits = ("train", "eval") if options.get("evaluate") else ("train",)
    assert compared == {(split, each) for split in splits for each in always}
    assert ("ref_log_probs" in rows[0]) == (options.get("beta") != 0)
    again = rd.recompute(rd.open(tmp_path / "run.parquet"), tmp_path / "tokens.parquet", dtype="float32")
    values = {
        (row["step"], row["split"], row["sample_id"]): row["advantages_re"]
        for row in pq.read_table(tmp_path / "tokens.parquet").to_pylist()
    }
    assert len(values) == again.input.rows == len(rows)
    for row in rows:
        found = [
            value
            for value, on in zip(values[row["step"], row["split"], row["sample_id"]], row["response_mask"], strict=True)
            if on
        ]
        assert found == pytest.approx([row["advantage"]] * len(found), rel=1e-6, abs=1e-6)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_a_killed_training_gives_the_findings_of_a_closed_one(tmp_path, name):
    """The journal as it is before the recording closes, every command's input, against the run file made of it."""
    trainer = make_trainer(tmp_path, cls=getattr(trl, name), mask_truncated_completions=True, learning_rate=5e-2)
    recorder = record(trainer, tmp_path / "run.parquet")
    finish, kept = recorder._writer._finish, []

    def copy_first(recording):
        kept.append(recorder._writer.journal_path.read_bytes())
        return finish(recording)

    recorder._writer._finish = copy_first
    trainer.train()
    left = tmp_path / "left.parquet.journal"
    left.write_bytes(kept[0])
    closed = CliRunner().invoke(app, ["check", str(tmp_path / "run.parquet"), "--format", "json", "--exit-zero"])
    killed = CliRunner().invoke(app, ["check", str(left), "--format", "json", "--exit-zero"])
    made = CliRunner().invoke(app, ["export", "--what", "run", str(left), "-o", str(tmp_path / "made.parquet")])
    again = CliRunner().invoke(app, ["check", str(tmp_path / "made.parquet"), "--format", "json", "--exit-zero"])
    assert [each.exit_code for each in (closed, killed, made, again)] == [0] * 4
    findings = [json.loads(each.stdout)["findings"] for each in (closed, killed, again)]
    assert findings[0]
    assert findings[0] == findings[1] == findings[2]


RANKS = """
import os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from recorders.trl_runs import make_model, make_trainer, trl
from recorders.test_trl_metrics import shade
from rolloutdoctor.recorders.trl import record
classes = {name: getattr(trl, name) for name in ("GRPOTrainer", "RLOOTrainer")}
# Two processes, whose imports are done once.
other = os.fork()
rank = os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
folders = [Path(folder) / rank for folder in sys.argv[1:]]
# Once a trainer has begun, models are saved by the first rank alone.
models = [make_model(own) for own in folders]
for own, model in zip(folders, models):
    trainer = make_trainer(
        own, cls=classes[own.parent.name], model=lambda _: model, rewards=(shade,), num_generations=8, steps=2,
        num_iterations=2, ddp_backend="gloo", gradient_accumulation_steps=2, steps_per_generation=2,
    )
    record(trainer, own.parent / "run.parquet")
    trainer.train()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def free_port():
    """A port that nobody is given by chance: the models are made before it is taken."""
    for port in random.sample(range(21_000, 31_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of a hundred is free")


@pytest.mark.slow
def test_two_processes(tmp_path):
    """A group lies on both ranks; each rank writes its file, and the files together are the run."""
    folders = [tmp_path / name for name in ("GRPOTrainer", "RLOOTrainer")]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "HF_HUB_OFFLINE": "1",
    }
    ranks = subprocess.Popen(
        [sys.executable, "-c", RANKS, *map(str, folders)],
        env={**os.environ, **shared},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = ranks.communicate(timeout=480)[0]
        assert ranks.returncode == 0, said[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    for folder in folders:
        check_two_ranks(folder)


def check_two_ranks(folder):
    rows = [row for rank in (0, 1) for row in read(folder, f"run.rank{rank}")[0]]
    assert {row["rank"] for row in rows} == {0, 1}
    assert len({(row["step"], row["sample_id"]) for row in rows}) == len(rows) == 2 * 16
    groups = {}
    for row in rows:
        groups.setdefault((row["step"], row["group_id"]), set()).add(row["rank"])
    assert any(len(found) == 2 for found in groups.values()) or len(groups) == 4
    assert not (folder / "run.rank1.metrics.parquet").exists()
    logged = read(folder, "run.rank0")[1]
    compared = check_every_metric(str(folder / "run.rank*.parquet"), logged)
    assert compared >= {("train", each) for each in GRPO_ALWAYS | CLIPPED}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "options", [{"steps": 7}, {"steps": 6, "logging_first_step": True, "num_iterations": 2}], ids=str
)
def test_means_over_several_steps(tmp_path, options):
    run(tmp_path, rewards=(shade,), logging_steps=3, **options)
    found = rd.check(rd.open(tmp_path / "run.parquet"))
    assert not [finding for finding in found.findings if finding.severity.name == "ERROR"]
    entries = {entry.quantity: entry for entry in found.audit}
    # The last line of a training that ends between two logged steps has no loss.
    losses = 2 if options["steps"] == 7 else 3
    assert (entries["loss"].compared, entries["loss"].agree, entries["loss"].window) == (losses, losses, 3)
    assert entries["kl"].compared == entries["kl"].agree == 3
