"""Options that lie beside dumps and logs: real files of trainers, what contradicts them, and hostile files."""

import argparse
import io
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import OrderedDict, defaultdict
from contextlib import redirect_stdout, suppress
from pathlib import PurePath

import pytest
from importers.importing import DATA

from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import read_settings
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.run import open_run
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.opening.stated.options import trainer_of
from rolloutdoctor.opening.stated.printed import read_printed
from rolloutdoctor.opening.stated.training_args import read_training_args
from rolloutdoctor.opening.stated_options import stated_beside
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

OUTPUT = DATA / "trl" / "output"
ARGS = OUTPUT / "checkpoint-12" / "training_args.bin"
STATE = OUTPUT / "checkpoint-12" / "trainer_state.json"
VERL = DATA / "beside" / "verl.log"
SLIME_STEPS = "".join(
    f"[2026-01-01 10:00:00] model.py:520 - step {step}: {{'train/loss': 0.5, 'train/grad_norm': 1.0, "
    "'train/kl_loss': 0.002}\n"
    for step in range(4)
)


@pytest.fixture
def output(tmp_path):
    return shutil.copytree(OUTPUT, tmp_path / "output")


def checked(*paths, settings=(), trainer=None):
    """The report, and what was told."""
    told = []
    opened = open_any(
        [str(path) for path in paths], trainer=trainer, options=ConvertOptions(), tell=told.append, logs_alone=True
    )
    layers = [read_settings(settings, "command line")]
    with opened as run:
        return check(run, CheckOptions(trainer=trainer, layers=layers, device="cpu")), told


def count(report):
    return len(report.clean) + len({finding.code for finding in report.findings})


def setting(report, name):
    found = report.config[name]
    return found.value, found.origin


def archive(path, pickled, name="archive/data.pkl", size=None):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, pickled)
    if size is not None:
        content = path.read_bytes()
        at = content.rindex(b"PK\x01\x02")
        path.write_bytes(content[: at + 24] + struct.pack("<I", size) + content[at + 28 :])
    return path


@pytest.mark.slow
def test_an_output_folder_of_trl_states_its_options():
    report, _ = checked(OUTPUT)
    assert count(report) >= 21
    assert setting(report, "beta") == (0.04, "checkpoint-12/training_args.bin")
    assert setting(report, "version") == ("1.16.0", "README.md")
    assert not [name for name, one in report.config.items() if one.assumed]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["checkpoint-12/trainer_state.json", "checkpoint-6", "completions"])
def test_they_are_found_from_within(where):
    report, _ = checked(OUTPUT / where)
    place = "checkpoint-6" if where == "checkpoint-6" else "checkpoint-12"
    assert setting(report, "num_generations") == (4, f"{place}/training_args.bin")


def test_an_output_folder_without_completions_is_the_log_of_its_newest_checkpoint(output):
    shutil.rmtree(output / "completions")
    report, _ = checked(output)
    assert report.input.steps == 12
    assert setting(report, "beta")[0] == 0.04
    assert [each.paths for each in find_runs([str(output)])] == [(str(output),)]


@pytest.mark.slow
def test_an_adapter_is_noted(output):
    (output / "checkpoint-12" / "adapter_config.json").write_text("{}")
    assert checked(output)[1].count("adapter_config.json in checkpoint-12: the run trained an adapter") == 1


def test_what_the_user_states_wins():
    report, _ = checked(OUTPUT, settings=["beta=0.1"])
    assert setting(report, "beta") == (0.1, "command line")
    assert setting(report, "loss_type")[1] == "checkpoint-12/training_args.bin"


def test_a_converted_dump_keeps_options_and_origins(tmp_path):
    target = tmp_path / "run.parquet"
    convert(detect_dump([str(OUTPUT)], ConvertOptions()), target, ConvertOptions())
    metadata = open_run([str(target)]).metadata
    assert metadata.config.keys() <= {option.name for option in TRAINERS["trl"].options}, "names and paths of the user"
    assert setting(checked(target)[0], "beta") == (0.04, "checkpoint-12/training_args.bin")


def test_an_unknown_value_is_not_taken_for_its_default(output):
    state = {"loss_type": "of tomorrow", "beta": 0.04, "scale_rewards": "group", "num_generations": 4}
    for file in output.rglob("training_args.bin"):
        archive(file, pickled_config("trl.trainer.grpo_config", "GRPOConfig", state))
    report, told = checked(output)
    assert any("loss_type = 'of tomorrow' (checkpoint-12/training_args.bin)" in sentence for sentence in told)
    # The options beside it are used, and what it decides is neither judged nor clean.
    assert setting(report, "beta") == (0.04, "checkpoint-12/training_args.bin")
    assert {"RDG005", "RDG006", "RDA013"} <= {one.code for one in report.skipped}


def pickled_config(module, kind, state):
    """A pickle of an object of a class that is not here."""
    body = pickle.dumps(state, protocol=2)[2:-1]
    return b"\x80\x02c" + f"{module}\n{kind}\n".encode() + b")\x81" + body + b"b."


@pytest.mark.parametrize(
    ("module", "kind", "trainer"),
    [
        ("trl.trainer.grpo_config", "GRPOConfig", "trl"),
        ("open_r1.configs", "GRPOConfig", "trl"),
        ("trl.trainer.rloo_config", "RLOOConfig", "trl-rloo"),
        ("UnslothGRPOTrainer", "UnslothGRPOConfig", "unsloth"),
        ("swift.trainers.arguments", "GRPOConfig", None),
        ("trl.trainer.sft_config", "SFTConfig", None),
        ("transformers.training_args", "TrainingArguments", None),
    ],
)
def test_the_class_says_which_trainer(tmp_path, module, kind, trainer):
    path = archive(tmp_path / "training_args.bin", pickled_config(module, kind, {"beta": 0.5}))
    if trainer is None:
        with pytest.raises(InputError, match=f"the options of '{kind}'"):
            read_training_args(path)
    else:
        found = read_training_args(path)
        assert (found.trainer, found.values, found.origin) == (trainer, {"beta": 0.5}, "training_args.bin")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
def test_what_torch_writes_of_the_installed_trl(tmp_path, kind):
    trl = pytest.importorskip("trl")
    torch = pytest.importorskip("torch")
    config = getattr(trl, kind)(
        output_dir="out", beta=0.125, use_cpu=True, bf16=False, report_to=[], reward_weights=[1.0, 0.5]
    )
    torch.save(config, tmp_path / "training_args.bin")
    values = read_training_args(tmp_path / "training_args.bin").values
    for name in TRAINERS["trl" if kind == "GRPOConfig" else "trl-rloo"].options:
        if hasattr(config, name.name) and name.name != "router_aux_loss_coef":
            assert values[name.name] == getattr(config, name.name), name.name
    assert values["lr_scheduler_type"] == "linear", "an enumeration is its value"


@pytest.mark.parametrize("seed", range(4))
def test_damaged_pickles_are_read_or_refused_in_a_sentence(tmp_path, seed):
    with zipfile.ZipFile(ARGS) as file:
        whole = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    draw = random.Random(seed)
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 2, 50])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        with suppress(InputError):
            read_training_args(archive(tmp_path / "training_args.bin", bytes(content)))


class Runs:
    def __reduce__(self):
        return os.system, ("touch was-run",)


def deep(opening, closing, levels):
    return b"\x80\x02" + opening * levels + closing * levels + b"."


SHARED = b"\x80\x02)" + b"".join(b"q\x00h\x00h\x00\x86" for _ in range(100)) + b"K\x01s."
HOSTILE = {
    "runs": pickle.dumps(Runs(), 2),
    "runs, in another protocol": pickle.dumps(Runs()),
    "runs in a field": pickled_config("trl", "GRPOConfig", {"beta": 0.5})[:-2] + pickle.dumps(Runs(), 2)[2:],
    "deep lists": deep(b"]", b"a", 20_000),
    "deep tuples": b"\x80\x02)" + b"\x85" * 50_000 + b".",
    "many instructions": b"\x80\x02" + b"N0" * 400_000 + b".",
    "tuples that double, as a key": b"\x80\x02}" + SHARED[2:],
    "a text of 1 GB": b"\x80\x04\x8d" + struct.pack("<Q", 2**30) + b"x.",
    "bytes of 1 TB": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
    "a memo far out": b"\x80\x02Nr\xff\xff\xff\xff.",
    "marks below": b"\x80\x02" + b"N" * 50_000 + b"(t" * 25_000 + b".",
    "a mark that is not there": b"\x80\x02NNt.",
    "an empty stack": b"\x80\x02.",
    "an end that is not there": b"\x80\x02N",
    "nothing": b"",
    "noise": bytes(range(256)),
    "an extension": b"\x80\x02\x82\x01.",
    "a list in itself": pickled_config("trl", "X", {})[:-2] + b"]q\x01h\x01ab.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "training_args.bin", HOSTILE[name])
    with pytest.raises(InputError, match=r"^training_args.bin: [^\n]*$"):
        read_training_args(path)
    assert not (tmp_path / "was-run").exists()


def test_fields_that_are_no_options_are_passed_over(tmp_path):
    mine = {
        "map": OrderedDict(a=1),
        "more": defaultdict(list, {"a": [1]}),
        "set": {1},
        "bytes": b"x",
        "path": PurePath("x"),
    }
    path = archive(tmp_path / "training_args.bin", pickled_config("trl", "GRPOConfig", {**mine, "beta": 0.5}))
    assert read_training_args(path).values["beta"] == 0.5


def test_what_a_field_would_run_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"beta": 0.5, "seed": Runs(), "self": [[]], "long": "x" * 10_000}
    path = archive(tmp_path / "training_args.bin", pickled_config("trl", "GRPOConfig", state))
    # What is called with one argument stands for that argument, as an enumeration does.
    assert read_training_args(path).values == {"beta": 0.5, "seed": "touch was-run"}
    assert not (tmp_path / "was-run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["truncated", "a bit", "1 GB declared", "compressed", "no archive", "too large", "a folder"]
)
def test_a_hostile_archive_is_a_note_and_the_run_is_checked(tmp_path, output, name):
    file = output / "checkpoint-12" / "training_args.bin"
    if name == "truncated":
        file.write_bytes(ARGS.read_bytes()[:3000])
    elif name == "a bit":
        file.write_bytes(ARGS.read_bytes().replace(b"sequence_mask", b"sequence_musk"))
    elif name == "1 GB declared":
        archive(file, pickle.dumps(1), size=2**30)
    elif name == "compressed":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as body:
            body.writestr("archive/data.pkl", b"N" * 2**22)
    elif name == "no archive":
        file.write_bytes(pickle.dumps({"beta": 0.5}))
    elif name == "too large":
        file.write_bytes(bytes(2**20 + 1))
    else:
        file.unlink()
        file.mkdir()
    report, told = checked(output)
    assert count(report)
    if name != "a folder":
        assert sum("its options are not read" in sentence for sentence in told) == 1
        assert setting(report, "beta")[1].startswith("default of")


def test_options_of_another_trainer_are_not_used(tmp_path):
    shutil.copy(VERL, tmp_path / "verl.log")
    report, told = checked(tmp_path / "verl.log")
    assert report.trainer == "verl"
    text = (tmp_path / "verl.log").read_text()
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/", "actor/entropy"):
        text = text.replace(name, f"mine/{name}")
    for step in range(1, 13):
        text = text.replace(f"step:{step} - ", f"step:{step} - loss:0.5 - kl:0.1 - completions/mean_length:5.0 - ")
    (tmp_path / "other.log").write_text(text)
    report, told = checked(tmp_path / "other.log")
    assert report.trainer is None
    assert any("options of verl beside numbers of TRL: not used" in sentence for sentence in told)


def test_the_configuration_that_verl_prints():
    report, told = checked(VERL)
    assert told[-1] == "options of verl from printed config in verl.log"
    assert not [name for name, one in report.config.items() if one.assumed and name != "version"]
    stated = {name for name, one in report.config.items() if one.origin == "printed config in verl.log"}
    newest = parse_version(TRAINERS["verl"].newest)
    known = {option.name for option in TRAINERS["verl"].options if option.exists_at(newest)}
    # The trainer sets these while it runs, has no default for them, or they are of a part that this log leaves out.
    left_out = ("policy_loss.rollout_correction", "gdpo_reward", "data.", "multi_turn.enable")
    assert [name for name in known - stated if not any(part in name for part in left_out)] == []
    assert setting(report, "actor_rollout_ref.actor.kl_loss_coef")[0] == 0.02


def test_a_printed_configuration_that_is_not_whole(tmp_path):
    lines = VERL.read_text().splitlines(keepends=True)
    (tmp_path / "cut.log").write_text("".join(lines[:60] + lines[-12:]))
    report, told = checked(tmp_path / "cut.log")
    stated = read_printed(Source.of(str(tmp_path / "cut.log")))[0].values
    assert "actor_rollout_ref.actor.clip_ratio" in stated
    assert "algorithm.adv_estimator" not in stated, "it is behind the cut"
    assert told.count("printed config in cut.log is cut off: options behind the cut are not known") == 1
    assert report.input.steps == 12


def test_lines_of_others_inside_a_printed_configuration(tmp_path):
    lines = VERL.read_text().splitlines(keepends=True)
    others = ["INFO 01-01 10:00:00 [api.py:1] a server {started}\n", "Loading: 50%|#5 | 1/2 [00:01<00:01]\n"]
    (tmp_path / "log.txt").write_text("".join([*lines[:20], others[0], *lines[20:45], others[1], *lines[45:]]))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "log.txt").write_text("".join(lines))
    mixed, told = checked(tmp_path / "log.txt")
    assert mixed.config == checked(tmp_path / "plain" / "log.txt")[0].config
    assert not any("cut off" in sentence for sentence in told)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "body", ["{" * 100_000, "-" * 500_000, "'" + "\\'" * 300_000, "[" * 90_000 + "}}", "1+" * 90_000]
)
def test_a_hostile_printed_configuration(tmp_path, body):
    steps = "".join(line for line in VERL.read_text().splitlines(keepends=True) if "step:" in line)
    (tmp_path / "log.txt").write_text("{'actor_rollout_ref': {'actor': " + body + "\n}}\n" + steps)
    report, _ = checked(tmp_path / "log.txt")
    assert report.trainer is None
    assert report.input.steps == 12


def slime_arguments(**changed):
    """The table as ``_print_args`` of megatron/training/arguments.py prints it."""
    known = {option.name: option.default for option in TRAINERS["slime"].options}
    own = {"rollout_batch_size": 8, "tensor_model_parallel_size": 1, "a" * 50: None, "rank": 0}
    args = argparse.Namespace(**known | own | changed)
    with redirect_stdout(io.StringIO()) as printed:
        print("------------------------ arguments ------------------------", flush=True)
        lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in vars(args).items()]
        print("\n".join(sorted(lines, key=str.lower)))
        print("-------------------- end of arguments ---------------------", flush=True)
    return printed.getvalue()


@pytest.mark.parametrize("prefix", ["", "(MegatronTrainRayActor pid=77) "])
def test_the_arguments_that_megatron_prints_for_slime(tmp_path, prefix):
    table = slime_arguments(use_kl_loss=True, kl_loss_coef=1e-06, kl_loss_type="low_var_kl", eps_clip_high=0.28)
    lines = [prefix + line for line in table.splitlines()]
    lines.insert(9, "[2026-01-01] another process")
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n" + SLIME_STEPS)
    report, _ = checked(tmp_path / "job.log")
    origin = "printed config in job.log"
    assert {name for name, one in report.config.items() if one.origin == origin} == {
        option.name for option in TRAINERS["slime"].options
    }
    assert setting(report, "kl_loss_coef") == (1e-6, origin)
    assert setting(report, "eps_clip_c") == (None, origin)


@pytest.mark.parametrize(("groups", "shares"), [(8, [0.25, 0.0, 0.75]), (4, None), (None, None)])
def test_the_groups_that_slime_counts_by_their_reward_are_a_share_of_those_stated(tmp_path, groups, shares):
    """A reward that no group has is not counted; more groups than there are say that these are others."""
    counts = [{"0": 2}, {}, {"0.0": 5, "1": 1}]
    lines = [
        {"rollout/response_len/mean": 300.5} | {f"rollout/zero_std/count_{of}": count for of, count in found.items()}
        for found in counts
    ]
    text = "".join(f"[2026-01-01] rollout.py:7 - perf {step}: {line}\n" for step, line in enumerate(lines))
    (tmp_path / "job.log").write_text((slime_arguments(rollout_batch_size=groups) if groups else "") + text)
    report, _ = checked(tmp_path / "job.log")
    found = {vital.name: list(vital.series) for vital in report.vitals}
    assert found.get("zero_variance_share") == shares
    assert not any("count_" in note for note in report.notes)
    is_counted = any("2.667 groups have equal rewards a step, the mean of 3 steps" in note for note in report.notes)
    assert is_counted is (groups is None)


def test_a_table_of_arguments_without_an_end(tmp_path):
    table = slime_arguments().rpartition("-------------------- end")[0]
    (tmp_path / "job.log").write_text(table + SLIME_STEPS)
    report, told = checked(tmp_path / "job.log")
    assert setting(report, "eps_clip")[1] == "printed config in job.log"
    assert any("is cut off" in sentence for sentence in told)


def hydra(folder, text):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(text)


HYDRA = "actor_rollout_ref:\n  actor:\n    use_kl_loss: true\n    kl_loss_coef: 0.02\n    ppo_epochs: ${x.y}\n"


def test_the_configuration_of_hydra_beside_a_log(tmp_path):
    pytest.importorskip("yaml")
    steps = "".join(line for line in VERL.read_text().splitlines(keepends=True) if "step:" in line)
    (tmp_path / "run.log").write_text(steps)
    hydra(tmp_path / "outputs" / "2026-01-01" / "10-00-00", HYDRA + "algorithm:\n  adv_estimator: grpo\n")
    report, _ = checked(tmp_path / "run.log")
    origin = "outputs/2026-01-01/10-00-00/.hydra/config.yaml"
    assert setting(report, "actor_rollout_ref.actor.kl_loss_coef") == (0.02, origin)
    assert setting(report, "actor_rollout_ref.actor.ppo_epochs")[1].startswith("default of"), "an interpolation"
    hydra(tmp_path / "outputs" / "2026-01-01" / "11-00-00", HYDRA)
    assert checked(tmp_path / "run.log")[0].trainer is None, "nothing says which of two runs the log is of"


def test_the_configuration_of_a_wandb_run(tmp_path):
    yaml = pytest.importorskip("yaml")
    (tmp_path / "files").mkdir()
    (tmp_path / "run-abc.wandb").write_bytes(b":W&B" + bytes(100))
    values = {"beta": 0.04, "num_generations": 4, "scale_rewards": "group", "reward_weights": [1.0, 0.5]}
    config = {name: {"desc": None, "value": value} for name, value in values.items()}
    (tmp_path / "files" / "config.yaml").write_text(
        yaml.safe_dump({"wandb_version": 1, "_wandb": {"value": {}}} | config)
    )
    (tmp_path / "files" / "requirements.txt").write_text("torch==2.13.0\ntrl==1.14.0\n")
    for path in (tmp_path, tmp_path / "run-abc.wandb"):
        (found,) = stated_beside([str(path)], (), lambda sentence: None)
        assert (found.trainer, found.version, dict(found.values)) == ("trl", "1.14.0", values)
    model = {"architectures": ["X"], "max_length": 20, "num_return_sequences": 1, "seed": 5, "lr": 1e-6, "top_k": 3}
    (tmp_path / "files" / "config.yaml").write_text(
        yaml.safe_dump({name: {"desc": None, "value": value} for name, value in model.items()})
    )
    (found,) = stated_beside([str(tmp_path)], (), lambda sentence: None)
    assert (found.trainer, dict(found.values)) == (None, {"seed": 5, "lr": 1e-6, "top_k": 3})
    (tmp_path / "files" / "config.yaml").write_text("a: [")
    told = []
    assert not stated_beside([str(tmp_path)], (), told.append)
    assert len(told) == 1


def test_the_configuration_beside_the_summary_of_a_wandb_run(tmp_path):
    pytest.importorskip("yaml")
    summary = tmp_path / "wandb-summary.json"
    (tmp_path / "config.yaml").write_text("group_size:\n  value: 4\nlr:\n  value: 2e-07\nseed:\n  value: 3\n")
    summary.write_text('{"_step": 9, "reward": 0.5, "loss": 0.25}')
    for path in (tmp_path, summary):
        (found,) = stated_beside([str(path)], (), lambda sentence: None)
        assert (found.trainer, dict(found.values)) == (None, {"group_size": 4, "lr": "2e-07", "seed": 3})
    summary.unlink()
    assert not stated_beside([str(tmp_path)], (), lambda sentence: None), "a file of anybody"


@pytest.mark.parametrize(
    ("names", "trainer"),
    [
        ({"num_generations", "beta", "normalize_advantages"}, "trl-rloo"),
        ({"num_generations", "beta", "scale_rewards", "unsloth_num_chunks"}, "unsloth"),
        ({"rollout_batch_size", "n_samples_per_prompt", "advantage_estimator", "eps_clip", "use_miles_router"}, None),
        ({"beta", "num_generations"}, None),
    ],
)
def test_the_names_of_options_say_whose_they_are(names, trainer):
    assert trainer_of(dict.fromkeys(names)) == trainer


@pytest.mark.slow
def test_the_report_names_the_places():
    report, _ = checked(OUTPUT)
    assert "options that you did not give were read from README.md and checkpoint-12/training_args.bin" in report.notes
    every = [f"{name}={one.value}" for name, one in report.config.items() if name != "version"]
    report, _ = checked(OUTPUT, trainer="trl@1.16.0", settings=[each for each in every if "reward_weights" not in each])
    assert "options that you did not give were read from checkpoint-12/training_args.bin" in report.notes


def test_what_wandb_init_was_given_where_the_console_prints_no_options(tmp_path):
    run = tmp_path / "run-20260101_000000-aaaaaaaa"
    (run / "files").mkdir(parents=True)
    (run / "logs").mkdir()
    steps = "".join(
        f"step:{n} - actor/pg_loss:0.1 - critic/score/mean:0.{n} - actor/kl_loss:0.01\n" for n in range(1, 9)
    )
    (run / "files" / "output.log").write_text(steps)
    config = "{'data': {'train_batch_size': 8}, 'actor_rollout_ref': {'actor': {'clip_ratio': 0.17}}}"
    (run / "logs" / "debug.log").write_text(
        f"2026-01-01 INFO wandb.init called with sweep_config: {{}}\nconfig: {config}\n"
    )
    _, told = checked(run)
    assert "options of verl from printed config in debug.log" in told
    with open_any([str(run)], trainer=None, options=ConvertOptions(), tell=told.append, logs_alone=True) as opened:
        assert opened.metadata.config["actor_rollout_ref.actor.clip_ratio"] == 0.17


def test_the_configuration_that_nemo_rl_prints(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "Final config:\n{'checkpointing': {'enabled': True},\n 'grpo': {'num_generations_per_prompt': 16},\n"
        " 'loss_fn': {'ratio_clip_max': 0.28,\n             'ratio_clip_min': 0.2}}\n"
        "========================= Step 1/9 =========================\n  • Loss: 0.1\n  • Avg Reward: 0.5\n"
    )
    (stated,) = read_printed(Source.of(str(log)))
    assert (stated.trainer, stated.values["loss_fn.ratio_clip_max"]) == ("nemo-rl", 0.28)
